"""Publishing to queues: in order from the journal, and out of order waiting and missing records.

A record counts as outstanding as long as its staged row is there: the worker that has its effect
deletes the row in the transaction of the effect.  What Redis has is never the truth about it:

    replay      from the position in Redis, as for every kind of channel; done records are passed
                over
    refill      waiting records: due within the hour, refused before because their tenant had no
                room, or missing
    reconcile   page by page: records that Redis should have and does not know become waiting ones
    cancel      records that were finished by somebody else than a worker: Redis forgets their
                messages
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from hashlib import sha256
from time import monotonic
from typing import Any

import structlog

from penstock.channels.batch_outcomes import Batch, Behind, FencedOff, Reply, Unusable
from penstock.channels.commands import RedisClient
from penstock.channels.isolation import OnUnusable, leaving_out
from penstock.channels.queue.declared_limits import NewestLimits
from penstock.channels.queue.publishing import (
    BatchWritten,
    QueueBatch,
    QueuedRecord,
    QueueWriter,
    Result,
)
from penstock.crash_points import crashpoint
from penstock.database.driver_errors import postgres_errors
from penstock.database.executor import StatementResult
from penstock.database.registry import RegisteredChannel, read_queue_limits
from penstock.database.store import Store
from penstock.declaring.outcomes import RESERVED
from penstock.declaring.unique import MAX_NAME_BYTES, name_as_staged, name_within
from penstock.errors import Fenced
from penstock.parsing import find_number, parse_json
from penstock.records import BEGINNING, Epoch, Offset, RecordId, Shard, ShardName
from penstock.streaming.senders import Replies
from penstock.streaming.unpublished import BATCH_BYTES

log = structlog.get_logger("penstock.streamer")

NEAR = timedelta(hours=1)
"""Time before a record is due from which it may be in Redis."""

_NEAR_MS = NEAR // timedelta(milliseconds=1)
_MAX_MS = 1 << 52
"""Limit of the times that Lua counts exactly."""

Due = tuple[RecordId, int]
"""A record, and when it is due, in milliseconds since 1970."""


def make_queue_batch(batch: Batch) -> tuple[QueueBatch, list[Due]]:
    """Returns the messages of a batch, and its records that wait in Postgres until they are due."""
    near: list[QueuedRecord] = []
    far: list[Due] = []
    places: list[tuple[RecordId, int]] = []
    for offset, values in enumerate(batch.columns.rows(), batch.first):
        is_done = values[1] is None
        places.append((values[0], 0 if is_done else values[6]))
        if is_done:
            continue
        record = make_queued(Offset(offset), values)
        # at its deadline it is a dead letter, due or not
        until_ms = min(record.due_ms or 0, record.deadline_ms or _MAX_MS)
        if until_ms - values[6] // 1000 > _NEAR_MS:
            far.append((record.id, until_ms))
        else:
            near.append(record)
    queue_batch = QueueBatch(
        batch.shard, batch.epoch, batch.first, batch.last, batch.begins, places, near
    )
    return queue_batch, far


def unordered_batch(shard: ShardName, epoch: Epoch, rows: Iterable[Sequence[Any]]) -> QueueBatch:
    """Returns a batch outside the order: the position does not move."""
    messages = [make_queued(BEGINNING, row) for row in rows]
    return QueueBatch(shard, epoch, BEGINNING, BEGINNING, False, (), messages)


def make_queued(offset: Offset, values: Sequence[Any]) -> QueuedRecord:
    """Returns a record as a message.

    Action, object and time of the record go into the reserved header, whose last mention counts.  A
    producer that writes SQL may have used the character that separates names in Redis in a tenant
    or a key.
    """
    id_, tenant, action, object_, data, headers, staged_us = values
    reserved = _read_reserved(headers, id_)
    reserved.pop("staged_us", None)  # it comes last: see ``read_identity``
    unique = _unique(reserved.get("unique"), tenant)
    due = _time(reserved.get("due"))
    if due is None and (delay := _time(reserved.get("delay_ms"))):
        due = staged_us // 1000 + delay
    key = reserved.get("key")
    key = key.replace("\1", "\N{REPLACEMENT CHARACTER}") if isinstance(key, str) else ""
    tenant = tenant.replace("\1", "\N{REPLACEMENT CHARACTER}")
    times = due, _time(reserved.get("deadline"))
    added = _add_reserved(
        headers, {**reserved, "action": action, "object": object_, "staged_us": staged_us}
    )
    return QueuedRecord(
        id_, offset, tenant, key, *times, unique, data, added, staged_us, reserved.get("priority")
    )


def _read_reserved(headers: str, record: RecordId) -> dict[str, Any]:
    """Returns the reserved header, into which a producer that writes SQL may put anything."""
    if RESERVED not in headers:
        return {}
    try:
        parsed = parse_json(headers)
        reserved = parsed.get(RESERVED, {}) if isinstance(parsed, dict) else {}
    except ValueError:  # of whatever header: nested too deep, or a number with too many digits
        reserved = None
    if not isinstance(reserved, dict):
        log.warning("header ignored", record=record, header=RESERVED, reason="it is not an object")
        return {}
    return reserved


def _add_reserved(headers: str, reserved: dict[str, Any]) -> str:
    """Returns the headers with the reserved one at their end.

    The others are not parsed, so that numbers stay as they are.
    """
    text = json.dumps({RESERVED: reserved}, ensure_ascii=False)
    if not headers.startswith("{") or headers == "{}":
        return text
    return f"{headers[:-1]}, {text[1:]}"


def _time(value: object) -> int | None:
    """Returns a time in milliseconds; None if it is none, or out of range."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < _MAX_MS:
        return int(value)
    return None


