"""``penstock tail``, ``trace`` and ``explain``: the records of a channel, and what became of one.

Payloads are data: tail prints them on stdout, the others not at all.  An Ick keeps no records: tail
prints the members that have waited longest; for a queue the jobs that are not done for the longest
time, each with what it waits for.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated

import typer

from penstock.channels.channel_kinds import get_kind
from penstock.channels.log.follower import Follower
from penstock.channels.log.streams import extents
from penstock.cli.command import (
    IsKey,
    Json,
    OfChannel,
    OnlyShard,
    RecordArgument,
    command,
    parse_position,
    parse_record,
)
from penstock.cli.connecting import Connections, open_connections
from penstock.cli.loops import Stop
from penstock.cli.render import say, show, show_json, with_payload
from penstock.database.registry import registered_channels
from penstock.display import format_count, format_seconds
from penstock.errors import InvalidSetting, Unknown
from penstock.journal.journal_reader import (
    journal_bounds,
    known_shards,
    offsets_since,
    shards_to_compare,
)
from penstock.journal.journal_records import read_log
from penstock.operating.channels import unknown_channel
from penstock.operating.tracing.causes import MAX_OF_KEY
from penstock.operating.tracing.causes import explain as find_cause
from penstock.operating.tracing.causes import trace as read_stories
from penstock.operating.tracing.story import Diagnosis, OpenWriter, ReaderProgress, Story
from penstock.records import (
    Offset,
    OffsetRange,
    Place,
    Record,
    Shard,
    ShardName,
    parse_moment,
    to_time,
)
from penstock.settings import Settings

BATCH = 1000
BLOCK_MS = 500
NEWEST = 10
"""Default number of records to print."""


@command()
def tail(
    settings: Settings,
    channel: str,
    shard: OnlyShard = None,
    start: Annotated[str | None, typer.Option("--from", metavar="OFFSET|PLACE")] = None,
    since: Annotated[str | None, typer.Option(metavar="TIME")] = None,
    key: str | None = None,
    follow: Annotated[bool, typer.Option("--follow")] = False,
    count: Annotated[int | None, typer.Option(min=0)] = None,
    json: Json = False,
) -> None:
    """Print the records of a log with their payloads, the oldest members of an Ick, or the
    unfinished messages of a queue.

    Args:
        channel: Name of the channel.
        start: Begin at this offset of each shard, or at a place: 'rides/2 offset 4118'.
        since: Only records staged at this time or later: 2026-11-23T14:05+01:00, in UTC if it
            has no zone, or 2h for two hours ago.
        key: Only records of this key.
        follow: Wait for new records until interrupted.
        count: Maximum number of records, members or messages; by default 10 (a log's
            newest), or all with --from or --since.
    """
    stop = Stop()
    position = None if start is None else parse_position(start)
    if isinstance(position, Place):
        if position.shard.channel != channel or shard not in {None, position.shard.shard}:
            raise InvalidSetting(
                f"--from {position} is not in {channel}, or not in the shard of --shard"
            )
        shard, position = position.shard.shard, position.offset
    if since is not None and position is not None:
        raise InvalidSetting("--since and --from exclude each other")
    moment = None if since is None else parse_moment(since)
    of_logs = follow or any(value is not None for value in (position, since, key))
    with open_connections(settings, "tail") as servers:
        shards = _find_shards(servers, channel, shard)
        declared = servers.pipeline.channels.get(channel) if servers.pipeline is not None else None
        registered = registered_channels(servers.store).get(channel) or declared
        if registered is not None and not (traits := registered.traits).keeps_records:
            if of_logs:
                raise InvalidSetting(
                    f"{channel} is {traits.title}: it keeps {traits.keeps}, not records, so "
                    "--from, --since, --key and --follow do "
                    "not apply. See penstock status --watch"
                )
            _show_items(
                servers, registered.kind, shards, NEWEST if count is None else count, json=json
            )
            return
        printer = _Printer(servers, key, json=json)
        starts: dict[ShardName, Offset] = {}
        if moment is not None:
            first_offsets = offsets_since(servers.store, shards, moment)
            starts = {shard: point.before for shard, point in first_offsets.items()}
            printer.since_us = next(iter(first_offsets.values())).at.timestamp() * 1_000_000
        elif position is not None:
            starts = dict.fromkeys(shards, Offset(max(0, position - 1)))
        printer.remaining = count if starts else NEWEST if count is None else count
        positions = printer.print_from(starts) if starts else printer.print_newest(shards)
        if follow:
            printer.remaining = printer.remaining if starts else None
            printer.follow(positions, stop)


def _find_shards(servers: Connections, channel: str, shard: int | None) -> list[ShardName]:
    registered = known_shards(
        servers.store, servers.pipeline.shard_names if servers.pipeline else ()
    )
    matching = [
        shard_name
        for shard_name in registered
        if shard_name.channel == channel and shard in (None, shard_name.shard)
    ]
    if not matching and shard is not None:
        # Postgres may have forgotten it: `penstock reset epoch` names such shards, and this command
        # reads them.
        written = shards_to_compare(servers.store, servers.client, on_unusable=lambda *_: None)
        matching = [
            shard_name for shard_name in written if shard_name == ShardName(channel, Shard(shard))
        ]
    if not matching:
        if any(shard_name.channel == channel for shard_name in registered):
            raise Unknown(f"channel {channel} has no shard {shard}")
        raise unknown_channel(servers.store, channel)
    return matching


def _show_items(
    servers: Connections, kind: str, shards: list[ShardName], limit: int, *, json: bool
) -> None:
    for item in get_kind(kind).items(servers.client, servers.store.scope.namespace, shards, limit):
        if json:
            show_json({"channel": item.shard.channel, "shard": item.shard.shard, **item.facts})
        else:
            show(f"{item.shard}  {item.text}")


@dataclass
class _Printer:
    """Prints records of a log that were staged at ``since_us`` or later.

    It prints at most ``remaining``; None sets no limit.
    """

    servers: Connections
    key: str | None
    json: bool
    since_us: float | None = None
    remaining: int | None = None

    def print_newest(self, shards: Sequence[ShardName]) -> dict[ShardName, Offset]:
        """Prints the newest records of all shards together; returns the end of each shard."""
        assert self.remaining is not None
        count, bounds = self.remaining, self._find_ends(shards)
        newest: list[Record] = []
        for shard, (oldest_offset, tail) in bounds.items():
            page = BATCH if self.key is not None else min(BATCH, count)
            offsets = OffsetRange(shard, oldest_offset, tail)
            records = self._read(offsets, page, backwards=True)
            newest += islice(self._select(records), count)
        newest.sort(key=lambda record: (record.staged_us, record.id))
        self._print(newest[-count:] if count else [])
        return {shard: tail for shard, (_, tail) in bounds.items()}

    def print_from(self, starts: Mapping[ShardName, Offset]) -> dict[ShardName, Offset]:
        """Prints each shard after an offset; returns the end of each shard."""
        positions = {}
        for shard, (oldest_offset, tail) in self._find_ends(list(starts)).items():
            first = max(Offset(starts[shard] + 1), oldest_offset)
            self._print(self._select(self._read(OffsetRange(shard, first, tail), BATCH)))
            positions[shard] = max(tail, Offset(first - 1))
        return positions

    def follow(self, positions: dict[ShardName, Offset], stop: Stop) -> None:
        """Prints new records until a stop signal."""
        follower = Follower(self.servers.client, self.servers.store.scope.namespace, count=BATCH)
        while not stop() and self.remaining != 0:
            for shard, records in follower.wait(positions, BLOCK_MS).items():
                self._print(self._select(records))
                positions[shard] = records[-1].offset

    def _read(
        self, offsets: OffsetRange, count: int, *, backwards: bool = False
    ) -> Iterator[Record]:
        servers = self.servers
        return read_log(servers.store, servers.client, offsets, count, backwards=backwards)

    def _select(self, records: Iterable[Record]) -> Iterator[Record]:
        for record in records:
            if self.key in {None, record.key} and (
                self.since_us is None or record.staged_us >= self.since_us
            ):
                yield record

    def _print(self, records: Iterable[Record]) -> None:
        for record in islice(records, self.remaining):
            show(format_record(record, json=self.json))
            self.remaining = None if self.remaining is None else self.remaining - 1

    def _find_ends(self, shards: Sequence[ShardName]) -> dict[ShardName, tuple[Offset, Offset]]:
        """Returns the oldest offset of each shard in Redis or the journal, and Redis' last one."""
        servers = self.servers
        extent = extents(servers.client, servers.store.scope.namespace, shards)
        bounds = {}
        for shard, (first, last) in journal_bounds(servers.store, shards).items():
            begin = extent[shard].first
            bounds[shard] = (min(first, begin) if first <= last else begin, extent[shard].tail)
        return bounds


