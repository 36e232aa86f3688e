"""Set-based consumers: a handler gets a DataFrame, and its transaction its shards' checkpoints.

The worker is the one of every consumer of a log, and so are its decisions.  Only what is delivered
differs: places, whose records Spark's tasks have read into a DataFrame.  So no record passes
through the driver, and a batch is as easily divided as a range of offsets.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from time import monotonic, sleep
from typing import Any, cast

from pyspark.sql import DataFrame, SparkSession
from typing_extensions import override

from penstock.channels.commands import RedisClient
from penstock.channels.isolation import OnUnusable, ask_each
from penstock.channels.log.streams import Extent, extents, shards_with_more
from penstock.consuming.dead_lettering import DeadLetters
from penstock.consuming.delivery import Broken, Consumed
from penstock.consuming.failures import NotApplied
from penstock.consuming.handler import WorkerSetup
from penstock.consuming.journals import Journal, Limit, LocalJournal, Read, within
from penstock.consuming.letter_retry import RequestedRetries
from penstock.consuming.log.journal_follower import EvictedRecords
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.executor import Executor
from penstock.database.store import Store
from penstock.declaring.declarations import ConsumerSpec
from penstock.engines.spark.control_channel import Line
from penstock.engines.spark.epochs import COUNTS, TaskCounts
from penstock.engines.spark.frame_rows import FrameSpan, RowReader, make_frame, select
from penstock.engines.spark.spark_errors import RecordsLost, in_one_line, is_spark_failure
from penstock.errors import DamagedEntry, Gap, ServerUnavailable
from penstock.parallel import Loop, run_together
from penstock.records import Offset, OffsetRange, Place, Record, Scope, ShardName
from penstock.spark.session import is_jvm_alive, named_jobs
from penstock.spark.sources.ranges import Positions, ranges_between, share_limit

RECORDS_A_BATCH = 100_000
"""Limit of records in a DataFrame: its cost is in the DataFrame, not in its records."""

JOB_GROUP = "penstock set-based"
"""Spark's jobs of all set-based consumers, for their end."""

FINISH_TIMEOUT_S = 3.0
"""Seconds that a handler may work on after a stop before its Spark jobs are cancelled."""

POLL_S = 0.03
"""Pause between two reads of the ends of the log, in seconds."""


class FramePlaces:
    """Places whose records are in a DataFrame."""

    name = "dataframes"
    name_together = "dataframes"
    is_bulk = True

    def __init__(
        self, consumer: ConsumerSpec, scope: Scope, journal: Journal, reader: RowReader
    ) -> None:
        self.batch = RECORDS_A_BATCH
        self._namespace = scope.namespace
        self._journal = journal
        self._reader = reader
        self._dead_letters = DeadLetters(consumer)

    def follow(
        self, client: RedisClient, on_unusable: OnUnusable, evicted: EvictedRecords[Place]
    ) -> "FrameFollower":
        """Has Spark read the records."""
        return FrameFollower(client, self._namespace, self._reader, evicted, on_unusable)

    def load(self, records: Sequence[Place]) -> None:
        """Reads their DataFrame, unless it has been read."""
        cast("FrameSpan", records).rows.load()

    def identify(self, item: Place) -> object:
        """Identifies it by its offset."""
        return item.offset

    def renew(self, items: Sequence[Place]) -> None:
        """Does nothing: a handler cannot change a DataFrame."""

    def describe(self, _: ShardName, item: Place) -> str:
        """Names the place."""
        return str(item)

    name_in_log = describe

    def find_missing(
        self,
        read: Read,
        shard: ShardName,
        after: Offset,
        before: Offset,
        _limit: Limit | None = None,
    ) -> Sequence[Place]:
        """Has Spark read them, once it is certain that the journal has the first."""
        self._journal.backfill(read, shard, after, before, Limit(1))
        last = Offset(min(before - 1, after + RECORDS_A_BATCH))
        return self._reader.from_journal(OffsetRange(shard, Offset(after + 1), last))

    def join(self, fresh: Sequence[Sequence[Place]]) -> DataFrame | None:
        """Selects their rows."""
        return select(cast("Sequence[FrameSpan]", fresh)) if fresh else None

    def read(self, store: Store[Executor], shard: ShardName, item: Place) -> Record:
        """Reads it from the journal: Spark may be what has failed."""
        previous, following = Offset(item.offset - 1), Offset(item.offset + 1)
        try:
            [record] = self._journal.backfill(within(store), shard, previous, following, Limit(1))
        except Gap as error:
            raise NotApplied(Broken(), error) from error
        return record

    def divide_parked(
        self, store: Store[Executor], shard: ShardName, fresh: Sequence[Place]
    ) -> tuple[Sequence[Record], Sequence[Place]]:
        """Reads those that are parked."""
        first, last = fresh[0].offset, fresh[-1].offset
        parked = self._dead_letters.parked_records(store, shard, first, last)
        keys = frozenset(record.key for record in parked)
        return parked, replace(cast("FrameSpan", fresh), without=keys, absent=len(parked))

    def note_later(self, store: Store[Executor], shard: ShardName, fresh: Sequence[Place]) -> None:
        """Notes the keys of the range."""
        first, last = fresh[0].offset, fresh[-1].offset
        self._dead_letters.note_later_range(store, shard, first, last)

    def staged_us(self, *_: object) -> list[int]:
        """Returns none: only Spark knows when the records were staged."""
        return []


