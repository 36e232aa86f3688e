"""Writing to a log without a pipeline: what it asks of Redis, and what the replies say.

Nothing here does I/O: ``LogWriter`` and ``AsyncLogWriter`` send these operations, each of which is one script call.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from penstock.batches import MAX_RECORDS, Codec, Columns
from penstock.channels.routing import log_keys
from penstock.channels.scripts import Argument, Call, Operation, as_text
from penstock.clients.log.arguments import check_number, check_seconds
from penstock.declaring.kinds import MAX_PAYLOAD_BYTES, MAX_SHARDS, checked_name, shard_for_key
from penstock.declaring.unique import checked_text
from penstock.errors import ForeignLog, InvalidLogCall
from penstock.records import Offset, OffsetRange, Shard, ShardName, checked_schema
from penstock.staging.payload import headers_text, json_text, key_text, label_text

MAX_APPEND_BYTES = 32 * 1024 * 1024
"""Most bytes of their texts, keys and headers included, in UTF-8: Redis serves no other client while it copies them."""


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
        """Key, action, object, payload and headers, as a log holds them.

        Raises:
            InvalidRecord: One of them is not acceptable.
        """
        return (
            key_text(self.key) if self.key else "",
            label_text(self.action, "action"),
            label_text(self.object, "object"),
            json_text(self.data, "data", MAX_PAYLOAD_BYTES),
            headers_text(self.headers) or "",
        )


@dataclass(frozen=True, slots=True)
class Evicted:
    """What an eviction has left.

    Attributes:
        available: Offset of the first record that is left; one past ``last`` if there is none.
        last: The last offset ever given out.
        is_complete: Whether nothing more is to be evicted.
    """

    available: Offset
    last: Offset
    is_complete: bool


class LogWriting:
    """The operations that write to a log."""

    def __init__(
        self,
        name: str,
        *,
        shards: int = 1,
        namespace: str = "penstock",
        entries: Literal["packed", "plain"] = "packed",
        compression: Codec = "none",
    ) -> None:
        """Checks the arguments: see ``LogWriter``.

        Raises:
            InvalidName: The name or the namespace is not valid.
            InvalidLogCall: Another argument is out of range.
        """
        self.name = checked_name(name, "log")
        self.namespace = checked_schema(namespace, "namespace")
        self.shards = check_number("shards", shards, 1, MAX_SHARDS)
        if entries not in ("packed", "plain"):
            raise InvalidLogCall("entries", f"is {entries!r}; it takes packed or plain")
        self._is_plain, self._codec = entries == "plain", compression
        self._mark = f"writer {secrets.token_hex(8)}"

    def shard_for(self, key: str) -> int:
        """The shard of a key."""
        return shard_for_key(key, self.shards)

    def append(
        self, entries: Sequence[Any], shard: int, keep_at_least: int | None, token: str | None
    ) -> Operation[OffsetRange]:
        """Appends records: see ``LogWriter.append``.

        Raises:
            InvalidLogCall: An argument is out of range.
            InvalidRecord: A record is not acceptable.
            InvalidMessage: The token is none.
        """
        name = self._shard(shard)
        keep = -1 if keep_at_least is None else check_number("keep_at_least", keep_at_least)
        check_number("the number of entries", len(entries), 1, MAX_RECORDS)
        rows = [(each if isinstance(each, NewRecord) else NewRecord(each)).texts() for each in entries]
        size = sum(len(text.encode()) for text in chain.from_iterable(rows))
        check_number("the size of entries", size, 0, MAX_APPEND_BYTES)
        named = secrets.token_hex(16) if token is None else checked_text("token", token)
        head: list[Argument] = [self._mark, named, len(rows), keep]
        values: Sequence[Argument] = [*chain.from_iterable(rows)]
        if not self._is_plain:
            packed = Columns.pack([(n, *row, 0) for n, row in enumerate(rows)])
            columns = packed.compressed(self._codec)
            values = [columns.codec, *columns.texts]

        def parse(reply: Any) -> OffsetRange:
            match reply:
                case [b"written", int(first), int(last)]:
                    return OffsetRange(name, Offset(first), Offset(last))
                case _:
                    raise self._refusal(name, reply)

        call = Call(self._keys(name), [*head, int(self._is_plain), *values])
        return Operation("log/write", call, parse)

    def evict(self, shard: int, upto: int | None, keep: int | None, older_than_s: float | None) -> Operation[Evicted]:
        """Evicts the oldest entries: see ``LogWriter.evict``.

        Raises:
            InvalidLogCall: An argument is out of range, or not exactly one is given.
        """
        name = self._shard(shard)
        if [upto, keep, older_than_s].count(None) != 2:  # noqa: PLR2004  of three
            raise InvalidLogCall("upto, keep or older_than_s", "is to be given, and only one")
        age_s = -1 if older_than_s is None else check_seconds("older_than_s", older_than_s)
        arguments = (
            -1 if upto is None else check_number("upto", upto),
            -1 if keep is None else check_number("keep", keep),
            -1 if older_than_s is None else int(age_s * 1_000_000),
        )

        def parse(reply: Any) -> Evicted:
            match reply:
                case [b"evicted", int(first), int(last), int(more)]:
                    return Evicted(Offset(first), Offset(last), not more)
                case _:
                    raise self._refusal(name, reply)

        return Operation("log/evict", Call(self._keys(name)[:2], arguments), parse)

    def _shard(self, number: int) -> ShardName:
        return ShardName(self.name, Shard(check_number("shard", number, 0, self.shards - 1)))

    def _keys(self, shard: ShardName) -> tuple[str, str, str]:
        keys = log_keys(self.namespace, shard)
        return keys.stream, keys.epoch, keys.writes

    def _refusal(self, shard: ShardName, reply: Any) -> ForeignLog:
        match reply:
            case [b"owned", b"0"]:
                what = "something else has written it: it has entries, and no epoch"
            case [b"owned", bytes(epoch)]:
                what = f"it belongs to a pipeline (epoch {as_text(epoch)}), whose streamer alone may write it: stage records instead"
            case [b"broken", bytes(found)]:
                what = f"{as_text(found)} was not written by Penstock"
            case _:
                what = "a reply that no script of this release gives"
        return ForeignLog(f"writing to {shard}: {what}. Take another name or namespace")
