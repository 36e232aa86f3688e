"""Staged records, and assertions about them.

The functions read ``staged_records`` through the connection they are given, so they see what the
current transaction has staged as well as what was committed before.  A record stays there after it
was published, until retention removes it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection, Select, Text, cast, select
from sqlalchemy.dialects.postgresql.base import PGDialect
from sqlalchemy.orm import Session, scoped_session

from penstock.database.tables import staged_records
from penstock.declaring.kinds import LARGEST_MAX_BYTES, Channel, Queue
from penstock.declaring.outcomes import RESERVED
from penstock.errors import InvalidRecord
from penstock.parsing import parse_json
from penstock.records import DEFAULT_SCOPE, Shard, StagedRecord
from penstock.staging.driver_connections import DriverConnection, read_directly
from penstock.staging.payload import as_plain, json_text, key_text
from penstock.staging.rules import find_attachments

SHOWN = 20
"""Most records that a failed assertion lists."""

Source = Session | scoped_session[Any] | Connection | DriverConnection


def staged(source: Source, *, schema: str | None = None) -> list[StagedRecord]:
    """Returns all staged records, in the order of staging; a session is flushed first.

    For an ``AsyncSession``: ``await session.run_sync(staged)``.

    Args:
        source: A session or a connection of the application: SQLAlchemy's, psycopg's or Django's.
        schema: Penstock's schema; by default that of the pipeline attached to the session, or
            ``penstock``.

    Raises:
        sqlalchemy.exc.DBAPIError: The tables are not there, or the role cannot read them.
    """
    schema = schema or _find_schema(source)
    table = staged_records(schema)
    columns = (table.c[name] for name in ("channel", "shard", "key", "action", "object"))
    query = select(*columns, cast(table.c.data, Text), cast(table.c.headers, Text)).order_by(
        table.c.id
    )
    return [
        StagedRecord(
            channel,
            Shard(shard),
            key,
            action,
            object_name,
            parse_json(data),
            headers and parse_json(headers),
        )
        for channel, shard, key, action, object_name, data, headers in _read(source, schema, query)
    ]


def assert_staged(  # noqa: PLR0913  a record has this many parts; all have defaults
    source: Source,
    *,
    to: Channel | str | None = None,
    key: object = None,
    tenant: object = None,
    action: str | None = None,
    object: str | None = None,  # noqa: A002  the word of the record
    data: Any = None,
    headers: Mapping[str, Any] | None = None,
    schema: str | None = None,
) -> StagedRecord:
    """Asserts that exactly one staged record matches; returns it.

    For an ``AsyncSession``: ``await session.run_sync(assert_staged, to="rides", key=7)``.

    Args:
        source: A session or a connection of the application.
        to: The channel or its name.
        key: The key, as ``stage`` takes it.
        tenant: Of a queue: the tenant, as ``stage`` takes it; ``key`` is then the key within the
            tenant.
        action: What happened.
        object: What it happened to.
        data: A part of the payload: a dict matches if each of its values matches, at any depth; any
            other value matches if it is equal, as it is or as staging writes it
            (``Decimal("1.50")`` matches ``"1.50"``).
        headers: A part of the headers, likewise.
        schema: See ``staged``.

    Raises:
        AssertionError: No record matches, or several do; the message lists what was staged, and
            what differs.
    """
    parts = {"action": action, "object": object, "data": as_plain(data, "data"), "headers": headers}
    expected = _wanted(to, key, tenant, parts)
    records = staged(source, schema=schema)
    matching = [record for record in records if not any(_differences(expected, record))]
    if len(matching) == 1:
        return matching[0]
    if not matching:
        raise AssertionError(
            f"no staged record has {_described(expected)}\n{_listed(records, expected)}"
        )
    raise AssertionError(
        f"{len(matching)} staged records have {_described(expected)}; assert_staged takes exactly "
        f"one: narrow it down, or count staged(…)\n{_listed(matching, {})}"
    )


def assert_not_staged(  # noqa: PLR0913  the same
    source: Source,
    *,
    to: Channel | str | None = None,
    key: object = None,
    tenant: object = None,
    action: str | None = None,
    object: str | None = None,  # noqa: A002  the same
    data: Any = None,
    headers: Mapping[str, Any] | None = None,
    schema: str | None = None,
) -> None:
    """Asserts that no staged record matches: see ``assert_staged`` for the arguments.

    Raises:
        AssertionError: A record matches; the message lists those that do.
    """
    parts = {"action": action, "object": object, "data": as_plain(data, "data"), "headers": headers}
    expected = _wanted(to, key, tenant, parts)
    records = staged(source, schema=schema)
    matching = [record for record in records if not any(_differences(expected, record))]
    if matching:
        raise AssertionError(
            f"expected no staged record with {_described(expected)}, found "
            f"{len(matching)}\n{_listed(matching, {})}"
        )


def _find_schema(source: Source) -> str:
    session = source() if isinstance(source, scoped_session) else source
    attached = find_attachments(session) if isinstance(session, Session) else []
    return attached[0].pipeline.scope.schema if attached else DEFAULT_SCOPE.schema


def _read(source: Source, schema: str, query: Select[Any]) -> Iterable[Sequence[Any]]:
    if isinstance(source, Connection):
        return source.execute(query)
    if isinstance(source, Session | scoped_session):
        source.flush()
        bind = {"clause": staged_records(schema)}
        return source.connection(bind_arguments=bind).execute(query)
    dialect = PGDialect()  # type: ignore[no-untyped-call]  # SQLAlchemy's has no types
    return read_directly(source, str(query.compile(dialect=dialect)))


def _wanted(
    channel: Channel | str | None, key: object, tenant: object, parts: dict[str, Any]
) -> dict[str, Any]:
    """Returns the fields that must match."""
    if tenant is not None or isinstance(channel, Queue):
        # A record of a queue has its tenant for a key, and its key in a header.
        if key is not None:
            header = {RESERVED: {"key": key_text(key)}}
            parts = {**parts, "headers": {**(parts["headers"] or {}), **header}}
        key = tenant
    fields = {
        "channel": channel if channel is None or isinstance(channel, str) else channel.name,
        "key": None if key is None else key_text(key),
        **parts,
    }
    return {field: value for field, value in fields.items() if value is not None}


def _differences(expected: Mapping[str, Any], record: StagedRecord) -> Iterator[str]:
    """Yields the paths at which the record does not match, such as ``data.fare``."""
    for field, value in expected.items():
        yield from _mismatches(value, getattr(record, field), field)


def _mismatches(expected: Any, actual: Any, path: str) -> Iterator[str]:
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        for name, value in expected.items():
            if name in actual:
                yield from _mismatches(value, actual[name], f"{path}.{name}")
            else:
                yield f"{path}.{name}"
    elif actual != expected and actual != _as_staged(expected):
        yield path


def _as_staged(value: Any) -> Any:
    """Returns a staged value as a consumer reads it; the value itself if it cannot be encoded."""
    try:
        return parse_json(json_text(value, "data", LARGEST_MAX_BYTES))
    except InvalidRecord:
        return value


def _described(expected: Mapping[str, Any]) -> str:
    return ", ".join(f"{field} {value!r}" for field, value in expected.items()) or "any content"


def _listed(records: list[StagedRecord], expected: Mapping[str, Any]) -> str:
    """Returns the records, a line each, those that match best first."""
    if not records:
        return "nothing was staged"
    differing = [(list(_differences(expected, record)), record) for record in records]
    differing.sort(key=lambda pair: len(pair[0]))
    lines = [f"staged: {len(records)}"]
    for differences, record in differing[:SHOWN]:
        reason = f"   differs in {', '.join(differences)}" if differences else ""
        lines.append(f"  {_line(record)}{reason}")
    if len(records) > SHOWN:
        lines.append(f"  … and {len(records) - SHOWN} more")
    return "\n".join(lines)


def _line(record: StagedRecord) -> str:
    headers = f" headers {record.headers!r}" if record.headers is not None else ""
    return (
        f"{record.channel} key {record.key!r}: {record.action} {record.object} "
        f"{record.data!r}{headers}"
    )


T = TypeVar("T")


def eventually(
    predicate: Callable[[], T], description: str, *, timeout_s: float = 30, interval_s: float = 0.02
) -> T:
    """Calls ``predicate`` until it returns a true value; returns that value.

    Args:
        predicate: Called at least once; its exceptions are not caught.
        description: What the test waits for, for the failure message:
            ``"the second consumer takes over shard 2"``.
        timeout_s: Seconds after which it fails.
        interval_s: Pause between two calls, in seconds.

    Raises:
        AssertionError: No value was true in time; the message has ``description`` and the last
            value.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        answer = predicate()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise AssertionError(
                f"not within {timeout_s:g} s: {description} (last answer: {answer!r})"
            )
        time.sleep(interval_s)
