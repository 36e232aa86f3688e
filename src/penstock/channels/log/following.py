"""Following a log: waiting for what comes after a place in each of its shards."""

from collections.abc import Mapping
from time import monotonic, sleep
from typing import Any

import redis
from hiredis import pack_command

from penstock.channels.log.entries import records_of
from penstock.channels.routing import log_keys
from penstock.channels.server import RedisClient, redis_errors
from penstock.records import Offset, Record, ShardName

POLL_S = 0.02
"""Pause between two looks at a Cluster, in seconds."""

Positions = Mapping[ShardName, Offset]
Found = dict[ShardName, list[Record]]


class Follower:
    """Reads several shards at once, on a connection of its own; one thread uses it.

    It may be asked ahead: Redis then looks up what comes next while the caller works on what came.  Nothing leans on
    that: what was asked for other places than those wanted in the end is dropped.
    """

    def __init__(self, client: RedisClient, namespace: str, *, count: int) -> None:
        """Sets up; it connects when it is first asked.

        Args:
            client: Gives the connection.
            namespace: First part of the keys.
            count: Most records of a shard at a time.
        """
        self._client, self._namespace, self._count = client, namespace, count
        self._is_cluster = isinstance(client, redis.RedisCluster)
        self._connection: Any = None
        self._asked: Positions = {}

    def wait(self, positions: Positions, block_ms: int | None) -> Found:
        """Records after each of ``positions``; waits up to ``block_ms`` for the first (None: does not wait).

        Raises:
            ServerUnavailable: Redis does not answer.
            ForeignLog: A stream holds entries that are not ours.
        """
        if self._is_cluster:
            return self._poll(positions, block_ms or 0)
        if found := self._asked_ahead(positions):
            return found
        with redis_errors("waiting for records"):
            self._send(positions, block_ms)
            return self._receive(positions)

    def ask_ahead(self, positions: Positions) -> None:
        """Asks for what comes after ``positions``, for the next ``wait``; not on a Cluster, which has several servers.

        Raises:
            ServerUnavailable: Redis does not answer.
        """
        if self._is_cluster or not positions:
            return
        self.close()
        with redis_errors("asking for records"):
            self._send(positions, None)
        self._asked = dict(positions)

    def close(self) -> None:
        """Gives the connection back; broken off, if an answer is still to come."""
        connection, self._connection, self._asked = self._connection, None, {}
        if connection is not None:
            connection.disconnect()
            self._client.connection_pool.release(connection)

    def _asked_ahead(self, positions: Positions) -> Found:
        asked, self._asked = self._asked, {}
        if not asked:
            return {}
        try:
            found = self._receive(asked)
        except redis.RedisError:
            return {}  # a server may have closed what waited too long: it is asked again
        return {s: records for s, records in found.items() if positions.get(s) == asked[s]}

    def _send(self, positions: Positions, block_ms: int | None) -> None:
        self._connection = self._client.connection_pool.get_connection()
        block = () if block_ms is None else (b"BLOCK", block_ms)
        streams = [log_keys(self._namespace, shard).stream for shard in positions]
        after = [f"{offset}-0" for offset in positions.values()]
        command = ("XREAD", "COUNT", self._count, *block, "STREAMS", *streams, *after)
        try:
            self._connection.send_packed_command([pack_command(command)], check_health=False)
        except redis.RedisError:
            self.close()
            raise

    def _receive(self, positions: Positions) -> Found:
        """The answer to what was sent last, not through the client: that would make a dictionary of every entry first."""
        connection, self._connection = self._connection, None
        try:
            answer = connection.read_response(disable_decoding=True)
        except BaseException:
            connection.disconnect()  # or the answer would be taken for that to another question
            raise
        finally:
            self._client.connection_pool.release(connection)
        shards = {log_keys(self._namespace, shard).stream.encode(): shard for shard in positions}
        pairs = answer.items() if isinstance(answer, dict) else answer or ()
        return {shards[stream]: records_of(shards[stream], entries) for stream, entries in pairs}

    def _poll(self, positions: Positions, wait_ms: int) -> Found:
        """The same on a Cluster, where the shards lie on several nodes: nobody can wait for all of them at once."""
        deadline = monotonic() + wait_ms / 1000
        while True:
            pipeline = self._client.pipeline(transaction=False)
            for shard, after in positions.items():
                stream = log_keys(self._namespace, shard).stream
                pipeline.xrange(stream, f"{after + 1}-0", "+", self._count)
            with redis_errors("waiting for records"):
                answers = pipeline.execute()
            found = {
                shard: records_of(shard, entries)
                for shard, entries in zip(positions, answers, strict=True)
                if entries
            }
            if found or monotonic() >= deadline:
                return found
            sleep(POLL_S)
