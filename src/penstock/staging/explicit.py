"""Explicit staging: the application writes records itself, in the session's transaction.

The session is flushed first, so that its changes are written and their row locks taken before the record's id is
drawn.  The record is then inserted at once, so a rollback removes it, also a rollback to a savepoint.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from sqlalchemy.orm import Session, scoped_session

from penstock.database.tables import staged_records
from penstock.declarations import Channel, Ick, Log
from penstock.errors import InvalidRecord, NotAttached
from penstock.staging import nudge
from penstock.staging.rows import Row, insert_rows, make_row
from penstock.staging.rules import Attachment, find_attachments

if TYPE_CHECKING:  # the import needs greenlet, which only applications that use asyncio install
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session


DIRTY, MEMBER = "dirty", "member"
"""Action and object of records that ``mark_dirty`` stages."""

_ASYNC_CALLS = {
    "stage": "await stage_async(session, channel, …)",
    "stage_many": "await session.run_sync(stage_many, channel, records)",
    "mark_dirty": "await session.run_sync(mark_dirty, channel, members)",
}


class Staging(TypedDict):
    """One record for ``stage_many``: the arguments of ``stage``."""

    key: object
    action: str
    object: str
    data: Any
    headers: NotRequired[dict[str, Any] | None]


def stage(  # noqa: PLR0913  a record has this many parts
    session: Session | scoped_session[Any],
    channel: Channel,
    *,
    key: object,
    action: str,
    object: str,  # noqa: A002  the name of the record's field
    data: Any,
    headers: dict[str, Any] | None = None,
) -> None:
    """Stages one record in the session's transaction, after flushing the session.

    Args:
        session: A session with a pipeline attached.
        channel: The log the record goes to: a channel of that pipeline.
        key: A str, int or UUID.  Records of one key keep their order.
        action: What happened, 1 to 255 characters: ``insert``, ``update``, ``delete`` or a word of your own.
        object: What it happened to, 1 to 255 characters.
        data: The payload: any JSON value, and the types that ``penstock.staging.payload`` lists.
        headers: Metadata beside the payload, such as trace ids or versions; at most 64 KB.

    Raises:
        InvalidRecord: A field is invalid; nothing was written.
        NotAttached: No pipeline with that channel is attached to the session.
        StagingError: Postgres refused the record.
    """
    own = _require_session(session, "stage")
    row = make_row(_require_log(channel), key, action, object, data, headers)
    _insert(own, channel, [row])


def stage_many(
    session: Session | scoped_session[Any], channel: Channel, records: Iterable[Staging]
) -> int:
    """Stages records in order, in one INSERT, after flushing the session; returns their number.

    With an ``AsyncSession``: ``await session.run_sync(stage_many, channel, records)``.

    Raises:
        InvalidRecord: A field is invalid; the error names the record, and nothing was written.
        NotAttached: No pipeline with that channel is attached to the session.
        StagingError: Postgres refused the records.
    """
    own = _require_session(session, "stage_many")
    _require_log(channel)
    rows = [
        make_row(
            channel,
            record["key"],
            record["action"],
            record["object"],
            record["data"],
            record.get("headers"),
            field=f"records[{number}].",
        )
        for number, record in enumerate(records)
    ]
    _insert(own, channel, rows)
    return len(rows)


async def stage_async(  # noqa: PLR0913  as stage
    session: "AsyncSession | async_scoped_session[Any]",
    channel: Channel,
    *,
    key: object,
    action: str,
    object: str,  # noqa: A002  as stage
    data: Any,
    headers: dict[str, Any] | None = None,
) -> None:
    """``stage`` for an ``AsyncSession``.

    Raises:
        InvalidRecord: A field is invalid; nothing was written.
        NotAttached: No pipeline with that channel is attached to the session.
        StagingError: Postgres refused the record.
    """
    given: Any = session
    own: Any = given() if hasattr(given, "session_factory") else given
    if not hasattr(own, "run_sync"):
        raise NotAttached(
            f"stage_async() takes an AsyncSession, not {type(own).__name__}; "
            "with a Session: stage(session, channel, …)"
        )
    row = make_row(_require_log(channel), key, action, object, data, headers)
    await own.run_sync(_insert, channel, [row])


def mark_dirty(
    session: Session | scoped_session[Any], channel: Ick, members: Iterable[object]
) -> int:
    """Marks members of an Ick dirty in the session's transaction, after flushing the session; returns their number.

    For changes that no rule captures, such as SQL statements, and to rebuild the whole copy.
    With an ``AsyncSession``: ``await session.run_sync(mark_dirty, channel, members)``.

    Args:
        session: A session with a pipeline attached.
        channel: An Ick of that pipeline.
        members: Each a str, int or UUID.

    Raises:
        InvalidRecord: A member is invalid; nothing was written.
        NotAttached: No pipeline with that channel is attached to the session.
        StagingError: Postgres refused the records.
    """
    own = _require_session(session, "mark_dirty")
    if not isinstance(channel, Ick):
        raise InvalidRecord(
            "channel", f"is of type {type(channel).__name__}; mark_dirty() takes an Ick"
        )
    rows = [
        make_row(channel, member, DIRTY, MEMBER, {}, field=f"members[{number}].")
        for number, member in enumerate(members)
    ]
    _insert(own, channel, rows)
    return len(rows)


def _require_session(session: object, caller: str) -> Session:
    if isinstance(session, scoped_session):
        session = session()
    if isinstance(session, Session):
        return session
    raise NotAttached(
        f"{caller}() takes a Session, not {type(session).__name__}; "
        f"with an AsyncSession: {_ASYNC_CALLS[caller]}"
    )


def _require_log(channel: Any) -> Channel:
    if isinstance(channel, Log):
        return channel
    if isinstance(channel, Ick):
        raise InvalidRecord(
            "channel", f"{channel.name} is an Ick, which keeps no payloads; call mark_dirty()"
        )
    raise InvalidRecord("channel", f"is of type {type(channel).__name__}; stage() takes a Log")


def _insert(session: Session, channel: Channel, rows: list[Row]) -> None:
    attachment = _find_attachment(session, channel)
    schema = attachment.pipeline.scope.schema
    session.flush()
    if not rows:
        return
    connection = session.connection(bind_arguments={"clause": staged_records(schema)})
    insert_rows(connection, schema, rows)
    if attachment.nudge:
        nudge.note_staged(session, connection, schema)


def _find_attachment(session: Session, channel: Channel) -> Attachment:
    found = find_attachments(session)
    for attachment in found:
        if attachment.pipeline.channels.get(channel.name) == channel:
            return attachment
    if found:
        raise NotAttached(
            f"no pipeline attached to the session has this channel {channel.name}; "
            "add it with Pipeline(channels=[…]) or pipeline.add_channel(…)"
        )
    raise NotAttached(
        f"channel {channel.name}: no pipeline is attached to the session; call pipeline.attach(…) once with the "
        "sessionmaker, the Session class or this session"
    )