def format_record(record: Record, *, json: bool) -> str:
    """Returns a record as a line for people, or as JSON."""
    staged = to_time(record.staged_us / 1_000_000)
    if not json:
        time = f"{staged:%Y-%m-%d %H:%M:%S}" if staged else str(record.staged_us)
        return (
            f"{record.place}  {time}  {record.action} {record.object} {record.key}  "
            f"{record.data_json}"
        )
    names = ("channel", "shard", "offset", "id", "key", "action", "object")
    facts = {name: getattr(record, name) for name in names}
    return with_payload({**facts, "staged_at": staged or str(record.staged_us)}, record)


@command()
def trace(
    settings: Settings,
    text: RecordArgument,
    is_key: IsKey = False,
    channel: OfChannel = None,
    count: Annotated[
        int, typer.Option(min=1, help="Maximum number of records of a key.")
    ] = MAX_OF_KEY,
    json: Json = False,
) -> None:
    """Show the path of a record: when it was staged, sequenced, published, and applied by each
    consumer.
    """
    subject = parse_record(text, is_key=is_key)
    with open_connections(settings, "trace") as servers:
        stories = read_stories(servers.store, servers.client, subject, channel=channel, limit=count)
    if json:
        show_json(stories)
    else:
        for number, story in enumerate(stories):
            show(*([""] if number else []), *format_story(story))
    _note_number(text, subject)


