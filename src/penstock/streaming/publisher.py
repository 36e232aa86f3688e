"""The publisher replays the journal into Redis, from wherever Redis' own tail is.

It keeps no position that could be wrong.  The script that appends compares the batch with the shard's tail, and its reply
is what the publisher believes next.  A lost reply, a second publisher, a publisher that slept for an hour and a Redis that
came back empty or older therefore all end in the same log.

A large backlog is pipelined: Redis appends one batch while the next is prepared, and Postgres reads the one after it.  A
small backlog goes in one call, so that consumers find all of it at once.

Records for an Ick are coalesced: a batch marks each member once, with the time of the first of its records.  For those of
queues see ``queues``.

A shard that cannot be published, as ``channels.isolation`` lists, is left out and checked again every few seconds; the others
go on.  If a call fails although both servers are well, each shard is published alone, in ever smaller parts, until the
record at fault is found.  A changed lineage or a newer epoch stops the publisher.
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

from penstock.channels.batch_outcomes import Appended, Batch, Behind, FencedOff, Foreign, Reply, Unusable
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
"""A part that fails is tried again with so many times fewer records."""


@dataclass(frozen=True, slots=True)
class Published:
    """Result of one round of the publisher."""

    added: int = 0  # records that were new to the log
    known: int = 0  # records that the log already had: sent again, or sent before by another publisher
    healed: tuple[ShardName, ...] = ()  # shards whose log had less than expected, and are being replayed


NOTHING = Published()


def refusal(batch: Batch, reply: Foreign) -> HistoryDiverged:
    """The error of a log, or of a position, that holds another record than the journal."""
    return HistoryDiverged(
        f"{batch.shard} offset {reply.offset}: the log holds record {reply.id}, the journal has another there. Either "
        "Postgres has lost commits that were published, or two databases write to one namespace. "
        "See docs: errors#historydiverged; then: penstock reset epoch"
    )


class Replies:
    """The replies of a round, as far as they have to be acted upon after it."""

    def __init__(self, ends: Tails) -> None:
        self._ends = ends
        self._foreign: dict[ShardName, HistoryDiverged] = {}
        self._refused: set[ShardName] = set()

    def may_send(self, shard: ShardName) -> bool:
        """True if nothing of the shard has failed."""
        return not (shard in self._ends.unusable or shard in self._foreign or shard in self._refused)

    def take_foreign(self) -> Mapping[ShardName, HistoryDiverged]:
        """The shards whose log holds other records than the journal; forgets them."""
        foreign, self._foreign = self._foreign, {}
        return foreign

    def take_refused(self) -> set[ShardName]:
        """The shards with a record that Redis does not take; forgets them."""
        refused, self._refused = self._refused, set()
        return refused

    def add(self, done: Published, batch: Batch, reply: Reply) -> Published:
        """Notes a reply; returns what has been done, with it."""
        match reply:
            case Appended(tail, added):
                self._ends.move(batch.shard, tail, by_another=added < batch.count)
                known = done.known + batch.count - added
                return replace(done, added=done.added + added, known=known)
            case Behind(tail):
                # An Ick that is ahead was marked by another publisher, in batches that began elsewhere.
                is_ahead = tail >= batch.first
                self._ends.move(batch.shard, tail, by_another=is_ahead)
                if is_ahead or batch.shard in done.healed:
                    return done
                return replace(done, healed=(*done.healed, batch.shard))
            case Unusable(UnpublishableRecord()):
                self._refused.add(batch.shard)
            case Unusable(error):
                self._ends.unusable.add(batch.shard, error)
            case Foreign():
                self._foreign.setdefault(batch.shard, refusal(batch, reply))
            case FencedOff(epoch):
                raise Fenced(
                    f"{batch.shard}: the log is in epoch {epoch}, this streamer in {batch.epoch}, which Postgres has left. "
                    "Start it again"
                )
            case _:
                assert_never(reply)
        return done


ROUND_S = 0.25
"""Time budget of one publish round, in seconds.  Short enough that the streamer still ticks, retains and notices a stop
several times a second; Redis is idle between two rounds."""


class Publisher:
    """Publishes from the journal to Redis, on one connection to each.

    It reads the shards of its own share from the journal.  Of other shares it publishes the inline records of a tick, and
    the shards that it has taken over.
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
        self.ends = Tails(store, client, share, self.unusable)
        self._budgets = MemoryBudgets(client, store.scope)
        self._queues = Queues(store, client, epoch, self.unusable.add)
        self._senders: dict[str, Sender] = {
            "log": LogSender(client, store.scope, self.ends, self._budgets),
            "ick": IckSender(client, store.scope),
            "queue": self._queues,
        }
        self._replies = Replies(self.ends)

    @property
    def tails(self) -> dict[ShardName, Offset]:
        """Last offset in the log of each shard, as last heard."""
        return self.ends.log

    def refresh(self) -> None:
        """Reads where the journal and the logs end, and what is registered: at the start, once in a while, and after any doubt."""
        channels = registered_channels(self._store)
        self.ends.update(channels)
        self._queues.update(channels)
        self._budgets.update(channels)
        self.ends.read(self.ends.known)
        for shard in self.unusable.due():
            self._check_unusable(shard)
        self.ends.check_moved()

    def _check_unusable(self, shard: ShardName) -> None:
        """Takes a shard back if its log is that of the journal, and the next of its records can be published."""
        previous = self.unusable.errors[shard]
        with leaving_out(shard, self.unusable.add):
            check_tails(self._store, self._client, [shard])
            log_epochs(self._client, self._store.scope, [shard])
            self._senders[self.ends.kind(shard)].check(shard)
            if isinstance(previous, DamagedJournal):
                check_missed(self._store, shard)
            self.tails.update(self.ends.read_logs([shard]))
            self._publish_alone(shard)
            self.unusable.remove(shard)

    def publish(self, prefetched: Sequence[Batch] = ()) -> Published:
        """Sends what the shards lack, one after the other, for about ``ROUND_S`` to logs and as long to Icks."""
        try:
            return self._send(self.tails, prefetched)
        except (ServerUnavailable, psycopg.Error) as error:
            if not self._is_about_a_record(error):
                raise
            return self._publish_each_alone()

    def _publish_each_alone(self) -> Published:
        """Publishes the next records of each shard, one shard after the other; then leaves out those that failed."""
        done, failed = Published(), []
        for shard in self.ends.lacking:
            try:
                done = self._publish_alone(shard, done, narrow=False)
            except (*UNUSABLE, ServerUnavailable, psycopg.Error):
                failed.append(shard)
        for shard in failed:
            with leaving_out(shard, self.unusable.add):
                done = self._publish_alone(shard, done)
        return done

    def _publish_alone(self, shard: ShardName, done: Published = NOTHING, *, narrow: bool = True) -> Published:
        """Publishes the next batch of a shard; with ``narrow``, in smaller and smaller parts if it fails."""
        after, target = self.tails.get(shard, BEGINNING), self.ends.journal.get(shard, BEGINNING)
        end = min(target, after + BATCH_RECORDS)
        most = end - after
        while after < end:
            try:
                batch, reply = self._send_part(shard, after, target, most)
            except (ServerUnavailable, UnpublishableRecord, psycopg.Error) as error:
                if not narrow or not self._is_about_a_record(error):
                    raise
                if most == 1:
                    raise self._make_error(shard, Offset(after + 1), error) from error
                most = max(1, most // SMALLER)
                continue
            done = self._replies.add(done, batch, reply)
            if not isinstance(reply, Appended | Behind) or reply.tail <= after:
                break
            after = reply.tail
        self._check_foreign()
        return done

    def _send_part(self, shard: ShardName, after: Offset, target: Offset, most: int) -> tuple[Batch, Reply]:
        """Sends the next records of a shard in a call of their own."""
        reading = unpublished(
            self._store,
            {shard: target},
            {shard: after},
            epoch=self._epoch,
            until=monotonic(),
            most=most,
            queues=self._queues,
        )
        with closing(reading):
            batch = next(reading)
        reply = self._senders[self.ends.kind(shard)].send(batch)
        if isinstance(reply, Unusable):
            raise reply.error
        return batch, reply

    def _is_about_a_record(self, error: Exception) -> bool:
        """True if the servers are well, so that what was read or sent is at fault.

        Redis breaks the connection on a record that is too large for it, and takes the next connection.
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

    def _make_error(self, shard: ShardName, offset: Offset, error: Exception) -> UnpublishableRecord:
        found = records_at(self._store, {shard: offset}).get(shard)
        record = f"{shard} offset {offset} (record {found.id if found else 'unknown'})"
        match error:
            case psycopg.Error():
                why = f"Postgres cannot read it: {type(error).__name__}"
            case UnpublishableRecord():
                why = str(error)
            case _:
                why = "Redis breaks the connection when it is sent. Is it larger than proto-max-bulk-len?"
        return UnpublishableRecord(f"{record}: {why} See docs: errors#unpublishablerecord")

    def resend(self, records: int) -> Published:
        """Sends the last ``records`` of each shard again, as after a lost reply: the log must not change.  Raises as ``publish``."""
        # Not of a shard that was taken over: there, a record that the log has shows that its own streamer is back.
        earlier = {
            shard: tail if shard in self.ends.taken else Offset(max(0, tail - records))
            for shard, tail in self.tails.items()
        }
        crashpoint("publisher.before_resend")
        return self._send(earlier, may_begin=False)

    def _send(
        self, tails: Mapping[ShardName, Offset], prefetched: Sequence[Batch] = (), *, may_begin: bool = True
    ) -> Published:
        """Sends what comes after ``tails``."""
        done = Published()
        for kind in [kind for kind in self._senders if kind in self.ends.kinds]:
            records = count_missing(self.ends.targets(kind), tails)
            with (
                closing(self._batches(kind, tails, prefetched, may_begin=may_begin)) as batches,
                closing(self._senders[kind].send_all(batches, records)) as replies,
            ):
                for batch, reply in replies:
                    crashpoint("publisher.after_append")
                    done = self._replies.add(done, batch, reply)
        self._check_foreign()
        for shard in self._replies.take_refused():
            with leaving_out(shard, self.unusable.add):
                done = self._publish_alone(shard, done)
        return done

    def _check_foreign(self) -> None:
        """Leaves out the shards whose log holds other records than the journal, unless Postgres has lost commits."""
        foreign = self._replies.take_foreign()
        self.ends.check([*foreign])
        for shard, error in foreign.items():
            if shard not in self.unusable:
                raise error

    def keep_budgets(self) -> int:
        """Evicts what its own logs have beyond the memory of their channels; returns the number of entries."""
        shards = [shard for shard in self.ends.own if shard not in self.unusable]
        return self._budgets.keep(shards, self.unusable.add)

    def maintain_queues(self, *, everywhere: bool = False) -> int:
        """Gives Redis waiting records, and those that it lacks, for a while."""
        shards = self.ends.known if everywhere else self.ends.own
        filled = [s for s in shards if s in self.ends.journal and s not in self.unusable]
        tails = {shard: self.tails.get(shard, BEGINNING) for shard in filled}
        return self._queues.maintain(tails)

    def _batches(
        self, kind: str, tails: Mapping[ShardName, Offset], prefetched: Sequence[Batch], *, may_begin: bool
    ) -> Generator[Batch, None, None]:
        """Prefetched batches that continue a log, then batches of the journal."""
        following = [
            batch
            for batch in prefetched
            if self.ends.kind(batch.shard) == kind
            and batch.last <= self.ends.journal.get(batch.shard, BEGINNING)
            and batch.first == tails.get(batch.shard, BEGINNING) + 1
            and batch.epoch == self._epoch  # a tick may know a newer epoch than this publisher
        ]
        tails = {**tails, **{batch.shard: batch.last for batch in following}}
        reading = unpublished(
            self._store,
            self.ends.targets(kind),
            tails,
            epoch=self._epoch,
            until=monotonic() + (0.0 if self._senders[kind].reads_once else ROUND_S),
            packed=self.ends.packed,
            queues=self._queues,
            on_unusable=self.unusable.add,
        )
        with closing(reading):
            for batch in chain(following, reading):
                if self._replies.may_send(batch.shard) and (may_begin or not batch.begins):
                    crashpoint("publisher.before_append")
                    yield batch


class SlicePublisher(Publisher):
    """Publishes at most ``most`` records a call; a record that has to be found among others may take a few more."""

    def __init__(self, *servers: Any, most: int, **options: Any) -> None:
        """See ``Publisher`` for the rest."""
        super().__init__(*servers, **options)
        self._most = most

    @override
    def publish(self, prefetched: Sequence[Batch] = ()) -> Published:
        whole = self.ends.journal
        usable = {shard: tail for shard, tail in whole.items() if shard not in self.unusable}
        self.ends.journal = nearest(usable, self.tails, self._most)
        try:
            return super().publish(prefetched)
        finally:
            self.ends.journal = whole


def nearest(
    target: Mapping[ShardName, Offset], tails: Mapping[ShardName, Offset], most: int
) -> dict[ShardName, Offset]:
    """A target of at most ``most`` records beyond ``tails``, beginning with any shard: none is always the last."""
    lacking = [shard for shard, tail in target.items() if tail > tails.get(shard, BEGINNING)]
    at = randrange(len(lacking)) if lacking else 0  # noqa: S311  not for secrets
    found, left = dict(target), most
    for shard in lacking[at:] + lacking[:at]:
        tail = tails.get(shard, BEGINNING)
        found[shard] = Offset(min(target[shard], tail + left))
        left -= found[shard] - tail
    return found
