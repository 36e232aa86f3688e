"""The result of comparing a consumer's state: the differing keys, how they differ, and how many there are of each kind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

DIFFERENCES_KEPT = 100_000
"""Most differences that are held in memory and repaired one by one; beyond that, replace the whole state."""


class DifferenceKind(StrEnum):
    """How a key differs.

    Attributes:
        MISSING: The canonical rows have it, the state does not.
        SURPLUS: The state has it, the canonical rows do not.
        DIFFERENT: Both have it, with other values.
        DOUBLED: The state has several rows of it.
    """

    MISSING = "missing"
    SURPLUS = "surplus"
    DIFFERENT = "different"
    DOUBLED = "doubled"


@dataclass(frozen=True, slots=True)
class Difference:
    """One key that differs.

    Attributes:
        key: The key's columns, as JSON.
        kind: How it differs.
        expected: The canonical row, as JSON; None if there is none.
        found: The state's row, as JSON, or one of them; None if there is none.
    """

    key: str
    kind: DifferenceKind
    expected: str | None
    found: str | None


@dataclass(frozen=True)
class StateComparison:
    """A state compared with its canonical rows.

    Attributes:
        compared: Number of keys on either side.
        counts: Number of differing keys by kind; kinds without any are left out.
        differences: The first ``DIFFERENCES_KEPT`` of them, ordered by the text of their keys.
        columns: The columns that were compared.
    """

    compared: int
    counts: Mapping[DifferenceKind, int]
    differences: Sequence[Difference]
    columns: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Nothing differs."""
        return not self.counts

    @property
    def total(self) -> int:
        """Number of differing keys."""
        return sum(self.counts.values())
