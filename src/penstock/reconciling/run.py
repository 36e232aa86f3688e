"""A whole reconciliation: compare at a cut and, if asked, repair.

An engine does the comparing (``Comparer``); this module decides at which cut, and what may be changed.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any, Literal, Protocol

import structlog
from psycopg import IsolationLevel

from penstock.database.errors import postgres_errors
from penstock.database.registry import register_consumer
from penstock.database.statements import statements
from penstock.declarations import ConsumerSpec, ReconciliationSpec
from penstock.errors import DeclarationError, PenstockError, Refused
from penstock.pipeline import Pipeline
from penstock.reconciling.barrier import EXPIRES_S, Barrier, pinned, wait_until_reached
from penstock.reconciling.comparison import (
    DIFFERENCES_KEPT,
    Difference,
    DifferenceKind,
    StateComparison,
)
from penstock.reconciling.cut import Connect, Cut, cut, export_snapshot
from penstock.reconciling.repair import Rows, repair_rows, replace_state
from penstock.records import Scope

log = structlog.get_logger("penstock.reconcile")

Intent = Literal["compare", "repair", "replace", "bootstrap"]
"""What a reconciliation is to do: see ``reconcile``."""

WAIT_S = 60.0
"""How long a run waits for the consumer to reach the cut, in seconds."""

REPAIR_BATCH = 5_000
"""Most keys repaired during one pause of the consumer."""


class Comparer(Protocol):
    """What an engine provides for a reconciliation."""

    def compare(
        self,
        spec: ReconciliationSpec,
        canonical: str,
        state: str,
        among: Sequence[Difference] | None = None,
    ) -> StateComparison:
        """Compares the canonical rows in one snapshot with the state in another; only the keys of ``among``, if given."""

    def rows(self, spec: ReconciliationSpec, canonical: str) -> Rows:
        """The canonical rows in a snapshot."""


@dataclass(frozen=True)
class Reconciled:
    """What a run found and did.

    Attributes:
        run: Its number.
        name: Name of the reconciliation.
        consumer: The consumer whose state it compares.
        intent: What was asked for.
        tick: The tick of the cut.
        comparison: What was found; None if nothing was compared (``replace``, ``bootstrap``).
        repaired: Number of keys repaired, or of rows in the new state.
        paused_s: How long the consumer was paused for the comparison, in seconds.
        held_s: Longest pause of the consumer for a repair, in seconds.
        seconds: Duration of the run, in seconds.
    """

    run: int
    name: str
    consumer: str
    intent: Intent
    tick: int
    comparison: StateComparison | None
    repaired: int
    paused_s: float
    held_s: float
    seconds: float

    @property
    def clean(self) -> bool:
        """Nothing differs, or the differences were repaired."""
        return self.comparison is None or self.comparison.equal or bool(self.repaired)


def reconcile(  # noqa: PLR0913  a run has this many parts; most have defaults
    connect: Connect,
    scope: Scope,
    spec: ReconciliationSpec,
    comparer: Comparer,
    *,
    intent: Intent = "compare",
    wait_s: float = WAIT_S,
    others: Sequence[ReconciliationSpec] = (),
) -> Reconciled:
    """Compares, repairs or replaces a consumer's state.

    Args:
        connect: Opens a connection to the primary itself, in autocommit mode.
        scope: Of the pipeline.
        spec: The reconciliation.
        comparer: The engine that compares.
        intent: ``compare`` changes nothing; ``repair`` corrects the differing rows; ``replace`` replaces the whole state by
            the canonical rows, and the position by the cut; ``bootstrap`` does the same for a consumer that may be new.
        wait_s: How long to wait for the consumer to reach the cut, in seconds.
        others: For ``replace`` and ``bootstrap``: the other tables of the consumer, which share its position.

    Raises:
        BarrierMissed: The consumer does not reach the cut.
        Halted: A shard of the consumer is halted.
        Refused: There are too many differences to repair, or an operator has to decide.
        SnapshotLost: Postgres was restarted while it was read.
        ServerUnavailable: Postgres does not answer.
    """
    began = monotonic()
    reconciliation = _Run(connect, scope, spec, comparer, wait_s, others)
    run = reconciliation.begin(intent)
    try:
        if intent in {"replace", "bootstrap"}:
            result = reconciliation.replace()
        else:
            result = reconciliation.compare(run, intent)
    except BaseException as error:
        reconciliation.end(run, None, type(error).__name__)
        raise
    reconciliation.end(run, result, _outcome(intent, result))
    return Reconciled(
        run,
        spec.name,
        spec.consumer.name,
        intent,
        result.tick,
        result.comparison,
        result.repaired,
        result.paused_s,
        result.held_s,
        monotonic() - began,
    )


def _outcome(intent: Intent, result: "_RunResult") -> str:
    if intent in {"replace", "bootstrap"}:
        return "replaced"
    return "equal" if not result.differs else "repaired" if result.repaired else "differs"


def find_reconciliations(
    pipeline: Pipeline, consumer: str, preferred: Iterable[ReconciliationSpec] = ()
) -> list[ReconciliationSpec]:
    """Returns one reconciliation for each state table of a consumer.

    A table's first reconciliation in ``preferred`` wins; otherwise the first one declared.

    Raises:
        DeclarationError: The consumer has no reconciliation.
    """
    tables: dict[str, ReconciliationSpec] = {}
    for spec in (*preferred, *pipeline.reconciliations.values()):
        if spec.consumer.name == consumer:
            tables.setdefault(spec.state, spec)
    if not tables:
        raise DeclarationError(
            f"consumer {consumer} has no reconciliation; declare one with pipeline.reconciliation(of=…, state=…, key=…)"
        )
    return list(tables.values())


def has_never_applied(connect: Connect, scope: Scope, consumer: ConsumerSpec) -> bool:
    """Whether a consumer has not yet applied, skipped or dead-lettered any record.

    Raises:
        ServerUnavailable: Postgres does not answer.
    """
    with postgres_errors("reading checkpoints"), connect() as connection:
        [(records,)] = connection.execute(
            statements("penstock.reconciling", scope.schema)["records_seen"],
            {"consumer": consumer.name},
        ).fetchall()
    return not records


@dataclass
class _RunResult:
    tick: int
    comparison: StateComparison | None = None
    repaired: int = 0
    paused_s: float = 0.0
    held_s: float = 0.0

    @property
    def differs(self) -> bool:
        return self.comparison is not None and not self.comparison.equal

    def as_columns(self) -> dict[str, Any]:
        """The columns of its row in ``reconciliations``."""
        columns = {**_NO_RESULT, "tick": self.tick, "repaired": self.repaired}
        columns["paused_s"] = self.paused_s
        if self.comparison is not None:
            counts = self.comparison.counts
            different = counts.get(DifferenceKind.DIFFERENT, 0)
            columns["compared"] = self.comparison.compared
            columns["missing"] = counts.get(DifferenceKind.MISSING, 0)
            columns["surplus"] = counts.get(DifferenceKind.SURPLUS, 0)
            columns["different"] = different + counts.get(DifferenceKind.DOUBLED, 0)
        return columns


_NO_RESULT: dict[str, Any] = {
    "tick": None,
    "compared": None,
    "missing": None,
    "surplus": None,
    "different": None,
    "repaired": 0,
    "paused_s": None,
}


@dataclass
class _Run:
    connect: Connect
    scope: Scope
    spec: ReconciliationSpec
    comparer: Comparer
    wait_s: float
    others: Sequence[ReconciliationSpec]

    def begin(self, intent: Intent) -> int:
        with postgres_errors("beginning a reconciliation"), self.connect() as connection:
            if intent == "bootstrap":
                register_consumer(connection, self.scope, self.spec.consumer)
            [(run,)] = connection.execute(
                statements("penstock.reconciling", self.scope.schema)["begin_run"],
                {"name": self.spec.name, "consumer": self.spec.consumer.name, "intent": intent},
            ).fetchall()
        return int(run)

    def end(self, run: int, result: _RunResult | None, outcome: str) -> None:
        columns = _NO_RESULT if result is None else result.as_columns()
        try:
            with postgres_errors("ending a reconciliation"), self.connect() as connection:
                connection.execute(
                    statements("penstock.reconciling", self.scope.schema)["end_run"],
                    {**columns, "run": run, "outcome": outcome},
                )
        except PenstockError as error:
            # What the run found or raised matters more than its row in the history.
            log.warning("run result not recorded", run=run, error=type(error).__name__)

    def compare(self, run: int, intent: Intent) -> _RunResult:
        barrier = Barrier(self.spec.consumer, self.scope)
        with (
            cut(self.connect, self.scope, barrier.place) as at,
            pinned(self.connect, barrier, at, timeout_s=self.wait_s) as state,
        ):
            comparison = self.comparer.compare(self.spec, at.snapshot, state.snapshot)
            if intent == "repair" and not comparison.equal:
                # Warms the engine up, so that it plans and compiles nothing while the consumer is paused for the repair.
                batch = comparison.differences[:REPAIR_BATCH]
                self.comparer.compare(self.spec, at.snapshot, state.snapshot, batch)
        result = _RunResult(at.tick, comparison, paused_s=state.paused_s)
        if result.differs and intent == "repair":
            self._repair(run, comparison, result)
        return result

    def _repair(self, run: int, comparison: StateComparison, result: _RunResult) -> None:
        if comparison.total > DIFFERENCES_KEPT:
            raise Refused(
                f"{comparison.total:,} keys of {self.spec.state} differ; rows are repaired one by one up to {DIFFERENCES_KEPT:,}. "
                "Replace the whole state: --whole"
            )
        for first in range(0, comparison.total, REPAIR_BATCH):
            self._repair_batch(run, comparison.differences[first : first + REPAIR_BATCH], result)

    def _repair_batch(
        self, run: int, differences: Sequence[Difference], result: _RunResult
    ) -> None:
        """Compares some keys again while the consumer is paused, and repairs those that still differ."""
        barrier = Barrier(self.spec.consumer, self.scope)
        with (
            cut(self.connect, self.scope, barrier.place) as at,
            self._held(barrier, at) as (snapshot, since),
            self.connect() as connection,
        ):
            now = self.comparer.compare(self.spec, at.snapshot, snapshot, differences)
            result.repaired += repair_rows(
                connection, self.scope, self.spec, at, now.differences, now.columns, run
            )
            result.held_s = max(result.held_s, monotonic() - since)

    @contextmanager
    def _held(self, barrier: Barrier, at: Cut) -> Iterator[tuple[str, float]]:
        """Pauses the consumer at the cut until the block ends; yields a snapshot of its state, and the monotonic start."""
        ended = threading.Event()

        def extend() -> None:
            with self.connect() as extender:
                while not ended.wait(EXPIRES_S / 3):
                    barrier.extend(extender)

        extending = threading.Thread(target=extend, name="barrier", daemon=True)
        with (
            postgres_errors("holding a consumer"),
            self.connect() as watcher,
            self.connect() as holder,
        ):
            try:
                since = wait_until_reached(watcher, barrier, at, timeout_s=self.wait_s)
                extending.start()
                holder.isolation_level, holder.read_only = IsolationLevel.REPEATABLE_READ, True
                with holder.transaction():
                    yield export_snapshot(holder), since
            finally:
                ended.set()
                barrier.lift(watcher)

    def replace(self) -> _RunResult:
        with cut(self.connect, self.scope) as at, self.connect() as connection:
            tables = [
                (spec, self.comparer.rows(spec, at.snapshot)) for spec in (self.spec, *self.others)
            ]
            replaced = replace_state(connection, self.scope, at, tables)
        return _RunResult(at.tick, repaired=replaced.after)
