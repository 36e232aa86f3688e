"""Redis: does it keep what it was given, and is the log in it ours?"""

from collections.abc import Iterator
from typing import Any

from penstock.channels.ick.operations import all_keys
from penstock.channels.log import extents, read, read_newest
from penstock.channels.routing import ick_shard_keys, log_keys
from penstock.channels.server import check_eviction, info_text, redis_errors
from penstock.errors import ForeignLog, UnsafeSetting
from penstock.journal import examine_lineage
from penstock.operating.doctor.finding import Check, Examined, Finding
from penstock.records import Offset, ShardName

OLDEST_REDIS = (6, 2)
NEARLY_FULL = 0.9


def redis(examined: Examined) -> Iterator[Finding]:
    """Reachable, new enough, the master."""
    with redis_errors("looking at Redis"):
        found = info_text(examined.client, "server")
        replication = info_text(examined.client, "replication")
    name = "Valkey" if "valkey_version" in found else "Redis"
    version = str(found.get("valkey_version") or found.get("redis_version", "0"))
    compatible = str(found.get("redis_version", version))
    if tuple(int(part) for part in compatible.split(".")[:2]) < OLDEST_REDIS:
        yield Finding(
            "redis",
            "error",
            f"{name} {version} is too old",
            "upgrade to Redis 6.2, Valkey 7.2, or newer",
        )
    elif replication.get("role") != "master":
        yield Finding(
            "redis",
            "error",
            f"{name} {version} is a replica: it takes no writes",
            "point redis_url at the master, or at the Sentinels: redis+sentinel://…",
        )
    else:
        yield Finding("redis", "ok", f"{name} {version}, master")


def eviction(examined: Examined) -> Iterator[Finding]:
    """May it throw records away?"""
    try:
        check_eviction(examined.client)
    except UnsafeSetting as error:
        yield Finding("eviction", "error", str(error), "CONFIG SET maxmemory-policy noeviction")
        return
    yield Finding("eviction", "ok", "no key of ours is evicted")


def memory(examined: Examined) -> Iterator[Finding]:
    """Is there room?"""
    with redis_errors("looking at Redis"):
        found = info_text(examined.client, "memory")
    used, most = int(found.get("used_memory", 0)), int(found.get("maxmemory", 0))
    if most and used > NEARLY_FULL * most:
        yield Finding(
            "memory",
            "warning",
            f"{used / most:.0%} of maxmemory is used; when it is full, records wait in Postgres",
            "raise maxmemory, shorten keep, or retire consumers that are gone",
        )
    else:
        yield Finding(
            "memory",
            "ok",
            f"{used / 2**20:.0f} MiB used of {f'{most / 2**20:.0f} MiB' if most else 'what there is'}",
        )


def persistence(examined: Examined) -> Iterator[Finding]:
    """What is left after a restart?  The journal replays what is not."""
    with redis_errors("looking at Redis"):
        found = info_text(examined.client, "persistence")
    failing = [
        name
        for name in ("rdb_last_bgsave_status", "aof_last_write_status", "aof_last_bgrewrite_status")
        if found.get(name) == "err"
    ]
    if failing:
        yield Finding(
            "persistence",
            "error",
            f"{', '.join(failing)}: Redis cannot write to its disk",
            "see its log; is the disk full?",
        )
    elif not int(found.get("aof_enabled", 0)) and not _saves(examined.client):
        yield Finding(
            "persistence",
            "warning",
            "neither appendonly nor save: a restart empties the log. The streamer replays what Postgres still has; readers "
            "of what it no longer has see a gap",
            "CONFIG SET appendonly yes",
        )
    else:
        yield Finding(
            "persistence", "ok", "appendonly" if int(found.get("aof_enabled", 0)) else "snapshots"
        )


def _saves(client: Any) -> bool:
    with redis_errors("looking at Redis"):
        return bool(client.config_get("save").get("save"))


def past(examined: Examined) -> Iterator[Finding]:
    """Is the past of Postgres the one that Redis has seen?"""
    found = examine_lineage(
        examined.connection,
        examined.client,
        schema=examined.schema,
        namespace=examined.namespace,
        declared=examined.shards,
    )
    if found.has_moved:
        yield Finding(
            "past",
            "warning",
            f"Postgres was promoted or replaced since epoch {found.epoch}, and lost nothing that was published",
            "the streamer opens a new epoch when it connects",
        )
    else:
        yield Finding("past", "ok", f"Postgres and Redis agree, in epoch {found.epoch}")


def keys(examined: Examined) -> Iterator[Finding]:
    """Are the keys of all shards ours, and there to stay?"""
    names = [name for shard in examined.shards for name in _all_keys(examined.namespace, shard)]
    pipeline = examined.client.pipeline(transaction=False)
    for name in names:
        pipeline.pttl(name)
    with redis_errors("looking at the keys"):
        lives = pipeline.execute()
    mortal = [name for name, life in zip(names, lives, strict=True) if life >= 0]
    for name in mortal:
        yield Finding(
            "keys", "error", f"{name} has a time to live, and will vanish", f"PERSIST {name}"
        )
    foreign = [finding for shard in examined.shards for finding in _foreign(examined, shard)]
    yield from foreign
    if not mortal and not foreign:
        yield Finding(
            "keys", "ok", f"those of {len(examined.shards)} shards are ours, without a time to live"
        )


def _all_keys(namespace: str, shard: ShardName) -> tuple[str, ...]:
    """Those that a shard of any kind has."""
    found = ick_shard_keys(namespace, shard)
    return (found.log.stream, found.log.epoch, found.progress, *all_keys(found.ick))


def _foreign(examined: Examined, shard: ShardName) -> Iterator[Finding]:
    """The first entry of a stream, its last, and the last id given must be ours."""
    try:
        extent = extents(examined.client, examined.namespace, [shard])[shard]
        if extent.entries:
            read(examined.client, examined.namespace, shard, Offset(extent.first - 1), 1)
            read_newest(examined.client, examined.namespace, shard, 1)
    except ForeignLog as error:
        key = log_keys(examined.namespace, shard).stream
        yield Finding(
            "keys",
            "error",
            str(error),
            f"find out who writes to {key}; then DEL it: the streamer replays it from the journal",
        )


REACHED: tuple[Check, ...] = (redis,)
SERVER: tuple[Check, ...] = (eviction, memory, persistence)
CHECKS: tuple[Check, ...] = (past, keys)
