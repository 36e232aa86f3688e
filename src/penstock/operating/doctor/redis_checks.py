"""Checks that Redis keeps its data, which is Penstock's, undamaged and worked on."""

from collections.abc import Iterator, Mapping
from typing import Any

from redis.exceptions import ResponseError as RedisResponseError

from penstock.channels.acl import SAVE, find_users, find_users_file
from penstock.channels.channel_kinds import get_kind
from penstock.channels.ick.ick_repair import repair
from penstock.channels.isolation import ShardError
from penstock.channels.log.streams import extents, read, read_newest
from penstock.channels.queue.inspection import (
    CheckedShard,
    QueueStatus,
    check_queues,
    find_foreign_keys,
)
from penstock.channels.routing import ick_shard_keys, log_keys, queue_keys
from penstock.channels.server import check_eviction, find_refusal, pipelined, redis_errors
from penstock.declaring.kinds import MAX_STREAMS
from penstock.display import format_count, format_seconds
from penstock.errors import DamagedIck, ForeignLog, UnsafeSetting
from penstock.journal.lineage import examine_lineage
from penstock.operating.doctor.check import (
    Check,
    CheckContext,
    CheckResult,
    Results,
    error,
    warning,
)
from penstock.operating.status.snapshot import ChannelStatus, Status
from penstock.records import Offset, Shard, ShardName

OLDEST_REDIS = (6, 2)
NEARLY_FULL = 0.9

SLOW_S = 60.0
"""Age of the oldest waiting member, or message, that is a warning, in seconds."""

CLOCKS_APART_S, MAX_AHEAD_S = 5.0, 60.0
"""Largest difference between the clocks of two servers, and lead of a queue's clock over its
server's, in seconds."""


def redis(context: CheckContext) -> Results:
    """Checks that Redis is reachable, new enough, and the master."""
    server, replication = _read_info(context, "server"), _read_info(context, "replication")
    name = "Valkey" if "valkey_version" in server else "Redis"
    version = str(server.get("valkey_version") or server.get("redis_version", "0"))
    compatible = str(server.get("redis_version", version))
    if tuple(int(part) for part in compatible.split(".")[:2]) < OLDEST_REDIS:
        yield error(f"{name} {version} is too old", "upgrade to Redis 6.2, Valkey 7.2, or newer")
    elif replication.get("role") != "master":
        fix = "point redis_url at the master, or at the Sentinels: redis+sentinel://…"
        yield error(f"{name} {version} is a replica: it takes no writes", fix)
    return f"{name} {version}, master"


def _read_info(context: CheckContext, section: str) -> Any:
    """Returns ``INFO section`` of one server; of a Cluster, that of its first node."""
    with redis_errors("inspecting Redis"):
        return context.client.info(section)


def eviction(context: CheckContext) -> Results:
    """Checks that the eviction policy deletes no records."""
    try:
        check_eviction(context.client)
    except UnsafeSetting as unsafe:
        yield error(str(unsafe), "CONFIG SET maxmemory-policy noeviction")
    return "no Penstock key is evicted"


def memory(context: CheckContext) -> Results:
    """Checks that Redis takes writes, and is not nearly full."""
    if (refusal := find_refusal(context.client)) is not None:
        yield error(
            f"{refusal}; records wait in Postgres",
            "raise maxmemory, shorten keep, or retire consumers that no longer run; or repair its "
            "disk, or add the replica",
        )
    info = _read_info(context, "memory")
    used, maxmemory = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if refusal is None and maxmemory and used > NEARLY_FULL * maxmemory:
        yield warning(
            f"{used / maxmemory:.0%} of maxmemory is used; when it is full, records wait in "
            "Postgres",
            "raise maxmemory, shorten keep, or retire consumers that no longer run",
        )
    return (
        f"{used / 2**20:.0f} MiB used; maxmemory is "
        f"{f'{maxmemory / 2**20:.0f} MiB' if maxmemory else 'not set'}"
    )


