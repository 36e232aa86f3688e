"""``--check``: compares ratios with those that the page of the bench has published."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.measuring import Outcome
from penstock.display import format_count

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "bench.md"
TOLERATED = 0.1
"""Part of a published ratio by which one may be worse."""

_NAME = re.compile(r"`([^`]+)`")


def read_ratios(page: str) -> dict[tuple[str, str], float]:
    """Returns the published ratios by case and by what ours was compared with.

    They are in the tables that begin with a case and have a column ``ratio``.
    """
    found: dict[tuple[str, str], float] = {}
    for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        header, _, *rows = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in table.splitlines()]
        if (case := _NAME.fullmatch(header[0])) is None or "ratio" not in header:
            continue
        for row in rows:
            if (name := _NAME.match(row[0])) and (ratio := row[header.index("ratio")]):
                found[case[1], name[1]] = float(ratio)
    return found


def find_worse(outcomes: Sequence[Outcome], published: dict[tuple[str, str], float]) -> Iterator[str]:
    """Yields a line for each ratio that is worse than the published one by more than a tenth, and what was compared."""
    compared = 0
    for outcome in outcomes:
        for name, reference in {**outcome.limits, **outcome.peers}.items():
            if (before := published.get((outcome.case, name))) is None:
                continue
            compared += 1
            change = reference.ratio / before if outcome.better == "more" else before / reference.ratio
            if change < 1 - TOLERATED:
                yield f"{outcome.case}: {reference.ratio:.3g} times {name}, published {before:g}: worse by {1 - change:.0%}"
    yield f"{format_count(compared, 'ratio')} compared with {PAGE.name}, of {len(published)} there"
