"""Epochs: long micro-batches.

Each task of the batch runs the same loop as the inline engine until the epoch ends or the control
channel is closed, then yields one row with its counts.  Spark places the tasks, restarts those that
die, and reports; records do not pass through it, so latency and throughput are those of the loop.
"""

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from penstock.declaring.kinds import LogChannel
from penstock.engines.spark.assignment import Part, Task
from penstock.engines.spark.control_channel import Address, ControlChannel, Line, request_plan
from penstock.errors import DriverUnreachable, PenstockError
from penstock.spark.daemon import end_quietly
from penstock.spark.releases import ReadAllAvailable, ReadLimit, adapt_reader
from penstock.spark.submission import URLS, find_url, name_source

if TYPE_CHECKING:  # tasks import it: Spark's planners load this module, too, and need nothing of it
    from penstock.consuming import Consumed
    from penstock.declaring.declarations import ConsumerSpec
    from penstock.observer import Event
    from penstock.parallel import Loop, Runner
    from penstock.pipeline import Pipeline
    from penstock.streaming import Streamer

SPARK_SCHEMA = (
    "task string, sequenced long, published long, resent long, removed long, "
    "applied long, skipped long, dead long, backfilled long, seconds double, unreachable string"
)
COUNTS = ("sequenced", "published", "resent", "removed", "applied", "skipped", "dead", "backfilled")
UNREACHABLE_PAUSE_S = 1.0
"""Seconds that a task waits which cannot reach the driver, before the next epoch tries again."""

REPORT_EVERY_S = 1.0
"""Seconds between two reports of a task's counts to the driver."""


@dataclass
class EpochPartition(InputPartition):
    """One task of an epoch; ``epoch`` is a random word that identifies it."""

    task: Task
    epoch: str


class EpochsSource(DataSource):
    """Source ``penstock.epochs``.

    Options: ``app``, ``control``, ``token``, ``seconds``, ``idle``, ``prepare``, ``observed``.
    """

    @classmethod
    def name(cls) -> str:
        """Returns its name for ``format``."""
        return "penstock.epochs"

    def schema(self) -> str:
        """Returns the schema: one row for each task and epoch."""
        return SPARK_SCHEMA

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802  Spark's name
        """Makes the reader."""
        end_quietly()
        return adapt_reader(
            EpochsReader({key.lower(): value for key, value in self.options.items()})
        )


