"""Why Redis refuses writes, read from ``INFO``: nothing is written to find out.

A server that refuses writes still answers reads, so that a log which does not grow looks like one
that nobody writes to.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import redis

from penstock.channels.commands import RedisClient
from penstock.channels.server import redis_errors

FULL = 0.98
"""Share of ``maxmemory`` from which Redis counts as full: the arguments of the next append count as
used memory, too."""

_Info = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class WriteRefusal:
    """Why a server refuses writes."""

    word: str  # what its error replies begin with: ``OOM``, ``READONLY`` …
    reason: str  # what was found on the server
    fix: str  # what to do
    is_certain: bool = True  # whether it refuses every write now; otherwise it may refuse some


def find_refusal(client: RedisClient, key: str) -> WriteRefusal | None:
    """Returns why the server of a key refuses writes; None if ``INFO`` shows no reason.

    ``INFO`` does not show what it refuses to single users; the streamer notes that as a stopped
    shard.  Raises ``ServerUnavailable`` or ``AppendRefused``.
    """
    with redis_errors("reading why Redis refuses writes"):
        cluster: Any = client if isinstance(client, redis.RedisCluster) else None
        info = (
            cluster.info(target_nodes=cluster.get_node_from_key(key)) if cluster else client.info()
        )
    refusals = (refusal for find in _CAUSES if (refusal := find(info)) is not None)
    return next(refusals, None)


def _replica(info: _Info) -> WriteRefusal | None:
    if info.get("role") != "slave":
        return None
    master = f"{info.get('master_host')}:{info.get('master_port')}"
    return WriteRefusal(
        "READONLY",
        f"it is a replica of {master}, whose link is {info.get('master_link_status')}, and takes "
        "no writes",
        "point redis_url at the master, or at the Sentinels: redis+sentinel://…",
    )


def _full(info: _Info) -> WriteRefusal | None:
    maxmemory = int(info.get("maxmemory", 0))
    # As Redis counts: without the buffers of replicas and of the append-only file.
    used = int(info.get("used_memory", 0)) - int(info.get("mem_not_counted_for_evict", 0))
    if not maxmemory or used < FULL * maxmemory:
        return None
    return WriteRefusal(
        "OOM",
        f"it uses {used:,} bytes of memory, maxmemory is {maxmemory:,}, and its policy "
        f"{info.get('maxmemory_policy')} evicts none of "
        "Penstock's keys",
        "raise maxmemory, shorten keep, or retire consumers that no longer run",
    )


def _unsaved(info: _Info) -> WriteRefusal | None:
    if info.get("aof_last_write_status") == "err" and int(info.get("aof_enabled", 0)):
        reason = "it cannot write its append-only file (aof_last_write_status: err)"
    elif info.get("rdb_last_bgsave_status") == "err":
        reason = (
            "its last snapshot failed (rdb_last_bgsave_status: err), after which it refuses writes "
            "unless "
            "stop-writes-on-bgsave-error is no"
        )
    else:
        return None
    return WriteRefusal("MISCONF", reason, "see its log; is the disk full? Then: BGSAVE")


def _few_replicas(info: _Info) -> WriteRefusal | None:
    # INFO has their number only if min-replicas-to-write is set, and not how many that asks for: 0
    # are too few for any.
    if (good := info.get("min_slaves_good_slaves")) is None:
        return None
    return WriteRefusal(
        "NOREPLICAS",
        f"min-replicas-to-write is set, and {good} replicas are connected and up to date",
        "start the missing replicas, or lower min-replicas-to-write",
        is_certain=int(good) == 0,
    )


_CAUSES: tuple[Callable[[_Info], WriteRefusal | None], ...] = (
    _replica,
    _full,
    _unsaved,
    _few_replicas,
)
