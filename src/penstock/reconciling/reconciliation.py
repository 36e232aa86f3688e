"""A whole reconciliation: compare at a cut and, if asked, repair.

An engine does the comparing (``Comparer``); this module decides at which cut, and what may be
changed.

It keeps a row of each run, and the keys that an interrupted repair has still to look at.  A list of
keys may be old without harm, because every key on it is compared again, at a new cut, before its
row is repaired.  It belongs to one run: the run that goes on takes it over.
"""

import json
import threading
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from time import monotonic
from typing import Any, Literal, Protocol

import structlog
from psycopg.errors import ForeignKeyViolation, UniqueViolation

from penstock.database.driver_errors import postgres_errors
from penstock.database.registry import register_consumer
from penstock.database.store import Store
from penstock.database.transactions import ROLES_SEARCH_PATH
from penstock.declaring.declarations import ConsumerSpec, ReconciliationSpec
from penstock.errors import (
    DeclarationError,
    PenstockError,
    Refused,
    RepairRefused,
    ServerUnavailable,
)
from penstock.pipeline import Pipeline
from penstock.reconciling.comparison import (
    DIFFERENCES_KEPT,
    DifferenceKind,
    StateComparison,
    combine,
    without_rows,
)
from penstock.reconciling.cut import EXPIRES_S, Barrier, Connect, cut, pinned
from penstock.reconciling.state_repair import (
    CanonicalRows,
    choose_batch,
    left_over,
    repair_rows,
    replace_state,
)
from penstock.reconciling.state_table import order_states
from penstock.records import Scope

log = structlog.get_logger("penstock.reconcile")

Intent = Literal["compare", "repair", "replace", "bootstrap"]
"""The purpose of a reconciliation: see ``reconcile``."""

WAIT_S = 60.0
"""Longest wait of a run for the consumer to reach the cut, in seconds."""

REPAIR_BATCH = 5_000
"""Most keys repaired during one pause of the consumer."""


class Comparer(Protocol):
    """The part of a reconciliation that an engine provides."""

    @property
    def engine(self) -> str:
        """Name of the engine: ``spark`` or ``inline``."""

    def compare(
        self,
        spec: ReconciliationSpec,
        canonical: str,
        state: str,
        among: Sequence[str] | None = None,
    ) -> StateComparison:
        """Compares the canonical rows in one snapshot with the state in another.

        With ``among``, keys as JSON, compares only these; the differences then have the canonical
        rows.
        """

    def rows(self, spec: ReconciliationSpec, canonical: str) -> CanonicalRows:
        """Reads the canonical rows in a snapshot."""


@dataclass
class Reconciled:
    """The result of a run."""

    run: int  # its number
    name: str  # name of the reconciliation
    consumer: str  # the consumer whose state it compares
    intent: Intent  # its purpose
    tick: int = 0  # the tick of the cut; 0 before there is one
    # its differences; None if nothing was compared (``replace``, ``bootstrap``)
    comparison: StateComparison | None = None
    repaired: int = 0  # number of keys repaired, or of rows in the new state
    paused_s: float = 0.0  # pause of the consumer for the comparison, in seconds
    held_s: float = 0.0  # longest pause of the consumer for a repair, in seconds
    seconds: float = 0.0  # duration of the run, in seconds
    # number of the interrupted run whose repairs it went on with; None if it compared everything
    resumed: int | None = None

    @property
    def clean(self) -> bool:
        """True if nothing differs, or the differences were repaired."""
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
    resume: bool = False,
) -> Reconciled:
    """Compares, repairs or replaces a consumer's state, on autocommit connections to the primary.

    ``compare`` changes nothing; ``repair`` corrects the differing rows, with ``resume`` only those
    that an interrupted run has left; ``replace`` replaces the whole state by the canonical rows,
    that of ``others`` with it, and the position by the cut; ``bootstrap`` does the same for a
    consumer that may be new.

    Raises ``BarrierMissed``, ``Halted`` or ``Paused`` if the consumer does not reach the cut within
    ``wait_s``; ``Refused`` if there are too many differences to repair, or an operator has to
    decide; ``SnapshotLost`` or ``ServerUnavailable``.
    """
    started = monotonic()
    reconciliation = _Reconciliation(connect, scope, spec, comparer, wait_s, others)
    result = reconciliation.begin(intent)
    try:
        if intent in {"replace", "bootstrap"}:
            reconciliation.replace(result)
        elif not (resume and reconciliation.resume(result)):
            reconciliation.compare(result, intent)
    except BaseException as error:
        reconciliation.end(result, type(error).__name__)
        raise
    reconciliation.end(result, _outcome(result))
    result.seconds = monotonic() - started
    return result


