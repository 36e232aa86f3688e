"""Appending to the log: compare, then append; any publisher may repeat it.

Also makes room within the memory that a log may take.  Any publisher may repeat it.  And room for
it in the memory that a log may take.
"""

from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import Any

from penstock.batches.entry import Entry
from penstock.batches.record_batch import Records
from penstock.channels.batch_outcomes import (
    Appended,
    Batch,
    Behind,
    Foreign,
    Reply,
    Unusable,
    make_foreign,
    parse_reply,
)
from penstock.channels.commands import RedisClient
from penstock.channels.log.stream_entries import parse_entries
from penstock.channels.routing import log_keys
from penstock.channels.scripts import Argument, Call, CallsAhead, script
from penstock.channels.server import REDIS_ERRORS, redis_errors, translate_error
from penstock.errors import ForeignLog
from penstock.records import Offset, ShardName

AHEAD = 1
"""Number of batches without a reply while the next one is sent."""


def append_together(
    client: RedisClient, namespace: str, batches: Sequence[Batch]
) -> list[tuple[Batch, Reply]]:
    """Appends to several shards in one round trip; safe to repeat.

    A consumer that waits for several of these shards is woken once and finds all batches.  What a
    log has of a batch already is left out, in a second round trip: another publisher was faster, or
    a reply was lost.  Raises ``ServerUnavailable`` or ``AppendRefused``.
    """
    calls = [_call(namespace, batch) for batch in batches]
    with redis_errors(f"appending to {', '.join(str(batch.shard) for batch in batches)}"):
        replies = script("log/append").call_together(client, calls)
    outcomes = [
        (batch, _parse(reply, batch)) for batch, reply in zip(batches, replies, strict=True)
    ]
    if not (rests := _find_rests(outcomes)):
        return outcomes
    sent = append_together(client, namespace, [*rests.values()])
    later = dict(zip(rests, (reply for _, reply in sent), strict=True))
    return [(batch, later.get(place, reply)) for place, (batch, reply) in enumerate(outcomes)]


def _find_rests(outcomes: Sequence[tuple[Batch, Reply]]) -> dict[int, Batch]:
    """Returns batches to send again, by place: the part beyond a log's end, and all after it."""
    rests: dict[int, Batch] = {}
    begun: set[ShardName] = set()
    for place, (batch, reply) in enumerate(outcomes):
        if not isinstance(reply, Behind):
            continue
        if reply.tail >= batch.first:
            rests[place] = batch.after(reply.tail)
            begun.add(batch.shard)
        elif batch.shard in begun:
            rests[place] = batch
    return rests


def append_ahead(
    client: RedisClient, namespace: str, batches: Iterable[Batch]
) -> Generator[tuple[Batch, Reply], None, None]:
    """Appends batches, sending each before the reply to the previous one is read; safe to repeat.

    Redis appends one batch while the next is being prepared.  Each call compares the tail itself,
    so a batch that follows a refused one is refused too.  A caller that does not take all replies
    closes the generator.  Raises ``ServerUnavailable`` or ``AppendRefused``.
    """
    sent: deque[Batch] = deque()
    with closing(CallsAhead(client, script("log/append"))) as calls:

        def receive() -> tuple[Batch, Reply]:
            batch = sent.popleft()
            with redis_errors(_activity(batch)):
                answer = calls.reply()
            return batch, _parse(answer, batch)

        for batch in batches:
            with redis_errors(_activity(batch)):
                calls.send(_call(namespace, batch))
            sent.append(batch)
            if len(sent) > AHEAD:
                yield receive()
        while sent:
            yield receive()


def _call(namespace: str, batch: Batch) -> Call:
    keys = log_keys(namespace, batch.shard)
    head: list[Argument] = [
        batch.epoch,
        batch.first,
        batch.last,
        int(batch.begins),
        int(batch.plain),
    ]
    values: Iterable[Argument]
    if batch.plain:
        values = chain.from_iterable(batch.columns.rows())
    else:
        values = Entry(batch.shard, batch.first, batch.columns).values()[1:]
    return Call((keys.stream, keys.epoch), [*head, *values])


