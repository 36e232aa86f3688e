"""Following a log: waits for the records after a position in each of its shards."""

from collections.abc import Mapping
from time import monotonic, sleep
from typing import Any

import redis
from hiredis import pack_command

from penstock.channels.log.entries import parse_entries
from penstock.channels.routing import log_keys
from penstock.channels.server import RedisClient, redis_errors
from penstock.records import Offset, Record, ShardName

POLL_S = 0.02
"""Pause between two reads of a Cluster, in seconds."""

Positions = Mapping[ShardName, Offset]
Records = dict[ShardName, list[Record]]


class Follower:
    """Reads several shards at once on its own connection, for use by one thread.

    The next read may be requested ahead, so that Redis looks up records while the caller works on the previous ones.
    Records that were requested for other positions than those given to ``wait`` are dropped.
    """

    def __init__(self, client: RedisClient, namespace: str, *, count: int) -> None:
        """Sets up; it connects on first use.

        Args:
            client: Provides the connection.
            namespace: First part of the keys.
            count: Most records of a shard in one read.
        """
        self._client, self._namespace, self._count = client, namespace, count
        self._is_cluster = isinstance(client, redis.RedisCluster)
        self._connection: Any = None
        self._requested: Positions = {}

    def wait(self, positions: Positions, block_ms: int | None) -> Records:
        """Records after each of ``positions``; waits up to ``block_ms`` for the first one, or not at all if that is None.

        Raises:
            ServerUnavailable: Redis does not answer.
            ForeignLog: A stream holds entries that Penstock did not write.
        """
        if self._is_cluster:
            return self._poll(positions, block_ms or 0)
        if found := self._receive_requested(positions):
            return found
        with redis_errors("waiting for records"):
            self._send(positions, block_ms)
            return self._receive(positions)

    def request_ahead(self, positions: Positions) -> None:
        """Requests the records after ``positions`` for the next ``wait``; does nothing on a Cluster, which has several servers.

        Raises:
            ServerUnavailable: Redis does not answer.
        """
        if self._is_cluster or not positions:
            return
        self.close()
        with redis_errors("requesting records"):
            self._send(positions, None)
        self._requested = dict(positions)

    def close(self) -> None:
        """Disconnects and releases the connection if a reply is outstanding."""
        connection, self._connection, self._requested = self._connection, None, {}
        if connection is not None:
            connection.disconnect()
            self._client.connection_pool.release(connection)

    def _receive_requested(self, positions: Positions) -> Records:
        requested, self._requested = self._requested, {}
        if not requested:
            return {}
        try:
            found = self._receive(requested)
        except redis.RedisError:
            return {}  # the server may have closed an idle connection: `wait` reads again
        return {s: records for s, records in found.items() if positions.get(s) == requested[s]}

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

    def _receive(self, positions: Positions) -> Records:
        """The reply to the last command, read without the client, which would build a dictionary for every entry."""
        connection, self._connection = self._connection, None
        try:
            answer = connection.read_response(disable_decoding=True)
        except BaseException:
            connection.disconnect()  # or its reply would be taken for that of another command
            raise
        finally:
            self._client.connection_pool.release(connection)
        shards = {log_keys(self._namespace, shard).stream.encode(): shard for shard in positions}
        pairs = answer.items() if isinstance(answer, dict) else answer or ()
        return {shards[stream]: parse_entries(shards[stream], entries) for stream, entries in pairs}

    def _poll(self, positions: Positions, wait_ms: int) -> Records:
        """As ``wait``, on a Cluster: its shards are on several nodes, and no single command can wait for all of them."""
        deadline = monotonic() + wait_ms / 1000
        while True:
            pipeline = self._client.pipeline(transaction=False)
            for shard, after in positions.items():
                stream = log_keys(self._namespace, shard).stream
                pipeline.xrange(stream, f"{after + 1}-0", "+", self._count)
            with redis_errors("waiting for records"):
                answers = pipeline.execute()
            found = {
                shard: parse_entries(shard, entries)
                for shard, entries in zip(positions, answers, strict=True)
                if entries
            }
            if found or monotonic() >= deadline:
                return found
            sleep(POLL_S)
