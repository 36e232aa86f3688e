"""Rows of ``staged_records``: checked one by one, inserted in one statement.

The statement has one parameter, a JSON text of all rows.  It is the same for one row and for a
thousand, so it is compiled once and prepared once.  The payload is encoded by ``payload`` and
inserted unchanged; the application's ``json_serializer`` is not used.  Nothing but the ids of jobs
is read back: for logs, the INSERT privilege is enough.

The channel's registration is first compared with its declaration: an application with 8 shards
beside workers with 4 would stage into shards that nobody reads.  Checked on the staging connection,
at most once a minute per channel; every five seconds until the channel is registered, because
workers may be deployed after the application.  A function of the schema answers, so that a role
with INSERT alone can ask.  A role that may not call it skips the check.
"""

import json
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Pool, text
from sqlalchemy.exc import DBAPIError

from penstock.database.registration import Registration, check_declared
from penstock.database.statements import int_array, quote
from penstock.declaring.kinds import Channel
from penstock.errors import StagingError
from penstock.staging.payload import (
    MAX_HEADERS_BYTES,
    headers_text,
    json_text,
    key_text,
    label_text,
)
from penstock.staging.payload_models import TypedPayload
from penstock.staging.trace_headers import with_trace

CHECK_EVERY_S = 60.0
"""Seconds for which an answer holds."""

CHECK_UNREGISTERED_EVERY_S = 5.0
"""Seconds for which it holds that a channel is not registered."""

Known = dict[tuple[str, Channel], float]
"""By schema and channel: until when the answer of one database holds."""

Question = tuple[str, dict[str, Any]]
"""A query and its parameters."""

Rows = Sequence[Sequence[Any]]

Steps = Generator[Question, Rows, list[int]]
"""Yields statements and takes their rows; the ids of the inserted rows, if they were asked for."""

_MAY_ASK = """
    SELECT has_function_privilege(p.oid, 'EXECUTE') AND has_schema_privilege(n.oid, 'USAGE')
    FROM pg_catalog.pg_proc p
    JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
    WHERE p.proname = 'check_channel' AND n.nspname = {schema}
"""

_engines: WeakKeyDictionary[Pool, Known] = WeakKeyDictionary()
_addresses: dict[tuple[object, ...], Known] = {}


def known_to_engine(connection: Connection) -> Known:
    """Returns the cached checks for the database of a SQLAlchemy connection."""
    return _engines.setdefault(connection.engine.pool, {})


def known_at(*address: object) -> Known:
    """Returns the cached checks for the database with this host, port and name."""
    return _addresses.setdefault(address, {})


def run_steps(steps: Steps, execute: Callable[[str, dict[str, Any]], Rows]) -> list[int]:
    """Runs the steps on a connection; returns their result."""
    try:
        question = next(steps)
        while True:
            question = steps.send(execute(*question))
    except StopIteration as end:
        ids: list[int] = end.value
        return ids


def _check_channels(
    checked_until: Known, schema: str, channels: Iterable[Channel], form: str
) -> Generator[Question, Rows, None]:
    """Checks that registered channels match their declarations."""
    now = monotonic()
    for channel in channels:
        if now >= checked_until.get((schema, channel), 0.0):
            registration = yield from _ask(schema, channel, form)
            if registration is not None:
                check_declared(channel, registration)
            holds_s = CHECK_UNREGISTERED_EVERY_S if registration is None else CHECK_EVERY_S
            checked_until[schema, channel] = now + holds_s


def _ask(
    schema: str, channel: Channel, form: str
) -> Generator[Question, Rows, Registration | None]:
    """Asks for the registration of a channel.

    Returns None if there is none, or the role may not ask.
    """
    may_ask = yield _MAY_ASK.format(schema=form.format("schema")), {"schema": schema}
    if not may_ask or not may_ask[0][0]:
        return None
    values = {"channel": channel.name, "kind": channel.kind, "shards": channel.shards}
    types = ("channel", "text"), ("kind", "text"), ("shards", "integer")
    arguments = ", ".join(f"CAST({form.format(name)} AS {kind})" for name, kind in types)
    rows = yield f"SELECT * FROM {quote(schema)}.check_channel({arguments})", values
    return Registration(*rows[0]) if rows else None


