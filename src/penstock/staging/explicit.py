"""Staging by hand: what the application tells in its own words, in the session's transaction.

The session is flushed first, so that what it has changed is written, and its row locks are taken, before the record's
id is drawn.  The record is then inserted at once: a rollback takes it with it, also that of a savepoint.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from sqlalchemy.orm import Session, scoped_session

from penstock.database.tables import staged_records
from penstock.declarations import Channel, Ick, Log
from penstock.errors import InvalidRecord, NotAttached
from penstock.staging import nudge
from penstock.staging.rows import Row, insert, row
from penstock.staging.rules import attachments

if TYPE_CHECKING:  # importing it needs greenlet, which only those have who use it
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session


DIRTY, MEMBER = "dirty", "member"
"""Action and object of records that were marked by hand."""


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
    object: str,  # noqa: A002  the word of the record
    data: Any,
    headers: dict[str, Any] | None = None,
) -> None:
    """Stages one record in the session's transaction, after flushing the session.

    Args:
        session: A session that a pipeline is attached to.
        channel: Where the record goes: a channel of that pipeline.
        key: A str, int or UUID: records of one key keep their order.
        action: What happened, 1 to 255 characters: ``insert``, ``update``, ``delete`` or a word of your own.
        object: What it happened to, 1 to 255 characters.
        data: The payload: anything that JSON can say, and the types that ``penstock.staging.payload`` lists.
        headers: Beside the payload: trace ids, versions; at most 64 KB.

    Raises:
        InvalidRecord: A field is not acceptable; nothing was written.
        NotAttached: No pipeline with that channel is attached to the session.
        StagingError: Postgres refused the record.
    """
    checked = row(_log(channel), key, action, object, data, headers)
    _insert(session, channel, [checked])


def stage_many(
    session: Session | scoped_session[Any], channel: Channel, records: Iterable[Staging]
) -> int:
    """Stages records in their order, in one INSERT, after flushing the session; gives their number.

    Raises:
        InvalidRecord: A field is not acceptable; it names the record, and nothing was written.
        NotAttached: No pipeline with that channel is attached to the session.
        StagingError: Postgres refused the records.
    """
    _log(channel)
    rows = [
        row(
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
    _insert(session, channel, rows)
    return len(rows)


async def stage_async(  # noqa: PLR0913  the same
    session: "AsyncSession | async_scoped_session[Any]",
    channel: Channel,
    *,
    key: object,
    action: str,
    object: str,  # noqa: A002  the same
    data: Any,
    headers: dict[str, Any] | None = None,
) -> None:
    """``stage`` for an ``AsyncSession``.

    Raises:
        InvalidRecord: A field is not acceptable; nothing was written.
        NotAttached: No pipeline with that channel is attached to the session.
        StagingError: Postgres refused the record.
    """
    checked = row(_log(channel), key, action, object, data, headers)
    scoped: Any = session
    own: AsyncSession = scoped() if hasattr(session, "session_factory") else scoped
    await own.run_sync(_insert, channel, [checked])


def mark_dirty(
    session: Session | scoped_session[Any], channel: Ick, members: Iterable[object]
) -> int:
    """Marks members of an Ick dirty in the session's transaction, after flushing the session; gives their number.

    For changes that no rule sees: what SQL has changed, or everything at once when the copy is to be made anew.

    Args:
        session: A session that a pipeline is attached to.
        channel: An Ick of that pipeline.
        members: Each a str, int or UUID.

    Raises:
        InvalidRecord: A member is not acceptable; nothing was written.
        NotAttached: No pipeline with that channel is attached to the session.
        StagingError: Postgres refused the records.
    """
    if not isinstance(channel, Ick):
        raise InvalidRecord(
            "channel",
            f"is of type {type(channel).__name__}; it takes the Ick that the pipeline declares",
        )
    rows = [
        row(channel, member, DIRTY, MEMBER, {}, field=f"members[{number}].")
        for number, member in enumerate(members)
    ]
    _insert(session, channel, rows)
    return len(rows)


def _log(channel: Any) -> Channel:
    if isinstance(channel, Log):
        return channel
    if isinstance(channel, Ick):
        raise InvalidRecord(
            "channel", f"{channel.name} is an Ick, which keeps no payloads; call mark_dirty()"
        )
    raise InvalidRecord(
        "channel",
        f"is of type {type(channel).__name__}; it takes the Log that the pipeline declares",
    )


def _insert(session: Session | scoped_session[Any], channel: Channel, rows: list[Row]) -> None:
    if isinstance(session, scoped_session):
        session = session()
    if not isinstance(session, Session):
        raise NotAttached(
            f"stage() takes a Session, not {type(session).__name__}; for an AsyncSession: stage_async()"
        )
    found = attachments(session)
    for attachment in found:
        if attachment.pipeline.channels.get(channel.name) == channel:
            break
    else:
        raise NotAttached(_mend(channel, is_attached=bool(found)))
    schema = attachment.pipeline.schema
    session.flush()
    if not rows:
        return
    connection = session.connection(bind_arguments={"clause": staged_records(schema)})
    insert(connection, schema, rows)
    if attachment.nudge:
        nudge.remember(session, connection, schema)


def _mend(channel: Channel, *, is_attached: bool) -> str:
    if is_attached:
        return (
            f"the session's pipeline has no channel {channel.name} like this one; "
            "give it to Pipeline(channels=[…]) or pipeline.add(…)"
        )
    return (
        f"channel {channel.name}: the session knows no pipeline; call pipeline.attach(…) once with the "
        "sessionmaker, the Session class or this session"
    )