@dataclass(frozen=True, slots=True)
class FailedRun:
    """A reconciliation of several that failed."""

    name: str  # name of the reconciliation
    error: Exception


def reconcile_all(  # noqa: PLR0913  as ``reconcile``
    connect: Connect,
    scope: Scope,
    groups: Sequence[Sequence[ReconciliationSpec]],
    comparer: Comparer,
    *,
    intent: Intent,
    wait_s: float = WAIT_S,
    resume: bool = False,
) -> Iterator[Reconciled | FailedRun]:
    """Yields the result of each group, whose first is reconciled, a whole state with the others.

    One that fails does not stop the next.  Repairs begin with the states that others refer to; one
    that is refused is tried again once others have been repaired, which may have been in the way.
    Raises ``ServerUnavailable``.
    """
    if intent == "repair" and len(groups) > 1:
        with (
            postgres_errors("ordering states", is_own=False),
            connect() as connection,
            connection.transaction(),
        ):
            connection.execute(ROLES_SEARCH_PATH)
            groups = [[spec] for spec in order_states(connection, [spec for [spec] in groups])]
    pending, is_first = groups, True
    while pending:
        refused: list[tuple[Sequence[ReconciliationSpec], RepairRefused]] = []
        for group in pending:
            first, *others = group
            try:
                yield reconcile(
                    connect,
                    scope,
                    first,
                    comparer,
                    intent=intent,
                    wait_s=wait_s,
                    others=others,
                    resume=resume,
                )
            except ServerUnavailable:
                raise
            except RepairRefused as error:
                refused.append((group, error))
            except Exception as error:  # noqa: BLE001  the caller shows it
                yield FailedRun(first.name, error)
        is_hopeless = len(refused) == len(pending) and not is_first
        if intent != "repair" or len(groups) == 1 or is_hopeless:
            yield from (FailedRun(group[0].name, error) for group, error in refused)
            return
        pending, is_first, resume = [group for group, _ in refused], False, True


def _outcome(result: Reconciled) -> str:
    if result.comparison is None:
        return "replaced"
    return "equal" if result.comparison.equal else "repaired" if result.repaired else "differs"


def find_reconciliations(
    pipeline: Pipeline, consumer: str, preferred: Iterable[ReconciliationSpec] = ()
) -> list[ReconciliationSpec]:
    """Returns one reconciliation for each state table of a consumer.

    A table's first reconciliation in ``preferred`` wins; otherwise the first one declared.  Raises
    ``DeclarationError`` without any.
    """
    tables: dict[str, ReconciliationSpec] = {}
    for spec in (*preferred, *pipeline.reconciliations.values()):
        if spec.consumer.name == consumer:
            tables.setdefault(spec.state, spec)
    if not tables:
        raise DeclarationError(
            f"consumer {consumer} has no reconciliation; declare one with "
            "pipeline.reconciliation(of=…, state=…, key=…)"
        )
    return list(tables.values())


def has_never_applied(connect: Connect, scope: Scope, consumer: ConsumerSpec) -> bool:
    """True if a consumer has not yet applied, skipped or dead-lettered any record.

    Raises ``ServerUnavailable``.
    """
    with connect() as connection:
        values = {"consumer": consumer.name}
        [(records,)] = Store(connection, scope).rows(
            "records_seen", values, doing="reading checkpoints"
        )
    return not records


def _to_columns(result: Reconciled) -> dict[str, Any]:
    """Converts a result to the columns of ``reconciliations``."""
    columns: dict[str, Any] = dict.fromkeys(("compared", "missing", "surplus", "different"))
    if result.comparison is not None:
        counts = Counter(result.comparison.counts)
        columns = {
            "compared": result.comparison.compared,
            "missing": counts[DifferenceKind.MISSING],
            "surplus": counts[DifferenceKind.SURPLUS],
            "different": counts[DifferenceKind.DIFFERENT] + counts[DifferenceKind.DOUBLED],
        }
    return {
        **columns,
        "run": result.run,
        "tick": result.tick or None,
        "repaired": result.repaired,
        "paused_s": result.paused_s,
    }


