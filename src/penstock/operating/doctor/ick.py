"""Icks: are they whole, and does anybody do what is dirty?"""

from collections.abc import Iterator

from penstock.channels.ick import Damage, repair
from penstock.channels.routing import ick_shard_keys
from penstock.errors import DamagedIck
from penstock.operating.doctor.finding import Check, Examined, Finding, age
from penstock.operating.status import ChannelStatus
from penstock.records import Shard, ShardName

SLOW_S = 60.0


def icks(examined: Examined) -> Iterator[Finding]:
    """Whole, and worked on."""
    channels = [channel for channel in examined.status.channels if channel.kind == "ick"]
    findings = [finding for channel in channels for finding in _looked_at(examined, channel)]
    yield from findings
    if channels and not findings:
        members = sum(s.ick.members for c in channels for s in c.shards if s.ick is not None)
        yield Finding(
            "icks", "ok", f"{len(channels)} whole; {members:,} members wait, none for long"
        )


def _looked_at(examined: Examined, channel: ChannelStatus) -> Iterator[Finding]:
    for each in channel.shards:
        yield from _damaged(examined, ShardName(channel.channel, Shard(each.shard)))
    yield from _waiting(channel)


def _damaged(examined: Examined, shard: ShardName) -> Iterator[Finding]:
    keys = ick_shard_keys(examined.namespace, shard)
    try:
        damages = repair(examined.client, keys.name, dry_run=True)
    except DamagedIck as error:
        yield Finding("icks", "error", str(error), "update penstock")
        return
    if damages:
        mend = f"penstock reset ick {shard.channel} --yes"
        yield Finding("icks", "error", f"{shard}: {_in_words(damages)}", mend)


def _in_words(damages: list[Damage]) -> str:
    return "; ".join(f"{damage.key}: found {damage.found}" for damage in damages)


def _waiting(channel: ChannelStatus) -> Iterator[Finding]:
    """Members that nobody does; by the age of the oldest, whoever the consumer is."""
    there = [shard.ick for shard in channel.shards if shard.ick is not None]
    oldest_s = max((ick.oldest_s for ick in there if ick.oldest_s is not None), default=0.0)
    if oldest_s <= SLOW_S:
        return
    holders = sorted({ick.holder for ick in there if ick.holder is not None})
    holding = f"held by {', '.join(holders)}" if holders else "nobody holds a reservation"
    yield Finding(
        "icks",
        "warning",
        f"{channel.channel}: {sum(ick.members for ick in there):,} members wait, the oldest for {age(oldest_s)}; {holding}",
        "penstock consume its consumer, in more processes if one does not keep up; penstock tail "
        f"{channel.channel} shows the oldest",
    )


CHECKS: tuple[Check, ...] = (icks,)
