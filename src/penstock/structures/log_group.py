"""A group of readers that share a log: each record goes to one of them."""

from collections.abc import Iterable, Sequence
from typing import Any, Self, TypeVar, get_args

from penstock.channels.commands import AsyncRedisClient, RedisClient, RedisCommands
from penstock.channels.driving import AsyncClient, BlockingClient, Operations, Request, Steps, both
from penstock.channels.log.arguments import check_number
from penstock.channels.scripts import Call, script
from penstock.channels.server import redis_errors
from penstock.declaring.kinds import LogChannel
from penstock.records import Offset, OffsetRange, Record, ShardName
from penstock.structures.group_options import GroupOptions, Start
from penstock.structures.group_results import GroupState, Taken, parse_moved
from penstock.structures.turns import GroupReader

C = TypeVar("C", bound=RedisCommands)
T = TypeVar("T")

MAX_RANGES = 500
"""Most ranges of one call."""


class _LogGroup(Operations[C]):
    """Operations of one reader of a group."""

    def __init__(self, client: C, log: LogChannel | str, group: str, **options: Any) -> None:
        """Sets up; nothing is sent.

        Args:
            client: A client of redis-py, or of ``redis.asyncio``, which does not decode replies.
            log: A channel of a pipeline, or the name of a log; that of a source is ``orders@eu``.
            group: Name of the group.
            options: Those of ``GroupOptions``; ``shards`` is the channel's number, if one is given.

        Raises:
            InvalidName: A name or the namespace is not valid.
            InvalidLogCall: An option is out of range.
            DeclarationError: The log is read from several sources.
        """
        self.options = GroupOptions.make(log, group, options)
        self._client = client
        self._reader = GroupReader(client, self.options)

    @classmethod
    def connect(cls, url: str, log: LogChannel | str, group: str, **options: Any) -> Self:
        """Returns a reader at a URL of Redis: see ``penstock.channels.redis_urls``.

        Raises:
            InvalidSetting: The URL is invalid.
            PenstockError: As the constructor.
        """
        return cls(cls._connect(url), log, group, **options)

    @both
    def read(self, count: int = 100, *, block_s: float = 0.0) -> Steps[Taken]:
        """Returns the next records for this reader, in the order of offsets within a shard.

        Records that are due again come first, then new ones.  While other readers wait, this is a
        share of the available records.  It ends with the entry that reaches 8 MiB of entries.

        Args:
            count: Most records, at most 1,000.
            block_s: How long to wait for the first one, in seconds, after the readers that wait
                already.

        Raises:
            Gap: The next records were evicted, and ``evicted`` is ``refuse``; nothing was read.
            LogDiverged: The log is not the one that the group has read; nothing was read.
            GroupLost: The group is gone, or does not exist and ``start`` is None.
            ServerUnavailable: Redis does not answer; without ``retry_s``, records in its reply are
                lost.
            AppendRefused: Redis takes no writes.
            ForeignLog: A key holds something else.
            DamagedEntry: An entry cannot be read.  It was taken: its text names the offsets.
            CodecMissing: The library is not installed; nothing was read.
            InvalidLogCall: ``count`` is out of range, or the log has more shards than the group:
                checked at the first read, and once a minute after it.
        """
        with redis_errors(self._describe("reading")):
            return (yield from self._reader.read(count, block_s))

    @both
    def acknowledge(self, records: Iterable[Record]) -> Steps[int]:
        """Marks records as done: they are not delivered again.

        Returns:
            How many were pending.  The others were acknowledged before, have expired, or were never
                delivered.

        Raises:
            ServerUnavailable: Redis does not answer; acknowledging again is safe.
        """
        acknowledged = 0
        for shard, ranges in _find_ranges(records).items():
            acknowledged += yield from self._acknowledge(shard, ranges)
        return acknowledged

    @both
    def acknowledge_offsets(
        self, shard: int, *offsets: int | tuple[int, int] | OffsetRange
    ) -> Steps[int]:
        """Acknowledges offsets of a shard, and ranges by their first and last offset.

        As ``acknowledge``; an example is ``acknowledge_offsets(0, 7, (9, 12))``.

        Raises:
            ServerUnavailable: Redis does not answer; acknowledging again is safe.
            InvalidLogCall: There is no such shard, or a range is none.
        """
        return (yield from self._acknowledge(shard, _checked_ranges(offsets)))

    def _acknowledge(self, shard: int, ranges: Sequence[tuple[int, int]]) -> Steps[int]:
        _, due, pending = self._reader.shards[self.options.shard(shard)].ledger
        acknowledged = 0
        for begin in range(0, len(ranges), MAX_RANGES):
            flat = [offset for span in ranges[begin : begin + MAX_RANGES] for offset in span]
            reply = yield from self._call(
                "acknowledge", Call((due, pending), flat), "acknowledging for"
            )
            acknowledged += int(reply[1])
        return acknowledged

    @both
    def rewind(self, shard: int, to: int | Start) -> Steps[Offset]:
        """Moves the group in a shard, or begins it there.

        Pending records from there on are forgotten, as they come again.

        Args:
            shard: Number of the shard.
            to: The offset that is read next, which may be a future one; ``first``: the first record
                of the log; ``last``: the record after its last one.

        Returns:
            The offset that is read next.

        Raises:
            ServerUnavailable: Redis does not answer; repeating it is safe.
            AppendRefused: Redis takes no writes.
            ForeignLog: A key holds something else.
            InvalidLogCall: There is no such shard, or ``to`` is no offset.
        """
        name = self.options.shard(shard)
        if to not in get_args(Start):
            check_number("to", to)
        keys = self._reader.shards[name]
        call = Call((keys.log.stream, keys.log.epoch, keys.cursor, *keys.ledger), (to,))
        return parse_moved(
            (yield from self._call("move", call, "rewinding")), name, self.options.group
        )

    @both
    def states(self) -> Steps[dict[ShardName, GroupState]]:
        """Returns the group's state in each shard; changes nothing.

        Raises:
            ServerUnavailable: Redis does not answer.
            ForeignLog: A key holds something else.
        """
        with redis_errors(self._describe("inspecting")):
            return (yield from self._reader.states(whole=True))

    @both
    def delete(self) -> Steps[None]:
        """Deletes the group; the log stays.

        Raises:
            ServerUnavailable: Redis does not answer; repeating it is safe.
        """
        for keys in self._reader.shards.values():
            with redis_errors(self._describe("deleting")):
                yield _deletion(keys.own())

    def _call(self, name: str, call: Call, activity: str) -> Steps[Any]:
        with redis_errors(self._describe(activity)):
            [reply] = yield from script(f"log/group/{name}").checked_steps([call])
        return reply

    def _describe(self, activity: str) -> str:
        return f"{activity} group {self.options.group} of {self.options.log}"


