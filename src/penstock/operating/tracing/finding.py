"""Traces and explains records, found by id, place or key."""

from penstock.channels.commands import RedisClient
from penstock.database.connections import Connection
from penstock.errors import PrivilegeMissing, Unknown
from penstock.operating.tracing.causes import explain_open, explain_story, explain_unseen
from penstock.operating.tracing.reading import StoryReader
from penstock.operating.tracing.report import Explanation, Story
from penstock.records import DEFAULT_SCOPE, Place, RecordId, Scope

MOST_OF_KEY = 10
"""Newest records of a key, by default."""

Wanted = RecordId | Place | str
"""A record by its number or its place, or the newest records of a key."""


def trace(
    connection: Connection,
    client: RedisClient,
    wanted: Wanted,
    *,
    channel: str | None = None,
    most: int = MOST_OF_KEY,
    scope: Scope = DEFAULT_SCOPE,
) -> tuple[Story, ...]:
    """The story of a record, or of the newest records of a key, oldest first.

    Args:
        connection: In autocommit mode.
        client: The Redis of the pipeline; if it does not answer, the stories say so.
        wanted: Its number (an int), its place, or a key (a str).
        channel: Only records of this channel.
        most: Most records of a key.
        scope: Of the pipeline.

    Raises:
        Unknown: No visible row, and no row of the journal, has it.
        ServerUnavailable: Postgres does not answer.
        PrivilegeMissing: The connection's role may not read all that is needed.
        HiddenRows: A policy of row-level security applies to what is read.
    """
    reader = StoryReader(connection, client, scope)
    stories = _read(reader, wanted, channel, most)
    if not stories:
        raise Unknown(f"nothing is known of {_describe(wanted)}. Why: penstock explain")
    return stories


def explain(
    connection: Connection,
    client: RedisClient,
    wanted: Wanted,
    *,
    channel: str | None = None,
    with_query: bool = False,
    scope: Scope = DEFAULT_SCOPE,
) -> Explanation:
    """Why a record is not further than it is: the first cause that holds.

    Of a key, the oldest of its newest records that has not taken effect everywhere is explained, or else the newest.

    Args:
        connection: In autocommit mode.
        client: The Redis of the pipeline.
        wanted: Its number (an int), its place, or a key (a str).
        channel: Only records of this channel.
        with_query: Whether open transactions are shown with their last statement, which may contain payloads.
        scope: Of the pipeline.

    Raises:
        Unknown: The journal names no record at the place.
        ServerUnavailable: Postgres does not answer.
        PrivilegeMissing: The connection's role may not read all that is needed.
        HiddenRows: A policy of row-level security applies to what is read.
    """
    reader = StoryReader(connection, client, scope)
    # Before the records: one that is committed in between is then found.
    writers = reader.read_writers(with_query=with_query)
    stories = _read(reader, wanted, channel, MOST_OF_KEY)
    situation = reader.read_situation()
    if stories:
        story = next((each for each in stories if not each.is_done), stories[-1])
        return explain_story(story, situation)
    if isinstance(wanted, Place):
        raise Unknown(f"the journal names no record at {wanted}; retention may have removed it")
    if isinstance(wanted, int):
        if situation.drawn is None:
            raise PrivilegeMissing(
                f"this role may not see which ids were drawn: GRANT SELECT ON SEQUENCE {scope.schema}.staged_records_id_seq TO it, or "
                f"connect as a member of {scope.schema}_viewer"
            )
        return explain_unseen(wanted, situation, writers)
    if writers:
        return explain_open(f"no committed record has {_describe(wanted)}", writers)
    return Explanation(
        "unknown key",
        f"no record has {_describe(wanted)}, and no transaction that could hold one is open: none was staged, its transaction was rolled "
        "back, or retention has removed it",
        "check the key as it is staged, such as '7', or '[7, \"north\"]' if it has several parts",
    )


def _read(reader: StoryReader, wanted: Wanted, channel: str | None, most: int) -> tuple[Story, ...]:
    if isinstance(wanted, Place):
        at = reader.find_id(wanted)
        ids = [] if at is None else [at]
    elif isinstance(wanted, int):
        ids = [wanted]
    else:
        ids = reader.find_ids(wanted, channel, most)
    found = (reader.read(each) for each in ids)
    return tuple(story for story in found if story and channel in {None, story.channel})


def _describe(wanted: Wanted) -> str:
    if isinstance(wanted, Place):
        return str(wanted)
    return f"record {wanted}" if isinstance(wanted, int) else f"the key {wanted!r}"