Row = str
"""A row as JSON: channel, shard, key, action, object, data, headers."""


@dataclass(frozen=True, slots=True)
class JobGroup:
    """A group of jobs whose members are the rows; ``following`` is staged when none remains."""

    name: str
    channel: str
    following: Row | None


@dataclass(frozen=True, slots=True)
class Insert:
    """Rows to insert; ``wants_ids`` returns their ids, which takes the privilege to read them."""

    schema: str
    rows: Sequence[Row]
    channels: Collection[Channel]
    wants_ids: bool = False
    group: JobGroup | None = None


MAX_STATEMENT_CHARACTERS = 16 * 1024 * 1024
"""Longer inserts are split into several statements, to bound the server's memory."""

_quote = json.JSONEncoder(ensure_ascii=False).encode

_MAX_CACHED_LABELS = 1000
_labels: dict[str, str] = {}
"""Checked labels as JSON: an application has few, and each record has three."""

_TRANSACTION_CLASSES = ("08", "25", "40", "53", "55", "57")
"""SQLSTATE classes of transaction and server errors, which applications already handle."""

AUTOCOMMIT = (
    "the connection is in AUTOCOMMIT: the change and its record would be committed separately, "
    "and one of them could be lost"
)

_POOLED = (
    "the connection goes through a pooler, and the driver prepares statements: with psycopg, "
    'connect_args={"prepare_threshold": None}'
)

_TABLES = "create or upgrade Penstock's tables: penstock init"

_HINTS = {
    "26000": _POOLED,
    "42P05": _POOLED,
    "23505": "another group has this name, which is free once its queue's keep has passed since "
    "its end: choose another name",
    "42P01": _TABLES,
    "42703": _TABLES,
    "42883": _TABLES,
    "3F000": _TABLES,
    "42501": "the role is not a producer: GRANT penstock_producer TO it; see penstock init --roles",
}


def make_row(  # noqa: PLR0913, PLR0917  a row has this many columns
    channel: Channel,
    key: object,
    action: object,
    object: object,  # noqa: A002  the name of the record's field
    data: Any,
    headers: object = None,
    field: str = "",
    typed: TypedPayload | None = None,
) -> Row:
    """Checks the fields of a record and returns them as a row.

    ``typed`` is the payload's model, if any.
    """
    checked_key = key_text(key, f"{field}key")
    checked = [
        _make_label(channel.name, "channel"),
        str(channel.shard_for(checked_key)),
        _quote(checked_key),
        _make_label(action, f"{field}action"),
        _make_label(object, f"{field}object"),
        json_text(data, f"{field}data", channel.max_bytes),
    ]
    if typed is None and (model := getattr(channel, "payload", None)) is not None:
        typed = TypedPayload(model)
    if typed is not None:
        typed.check(checked[-1], field)
    written = headers_text(headers, f"{field}headers")
    if channel.traits.has_payloads:
        written = with_trace(written, headers, MAX_HEADERS_BYTES)
    if written is not None:
        checked.append(written)
    return f"[{','.join(checked)}]"


def _make_label(value: object, field: str) -> str:
    label = _labels.get(value) if type(value) is str else None
    if label is None:
        checked = label_text(value, field)
        label = _quote(checked)
        if len(_labels) < _MAX_CACHED_LABELS:
            _labels[checked] = label
    return label


def insert_steps(insert: Insert, checked_until: Known, form: str = ":{}") -> Steps:
    """Inserts rows in order, in one statement for each 16 million characters."""
    yield from _check_channels(checked_until, insert.schema, insert.channels, form)
    ids: list[int] = []
    sql = insert_sql(insert.schema, form.format("rows"), returning=insert.wants_ids)
    for chunk in split_rows(insert.rows):
        ids += [id_ for (id_,) in (yield sql, {"rows": chunk})]
    if insert.group is not None:
        group = insert.group
        values = {"name": group.name, "channel": group.channel, "following": group.following}
        yield (
            _group_sql(insert.schema, form),
            {**values, "members": int_array(ids), "waits_for": str(max(ids, default=0))},
        )
    return ids


