"""A reconciliation from beginning to end: compare at a cut, and, if asked, mend.

Who compares is an engine's business (``Comparer``); where, and what may be touched, is decided here.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Literal, Protocol

import structlog
from psycopg import IsolationLevel

from penstock.database.errors import postgres_errors
from penstock.database.registry import register_consumer
from penstock.database.statements import DEFAULT_SCHEMA, statements
from penstock.declarations import ConsumerSpec, ReconciliationSpec
from penstock.errors import PenstockError, Refused
from penstock.reconciling.barrier import EXPIRES_S, Barrier, Pinned, pinned, reach
from penstock.reconciling.comparison import DIFFERENCES_KEPT, Comparison, Difference, Kind
from penstock.reconciling.cut import Connect, Cut, cut, exported
from penstock.reconciling.repair import Rows, mend, replace

log = structlog.get_logger("penstock.reconcile")

Intent = Literal["compare", "mend", "replace", "bootstrap"]
WAIT_S = 60.0
"""How long a run waits for the consumer to come to the cut, in seconds."""

MENDED_AT_ONCE = 5_000
"""Most keys that are mended while the consumer stands still once: it goes on between two portions."""


class Comparer(Protocol):
    """What an engine does for a reconciliation."""

    def compare(
        self,
        spec: ReconciliationSpec,
        canonical: str,
        state: str,
        among: Sequence[Difference] | None = None,
    ) -> Comparison:
        """Compares the canonical rows in one snapshot with the state in another; ``among``: the keys of these alone."""

    def rows(self, spec: ReconciliationSpec, canonical: str) -> Rows:
        """The canonical rows in a snapshot."""


@dataclass(frozen=True)
class Reconciled:
    """What a run found and did.

    Attributes:
        run: Its number.
        name: Of the reconciliation.
        consumer: Whose state.
        intent: What it was asked for.
        tick: The cut that was compared at.
        comparison: What was found; None if nothing was compared (``replace``, ``bootstrap``).
        repaired: Keys that were mended, or rows that the new state has.
        paused_s: How long the consumer stood still to be compared, in seconds.
        held_s: How long it stood still to be mended, at most, in seconds.
        seconds: How long the run took.
    """

    run: int
    name: str
    consumer: str
    intent: Intent
    tick: int
    comparison: Comparison | None
    repaired: int
    paused_s: float
    held_s: float
    seconds: float

    @property
    def clean(self) -> bool:
        """Nothing differs, or what differed was mended."""
        return self.comparison is None or self.comparison.equal or bool(self.repaired)


def reconcile(  # noqa: PLR0913  a run has this many parts; most have defaults
    connect: Connect,
    spec: ReconciliationSpec,
    comparer: Comparer,
    *,
    intent: Intent = "compare",
    schema: str = DEFAULT_SCHEMA,
    wait_s: float = WAIT_S,
    others: Sequence[ReconciliationSpec] = (),
) -> Reconciled:
    """Compares, mends or replaces a consumer's state.

    Args:
        connect: Opens a connection to the primary itself, in autocommit mode.
        spec: What is compared.
        comparer: The engine that does it.
        intent: ``compare`` changes nothing; ``mend`` puts the differing rows right; ``replace`` puts canonical rows and the
            cut's position in the place of all; ``bootstrap`` is the same for a consumer that may be new.
        schema: The Penstock schema.
        wait_s: How long to wait for the consumer to come to the cut, in seconds.
        others: For ``replace`` and ``bootstrap``: the other tables that the consumer keeps.  A position is that of all.

    Raises:
        BarrierMissed: The consumer does not come to the cut.
        Halted: A shard of the consumer stands still.
        Refused: There is too much to mend, or something that only an operator can decide.
        SnapshotLost: Postgres was restarted while it was read.
        ServerUnavailable: Postgres does not answer.
    """
    began = monotonic()
    work = _Run(connect, spec, comparer, schema, wait_s, others)
    run = work.begin(intent)
    try:
        done = work.replaced() if intent in {"replace", "bootstrap"} else work.compared(run, intent)
    except BaseException as error:
        work.end(run, None, type(error).__name__)
        raise
    work.end(run, done, _outcome(intent, done))
    return Reconciled(
        run,
        spec.name,
        spec.consumer.name,
        intent,
        done.tick,
        done.comparison,
        done.repaired,
        done.paused_s,
        done.held_s,
        monotonic() - began,
    )


def _outcome(intent: Intent, done: "_Done") -> str:
    if intent in {"replace", "bootstrap"}:
        return "replaced"
    return "equal" if not done.found else "mended" if done.repaired else "differs"


def never_applied(connect: Connect, consumer: ConsumerSpec, schema: str = DEFAULT_SCHEMA) -> bool:
    """Whether a consumer has not yet applied, skipped or set aside a single record.

    Raises:
        ServerUnavailable: Postgres does not answer.
    """
    with postgres_errors("reading checkpoints"), connect() as connection:
        [(records,)] = connection.execute(
            statements("penstock.reconciling", schema)["records_seen"], {"consumer": consumer.name}
        ).fetchall()
    return not records


@dataclass
class _Done:
    tick: int
    comparison: Comparison | None = None
    repaired: int = 0
    paused_s: float = 0.0
    held_s: float = 0.0

    @property
    def found(self) -> bool:
        return self.comparison is not None and not self.comparison.equal


@dataclass
class _Run:
    connect: Connect
    spec: ReconciliationSpec
    comparer: Comparer
    schema: str
    wait_s: float
    others: Sequence[ReconciliationSpec]

    def begin(self, intent: Intent) -> int:
        with postgres_errors("beginning a reconciliation"), self.connect() as books:
            if intent == "bootstrap":
                register_consumer(books, self.schema, self.spec.consumer)
            [(run,)] = books.execute(
                statements("penstock.reconciling", self.schema)["begin_run"],
                {"name": self.spec.name, "consumer": self.spec.consumer.name, "intent": intent},
            ).fetchall()
        return int(run)

    def end(self, run: int, done: _Done | None, outcome: str) -> None:
        counts = done.comparison.counts if done is not None and done.comparison else {}
        compared = done.comparison if done is not None else None
        try:
            with postgres_errors("ending a reconciliation"), self.connect() as books:
                books.execute(
                    statements("penstock.reconciling", self.schema)["end_run"],
                    {
                        "run": run,
                        "tick": done.tick if done else None,
                        "compared": compared.compared if compared else None,
                        "missing": counts.get(Kind.MISSING, 0) if compared else None,
                        "surplus": counts.get(Kind.SURPLUS, 0) if compared else None,
                        "different": counts.get(Kind.DIFFERENT, 0) + counts.get(Kind.DOUBLED, 0)
                        if compared
                        else None,
                        "repaired": done.repaired if done else 0,
                        "paused_s": done.paused_s if done else None,
                        "outcome": outcome,
                    },
                )
        except PenstockError as error:
            # What the run found or raised matters more than its line in the books.
            log.warning("the run could not be written down", run=run, error=type(error).__name__)

    def compared(self, run: int, intent: Intent) -> _Done:
        barrier = Barrier(self.spec.consumer, self.schema)
        with (
            cut(self.connect, self.schema, barrier.place) as at,
            pinned(self.connect, barrier, at, timeout_s=self.wait_s) as state,
        ):
            comparison = self.comparer.compare(self.spec, at.snapshot, state.snapshot)
            if intent == "mend" and not comparison.equal:
                # A rehearsal: what the engine has to plan, compile and start, it has when the consumer stands for it.
                portion = comparison.differences[:MENDED_AT_ONCE]
                self.comparer.compare(self.spec, at.snapshot, state.snapshot, portion)
        done = _Done(at.tick, comparison, paused_s=state.paused_s)
        if done.found and intent == "mend":
            self._mend(run, comparison, done)
        return done

    def _mend(self, run: int, comparison: Comparison, done: _Done) -> None:
        if comparison.total > DIFFERENCES_KEPT:
            raise Refused(
                f"{comparison.total:,} keys of {self.spec.state} differ; rows are mended one by one up to {DIFFERENCES_KEPT:,}. "
                "Replace the whole state: --whole"
            )
        for first in range(0, comparison.total, MENDED_AT_ONCE):
            self._mend_portion(run, comparison.differences[first : first + MENDED_AT_ONCE], done)

    def _mend_portion(self, run: int, found: Sequence[Difference], done: _Done) -> None:
        """Compares some keys once more, while the consumer stands, and mends those that still differ."""
        barrier = Barrier(self.spec.consumer, self.schema)
        with (
            cut(self.connect, self.schema, barrier.place) as at,
            self._held(barrier, at) as state,
            self.connect() as connection,
        ):
            now = self.comparer.compare(self.spec, at.snapshot, state.snapshot, found)
            done.repaired += mend(
                connection, self.spec, at, now.differences, now.columns, run, self.schema
            )
            done.held_s = max(done.held_s, monotonic() - state.paused_s)

    @contextmanager
    def _held(self, barrier: Barrier, at: Cut) -> Iterator[Pinned]:
        """The consumer stands at the cut until the block ends; ``paused_s`` is the monotonic time since when."""
        ended = threading.Event()

        def keep() -> None:
            with self.connect() as keeper:
                while not ended.wait(EXPIRES_S / 3):
                    barrier.keep(keeper)

        keeping = threading.Thread(target=keep, name="barrier", daemon=True)
        with (
            postgres_errors("holding a consumer"),
            self.connect() as watcher,
            self.connect() as holder,
        ):
            try:
                since = reach(watcher, barrier, at, timeout_s=self.wait_s)
                keeping.start()
                holder.isolation_level, holder.read_only = IsolationLevel.REPEATABLE_READ, True
                with holder.transaction():
                    yield Pinned(exported(holder), since)
            finally:
                ended.set()
                barrier.lift(watcher)

    def replaced(self) -> _Done:
        with cut(self.connect, self.schema) as at, self.connect() as connection:
            tables = [
                (spec, self.comparer.rows(spec, at.snapshot)) for spec in (self.spec, *self.others)
            ]
            replaced = replace(connection, at, tables, self.schema)
        return _Done(at.tick, repaired=replaced.after)
