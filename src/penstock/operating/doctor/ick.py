"""Checks Icks: that they are not damaged, and that their members are processed."""

from collections.abc import Iterator

from penstock.channels.routing import ick_shard_keys
from penstock.clients import Damage, repair
from penstock.errors import DamagedIck
from penstock.operating.doctor.check import Check, CheckContext, CheckResult, format_age
from penstock.operating.status import ChannelStatus
from penstock.records import Shard, ShardName

SLOW_S = 60.0
"""Age of the oldest waiting member that is a warning, in seconds."""


def icks(context: CheckContext) -> Iterator[CheckResult]:
    """Undamaged, and processed."""
    channels = [channel for channel in context.status.channels if channel.kind == "ick"]
    results = [result for channel in channels for result in _check_channel(context, channel)]
    yield from results
    if channels and not results:
        members = sum(s.ick.members for c in channels for s in c.shards if s.ick is not None)
        yield CheckResult.ok(
            "icks", f"{len(channels)} undamaged; {members:,} members wait, none longer than {SLOW_S:.0f} s"
        )


def _check_channel(context: CheckContext, channel: ChannelStatus) -> Iterator[CheckResult]:
    for each in channel.shards:
        yield from _check_damage(context, ShardName(channel.channel, Shard(each.shard)))
    yield from _check_waiting(channel)


def _check_damage(context: CheckContext, shard: ShardName) -> Iterator[CheckResult]:
    keys = ick_shard_keys(context.scope.namespace, shard)
    try:
        damages = repair(context.client, keys.name, dry_run=True)
    except DamagedIck as error:
        yield CheckResult.error("icks", str(error), "update penstock")
        return
    if damages:
        fix = f"penstock reset ick {shard.channel} --apply"
        yield CheckResult.error("icks", f"{shard}: {_format_damages(damages)}", fix)


def _format_damages(damages: list[Damage]) -> str:
    return "; ".join(f"{damage.key}: found {damage.found}" for damage in damages)


def _check_waiting(channel: ChannelStatus) -> Iterator[CheckResult]:
    """Warns of members that nobody processes, by the age of the oldest, whichever consumer reads them."""
    present = [shard.ick for shard in channel.shards if shard.ick is not None]
    oldest_s = max((ick.oldest_s for ick in present if ick.oldest_s is not None), default=0.0)
    if oldest_s <= SLOW_S:
        return
    holders = sorted({ick.holder for ick in present if ick.holder is not None})
    holding = f"held by {', '.join(holders)}" if holders else "nobody holds a reservation"
    yield CheckResult.warning(
        "icks",
        f"{channel.channel}: {sum(ick.members for ick in present):,} members wait, the oldest for {format_age(oldest_s)}; {holding}",
        "penstock consume its consumer, in more processes if one does not keep up; penstock tail "
        f"{channel.channel} shows the oldest",
    )


CHECKS: tuple[Check, ...] = (icks,)
