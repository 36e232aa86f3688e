"""Inspection of a pipeline's Icks.  Nothing here writes to Redis."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from typing import Any, Literal

from penstock.channels.commands import RedisClient
from penstock.channels.ick import operations
from penstock.channels.ick.operations import IckStats, parse_damage
from penstock.channels.log.streams import last_offsets
from penstock.channels.routing import ick_shard_keys
from penstock.channels.scripts import script
from penstock.channels.server import (
    REDIS_ERRORS,
    RedisFailure,
    pipelined,
    redis_errors,
    translate_error,
)
from penstock.errors import DamagedIck
from penstock.records import BEGINNING, HeldItem, Offset, RecordId, ShardName, to_time

MemberState = Literal["dirty", "reserved", "held"]
"""The set that a member is in: available, given out by a plain reserve, or held by the fenced
reservation."""


@dataclass(frozen=True, slots=True)
class IckStatus:
    """Contents of one shard of an Ick."""

    dirty: int = 0  # waiting members (the producer set of Redis::Ick)
    reserved: int = 0  # members of a plain reservation (its consumer set)
    held: int = 0  # members of the fenced reservation
    # age of the oldest of all of these, in seconds by Postgres' clock, which marks use; None if
    # there is none, or if another producer has marked it at an infinite time
    oldest_s: float | None = None
    records: int = 0
    dirtied: int = 0  # members that became dirty by them
    # records per member that became dirty; None before the first
    coalescing_ratio: float | None = None
    reservation: int = 0  # number of the last fenced reservation
    holder: str | None = None  # the holder of it; None if it is not held
    # description of a damage, and then the others are empty; None if there is none
    damage: str | None = None

    @property
    def members(self) -> int:
        """Returns all members; one that became dirty again while being processed counts twice."""
        return self.dirty + self.reserved + self.held


def inspect_shards(
    client: RedisClient, namespace: str, shards: Sequence[ShardName], now_s: float
) -> dict[ShardName, IckStatus]:
    """Returns the contents of each of several shards, in two round trips.

    Raises ``ServerUnavailable``.
    """
    keys = {shard: ick_shard_keys(namespace, shard) for shard in shards}
    requests = [operations.stats(shard_keys.ick) for shard_keys in keys.values()]
    with redis_errors("inspecting Icks"):
        replies = (
            script("ick/stats").call_each(client, [request.call for request in requests])
            if requests
            else []
        )
        counts = client.pipeline(transaction=False)
        for shard_keys in keys.values():
            counts.hmget(shard_keys.progress, "records", "dirtied")
        counted = counts.execute(raise_on_error=False)
    return {
        shard: _inspected(
            reply if isinstance(reply, Exception) else request.read(reply), count, shard, now_s
        )
        for shard, request, reply, count in zip(keys, requests, replies, counted, strict=True)
    }


def _inspected(
    stats: IckStats | Exception | None, count: Any, shard: ShardName, now_s: float
) -> IckStatus:
    activity = f"inspecting {shard}"
    for error in (stats, count):
        if isinstance(error, REDIS_ERRORS):
            damage = parse_damage(error)
            if damage is None and "WRONGTYPE" not in str(error):
                raise translate_error(error, activity) from error
            return IckStatus(damage=str(damage or translate_error(error, activity)))
    assert not isinstance(stats, Exception)
    try:
        records, dirtied = (int(number or 0) for number in count)
    except ValueError:
        return IckStatus(damage=f"{shard}: the counts of its records are not numbers")
    ratio = records / dirtied if dirtied else None
    if stats is None:
        return IckStatus(records=records, dirtied=dirtied, coalescing_ratio=ratio)
    lowest, sizes = stats.total.lowest, (stats.dirty.size, stats.reserved.size, stats.held.size)
    oldest_s = None if lowest is None or not isfinite(lowest) else max(0.0, now_s - lowest)
    return IckStatus(*sizes, oldest_s, records, dirtied, ratio, stats.number, stats.holder or None)


def marked_offsets(
    client: RedisClient, namespace: str, shards: Sequence[ShardName]
) -> dict[ShardName, Offset]:
    """Returns the last offset marked in each shard; 0 if the Ick is missing.

    Without the Ick the stored position means nothing.
    """
    offsets = last_offsets(client, namespace, shards)
    keys = {shard: ick_shard_keys(namespace, shard).ick.version for shard in shards}
    exist = pipelined(
        client, shards, lambda pipe, shard: pipe.exists(keys[shard]), "inspecting Icks"
    )
    return {shard: last if exist[shard] else BEGINNING for shard, last in offsets.items()}


def oldest(
    client: RedisClient, namespace: str, shards: Sequence[ShardName], count: int
) -> list[HeldItem]:
    """Returns the members that have waited longest in all the shards, in one round trip.

    A score is when a member became dirty; for a pipeline's marks, in seconds since 1970: other
    producers may use other scores. Raises ``ServerUnavailable`` or ``DamagedIck``.
    """
    if count < 1:
        return []
    sets = [(shard, *ick_set) for shard in shards for ick_set in _sets(namespace, shard)]

    def ask(pipeline: Any, ick_set: tuple[ShardName, MemberState, str]) -> None:
        pipeline.zrange(ick_set[2], 0, count - 1, withscores=True)

    members: list[tuple[float, ShardName, bytes, MemberState]] = []
    for (shard, state, _), reply in pipelined(
        client, sets, ask, "inspecting Icks", raises=False
    ).items():
        if isinstance(reply, REDIS_ERRORS):
            raise _wrong_type(shard, reply)
        members += [
            (float(score), shard, operations.as_bytes(member), state) for member, score in reply
        ]
    return [_item(*entry) for entry in sorted(members)[:count]]


def _item(score: float, shard: ShardName, name: bytes, state: MemberState) -> HeldItem:
    member, since = name.decode(errors="backslashreplace"), to_time(score)
    time = f"{since:%Y-%m-%d %H:%M:%S}" if since else f"{score!r}"
    facts = {
        "member": member,
        "state": state,
        "score": score if isfinite(score) else str(score),
        "since": since,
    }
    return HeldItem(shard, str(shard), member, state, since, facts, f"{time}  {state} {member}")


def _sets(namespace: str, shard: ShardName) -> tuple[tuple[MemberState, str], ...]:
    keys = ick_shard_keys(namespace, shard).ick
    return ("held", keys.held), ("reserved", keys.reserved), ("dirty", keys.dirty)


def _wrong_type(shard: ShardName, error: RedisFailure) -> Exception:
    if "WRONGTYPE" in str(error):
        return DamagedIck(
            f"{shard}: a key of the Ick holds another type; penstock doctor names it, "
            "penstock.clients.repair repairs the Ick"
        )
    return translate_error(error, f"inspecting {shard}")


_HELD: Mapping[MemberState, str] = {
    "dirty": "its member is dirty: it waits for a consumer",
    "reserved": "its member is reserved by a consumer of the six operations",
    "held": "a consumer has reserved its member",
}


def find_member(
    client: RedisClient,
    namespace: str,
    shard: ShardName,
    _record: RecordId,
    member: str,
    staged_at: datetime | None,
) -> tuple[str, str]:
    """Returns the set that holds a record's member, or ``done``, and what that means.

    Takes one round trip. A member keeps the time of its first mark: a later time is that of a later
    record. Raises ``ServerUnavailable`` or ``DamagedIck``.
    """

    def ask(pipeline: Any, ick_set: tuple[MemberState, str]) -> None:
        pipeline.zscore(ick_set[1], member.encode())

    latest = (staged_at.timestamp() if staged_at else 0.0) + 1e-6
    states: list[MemberState] = []
    for (state, _), reply in pipelined(
        client, _sets(namespace, shard), ask, "inspecting Icks", raises=False
    ).items():
        if isinstance(reply, REDIS_ERRORS):
            raise _wrong_type(shard, reply)
        if reply is not None and float(reply) < latest:
            states.append(state)
    return (states[0], _HELD[states[0]]) if states else ("done", "its member was processed since")
