"""Appending to the log: compare, then append.  Any publisher may repeat it.  And room for it in the memory that a log may take."""

from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import redis

from penstock.batches.columns import CODECS, Columns
from penstock.batches.entry import Entry
from penstock.batches.record_batch import Records
from penstock.channels.commands import RedisClient
from penstock.channels.isolation import UNUSABLE, ShardError
from penstock.channels.log.stream_entries import parse_entries
from penstock.channels.routing import log_keys
from penstock.channels.scripts import Argument, Call, CallsAhead, script
from penstock.channels.server import REDIS_ERRORS, REFUSALS, RedisFailure, redis_errors, translate_error
from penstock.errors import AppendRefused, ForeignLog, UnpublishableRecord
from penstock.records import Epoch, Offset, ShardName

_SERVER_REFUSALS = (*REFUSALS, "BUSY", "UNKILLABLE")
"""Words of error replies that are about the server, whatever was called."""

AHEAD = 1
"""Number of batches without a reply while the next one is sent."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive records of a shard, ready to be appended."""

    shard: ShardName  # where they belong
    epoch: Epoch  # the epoch of the publisher
    first: Offset  # offset of the first record
    begins: bool  # no record before ``first`` exists any more: a log that ends before it may begin here
    columns: Columns  # the records
    plain: bool = False  # whether each record is to be an entry of its own

    def stored_as(self, entries: str) -> "Batch":
        """The batch as a channel stores it: ``plain``, or how its columns are compressed.  Raises ``CodecMissing``."""
        if entries == "plain":
            return replace(self, plain=True)
        [codec] = (codec for codec in CODECS if codec == entries)
        return replace(self, columns=self.columns.compressed(codec), plain=False)

    def after(self, offset: Offset) -> "Batch":
        """The records after one of its own, which is not the last."""
        rows = [*self.columns.rows()][offset + 1 - self.first :]
        columns = Columns.pack(rows).compressed(self.columns.codec)
        return replace(self, first=Offset(offset + 1), begins=False, columns=columns)

    @property
    def count(self) -> int:
        """Number of records."""
        return self.columns.count

    @property
    def last(self) -> Offset:
        """Offset of the last record."""
        return Offset(self.first + self.count - 1)


@dataclass(frozen=True, slots=True)
class Appended:
    """The log now ends at ``tail``; ``added`` of the records were new to it."""

    tail: Offset
    added: int


@dataclass(frozen=True, slots=True)
class Behind:
    """The log ends at ``tail``, before the batch: nothing was added."""

    tail: Offset


@dataclass(frozen=True, slots=True)
class FencedOff:
    """A publisher of the newer ``epoch`` has written: nothing was added."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Foreign:
    """The entry at ``offset`` has the record id ``id``, which is not the one that belongs there: nothing was added."""

    offset: Offset
    id: str


@dataclass(frozen=True, slots=True)
class Unusable:
    """A key of the shard holds something that Penstock did not write, or Redis does not take a record: nothing was added."""

    error: ShardError


Reply = Appended | Behind | FencedOff | Foreign | Unusable
"""Outcome of a batch."""


def append_together(client: RedisClient, namespace: str, batches: Sequence[Batch]) -> list[tuple[Batch, Reply]]:
    """Appends to several shards in one round trip; safe to repeat.

    A consumer that waits for several of these shards is woken once and finds all batches.  What a log has of a batch already
    is left out, in a second round trip: another publisher was faster, or a reply was lost.
    Raises ``ServerUnavailable`` or ``AppendRefused``.
    """
    calls = [_call(namespace, batch) for batch in batches]
    with redis_errors(f"appending to {', '.join(str(batch.shard) for batch in batches)}"):
        replies = script("log/append").call_together(client, calls)
    done = [(batch, _parse(reply, batch)) for batch, reply in zip(batches, replies, strict=True)]
    if not (rests := _find_rests(done)):
        return done
    sent = append_together(client, namespace, [*rests.values()])
    later = dict(zip(rests, (reply for _, reply in sent), strict=True))
    return [(batch, later.get(place, reply)) for place, (batch, reply) in enumerate(done)]


def _find_rests(done: Sequence[tuple[Batch, Reply]]) -> dict[int, Batch]:
    """Batches to send again, by place: the rest of one that begins in the log, and those after it."""
    rests: dict[int, Batch] = {}
    begun: set[ShardName] = set()
    for place, (batch, reply) in enumerate(done):
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
    """Appends one batch after the other, each sent before the reply to the previous one is read; safe to repeat.

    Redis appends one batch while the next is being prepared.  Each call compares the tail itself, so a batch that follows
    a refused one is refused too.  A caller that does not take all replies closes the generator.
    Raises ``ServerUnavailable`` or ``AppendRefused``.
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
    head: list[Argument] = [batch.epoch, batch.first, batch.last, int(batch.begins), int(batch.plain)]
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
                return _compare(batch, tail, offset, parse_entries(batch.shard, [(entry_id, fields)]))
            except ForeignLog as error:
                return Unusable(error)
        case _:
            return parse_reply(answer, _activity(batch))


