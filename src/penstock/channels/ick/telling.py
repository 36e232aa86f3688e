"""What the pipeline tells an Ick: members of records in the order of their offsets, compared and marked in one script.

An Ick's shard has a position like a log's: the last record that was marked.  It is a stream of one entry, written by the
script that marks, so that whoever looks for the tail of a shard finds it in the same place and form.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis

from penstock.channels.ick import operations
from penstock.channels.log import Reply, Unusable, parse_reply
from penstock.channels.routing import ick_shard_keys
from penstock.channels.scripts import Argument, Call, script
from penstock.channels.server import RedisClient, redis_errors, translated
from penstock.records import Epoch, Offset, Record, ShardName

MICROSECONDS = 1_000_000


@dataclass(frozen=True, slots=True)
class Fold:
    """Records that follow each other, folded: what an Ick has to be told of them.

    Attributes:
        shard: Where they belong.
        epoch: The epoch of the publisher.
        first: Offset of the first.
        begins: Nothing before ``first`` exists any more: an Ick that was told less may begin here.
        last: The last of the records.
        marks: Score and member of each mark, flat: the time of the first of a member's records, in seconds since 1970.
    """

    shard: ShardName
    epoch: Epoch
    first: Offset
    begins: bool
    last: Record
    marks: Sequence[Argument]

    @property
    def count(self) -> int:
        """Number of records."""
        return self.last.offset - self.first + 1


def fold(records: Sequence[Record], epoch: Epoch, *, begins: bool) -> Fold:
    """One mark for each member, since the first of its records.

    Args:
        records: Of one shard, in the order of their offsets, without a hole; at least one.
        epoch: The epoch of the publisher.
        begins: Nothing before them exists any more.
    """
    since: dict[str, int] = {}
    for record in records:
        since[record.key] = min(record.staged_us, since.get(record.key, record.staged_us))
    marks: list[Argument] = []
    for member, at_us in since.items():
        marks += (repr(at_us / MICROSECONDS), member.encode())
    last = records[-1]
    name = ShardName(last.channel, last.shard)
    return Fold(name, epoch, records[0].offset, begins, last, marks)


def tell_each(client: RedisClient, namespace: str, folds: Sequence[Fold]) -> list[Reply]:
    """Marks the members of each of several shards in one round trip; safe to repeat.

    Raises:
        ServerUnavailable: Redis does not answer; any of the members may have been marked.
        AppendRefused: Redis does not take writes.
    """
    calls = []
    for each in folds:
        keys = ick_shard_keys(namespace, each.shard)
        names = (*operations.three(keys.ick), keys.log.stream, keys.log.epoch, keys.passage)
        head: list[Argument] = [each.epoch, each.first, each.last.offset, int(each.begins)]
        head += (each.last.id, each.last.key, each.last.staged_us)
        calls.append(Call(names, [*head, *each.marks]))
    what = f"marking in {', '.join(str(each.shard) for each in folds)}"
    with redis_errors(what):
        replies = script("ick/pipeline/mark").call_each(client, calls)
    return [_reply(reply, each.shard) for reply, each in zip(replies, folds, strict=True)]


def _reply(answer: Any, shard: ShardName) -> Reply:
    if isinstance(answer, redis.RedisError) and (damage := operations.damage(answer)):
        return Unusable(damage)
    return parse_reply(answer, f"marking in {shard}")


@dataclass(frozen=True, slots=True)
class Passage:
    """How far an Ick's shard is.

    Attributes:
        passed: Everything up to this offset has been done since: it need not be told again, even to another Redis.
        told: The last offset whose member was marked.
        records: Records told, ever.
        dirtied: Members that became dirty by them; the others were dirty already.
    """

    passed: Offset
    told: Offset
    records: int
    dirtied: int


def passages(
    client: RedisClient, namespace: str, shards: Sequence[ShardName]
) -> dict[ShardName, Passage]:
    """How far each of several shards is, in one round trip.

    To ask is to leave a mark, from which ``passed`` goes on: ask from time to time.

    Raises:
        ServerUnavailable: Redis does not answer.
        AppendRefused: Redis does not take writes.
        DamagedIck: An Ick is not whole.
    """
    calls = []
    for shard in shards:
        keys = ick_shard_keys(namespace, shard)
        names = (*operations.three(keys.ick), keys.log.stream, keys.passage, keys.ick.held)
        calls.append(Call(names, ()))
    with redis_errors("looking at Icks"):
        replies = script("ick/pipeline/passed").call_each(client, calls)
    found = {}
    for shard, reply in zip(shards, replies, strict=True):
        _check(reply, f"looking at {shard}")
        passed, told, records, dirtied = (int(number) for number in reply[1:])
        found[shard] = Passage(Offset(passed), Offset(told), records, dirtied)
    return found


def _check(reply: Any, what: str) -> None:
    if isinstance(reply, redis.RedisError):
        raise operations.damage(reply) or translated(reply, what) from reply
