"""``penstock trace``: what became of a record, or of the newest records of a key.  It shows no payloads."""

from collections.abc import Iterator
from typing import Annotated

import typer

from penstock.cli.command import IsKey, Json, OfChannel, Wanted, command, parse_record
from penstock.cli.render import say, show, show_json
from penstock.cli.servers import open_connections
from penstock.operating.tracing import MOST_OF_KEY, Reader, Story
from penstock.operating.tracing import trace as read_stories
from penstock.settings import Settings


@command()
def trace(
    settings: Settings,
    what: Wanted,
    is_key: IsKey = False,
    channel: OfChannel = None,
    count: Annotated[int, typer.Option(min=1, help="Maximum number of records of a key.")] = MOST_OF_KEY,
    json: Json = False,
) -> None:
    """Show what became of a record: staged, sequenced, published, applied by whom and when."""
    wanted = parse_record(what, is_key=is_key)
    with open_connections(settings, "trace") as servers:
        stories = read_stories(
            servers.connection, servers.client, wanted, channel=channel, most=count, scope=servers.scope
        )
    if json:
        show_json(stories)
    else:
        for number, story in enumerate(stories):
            show(*([""] if number else []), *format_story(story))
    if isinstance(wanted, int):
        say(f"{what} was taken as the number of a record; if it is a key: --key")


def format_story(story: Story) -> Iterator[str]:
    """A record's story as lines."""
    named = "" if story.key is None else f", key {story.key}, {story.action} {story.object}"
    yield f"record {story.id} of {story.shard_name}{named}"
    yield f"  staged      {_format_staged(story)}"
    if story.isolated is not None:
        yield f"  isolated    {story.isolated}"
    if story.offset is None:
        yield "  sequenced   no"
    else:
        tick = "" if story.tick is None else f", tick {story.tick}"
        at = f"{story.sequenced_at:%Y-%m-%d %H:%M:%S}: " if story.sequenced_at else ""
        yield f"  sequenced   {at}{story.place}{tick}"
        yield f"  published   {_format_published(story)}"
    if story.why is not None:
        yield f"  {story.state or '':11} {story.why}"
    for reader in story.readers:
        yield f"  {reader.state:11} {_format_reader(reader)}"
    if not story.readers:
        yield "  no reader   no consumer of the channel is registered"


def _format_staged(story: Story) -> str:
    at = f"{story.staged_at:%Y-%m-%d %H:%M:%S}" if story.staged_at else "at an unknown time"
    if story.transaction is None:
        return f"{at}; its row is gone"
    committed = f" (committed {story.committed_at:%H:%M:%S.%f})" if story.committed_at else ""
    return f"{at} in transaction {story.transaction}{committed}"


def _format_published(story: Story) -> str:
    if story.stopped is not None:
        return f"the streamer leaves the shard out: {story.stopped}"
    if story.published is None:
        return f"not known: {story.redis or 'no such channel is registered'}"
    if not story.is_published:
        by = story.refusal
        why = f", and refuses writes: {by.reason}" if by is not None and by.is_certain else ""
        return f"no: Redis has the shard up to offset {story.published}{why}"
    gone = story.first is not None and story.offset is not None and story.offset < story.first
    return "yes; evicted from Redis since" if gone else "yes"


def _format_reader(reader: Reader) -> str:
    when = "" if reader.at is None else f"{reader.at:%Y-%m-%d %H:%M:%S}"
    match reader.state:
        case "applied":
            return f"{reader.consumer}, by {when}"
        case "unread":
            return f"{reader.consumer} has no checkpoint in this shard"
        case "behind":
            return f"{reader.consumer}, at offset {reader.checkpoint}, {reader.ahead:,} records before it, since {when}"
        case _:
            return f"{reader.consumer}, {when}: {reader.reason}"
