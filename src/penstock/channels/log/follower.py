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

    The next read may be requested ahead, so that Redis looks up records while the caller works on the previous ones.
    Records that were requested for other positions than those given to ``wait`` are dropped.
    """

    def __init__(
        self, client: RedisClient, namespace: str, *, count: int, on_unusable: OnUnusable | None = None
    ) -> None:
        """Sets up; it connects on first use.  ``wait`` returns at most ``count`` records of a shard.

        ``on_unusable`` is called with a shard whose next entry Penstock did not write, and the others are read; None raises.
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
        """Records after each of ``positions``; waits up to ``block_ms`` for the first one, or not at all if that is None.

        Raises ``ServerUnavailable`` or ``ForeignLog``.
        """
        try:
            return self._wait(positions, block_ms)
        except ForeignLog:  # a key of another type, which Redis does not name
            return self._read_each(positions)

    def _wait(self, positions: Positions, block_ms: int | None) -> ReadRecords:
        kept = self._take_kept(positions)
        others = {shard: at for shard, at in positions.items() if shard not in kept}
        if not others:
            return kept
        return {**kept, **self._limit(others, self._read(others, None if kept else block_ms))}

    def _take_kept(self, positions: Positions) -> ReadRecords:
        """Records left over from the last reads, of shards that continue within them."""
        kept, self._kept = self._kept, {}
        following = {s: each for s, each in kept.items() if s in positions and each.continues(positions[s])}
        return self._limit(positions, following)

    def _limit(self, positions: Positions, found: ReadRecords) -> ReadRecords:
        """The first ``count`` records after each of ``positions``.

        Keeps all that come after it: an entry may end beyond ``count``, and a worker may take fewer.
        """
        following = {shard: records.after(positions[shard]) for shard, records in found.items()}
        self._kept |= following
        return {shard: records[: self._count] for shard, records in following.items() if records}

    def _read(self, positions: Positions, block_ms: int | None) -> ReadRecords:
        if self._is_cluster:
            return self._poll(positions, block_ms or 0)
        if found := self._receive_requested(positions):
            return found
        with redis_errors("waiting for records"):
            self._send(positions, block_ms)
            return self._receive(positions)

    def _read_each(self, positions: Positions) -> ReadRecords:
        """Records available now, shard by shard; unreadable shards are left out."""
        found: ReadRecords = {}
        for shard, after in positions.items():
            with leaving_out(shard, self._on_unusable):
                records = read(self._client, self._namespace, shard, after, self._count, parse=parse_leading)
                if records:
                    found[shard] = records
        return found

    def request_ahead(self, positions: Positions) -> None:
        """Requests the records after ``positions`` for the next ``wait``; does nothing on a Cluster, which has several servers.

        Raises ``ServerUnavailable``.
        """
        kept = {s: at for s, at in positions.items() if s in self._kept and self._kept[s].continues(at)}
        positions = {s: at for s, at in positions.items() if s not in kept}
        if self._is_cluster or not positions:
            return
        self._disconnect()
        with redis_errors("requesting records"):
            self._send(positions, None)
        self._requested = dict(positions)

    def close(self) -> None:
        """Disconnects and releases the connection if a reply is outstanding, and forgets what it has read."""
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
            found = self._receive(requested)
        except (redis.RedisError, ForeignLog):
            return {}  # the server may have closed an idle connection: `wait` reads again
        return {s: records for s, records in found.items() if positions.get(s) == requested[s]}

    def _send(self, positions: Positions, block_ms: int | None) -> None:
        self._connection = self._pool.get_connection()
        block = () if block_ms is None else (b"BLOCK", block_ms)
        streams = [log_keys(self._namespace, shard).stream for shard in positions]
        after = [f"{offset}-0" for offset in positions.values()]
        command = ("XREAD", "COUNT", self._entries, *block, "STREAMS", *streams, *after)
        try:
            self._connection.send_packed_command([pack_command(command)], check_health=False)
        except redis.RedisError:
            self._disconnect()
            raise

    def _receive(self, positions: Positions) -> ReadRecords:
        """The reply to the last command, read without the client, which would build a dictionary for every entry."""
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
        """The records of each shard before its first entry that is not Penstock's."""
        found: ReadRecords = {}
        for shard, entries in read.items():
            with leaving_out(shard, self._on_unusable):
                found[shard] = parse_leading(shard, entries)
        if found:
            self._adapt(sum(len(read[shard]) for shard in found), sum(map(len, found.values())))
        return found

    def _adapt(self, entries: int, records: int) -> None:
        """Asks for as many entries next time as hold ``count`` records, if they go on like those that were read.

        Step by step: small entries may be followed by ones of thousands of records.
        """
        needed = min(GROWTH * self._entries, -(-self._count * entries // max(1, records)))
        self._entries = needed if records <= entries else min(needed, MAX_BATCHES)

    def _poll(self, positions: Positions, wait_ms: int) -> ReadRecords:
        """As ``wait``, on a Cluster: its shards are on several nodes, and no single command can wait for all of them."""
        deadline = monotonic() + wait_ms / 1000
        while True:
            with redis_errors("waiting for records"):
                answers = ask_for_more(self._client, self._namespace, positions, self._entries).execute()
            read = {s: entries for s, entries in zip(positions, answers, strict=True) if entries}
            found = self._parse(read)
            if read or monotonic() >= deadline:
                return found
            sleep(POLL_S)
