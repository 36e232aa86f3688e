"""What Redis says of the shards of a log: in which epoch each was written, and which of them Postgres has forgotten."""

import re
from collections.abc import Iterable, Sequence
from functools import partial

from penstock.channels.commands import RedisClient
from penstock.channels.isolation import OnUnusable, ask_each
from penstock.channels.routing import log_keys, next_shards
from penstock.channels.server import redis_errors
from penstock.database.connections import Connection
from penstock.database.registry import registered_channels
from penstock.errors import ForeignLog
from penstock.records import Epoch, Scope, ShardName

_EPOCH = re.compile(r"[0-9]{1,10}")
"""What ``append.lua`` accepts."""


def shards_to_compare(
    connection: Connection,
    client: RedisClient,
    scope: Scope,
    declared: Iterable[ShardName] = (),
    on_unusable: OnUnusable | None = None,
) -> list[ShardName]:
    """Every shard that is registered or ``declared``, and those that were written and that Postgres does not know.

    It has forgotten them if it was restored to before the number of shards was changed.

    Raises:
        ServerUnavailable: Postgres or Redis does not answer.
        SchemaMissing: The tables are not there.
        ForeignLog: The key of an epoch holds something else, and there is no ``on_unusable``.
    """
    channels = registered_channels(connection, scope).values()
    beyond = [
        shard
        for channel in channels
        if channel.kind == "log"
        for shard in next_shards(channel.name, channel.total_shards)
    ]
    written = ask_each(partial(log_epochs, client, scope), beyond, on_unusable)
    registered = (shard for channel in channels for shard in channel.shard_names)
    return sorted({*registered, *declared, *written})


def log_epochs(client: RedisClient, scope: Scope, shards: Sequence[ShardName]) -> dict[ShardName, Epoch]:
    """The epoch in which each shard was last written, without shards that never were.

    Raises:
        ServerUnavailable: Redis does not answer.
        ForeignLog: A key of ours holds something else.
    """
    pipeline = client.pipeline(transaction=False)
    for shard in shards:
        pipeline.get(log_keys(scope.namespace, shard).epoch)
    with redis_errors("reading the log's epochs"):
        replies = pipeline.execute()
    return {
        shard: _parse_epoch(shard, reply) for shard, reply in zip(shards, replies, strict=True) if reply is not None
    }


def _parse_epoch(shard: ShardName, reply: bytes | str) -> Epoch:
    text = reply.decode(errors="replace") if isinstance(reply, bytes) else reply
    if not _EPOCH.fullmatch(text):
        raise ForeignLog(f"{shard}: the key of its epoch holds no number; something else uses Penstock's names")
    return Epoch(int(text))