def _parse(answer: Any, batch: Batch) -> Reply:
    match answer:
        case [b"shared", int(tail), int(offset), bytes(entry_id), list(fields)]:
            try:
                return _compare(
                    batch, tail, offset, parse_entries(batch.shard, [(entry_id, fields)])
                )
            except ForeignLog as error:
                return Unusable(error)
        case _:
            return parse_reply(answer, _activity(batch))


def _compare(batch: Batch, tail: int, offset: int, stored: Records) -> Reply:
    """Returns the outcome of a batch whose record at ``offset`` is in the log already."""
    place = offset - batch.first
    ours = batch.columns.ids[place], batch.columns.staged_us[place]
    record = stored[stored.offsets.index(Offset(offset))]
    if (record.id, record.staged_us) != ours:
        return Foreign(Offset(offset), str(record.id))
    return Appended(Offset(tail), 0) if tail >= batch.last else Behind(Offset(tail))


def _activity(batch: Batch) -> str:
    return f"appending to {batch.shard}"


_UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that a log may take, and batches on their way to it."""

    max_bytes: int  # bytes up to which nothing is evicted
    goal: int  # bytes that are left, about, if entries are evicted
    # last offset and size in bytes of batches that have been sent, and may be in the log already
    underway: Sequence[tuple[Offset, int]] = ()


@dataclass(frozen=True, slots=True)
class MemoryTaken:
    """Memory of a log as the server counts it, with batches under way; entries evicted."""

    bytes: int
    evicted: int


def make_room(
    client: RedisClient, namespace: str, rooms: Mapping[ShardName, Room]
) -> dict[ShardName, MemoryTaken]:
    """Evicts the oldest entries of logs, in one round trip, or a few if there is much to evict.

    The newest entry of a log stays, whatever it takes: it tells where the log ends, and with which
    record. Raises ``ServerUnavailable``, ``AppendRefused`` or ``ForeignLog``.
    """
    memory: dict[ShardName, MemoryTaken] = {}
    remaining = dict(rooms)
    while remaining:
        measured = _make_rooms(client, namespace, remaining)
        for shard, usage in measured.items():
            evicted = usage.evicted + (memory[shard].evicted if shard in memory else 0)
            memory[shard] = MemoryTaken(usage.bytes, evicted)
        remaining = {
            s: remaining[s]
            for s, usage in measured.items()
            if usage.evicted and usage.bytes > remaining[s].max_bytes
        }
    return memory


def memory_used(
    client: RedisClient, namespace: str, shards: Sequence[ShardName]
) -> dict[ShardName, int]:
    """Returns the bytes that logs take in Redis, by its own count, in one round trip.

    Raises as ``make_room``.
    """
    unlimited = dict.fromkeys(shards, Room(_UNLIMITED, _UNLIMITED))
    return {
        shard: usage.bytes for shard, usage in _make_rooms(client, namespace, unlimited).items()
    }


def _make_rooms(
    client: RedisClient, namespace: str, rooms: Mapping[ShardName, Room]
) -> dict[ShardName, MemoryTaken]:
    calls = [
        Call(
            (log_keys(namespace, shard).stream,),
            [room.max_bytes, room.goal, *(number for batch in room.underway for number in batch)],
        )
        for shard, room in rooms.items()
    ]
    activity = f"measuring {', '.join(map(str, rooms))}"
    with redis_errors(activity):
        replies = script("log/make_room").call_each(client, calls)
    usages: dict[ShardName, MemoryTaken] = {}
    for shard, reply in zip(rooms, replies, strict=True):
        match reply:
            case [b"room", int(taken), int(evicted)]:
                usages[shard] = MemoryTaken(taken, evicted)
            case _ if isinstance(reply, REDIS_ERRORS):
                raise translate_error(reply, f"measuring {shard}") from reply
            case _:
                raise make_foreign(f"measuring {shard}", reply)
    return usages
