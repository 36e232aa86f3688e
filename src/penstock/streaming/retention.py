"""Retention removes what every consumer has passed and ``keep`` no longer holds, on both servers.

The slowest checkpoint decides, never a length: a consumer that was away finds everything when it
comes back.  Postgres first, then Redis: surplus entries in Redis are harmless.

Records marked in an Ick stay in Postgres until every member they marked has been processed, so that
a Redis that comes back empty can be given all marks again that it may have lost.  Those of a queue
stay until they are done: retention removes their names from the journal, and none of them.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import inf
from time import monotonic

import structlog

from penstock.channels.channel_kinds import get_kind
from penstock.channels.commands import RedisClient
from penstock.channels.isolation import OnUnusable, ask_each, leaving_out
from penstock.crash_points import crashpoint
from penstock.database.store import Store
from penstock.declaring.kinds import Channel
from penstock.pipeline import Pipeline
from penstock.records import BEGINNING, Offset, ShardName
from penstock.schema.capture import inspect_triggers
from penstock.streaming.faults import FaultLog, check_missed
from penstock.streaming.publisher import Publisher

log = structlog.get_logger("penstock.streamer")

RECORDS_PER_TRANSACTION = 5000
"""Number of records after which a transaction removes no further journal row, which keeps it short:
about 20 ms."""

TICKS_KEPT = 100


@dataclass(frozen=True, slots=True)
class Retained:
    """Result of a round of retention: removed rows of Postgres, entries of logs; shards left."""

    records: int = 0
    evicted: int = 0
    left: tuple[ShardName, ...] = ()


@dataclass(frozen=True, slots=True)
class _Removed:
    """Result of one transaction: records in removed journal rows, rows removed, last offset."""

    journaled: int
    removed: int
    last_offset: Offset | None


def retain(  # noqa: PLR0913  two servers, and what is known of the channel
    store: Store,
    client: RedisClient,
    channel: Channel,
    tails: dict[ShardName, Offset],
    *,
    shards: Iterable[ShardName] | None = None,
    until: float = inf,
    on_unusable: OnUnusable | None = None,
) -> Retained:
    """Removes from the shards of a channel, in turn, until nothing remains or time is up.

    The channel's ``keep`` is counted from the time of sequencing, by Postgres' clock.  A shard
    without consumers is kept until it is published, a shard of an Ick until its members have been
    processed, by whomever.

    ``tails`` are the last offsets in the log.  At least one of ``shards`` (None is all) is
    processed, however late ``until`` is, by the monotonic clock.  ``on_unusable`` is called with a
    shard whose keys cannot be used; None raises.
    """
    records, evicted = 0, 0
    remaining = deque(channel.shard_names if shards is None else shards)
    kind = get_kind(channel.kind)
    if kind.passed is not None:
        tails = ask_each(
            partial(kind.passed, client, store.scope.namespace), remaining, on_unusable
        )
        remaining = deque(tails)
    while remaining:
        shard = remaining.popleft()
        transaction = _remove_passed(store, channel, shard, tails.get(shard, BEGINNING))
        records += transaction.removed
        if transaction.journaled >= RECORDS_PER_TRANSACTION:
            remaining.append(shard)
        if transaction.last_offset is not None and kind.evict is not None:
            with leaving_out(shard, on_unusable):
                evicted += kind.evict(
                    client, store.scope.namespace, shard, Offset(transaction.last_offset + 1)
                )
                crashpoint("retention.after_evict")
        if monotonic() >= until:
            break
    return Retained(records, evicted, tuple(remaining))


def _remove_passed(store: Store, channel: Channel, shard: ShardName, tail: Offset) -> _Removed:
    """Removes rows of one shard, in one transaction."""
    parameters, has_jobs = {"channel": shard.channel, "shard": shard.shard}, channel.traits.has_jobs
    with store.transaction(f"retaining {shard}"):
        store.execute("prepare_retention")
        store.execute("lock_channel", parameters)
        slowest = None if has_jobs else store.value("slowest_checkpoint", parameters)
        floor = tail if slowest is None else min(slowest, tail)
        limits = {
            "floor": floor,
            "keep": timedelta(seconds=channel.keep),
            "records": RECORDS_PER_TRANSACTION,
        }
        [row] = store.rows("trim_queue" if has_jobs else "remove_passed", {**parameters, **limits})
        crashpoint("retention.before_commit")
    crashpoint("retention.after_commit")
    return _Removed(*row)


def remove_old_ticks(store: Store) -> None:
    """Removes all but the last ``TICKS_KEPT`` ticks."""
    store.execute("remove_old_ticks", {"kept": TICKS_KEPT}, doing="removing old ticks")


NOTES_PER_TRANSACTION = 5000

NOTES_KEPT = timedelta(days=7)
"""Minimum time for which a job's failed attempts are kept: an operator may look at its dead letter
after a weekend."""


def remove_old_notes(store: Store, channels: Iterable[Channel]) -> bool:
    """Removes notes on jobs, and results, older than ``keep``.

    Returns whether there may be more.
    """
    keep = {
        channel.name: timedelta(seconds=channel.keep)
        for channel in channels
        if channel.traits.has_jobs
    }
    if not keep:
        return False
    values = {
        "channels": [*keep],
        "keep": [*keep.values()],
        "attempts_kept": NOTES_KEPT,
        "limit": NOTES_PER_TRANSACTION,
    }
    [removed] = store.rows("remove_old_notes", values, doing="removing old notes on jobs")
    return NOTES_PER_TRANSACTION in removed


RETAIN_EVERY_S = 5.0
RETAIN_S = 0.01
"""Time budget of retention in one round, in seconds: records staged meanwhile wait for it."""

CAPTURE_EVERY_S = 60.0
"""Interval, in seconds, at which the triggers of rules are compared with their tables: DDL does not
wait for a restart."""

EVERYWHERE_EVERY = 6
"""Interval, in retentions, of those that also cover shards of other shares, in case their streamer
is down."""


class StreamerUpkeep:
    """Upkeep of one streamer.

    The next retention is due at ``retain_at``, by the monotonic clock.
    """

    def __init__(self, pipeline: Pipeline, clock: Callable[[], float] = monotonic) -> None:
        self._pipeline, self._clock = pipeline, clock
        self._faults = FaultLog()
        self._declared: dict[str, Channel] = {}
        self._to_retain: dict[str, tuple[ShardName, ...]] = {}
        self._retained = self._swept = 0
        self._capture_at = self._clock() + CAPTURE_EVERY_S  # they were compared at the start
        self._lost: set[str] = set()
        self.retain_at = 0.0

    def reopen(self) -> None:
        """Has retention continue at once, on new connections."""
        self.retain_at = 0.0
        self._faults.reopen()

    def note_faults(self, store: Store, publisher: Publisher, *, sequences: bool) -> None:
        """Notes stopped shards, and, if this streamer sequences, records that get no offset."""
        if sequences:
            self._faults.update(store)
            if self._clock() >= self._capture_at:
                self._note_captures(store)
        self._faults.note_stopped(store, publisher.unusable.errors, publisher.tails.others)

    def _note_captures(self, store: Store) -> None:
        """Logs, once, tables whose changes are lost, or staged in another form than declared."""
        self._capture_at = self._clock() + CAPTURE_EVERY_S
        lost = {
            fault.message: fault.fix
            for fault in inspect_triggers(store.connection, self._pipeline)
            if fault.is_refused
        }
        for message in lost.keys() - self._lost:
            log.error("changes not captured", reason=message, fix=lost[message])
        self._lost = set(lost)

    def sweep(self, store: Store, publisher: Publisher) -> None:
        """Notes faults, and checks the next shard for records that have lost their offsets."""
        self.note_faults(store, publisher, sequences=True)
        shards = publisher.tails.known
        self._swept += 1
        if shards:
            check_missed(store, shards[self._swept % len(shards)])

    def retain(self, store: Store, client: RedisClient, publisher: Publisher) -> int:
        """Continues retention for ``RETAIN_S``; returns the number of records removed."""
        if not self._to_retain:
            publisher.keep_budgets()
            self._declared = dict(self._pipeline.channels)
            self._to_retain = self._choose_shards(publisher)
        removed, remaining = 0, {}
        for name, shards in self._to_retain.items():
            retained = retain(
                store,
                client,
                self._declared[name],
                publisher.tails.log,
                shards=[shard for shard in shards if shard not in publisher.unusable],
                on_unusable=publisher.unusable.add,
                until=monotonic() + RETAIN_S / len(self._to_retain),
            )
            removed += retained.records
            if retained.left:
                remaining[name] = retained.left
        self._to_retain = remaining
        if not remaining:
            remove_old_ticks(store)
            self._faults.forget(store)
            has_more = remove_old_notes(store, self._declared.values())
            self.retain_at = self._clock() + (0.0 if has_more else RETAIN_EVERY_S)
        return removed

    def _choose_shards(self, publisher: Publisher) -> dict[str, tuple[ShardName, ...]]:
        self._retained += 1
        others = () if self._retained % EVERYWHERE_EVERY == 0 else set(publisher.tails.others)
        chosen: dict[str, list[ShardName]] = {name: [] for name in self._declared}
        for shard in publisher.tails.known:
            if shard.channel in chosen and shard not in others:
                chosen[shard.channel].append(shard)
        return {name: tuple(shards) for name, shards in chosen.items()}
