"""A damaged Ick of the pipeline is made whole, and what may have been lost with it is told again."""

from dataclasses import dataclass

import structlog

from penstock.channels.ick import repair
from penstock.channels.routing import ick_shard_keys
from penstock.channels.server import RedisClient, redis_errors
from penstock.database.connections import Connection
from penstock.database.registry import registered_channels
from penstock.database.statements import DEFAULT_SCHEMA
from penstock.errors import Unknown
from penstock.journal import known_shards
from penstock.pipeline import Pipeline
from penstock.records import ShardName

log = structlog.get_logger("penstock.operator")


@dataclass(frozen=True, slots=True)
class Mended:
    """One thing that is wrong with a shard of an Ick, and what becomes of it.

    Attributes:
        shard: Which shard.
        key: The key in which it was found.
        found: A type, or the beginning of a text.
        moved_to: Where the key's content goes; None if nothing has to move.  Without ``apply`` an example: each
            repair has places of its own.
        told_again: Members may have been lost: the streamer tells the shard again what was not done.
    """

    shard: ShardName
    key: str
    found: str
    moved_to: str | None
    told_again: bool


def reset_ick(  # noqa: PLR0913  what is asked and what may be left out
    connection: Connection,
    client: RedisClient,
    channel: str,
    pipeline: Pipeline | None = None,
    *,
    apply: bool = False,
    schema: str = DEFAULT_SCHEMA,
    namespace: str = "penstock",
) -> tuple[Mended, ...]:
    """Plans what makes an Ick whole; with ``apply``, does it.  Nothing is deleted but a position, which the streamer finds again.

    Raises:
        Unknown: No Ick of that name is registered or declared.
        DamagedIck: It has a later format than this release knows.
        ServerUnavailable: A server does not answer; what was done can be repeated.
        AppendRefused: Redis does not take writes.
    """
    declared = () if pipeline is None else pipeline.shard_names
    shards = [s for s in known_shards(connection, schema, declared) if s.channel == channel]
    if not shards or _kind(connection, schema, channel, pipeline) != "ick":
        raise Unknown(f"no Ick {channel!r} is registered; see penstock status")
    mended: list[Mended] = []
    for shard in shards:
        keys = ick_shard_keys(namespace, shard)
        damages = repair(client, keys.name, dry_run=True)
        lossy = any(damage.may_have_lost for damage in damages)
        if apply and damages:
            if lossy:
                # First: whoever is cut off here finds the damage again, and begins anew.
                with redis_errors(f"mending {shard}"):
                    client.delete(keys.log.stream)
            damages = repair(client, keys.name)
            log.warning("ick mended", shard=str(shard), damages=len(damages), told_again=lossy)
        mended += [Mended(shard, d.key, d.found, d.moved_to, lossy) for d in damages]
    return tuple(mended)


def _kind(
    connection: Connection, schema: str, channel: str, pipeline: Pipeline | None
) -> str | None:
    """Of what kind a channel is, by what is registered, and else by what is declared; None if nobody knows it."""
    declared = pipeline.channels.get(channel) if pipeline is not None else None
    found = registered_channels(connection, schema).get(channel) or declared
    return None if found is None else found.kind
