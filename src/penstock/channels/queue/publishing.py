"""Writing by a pipeline: one script compares and writes messages, in the order of offsets.

A shard of a queue has a position like a log's tail: the last record that was written, or that was
passed over because it is done or waits in Postgres.  It is a stream of one entry, so that a shard's
tail is found at the same key and in the same form for all kinds of channel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.channels.batch_outcomes import Appended, Reply, parse_reply
from penstock.channels.commands import RedisClient
from penstock.channels.driving import Steps
from penstock.channels.queue.declared_limits import NewestLimits
from penstock.channels.queue.shard import ITEMS, QueueShard, run
from penstock.channels.routing import choose_hand, log_keys, queue_keys
from penstock.channels.scripts import Argument, as_text
from penstock.declaring.unique import mark_key
from penstock.errors import QueueDamaged
from penstock.records import Epoch, Offset, RecordId, ShardName


@dataclass(frozen=True, slots=True)
class QueuedRecord:
    """A record as the message that is written; its id is the record's."""

    id: RecordId  # the record
    offset: Offset  # its offset; 0 if it is written apart from the order
    tenant: str  # whose it is
    key: str  # its key within the tenant
    due_ms: int | None  # when it may be handed over, in milliseconds since 1970; None is now
    deadline_ms: int | None  # until when it may be, likewise
    # name, scope and window in milliseconds of a unique name; empty texts if it has none
    unique: tuple[str, str, str]
    payload: str  # the payload, as JSON text
    headers: str  # the headers, as JSON text
    staged_us: int  # when it was staged, in microseconds since 1970
    priority: object = "normal"  # within the tenant