@dataclass
class _Reconciliation:
    connect: Connect
    scope: Scope
    spec: ReconciliationSpec
    comparer: Comparer
    wait_s: float
    others: Sequence[ReconciliationSpec]
    remaining: int = 0
    # keys that other rows refer to, and the constraint
    unrepaired: dict[str, str] = field(default_factory=dict)
    surplus: Collection[str] = ()  # keys that were too many in the first comparison

    def begin(self, intent: Intent) -> Reconciled:
        with postgres_errors("beginning a reconciliation"), self.connect() as connection:
            store = Store(connection, self.scope)
            if intent == "bootstrap":
                register_consumer(store, self.spec.consumer)
            run = store.value(
                "begin_run",
                {
                    "name": self.spec.name,
                    "consumer": self.spec.consumer.name,
                    "intent": intent,
                    "engine": self.comparer.engine,
                },
            )
        return Reconciled(int(run), self.spec.name, self.spec.consumer.name, intent)

    def end(self, result: Reconciled, outcome: str) -> None:
        if self.remaining:
            log.warning(
                "repair interrupted",
                reconciliation=self.spec.name,
                repaired=result.repaired,
                remaining=self.remaining,
                resume=f"penstock reconcile {self.spec.name} --apply --resume",
            )
        try:
            with postgres_errors("ending a reconciliation"), self.connect() as connection:
                Store(connection, self.scope).execute(
                    "end_run", {**_to_columns(result), "outcome": outcome}
                )
        except PenstockError as error:
            # What the run found or raised matters more than its row in the history.
            log.warning("run result not recorded", run=result.run, error=type(error).__name__)

    def compare(self, result: Reconciled, intent: Intent) -> None:
        barrier = Barrier(self.spec.consumer, self.scope)
        with (
            cut(self.connect, self.scope, barrier.place) as point,
            pinned(self.connect, barrier, point, timeout_s=self.wait_s) as state,
        ):
            comparison = self.comparer.compare(self.spec, point.snapshot, state.snapshot)
            if intent == "repair" and not comparison.equal:
                # Warms the engine up, so that it plans and compiles nothing while the consumer is
                # paused for the repair.
                batch = [difference.key for difference in comparison.differences[:REPAIR_BATCH]]
                self.comparer.compare(self.spec, point.snapshot, state.snapshot, batch)
        result.tick, result.comparison, result.paused_s = point.tick, comparison, state.paused_s
        if intent == "repair":
            if comparison.total > DIFFERENCES_KEPT:
                raise Refused(
                    f"{comparison.total:,} keys of {self.spec.state} differ; rows are repaired "
                    f"one by one up to {DIFFERENCES_KEPT:,}. Replace the whole state: --whole"
                )
            # What is too many goes first: it may hold a unique value that belongs to another row.
            surplus_first = sorted(
                comparison.differences,
                key=lambda difference: difference.kind is not DifferenceKind.SURPLUS,
            )
            keys = [difference.key for difference in surplus_first]
            self.surplus = {
                difference.key
                for difference in surplus_first
                if difference.kind is DifferenceKind.SURPLUS
            }
            remaining = RemainingKeys(self.connect, self.scope, result.run)
            remaining.keep(self.spec.name, keys)
            if keys:
                deque(self._repair(keys, remaining, result), maxlen=0)
                self._refuse_left()

    def resume(self, result: Reconciled) -> bool:
        """Continues the repairs of an interrupted run; returns whether there was one."""
        remaining = RemainingKeys(self.connect, self.scope, result.run)
        interrupted = remaining.take_over(self.spec, self.comparer.engine)
        if interrupted is None:
            return False
        result.resumed, keys = interrupted
        result.comparison = combine(
            [without_rows(comparison) for comparison in self._repair(keys, remaining, result)]
        )
        self._refuse_left()
        return True

    def _refuse_left(self) -> None:
        if self.unrepaired:
            raise left_over(
                [self.spec],
                self.unrepaired.values(),
                "They are unchanged, and the others are repaired",
            )

    def _repair(
        self, keys: Sequence[str], remaining: "RemainingKeys", result: Reconciled
    ) -> Iterator[StateComparison]:
        """Compares and repairs a batch of keys at a time; yields what it finds."""
        self.remaining = len(keys)
        with self.connect() as connection:
            size = choose_batch(Store(connection, self.scope), self.spec, REPAIR_BATCH)
        for first in range(0, len(keys), size):
            batch = keys[first : first + size]
            try:
                comparison = self._repair_batch(batch, result)
            except RepairRefused as error:
                if not isinstance(error.__cause__, (ForeignKeyViolation, UniqueViolation)):
                    raise
                # What is too many may be in the way of other states of the consumer, whose rows
                # these ones wait for.
                surplus = [key for key in batch if key in self.surplus]
                if 0 < len(surplus) < len(batch):
                    self._repair_batch(surplus, result)
                    remaining.drop(
                        [key for key in surplus if key not in self.unrepaired], result.repaired
                    )
                raise
            repaired = [key for key in batch if key not in self.unrepaired]
            remaining.drop(repaired, result.repaired)
            self.remaining -= len(repaired)
            yield comparison

    def _repair_batch(self, keys: Sequence[str], result: Reconciled) -> StateComparison:
        """Compares some keys again while the consumer is paused; repairs those that differ."""
        barrier = Barrier(self.spec.consumer, self.scope)
        with (
            cut(self.connect, self.scope, barrier.place) as point,
            pinned(self.connect, barrier, point, timeout_s=self.wait_s, holds=True) as state,
            self._extended(barrier),
            self.connect() as connection,
        ):
            now = self.comparer.compare(self.spec, point.snapshot, state.snapshot, keys)
            unrepaired = repair_rows(
                Store(connection, self.scope),
                self.spec,
                point,
                now.differences,
                now.columns,
                result.run,
            )
            result.repaired += len(now.differences) - len(unrepaired)
            self.unrepaired |= unrepaired
            result.held_s = max(result.held_s, monotonic() - state.since)
        if result.resumed is not None:
            result.tick = point.tick
        return now

    @contextmanager
    def _extended(self, barrier: Barrier) -> Iterator[None]:
        """Keeps the barrier from expiring until the block ends."""
        stop = threading.Event()

        def extend() -> None:
            with self.connect() as extender:
                while not stop.wait(EXPIRES_S / 3):
                    barrier.extend(Store(extender, self.scope))

        threading.Thread(target=extend, name="barrier", daemon=True).start()
        try:
            yield
        finally:
            stop.set()

    def replace(self, result: Reconciled) -> None:
        with cut(self.connect, self.scope) as point, self.connect() as connection:
            tables = [
                (spec, self.comparer.rows(spec, point.snapshot))
                for spec in (self.spec, *self.others)
            ]
            result.repaired = replace_state(Store(connection, self.scope), point, tables)
        result.tick = point.tick


