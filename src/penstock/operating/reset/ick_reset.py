"""Repairs a damaged Ick of a pipeline, and has members that may be lost marked again."""

from dataclasses import dataclass

import structlog

from penstock.channels.commands import RedisClient
from penstock.channels.routing import ick_shard_keys
from penstock.channels.server import redis_errors
from penstock.clients import repair
from penstock.database.connections import Connection
from penstock.database.registry import registered_channels
from penstock.errors import Unknown
from penstock.journal import known_shards
from penstock.operating.channels import unknown_channel
from penstock.pipeline import Pipeline, get_scope
from penstock.records import Scope, ShardName

log = structlog.get_logger("penstock.operator")


@dataclass(frozen=True, slots=True)
class IckRepair:
    """One damage of an Ick's shard, and its repair."""

    shard: ShardName
    key: str
    found: str  # a type, or the beginning of a text
    # New key of the content; None if nothing has to move.  Without ``apply`` it is an example: each repair moves to keys of its
    # own.
    moved_to: str | None
    marked_again: bool  # true if members may be lost: the streamer then marks again what was not processed


def reset_ick(
    connection: Connection, client: RedisClient, channel: str, pipeline: Pipeline | None = None, *, apply: bool = False
) -> tuple[IckRepair, ...]:
    """Plans the repair of an Ick; with ``apply``, carries it out.  Deletes only a position, which the streamer restores."""
    scope, declared = get_scope(pipeline), () if pipeline is None else pipeline.shard_names
    shards = [s for s in known_shards(connection, scope, declared) if s.channel == channel]
    if not shards:
        raise unknown_channel(connection, scope, channel)
    declared_channel = None if pipeline is None else pipeline.channels.get(channel)
    known = registered_channels(connection, scope).get(channel) or declared_channel
    if known is None or known.kind != "ick":
        raise Unknown(f"{channel} is no Ick; see penstock channels list")
    return tuple(each for shard in shards for each in _repair(client, scope, shard, apply=apply))


def _repair(client: RedisClient, scope: Scope, shard: ShardName, *, apply: bool) -> list[IckRepair]:
    keys = ick_shard_keys(scope.namespace, shard)
    damages = repair(client, keys.name, dry_run=True)
    lossy = any(damage.may_have_lost for damage in damages)
    if apply and damages:
        if lossy:
            # First: if this process dies here, the damage is found again and the repair starts over.
            with redis_errors(f"repairing {shard}"):
                client.delete(keys.log.stream)
        damages = repair(client, keys.name)
        log.warning("ick repaired", shard=str(shard), damages=len(damages), marked_again=lossy)
    return [IckRepair(shard, d.key, d.found, d.moved_to, lossy) for d in damages]