class LogGroup(_LogGroup[RedisClient], BlockingClient):
    """One reader of a group; it is for one thread, and also a context manager.

    The group's position is in Redis, in each shard of the log, and moves with the read.  Readers in
    any number of processes that name the same log and group share the records.  All of them name
    the same options.

    Without ``retry_s`` each record is delivered at most once: it is lost with a reader that dies,
    or whose connection fails, before it has done the work.  With ``retry_s`` it is delivered at
    least once: again, until it is acknowledged.
    """


class AsyncLogGroup(_LogGroup[AsyncRedisClient], AsyncClient):
    """As ``LogGroup``, for asyncio; one task at a time uses it.

    A ``read`` that is cancelled may have taken records.  With ``retry_s`` they are delivered again;
    without it they are lost, as each record is then delivered at most once.  To wait for a limited
    time, pass ``block_s``: that loses nothing.  A reader that was cancelled while it waited keeps
    its place in the line for 1.5 seconds.
    """


def _deletion(keys: Sequence[str]) -> Request:
    return lambda client: client.delete(*keys)


def _find_ranges(records: Iterable[Record]) -> dict[int, list[tuple[int, int]]]:
    """Returns the offsets of records, as ranges by the number of their shard."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    for record in sorted(records, key=lambda record: (record.shard, record.offset)):
        shard_ranges = ranges.setdefault(record.shard, [])
        if shard_ranges and shard_ranges[-1][1] >= record.offset - 1:
            shard_ranges[-1] = (shard_ranges[-1][0], int(record.offset))
        else:
            shard_ranges.append((int(record.offset), int(record.offset)))
    return ranges


def _checked_ranges(
    offsets: Sequence[int | tuple[int, int] | OffsetRange],
) -> list[tuple[int, int]]:
    """Returns offsets and ranges as ranges.

    Raises ``InvalidLogCall`` if one ends before it begins, or is no offset.
    """
    ranges = []
    for item in offsets:
        match item:
            case OffsetRange():
                first, last = int(item.first), int(item.last)
            case (first, last):
                pass
            case _:
                first = last = item
        check_number("offsets", first, 1)
        ranges.append((first, check_number("offsets", last, first)))
    return ranges
