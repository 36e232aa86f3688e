"""Writing to a log without a pipeline: a client of redis-py and ``LogWriting``."""

from collections.abc import Sequence
from typing import Any, Self, TypeVar

from penstock.channels.scripts import Operation
from penstock.channels.server import RedisClient, connect_redis
from penstock.clients.log.running import run
from penstock.clients.log.writing import Evicted, LogWriting
from penstock.errors import AppendRefused, ServerUnavailable
from penstock.records import OffsetRange

T = TypeVar("T")


class LogWriter:
    """Writes to a log in Redis, for applications without Postgres; ``LogReader`` reads it.

    Redis alone holds what is written: a failover may lose the newest records, which readers then notice (``LogLost``).  With
    Postgres, stage records in the transaction that they tell of, and let a streamer write the log.

    Several writers, threads and processes may write to a log.  It belongs to them as soon as it exists: a streamer refuses it,
    and a writer refuses the log of a streamer.
    """

    def __init__(self, client: RedisClient, name: str, **options: Any) -> None:
        """Sets up; nothing is sent.

        Args:
            client: A client of redis-py, best from ``connect_redis``.
            name: Name of the log, 1 to 63 characters of ``a-z 0-9 _ . -``.
            options: ``shards``, their number, 1; ``namespace``, the first part of each key, ``penstock``; ``entries``, ``packed``
                or ``plain``, how the records of a call are stored; ``compression`` of packed ones, ``none`` or ``zstd``.

        Raises:
            InvalidName: The name or the namespace is not valid.
            InvalidLogCall: Another argument is out of range.
        """
        self._client = client
        self._writing = LogWriting(name, **options)
        self.name = name

    @classmethod
    def connect(cls, url: str, name: str, **options: Any) -> Self:
        """A writer at a URL of Redis: see ``penstock.channels.urls``; ``options`` are those of the constructor.

        Raises:
            InvalidSetting: The URL is invalid.
            ServerUnavailable: A Cluster does not answer.
            InvalidName: The name or the namespace is not valid.
        """
        return cls(connect_redis(url), name, **options)

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def append(
        self, entries: Sequence[Any], *, shard: int = 0, keep_at_least: int | None = None, token: str | None = None
    ) -> OffsetRange:
        """Appends records, all of them or none, and evicts the oldest if a number to keep is given.

        If the reply is lost, the call is repeated once, and appends nothing that it has appended before.  An application that
        repeats it further, or in another process, gives it a token.

        Args:
            entries: ``NewRecord`` or payloads alone; 1 to 10,000, up to 32 MiB.
            shard: Number of the shard; ``shard_for`` has that of a key.
            keep_at_least: Evicts the oldest records but so many; more are kept, because records leave by whole entries.
            token: Name of this call.  A call with the token of one of the last 1,000 of its shard appends nothing, and returns
                the offsets of then; its entries must be the same.

        Returns:
            The offsets of the records, the first and the last.

        Raises:
            ServerUnavailable: Redis does not answer: the records may have been appended.
            AppendRefused: Redis does not take writes now.
            ForeignLog: The log belongs to a pipeline, or to something else.
            InvalidRecord: A record is not acceptable.
            InvalidLogCall: An argument is out of range.
            InvalidMessage: The token is no text, empty or too long.
        """
        operation = self._writing.append(entries, shard, keep_at_least, token)
        try:
            return self._run(operation)
        except AppendRefused:
            raise
        except ServerUnavailable:
            return self._run(operation)

    def evict(
        self, shard: int = 0, *, upto: int | None = None, keep: int | None = None, older_than_s: float | None = None
    ) -> Evicted:
        """Evicts the oldest records; an entry goes when all of its records may, so some may stay that could go.

        Args:
            shard: Number of the shard.
            upto: Evicts records up to this offset; 0 evicts nothing.
            keep: Evicts all but so many, at least; 0 evicts everything.
            older_than_s: Evicts what was appended longer ago, in seconds.

        Raises:
            As ``append``.
        """
        while True:
            evicted = self._run(self._writing.evict(shard, upto, keep, older_than_s))
            if evicted.is_complete:
                return evicted

    def shard_for(self, key: str) -> int:
        """The shard of a key, as a pipeline's channel has it."""
        return self._writing.shard_for(key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, operation: Operation[T]) -> T:
        return run(self._client, [operation], f"writing to {self.name}")[0]
