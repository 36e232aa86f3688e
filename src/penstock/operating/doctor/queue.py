"""Checks queues: that their keys are theirs, that their parts agree, and that their messages are done."""

from collections.abc import Iterator, Mapping

from penstock.channels.queue.inspection import CheckedShard, check_queues, find_foreign_keys
from penstock.channels.routing import queue_keys
from penstock.declaring.declarations import MAX_STREAMS
from penstock.operating.doctor.check import Check, CheckContext, CheckResult, format_age
from penstock.operating.status import ChannelStatus
from penstock.operating.status.report import QueueStatus
from penstock.records import Shard, ShardName

SLOW_S = 60.0
"""Age of the oldest message that is a warning, in seconds."""

CLOCKS_APART_S, MOST_AHEAD_S = 5.0, 60.0
"""How far the clocks of two servers may be apart, and the queue's ahead of its server's, in seconds."""

_REPAIR = "penstock stream, which rebuilds it within a second"


def queues(context: CheckContext) -> Iterator[CheckResult]:
    """Undamaged, and worked on."""
    channels = [channel for channel in context.status.channels if channel.kind == "queue"]
    results = [result for channel in channels for result in _check_channel(context, channel)]
    yield from results
    if channels and not results:
        held = [s.queue for c in channels for s in c.shards if s.queue is not None]
        count = sum(queue.waiting + queue.leased + queue.delayed for queue in held)
        yield CheckResult.ok(
            "queues", f"{len(channels)} undamaged; {count:,} messages are not done, none for longer than {SLOW_S:.0f} s"
        )


def _check_channel(context: CheckContext, channel: ChannelStatus) -> Iterator[CheckResult]:
    shards = [ShardName(channel.channel, Shard(each.shard)) for each in channel.shards]
    checked = check_queues(context.client, context.scope.namespace, shards)
    [(now_s,)] = context.connection.execute("SELECT extract(epoch FROM clock_timestamp())::float8").fetchall()
    yield from check_clocks(context.scope.namespace, checked, now_s)
    for shard, each in zip(shards, channel.shards, strict=True):
        keys = queue_keys(context.scope.namespace, shard)
        foreign = find_foreign_keys(context.client, keys, MAX_STREAMS)
        for key, found in foreign.items():
            yield _make_foreign(shard, key, f"a {found}")
        found_parts = checked.get(shard, CheckedShard())
        if found_parts.foreign is not None:
            yield _make_foreign(shard, found_parts.foreign, "values")
        elif not foreign:
            yield from _check_parts(shard, each.queue, found_parts)
    yield from _check_waiting(channel)


def check_clocks(namespace: str, checked: Mapping[ShardName, CheckedShard], postgres_s: float) -> Iterator[CheckResult]:
    """Warns of a server's clock that is wrong, and of a queue's that has remained ahead since one was."""
    for shard, each in checked.items():
        apart_s = 0.0 if each.server_s is None else each.server_s - postgres_s
        if abs(apart_s) > CLOCKS_APART_S:
            yield CheckResult.warning(
                "queues",
                f"{shard}: the clock of Redis is {format_age(abs(apart_s))} {'ahead of' if apart_s > 0 else 'behind'} that of "
                "Postgres: what is due, and deadlines, come so much too early or too late",
                "set the clocks of both hosts, best by NTP; then the queue's follows",
            )
        if each.ahead_s > MOST_AHEAD_S:
            yield CheckResult.warning(
                "queues",
                f"{shard}: its clock is {format_age(each.ahead_s)} ahead of that of Redis, and goes at half speed until they agree: "
                "what is due, and deadlines, come so much too early",
                f"redis-cli HINCRBY {queue_keys(namespace, shard).root}q-meta server 60000: the next call sets it back",
            )


def _make_foreign(shard: ShardName, key: str, found: str) -> CheckResult:
    return CheckResult.error(
        "queues",
        f"{shard}: {key} holds {found}, which Penstock did not write",
        f"find out what writes it, then RENAME {key} …: the streamer writes again what is missing",
    )


def _check_parts(shard: ShardName, queue: QueueStatus | None, checked: CheckedShard) -> Iterator[CheckResult]:
    """Warns of a shard that is incomplete; the next sweep rebuilds it from the bodies of its messages."""
    if queue is not None and queue.damage is not None:
        yield CheckResult.warning("queues", f"{shard}: {queue.damage}", _REPAIR)
    elif checked.is_rebuilding:
        yield CheckResult.warning("queues", f"{shard}: it is being rebuilt", _REPAIR)
    elif checked.apart:
        apart = ", ".join(checked.apart)
        yield CheckResult.warning("queues", f"{shard}: its parts do not agree: {apart}", _REPAIR)


def _check_waiting(channel: ChannelStatus) -> Iterator[CheckResult]:
    """Warns of messages that nobody works on, and of dead letters."""
    held = [shard.queue for shard in channel.shards if shard.queue is not None]
    oldest_s = max((queue.oldest_s for queue in held if queue.oldest_s is not None), default=0.0)
    waiting = sum(queue.waiting + queue.leased for queue in held)
    if oldest_s > SLOW_S and waiting:
        yield CheckResult.warning(
            "queues",
            f"{channel.channel}: {waiting:,} messages wait or are worked on, the oldest for {format_age(oldest_s)}",
            f"penstock tail {channel.channel} says what each of them waits for; run more workers if they do not keep up",
        )
    if dead := sum(queue.dead for queue in held):
        yield CheckResult.warning(
            "queues",
            f"{channel.channel}: {dead:,} dead letters",
            f"penstock tail {channel.channel} says why; fix the cause, then bring them back",
        )


CHECKS: tuple[Check, ...] = (queues,)
