"""What a comparison finds: keys, the kinds of their differences, and how many there are of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

DIFFERENCES_KEPT = 100_000
"""Most differences that are held in memory and repaired one by one; beyond it the whole state is replaced."""


class Kind(StrEnum):
    """How a key differs.

    Attributes:
        MISSING: The canonical rows have it, the state has not.
        SURPLUS: The state has it, the canonical rows have not.
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
    kind: Kind
    expected: str | None
    found: str | None


@dataclass(frozen=True)
class Comparison:
    """What was compared, and what was found.

    Attributes:
        compared: Number of keys, of either side.
        counts: Number of differing keys by kind; kinds that were not found are left out.
        differences: The first ``DIFFERENCES_KEPT`` of them, in the order of their keys' text.
        columns: The columns that were compared.
    """

    compared: int
    counts: Mapping[Kind, int]
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