def _unique(value: object, tenant: str) -> tuple[str, str, str]:
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        return "", "", ""
    name = name_within(tenant, name) if value.get("within") == "tenant" else name
    until, for_s = value.get("until"), value.get("for_s")
    if until == "window" and isinstance(for_s, (int, float)) and 0 < for_s < _MAX_MS / 1000:
        return name, "window", f"{for_s * 1000:.0f}"
    return name, "queued" if until == "queued" else "running", ""


REFILL_RECORDS = 200
"""Limit of the records that are refilled in one step of a shard."""

REFILL_TENANTS, REFILL_A_TENANT = 100, 50
"""Per step of a shard: at most 100 full tenants get one trial record each; a tenant with room again
gets up to 50."""

RECONCILE_RECORDS = 1000
"""Page of a reconciliation: approximate number of records of the journal, and limit of the waiting
ones."""

MAINTAIN_S = 0.05
"""Time budget of one round of maintenance, in seconds."""

KEEP_CANCELLED = timedelta(minutes=1)
"""Minimum time for which the worker of a cancelled job can learn of it."""

RETRY_PAUSE = timedelta(seconds=1)
"""Pause before a record is tried again whose unique name a finished record still has."""


@dataclass(frozen=True, slots=True)
class _Holder:
    """Holder of a unique name: until it is done, handed over (``is_queued``), or for a time."""

    record: RecordId
    shard: int
    is_queued: bool
    in_window: bool


