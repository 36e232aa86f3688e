"""A group of readers that share a log: each record goes to one of them."""

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

from penstock.channels.server import RedisClient, connect_redis, redis_errors
from penstock.clients.log.groups.operations import acknowledge, checked_ranges, find_ranges, move
from penstock.clients.log.groups.options import GroupOptions, Start
from penstock.clients.log.groups.reading import GroupReader
from penstock.clients.log.groups.results import GroupState, Taken
from penstock.clients.log.groups.running import drive
from penstock.clients.log.groups.steps import Steps
from penstock.declaring.kinds import Log
from penstock.records import Offset, OffsetRange, Record, ShardName

T = TypeVar("T")


class LogGroup:
    """One reader of a group; it is for one thread, and also a context manager.

    The group's position is in Redis, in each shard of the log, and moves with the read.  Readers in any number of processes
    that name the same log and group share the records.  All of them name the same options.

    Without ``retry_s`` each record is delivered at most once: it is lost with a reader that dies, or whose connection
    fails, before it has done the work.  With ``retry_s`` it is delivered at least once: again, until it is acknowledged.
    """

    def __init__(self, client: RedisClient, log: Log | str, group: str, **options: Any) -> None:
        """Sets up; nothing is sent.

        Args:
            client: The connection, which does not decode replies.
            log: A channel of a pipeline, or the name of a log; that of a source is ``orders@eu``.
            group: Name of the group.
            options: Those of ``GroupOptions``; ``shards`` is the channel's number, if one is given.

        Raises:
            InvalidName: A name or the namespace is not valid.
            InvalidLogCall: An option is out of range.
            DeclarationError: The log is read from several sources.
        """
        self.options = GroupOptions.make(log, group, options)
        self._client, self._reader = client, GroupReader(self.options)

    @classmethod
    def connect(cls, url: str, log: Log | str, group: str, **options: Any) -> Self:
        """A reader at a URL of Redis: see ``penstock.channels.urls``; ``close`` closes the connection.

        Raises:
            InvalidSetting: The URL is invalid.
            InvalidName: A name or the namespace is not valid.
            InvalidLogCall: An option is out of range.
            DeclarationError: The log is read from several sources.
        """
        return cls(connect_redis(url), log, group, **options)

    def read(self, count: int = 100, *, block_s: float = 0.0) -> Taken:
        """The next records for this reader, in the order of their offsets within a shard.

        First those that are due again, then new ones.  While other readers wait, this is a share of what is there.
        After 8 MiB of entries they are fewer; the entry that reaches this is still taken.

        Args:
            count: Most records, at most 1,000.
            block_s: How long to wait for the first one, in seconds, after the readers that wait already.

        Raises:
            Gap: The next records were evicted, and ``evicted`` is ``refuse``; nothing was read.
            LogDiverged: The log is not the one that the group has read; nothing was read.
            GroupLost: The group is gone, or does not exist and ``start`` is None.
            ServerUnavailable: Redis does not answer; without ``retry_s``, records that it has given are lost.
            AppendRefused: Redis takes no writes.
            ForeignLog: A key holds something else.
            DamagedEntry: An entry cannot be read.  It was taken: its text names the offsets.
            CodecMissing: The library is not installed; nothing was read.
            InvalidLogCall: ``count`` is out of range, or the log has more shards than the group was given: looked up at the first read, and once a
                minute after it.
        """
        return self._drive(self._reader.read(count, block_s), "reading")

    def acknowledge(self, records: Iterable[Record]) -> int:
        """The work on these records is done: they are not delivered again.

        Returns:
            How many were pending.  The others were acknowledged before, have expired, or were never delivered.

        Raises:
            ServerUnavailable: Redis does not answer; acknowledging again is safe.
        """
        return sum(self.acknowledge_offsets(shard, *ranges) for shard, ranges in find_ranges(records).items())

    def acknowledge_offsets(self, shard: int, *offsets: int | tuple[int, int] | OffsetRange) -> int:
        """As ``acknowledge``, by offsets of a shard, and by first and last offset of ranges: ``acknowledge_offsets(0, 7, (9, 12))``.

        Raises:
            ServerUnavailable: Redis does not answer; acknowledging again is safe.
            InvalidLogCall: There is no such shard, or a range is none.
        """
        keys = self._reader.shards[self.options.shard(shard)]
        return self._drive(acknowledge(keys, checked_ranges(offsets)), "acknowledging for")

    def rewind(self, shard: int, to: int | Start) -> Offset:
        """Moves the group in a shard, or begins it there; what was pending from there on is forgotten, as it comes again.

        Args:
            shard: Number of the shard.
            to: The offset that is read next, which may be a future one; ``first``: the first record that the log has;
                ``last``: what comes after its last one.

        Returns:
            The offset that is read next.

        Raises:
            ServerUnavailable: Redis does not answer; repeating it is safe.
            AppendRefused: Redis takes no writes.
            ForeignLog: A key holds something else.
            InvalidLogCall: There is no such shard, or ``to`` is no offset.
        """
        name = self.options.shard(shard)
        moving = move(self._reader.shards[name], name, self.options.group, to)
        return self._drive(moving, "rewinding")

    def states(self) -> dict[ShardName, GroupState]:
        """The group in each shard; changes nothing.

        Raises:
            ServerUnavailable: Redis does not answer.
            ForeignLog: A key holds something else.
        """
        return self._drive(self._reader.states(whole=True), "inspecting")

    def delete(self) -> None:
        """Deletes the group; the log stays.

        Raises:
            ServerUnavailable: Redis does not answer; repeating it is safe.
        """
        for keys in self._reader.shards.values():
            with redis_errors(self._what("deleting")):
                self._client.delete(*keys.own())

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _drive(self, steps: Steps[T], what: str) -> T:
        return drive(self._client, self.options.namespace, steps, self._what(what))

    def _what(self, what: str) -> str:
        return f"{what} group {self.options.group} of {self.options.log}"
