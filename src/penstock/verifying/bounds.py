"""From where and up to where each shard is looked at, and what its ends say by themselves.

The order is what makes it sound: checkpoints, then the log's ends, then the journal's.  Each was behind the next one when
it was read, and the next one has only grown since.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any

import psycopg

from penstock.channels.log import last_offsets
from penstock.channels.routing import ick_shard_keys, log_keys
from penstock.channels.server import RedisClient, redis_errors
from penstock.database.connections import Connection, postgres_errors
from penstock.database.registry import registered_channels
from penstock.database.statements import statements
from penstock.errors import InvalidSetting
from penstock.journal import journal_tails
from penstock.records import BEGINNING, Offset, Shard, ShardName
from penstock.verifying.comparing import Stretch
from penstock.verifying.findings import Fault, Found, Stray

Start = Offset | str | None
"""Where to begin: an offset of every shard, a time that Postgres can read, or where the journal begins."""

PATIENCE_S = 10.0
"""How long a log may be behind a checkpoint before it is told, in seconds: a consumer that began with the tables stands
where the journal ends, and the publisher may still be on its way there, or be filling an Ick that somebody deleted."""

BEYOND = 1000
"""Most entries beyond the journal's end that are looked at."""

_LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class Bounds:
    """What is to be looked at, and what is wrong already.

    Attributes:
        stretches: For each shard the whole of what is to be looked at.
        unpublished: How many records the journal has and the log has not yet.
        found: What the ends say.
        strays: Entries beyond the journal's end.
    """

    stretches: Sequence[Stretch]
    unpublished: int
    found: list[Found] = field(default_factory=list)
    strays: list[Stray] = field(default_factory=list)


@dataclass(frozen=True)
class _Books:
    icks: set[ShardName]
    begins: dict[ShardName, int]
    checkpoints: dict[tuple[str, ShardName], int]


def look(
    connection: Connection,
    client: RedisClient,
    shards: Sequence[ShardName],
    start: Start,
    schema: str,
    namespace: str,
) -> Bounds:
    """Reads the ends of everything, in order.

    Raises:
        InvalidSetting: Postgres cannot read the time to start from.
        ServerUnavailable: Postgres or Redis does not answer.
        ForeignLog: The key of a shard holds another type.
    """
    first = _starts(connection, shards, start, schema)
    books = _books(connection, shards, schema)
    ends = _log_ends(client, shards, books, namespace)
    journal = journal_tails(connection, schema)
    stretches, unpublished = [], 0
    found = list(_checkpoints(books, ends, journal))
    strays: list[Stray] = []
    for shard in shards:
        end = journal.get(shard, BEGINNING)
        unpublished += max(0, end - ends[shard])
        if ends[shard] > end:
            beyond = list(_beyond(client, shard, end, ends[shard], namespace))
            strays += beyond
            if not beyond:
                text = f"the log has given offsets up to {ends[shard]}, the journal ends at {end}"
                found.append(Found(Fault.SURPLUS, "log", shard.channel, shard.shard, end + 1, 1, None, text))  # fmt: skip
        after = max(books.begins[shard], first.get(shard, end + 1)) - 1
        if after < end:
            # An Ick holds members, and has no entries to compare.
            published = BEGINNING if shard in books.icks else min(ends[shard], end)
            stretches.append(Stretch(shard, after, end, published))
    return Bounds(stretches, unpublished, found, strays)


def _named(shards: Sequence[ShardName]) -> dict[str, Any]:
    return {"channels": [s.channel for s in shards], "shards": [s.shard for s in shards]}


