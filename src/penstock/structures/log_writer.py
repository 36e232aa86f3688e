"""Writing to a log without a pipeline."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, Self, TypeVar

from penstock.batches.columns import Codec, Columns
from penstock.batches.entry import MAX_RECORDS
from penstock.channels.commands import AsyncRedisClient, RedisClient, RedisCommands
from penstock.channels.driving import AsyncClient, BlockingClient, Operations, Steps, both
from penstock.channels.log.arguments import check_choice, check_number, check_seconds
from penstock.channels.routing import log_keys
from penstock.channels.scripts import Argument, Call, Operation, as_text, operate
from penstock.declaring.kinds import MAX_PAYLOAD_BYTES, MAX_SHARDS, checked_name, shard_for_key
from penstock.declaring.unique import checked_text
from penstock.errors import AppendRefused, ForeignLog, InvalidLogCall, ServerUnavailable
from penstock.records import Offset, OffsetRange, Shard, ShardName, checked_schema
from penstock.staging.payload import headers_text, json_text, key_text, label_text

C = TypeVar("C", bound=RedisCommands)
T = TypeVar("T")

MAX_APPEND_BYTES = 32 * 1024 * 1024
"""Limit of the texts, keys and headers included, in bytes of UTF-8: Redis serves no other client
while it copies them."""


@dataclass(frozen=True, slots=True)
class NewRecord:
    """A record for ``LogWriter.append``.

    Attributes:
        data: The payload: anything that JSON can say.
        key: What it is about, for readers.
        action: What happened.
        object: What it happened to.
        headers: Beside the payload: trace ids, versions.
    """

    data: Any
    key: str = ""
    action: str = "append"
    object: str = "entry"
    headers: dict[str, Any] | None = None

    def texts(self) -> tuple[str, str, str, str, str]:
        """Returns key, action, object, payload and headers, as a log holds them.

        Raises ``InvalidRecord``.
        """
        return (
            key_text(self.key) if self.key else "",
            label_text(self.action, "action"),
            label_text(self.object, "object"),
            json_text(self.data, "data", MAX_PAYLOAD_BYTES),
            headers_text(self.headers) or "",
        )


@dataclass(frozen=True, slots=True)
class Eviction:
    """The extent of a log after an eviction.

    Attributes:
        available: Offset of the first record that is left; one past ``last`` if there is none.
        last: The last offset ever given out.
        is_complete: Whether nothing more is to be evicted.
    """

    available: Offset
    last: Offset
    is_complete: bool


class _LogWriter(Operations[C]):
    """Operations of a writer."""

    def __init__(
        self,
        client: C,
        name: str,
        *,
        shards: int = 1,
        namespace: str = "penstock",
        entries: Literal["packed", "plain"] = "packed",
        compression: Codec = "none",
    ) -> None:
        """Sets up; nothing is sent.

        Args:
            client: A client of redis-py, best from ``connect_redis``; of ``redis.asyncio`` for
                asyncio.
            name: Name of the log, 1 to 63 characters of ``a-z 0-9 _ . -``.
            shards: Number of its shards.
            namespace: First part of each key.
            entries: How the records of a call are stored.
            compression: Of packed entries.

        Raises:
            InvalidName: The name or the namespace is not valid.
            InvalidLogCall: Another argument is out of range.
        """
        self._client = client
        self.name = checked_name(name, "log")
        self._namespace = checked_schema(namespace, "namespace")
        self._shards = check_number("shards", shards, 1, MAX_SHARDS)
        check_choice("entries", entries, ("packed", "plain"))
        self._is_plain, self._codec = entries == "plain", compression
        self._mark = f"writer {secrets.token_hex(8)}"

    @classmethod
    def connect(cls, url: str, name: str, **options: Any) -> Self:
        """Returns a writer at a URL of Redis: see ``penstock.channels.redis_urls``.

        ``options`` are those of the constructor.

        Raises:
            InvalidSetting: The URL is invalid.
            ServerUnavailable: A Cluster does not answer.
            InvalidName: The name or the namespace is not valid.
        """
        return cls(cls._connect(url), name, **options)

    @both
    def append(
        self,
        entries: Sequence[Any],
        *,
        shard: int = 0,
        keep_at_least: int | None = None,
        token: str | None = None,
    ) -> Steps[OffsetRange]:
        """Appends records, all of them or none, and evicts the oldest if a number to keep is given.

        If the reply is lost, the call is repeated once, and appends nothing that it has appended
        before.  An application that repeats it further, or in another process, or after it was
        cancelled, gives it a token.

        Args:
            entries: ``NewRecord`` or payloads alone; 1 to 10,000, up to 32 MiB.
            shard: Number of the shard; ``shard_for`` has that of a key.
            keep_at_least: Evicts the oldest records but so many; more are kept, because records
                leave by whole entries.
            token: Name of this call.  A call with the token of one of the last 1,000 of its shard
                appends nothing, and returns the offsets of then; its entries must be the same.

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
        operation = self._appending(entries, shard, keep_at_least, token)
        try:
            return (yield from self._run(operation))
        except AppendRefused:
            raise
        except ServerUnavailable:
            return (yield from self._run(operation))

    @both
    def evict(
        self,
        shard: int = 0,
        *,
        upto: int | None = None,
        keep: int | None = None,
        older_than_s: float | None = None,
    ) -> Steps[Eviction]:
        """Evicts the oldest records.

        An entry is evicted once all of its records may be, so some may stay longer.

        Args:
            shard: Number of the shard.
            upto: Evicts records up to this offset; 0 evicts nothing.
            keep: Evicts all but at least this number; 0 evicts everything.
            older_than_s: Evicts records that were appended longer ago, in seconds.

        Raises as ``append``.
        """
        while True:
            evicted = yield from self._run(self._evicting(shard, upto, keep, older_than_s))
            if evicted.is_complete:
                return evicted

    def shard_for(self, key: str) -> int:
        """Returns the shard of a key, as a pipeline's channel computes it."""
        return shard_for_key(key, self._shards)

    def _run(self, operation: Operation[T]) -> Steps[T]:
        [result] = yield from operate([operation], f"writing to {self.name}")
        return result

    def _appending(
        self, entries: Sequence[Any], shard: int, keep_at_least: int | None, token: str | None
    ) -> Operation[OffsetRange]:
        name = self._shard(shard)
        keep = -1 if keep_at_least is None else check_number("keep_at_least", keep_at_least)
        check_number("the number of entries", len(entries), 1, MAX_RECORDS)
        rows = [
            (entry if isinstance(entry, NewRecord) else NewRecord(entry)).texts()
            for entry in entries
        ]
        size = sum(len(text.encode()) for text in chain.from_iterable(rows))
        check_number("the size of entries", size, 0, MAX_APPEND_BYTES)
        call_token = secrets.token_hex(16) if token is None else checked_text("token", token)
        values: Sequence[Argument] = [*chain.from_iterable(rows)]
        if not self._is_plain:
            columns = Columns.pack([(n, *row, 0) for n, row in enumerate(rows)]).compressed(
                self._codec
            )
            values = [columns.codec, *columns.texts]

        def parse(reply: Any) -> OffsetRange:
            match reply:
                case [b"written", int(first), int(last)]:
                    return OffsetRange(name, Offset(first), Offset(last))
                case _:
                    raise _refusal(name, reply)

        call = Call(
            self._keys(name),
            [self._mark, call_token, len(rows), keep, int(self._is_plain), *values],
        )
        return Operation("log/write", call, parse)

    def _evicting(
        self, shard: int, upto: int | None, keep: int | None, older_than_s: float | None
    ) -> Operation[Eviction]:
        name = self._shard(shard)
        if [upto, keep, older_than_s].count(None) != 2:  # noqa: PLR2004  of three
            raise InvalidLogCall("upto, keep or older_than_s", "is to be given, and only one")
        arguments = (
            -1 if upto is None else check_number("upto", upto),
            -1 if keep is None else check_number("keep", keep),
            -1
            if older_than_s is None
            else int(check_seconds("older_than_s", older_than_s) * 1_000_000),
        )

        def parse(reply: Any) -> Eviction:
            match reply:
                case [b"evicted", int(first), int(last), int(more)]:
                    return Eviction(Offset(first), Offset(last), not more)
                case _:
                    raise _refusal(name, reply)

        return Operation("log/evict", Call(self._keys(name)[:2], arguments), parse)

    def _shard(self, number: int) -> ShardName:
        return ShardName(self.name, Shard(check_number("shard", number, 0, self._shards - 1)))

    def _keys(self, shard: ShardName) -> tuple[str, str, str]:
        keys = log_keys(self._namespace, shard)
        return keys.stream, keys.epoch, keys.writes


class LogWriter(_LogWriter[RedisClient], BlockingClient):
    """Writes to a log in Redis, for applications without Postgres; ``LogReader`` reads it.

    Redis alone holds what is written: a failover may lose the newest records, which readers then
    notice (``LogLost``).  With Postgres, stage records in the transaction that they tell of, and
    let a streamer write the log.

    Several writers, threads and processes may write to a log.  It belongs to them as soon as it
    exists: a streamer refuses it, and a writer refuses the log of a streamer.
    """


class AsyncLogWriter(_LogWriter[AsyncRedisClient], AsyncClient):
    """As ``LogWriter``, for asyncio."""


def _refusal(shard: ShardName, reply: Any) -> ForeignLog:
    match reply:
        case [b"owned", b"0"]:
            reason = "something else has written it: it has entries, and no epoch"
        case [b"owned", bytes(epoch)]:
            reason = (
                f"it belongs to a pipeline (epoch {as_text(epoch)}), whose streamer alone may "
                "write it: stage records instead"
            )
        case [b"broken", bytes(content)]:
            reason = f"{as_text(content)} was not written by Penstock"
        case _:
            reason = "a reply that no script of this release gives"
    return ForeignLog(f"writing to {shard}: {reason}. Choose another name or namespace")