@dataclass(frozen=True, slots=True)
class QueueBatch:
    """Consecutive records of a shard, with the messages of those that are to be written."""

    shard: ShardName  # where the records belong
    epoch: Epoch  # the epoch of the publisher
    first: Offset  # offset of the first record
    last: Offset  # offset of the last record; 0 if they are written apart from the order
    # no record before ``first`` exists any more: a position that is lower may continue here
    begins: bool
    # id of each record, with the time of its staging; 0 if it is done
    places: Sequence[tuple[RecordId, int]]
    messages: Sequence[QueuedRecord]  # in the order of their offsets

    @property
    def count(self) -> int:
        """Returns the number of records."""
        return self.last - self.first + 1


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of a message."""

    record: QueuedRecord
    word: str  # ``written``, ``known``, ``duplicate`` or ``full``
    holder: str = ""  # the message that has its unique name, if it is a duplicate
    in_window: bool = False  # whether that message has the name for a time, whatever becomes of it


@dataclass(frozen=True, slots=True)
class BatchWritten:
    """Outcome of a batch as for a log, and of each message that was written or refused.

    ``is_new``: nothing had been written before; what was, is lost.
    """

    reply: Reply
    results: list[Result]
    is_new: bool


def make_shard(namespace: str, shard: ShardName, streams: int, hand: int) -> QueueShard:
    """Returns the operations of a shard."""
    return QueueShard(queue_keys(namespace, shard), shard.shard, streams, hand)


class QueueWriter:
    """Writes to one shard of a queue, for a pipeline."""

    def __init__(
        self,
        client: RedisClient,
        namespace: str,
        shard: ShardName,
        streams: int,
        hand: int,
        limits: NewestLimits | None = None,
    ) -> None:
        self._client, self._shard = client, shard
        self._streams, self._hand = streams, hand
        self._own = make_shard(namespace, shard, streams, hand)
        self._log = log_keys(namespace, shard)
        self._own.limits = limits

    def write(self, batch: QueueBatch) -> BatchWritten:
        """Compares and writes, ``ITEMS`` messages a call; safe to repeat.

        Raises ``ServerUnavailable``, ``AppendRefused``, ``ForeignQueue`` or ``QueueDamaged``.
        """
        results: list[Result] = []
        reply: Reply = Appended(batch.last, 0)
        is_new, first, added = False, batch.first, 0
        for start in range(0, max(1, len(batch.messages)), ITEMS):
            messages = batch.messages[start : start + ITEMS]
            is_final = start + ITEMS >= len(batch.messages)
            last = batch.last if is_final or not batch.last else messages[-1].offset
            answer = self._run(self._write(batch, first, last, messages))
            reply = parse_reply(_as_log(answer), f"writing to {self._shard}")
            if not isinstance(reply, Appended):
                break
            added += reply.added
            is_new = is_new or bool(answer[3])
            results += [_result(*pair) for pair in zip(messages, answer[4:], strict=False)]
            reply = Appended(reply.tail, added)
            first = Offset(last + 1)
        return BatchWritten(reply, results, is_new)

    def _write(
        self, batch: QueueBatch, first: Offset, last: Offset, messages: Sequence[QueuedRecord]
    ) -> Steps[list[Any]]:
        id_, staged_us = batch.places[last - batch.first] if last else (0, 0)
        may_begin = int(batch.begins and first == batch.first)
        arguments: list[Argument] = [
            batch.epoch,
            first,
            last,
            may_begin,
            id_,
            staged_us,
            self._streams,
        ]
        for record in messages:
            arguments += self._encode(record)
        return (
            yield from self._own.call_limited(
                "queue/pipeline/write", arguments, (self._log.stream, self._log.epoch)
            )
        )

    def _encode(self, record: QueuedRecord) -> tuple[Argument, ...]:
        hand = choose_hand(record.tenant, self._streams, self._hand)
        return (
            str(record.id),
            record.tenant,
            mark_key(record.key, record.priority),
            ",".join(map(str, hand)),
            "" if record.due_ms is None else str(record.due_ms),
            "" if record.deadline_ms is None else str(record.deadline_ms),
            *record.unique,
            record.payload,
            record.headers,
        )

    def find_missing(self, ids: Sequence[RecordId]) -> list[RecordId]:
        """Returns those of the records that the queue does not have.

        Raises ``ServerUnavailable`` or ``ForeignQueue``.
        """
        arguments = [str(id_) for id_ in ids]
        reply = self._run(self._own.call("queue/pipeline/missing", arguments, (self._log.stream,)))
        return [RecordId(int(id_)) for id_ in reply[2:]]

    def keep_limits(self) -> None:
        """Declares the limits that apply, unless they are declared.  Raises as ``find_missing``."""
        self._run(self._own.keep_limits())

    def has_released(self, record: RecordId) -> bool:
        """Returns whether the queue has a record's message, without its unique name.

        Raises as ``find_missing``.
        """
        facts = self._run(self._own.explain(str(record)))
        return facts is not None and facts["has_name"] == "0.000"

    def delete(self, records: Sequence[RecordId]) -> None:
        """Deletes the messages of records in any state; a lease's holder finds it stale.

        Raises as ``find_missing``.
        """
        self._run(self._own.delete([str(id_) for id_ in records]))

    def sweep(self) -> None:
        """Dead-letters late messages, shrinks the queue if it can, and rebuilds missing parts.

        Raises as ``find_missing``.
        """
        self._run(self._own.sweep())

    def _run(self, steps: Steps[Any]) -> Any:
        return run(self._client, steps, f"writing to {self._shard}")


def _as_log(answer: list[Any]) -> Any:
    """Returns the reply in the form of a log's script."""
    match answer[0]:
        case b"appended":
            return answer[:3]
        case b"other":
            return [b"foreign", *answer[1:]]
        case b"damaged":
            raise QueueDamaged(
                "no stream of the queue can be written: all their keys hold other types; rename "
                "the keys"
            )
        case _:
            return answer


def _result(record: QueuedRecord, answer: bytes) -> Result:
    word, _, holder = as_text(answer).partition(" ")
    match word:
        case "duplicate" | "windowed":
            return Result(record, "duplicate", holder, word == "windowed")
        case _:
            return Result(record, word)
