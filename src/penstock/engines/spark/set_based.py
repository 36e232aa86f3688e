"""Runs set-based consumers in threads of the driver, beside the epochs of the others."""

import threading
from collections.abc import Callable, Sequence

from pyspark.sql import SparkSession

from penstock.consuming import Consumed
from penstock.engines.spark.control_channel import Line
from penstock.engines.spark.dataframes import JOB_GROUP, FrameWorker
from penstock.engines.spark.epochs import COUNTS, Counter
from penstock.parallel import Loop, run_together
from penstock.spark.session import is_jvm_alive

FINISH_TIMEOUT_S = 3.0
"""How long a handler may work on after a stop, in seconds, before its Spark jobs are cancelled."""


class SetBasedConsumers:
    """The workers of set-based consumers."""

    def __init__(
        self,
        spark: SparkSession,
        workers: Sequence[FrameWorker],
        receive: Callable[[Line], None],
        failures: list[BaseException],
    ) -> None:
        """Sets up.

        Args:
            spark: Whose jobs are cancelled if a handler does not end.
            workers: One for each consumer.
            receive: Called with their counts, at most once a second for each.
            failures: Where to add an error that ends them.
        """
        self._spark, self._workers, self._failures = spark, workers, failures
        self._is_finishing = False
        self._loops = {each.consumer.name: _loop(each, receive) for each in workers}
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
    counter = Counter(worker.consumer.name, dict.fromkeys(COUNTS, 0), receive)

    def report(did: Consumed) -> None:
        counter.add(applied=did.applied, skipped=did.skipped, dead=did.dead, backfilled=did.backfilled)

    def run(stop: Callable[[], bool]) -> None:
        try:
            worker.run(stop, report)
        finally:
            counter.send()

    return run
