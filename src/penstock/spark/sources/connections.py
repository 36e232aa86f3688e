"""One connection of each kind for all tasks of a process.

Spark uses a Python worker for many tasks, and may fork it, so a connection belongs to the process that opened it.
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
from penstock.logs import configure_task

_postgres: dict[tuple[str, int], Connection] = {}


@atexit.register
def _close() -> None:
    """Closes the connections when the process exits by itself; Spark kills its workers."""
    for (_, process), connection in _postgres.items():
        if process == os.getpid():
            connection.close()


def redis_client(url: str) -> RedisClient:
    """A client that returns stream entries as they are on the wire, without a dictionary for each."""
    configure_task()
    return _redis_client(url, os.getpid())


@cache
def _redis_client(url: str, process: int) -> RedisClient:  # noqa: ARG001  part of the key
    client = connect_redis(url)
    # On a Cluster, the nodes' clients have built the dictionaries before this callback runs.
    on_a_cluster = isinstance(client, redis.RedisCluster)
    client.set_response_callback("XRANGE", _flatten if on_a_cluster else _unchanged)
    return client


def _unchanged(reply: Any, **_options: Any) -> Any:
    return reply


def _flatten(reply: Any, **_options: Any) -> Any:
    return [(entry, [part for pair in fields.items() for part in pair]) for entry, fields in reply]


def postgres(url: str) -> Connection:
    """A connection in autocommit mode, reopened if it is broken.

    Raises:
        ServerUnavailable: Postgres does not answer.
    """
    configure_task()
    known = _postgres.get((url, os.getpid()))
    if known is None or known.closed or known.broken:
        if known is not None:
            known.close()
        known = _postgres[url, os.getpid()] = connect_postgres(url, application="spark")
    return known


def arrow(url: str) -> Any:
    """A new connection that returns Arrow batches; the task closes it."""
    return adbc.connect(plain_url(url))


def warm() -> None:
    """Freezes all imported objects: Spark collects garbage after every task, over everything that is not frozen."""
    _freeze(os.getpid())


@cache
def _freeze(process: int) -> None:  # noqa: ARG001  once a process
    gc.collect()
    gc.freeze()
