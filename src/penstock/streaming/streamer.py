"""The streamer: tick, publish, retain, in a loop.

It polls: an idle round probes two indexes, and the pause between idle rounds grows from half a
millisecond to ``idle_s``. A nudge ends the pause early; nothing depends on its arrival.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic, sleep
from typing import Any, NamedTuple

import psycopg
import structlog
from typing_extensions import override

from penstock.channels.server import check_eviction, connect_redis, find_server, redis_errors
from penstock.crash_points import crashpoint, is_repeated
from penstock.database.connections import Connection, Database, connect_postgres, get_database_url
from penstock.database.driver_errors import describe, postgres_errors
from penstock.database.registry import register_channel, register_consumer
from penstock.database.store import Store
from penstock.database.transactions import WORKER_SILENCE_S, Timeouts
from penstock.errors import ChannelRetired, ConsumerRenamed, ReadOnlyPostgres, ServerUnavailable
from penstock.journal.lineage import check_lineage, check_same_server, server_start_us
from penstock.logs import Repeats
from penstock.observer import EpochChanged, RoundEnded, ServerAway, Streamed
from penstock.parallel import Runner
from penstock.pipeline import Pipeline
from penstock.records import Epoch
from penstock.schema.capture import check_triggers
from penstock.schema.revisions import check_revision
from penstock.schema.roles import check_privileges
from penstock.streaming.nudges import Nudges
from penstock.streaming.publisher import Publisher, SlicePublisher
from penstock.streaming.retention import StreamerUpkeep
from penstock.streaming.scheduler import JobGroups, Scheduler
from penstock.streaming.sequencer import Sequencer, Tick, check_identity_cache
from penstock.streaming.share import IDLE_S, WHOLE, RoundResult, Share, TickTakeover, pause_after
from penstock.streaming.tails import make_unusable
from penstock.streaming.tick_slices import Slices
from penstock.streaming.troubles import TroubleWatch
from penstock.streaming.unpublished import keep_memory

log = structlog.get_logger("penstock.streamer")

NAME = "streamer"
"""Name of a streamer, beside those of consumers."""

REFRESH_EVERY_S = 1.0
MAINTAIN_EVERY_S = 1.0
"""Interval, in seconds, at which queues are maintained."""

MAINTAIN_EVERYWHERE_EVERY = 8
"""Interval, in rounds of maintenance, of those that include other shares, in case their streamer is
down."""

TAILS_PAUSE = 9
"""Factor that limits reading tails to a tenth of the time of a streamer that does not sequence: of
500 shards that takes 7 ms, and under steady traffic most ticks leave it nothing to publish."""

READ_ONLY_S = 120.0
"""Time, in seconds, for which a running streamer waits for a primary that became read-only: a
switch-over takes less.  At its start it does not wait: the URL is wrong."""


class Opened(NamedTuple):
    """Objects that a streamer uses while it is connected."""

    store: Store
    sequencer: Sequencer
    publisher: Publisher


class Streamer(Runner[RoundResult]):
    """Runs the three steps for a pipeline, on one connection to each server.

        with Streamer(pipeline, engine, redis_url) as streamer:
            streamer.drain()

    Any number of streamers may run for one pipeline; together they are slower, never wrong.
    """

    name = NAME
    passing = (ServerUnavailable, ReadOnlyPostgres, psycopg.Error)

    def __init__(  # noqa: PLR0913  what can be chosen of a streamer
        self,
        pipeline: Pipeline,
        database: Database,
        redis_url: str,
        *,
        idle_s: float = IDLE_S,
        prepare: bool = True,
        max_records: int | None = None,
        share: Share = WHOLE,
        timeouts: Timeouts | None = None,
    ) -> None:
        """Does not connect yet; see ``open``.

        It pauses for at most ``idle_s`` between rounds.  Statements must not be prepared behind a
        pooler.  A round publishes ``max_records`` records, or as many as it can in 0.25 s;
        it publishes only a ``share`` of the shards if other streamers publish the others, and they
        take over the work of a missing one within seconds.  ``timeouts`` are those of a caller that
        cannot wait as long as a worker.
        """
        self._pipeline = pipeline
        self._database_url, self._redis_url = get_database_url(database), redis_url
        self._idle_s, self._prepare = idle_s, prepare
        self._max_records, self._share, self._timeouts = max_records, share, timeouts
        self._connection: Connection | None = None
        self._client: Any = None
        self._sequencer: Sequencer | None = None
        self._publisher: Publisher | None = None
        self._slices = Slices()
        self._observers = pipeline.observers
        self._unusable, self._repeats = make_unusable(self._observers), Repeats()
        self.upkeep = StreamerUpkeep(pipeline)
        self._ticks = TickTakeover(share)
        self._nudges = Nudges(self._database_url, pipeline.scope)
        self._scheduler = Scheduler(pipeline)
        self._groups = JobGroups(pipeline)
        self._troubles = TroubleWatch(pipeline.trouble_handlers, self._database_url, pipeline.scope)
        self._refresh_at = self._maintain_at = 0.0
        self._newest_tick, self._read_tails_at, self._maintained = -1, 0.0, 0
        self._pause_s = 0.0
        self._worked_at: float | None = None
        self._server_start_us = 0
        self._epoch: Epoch | None = None

    def open(self) -> None:
        """Connects, compares Postgres' lineage with Redis', and registers declarations."""
        self.close()
        connection = connect_postgres(
            self._database_url,
            application="streamer",
            prepare=self._prepare,
            timeouts=self._timeouts,
            silence_s=WORKER_SILENCE_S,
        )
        self._connection = connection  # first: to be closed if Redis does not answer
        self._client = connect_redis(self._redis_url, timeouts=self._timeouts)
        store = Store(connection, self._pipeline.scope)
        self._server_start_us = server_start_us(store)
        check_revision(store)
        check_privileges(store, "streamer")
        check_eviction(self._client)
        check_identity_cache(store)
        if not self._has_opened:  # a later release may replace them while this worker runs
            check_triggers(connection, self._pipeline)
            self._has_opened = True
        epoch = check_lineage(
            store, self._client, declared=self._pipeline.shard_names, on_unusable=self._unusable.add
        )
        if self._epoch not in {None, epoch}:
            self._observers(EpochChanged(epoch))
        self._epoch = epoch
        self._register(store)
        self._sequencer = Sequencer(store, prepare=self._prepare, slices=self._slices)
        self._publisher = self._make_publisher(store, epoch)
        self._refresh_at, self._newest_tick = 0.0, -1
        self.upkeep.reopen()
        if self._max_records is None:  # slices do not wait, and soon end
            keep_memory(store)
            if self._share.sequences:
                self._nudges.open()
                self._troubles.open()
        share = {} if self._share.is_whole else {"share": str(self._share)}
        log.info("streaming", epoch=epoch, channels=sorted(self._pipeline.channels), **share)

    def _register(self, store: Store) -> None:
        """Registers the pipeline's declarations, without retired channels and renamed consumers.

        The others are streamed.
        """
        crashpoint("streamer.before_register")
        for channel in self._pipeline.channels.values():
            with _skipping_former(channel=channel.name):
                register_channel(store, channel)
        crashpoint("streamer.after_channels")
        for consumer in self._pipeline.consumers.values():
            if consumer.channel.name in self._pipeline.channels:
                with _skipping_former(consumer=consumer.name):
                    register_consumer(store, consumer)
        self._scheduler.declare(store)
        crashpoint("streamer.after_register")

    def _make_publisher(self, store: Store, epoch: Epoch) -> Publisher:
        servers = store, self._client
        options: dict[str, Any] = {"epoch": epoch, "unusable": self._unusable, "share": self._share}
        if self._max_records is None:
            return Publisher(*servers, **options)
        return SlicePublisher(*servers, **options, max_records=self._max_records)

    def close(self) -> None:
        """Closes the connections.

        Work under way is dropped; the next round finds it again.
        """
        self._nudges.close()
        self._troubles.close()
        if self._connection is not None:
            self._connection.close()
        if self._client is not None:
            self._client.close()
        self._connection = self._client = self._sequencer = self._publisher = None
        self._pause_s = 0.0

    def round(self, *, expects_records: bool = False) -> RoundResult:
        """Runs one round: streams, and at intervals maintains queues and retains.

        ``expects_records`` is for the tick.
        """
        now = monotonic()
        self.refresh()
        result = self.stream(expects_records=expects_records)
        fed = self.maintain() if now >= self._maintain_at else 0
        removed = self.retain() if now >= self.upkeep.retain_at else 0
        if self._observers:
            self._observers(RoundEnded(NAME, monotonic() - now))
        return replace(result, added=result.added + fed, removed=removed)

    def refresh(self) -> None:
        """Reads what other processes have done, at most every ``REFRESH_EVERY_S``."""
        store, _, publisher = self.opened()
        if monotonic() >= self._refresh_at:
            publisher.refresh()
            self.upkeep.note_faults(store, publisher, sequences=self._sequences)
            self._scheduler.stage_due(store)
            self._groups.stage_following(store)
            self._troubles.note_hanging()
            self._refresh_at = monotonic() + REFRESH_EVERY_S

    def stream(self, *, expects_records: bool = False) -> RoundResult:
        """Sequences everything, unless another share does, and publishes for a limited time.

        ``expects_records`` is for the tick.
        """
        _, sequencer, publisher = self.opened()
        ticked = self._tick(sequencer, publisher, expects_records=expects_records)
        check_same_server(ticked.server_start_us, self._server_start_us)
        publisher.tails.advance_target(ticked.tails, ticked.firsts)
        published = publisher.publish(ticked.inline_records)
        added, already_there = published.added, published.known
        if added and is_repeated("streamer.after_publish"):
            already_there += publisher.resend(added).known
        if published.healed:
            log.warning("log was behind", shards=[str(shard) for shard in published.healed])
        result = RoundResult(
            ticked.sequenced, added, already_there, backlog=publisher.tails.backlog
        )
        self._observers(Streamed(result.sequenced, added, already_there, backlog=result.backlog))
        return result

    @property
    def _sequences(self) -> bool:
        return self._share.sequences or self._ticks.is_ticking

    def _tick(self, sequencer: Sequencer, publisher: Publisher, *, expects_records: bool) -> Tick:
        """Returns a tick; of another streamer's tick, only number and epoch."""
        if self._share.sequences:
            return sequencer.tick(expects_records=expects_records)
        newest, has_new = sequencer.newest_tick()
        was_ticking = self._ticks.is_ticking
        if self._ticks.is_due(newest.number, has_new=has_new):
            if not was_ticking:
                publisher.tails.take_over(self._share.number - 1)
            newest = sequencer.tick(expects_records=True)
            self._ticks.ticked(newest.number)
        if newest.number != self._newest_tick and monotonic() >= self._read_tails_at:
            self._newest_tick = newest.number
            started_at = monotonic()
            publisher.tails.read(publisher.tails.own)
            self._read_tails_at = monotonic() + TAILS_PAUSE * (monotonic() - started_at)
        return newest

    def maintain(self) -> int:
        """Maintains queues for a limited time; returns the number of records given to Redis."""
        publisher = self.opened().publisher
        self._maintained += 1
        fed = publisher.maintain_queues(
            everywhere=self._maintained % MAINTAIN_EVERYWHERE_EVERY == 0
        )
        self._maintain_at = monotonic() + MAINTAIN_EVERY_S
        self._observers(Streamed(added=fed))
        return fed

    def sweep(self) -> None:
        """Notes records that cannot get an offset, and checks the next shard.

        Raises ``DamagedJournal`` if records have lost theirs.
        """
        store, _, publisher = self.opened()
        self.upkeep.sweep(store, publisher)
        if self._max_records is not None:  # slices have no thread
            self._troubles.open(once=True)

    def opened(self) -> Opened:
        """Returns its working objects; connects first if necessary."""
        if self._publisher is None:
            self.open()
        assert self._connection is not None
        assert self._sequencer is not None
        assert self._publisher is not None
        return Opened(
            Store(self._connection, self._pipeline.scope), self._sequencer, self._publisher
        )

    def retain(self) -> int:
        """Continues retention for ``RETAIN_S``; returns the number of records removed."""
        store, _, publisher = self.opened()
        removed = self.upkeep.retain(store, self._client, publisher)
        self._observers(Streamed(removed=removed))
        return removed

    @override
    def _next_round(self) -> RoundResult:
        """Runs a round, after a pause that is longer the less there is to do."""
        pause_s, self._pause_s = self._pause_s, 0.0
        with postgres_errors("streaming"), redis_errors("streaming"):
            is_nudged = pause_s > 0 and self._wait(pause_s)
            result = self.round(expects_records=is_nudged)
        self._repeats.end("servers")
        self._worked_at = monotonic()
        self._pause_s = pause_after(result, pause_s, self._idle_s)
        return result

    @override
    def _warn_waiting(self, error: Exception, seconds: float) -> None:
        if self._repeats.is_due("servers", reason := describe(error)):
            log.warning("waiting", reason=reason, retry_s=seconds)
        self._observers(ServerAway(NAME, find_server(error), seconds))

    @override
    def _may_pass(self, error: Exception) -> bool:
        """Returns whether the streamer waits for the error to pass.

        A read-only Postgres ends it at the start, or after ``READ_ONLY_S``.
        """
        if isinstance(error, ReadOnlyPostgres):  # for the time of a switch-over
            return self._worked_at is not None and monotonic() - self._worked_at < READ_ONLY_S
        return super()._may_pass(error)

    def _wait(self, pause_s: float) -> bool:
        """Pauses; returns whether it was nudged.  Only the streamer that sequences listens."""
        if self._share.sequences:
            return self._nudges.wait(pause_s)
        sleep(pause_s)
        return False

    def drain(self, report: Callable[[RoundResult], None] = lambda _: None) -> int:
        """Runs rounds until its share is published; returns the number of records published.

        Nothing is tried again.  The error of a shard that cannot be published is raised once all
        others are drained.
        """
        published = 0
        self._unusable.check_now()
        self._refresh_at = self._maintain_at = 0.0
        while True:
            result = self.round()
            published += result.added
            report(result)
            if result.idle:
                break
        self._unusable.raise_first()
        return published


@contextmanager
def _skipping_former(**name: str) -> Iterator[None]:
    try:
        yield
    except (ChannelRetired, ConsumerRenamed) as error:
        log.warning("name not registered", **name, reason=str(error))