class EpochsReader(DataSourceStreamReader):
    """Plans one epoch after the other; the tasks do the work."""

    def __init__(self, options: dict[str, str]) -> None:
        self._options = options
        host, _, port = options["control"].rpartition(":")
        self._control = Address(host, int(port), options["token"])

    def initialOffset(self) -> dict[str, int]:  # noqa: N802  Spark's name
        """Returns the offset before the first epoch."""
        return {"epoch": 0}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  Spark's name
        """None: an epoch has one task for each slot."""
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:  # noqa: ARG002, N802  Spark's
        """Returns a further offset: there is always one more epoch."""
        return {"epoch": start["epoch"] + 1}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:  # noqa: ARG002  Spark's
        """Returns the tasks that the driver plans for the current slots."""
        plan = request_plan(self._control)
        return [EpochPartition(task, plan.epoch) for task in plan.tasks]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        """Runs a task; yields its counts, or why it cannot reach the driver."""
        from penstock.logs import configure_task  # noqa: PLC0415  planners need it as little

        assert isinstance(partition, EpochPartition)
        configure_task()
        task, started = partition.task, monotonic()
        gc.freeze()  # Spark collects garbage after every task, over everything that was imported
        counts, unreachable = dict.fromkeys(COUNTS, 0), None
        try:
            self._run_epoch(task, partition.epoch, counts)
        except DriverUnreachable as error:
            unreachable = str(error)
            sleep(UNREACHABLE_PAUSE_S)
        yield (str(task), *(counts[name] for name in COUNTS), monotonic() - started, unreachable)

    def _run_epoch(self, task: Task, epoch: str, counts: dict[str, int]) -> None:
        deadline = monotonic() + float(self._options["seconds"])
        with ControlChannel(self._control, epoch) as control:
            counter = TaskCounts(str(task), counts, control.send)
            try:
                self._run(task, lambda: monotonic() >= deadline or not control.is_open(), counter)
            except PenstockError as error:
                # Spark must not retry it: the driver raises it again.
                control.send(
                    {"error": type(error).__name__, "message": str(error), "task": str(task)}
                )
            counter.send()
            control.finish()

    def _run(self, task: Task, stop: Callable[[], bool], counter: "TaskCounts") -> None:
        from penstock.parallel import run_together  # noqa: PLC0415  the same
        from penstock.pipeline import load_pipeline  # noqa: PLC0415  the same

        pipeline = load_pipeline(self._options["app"])
        with ExitStack() as stack:
            if self._options["observed"] == "true":
                stack.enter_context(pipeline.observers.joined_by(counter.note))
            loops = {str(part): self._loop(pipeline, part, counter) for part in task.parts}
            if len(loops) == 1:
                [loop] = loops.values()
                loop(stop)
            else:
                run_together(loops, stop)

    def _loop(self, pipeline: "Pipeline", part: Part, counter: "TaskCounts") -> "Loop":
        if part.consumer is None:
            streamer = self._make_streamer(pipeline, part.share)
            return lambda stop: streamer.run(
                stop,
                lambda did: counter.add(
                    sequenced=did.sequenced,
                    published=did.added,
                    resent=did.known,
                    removed=did.removed,
                ),
            )
        worker = self._make_worker(pipeline, part.consumer, part.pieces)
        return lambda stop: worker.run(stop, counter.add_consumed)

    def _make_streamer(self, pipeline: "Pipeline", share: str) -> "Streamer":
        from penstock.streaming import Streamer  # noqa: PLC0415  the same
        from penstock.streaming.share import WHOLE, parse_share  # noqa: PLC0415  the same

        database_url, redis_url = map(find_url, URLS)
        return Streamer(
            pipeline,
            database_url,
            redis_url,
            idle_s=float(self._options["idle"]),
            prepare=self._options["prepare"] == "true",
            share=parse_share(share) if share else WHOLE,
        )

    def _make_worker(
        self, pipeline: "Pipeline", name: str, pieces: Sequence[Any]
    ) -> "Runner[Consumed]":
        from penstock.consuming import make_worker  # noqa: PLC0415  the same

        database_url, redis_url = map(find_url, URLS)
        consumer, options = _narrow(pipeline.get_consumer(name), pieces)
        options |= {"prepare": self._options["prepare"] == "true", "block_ms": 200}
        return make_worker(pipeline, consumer, database_url, redis_url, **options)


def _narrow(
    consumer: "ConsumerSpec", pieces: Sequence[Any]
) -> "tuple[ConsumerSpec, dict[str, Any]]":
    """Narrows a consumer to these pieces; returns it with the options of its worker."""
    log = consumer.channel
    if not (isinstance(log, LogChannel) and log.sources):
        return consumer, {"shards": pieces}
    urls = {source: find_url(name_source(source)) for source in pieces}
    return replace(consumer, channel=replace(log, sources=pieces)), {"sources": urls}


class TaskCounts:
    """Adds up what the threads of a task do, and sends it to the driver once a second."""

    def __init__(self, task: str, counts: dict[str, int], send: Callable[[Line], None]) -> None:
        """Adds to ``counts``, which has a number for each of ``COUNTS``.

        ``send`` is called with what is new.
        """
        self._task, self._counts, self._send_line = task, counts, send
        self._new: Counter[str] = Counter()
        self._events: list[Any] = []
        self._send_at = 0.0
        self._lock = threading.Lock()

    def add(self, **did: int) -> None:
        """Adds what was done."""
        with self._lock:
            self._new.update(did)
            for name, count in did.items():
                self._counts[name] += count
            if monotonic() >= self._send_at:
                self._send()

    def add_consumed(self, did: "Consumed") -> None:
        """Adds what a consumer did in a round."""
        skipped = did.skipped + did.cancelled
        self.add(applied=did.applied, skipped=skipped, dead=did.dead, backfilled=did.backfilled)

    def note(self, event: "Event") -> None:
        """Keeps an event for the driver's observer."""
        from penstock.observer import to_wire  # noqa: PLC0415  planners need it as little

        with self._lock:
            self._events.append(to_wire(event))

    def send(self) -> None:
        """Sends what has been done since the last time."""
        with self._lock:
            self._send()

    def _send(self) -> None:
        events = {"events": self._events} if self._events else {}
        self._send_line({"task": self._task, **+self._new, **events})
        self._new, self._events = Counter(), []
        self._send_at = monotonic() + REPORT_EVERY_S