def persistence(context: CheckContext) -> Results:
    """Checks that Redis keeps the log over a restart; otherwise the journal replays it."""
    info = _read_info(context, "persistence")
    names = ("rdb_last_bgsave_status", "aof_last_write_status", "aof_last_bgrewrite_status")
    failing = [name for name in names if info.get(name) == "err"]
    appends = bool(int(info.get("aof_enabled", 0)))
    if failing:
        yield error(
            f"{', '.join(failing)}: Redis cannot write to its disk",
            "see its log; is the disk full?",
        )
    elif not appends and (saves := _saves(context.client)) is None:
        hidden = "appendonly is off, and Redis does not tell this user whether snapshots are on"
        yield warning(
            hidden, "as an administrator: CONFIG GET save; of a provider's Redis, see its console"
        )
    elif not appends and not saves:
        yield warning(
            "neither appendonly nor save is set: a restart empties the log. The streamer replays "
            "what Postgres still has; "
            "readers of older records see a gap",
            "CONFIG SET appendonly yes",
        )
    return "appendonly" if appends else "snapshots"


def _saves(client: Any) -> bool | None:
    """Returns whether snapshots are on; None if the user may not read that.

    CONFIG GET also shows passwords; some providers disable it.
    """
    with redis_errors("inspecting Redis"):
        try:
            return bool(client.config_get("save").get("save"))
        except RedisResponseError:
            return None


def users(context: CheckContext) -> Results:
    """Checks that users outlive a restart, and that the default user is not open beside them."""
    with redis_errors("inspecting Redis"):
        try:
            users_found, path = find_users(context.client), find_users_file(context.client)
        except RedisResponseError:
            return "this user may not list the users of Redis"
    names = users_found.keys() - {"default"}
    if names and not path:
        yield error(
            f"Redis keeps {format_count(len(names), 'user')} in memory only: a restart loses them, "
            "and opens the default user",
            "start Redis with an ACL file or a configuration file, create the users again, then: "
            f"{SAVE}",
        )
    elif names and {"on", "nopass"} <= {*users_found.get("default", "").split()}:
        yield warning(
            f"Redis has {format_count(len(names), 'user')}, and the default user needs no password",
            f"log in as a user that may administer, then: ACL SETUSER default off; and: {SAVE}",
        )
    return f"{len(names)}; saved to {path} by: {SAVE}" if names else "the default user alone"


def lineage(context: CheckContext) -> Results:
    """Checks that Postgres and Redis have seen the same history."""
    unusable: list[CheckResult] = []

    def report(shard: ShardName, reason: ShardError) -> None:
        unusable.append(error(str(reason), f"{shard}: see docs: {reason.page}"))

    examined = examine_lineage(
        context.store, context.client, declared=context.shards, on_unusable=report
    )
    yield from unusable
    if examined.has_moved:
        yield warning(
            f"Postgres was promoted or replaced since epoch {examined.epoch}, and lost no "
            "published record",
            "the streamer opens a new epoch when it connects",
        )
    return f"Postgres and Redis agree, in epoch {examined.epoch}"


def keys(context: CheckContext) -> Results:
    """Checks that the keys of all shards are Penstock's and do not expire."""
    kinds = {channel.channel: channel.kind for channel in context.status.channels}
    names = [
        name
        for shard in context.shards
        for name in get_kind(kinds.get(shard.channel)).keys(context.scope.namespace, shard)
    ]
    lives = pipelined(
        context.client, names, lambda pipeline, name: pipeline.pttl(name), "inspecting the keys"
    )
    for name, life in lives.items():
        if life >= 0:
            yield error(f"{name} has a time to live and will expire", f"PERSIST {name}")
    for shard in context.shards:
        yield from _check_foreign(context, shard)
    return (
        f"{format_count(len(context.shards), 'shard')}: all keys are Penstock's and do not expire"
    )