class FrameFollower:
    """Waits for records, and has Spark read them: see ``Follower``."""

    def __init__(
        self,
        client: RedisClient,
        namespace: str,
        reader: RowReader,
        evicted: EvictedRecords[Place],
        on_unusable: OnUnusable,
    ) -> None:
        self._client, self._namespace = client, namespace
        self._reader, self._evicted, self._on_unusable = reader, evicted, on_unusable
        self._owed: dict[ShardName, float] = {}
        self._due_before: dict[ShardName, OffsetRange] = {}
        self._found: dict[ShardName, FrameSpan] = {}

    def wait(
        self, positions: Mapping[ShardName, Offset], block_ms: int | None
    ) -> Mapping[ShardName, FrameSpan]:
        """Returns up to ``RECORDS_A_BATCH`` records after the positions.

        Waits up to ``block_ms`` for the first.  Shards whose next record has been evicted are
        noted, and left out.
        """
        deadline = monotonic() + (block_ms or 0) / 1000
        while (due := self._due(positions)) == {} and monotonic() < deadline:
            sleep(POLL_S)
        due = due or {}
        if due != self._due_before or not self._found:
            self._reader.release()
            # All together; one by one without those that cannot be read, if there are such.
            load = partial(self._load, due)
            self._due_before, self._found = due, ask_each(load, list(due), self._on_unusable)
        return self._found  # again, after a pause or before a barrier

    def request_ahead(self, positions: Mapping[ShardName, Offset]) -> None:
        """Does nothing: Spark reads the records of one DataFrame at a time."""

    def close(self) -> None:
        """Releases what was read."""
        self._reader.release_all()

    def _due(self, positions: Mapping[ShardName, Offset]) -> dict[ShardName, OffsetRange] | None:
        """Returns the ranges of the log after the positions; None if all of it is evicted."""
        ahead = shards_with_more(self._client, self._namespace, positions)
        if not ahead:
            return {}
        ask = partial(extents, self._client, self._namespace)
        logs: dict[ShardName, Extent] = ask_each(ask, ahead, self._on_unusable)
        readable = {
            shard: extent
            for shard, extent in logs.items()
            if extent.first <= positions[shard] + 1
            or not self._evicted.note(shard, positions[shard], extent.first)
        }
        if logs and not readable:
            return None
        logs = readable
        start: Positions = {s: max(positions[s], extent.first - 1) for s, extent in logs.items()}
        tails: Positions = {shard: extent.tail for shard, extent in logs.items()}
        end = share_limit(start, tails, RECORDS_A_BATCH, self._owed)
        return {span.shard: span for span in ranges_between(start, end)}

    def _load(
        self, due: Mapping[ShardName, OffsetRange], shards: Sequence[ShardName]
    ) -> dict[ShardName, FrameSpan]:
        if not shards:
            return {}
        ranges = [due[shard] for shard in shards]
        spans = self._reader.from_log(ranges)
        try:
            next(iter(spans.values())).rows.load()
        except (DamagedEntry, ServerUnavailable) as error:
            if not isinstance(error, DamagedEntry) and not isinstance(error.__cause__, RecordsLost):
                raise
            # Of a single range, the worker reads all of it from the journal.
            raise DamagedEntry(str(error), ranges[0].first, ranges[0].last) from error
        return spans


