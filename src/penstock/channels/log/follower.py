"""Following a log: waits for the records after a position in each of its shards."""

from collections.abc import Mapping, Sequence
from time import monotonic, sleep
from typing import Any

import redis
from hiredis import pack_command

from penstock.batches.record_batch import Records
from penstock.channels.commands import RedisClient
from penstock.channels.isolation import OnUnusable, leaving_out
from penstock.channels.log.stream_entries import Fields, parse_leading
from penstock.channels.log.streams import FIRST_ENTRIES, GROWTH, ask_for_more, read
from penstock.channels.routing import log_keys
from penstock.channels.server import redis_errors
from penstock.errors import ForeignLog
from penstock.records import Offset, ShardName

POLL_S = 0.02
"""Pause between two reads of a Cluster, in seconds."""

MAX_BATCHES = 64
"""Most entries of a shard in one read where entries hold batches: bounds the memory of a worker."""

Positions = Mapping[ShardName, Offset]
ReadRecords = dict[ShardName, Records]


class Follower:
    """Reads several shards at once on its own connection, for use by one thread.

    The next read may be requested ahead, so that Redis looks up records while the caller works on
    the previous ones. Records that were requested for other positions than those given to ``wait``
    are dropped.
    """

    def __init__(
        self,
        client: RedisClient,
        namespace: str,
        *,
        count: int,
        on_unusable: OnUnusable | None = None,
    ) -> None:
        """Sets up; it connects on first use.

        ``wait`` returns at most ``count`` records of a shard. ``on_unusable`` is called with a
        shard whose next entry Penstock did not write, and the others are read; None raises.
        """
        self._on_unusable = on_unusable
        self._client, self._namespace, self._count = client, namespace, count
        self._pool: Any = getattr(client, "connection_pool", None)
        self._is_cluster = isinstance(client, redis.RedisCluster)
        self._connection: Any = None
        self._requested: Positions = {}
        self._kept: ReadRecords = {}
        self._entries = min(count, FIRST_ENTRIES)

    def wait(self, positions: Positions, block_ms: int | None) -> ReadRecords:
        """Returns the records after each position; waits up to ``block_ms`` for the first one.

        With ``block_ms`` None it does not wait. Raises ``ServerUnavailable`` or ``ForeignLog``.
        """
        try:
            return self._wait(positions, block_ms)
        except ForeignLog:  # a key of another type, which Redis does not name
            return self._read_each(positions)

    def _wait(self, positions: Positions, block_ms: int | None) -> ReadRecords:
        leftover = self._take_kept(positions)
        others = {shard: offset for shard, offset in positions.items() if shard not in leftover}
        if not others:
            return leftover
        return {
            **leftover,
            **self._limit(others, self._read(others, None if leftover else block_ms)),
        }

    def _take_kept(self, positions: Positions) -> ReadRecords:
        """Returns records left over from the last reads, for shards that continue within them."""
        leftover, self._kept = self._kept, {}
        following = {
            s: records
            for s, records in leftover.items()
            if s in positions and records.continues(positions[s])
        }
        return self._limit(positions, following)

    def _limit(self, positions: Positions, unlimited: ReadRecords) -> ReadRecords:
        """Returns the first ``count`` records after each of ``positions``.

        Keeps those after them: an entry may end beyond ``count``, and a worker may take fewer.
        """
        following = {shard: records.after(positions[shard]) for shard, records in unlimited.items()}
        self._kept |= following
        return {shard: records[: self._count] for shard, records in following.items() if records}

    def _read(self, positions: Positions, block_ms: int | None) -> ReadRecords:
        if self._is_cluster:
            return self._poll(positions, block_ms or 0)
        if records := self._receive_requested(positions):
            return records
        with redis_errors("waiting for records"):
            self._send(positions, block_ms)
            return self._receive(positions)

    def _read_each(self, positions: Positions) -> ReadRecords:
        """Returns the records available now, shard by shard; unreadable shards are left out."""
        by_shard: ReadRecords = {}
        for shard, offset in positions.items():
            with leaving_out(shard, self._on_unusable):
                records = read(
                    self._client, self._namespace, shard, offset, self._count, parse=parse_leading
                )
                if records:
                    by_shard[shard] = records
        return by_shard

    def request_ahead(self, positions: Positions) -> None:
        """Requests the records after ``positions`` for the next ``wait``.

        Does nothing on a Cluster, which has several servers. Raises ``ServerUnavailable``.
        """
        leftover = {
            s: offset
            for s, offset in positions.items()
            if s in self._kept and self._kept[s].continues(offset)
        }
        positions = {s: offset for s, offset in positions.items() if s not in leftover}
        if self._is_cluster or not positions:
            return
        self._disconnect()
        with redis_errors("requesting records"):
            self._send(positions, None)
        self._requested = dict(positions)

    def close(self) -> None:
        """Disconnects, releases a connection with an outstanding reply, and drops what was read."""
        self._disconnect()
        self._kept = {}

    def _disconnect(self) -> None:
        connection, self._connection, self._requested = self._connection, None, {}
        if connection is not None:
            connection.disconnect()
            self._pool.release(connection)

    def _receive_requested(self, positions: Positions) -> ReadRecords:
        requested, self._requested = self._requested, {}
        if not requested:
            return {}
        try:
            received = self._receive(requested)
        except (redis.RedisError, ForeignLog):
            return {}  # the server may have closed an idle connection: `wait` reads again
        return {s: records for s, records in received.items() if positions.get(s) == requested[s]}

    def _send(self, positions: Positions, block_ms: int | None) -> None:
        self._connection = self._pool.get_connection()
        block = () if block_ms is None else (b"BLOCK", block_ms)
        streams = [log_keys(self._namespace, shard).stream for shard in positions]
        entry_ids = [f"{offset}-0" for offset in positions.values()]
        command = ("XREAD", "COUNT", self._entries, *block, "STREAMS", *streams, *entry_ids)
        try:
            self._connection.send_packed_command([pack_command(command)], check_health=False)
        except redis.RedisError:
            self._disconnect()
            raise

    def _receive(self, positions: Positions) -> ReadRecords:
        """Returns the reply to the last command.

        Does not use the client, which would build a dictionary for every entry.
        """
        connection, self._connection = self._connection, None
        try:
            answer = connection.read_response(disable_decoding=True)
        except BaseException:
            connection.disconnect()  # or its reply would be taken for that of another command
            raise
        finally:
            self._pool.release(connection)
        shards = {log_keys(self._namespace, shard).stream.encode(): shard for shard in positions}
        pairs = answer.items() if isinstance(answer, dict) else answer or ()
        return self._parse({shards[stream]: entries for stream, entries in pairs})

    def _parse(self, read: Mapping[ShardName, Sequence[tuple[bytes, Fields]]]) -> ReadRecords:
        """Returns the records of each shard before its first foreign entry."""
        parsed: ReadRecords = {}
        for shard, entries in read.items():
            with leaving_out(shard, self._on_unusable):
                parsed[shard] = parse_leading(shard, entries)
        if parsed:
            self._adapt(sum(len(read[shard]) for shard in parsed), sum(map(len, parsed.values())))
        return parsed

    def _adapt(self, entries: int, records: int) -> None:
        """Adapts the number of entries of the next read to hold ``count`` records.

        It assumes that entries continue like those just read, and grows step by step: small entries
        may be followed by entries of thousands of records.
        """
        needed = min(GROWTH * self._entries, -(-self._count * entries // max(1, records)))
        self._entries = needed if records <= entries else min(needed, MAX_BATCHES)

    def _poll(self, positions: Positions, wait_ms: int) -> ReadRecords:
        """Polls a Cluster as ``wait`` waits for a server.

        The shards are on several nodes, and no single command can wait for all of them.
        """
        deadline = monotonic() + wait_ms / 1000
        while True:
            with redis_errors("waiting for records"):
                answers = ask_for_more(
                    self._client, self._namespace, positions, self._entries
                ).execute()
            read = {s: entries for s, entries in zip(positions, answers, strict=True) if entries}
            parsed = self._parse(read)
            if read or monotonic() >= deadline:
                return parsed
            sleep(POLL_S)
