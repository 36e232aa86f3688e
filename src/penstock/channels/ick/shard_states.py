"""Inspection of a pipeline's Icks.  Nothing here writes to Redis."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from penstock.channels.commands import RedisClient
from penstock.channels.ick import operations
from penstock.channels.ick.operations import IckStats, parse_damage
from penstock.channels.routing import ick_shard_keys
from penstock.channels.scripts import script
from penstock.channels.server import REDIS_ERRORS, RedisFailure, pipelined, redis_errors, translate_error
from penstock.errors import DamagedIck
from penstock.records import ShardName, to_time

MemberState = Literal["dirty", "reserved", "held"]
"""The set that a member is in: available, given out by a plain reserve, or held by the fenced reservation."""


@dataclass(frozen=True, slots=True)
class ShardState:
    """The contents of one shard of an Ick."""

    stats: IckStats | None  # sizes, scores and holder; None if there is no Ick yet
    records: int  # records marked in total
    dirtied: int  # members that became dirty by them; the others were dirty already
    # What is damaged, in words; None if the Ick is intact.  Otherwise the other fields are empty.
    damage: str | None = None


@dataclass(frozen=True, slots=True)
class Waiting:
    """A member that has not been processed yet, and the set that it is in.

    The score is when it became dirty; for a pipeline's marks, in seconds since 1970.
    """

    shard: ShardName
    member: bytes
    score: float
    state: MemberState

    @property
    def since(self) -> datetime | None:
        """The score as a time; None if it is none: other producers may use other scores."""
        return to_time(self.score)


def inspect_shards(client: RedisClient, namespace: str, shards: Sequence[ShardName]) -> dict[ShardName, ShardState]:
    """The state of each of several shards, in two round trips.  Raises ``ServerUnavailable``."""
    keys = {shard: ick_shard_keys(namespace, shard) for shard in shards}
    asked = [operations.stats(each.ick) for each in keys.values()]
    with redis_errors("inspecting Icks"):
        replies = script("ick/stats").call_each(client, [each.call for each in asked]) if asked else []
        counts = client.pipeline(transaction=False)
        for each in keys.values():
            counts.hmget(each.progress, "records", "dirtied")
        counted = counts.execute(raise_on_error=False)
    return {
        shard: _state(reply if isinstance(reply, Exception) else each.read(reply), count, shard)
        for shard, each, reply, count in zip(keys, asked, replies, counted, strict=True)
    }


def _state(stats: IckStats | Exception | None, count: Any, shard: ShardName) -> ShardState:
    what = f"inspecting {shard}"
    for error in (stats, count):
        if isinstance(error, REDIS_ERRORS):
            damage = parse_damage(error)
            if damage is None and "WRONGTYPE" not in str(error):
                raise translate_error(error, what) from error
            return ShardState(None, 0, 0, str(damage or translate_error(error, what)))
    assert not isinstance(stats, Exception)
    try:
        records, dirtied = (int(number or 0) for number in count)
    except ValueError:
        return ShardState(None, 0, 0, f"{shard}: the counts of its records are no numbers")
    return ShardState(stats, records, dirtied)


def oldest(client: RedisClient, namespace: str, shards: Sequence[ShardName], most: int) -> list[Waiting]:
    """The ``most`` members that have waited longest, over all of the shards, in one round trip.

    Raises ``ServerUnavailable`` or ``DamagedIck``.
    """
    if most < 1:
        return []
    sets = [(shard, *each) for shard in shards for each in _sets(namespace, shard)]

    def ask(pipeline: Any, each: tuple[ShardName, MemberState, str]) -> None:
        pipeline.zrange(each[2], 0, most - 1, withscores=True)

    found: list[Waiting] = []
    for (shard, state, _), reply in pipelined(client, sets, ask, "inspecting Icks", raises=False).items():
        if isinstance(reply, REDIS_ERRORS):
            raise _wrong_type(shard, reply)
        found += [Waiting(shard, operations.as_bytes(member), float(score), state) for member, score in reply]
    return sorted(found, key=lambda each: (each.score, each.shard, each.member))[:most]


def _sets(namespace: str, shard: ShardName) -> tuple[tuple[MemberState, str], ...]:
    keys = ick_shard_keys(namespace, shard).ick
    return ("held", keys.held), ("reserved", keys.reserved), ("dirty", keys.dirty)


def _wrong_type(shard: ShardName, error: RedisFailure) -> Exception:
    if "WRONGTYPE" in str(error):
        return DamagedIck(
            f"{shard}: a key of the Ick holds another type; penstock doctor names it, "
            "penstock.clients.ick.ick_repair repairs the Ick"
        )
    return translate_error(error, f"inspecting {shard}")


def find_member(client: RedisClient, namespace: str, shard: ShardName, member: bytes) -> list[Waiting]:
    """The sets that hold a member, in one round trip; none if it is done.

    Raises ``ServerUnavailable`` or ``DamagedIck``.
    """

    def ask(pipeline: Any, each: tuple[MemberState, str]) -> None:
        pipeline.zscore(each[1], member)

    found: list[Waiting] = []
    for (state, _), reply in pipelined(client, _sets(namespace, shard), ask, "inspecting Icks", raises=False).items():
        if isinstance(reply, REDIS_ERRORS):
            raise _wrong_type(shard, reply)
        if reply is not None:
            found.append(Waiting(shard, member, float(reply), state))
    return found
