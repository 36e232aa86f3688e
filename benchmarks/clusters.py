"""A Redis Cluster of two servers, over which the shards of a backlog are spread evenly."""

import secrets
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import redis
from redis.crc import key_slot

from penstock.channels.commands import RedisClient
from penstock.embedded.processes import free_port
from penstock.embedded.redis import EmbeddedRedis
from penstock.testing import eventually

SLOTS = 16384


@contextmanager
def start_cluster(keys: Sequence[str]) -> Iterator[tuple[str, list[EmbeddedRedis]]]:
    """Starts it; yields its URL and its servers.

    Args:
        keys: Each server gets the hash slots of one half of them.
    """
    directory = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    password = secrets.token_urlsafe(16)
    servers = [_make_server(directory / str(number), password) for number in range(2)]
    try:
        for server in servers:
            server.start()
        _join(servers, keys)
        yield servers[0].url.replace("redis://", "redis+cluster://", 1), servers
    finally:
        for server in servers:
            server.remove()
        shutil.rmtree(directory, ignore_errors=True)


def _make_server(directory: Path, password: str) -> EmbeddedRedis:
    settings = {"cluster-enabled": "yes", "cluster-port": str(free_port()), "auto-aof-rewrite-percentage": "0"}
    server = EmbeddedRedis(directory, settings=settings, port=0)
    server._password = password  # noqa: SLF001  the URL of a Cluster has one for all servers
    return server


def _join(servers: Sequence[EmbeddedRedis], keys: Sequence[str]) -> None:
    """Gives each server its slots, and introduces the first to the second."""
    slots = sorted(key_slot(key.encode()) for key in keys)
    first_of_second = slots[len(slots) // 2]
    clients: list[RedisClient] = [redis.Redis.from_url(server.url) for server in servers]
    for client, bounds in zip(clients, ((0, first_of_second - 1), (first_of_second, SLOTS - 1)), strict=True):
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", *bounds)
    second = servers[1].settings["cluster-port"], servers[1].port
    clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", second[1], second[0])
    eventually(lambda: all(map(_is_whole, clients)), "the cluster is whole", timeout_s=30)
    for client in clients:
        client.close()


def _is_whole(client: RedisClient) -> bool:
    found = str(client.execute_command("CLUSTER INFO"))
    return "'cluster_state': 'ok'" in found and "'cluster_known_nodes': '2'" in found