def insert_rows(connection: Connection, insert: Insert) -> list[int]:
    """Inserts the rows; returns their ids if ``wants_ids``."""
    if _is_autocommit(connection):
        raise StagingError(
            f"{AUTOCOMMIT}; use a connection or an engine with another isolation level"
        )

    def execute(sql: str, values: dict[str, Any]) -> Rows:
        result = connection.execute(_make_statement(sql), values)
        return result.all() if result.returns_rows else ()

    failure: Exception | None
    try:
        return run_steps(insert_steps(insert, known_to_engine(connection)), execute)
    except DBAPIError as error:
        failure = None if error.connection_invalidated else make_refusal(error)
        if failure is None:
            error.hide_parameters = True
            failure = error
    # Raised here, outside ``except``, so that the error with the parameters is not its context.
    raise failure


def make_refusal(error: BaseException, what: str = "the staged records") -> StagingError | None:
    """Makes the error for a statement that Postgres refused.

    None if the transaction or the connection failed.
    """
    cause = _driver_error(error)
    state = get_sqlstate(cause)
    if not state or state.startswith(_TRANSACTION_CLASSES):
        return None
    hint = _HINTS.get(state, "see the server's log")
    return StagingError(
        f"Postgres refused {what} ({type(cause).__name__}, SQLSTATE {state}): {hint}"
    )


@contextmanager
def refusals_explained() -> Iterator[None]:
    """Names the remedy, where one is known, for an error of a query about jobs."""
    try:
        yield
    except Exception as error:
        refusal = make_refusal(error, "the query")
        if refusal is None or get_sqlstate(_driver_error(error)) not in _HINTS:
            raise
        raise refusal from None


def _driver_error(error: BaseException) -> BaseException:
    """Returns the driver's error, which SQLAlchemy has as ``orig``, and Django as the cause."""
    return getattr(error, "orig", None) or (not get_sqlstate(error) and error.__cause__) or error


_make_statement = cache(text)


@cache
def insert_sql(schema: str, rows: str, *, returning: bool = False) -> str:
    """Makes the INSERT.  ``jsonb`` keeps numbers exact.

    ``WITH ORDINALITY`` draws the ids in the rows' order.
    """
    return f"""
        INSERT INTO {quote(schema)}.staged_records (channel, shard, key, action, object, data, headers)
        SELECT r.v ->> 0, CAST(r.v ->> 1 AS integer), r.v ->> 2, r.v ->> 3, r.v ->> 4, r.v -> 5, r.v -> 6
        FROM jsonb_array_elements(CAST({rows} AS jsonb)) WITH ORDINALITY AS r (v, n)
        ORDER BY r.n
        {"RETURNING id" if returning else ""}
    """  # noqa: E501  SQL


def _group_sql(schema: str, form: str) -> str:
    """Makes the INSERT of a group; sends all values as text, which every driver can."""
    types = {
        "name": "text",
        "channel": "text",
        "members": "bigint[]",
        "waits_for": "bigint",
        "following": "jsonb",
    }
    values = ", ".join(
        f"CAST(CAST({form.format(name)} AS text) AS {kind})" for name, kind in types.items()
    )
    return f"INSERT INTO {quote(schema)}.job_groups ({', '.join(types)}) VALUES ({values})"


def split_rows(rows: Sequence[Row]) -> Iterator[str]:
    """Joins rows to arrays of JSON, each for one statement."""
    start = size = 0
    for number, row in enumerate(rows):
        if size and size + len(row) > MAX_STATEMENT_CHARACTERS:
            yield f"[{','.join(rows[start:number])}]"
            start, size = number, 0
        size += len(row)
    if rows:
        yield f"[{','.join(rows[start:])}]"


def _is_autocommit(connection: Connection) -> bool:
    level = connection.get_execution_options().get("isolation_level")
    if level is None:  # set by create_engine(isolation_level=…)
        level = getattr(connection.dialect, "_on_connect_isolation_level", None)
    return level == "AUTOCOMMIT"


def get_sqlstate(error: BaseException | None) -> str:
    """Returns the SQLSTATE: ``sqlstate`` of psycopg and asyncpg, ``pgcode`` of psycopg2."""
    states = (getattr(error, name, None) for name in ("sqlstate", "pgcode"))
    return next((state for state in states if isinstance(state, str)), "")
