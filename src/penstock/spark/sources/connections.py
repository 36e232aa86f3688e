"""One connection of each kind a process, whatever number of tasks it runs.

Spark uses a Python worker for many tasks, and may fork it: a connection belongs to the process that opened it.
"""

import atexit
import gc
import os
from functools import cache
from typing import Any

import redis
from adbc_driver_postgresql import dbapi as adbc

from penstock.channels.server import RedisClient, connect_redis
from penstock.database.connections import Connection, connect_postgres, plain_url

_postgres: dict[tuple[str, int], Connection] = {}


@atexit.register
def _close() -> None:
    """A process that ends by itself leaves nothing open; workers of Spark are ended."""
    for (_, process), connection in _postgres.items():
        if process == os.getpid():
            connection.close()


def redis_client(url: str) -> RedisClient:
    """A client whose entries come as they are on the wire: no dictionary for each."""
    return _redis_client(url, os.getpid())


@cache
def _redis_client(url: str, process: int) -> RedisClient:  # noqa: ARG001  part of the key
    client = connect_redis(url)
    # A Cluster's nodes have made their dictionaries before its own callbacks are asked.
    on_a_cluster = isinstance(client, redis.RedisCluster)
    client.set_response_callback("XRANGE", _flat_again if on_a_cluster else _as_it_is)
    return client


def _as_it_is(reply: Any, **_options: Any) -> Any:
    return reply


def _flat_again(reply: Any, **_options: Any) -> Any:
    return [(entry, [part for pair in fields.items() for part in pair]) for entry, fields in reply]


def postgres(url: str) -> Connection:
    """A connection in autocommit mode, opened again when it has broken.

    Raises:
        ServerUnavailable: No connection.
    """
    known = _postgres.get((url, os.getpid()))
    if known is None or known.closed or known.broken:
        if known is not None:
            known.close()
        known = _postgres[url, os.getpid()] = connect_postgres(url, application="spark")
    return known


def arrow(url: str) -> Any:
    """A connection of its own for a task, that gives Arrow batches; to be closed by it."""
    return adbc.connect(plain_url(url))


def warm() -> None:
    """Called once all is imported: Spark collects garbage after every task, through everything that is there by then."""
    _freeze(os.getpid())


@cache
def _freeze(process: int) -> None:  # noqa: ARG001  once a process
    gc.collect()
    gc.freeze()
