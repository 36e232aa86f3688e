"""Explicit staging: the application writes records itself, in its own transaction.

A session is flushed first, so that its changes are written and their row locks taken before the
record's id is drawn.  The record is then inserted at once, so a rollback removes it, also a
rollback to a savepoint.  Without a session, on a connection, write the change first and then stage
it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Required, TypedDict, Unpack, overload
from uuid import uuid4

from sqlalchemy import Connection
from sqlalchemy.orm import Session, scoped_session

from penstock.database.tables import staged_records
from penstock.declaring.kinds import Channel, Ick, LogChannel, Queue
from penstock.errors import InvalidRecord, NotAttached
from penstock.observer import Staged
from penstock.records import Payload
from penstock.staging import nudge
from penstock.staging.driver_connections import (
    DriverConnection,
    insert_by_async_psycopg,
    insert_directly,
    is_async_driver,
)
from penstock.staging.messages import MessageOptions, make_message, refuse_options
from penstock.staging.payload import as_plain, label_text
from penstock.staging.payload_models import TypedPayload
from penstock.staging.rows import Insert, JobGroup, Row, insert_rows, make_row
from penstock.staging.rules import Attachment, Declarations, find_attachments

if TYPE_CHECKING:  # the import needs greenlet, which only applications that use asyncio install
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

    AsyncTarget = AsyncSession | async_scoped_session[Any] | AsyncConnection | DriverConnection

Target = Session | scoped_session[Any] | Connection | DriverConnection
"""A session, or a connection of SQLAlchemy, psycopg or Django."""

_ADD = "add it with Pipeline(channels=[…]) or pipeline.add_channel(…)"

DIRTY, MEMBER = "dirty", "member"
"""Action and object of records that ``mark_dirty`` stages."""


class _Named(TypedDict, total=False):
    action: Required[str]
    object: Required[str]
    headers: dict[str, Any] | None


class _Message(_Named, total=False):
    key: object
    data: Required[Any]


class Staging(_Message, MessageOptions, total=False):
    """One record for ``stage_many``: the arguments of ``stage``."""

    tenant: object


class _Rest(TypedDict):
    group: str | None
    then: tuple[Queue, Staging] | None
    pipeline: Declarations | None


class _LogRecord(_Named, Generic[Payload], total=False):
    key: Required[object]
    data: Required[Payload]
    pipeline: Declarations | None


class _QueueRecord(_Message, MessageOptions, total=False):
    tenant: Required[object]
    pipeline: Declarations | None


@overload
def stage(
    target: Target, *, to: LogChannel[Payload], **record: Unpack[_LogRecord[Payload]]
) -> None: ...


@overload
def stage(target: Target, *, to: Queue, **record: Unpack[_QueueRecord]) -> int: ...


def stage(  # noqa: PLR0913  a record has this many parts
    target: Target,
    *,
    to: LogChannel[Any] | Queue,
    key: object = None,
    action: str,
    object: str,  # noqa: A002  the name of the record's field
    data: Any,
    headers: dict[str, Any] | None = None,
    tenant: object = None,
    pipeline: Declarations | None = None,
    **options: Unpack[MessageOptions],
) -> int | None:
    """Stages one record in the transaction of a session or a connection.

    A session is flushed first.  For a queue, returns the job's id: the handler's ``job.id``.

    Args:
        target: A session with a pipeline attached; or a connection of SQLAlchemy, psycopg or
            Django, in a transaction.
        to: The log or the queue that the record goes to: a channel of that pipeline.
        key: A str, int or UUID, or a tuple of them.  Records of one key in a log keep their order.
            For a queue it is optional: within a tenant, keys take turns.
        action: What happened, 1 to 255 characters: ``insert``, ``update``, ``delete`` or a word of
            your own.
        object: What it happened to, 1 to 255 characters.
        data: The payload: any JSON value, the types that ``penstock.staging.payload`` lists, or a
            dataclass, msgspec Struct or Pydantic model.
        headers: Metadata beside the payload, such as trace ids or versions; at most 64 KB.
        tenant: For a queue, and only there: whose the message is, a str, int or UUID, or a tuple of
            them.
        pipeline: The pipeline, for a connection or a session to which it is not attached.
        **options: For a queue: ``due`` or ``delay``, ``deadline``, ``unique``, ``priority``; see
            ``MessageOptions``.

    Raises:
        InvalidRecord: A field is invalid; nothing was written.
        NotAttached: No pipeline with that channel is attached to the session, or none is given for
            the connection.
        ChannelMismatch: The channel is registered with another kind, or with another number of
            shards.
        ChannelRetired: The channel was retired.
        StagingError: Postgres refused the record, or the connection is in autocommit mode.
    """
    refuse_async(target, "stage")
    record = {
        "key": key,
        "action": action,
        "object": object,
        "data": data,
        "headers": headers,
        "tenant": tenant,
    }
    row = _make_record(to, {**record, **options}, partial(_find_model, target, pipeline))
    insertion = _Insertion(to, [row], pipeline, wants_ids=to.traits.has_jobs)
    return next(iter(_insert(target, insertion, "stage")), None)


def stage_many(
    target: Target,
    records: Iterable[Staging],
    *,
    to: Channel,
    group: str | None = None,
    then: tuple[Queue, Staging] | None = None,
    pipeline: Declarations | None = None,
) -> int:
    """Stages records in order, in one INSERT; returns their number.

    See ``stage`` for ``target`` and ``pipeline``.

    Args:
        target: As ``stage``.
        records: Each the arguments of ``stage``.
        to: The channel.
        group: For a queue: the jobs are a group of this name, which ``find_group`` takes.
        then: For a queue: a job that is staged, exactly once, when each of these is done, cancelled
            or a dead letter: its queue, and the arguments of ``stage``, as ``job`` of a worker
            makes them.  It has the group's name as its header ``group``.
        pipeline: As ``stage``.

    Raises:
        InvalidRecord: A field is invalid; the error names the record, and nothing was written.
        NotAttached: As ``stage``; so are ``ChannelMismatch``, ``ChannelRetired`` and
            ``StagingError``.
    """
    refuse_async(target, "stage_many")
    insertion = _make_insertion(target, to, records, group, then, pipeline)
    _insert(target, insertion, "stage_many")
    return len(insertion.rows)


def mark_dirty(
    target: Target, members: Iterable[object], *, to: Ick, pipeline: Declarations | None = None
) -> int:
    """Marks members of an Ick dirty in the transaction of a session or a connection.

    Returns their number.

    For changes that no rule captures, such as SQL statements, and to rebuild the whole copy.  A
    session is flushed first.

    Args:
        target: A session with a pipeline attached; or a connection of SQLAlchemy, psycopg or
            Django, in a transaction.
        members: Each a str, int or UUID, or a tuple of them.
        to: An Ick of that pipeline.
        pipeline: The pipeline, for a connection or a session to which it is not attached.

    Raises:
        InvalidRecord: A member is invalid; nothing was written.
        NotAttached: As ``stage``; so are ``ChannelMismatch``, ``ChannelRetired`` and
            ``StagingError``.
    """
    refuse_async(target, "mark_dirty")
    insertion = _Insertion(to, _make_marks(to, members), pipeline)
    _insert(target, insertion, "mark_dirty")
    return len(insertion.rows)


@overload
async def stage_async(
    target: "AsyncTarget", *, to: LogChannel[Payload], **record: Unpack[_LogRecord[Payload]]
) -> None: ...


@overload
async def stage_async(
    target: "AsyncTarget", *, to: Queue, **record: Unpack[_QueueRecord]
) -> int: ...


async def stage_async(  # noqa: PLR0913  as stage
    target: "AsyncTarget",
    *,
    to: LogChannel[Any] | Queue,
    key: object = None,
    action: str,
    object: str,  # noqa: A002  as stage
    data: Any,
    headers: dict[str, Any] | None = None,
    tenant: object = None,
    pipeline: Declarations | None = None,
    **options: Unpack[MessageOptions],
) -> int | None:
    """``stage`` for an ``AsyncSession``, or an ``AsyncConnection`` of SQLAlchemy or psycopg.

    Raises as it does.
    """
    record = {
        "key": key,
        "action": action,
        "object": object,
        "data": data,
        "headers": headers,
        "tenant": tenant,
    }
    row = _make_record(to, {**record, **options}, partial(_find_model, target, pipeline))
    insertion = _Insertion(to, [row], pipeline, wants_ids=to.traits.has_jobs)
    return next(iter(await _insert_async(target, insertion, "stage")), None)


async def stage_many_async(
    target: "AsyncTarget",
    records: Iterable[Staging],
    *,
    to: Channel,
    group: str | None = None,
    then: tuple[Queue, Staging] | None = None,
    pipeline: Declarations | None = None,
) -> int:
    """``stage_many`` for an ``AsyncSession``, or an ``AsyncConnection`` of SQLAlchemy or psycopg.

    Raises as it does.
    """
    insertion = _make_insertion(target, to, records, group, then, pipeline)
    await _insert_async(target, insertion, "stage_many")
    return len(insertion.rows)


def stage_jobs(
    target: Target, records: Iterable[Staging], *, to: Queue, **options: Unpack[_Rest]
) -> list[int]:
    """Stages jobs like ``stage_many``; returns their ids."""
    refuse_async(target, "stage_many")
    return _insert(
        target,
        replace(_make_insertion(target, to, records, **options), wants_ids=True),
        "stage_many",
    )


async def stage_jobs_async(
    target: "AsyncTarget", records: Iterable[Staging], *, to: Queue, **options: Unpack[_Rest]
) -> list[int]:
    """``stage_jobs`` for async targets."""
    insertion = replace(_make_insertion(target, to, records, **options), wants_ids=True)
    return await _insert_async(target, insertion, "stage_many")


async def mark_dirty_async(
    target: "AsyncTarget",
    members: Iterable[object],
    *,
    to: Ick,
    pipeline: Declarations | None = None,
) -> int:
    """``mark_dirty`` for an ``AsyncSession``, or an ``AsyncConnection`` of SQLAlchemy or psycopg.

    Raises as it does.
    """
    insertion = _Insertion(to, _make_marks(to, members), pipeline)
    await _insert_async(target, insertion, "mark_dirty")
    return len(insertion.rows)


MAX_MEMBERS = 100_000
"""Most jobs of a group."""


def _make_insertion(
    target: Any,
    channel: Channel,
    records: Iterable[Staging],
    group: str | None,
    then: tuple[Queue, Staging] | None,
    pipeline: Declarations | None,
) -> "_Insertion":
    model = _find_model(target, pipeline, channel)
    rows = [
        _make_record(channel, record, lambda _: model, f"records[{number}].")
        for number, record in enumerate(records)
    ]
    if group is None and then is None:
        return _Insertion(channel, rows, pipeline)
    if not channel.traits.has_jobs:
        raise InvalidRecord(
            "group", f"is for queues, and channel {channel.name} is a {channel.kind}"
        )
    if len(rows) > MAX_MEMBERS:
        raise InvalidRecord(
            "records",
            f"are {len(rows):,} jobs; a group takes {MAX_MEMBERS:,}: stage several groups",
        )
    name = uuid4().hex if group is None else label_text(group, "group")
    queue = following = None
    if then is not None:
        queue, job = then
        job = {**job, "headers": {**(job.get("headers") or {}), "group": name}}
        following = _make_record(queue, job, partial(_find_model, target, pipeline), "then.")
    members = JobGroup(name, channel.name, following)
    return _Insertion(channel, rows, pipeline, wants_ids=True, group=members, then=queue)


_FIELDS = frozenset({"key", "action", "object", "data", "headers"})


def _make_record(
    channel: Channel,
    record: Mapping[str, Any],
    find_model: Callable[[Channel], Any],
    field: str = "",
) -> Row:
    """Makes the row of a record from the arguments of ``stage``."""
    options = {name: value for name, value in record.items() if name not in _FIELDS}
    if options.get("tenant", "") is None:
        del options["tenant"]
    key = record.get("key")
    action = record["action"]
    object_ = record["object"]
    headers = record.get("headers")
    payload, model = record["data"], find_model(channel)
    data, typed = as_plain(payload, f"{field}data"), model and TypedPayload(model, payload)
    if isinstance(channel, Queue):
        return make_message(
            channel, action, object_, data, headers, options, key=key, field=field, typed=typed
        )
    log = _require_log(channel)
    refuse_options(log, options, field)
    return make_row(log, key, action, object_, data, headers, field, typed)


def _find_model(target: Any, pipeline: Declarations | None, channel: Any) -> Any:
    """Returns the payload model that a log, or the worker of a queue, declares.

    None if there is none.
    """
    if not isinstance(channel, Queue):
        return getattr(channel, "payload", None)
    if pipeline is not None:
        return pipeline.find_payload(channel)
    session = target() if hasattr(target, "session_factory") else target
    session = getattr(session, "sync_session", session)
    attached = find_attachments(session) if isinstance(session, Session) else ()
    models = (attachment.pipeline.find_payload(channel) for attachment in attached)
    return next(filter(None, models), None)


def _make_marks(channel: Any, members: Iterable[object]) -> list[Row]:
    if not isinstance(channel, Ick):
        raise InvalidRecord("to", f"is of type {type(channel).__name__}; mark_dirty() takes an Ick")
    return [
        make_row(channel, member, DIRTY, MEMBER, {}, field=f"members[{number}].")
        for number, member in enumerate(members)
    ]


def _require_log(channel: Any) -> Channel:
    if isinstance(channel, LogChannel) and not channel.sources:
        return channel
    if isinstance(channel, LogChannel):
        raise InvalidRecord(
            "to",
            f"{channel.name} is read from the sources {', '.join(channel.sources)}; an application "
            "stages into the log of its own source: Log(…, source=…)",
        )
    if isinstance(channel, Ick):
        raise InvalidRecord(
            "to", f"{channel.name} is an Ick, which keeps no payloads; call mark_dirty()"
        )
    raise InvalidRecord(
        "to", f"is of type {type(channel).__name__}; stage() takes a Log or a Queue"
    )


def refuse_async(target: object, caller: str) -> None:
    """Refuses an async session or connection, before its records are checked."""
    if hasattr(target, "run_sync") or is_async_driver(target):
        raise NotAttached(
            f"{caller}() takes a Session or a Connection, not {type(target).__name__}: await "
            f"{caller}_async(…)"
        )


@dataclass(frozen=True, slots=True)
class _Insertion:
    """Rows for a channel, and the caller's pipeline, if any."""

    channel: Channel
    rows: list[Row]
    pipeline: Declarations | None
    wants_ids: bool = False
    group: JobGroup | None = None
    then: Queue | None = None

    def into(self, pipeline: Declarations) -> Insert:
        channels = [self.channel] if self.then is None else [self.channel, self.then]
        for channel in channels:
            require_pipeline(channel, pipeline, "stage_many")
        return Insert(pipeline.scope.schema, self.rows, channels, self.wants_ids, self.group)

    def report_to(self, pipeline: Declarations) -> None:
        pipeline.observers(Staged(self.channel.name, len(self.rows)))


