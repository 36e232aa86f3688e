"""Contestants, rounds, medians: how a figure is computed, whatever is measured."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Final, Literal

import structlog

from benchmarks.interrupts import check_interrupt

log = structlog.get_logger("benchmarks")

Figures = Mapping[str, float]
"""What one run measured, by the suffix of the case's name: ``""`` is the case itself, ``-p99`` a second figure of it."""

Contestant = Callable[[], Figures]
"""Prepares, runs once, and returns its figures.  Preparation is not in the figures."""


class Marked(dict[str, float]):
    """Figures of a run that was not quite the case's; ``mark`` says how it differed."""

    def __init__(self, figures: Figures, mark: str) -> None:
        super().__init__(figures)
        self.mark = mark


Better = Literal["more", "less"]

PROCESSOR_TIME = "µs"
"""Unit of a case's figure with the suffix ``-cpu``, whatever that of its others is."""
Kind = Literal["limit", "ours", "variant", "peer"]

OURS: Final = "ours"
INTERRUPTED = "interrupted by Ctrl-C"


class NotMeasured(Exception):
    """A contestant cannot run here; the text gives the reason."""


class ContestantFailed(NotMeasured):
    """A contestant ended with an unexpected error; the other cases continue."""


@dataclass(frozen=True)
class Case:
    """One thing that is measured.

    Attributes:
        name: What ``--only`` takes.
        unit: Unit of the figure: ``records/s``, ``ms``.
        sentence: What is measured.
        ours: Measures Penstock; or a limit, in a case of its own.
        limits: What Penstock is compared with in every run: the most that the servers give to a client that does
            nothing else, or the other engine.  The worst of them is the limit.
        variants: Penstock with other settings.
        peers: Others that do the same work.
        better: Whether a larger figure is better, or a smaller one.
        slow: Left out by ``--quick``.
        on_request: Measured only if ``--only`` gives its full name.
        rounds: Number of rounds of this case, if it differs from the run's.
    """

    name: str
    unit: str
    sentence: str
    ours: Contestant
    limits: Mapping[str, Contestant] = field(default_factory=dict)
    peers: Mapping[str, Contestant] = field(default_factory=dict)
    variants: Mapping[str, Contestant] = field(default_factory=dict)
    better: Better = "more"
    slow: bool = False
    on_request: bool = False
    rounds: int | None = None


@dataclass(frozen=True)
class Reference:
    """The figure of a limit, a variant or a peer, and ours relative to it.

    Attributes:
        value: Its median.
        ratio: Our median divided by it.
    """

    value: float
    ratio: float


@dataclass(frozen=True)
class Outcome:
    """One figure of a case.

    Attributes:
        case: Name of the case, with the suffix of the figure.
        unit: Unit of every value here.
        better: Whether a larger figure is better, or a smaller one.
        value: Our median.
        limit: The worst of the limits; None if there is none.
        ratio_to_limit: ``value`` divided by ``limit``.
        limits: Each of the limits.
        peers: Each of the peers that ran.
        variants: Each of the variants.
        runs: Our figure in each round.
        skipped: Contestants that missed a round, and why.
        marks: How the last run of a contestant differed from the case.
    """

    case: str
    unit: str
    better: Better
    value: float
    limit: float | None
    ratio_to_limit: float | None
    limits: dict[str, Reference]
    peers: dict[str, Reference]
    runs: list[float]
    skipped: dict[str, str]
    variants: dict[str, Reference] = field(default_factory=dict)
    marks: dict[str, str] = field(default_factory=dict)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a case; ``outcomes`` has the figures of the contestants that had run."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        super().__init__()
        self.outcomes = outcomes


def compare(case: Case, rounds: int) -> list[Outcome]:
    """Measures each contestant of a case once per round, in turn; returns an outcome for each of our figures.

    A contestant that cannot run or fails is left out of the later rounds, and the outcomes give the reason.  If it has
    run before, its earlier rounds count.

    Raises:
        NotMeasured: Penstock itself cannot run here.
        ContestantFailed: Our first round failed.
        Interrupted: Ctrl-C was pressed.
    """
    # The garbage collector ignores what is already loaded in every run, as in a consumer.
    gc.collect()
    gc.freeze()
    measurement = _Measurement(case)
    try:
        for _ in range(case.rounds or rounds):
            measurement.run_round()
        check_interrupt()
    except KeyboardInterrupt:
        measurement.mark_interrupted(case.rounds or rounds)
        raise Interrupted(measurement.outcomes()) from None
    finally:
        gc.unfreeze()
    return measurement.outcomes()


class _Measurement:
    """The figures of a case so far."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._contestants: dict[tuple[Kind, str], Contestant] = {
            **{("limit", name): each for name, each in case.limits.items()},
            (OURS, OURS): case.ours,
            **{("variant", name): each for name, each in case.variants.items()},
            **{("peer", name): each for name, each in case.peers.items()},
        }
        self._runs: dict[tuple[Kind, str], list[Figures]] = {who: [] for who in self._contestants}
        self._skipped: dict[str, str] = {}

    def run_round(self) -> None:
        for (kind, name), contestant in self._contestants.items():
            if name in self._skipped:
                continue
            check_interrupt()
            try:
                self._runs[kind, name].append(_run(contestant))
            except NotMeasured as reason:
                if kind == OURS and not self._runs[kind, name]:
                    raise
                self._skipped[name] = str(reason)

    def mark_interrupted(self, rounds: int) -> None:
        """Gives the reason for each contestant that still had rounds to run."""
        for (_, name), runs in self._runs.items():
            if len(runs) < rounds:
                self._skipped.setdefault(name, INTERRUPTED)

    def outcomes(self) -> list[Outcome]:
        """One outcome for each of our figures; none before our first run."""
        ours = self._runs[OURS, OURS]
        return [self._outcome(suffix) for suffix in ours[0]] if ours else []

    def _outcome(self, suffix: str) -> Outcome:
        case = self._case
        runs = [figures[suffix] for figures in self._runs[OURS, OURS]]
        value = median(runs)
        limits = self._references("limit", suffix, value)
        is_time = suffix == "-cpu"
        better: Better = "less" if is_time else case.better
        worst = min if better == "more" else max
        limit = worst((each.value for each in limits.values()), default=None)
        return Outcome(
            case=case.name + suffix,
            unit=PROCESSOR_TIME if is_time else case.unit,
            better=better,
            value=value,
            limit=limit,
            ratio_to_limit=None if limit is None else _ratio(value, limit),
            limits=limits,
            peers=self._references("peer", suffix, value),
            runs=runs,
            skipped=self._skipped,
            variants=self._references("variant", suffix, value),
            marks={name: run.mark for (_, name), runs in self._runs.items() for run in runs if isinstance(run, Marked)},
        )

    def _references(self, kind: Kind, suffix: str, ours: float) -> dict[str, Reference]:
        found = {}
        for (each_kind, name), runs in self._runs.items():
            values = [figures[suffix] for figures in runs if suffix in figures]
            if each_kind == kind and values:
                found[name] = Reference(median(values), _ratio(ours, median(values)))
        return found


def _run(contestant: Contestant) -> Figures:
    try:
        return contestant()
    except NotMeasured:
        check_interrupt()
        raise
    except Exception as error:
        check_interrupt()  # clean-up after it may have failed
        log.debug("contestant failed", exc_info=True)
        raise ContestantFailed(f"{type(error).__name__}: {error}") from error


def _ratio(value: float, other: float) -> float:
    return value / other if other else 0.0


def percentile(values: list[float], share: float) -> float:
    """The value that ``share`` (0 to 1) of the values do not exceed; 0.0 if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