def _check_foreign(context: CheckContext, shard: ShardName) -> Iterator[CheckResult]:
    """Checks that a stream's first entry, last entry and last id are Penstock's."""
    try:
        extent = extents(context.client, context.scope.namespace, [shard])[shard]
        if extent.entries:
            read(context.client, context.scope.namespace, shard, Offset(extent.first - 1), 1)
            read_newest(context.client, context.scope.namespace, shard, 1)
    except ForeignLog as foreign:
        key = log_keys(context.scope.namespace, shard).stream
        yield error(
            str(foreign),
            f"find out what writes to {key}, then DEL it: the streamer replays the journal",
        )


def icks(context: CheckContext) -> Results:
    """Checks that Icks are undamaged, and processed."""
    channels = [channel for channel in context.status.channels if channel.kind == "ick"]
    for channel in channels:
        for shard in channel.shards:
            yield from _check_damage(context, ShardName(channel.channel, Shard(shard.shard)))
        yield from _check_members(channel, context.status)
    members = sum(s.ick.members for c in channels for s in c.shards if s.ick is not None)
    message = (
        f"{len(channels)} undamaged; {format_count(members, 'member')} waiting, none longer than "
        f"{SLOW_S:.0f} s"
    )
    return message if channels else None


def _check_damage(context: CheckContext, shard: ShardName) -> Iterator[CheckResult]:
    keys = ick_shard_keys(context.scope.namespace, shard)
    try:
        damages = repair(context.client, keys.name, dry_run=True)
    except DamagedIck as damaged:
        yield error(str(damaged), "update penstock")
        return
    if damages:
        message = "; ".join(f"{damage.key}: found {damage.found}" for damage in damages)
        yield error(f"{shard}: {message}", f"penstock reset ick {shard.channel} --apply")


def _find_remedy(channel: ChannelStatus, status: Status, otherwise: str) -> str:
    """Returns how its readers continue if each is paused or halted: more processes do not help."""
    remedies: list[str] = []
    for consumer in (reader for reader in status.consumers if reader.channel == channel.channel):
        if (pause := status.find_pause(consumer)) is not None:
            remedies.append(pause.how_to_resume)
        elif any(shard.halted is not None for shard in consumer.shards):
            remedies.append(f"resume the halted shards of {consumer.consumer}")
        else:
            return otherwise
    return "; ".join(remedies) or otherwise


def _check_members(channel: ChannelStatus, status: Status) -> Iterator[CheckResult]:
    """Warns of members that nobody processes, by the oldest's age, for any consumer."""
    present = [shard.ick for shard in channel.shards if shard.ick is not None]
    oldest_s = max((ick.oldest_s for ick in present if ick.oldest_s is not None), default=0.0)
    if oldest_s > SLOW_S:
        holders = sorted({ick.holder for ick in present if ick.holder is not None})
        holding = f"held by {', '.join(holders)}" if holders else "nobody holds a reservation"
        members = sum(ick.members for ick in present)
        yield warning(
            f"{channel.channel}: {format_count(members, 'member')} waiting, the oldest for "
            f"{format_seconds(oldest_s)}; {holding}",
            _find_remedy(
                channel,
                status,
                "penstock consume its consumer, in more processes if one does not keep up; "
                f"penstock tail {channel.channel} shows the oldest",
            ),
        )


def queues(context: CheckContext) -> Results:
    """Checks that queues are undamaged, and worked on."""
    channels = [channel for channel in context.status.channels if channel.kind == "queue"]
    for channel in channels:
        yield from _check_queue(context, channel)
    queues_found = [s.queue for c in channels for s in c.shards if s.queue is not None]
    count = sum(queue.waiting + queue.leased + queue.delayed for queue in queues_found)
    message = (
        f"{len(channels)} undamaged; {format_count(count, 'message')} not done, none for longer "
        f"than {SLOW_S:.0f} s"
    )
    return message if channels else None


