"""Contestants, rounds, medians: how a figure is come by, whatever is measured."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

import structlog

log = structlog.get_logger("penstock.bench")

Sample = Mapping[str, float]
"""What one run measured: by the suffix of the case's name; ``""`` is the case itself, ``-p99`` a second figure of it."""

Contestant = Callable[[], Sample]
"""Prepares, runs once, and gives what it measured.  Only the run itself is in the figure."""

Better = Literal["more", "less"]

LIMIT, PEER, OURS = "limit", "peer", "ours"


class NotMeasured(Exception):
    """A contestant cannot run here; its text says why."""


class Failed(NotMeasured):
    """A contestant ended with an error that nobody expected; the other cases go on."""


@dataclass(frozen=True)
class Case:
    """One thing that is measured.

    Attributes:
        name: What ``--only`` calls it.
        unit: Of the figure: ``records/s``, ``ms``.
        sentence: What is measured.
        ours: Measures Penstock; or a limit, in a case of its own.
        limits: What Penstock stands beside in every run: what the servers give to somebody who does nothing else, or
            the other engine; the worst of them is the limit.
        peers: Others that do the same work.
        better: Whether a larger figure is better, or a smaller one.
        slow: Left out by ``--quick``.
        on_request: Left out unless it is asked for by its name.
        rounds: Rounds of this case, if it needs another number than the run.
    """

    name: str
    unit: str
    sentence: str
    ours: Contestant
    limits: Mapping[str, Contestant] = field(default_factory=dict)
    peers: Mapping[str, Contestant] = field(default_factory=dict)
    better: Better = "more"
    slow: bool = False
    on_request: bool = False
    rounds: int | None = None


@dataclass(frozen=True)
class Comparison:
    """A peer, or one of several limits, beside our figure.

    Attributes:
        value: Its median.
        ratio: Our median divided by it.
    """

    value: float
    ratio: float


@dataclass(frozen=True)
class Outcome:
    """A case, measured.

    Attributes:
        case: Its name.
        unit: Of all figures of it.
        better: Whether a larger figure is better, or a smaller one.
        value: Our median.
        limit: The worst of the limits; None if there is none.
        ratio_to_limit: ``value`` divided by ``limit``.
        limits: Each of the limits.
        peers: Each of the peers that ran.
        runs: Our figure in each round.
        skipped: What did not run, and why.
    """

    case: str
    unit: str
    better: Better
    value: float
    limit: float | None
    ratio_to_limit: float | None
    limits: dict[str, Comparison]
    peers: dict[str, Comparison]
    runs: list[float]
    skipped: dict[str, str]


Told = Callable[[str], None]
"""Told what is being measured, for whoever waits."""


def compare(case: Case, rounds: int, tell: Told = lambda _: None) -> list[Outcome]:
    """Measures each contestant of a case once a round, in turn.

    A contestant that cannot run, or fails, is left out from then on, with its reason; of one that has run before, the
    rounds count that it had.

    Raises:
        NotMeasured: We cannot run here.
        Failed: Our first round failed.
    """
    # What is loaded is not searched for cycles in anybody's run, as it is not in a consumer.
    gc.collect()
    gc.freeze()
    contestants: dict[tuple[str, str], Contestant] = {
        **{(LIMIT, name): each for name, each in case.limits.items()},
        (OURS, ""): case.ours,
        **{(PEER, name): each for name, each in case.peers.items()},
    }
    samples: dict[tuple[str, str], list[Sample]] = {who: [] for who in contestants}
    skipped: dict[str, str] = {}
    for number in range(case.rounds or rounds):
        for who, contestant in contestants.items():
            name = who[1] or OURS
            if name in skipped:
                continue
            tell(f"{case.name}, round {number + 1}: {' '.join(who).strip()}")
            try:
                samples[who].append(_run(contestant))
            except NotMeasured as reason:
                if who[0] == OURS and not number:
                    raise
                skipped[name] = str(reason)
    return outcomes(case, samples, skipped)


def _run(contestant: Contestant) -> Sample:
    try:
        return contestant()
    except NotMeasured:
        raise
    except Exception as error:
        log.debug("contestant failed", exc_info=True)
        raise Failed(f"{type(error).__name__}: {error}") from error


def outcomes(
    case: Case, samples: Mapping[tuple[str, str], list[Sample]], skipped: dict[str, str]
) -> list[Outcome]:
    """Medians and ratios: one outcome for each figure that our runs gave."""
    return [_outcome(case, suffix, samples, skipped) for suffix in samples[OURS, ""][0]]


def _outcome(
    case: Case,
    suffix: str,
    samples: Mapping[tuple[str, str], list[Sample]],
    skipped: dict[str, str],
) -> Outcome:
    runs = [sample[suffix] for sample in samples[OURS, ""]]
    value = median(runs)

    def beside(kind: str) -> dict[str, Comparison]:
        found = {}
        for (of, name), each in samples.items():
            figures = [sample[suffix] for sample in each if suffix in sample]
            if of == kind and figures:
                found[name] = Comparison(median(figures), _ratio(value, median(figures)))
        return found

    limits = beside(LIMIT)
    worst = min if case.better == "more" else max
    limit = worst((each.value for each in limits.values()), default=None)
    return Outcome(
        case=case.name + suffix,
        unit=case.unit,
        better=case.better,
        value=value,
        limit=limit,
        ratio_to_limit=None if limit is None else _ratio(value, limit),
        limits=limits,
        peers=beside(PEER),
        runs=runs,
        skipped=skipped,
    )


def _ratio(value: float, other: float) -> float:
    return value / other if other else 0.0


def percentile(values: list[float], share: float) -> float:
    """The value that ``share`` (0 to 1) of the values do not exceed; 0.0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
