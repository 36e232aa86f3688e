"""What the Icks of a pipeline hold, for people who look: nothing here writes, or leaves a mark."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import redis

from penstock.channels.ick import operations
from penstock.channels.ick.operations import IckStats
from penstock.channels.routing import ick_shard_keys
from penstock.channels.scripts import script
from penstock.channels.server import RedisClient, redis_errors, translated
from penstock.errors import DamagedIck
from penstock.records import ShardName

State = Literal["dirty", "reserved", "held"]
"""Where a member waits: for anybody; set aside by a plain reserve; in the fenced reservation."""


@dataclass(frozen=True, slots=True)
class Look:
    """One shard of an Ick.

    Attributes:
        stats: Sizes, scores and holder; None where there is no Ick yet.
        records: Records that it was told, ever.
        dirtied: Members that became dirty by them; the others were dirty already.
        damage: Why it is not whole, in words; None if it is.  The rest is empty then.
    """

    stats: IckStats | None
    records: int
    dirtied: int
    damage: str | None = None


@dataclass(frozen=True, slots=True)
class Waiting:
    """A member that waits.

    Attributes:
        shard: Of which shard.
        member: The member.
        score: Since when; of a pipeline's marks, seconds since 1970.
        state: Where.
    """

    shard: ShardName
    member: bytes
    score: float
    state: State


def inspect_shards(
    client: RedisClient, namespace: str, shards: Sequence[ShardName]
) -> dict[ShardName, Look]:
    """What each of several shards holds, in two round trips.

    Raises:
        ServerUnavailable: Redis does not answer.
    """
    keys = {shard: ick_shard_keys(namespace, shard) for shard in shards}
    asked = [operations.stats(each.ick) for each in keys.values()]
    with redis_errors("looking at Icks"):
        replies = (
            script("ick/stats").call_each(client, [each.call for each in asked]) if asked else []
        )
        counts = client.pipeline(transaction=False)
        for each in keys.values():
            counts.hmget(each.passage, "records", "dirtied")
        counted = counts.execute(raise_on_error=False)
    return {
        shard: _look(reply if isinstance(reply, Exception) else each.read(reply), count, shard)
        for shard, each, reply, count in zip(keys, asked, replies, counted, strict=True)
    }


def _look(found: IckStats | Exception | None, count: Any, shard: ShardName) -> Look:
    what = f"looking at {shard}"
    for error in (found, count):
        if isinstance(error, redis.RedisError):
            damage = operations.damage(error)
            if damage is None and "WRONGTYPE" not in str(error):
                raise translated(error, what) from error
            return Look(None, 0, 0, str(damage or translated(error, what)))
    assert not isinstance(found, Exception)
    records, dirtied = (int(number or 0) for number in count)
    return Look(found, records, dirtied)


def oldest(
    client: RedisClient, namespace: str, shards: Sequence[ShardName], most: int
) -> list[Waiting]:
    """The ``most`` members that wait longest, over all of the shards, in one round trip.

    Raises:
        ServerUnavailable: Redis does not answer.
        DamagedIck: A key holds another type.
    """
    if most < 1:
        return []
    pipeline = client.pipeline(transaction=False)
    places: list[tuple[ShardName, State]] = []
    for shard in shards:
        keys = ick_shard_keys(namespace, shard).ick
        sets: tuple[tuple[State, str], ...] = (
            ("held", keys.held),
            ("reserved", keys.reserved),
            ("dirty", keys.dirty),
        )
        for state, key in sets:
            places.append((shard, state))
            pipeline.zrange(key, 0, most - 1, withscores=True)
    with redis_errors("looking at Icks"):
        replies = pipeline.execute(raise_on_error=False)
    found: list[Waiting] = []
    for (shard, state), reply in zip(places, replies, strict=True):
        if isinstance(reply, redis.RedisError):
            raise _of_another_type(shard, reply)
        found += [
            Waiting(shard, operations.as_bytes(member), float(score), state)
            for member, score in reply
        ]
    return sorted(found, key=lambda each: (each.score, each.shard, each.member))[:most]


def _of_another_type(shard: ShardName, error: redis.RedisError) -> Exception:
    if "WRONGTYPE" in str(error):
        return DamagedIck(
            f"{shard}: a key of the Ick holds another type; penstock doctor names it, "
            "penstock.channels.ick.repair makes the Ick whole"
        )
    return translated(error, f"looking at {shard}")