def _starts(
    connection: Connection, shards: Sequence[ShardName], start: Start, schema: str
) -> dict[ShardName, int]:
    """The first offset to look at; shards where there is none are left out."""
    if not isinstance(start, str):
        return dict.fromkeys(shards, start or 1)
    try:
        with postgres_errors("reading the journal"):
            rows = connection.execute(
                statements("penstock.verifying", schema)["first_since"],
                {**_named(shards), "since": start},
            ).fetchall()
    except psycopg.DataError as error:
        raise InvalidSetting(
            f"--from is {start!r}; it takes an offset, or a time that Postgres reads, such as 2026-03-01, "
            "'2026-03-01 02:00+00' or yesterday"
        ) from error
    return {ShardName(channel, Shard(shard)): first for channel, shard, first in rows}


def _books(connection: Connection, shards: Sequence[ShardName], schema: str) -> _Books:
    channels = registered_channels(connection, schema)
    icks = {s for s in shards if s.channel in channels and channels[s.channel].kind == "ick"}
    books = _Books(icks, {}, {})
    with postgres_errors("reading checkpoints"):
        rows = connection.execute(
            statements("penstock.verifying", schema)["books"], _named(shards)
        ).fetchall()
    for channel, number, begins, consumer, offset in rows:
        shard = ShardName(channel, Shard(number))
        books.begins[shard] = begins
        if consumer is not None:
            books.checkpoints[consumer, shard] = offset
    return books


def _log_ends(
    client: RedisClient, shards: Sequence[ShardName], books: _Books, namespace: str
) -> dict[ShardName, Offset]:
    """Where the log ends; waits a little for it to reach the checkpoints."""
    deadline = monotonic() + PATIENCE_S
    while True:
        ends = last_offsets(client, namespace, shards)
        for shard in _lost(client, books.icks, namespace):
            ends[shard] = BEGINNING  # where its position stood means nothing without it
        behind = any(at > ends[shard] for (_, shard), at in books.checkpoints.items())
        if not behind or monotonic() > deadline:
            return ends
        sleep(_LOOK_EVERY_S)


def _lost(client: RedisClient, icks: Collection[ShardName], namespace: str) -> Iterator[ShardName]:
    """Icks that are not there."""
    pipeline = client.pipeline(transaction=False)
    for shard in icks:
        pipeline.exists(ick_shard_keys(namespace, shard).ick.version)
    with redis_errors("looking at Icks"):
        replies = pipeline.execute()
    return (shard for shard, is_there in zip(icks, replies, strict=True) if not is_there)


def _checkpoints(
    books: _Books, ends: dict[ShardName, Offset], journal: dict[ShardName, Offset]
) -> Iterator[Found]:
    for (consumer, shard), at in books.checkpoints.items():
        end, begins = journal.get(shard, BEGINNING), books.begins[shard]
        if at > end:
            fault, text = Fault.AHEAD, f"its checkpoint is {at}, the journal ends at {end}"
            first, count = end + 1, at - end
        elif at > ends[shard]:
            fault = Fault.AHEAD
            ending = "Ick was told up to" if shard in books.icks else "log ends at"
            text = f"its checkpoint is {at}, the {ending} {ends[shard]}: Redis has lost records, or no streamer fills it"
            first, count = ends[shard] + 1, at - ends[shard]
        elif at + 1 < begins:
            fault = Fault.MISSING
            text = f"its checkpoint is {at}, the journal begins at {begins}: what is between was removed before it was passed"
            first, count = at + 1, begins - at - 1
        else:
            continue
        where = f"consumer {consumer}"
        yield Found(fault, where, shard.channel, shard.shard, first, count, None, text)


def _beyond(
    client: RedisClient, shard: ShardName, end: Offset, last: Offset, namespace: str
) -> Iterator[Stray]:
    """The first entries of the log that lie beyond the journal's end."""
    with redis_errors(f"reading {shard}"):
        entries = client.xrange(
            log_keys(namespace, shard).stream, f"{end + 1}-0", f"{last}", BEYOND
        )
    for entry_id, fields in entries:
        record = fields.get(b"id", b"")
        yield Stray(
            shard.channel,
            shard.shard,
            int(entry_id.partition(b"-")[0]),
            entry_id.decode(),
            int(record) if record.isdigit() else None,
            None,
        )
