"""Marking by a pipeline: one script compares and marks members of records, in the order of offsets.

A shard of an Ick has a position like a log's tail: the last record that was marked.  It is stored
as a stream of one entry, written by the script that marks, so that a shard's tail is found at the
same key and in the same form for both kinds of channel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.channels.batch_outcomes import Batch, Reply, Unusable, parse_reply
from penstock.channels.commands import RedisClient
from penstock.channels.ick.operations import check_reply, parse_damage, plain_keys
from penstock.channels.routing import ick_shard_keys
from penstock.channels.scripts import Argument, Call, script
from penstock.channels.server import REDIS_ERRORS, redis_errors
from penstock.records import Offset, ShardName

MICROSECONDS = 1_000_000


def coalesce(batch: Batch) -> list[Argument]:
    """Returns score and member of one mark for each member, flat.

    Makes no records, and reads no payload. The score is the time of the member's first record, in
    seconds since 1970.
    """
    since: dict[str, int] = {}
    for member, at_us in zip(batch.columns.keys, batch.columns.staged_us, strict=True):
        if at_us < since.setdefault(member, at_us):
            since[member] = at_us
    marks: list[Argument] = []
    for member, at_us in since.items():
        marks += (repr(at_us / MICROSECONDS), member.encode())
    return marks


def mark(client: RedisClient, namespace: str, batch: Batch) -> Reply:
    """Marks the members of a batch; safe to repeat.

    Raises ``ServerUnavailable`` or ``AppendRefused``.
    """
    keys = ick_shard_keys(namespace, batch.shard)
    columns = batch.columns
    activity = f"marking in {batch.shard}"
    names = (*plain_keys(keys.ick), keys.log.stream, keys.log.epoch, keys.progress)
    head: list[Argument] = [batch.epoch, batch.first, batch.last, int(batch.begins)]
    # The position is known by the last record.
    newest = columns.last_id, columns.keys[-1], columns.staged_us[-1]
    call = Call(names, [*head, *newest, *coalesce(batch)])
    with redis_errors(activity):
        [answer] = script("ick/pipeline/mark").call_each(client, [call])
    if isinstance(answer, REDIS_ERRORS) and (damage := parse_damage(answer)):
        return Unusable(damage)
    return parse_reply(answer, activity)


@dataclass(frozen=True, slots=True)
class MarkProgress:
    """Progress of a shard of an Ick: marked and processed."""

    # every member marked up to this offset has been processed since, and need not be marked again
    # in an empty Redis
    done_up_to: Offset
    marked_up_to: Offset  # the last offset whose member was marked
    records: int  # records marked in total
    dirtied: int  # members that became dirty by them; the others were dirty already


def update_progress(
    client: RedisClient, namespace: str, shards: Sequence[ShardName]
) -> dict[ShardName, MarkProgress]:
    """Returns the progress of each shard, in one round trip.

    Each call may store a watermark, and a later one moves ``done_up_to`` there: call it from time
    to time. Raises ``ServerUnavailable``, ``AppendRefused`` or ``DamagedIck``.
    """
    calls = []
    for shard in shards:
        keys = ick_shard_keys(namespace, shard)
        names = (*plain_keys(keys.ick), keys.log.stream, keys.progress, keys.ick.held)
        calls.append(Call(names, ()))
    with redis_errors("reading the progress of Icks"):
        replies = script("ick/pipeline/progress").call_each(client, calls)
    progress = {}
    for shard, reply in zip(shards, replies, strict=True):
        check_reply(reply, f"reading the progress of {shard}")
        processed, marked, records, dirtied = (int(number) for number in reply[1:])
        progress[shard] = MarkProgress(Offset(processed), Offset(marked), records, dirtied)
    return progress


def done_offsets(
    client: RedisClient, namespace: str, shards: Sequence[ShardName]
) -> dict[ShardName, Offset]:
    """Returns the offset up to which every member of each shard has been processed.

    Calls and raises as ``update_progress``.
    """
    return {
        shard: progress.done_up_to
        for shard, progress in update_progress(client, namespace, shards).items()
    }