class Queues:
    """Queues that a publisher writes to, on its connections.

    ``on_unusable`` is called with a shard that is left out; None raises.
    """

    reads_once = True  # what Redis refuses is noted on the connection that reads

    def __init__(
        self, store: Store, client: RedisClient, epoch: Epoch, on_unusable: OnUnusable | None = None
    ) -> None:
        self._store, self._client = store, client
        self._epoch, self._on_unusable = epoch, on_unusable
        self._channels: dict[str, RegisteredChannel] = {}
        self._writers: dict[ShardName, QueueWriter] = {}
        self._tenants: dict[ShardName, str] = {}
        self._journaled: dict[ShardName, Offset] = {}
        self._given: dict[ShardName, RecordId] = {}
        self._named: dict[str, str] = {}
        self._next = 0
        self._limits: dict[str, NewestLimits] = {}
        self._state: object = None

    def update(self, channels: Mapping[str, RegisteredChannel]) -> None:
        """Takes the registered channels: streams or limits of queues may have changed."""
        queues = {name: channel for name, channel in channels.items() if channel.traits.has_jobs}
        state = queues, self._limits_version() if queues else None
        if state != self._state:
            self._channels, self._writers, self._state = queues, {}, state
            self._limits = {
                name: NewestLimits(name, partial(self._read_limits, name)) for name in queues
            }

    def _limits_version(self) -> object:
        return self._store.row("queue_limits_version", doing="reading limits of queues")

    def _read_limits(self, queue: str) -> Mapping[str, Any]:
        with postgres_errors("reading limits of queues"):
            return read_queue_limits(self._store, queue)

    def __contains__(self, channel: object) -> bool:
        return channel in self._channels

    def _writer(self, shard: ShardName) -> QueueWriter:
        if shard not in self._writers:
            channel = self._channels[shard.channel]
            self._writers[shard] = QueueWriter(
                self._client,
                self._store.scope.namespace,
                shard,
                channel.streams or 1,
                channel.hand or 1,
                self._limits[shard.channel],
            )
        return self._writers[shard]

    def send(self, batch: Batch) -> Reply:
        """Writes a batch of the journal; records that are not due wait in Postgres."""
        queue_batch, far = make_queue_batch(batch)
        self._put_in_waiting(batch.shard, far)
        crashpoint("queues.after_waiting")
        written = self._write(queue_batch)
        crashpoint("queues.after_write")
        self._note(queue_batch, written)
        if written.is_new or (
            isinstance(written.reply, Behind) and written.reply.tail < batch.first
        ):
            self._execute("note_lost", batch.shard)
        return written.reply

    def send_all(self, batches: Iterable[Batch], _: int) -> Replies:
        """Writes a batch of each shard, once all have been read."""
        for batch in [*batches]:
            with leaving_out(batch.shard, self._on_unusable):
                yield batch, self.send(batch)

    def _write(self, batch: QueueBatch) -> BatchWritten:
        """Writes the records of a batch whose unique names no other record has."""
        is_one = self._channels[batch.shard.channel].shards == 1
        refused = self._find_windowed(batch) if is_one else self._claim_names(batch)
        ids = {result.record.id for result in refused}
        sendable = [message for message in batch.messages if message.id not in ids]
        written = self._writer(batch.shard).write(replace(batch, messages=sendable))
        if is_one:
            self._note_windows(batch.shard, written.results)
        return replace(written, results=[*written.results, *refused])

    def _find_windowed(self, batch: QueueBatch) -> list[Result]:
        """Returns records whose unique name another record has for a time.

        That may be since before Redis lost its data; Redis knows all others.
        """
        in_window = [message for message in batch.messages if message.unique[1] == "window"]
        if not in_window:
            return []
        holders = dict(
            self._rows(
                "held_windows",
                batch.shard,
                {"names": [_stored_name(message) for message in in_window]},
            )
        )
        return [
            Result(message, "duplicate", str(holder), in_window=True)
            for message in in_window
            if (holder := holders.get(_stored_name(message), message.id)) != message.id
        ]

    def _note_windows(self, shard: ShardName, results: Sequence[Result]) -> None:
        """Notes which records have a name for a time, so that it outlives Redis."""
        if in_window := [
            result.record
            for result in results
            if result.word == "written" and result.record.unique[1] == "window"
        ]:
            self._execute("claim_names", shard, _claims(in_window))

    def _claim_names(self, batch: QueueBatch) -> list[Result]:
        """Claims the unique names of records; returns those whose name another record has.

        A shard cannot know the names of the others.
        """
        unique_records = [
            message
            for message in batch.messages
            if (name := message.unique[0]) and name == name_as_staged(name)
        ]
        if not unique_records:
            return []
        holders = self._claim(batch.shard, unique_records)
        queued = {claimant for claimant in holders.values() if claimant.is_queued}
        if released := [
            claimant.record for claimant in queued if self._has_released(batch.shard, claimant)
        ]:
            holders = self._claim(batch.shard, unique_records, released)
        return [
            Result(message, "duplicate", str(holder.record), holder.in_window)
            for message in unique_records
            if (holder := holders[_stored_name(message)]).record != message.id
        ]

    def _claim(
        self,
        shard: ShardName,
        unique_records: Sequence[QueuedRecord],
        released: Sequence[RecordId] = (),
    ) -> dict[str, _Holder]:
        """Gives each free name to its first record; returns the holders."""
        values = _claims(unique_records, released)
        names = values["names"]
        while True:
            self._execute("claim_names", shard, values)
            rows = self._rows("name_holders", shard, {"names": names})
            holders = {name: _Holder(*holder) for name, *holder in rows}
            if len(holders) == len({*names}):  # else one was forgotten in between
                return holders

    def _has_released(self, shard: ShardName, holder: _Holder) -> bool:
        """Returns whether the message that has a name until its hand-over was handed over."""
        name = ShardName(shard.channel, Shard(holder.shard))
        return self._writer(name).has_released(holder.record)

    def _forget_names(self, shard: ShardName) -> None:
        """Forgets unused unique names, a page of the queue's at a time."""
        limits = {"after": self._named.get(shard.channel, ""), "records": RECONCILE_RECORDS}
        [(last,)] = self._rows("forget_names", shard, limits)
        self._named[shard.channel] = last or ""

    def check(self, shard: ShardName) -> None:
        """Checks that the keys of a shard can be used."""
        self._writer(shard).find_missing([])
        self._writer(shard).sweep()

    def maintain(self, tails: Mapping[ShardName, Offset]) -> int:
        """Refills, reconciles and sweeps usable shards for about ``MAINTAIN_S``.

        Returns the number of records given to Redis.
        """
        end, fed = monotonic() + MAINTAIN_S, 0
        shards = [shard for shard in sorted(tails) if shard.channel in self._channels]
        for _ in shards:
            shard = shards[self._next % len(shards)]
            self._next += 1
            with leaving_out(shard, self._on_unusable):
                self._writer(shard).sweep()
                self._writer(shard).keep_limits()
                self._forget_cancelled(shard, end)
                self._reconcile(shard, tails[shard])
                fed += self._refill(shard, end)
            if monotonic() >= end:
                break
        return fed

    def _forget_cancelled(self, shard: ShardName, end: float) -> None:
        keep = max(KEEP_CANCELLED, self._channels[shard.channel].keep)
        limits = {"records": RECONCILE_RECORDS, "keep": keep}
        while ids := [record for (record,) in self._rows("take_cancelled", shard, limits)]:
            self._writer(shard).delete(ids)
            self._execute("forget_cancelled", shard, {"ids": ids})
            if monotonic() >= end:
                return

    def _refill(self, shard: ShardName, end: float) -> int:
        fed = 0
        while True:
            limits = {"records": REFILL_RECORDS, "bytes": BATCH_BYTES}
            rows = self._rows("due_records", shard, limits)
            fed += len(self._refill_rows(shard, rows))
            if not rows or monotonic() >= end:
                return fed + self._refill_refused(shard, end)

    def _refill_refused(self, shard: ShardName, end: float) -> int:
        """Refills full tenants, in turn, until a whole lap has given none.

        At least some of them are refilled, whatever the time.
        """
        fed, fed_before, is_whole_lap = 0, 0, not self._tenants.get(shard)
        while True:
            if tenants := self._next_refused(shard):
                fed += self._refill_tenants(shard, tenants)
            elif is_whole_lap and fed == fed_before:
                return fed
            else:
                fed_before, is_whole_lap = fed, True
            if monotonic() >= end:
                return fed

    def _next_refused(self, shard: ShardName) -> list[str]:
        """Returns the next tenants without room; none after the last one, then the first again."""
        limits = {"after": self._tenants.get(shard, ""), "tenants": REFILL_TENANTS}
        tenants = [tenant for (tenant,) in self._rows("refused_tenants", shard, limits)]
        self._tenants[shard] = tenants[-1] if tenants else ""
        return tenants

    def _refill_tenants(self, shard: ShardName, tenants: Sequence[str]) -> int:
        """Tries the first record of each tenant, and refills those that have room for it."""
        first = self._read_refused(shard, tenants, 1)
        if first:
            self._tenants[shard] = first[-1][2]  # as far as their bytes went
        taken_ids = self._refill_rows(shard, first, was_refused=True)
        able = [tenant for record, id_, tenant, *_ in first if record in taken_ids or id_ is None]
        further_rows = self._read_refused(shard, able, REFILL_A_TENANT) if able else []
        return len(taken_ids) + len(self._refill_rows(shard, further_rows, was_refused=True))

    def _read_refused(self, shard: ShardName, tenants: Sequence[str], records: int) -> list[Any]:
        limits = {"tenants": list(tenants), "records": records, "bytes": BATCH_BYTES}
        return self._rows("refused_records", shard, limits)

    def _refill_rows(
        self, shard: ShardName, rows: Sequence[Sequence[Any]], *, was_refused: bool = False
    ) -> set[RecordId]:
        """Gives Redis waiting records; returns those that it took.

        A record that was refused before (``was_refused``) is not noted again.
        """
        if not rows:
            return set()
        finished = [record for record, id_, *_ in rows if id_ is None]
        batch = unordered_batch(
            shard, self._epoch, (message for _, *message in rows if message[0] is not None)
        )
        written = self._write(batch)
        if isinstance(written.reply, Unusable):
            raise written.reply.error
        if isinstance(written.reply, FencedOff):
            raise Fenced(
                f"{shard}: the queue is in epoch {written.reply.epoch}, this streamer in the older "
                f"epoch {self._epoch}. Start the streamer again"
            )
        crashpoint("queues.after_feed")
        taken_ids = [
            result.record.id
            for result in written.results
            if result.word in {"written", "known", "taken"}
        ]
        self._note(batch, written, was_refused=was_refused)
        if taken_ids:
            self._execute("note_given", shard, {"ids": taken_ids})
        if finished:
            self._execute("forget_waiting", shard, {"ids": finished})
        return set(taken_ids)

    def _note(self, batch: QueueBatch, written: BatchWritten, *, was_refused: bool = False) -> None:
        """Notes in Postgres which messages Redis refused, and why."""
        full = [result for result in written.results if result.word == "full" and not was_refused]
        self._put_refused(batch.shard, full, [result.record.tenant for result in full])
        duplicates = [result for result in written.results if result.word == "duplicate"]
        if duplicates:
            finished = self._finish(batch.shard, duplicates)
            remaining = [result for result in duplicates if result.record.id not in finished]
            self._put_refused(batch.shard, remaining, [None for _ in remaining])

    def _finish(self, shard: ShardName, duplicates: Sequence[Result]) -> set[RecordId]:
        values = {
            "ids": [result.record.id for result in duplicates],
            "staged_us": [result.record.staged_us for result in duplicates],
            "names": [name_as_staged(result.record.unique[0]) for result in duplicates],
            "reserved": RESERVED,
            # None if something other than a pipeline wrote the message.
            "holders": [find_number(result.holder.encode()) for result in duplicates],
            "in_window": [result.in_window for result in duplicates],
        }
        return {record for (record,) in self._rows("finish_duplicates", shard, values)}

    def _put_refused(
        self, shard: ShardName, results: Sequence[Result], tenants: Sequence[str | None]
    ) -> None:
        if results:
            ids = [result.record.id for result in results]
            values = {"ids": ids, "tenants": tenants, "pause": RETRY_PAUSE}
            self._execute("put_refused", shard, values)

    def _put_in_waiting(self, shard: ShardName, far: Sequence[Due]) -> None:
        if far:
            ids, dues = zip(*far, strict=True)
            values = {"ids": list(ids), "dues": list(dues), "near": NEAR}
            self._execute("put_in_waiting", shard, values)

    def _reconcile(self, shard: ShardName, tail: Offset) -> None:
        """Reconciles a page of the journal, one of waiting records, and one of unique names."""
        self._forget_names(shard)
        limits = {
            "after": self._journaled.get(shard, BEGINNING),
            "tail": tail,
            "records": RECONCILE_RECORDS,
        }
        [(last, ids)] = self._rows("outstanding_journaled", shard, limits)
        self._journaled[shard] = Offset(last) if last is not None else BEGINNING
        limits = {"after": self._given.get(shard, 0), "records": RECONCILE_RECORDS}
        rows = self._rows("given_records", shard, limits)
        self._given[shard] = rows[-1][0] if len(rows) == RECONCILE_RECORDS else RecordId(0)
        outstanding = [*ids, *(record for record, is_outstanding in rows if is_outstanding)]
        missing = self._writer(shard).find_missing(outstanding)
        if missing:
            self._execute("put_missing", shard, {"ids": missing})
        if finished := [record for record, is_outstanding in rows if not is_outstanding]:
            self._execute("forget_waiting", shard, {"ids": finished})

    def _execute(
        self, name: str, shard: ShardName, values: Mapping[str, Any] = {}
    ) -> StatementResult:
        parameters = {"channel": shard.channel, "shard": shard.shard}
        return self._store.execute(name, {**parameters, **values}, doing=f"publishing {shard}")

    def _rows(self, name: str, shard: ShardName, values: Mapping[str, Any]) -> list[Any]:
        return self._execute(name, shard, values).fetchall()


def _claims(records: Sequence[QueuedRecord], released: Sequence[RecordId] = ()) -> dict[str, Any]:
    """Returns the values of ``claim_names``."""
    return {
        "names": [_stored_name(record) for record in records],
        "ids": [record.id for record in records],
        "are_queued": [record.unique[1] == "queued" for record in records],
        "windows": [int(record.unique[2]) if record.unique[2] else None for record in records],
        "released": list(released),
    }


def _stored_name(record: QueuedRecord) -> str:
    """Returns the stored unique name: a hash if it is too long for an index."""
    name = record.unique[0].replace("\0", "\1").encode()
    return name.decode() if len(name) <= MAX_NAME_BYTES else sha256(name).hexdigest()