def _check_queue(context: CheckContext, channel: ChannelStatus) -> Iterator[CheckResult]:
    shards = [
        ShardName(channel.channel, Shard(shard_status.shard)) for shard_status in channel.shards
    ]
    checked = check_queues(context.client, context.scope.namespace, shards)
    [(now_s,)] = context.store.connection.execute(
        "SELECT extract(epoch FROM clock_timestamp())::float8"
    ).fetchall()
    yield from check_clocks(context.scope.namespace, checked, now_s)
    for shard, shard_status in zip(shards, channel.shards, strict=True):
        keys, check = queue_keys(context.scope.namespace, shard), checked.get(shard, CheckedShard())
        foreign = {
            key: f"a {kind}"
            for key, kind in find_foreign_keys(context.client, keys, MAX_STREAMS).items()
        } | ({} if check.foreign is None else {check.foreign: "values"})
        for key, contents in foreign.items():
            yield error(
                f"{shard}: {key} holds {contents}, which Penstock did not write",
                f"find out what writes it, then RENAME {key} …: the streamer writes missing "
                "messages again",
            )
        if not foreign and (incomplete := _find_incomplete(shard_status.queue, check)):
            # The next sweep rebuilds it from the bodies of its messages.
            yield warning(
                f"{shard}: {incomplete}", "penstock stream, which rebuilds it within a second"
            )
    yield from _check_jobs(channel, context.status)


def _find_incomplete(queue: QueueStatus | None, checked: CheckedShard) -> str | None:
    if queue is not None and queue.damage is not None:
        return queue.damage
    if checked.is_rebuilding:
        return "it is being rebuilt"
    return f"its parts do not agree: {', '.join(checked.apart)}" if checked.apart else None


def check_clocks(
    namespace: str, checked: Mapping[ShardName, CheckedShard], postgres_s: float
) -> Iterator[CheckResult]:
    """Warns of a wrong clock of a server, and of a queue's that has stayed ahead because of one."""
    for shard, check in checked.items():
        apart_s = 0.0 if check.server_s is None else check.server_s - postgres_s
        if abs(apart_s) > CLOCKS_APART_S:
            yield warning(
                f"{shard}: the clock of Redis is {format_seconds(abs(apart_s))} "
                f"{'ahead of' if apart_s > 0 else 'behind'} that of Postgres: due times and "
                "deadlines come that much too early or too late",
                "set the clocks of both hosts, best by NTP; then the queue's follows",
            )
        if check.ahead_s > MAX_AHEAD_S:
            yield warning(
                f"{shard}: its clock is {format_seconds(check.ahead_s)} ahead of that of Redis, "
                "and goes at half speed until they agree: due times and deadlines come that much "
                "too early",
                f"redis-cli HINCRBY {queue_keys(namespace, shard).root}q-meta server 60000: the "
                "next call sets it back",
            )


def _check_jobs(channel: ChannelStatus, status: Status) -> Iterator[CheckResult]:
    """Warns of messages that nobody works on, and of dead letters."""
    queues_found = [shard.queue for shard in channel.shards if shard.queue is not None]
    oldest_s = max(
        (queue.oldest_s for queue in queues_found if queue.oldest_s is not None), default=0.0
    )
    waiting = sum(queue.waiting + queue.leased for queue in queues_found)
    if oldest_s > SLOW_S and waiting:
        yield warning(
            f"{channel.channel}: {format_count(waiting, 'message')} waiting or worked on, the "
            f"oldest for {format_seconds(oldest_s)}",
            _find_remedy(
                channel,
                status,
                f"penstock tail {channel.channel} says what each of them waits for; run more "
                "workers if they do not keep up",
            ),
        )
    if dead := sum(queue.dead for queue in queues_found):
        yield warning(
            f"{channel.channel}: {format_count(dead, 'dead letter')}",
            f"penstock tail {channel.channel} shows why; fix the cause, then retry them",
        )


SERVER: tuple[Check, ...] = (eviction, memory, persistence, users)
CHECKS: tuple[Check, ...] = (lineage, keys, icks, queues)