def _compare(batch: Batch, tail: int, offset: int, held: Records) -> Reply:
    """Outcome of a batch that has the record at ``offset`` in common with the log."""
    place = offset - batch.first
    ours = batch.columns.ids[place], batch.columns.staged_us[place]
    record = held[held.offsets.index(Offset(offset))]
    if (record.id, record.staged_us) != ours:
        return Foreign(Offset(offset), str(record.id))
    return Appended(Offset(tail), 0) if tail >= batch.last else Behind(Offset(tail))


def _activity(batch: Batch) -> str:
    return f"appending to {batch.shard}"


def parse_reply(answer: Any, what: str) -> Reply:
    """The result of a script that compares and appends or marks.

    Raises ``ServerUnavailable`` or ``AppendRefused``.
    """
    if isinstance(answer, REDIS_ERRORS):
        return Unusable(_error_of_one_call(answer, what))
    match answer:
        case [b"appended", int(tail), int(added)]:
            return Appended(Offset(tail), added)
        case [b"behind", int(tail)]:
            return Behind(Offset(tail))
        case [b"fenced", int(epoch)]:
            return FencedOff(Epoch(epoch))
        case [b"foreign", int(offset), bytes(record_id)]:
            return Foreign(Offset(offset), record_id.decode(errors="replace"))
        case _:
            return Unusable(make_foreign(what, answer))


def _error_of_one_call(answer: RedisFailure, what: str) -> ShardError:
    """The error of the shard; raises one that is about the server."""
    error = translate_error(answer, what)
    if isinstance(error, AppendRefused) and _is_about_one_call(answer):
        return UnpublishableRecord(str(error))
    if isinstance(error, UNUSABLE):
        return error
    raise error from answer


def _is_about_one_call(answer: RedisFailure) -> bool:
    """True if an error reply concerns the keys or values of this call alone: others may succeed.

    A server that takes no writes, or none of this user, says so with a word of its own.  The client has classes for most
    of these; older servers put the word into the text of the script's error.
    """
    if isinstance(answer, redis.exceptions.NoPermissionError):
        return " key" in str(answer)
    return type(answer) in {redis.ResponseError, redis.exceptions.ClusterCrossSlotError} and not any(
        f"{word} " in str(answer) for word in _SERVER_REFUSALS
    )


def make_foreign(what: str, answer: Any) -> ForeignLog:
    """The error of a reply that says that a key holds something that Penstock did not write."""
    if not (isinstance(answer, list) and answer[:1] == [b"broken"]):
        return ForeignLog(f"{what}: the script returned an unknown reply")
    found = bytes(answer[1])
    return ForeignLog(
        f"{what}: {found.decode(errors='replace')}: not written by Penstock. Find out what writes to its keys, and delete "
        "them: the streamer replays the shard from the journal"
    )


_UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that a log may take, and batches on their way to it."""

    most: int  # bytes up to which nothing is evicted
    goal: int  # bytes that are left, about, if entries are evicted
    # last offset and size in bytes of batches that have been sent, and may be in the log already
    underway: Sequence[tuple[Offset, int]] = ()


@dataclass(frozen=True, slots=True)
class MemoryTaken:
    """Memory that a log takes, as the server counts it, with what is under way; and the number of entries that were removed."""

    bytes: int
    evicted: int


def make_room(client: RedisClient, namespace: str, rooms: Mapping[ShardName, Room]) -> dict[ShardName, MemoryTaken]:
    """Evicts the oldest entries of logs, in one round trip, or a few if there is much to evict.

    The newest entry of a log stays, whatever it takes: it tells where the log ends, and with which record.
    Raises ``ServerUnavailable``, ``AppendRefused`` or ``ForeignLog``.
    """
    taken: dict[ShardName, MemoryTaken] = {}
    left = dict(rooms)
    while left:
        found = _make_rooms(client, namespace, left)
        for shard, each in found.items():
            evicted = each.evicted + (taken[shard].evicted if shard in taken else 0)
            taken[shard] = MemoryTaken(each.bytes, evicted)
        left = {s: left[s] for s, each in found.items() if each.evicted and each.bytes > left[s].most}
    return taken


def memory_used(client: RedisClient, namespace: str, shards: Sequence[ShardName]) -> dict[ShardName, int]:
    """Bytes that logs take in Redis, by its own count, in one round trip.  Raises as ``make_room``."""
    unlimited = dict.fromkeys(shards, Room(_UNLIMITED, _UNLIMITED))
    return {shard: each.bytes for shard, each in _make_rooms(client, namespace, unlimited).items()}


def _make_rooms(client: RedisClient, namespace: str, rooms: Mapping[ShardName, Room]) -> dict[ShardName, MemoryTaken]:
    calls = [
        Call(
            (log_keys(namespace, shard).stream,),
            [room.most, room.goal, *(number for each in room.underway for number in each)],
        )
        for shard, room in rooms.items()
    ]
    what = f"measuring {', '.join(map(str, rooms))}"
    with redis_errors(what):
        replies = script("log/make_room").call_each(client, calls)
    found: dict[ShardName, MemoryTaken] = {}
    for shard, reply in zip(rooms, replies, strict=True):
        match reply:
            case [b"room", int(taken), int(evicted)]:
                found[shard] = MemoryTaken(taken, evicted)
            case _ if isinstance(reply, REDIS_ERRORS):
                raise translate_error(reply, f"measuring {shard}") from reply
            case _:
                raise make_foreign(f"measuring {shard}", reply)
    return found
