"""The publisher replays the journal into Redis, from wherever Redis' own tail is.

It keeps no position that could be wrong.  The script that appends compares the batch with the
shard's tail, and its reply is what the publisher believes next.  A lost reply, a second publisher,
a publisher that slept for an hour and a Redis that came back empty or older therefore all end in
the same log.

A large backlog is pipelined: Redis appends one batch while the next is prepared, and Postgres reads
the one after it.  A small backlog goes in one call, so that consumers find all of it at once.

Records for an Ick are coalesced: a batch marks each member once, with the time of the first of its
records.  For those of queues see ``queues``.

A shard that cannot be published, as ``channels.isolation`` lists, is left out and checked again
every few seconds; the others go on.  If a call fails although both servers are well, each shard is
published alone, in ever smaller parts, until the record at fault is found.  A changed lineage or a
newer epoch stops the publisher.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from random import randrange
from time import monotonic
from typing import Any, assert_never

import psycopg
import redis
from typing_extensions import override

from penstock.channels.batch_outcomes import (
    Appended,
    Batch,
    Behind,
    FencedOff,
    Foreign,
    Reply,
    Unusable,
)
from penstock.channels.commands import RedisClient
from penstock.channels.isolation import UNUSABLE, UnusableShards, leaving_out
from penstock.crash_points import crashpoint
from penstock.database.driver_errors import ErrorKind, classify
from penstock.database.registry import registered_channels
from penstock.database.store import Store
from penstock.errors import (
    AppendRefused,
    DamagedJournal,
    Fenced,
    HistoryDiverged,
    ServerUnavailable,
    UnpublishableRecord,
)
from penstock.journal.journal_reader import log_epochs, records_at
from penstock.journal.lineage import check_tails
from penstock.observer import Observers
from penstock.records import BEGINNING, Epoch, Offset, ShardName
from penstock.streaming.faults import check_missed
from penstock.streaming.memory_budgets import MemoryBudgets
from penstock.streaming.queues import Queues
from penstock.streaming.senders import IckSender, LogSender, Sender
from penstock.streaming.share import WHOLE, Share
from penstock.streaming.tails import Tails, make_unusable
from penstock.streaming.unpublished import BATCH_RECORDS, count_missing, unpublished

SMALLER = 8
"""Divisor of the number of records after a part failed."""


@dataclass(frozen=True, slots=True)
class Published:
    """Result of one round of the publisher."""

    added: int = 0  # records that were new to the log
    # records that the log already had: sent again, or sent before by another publisher
    known: int = 0
    # shards whose log had less than expected, and are being replayed
    healed: tuple[ShardName, ...] = ()


NOTHING = Published()


def refusal(batch: Batch, reply: Foreign) -> HistoryDiverged:
    """Returns the error of a log, or a position, that holds another record than the journal."""
    return HistoryDiverged(
        f"{batch.shard} offset {reply.offset}: the log holds record {reply.id}, the journal has "
        "another record there. Either Postgres has lost commits that were published, or two "
        "databases write to one namespace. See docs: errors#historydiverged; then: penstock reset "
        "epoch"
    )


class Replies:
    """Replies of a round, as far as something follows from them."""

    def __init__(self, tails: Tails) -> None:
        self._ends = tails
        self._foreign: dict[ShardName, HistoryDiverged] = {}
        self._refused: set[ShardName] = set()

    def may_send(self, shard: ShardName) -> bool:
        """Returns whether nothing of the shard has failed."""
        return not (
            shard in self._ends.unusable or shard in self._foreign or shard in self._refused
        )

    def take_foreign(self) -> Mapping[ShardName, HistoryDiverged]:
        """Returns the shards whose log differs from the journal, and forgets them."""
        foreign, self._foreign = self._foreign, {}
        return foreign

    def take_refused(self) -> set[ShardName]:
        """Returns the shards with a record that Redis does not take, and forgets them."""
        refused, self._refused = self._refused, set()
        return refused

    def add(self, published: Published, batch: Batch, reply: Reply) -> Published:
        """Notes a reply; returns the results so far, with it."""
        match reply:
            case Appended(tail, added):
                self._ends.move(batch.shard, tail, by_another=added < batch.count)
                already_there = published.known + batch.count - added
                return replace(published, added=published.added + added, known=already_there)
            case Behind(tail):
                # An Ick that is ahead was marked by another publisher, in batches that began
                # elsewhere.
                is_ahead = tail >= batch.first
                self._ends.move(batch.shard, tail, by_another=is_ahead)
                if is_ahead or batch.shard in published.healed:
                    return published
                return replace(published, healed=(*published.healed, batch.shard))
            case Unusable(UnpublishableRecord()):
                self._refused.add(batch.shard)
            case Unusable(error):
                self._ends.unusable.add(batch.shard, error)
            case Foreign():
                self._foreign.setdefault(batch.shard, refusal(batch, reply))
            case FencedOff(epoch):
                raise Fenced(
                    f"{batch.shard}: the log is in epoch {epoch}, this streamer in the older epoch "
                    f"{batch.epoch}. Start the streamer again"
                )
            case _:
                assert_never(reply)
        return published


ROUND_S = 0.25
"""Time budget of one publish round, in seconds.  Short enough that the streamer still ticks,
retains and notices a stop several times a second; Redis is idle between two rounds."""


class Publisher:
    """Publishes from the journal to Redis, on one connection to each.

    It reads the shards of its own share from the journal.  Of other shares it publishes the inline
    records of a tick, and the shards that it has taken over.
    """

    def __init__(
        self,
        store: Store,
        client: RedisClient,
        *,
        epoch: Epoch,
        unusable: UnusableShards | None = None,
        share: Share = WHOLE,
    ) -> None:
        self._store = store
        self._client = client
        self._epoch = epoch
        self.unusable = make_unusable(Observers()) if unusable is None else unusable
        self.tails = Tails(store, client, share, self.unusable)
        self._budgets = MemoryBudgets(client, store.scope)
        self._queues = Queues(store, client, epoch, self.unusable.add)
        self._senders: dict[str, Sender] = {
            "log": LogSender(client, store.scope, self.tails, self._budgets),
            "ick": IckSender(client, store.scope),
            "queue": self._queues,
        }
        self._replies = Replies(self.tails)

    def refresh(self) -> None:
        """Reads the ends of the journal and the logs, and what is registered.

        Called at the start, at intervals, and after any doubt.
        """
        channels = registered_channels(self._store)
        self.tails.update(channels)
        self._queues.update(channels)
        self._budgets.update(channels)
        self.tails.read(self.tails.known)
        for shard in self.unusable.due():
            self._check_unusable(shard)
        self.tails.check_moved()

    def _check_unusable(self, shard: ShardName) -> None:
        """Takes a shard back if its log is the journal's, and its next record can be published."""
        previous = self.unusable.errors[shard]
        with leaving_out(shard, self.unusable.add):
            check_tails(self._store, self._client, [shard])
            log_epochs(self._client, self._store.scope, [shard])
            self._senders[self.tails.kind(shard)].check(shard)
            if isinstance(previous, DamagedJournal):
                check_missed(self._store, shard)
            self.tails.log.update(self.tails.read_logs([shard]))
            self._publish_alone(shard)
            self.unusable.remove(shard)

    def publish(self, prefetched: Sequence[Batch] = ()) -> Published:
        """Sends the records that shards lack, one shard after the other.

        Takes about ``ROUND_S`` for logs, and as long for Icks.
        """
        try:
            return self._send(self.tails.log, prefetched)
        except (ServerUnavailable, psycopg.Error) as error:
            if not self._is_about_a_record(error):
                raise
            return self._publish_each_alone()

    def _publish_each_alone(self) -> Published:
        """Publishes the next records of each shard in turn; then leaves out those that failed."""
        published, failed = Published(), []
        for shard in self.tails.lacking:
            try:
                published = self._publish_alone(shard, published, narrow=False)
            except (*UNUSABLE, ServerUnavailable, psycopg.Error):
                failed.append(shard)
        for shard in failed:
            with leaving_out(shard, self.unusable.add):
                published = self._publish_alone(shard, published)
        return published

    def _publish_alone(
        self, shard: ShardName, published: Published = NOTHING, *, narrow: bool = True
    ) -> Published:
        """Publishes a shard's next batch; with ``narrow``, in ever smaller parts if it fails."""
        position, target = (
            self.tails.log.get(shard, BEGINNING),
            self.tails.journal.get(shard, BEGINNING),
        )
        end = min(target, position + BATCH_RECORDS)
        max_records = end - position
        while position < end:
            try:
                batch, reply = self._send_part(shard, position, target, max_records)
            except (ServerUnavailable, UnpublishableRecord, psycopg.Error) as error:
                if not narrow or not self._is_about_a_record(error):
                    raise
                if max_records == 1:
                    raise self._make_error(shard, Offset(position + 1), error) from error
                max_records = max(1, max_records // SMALLER)
                continue
            published = self._replies.add(published, batch, reply)
            if not isinstance(reply, Appended | Behind) or reply.tail <= position:
                break
            position = reply.tail
        self._check_foreign()
        return published

    def _send_part(
        self, shard: ShardName, position: Offset, target: Offset, max_records: int
    ) -> tuple[Batch, Reply]:
        """Sends the next records of a shard in a separate call."""
        reading = unpublished(
            self._store,
            {shard: target},
            {shard: position},
            epoch=self._epoch,
            until=monotonic(),
            max_records=max_records,
            queues=self._queues,
        )
        with closing(reading):
            batch = next(reading)
        reply = self._senders[self.tails.kind(shard)].send(batch)
        if isinstance(reply, Unusable):
            raise reply.error
        return batch, reply

    def _is_about_a_record(self, error: Exception) -> bool:
        """Returns whether the servers are well, so that the records read or sent are at fault.

        Redis breaks the connection on a record that is too large for it, and takes the next
        connection.
        """
        if isinstance(error, psycopg.Error):
            return classify(error) is ErrorKind.STATEMENT
        if isinstance(error, UnpublishableRecord):
            return True
        if isinstance(error, AppendRefused) or not isinstance(error.__cause__, redis.RedisError):
            return False
        try:
            return bool(self._client.ping())
        except redis.RedisError:
            return False

    def _make_error(
        self, shard: ShardName, offset: Offset, error: Exception
    ) -> UnpublishableRecord:
        records = records_at(self._store, {shard: offset}).get(shard)
        record = f"{shard} offset {offset} (record {records.id if records else 'unknown'})"
        match error:
            case psycopg.Error():
                why = f"Postgres cannot read it: {type(error).__name__}"
            case UnpublishableRecord():
                why = str(error)
            case _:
                why = (
                    "Redis closes the connection when the record is sent. Is it larger than "
                    "proto-max-bulk-len?"
                )
        return UnpublishableRecord(f"{record}: {why} See docs: errors#unpublishablerecord")

    def resend(self, records: int) -> Published:
        """Sends the last ``records`` of each shard again, as after a lost reply.

        The log must not change.  Raises as ``publish``.
        """
        # Not of a shard that was taken over: there, a record that the log has shows that its own
        # streamer is back.
        earlier = {
            shard: tail if shard in self.tails.taken else Offset(max(0, tail - records))
            for shard, tail in self.tails.log.items()
        }
        crashpoint("publisher.before_resend")
        return self._send(earlier, may_begin=False)

    def _send(
        self,
        tails: Mapping[ShardName, Offset],
        prefetched: Sequence[Batch] = (),
        *,
        may_begin: bool = True,
    ) -> Published:
        """Sends the records after ``tails``."""
        published = Published()
        for kind in [kind for kind in self._senders if kind in self.tails.kinds]:
            records = count_missing(self.tails.targets(kind), tails)
            with (
                closing(self._batches(kind, tails, prefetched, may_begin=may_begin)) as batches,
                closing(self._senders[kind].send_all(batches, records)) as replies,
            ):
                for batch, reply in replies:
                    crashpoint("publisher.after_append")
                    published = self._replies.add(published, batch, reply)
        self._check_foreign()
        for shard in self._replies.take_refused():
            with leaving_out(shard, self.unusable.add):
                published = self._publish_alone(shard, published)
        return published

    def _check_foreign(self) -> None:
        """Leaves out shards with a log unlike the journal, unless Postgres has lost commits."""
        foreign = self._replies.take_foreign()
        self.tails.check([*foreign])
        for shard, error in foreign.items():
            if shard not in self.unusable:
                raise error

    def keep_budgets(self) -> int:
        """Evicts entries of its own logs beyond their memory budgets; returns how many."""
        shards = [shard for shard in self.tails.own if shard not in self.unusable]
        return self._budgets.keep(shards, self.unusable.add)

    def maintain_queues(self, *, everywhere: bool = False) -> int:
        """Gives Redis waiting records, and those that it lacks, for a limited time."""
        shards = self.tails.known if everywhere else self.tails.own
        filled = [s for s in shards if s in self.tails.journal and s not in self.unusable]
        tails = {shard: self.tails.log.get(shard, BEGINNING) for shard in filled}
        return self._queues.maintain(tails)

    def _batches(
        self,
        kind: str,
        tails: Mapping[ShardName, Offset],
        prefetched: Sequence[Batch],
        *,
        may_begin: bool,
    ) -> Generator[Batch, None, None]:
        """Yields prefetched batches that continue a log, then batches of the journal."""
        following = [
            batch
            for batch in prefetched
            if self.tails.kind(batch.shard) == kind
            and batch.last <= self.tails.journal.get(batch.shard, BEGINNING)
            and batch.first == tails.get(batch.shard, BEGINNING) + 1
            and batch.epoch == self._epoch  # a tick may know a newer epoch than this publisher
        ]
        tails = {**tails, **{batch.shard: batch.last for batch in following}}
        reading = unpublished(
            self._store,
            self.tails.targets(kind),
            tails,
            epoch=self._epoch,
            until=monotonic() + (0.0 if self._senders[kind].reads_once else ROUND_S),
            packed=self.tails.packed,
            queues=self._queues,
            on_unusable=self.unusable.add,
        )
        with closing(reading):
            for batch in chain(following, reading):
                if self._replies.may_send(batch.shard) and (may_begin or not batch.begins):
                    crashpoint("publisher.before_append")
                    yield batch


class SlicePublisher(Publisher):
    """Publishes at most ``max_records`` records a call.

    Finding a record at fault among others may take a few more.
    """

    def __init__(self, *servers: Any, max_records: int, **options: Any) -> None:
        """See ``Publisher`` for the rest."""
        super().__init__(*servers, **options)
        self._max_records = max_records

    @override
    def publish(self, prefetched: Sequence[Batch] = ()) -> Published:
        target = self.tails.journal
        usable = {shard: tail for shard, tail in target.items() if shard not in self.unusable}
        self.tails.journal = nearest(usable, self.tails.log, self._max_records)
        try:
            return super().publish(prefetched)
        finally:
            self.tails.journal = target


def nearest(
    target: Mapping[ShardName, Offset], tails: Mapping[ShardName, Offset], max_records: int
) -> dict[ShardName, Offset]:
    """Returns a target of at most ``max_records`` records beyond ``tails``.

    It begins with any shard, so none is always the last.
    """
    lacking = [shard for shard, tail in target.items() if tail > tails.get(shard, BEGINNING)]
    start = randrange(len(lacking)) if lacking else 0  # noqa: S311  not for secrets
    targets, remaining = dict(target), max_records
    for shard in lacking[start:] + lacking[:start]:
        tail = tails.get(shard, BEGINNING)
        targets[shard] = Offset(min(target[shard], tail + remaining))
        remaining -= targets[shard] - tail
    return targets
