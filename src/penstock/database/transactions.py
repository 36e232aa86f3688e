"""Settings that each of our transactions sets itself, whatever role, database or session have set.

A setting of a session would not survive a pooler in transaction mode, and would reach other clients
of the pooler.  So every setting is local to a transaction, and is sent with its first statement, in
the same round trip.

    search_path    Our statements find nothing but Postgres' own functions, operators and types.  A
                   role that may create functions in a schema of our search_path could otherwise
                   have them run with our rights: Postgres prefers a function of exactly the
                   arguments' types to its own more general one.  Our tables are always named with
                   their schema.
    jit            Off: compiling a statement of ours takes a hundred times as long as running it,
                   and many servers compile what an estimate, most often a wrong one of a new table,
                   calls expensive.
    row_security   A policy that hides rows from us makes the statement fail.  Hidden records would
                   be lost silently.
    timeouts       Ours instead of the role's or the database's.  One that is shorter than a batch
                   takes would fail it for ever; without any, a suspended process would keep its
                   locks.

In a handler's transaction the handler keeps the settings of its role: ``guarded`` sets ours for one
statement, and restores what was there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits, in seconds, of a caller that must not wait as long as a worker may."""

    # until a server has accepted a connection; of Postgres 2 at least, as for libpq
    connect_s: int = 2
    reply_s: float = 1.0  # until Redis has replied
    statement_s: float = 1.0  # longest duration of a statement of ours in Postgres
    lock_s: float = 0.05  # until a statement of ours has a lock
    handler_s: float = 5.0  # longest duration of a statement of a handler
    handler_lock_s: float = 0.5  # until a statement of a handler has a lock


SUSPENDED_S = 60
"""Seconds after which Postgres ends the transaction of a suspended process of ours."""

LOCK_TIMEOUT_S = 60
"""Longest wait of a statement of ours for a lock, in seconds; then it is tried again later."""

REPLY_TIMEOUT_S = 300.0
"""Longest duration of a statement of ours, in seconds.  The client gives up after the same time of
silence: keepalives do not notice a pooler that has hung."""

WORKER_SILENCE_S = 60.0
"""Longest silence of Postgres, in seconds, after a statement of a worker: only a streamer's first
tick takes as long."""

HANDLER_TIMEOUT_S = 1800.0
"""Longest duration, and silence, of a handler's statement, in seconds: it may be long, or wait for
a lock."""

_SEARCH_PATH = "pg_catalog, pg_temp"
_GUARDED = {"search_path": _SEARCH_PATH, "row_security": "off", "jit": "off"}
_SET = "pg_catalog.set_config('{}', {}, true)"
_TRANSACTION_TIMEOUT_SINCE = 170000

Settings = Mapping[str, str]
"""Names and values of settings."""


@cache
def own_settings(server_version: int, limits: Timeouts | None = None) -> Settings:
    """Returns the settings of a transaction that runs our statements."""
    statement_s, lock_s = (
        (limits.statement_s, limits.lock_s) if limits else (REPLY_TIMEOUT_S, LOCK_TIMEOUT_S)
    )
    return {**_GUARDED, **_timeouts(server_version, statement_s, lock_s, SUSPENDED_S)}


@cache
def table_settings(server_version: int) -> Settings:
    """Returns the settings of a transaction that reads the application's tables.

    It finds them by the role's search_path.  It may take long and wait long between two statements,
    and holds no lock that others wait for.
    """
    return {"row_security": "off", **_timeouts(server_version, 0, LOCK_TIMEOUT_S, 0)}


@cache
def handler_settings(
    server_version: int, idle_s: float, limits: Timeouts | None = None
) -> Settings:
    """Returns the settings of a transaction that calls a handler.

    They are timeouts, which a handler may change by ``SET LOCAL``.
    """
    statement_s, lock_s = (
        (limits.handler_s, limits.handler_lock_s) if limits else (HANDLER_TIMEOUT_S, 0)
    )
    return _timeouts(server_version, statement_s, lock_s, idle_s)


def _timeouts(
    server_version: int, statement_s: float, lock_s: float, idle_s: float
) -> dict[str, str]:
    """Returns the timeouts, in seconds; 0 is none.

    A transaction as a whole is not limited: its statements and pauses are.
    """
    seconds = {
        "statement_timeout": statement_s,
        "lock_timeout": lock_s,
        "idle_in_transaction_session_timeout": idle_s,
    }
    if server_version >= _TRANSACTION_TIMEOUT_SINCE:
        seconds["transaction_timeout"] = 0
    return {name: f"{round(value * 1000)}ms" for name, value in seconds.items()}


def set_local(settings: Settings) -> tuple[bytes, ...]:
    """Returns statements for the beginning of a transaction.

    They take no snapshot, so it can still import one.
    """
    literals = {
        name: value if name == "search_path" else f"'{value}'" for name, value in settings.items()
    }
    return tuple(f"SET LOCAL {name} TO {literal}".encode() for name, literal in literals.items())


def set_local_in_one(settings: Settings) -> bytes:
    """Returns the settings as one statement, which takes a snapshot and returns a row."""
    calls = (_SET.format(name, f"'{value}'") for name, value in settings.items())
    return f"SELECT {', '.join(calls)}".encode()


def guarded(settings: Settings) -> tuple[bytes, bytes]:
    """Returns the statements before and after one of ours in another's transaction."""
    get = "pg_catalog.current_setting('{}')".format
    saves = [_SET.format(f"penstock.{name}", get(name)) for name in _GUARDED]
    sets = [_SET.format(name, f"'{value}'") for name, value in {**_GUARDED, **settings}.items()]
    restores = [_SET.format(name, get(f"penstock.{name}")) for name in _GUARDED]
    return f"SELECT {', '.join(saves + sets)}".encode(), f"SELECT {', '.join(restores)}".encode()


ROLES_SEARCH_PATH = b"SET LOCAL search_path TO DEFAULT"
"""Names are looked up as the role is set up, from here to the end of the transaction or to
``OUR_SEARCH_PATH``."""

OUR_SEARCH_PATH = f"SET LOCAL search_path TO {_SEARCH_PATH}".encode()
"""Names are looked up in Postgres' own catalog again."""


_SETTINGS = {
    "TimeZone": "UTC",
    "DateStyle": "ISO, YMD",
    "IntervalStyle": "iso_8601",
    "extra_float_digits": "1",  # the shortest text that reads back as the same number
    "bytea_output": "hex",
    "lc_monetary": "C",
    "array_nulls": "on",  # otherwise NULL in an array is read as a word
    "xmloption": "content",
}

FIX_FORMATS = set_local_in_one(_SETTINGS)
"""Statement that fixes the formats, for the current transaction."""