def _insert(target: Any, insertion: _Insertion, caller: str) -> list[int]:
    """Inserts the rows; returns their ids if ``wants_ids``."""
    if isinstance(target, scoped_session):
        target = target()
    if isinstance(target, Session):
        return _insert_in_session(target, insertion)
    owner = require_pipeline(insertion.channel, insertion.pipeline, caller)
    ids = insert_directly(target, insertion.into(owner), caller)
    insertion.report_to(owner)
    return ids


async def _insert_async(target: Any, insertion: _Insertion, caller: str) -> list[int]:
    if is_async_driver(target):
        owner = require_pipeline(insertion.channel, insertion.pipeline, caller)
        ids = await insert_by_async_psycopg(target, insertion.into(owner))
        insertion.report_to(owner)
        return ids
    inserted: list[int] = await resolve_async(target, caller).run_sync(_insert, insertion, caller)
    return inserted


def resolve_async(target: Any, caller: str) -> Any:
    """Returns SQLAlchemy's ``AsyncSession`` or ``AsyncConnection`` behind an async target."""
    resolved = target() if hasattr(target, "session_factory") else target
    if not hasattr(resolved, "run_sync"):
        raise NotAttached(
            f"{caller}_async() takes an AsyncSession or an AsyncConnection, not "
            f"{type(resolved).__name__}; with a Session or a Connection: {caller}(…)"
        )
    return resolved


