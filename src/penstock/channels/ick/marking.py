"""Marking by a pipeline: members of records, in the order of their offsets, compared and marked by one script.

A shard of an Ick has a position like a log's tail: the last record that was marked.  It is stored as a stream of one entry,
written by the script that marks, so that a shard's tail is found at the same key and in the same form for both kinds of
channel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.channels.commands import RedisClient
from penstock.channels.ick.operations import check_reply, parse_damage, plain_keys
from penstock.channels.log.appending import Batch, Reply, Unusable, parse_reply
from penstock.channels.routing import ick_shard_keys
from penstock.channels.scripts import Argument, Call, script
from penstock.channels.server import REDIS_ERRORS, redis_errors
from penstock.records import Epoch, Offset, RecordId, ShardName

MICROSECONDS = 1_000_000


@dataclass(frozen=True, slots=True)
class MarkBatch:
    """Consecutive records of a shard, coalesced into one mark for each member."""

    shard: ShardName  # where the records belong
    epoch: Epoch  # the epoch of the publisher
    first: Offset  # offset of the first record
    begins: bool  # no record before ``first`` exists any more: an Ick that is marked up to less may begin here
    last: Offset  # offset of the last record
    newest: tuple[RecordId, str, int]  # id, member and time of the last record, by which the position is known
    # Score and member of each mark, flat.  The score is the time of the member's first record, in seconds since 1970.
    marks: Sequence[Argument]

    @property
    def count(self) -> int:
        """Number of records."""
        return self.last - self.first + 1


def coalesce(batch: Batch) -> MarkBatch:
    """One mark for each member, with the time of its first record; makes no records, and reads no payload."""
    members, times = batch.columns.keys, batch.columns.staged_us
    since: dict[str, int] = {}
    for member, at_us in zip(members, times, strict=True):
        if at_us < since.setdefault(member, at_us):
            since[member] = at_us
    marks: list[Argument] = []
    for member, at_us in since.items():
        marks += (repr(at_us / MICROSECONDS), member.encode())
    newest = batch.columns.last_id, members[-1], times[-1]
    return MarkBatch(batch.shard, batch.epoch, batch.first, batch.begins, batch.last, newest, marks)


def mark_shards(client: RedisClient, namespace: str, batches: Sequence[MarkBatch]) -> list[Reply]:
    """Marks the members of each of several shards in one round trip; safe to repeat.

    Raises ``ServerUnavailable`` or ``AppendRefused``.
    """
    calls = [_call(namespace, batch) for batch in batches]
    with redis_errors(f"marking in {', '.join(str(batch.shard) for batch in batches)}"):
        replies = script("ick/pipeline/mark").call_each(client, calls)
    return [_parse(reply, batch.shard) for reply, batch in zip(replies, batches, strict=True)]


def _call(namespace: str, batch: MarkBatch) -> Call:
    keys = ick_shard_keys(namespace, batch.shard)
    names = (*plain_keys(keys.ick), keys.log.stream, keys.log.epoch, keys.progress)
    head: list[Argument] = [batch.epoch, batch.first, batch.last, int(batch.begins)]
    return Call(names, [*head, *batch.newest, *batch.marks])


def _parse(answer: Any, shard: ShardName) -> Reply:
    if isinstance(answer, REDIS_ERRORS) and (damage := parse_damage(answer)):
        return Unusable(damage)
    return parse_reply(answer, f"marking in {shard}")


@dataclass(frozen=True, slots=True)
class MarkProgress:
    """Progress of a shard of an Ick: marked and processed."""

    # every member marked up to this offset has been processed since, and need not be marked again in an empty Redis
    done_up_to: Offset
    marked_up_to: Offset  # the last offset whose member was marked
    records: int  # records marked in total
    dirtied: int  # members that became dirty by them; the others were dirty already


def update_progress(client: RedisClient, namespace: str, shards: Sequence[ShardName]) -> dict[ShardName, MarkProgress]:
    """The progress of each of several shards, in one round trip.

    Each call may store a watermark, and a later one moves ``done_up_to`` there: call it from time to time.
    Raises ``ServerUnavailable``, ``AppendRefused`` or ``DamagedIck``.
    """
    calls = []
    for shard in shards:
        keys = ick_shard_keys(namespace, shard)
        names = (*plain_keys(keys.ick), keys.log.stream, keys.progress, keys.ick.held)
        calls.append(Call(names, ()))
    with redis_errors("reading the progress of Icks"):
        replies = script("ick/pipeline/progress").call_each(client, calls)
    found = {}
    for shard, reply in zip(shards, replies, strict=True):
        check_reply(reply, f"reading the progress of {shard}")
        done, marked, records, dirtied = (int(number) for number in reply[1:])
        found[shard] = MarkProgress(Offset(done), Offset(marked), records, dirtied)
    return found