class FrameWorker(LogWorker[Place]):
    """Runs one set-based consumer, in a thread of Spark's driver."""

    def __init__(self, spark: SparkSession, setup: WorkerSetup) -> None:
        """Sets up; ``open`` connects."""
        self._spark = spark
        self._abandoned = threading.Event()
        consumer = replace(setup.consumer, handler=self._guard(setup.consumer.handler))
        scope = setup.scope
        urls = {"database_url": setup.database_url, "redis_url": setup.redis_url}
        journal = LocalJournal(consumer, setup.shards)
        places = FramePlaces(
            consumer, scope, journal, RowReader(spark, consumer.channel, scope, **urls)
        )
        super().__init__(setup.of(consumer), journal, places)
        self._requested_retries = RequestedRetries(consumer, partial(make_frame, spark))

    @override
    def open(self) -> None:
        # For all jobs of this thread; the pages of Spark show the text.
        self._spark.sparkContext.setJobGroup(JOB_GROUP, f"consumer {self.consumer.name}")
        super().open()

    @override
    def _round(self, block_ms: int | None) -> Consumed:
        with named_jobs(self._spark, f"consumer {self.consumer.name}"):
            return super()._round(block_ms)

    def abandon(self) -> None:
        """Fails current and later batches without blaming a record.

        Their jobs are about to be cancelled.
        """
        self._abandoned.set()

    def _guard(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the handler: if Spark failed or its jobs were cancelled, no record is to blame."""

        @wraps(handler)
        def guarded(session: Any, frame: DataFrame) -> Any:
            if self._abandoned.is_set():
                raise ServerUnavailable("Spark's jobs are cancelled")
            try:
                return handler(session, frame)
            except Exception as error:
                if self._abandoned.is_set() or is_spark_failure(error):
                    raise ServerUnavailable(
                        f"Spark failed under the handler: {type(error).__name__}"
                    ) from error
                if (reported := in_one_line(error)) is not None:
                    raise reported from error
                raise

        return guarded


class SetBasedConsumers:
    """The workers of set-based consumers."""

    def __init__(
        self,
        spark: SparkSession,
        setups: Sequence[WorkerSetup],
        receive: Callable[[Line], None],
        failures: list[BaseException],
    ) -> None:
        """Sets up; ``receive`` gets counts once a second, ``failures`` the error that ends."""
        self._spark, self._failures = spark, failures
        self._workers = [FrameWorker(spark, setup) for setup in setups]
        self._is_finishing = False
        self._loops = {worker.consumer.name: _loop(worker, receive) for worker in self._workers}
        self._thread: threading.Thread | None = None

    def start(self, stop: Callable[[], bool]) -> None:
        """Starts them; they run until ``stop()`` is true, or one of them fails."""

        def run() -> None:
            try:
                run_together(self._loops, lambda: self._is_finishing or stop())
            except BaseException as error:  # noqa: BLE001  the application raises it
                self._failures.append(error)

        self._thread = threading.Thread(target=run, name="set-based consumers", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Stops them: what is under way is finished, or, if that takes long, rolled back."""
        self._is_finishing = True
        if self._thread is None:
            return
        self._thread.join(FINISH_TIMEOUT_S)
        if self._thread.is_alive() and is_jvm_alive():
            for worker in self._workers:
                worker.abandon()
            self._spark.sparkContext.cancelJobGroup(JOB_GROUP)
            self._thread.join(FINISH_TIMEOUT_S)


def _loop(worker: FrameWorker, receive: Callable[[Line], None]) -> Loop:
    counter = TaskCounts(worker.consumer.name, dict.fromkeys(COUNTS, 0), receive)

    def run(stop: Callable[[], bool]) -> None:
        try:
            worker.run(stop, counter.add_consumed)
        finally:
            counter.send()

    return run