def find_attachment(
    session: Session, channel: Channel, pipeline: Declarations | None
) -> Attachment:
    """Returns the session's attachment that has the channel; with ``pipeline``, that one's."""
    attached = find_attachments(session)
    if pipeline is not None:
        attachment = Attachment(require_pipeline(channel, pipeline, "stage"), nudge=False)
        # If it is attached, too, its attachment says whether a commit wakes the streamer.
        return next(
            (candidate for candidate in attached if candidate.pipeline is pipeline), attachment
        )
    for attachment in attached:
        if attachment.pipeline.channels.get(channel.name) == channel:
            return attachment
    raise NotAttached(
        f"no pipeline attached to the session has this channel {channel.name}; {_ADD}"
        if attached
        else f"channel {channel.name}: no pipeline is attached to the session; call "
        "pipeline.attach(…) once with the sessionmaker, the Session class or this session"
    )


def _insert_in_session(session: Session, insertion: _Insertion) -> list[int]:
    attachment = find_attachment(session, insertion.channel, insertion.pipeline)
    schema = attachment.pipeline.scope.schema
    session.flush()
    if not insertion.rows and insertion.group is None:
        return []
    connection = session.connection(bind_arguments={"clause": staged_records(schema)})
    ids = insert_rows(connection, insertion.into(attachment.pipeline))
    insertion.report_to(attachment.pipeline)
    nudge.note_staged(session, connection, schema, nudge=attachment.nudge)
    return ids


def require_pipeline(channel: Channel, pipeline: Declarations | None, caller: str) -> Declarations:
    """Returns ``pipeline`` if it has the channel; otherwise raises ``NotAttached``."""
    if pipeline is None:
        raise NotAttached(
            f"channel {channel.name}: a connection has no pipeline attached, and only a pipeline "
            f"names the schema; pass it: {caller}(connection, to=channel, …, pipeline=pipeline)"
        )
    if pipeline.channels.get(channel.name) != channel:
        raise NotAttached(f"the pipeline does not have this channel {channel.name}; {_ADD}")
    return pipeline