@dataclass(frozen=True, slots=True)
class LastRun:
    """The last run of a reconciliation."""

    name: str  # name of the reconciliation
    consumer: str  # the consumer whose state it compares
    intent: str  # ``compare``, ``repair``, ``replace`` or ``bootstrap``
    # ``equal``, ``differs``, ``repaired``, ``replaced``, the name of an error, or ``running``,
    # which a killed run keeps
    outcome: str
    begun_at: datetime  # its start
    ago_s: float  # time since its start, in seconds
    seconds: float | None  # its duration, in seconds; None if it has not ended
    compared: int | None  # number of keys compared; None if it compared nothing
    differences: int | None  # number of keys that differed; None if it compared nothing
    repaired: int  # number of rows repaired, or of rows in the new state
    paused_s: float | None  # pause of the consumer for the comparison, in seconds
    remaining: int  # number of keys that an interrupted repair left, for ``--resume``


def last_runs(store: Store) -> tuple[LastRun, ...]:
    """Reads the last run of each reconciliation, ordered by name."""
    return tuple(store.objects(LastRun, "last_runs", doing="reading the last runs"))


@dataclass(frozen=True)
class RemainingKeys:
    """The list of one run, on connections to the primary."""

    connect: Connect
    scope: Scope
    run: int

    def keep(self, name: str, keys: Sequence[str]) -> None:
        """Writes the list, and removes those of earlier runs of the reconciliation.

        This one has compared every key since.
        """
        with self._connected("keeping the keys to repair") as store:
            store.execute("keep_remaining", {"run": self.run, "name": name, "keys": list(keys)})

    def drop(self, keys: Sequence[str], repaired: int) -> None:
        """Removes keys that no longer need a repair; records how many the run has repaired."""
        with self._connected("keeping the keys to repair") as store:
            store.execute(
                "drop_remaining", {"run": self.run, "keys": list(keys), "repaired": repaired}
            )

    def take_over(self, spec: ReconciliationSpec, engine: str) -> tuple[int, list[str]] | None:
        """Takes over the last interrupted run: returns its number and its keys as JSON.

        None if there is none.
        """
        with (
            self._connected("taking over the keys to repair") as store,
            store.connection.transaction(),
        ):
            row = store.row("take_over_remaining", {"name": spec.name, "run": self.run})
            if row is None:
                return None
            number, written_by, keys = row
            _check_fits(spec, engine, written_by, keys)
        return number, keys

    @contextmanager
    def _connected(self, doing: str) -> Iterator[Store]:
        with postgres_errors(doing), self.connect() as connection:
            yield Store(connection, self.scope)


def _check_fits(
    spec: ReconciliationSpec, engine: str, written_by: str, keys: Sequence[str]
) -> None:
    """Refuses keys of another engine.

    Engines write some keys differently, and would take those for equal.
    """
    if written_by != engine:
        raise Refused(
            f"reconciliation {spec.name}: the interrupted run was on the engine {written_by}, "
            f"this one is on {engine}. Resume it with --engine {written_by}, or compare "
            "everything again: without --resume"
        )
    if keys and set(json.loads(keys[0], parse_int=str)) != set(spec.key):
        raise Refused(
            f"reconciliation {spec.name}: its key has changed since the interrupted run. Compare "
            "everything again: without --resume"
        )