@command()
def explain(
    settings: Settings,
    text: RecordArgument,
    is_key: IsKey = False,
    channel: OfChannel = None,
    query: Annotated[
        bool,
        typer.Option(
            "--query",
            help="Show the last statement of each open transaction. It may contain payloads.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Explain why a record is not applied yet, and what to do. Exits with 0 if all its consumers
    have applied it, else with 1.
    """
    subject = parse_record(text, is_key=is_key)
    with open_connections(settings, "explain") as servers:
        diagnosis = find_cause(
            servers.store, servers.client, subject, channel=channel, with_query=query
        )
    if json:
        show_json(diagnosis)
    else:
        show(*_format_explanation(diagnosis))
    _note_number(text, subject)
    if not diagnosis.is_applied:
        raise typer.Exit(1)


def _note_number(text: str, subject: object) -> None:
    if isinstance(subject, int):
        say(f"{text} was taken as the number of a record; if it is a key: --key")


def _format_explanation(diagnosis: Diagnosis) -> Iterator[str]:
    yield f"{diagnosis.cause}: {diagnosis.text}"
    if diagnosis.fix is not None:
        yield f"fix: {diagnosis.fix}"
    for writer in diagnosis.writers:
        yield f"  {_format_writer(writer)}"
    if diagnosis.story is not None:
        yield ""
        yield from format_story(diagnosis.story)


def _format_writer(writer: OpenWriter) -> str:
    age = "age hidden" if writer.age_s is None else f"open for {format_seconds(writer.age_s)}"
    if writer.pid is None:
        return f"prepared transaction {writer.prepared!r} of {writer.user}: {age}"
    query = f": {' '.join(writer.query.split())}" if writer.query else ""
    return (
        f"process {writer.pid}, {writer.application or 'unnamed'}, {writer.user}, "
        f"{writer.state or 'state hidden'}, {age}{query}"
    )


def format_story(story: Story) -> Iterator[str]:
    """Yields a record's story as lines."""
    heading = "" if story.key is None else f", key {story.key}, {story.action} {story.object}"
    yield f"record {story.id} of {story.shard_name}{heading}"
    yield f"  staged      {_format_staged(story)}"
    if story.trace_id is not None:
        yield f"  trace       {story.trace_id}"
    if story.isolated is not None:
        yield f"  isolated    {story.isolated}"
    if story.offset is None:
        yield "  sequenced   no"
    else:
        tick = "" if story.tick is None else f", tick {story.tick}"
        time = f"{story.sequenced_at:%Y-%m-%d %H:%M:%S}: " if story.sequenced_at else ""
        yield f"  sequenced   {time}{story.place}{tick}"
        yield f"  published   {_format_published(story)}"
    if story.why is not None:
        yield f"  {story.state or '':11} {story.why}"
    for attempt in story.attempts:
        took_s = (attempt.ended_at - attempt.began_at).total_seconds()
        outcome = attempt.error or "done"
        yield (
            f"  {f'attempt {attempt.attempt}':11} {attempt.began_at:%Y-%m-%d %H:%M:%S}, "
            f"{took_s:.1f} s, by {attempt.worker}: {outcome}"
        )
    if story.progress is not None:
        yield f"  progress    {story.progress:.0%}"
    if story.result_at is not None:
        yield f"  result      {story.result_at:%Y-%m-%d %H:%M:%S}"
    for reader in story.readers:
        yield f"  {reader.state:11} {_format_reader(reader)}"
    if not story.readers:
        yield "  no reader   no consumer of the channel is registered"


def _format_staged(story: Story) -> str:
    time = f"{story.staged_at:%Y-%m-%d %H:%M:%S}" if story.staged_at else "at an unknown time"
    if story.transaction is None:
        return f"{time}; its row is gone"
    committed = f" (committed {story.committed_at:%H:%M:%S.%f})" if story.committed_at else ""
    return f"{time} in transaction {story.transaction}{committed}"


def _format_published(story: Story) -> str:
    if story.stopped is not None:
        return f"the streamer leaves the shard out: {story.stopped}"
    if story.traits.has_jobs and story.state in {"done", "cancelled"}:
        return "yes"  # Redis is not asked for what it has no more
    if story.published is None:
        return f"not known: {story.redis or 'no such channel is registered'}"
    if not story.is_published:
        refusal = story.refusal
        why = (
            f", and refuses writes: {refusal.reason}"
            if refusal is not None and refusal.is_certain
            else ""
        )
        return f"no: Redis has the shard up to offset {story.published}{why}"
    gone = story.first is not None and story.offset is not None and story.offset < story.first
    return "yes; evicted from Redis since" if gone else "yes"


def _format_reader(reader: ReaderProgress) -> str:
    when = "" if reader.at is None else f"{reader.at:%Y-%m-%d %H:%M:%S}"
    match reader.state:
        case "applied":
            return f"{reader.consumer}, by {when}"
        case "unread":
            return f"{reader.consumer} has no checkpoint in this shard"
        case "behind":
            return (
                f"{reader.consumer}, at offset {reader.checkpoint}, "
                f"{format_count(reader.ahead, 'record')} before it, since {when}"
            )
        case _:
            return f"{reader.consumer}, {when}: {reader.reason}"
