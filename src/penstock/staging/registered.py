"""Registration of a channel, compared with its declaration: asked before the first record is staged for it.

An application with 8 shards beside workers with 4 would stage into shards that nobody reads.  The question is asked on the
connection that stages, once a minute and channel in each process; of a channel that is not registered yet, because its
workers are deployed after the application, every five seconds.

The answer is a function's of the schema, which a role that may only insert can call.  Where an older schema does not have
it, or the role may not call it, nothing is checked.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Pool

from penstock.database.registration import Registration, check_declared
from penstock.database.statements import quote
from penstock.declaring.declarations import Channel

CHECK_EVERY_S = 60.0
"""Seconds for which an answer holds."""

CHECK_UNREGISTERED_EVERY_S = 5.0
"""Seconds for which it holds that a channel is not registered."""

Known = dict[tuple[str, Channel], float]
"""By schema and channel: until when the answer of one database holds."""

Question = tuple[str, dict[str, Any]]
"""A query and its parameters."""

Rows = Sequence[Sequence[Any]]

Check = Generator[Question, Rows, None]
"""Yields questions and takes their rows."""

_MAY_ASK = """
    SELECT has_function_privilege(p.oid, 'EXECUTE') AND has_schema_privilege(n.oid, 'USAGE')
    FROM pg_catalog.pg_proc p
    JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
    WHERE p.proname = 'check_channel' AND n.nspname = {schema}
"""

_engines: WeakKeyDictionary[Pool, Known] = WeakKeyDictionary()
_addresses: dict[tuple[object, ...], Known] = {}


def known_to_engine(connection: Connection) -> Known:
    """The answers of the database that a connection of SQLAlchemy is to."""
    return _engines.setdefault(connection.engine.pool, {})


def known_at(*address: object) -> Known:
    """The answers of the database with this host, port and name."""
    return _addresses.setdefault(address, {})


def check_channels(known: Known, schema: str, channels: Iterable[Channel], form: str = ":{}") -> Check:
    """Checks that channels are registered as they are declared, or not at all."""
    now = monotonic()
    for channel in channels:
        if now >= known.get((schema, channel), 0.0):
            found = yield from _ask(schema, channel, form)
            if found is not None:
                check_declared(channel, found)
            holds_s = CHECK_UNREGISTERED_EVERY_S if found is None else CHECK_EVERY_S
            known[schema, channel] = now + holds_s


def next_question(check: Check, rows: Rows) -> Question | None:
    """Gives a check the rows that it has asked for; returns what it asks next."""
    try:
        return check.send(rows)
    except StopIteration:
        return None


def run_check(check: Check, execute: Callable[[str, dict[str, Any]], Rows]) -> None:
    """Runs a check on a connection."""
    question = next(check, None)
    while question is not None:
        question = next_question(check, execute(*question))


def _ask(schema: str, channel: Channel, form: str) -> Generator[Question, Rows, Registration | None]:
    """The registered values; None if there are none, or they cannot be asked for."""
    may_ask = yield _MAY_ASK.format(schema=form.format("schema")), {"schema": schema}
    if not may_ask or not may_ask[0][0]:
        return None
    values = {"channel": channel.name, "kind": channel.kind, "shards": channel.shards}
    types = ("channel", "text"), ("kind", "text"), ("shards", "integer")
    arguments = ", ".join(f"CAST({form.format(name)} AS {kind})" for name, kind in types)
    found = yield f"SELECT * FROM {quote(schema)}.check_channel({arguments})", values
    return Registration(*found[0]) if found else None
