"""What a comparison of a consumer's state is given, and its result.

A canonical function is given the application's tables, as queries.  The result are the differing
keys, how they differ, and how many there are of each kind.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from penstock.database.query_text import Query, condition, query_text, split_names, subquery
from penstock.database.statements import quote
from penstock.declaring.declarations import ReconciliationSpec, table_named
from penstock.display import format_count
from penstock.errors import DeclarationError, InvalidSetting

DIFFERENCES_KEPT = 100_000
"""Most differences that are held in memory and repaired one by one.

Beyond that, replace the whole state.
"""

SAMPLES = 1_000
"""Most differences whose whole rows are held in memory, because rows may be large."""


class DifferenceKind(StrEnum):
    """The kind of a difference."""

    MISSING = "missing"  # the canonical rows have it, the state does not
    SURPLUS = "surplus"  # the state has it, the canonical rows do not
    DIFFERENT = "different"  # both have it, with other values
    DOUBLED = "doubled"  # the state has several rows of it


@dataclass(frozen=True, slots=True)
class Difference:
    """One key that differs."""

    key: str  # the key's columns, as JSON
    kind: DifferenceKind  # the kind of difference
    # the columns that differ, if both sides have the key; empty otherwise
    columns: tuple[str, ...] = ()
    # the canonical row, as JSON; None if there is none, or it was not asked for
    expected: str | None = None
    # the state's row, as JSON, or one of them; None if there is none, or it was not asked for
    found: str | None = None


@dataclass(frozen=True)
class StateComparison:
    """A state compared with its canonical rows."""

    compared: int  # number of keys on either side
    # number of differing keys by kind; kinds without any are left out
    counts: Mapping[DifferenceKind, int]
    # all of them, up to ``DIFFERENCES_KEPT``, otherwise some of the first, in the order of their
    # keys: numbers as numbers, anything else as text
    differences: Sequence[Difference]
    columns: tuple[str, ...]  # the columns that were compared
    # number of keys in which a column differs, of those that both sides have; columns without any
    # are left out
    by_column: Mapping[str, int]

    @property
    def equal(self) -> bool:
        """True if nothing differs."""
        return not self.counts

    @property
    def total(self) -> int:
        """Count of differing keys."""
        return sum(self.counts.values())


def wrong_result(spec: ReconciliationSpec, result: object) -> DeclarationError:
    """Makes the error for a canonical function that returns something else."""
    return DeclarationError(
        f"reconciliation {spec.name}: the canonical function returns {type(result).__name__}; it "
        "must return a query, a select, or a DataFrame"
    )


def choose_columns(spec: ReconciliationSpec, canonical: Iterable[str]) -> tuple[str, ...]:
    """Chooses the compared columns among those of the canonical rows."""
    available = list(canonical)
    check_names(available)
    chosen = spec.columns or tuple(c for c in available if c not in spec.key)
    missing = [c for c in (*spec.key, *chosen, *spec.tolerance) if c not in available]
    if missing:
        raise DeclarationError(
            f"reconciliation {spec.name}: the canonical rows have no column {missing[0]!r}; they "
            f"have {', '.join(available)}"
        )
    return chosen


def check_names(columns: Sequence[str]) -> None:
    """Checks that a name is one column."""
    for name in columns:
        if columns.count(name) > 1:
            raise DeclarationError(
                f"reconcile: two columns of the canonical rows are named {name!r}; give aliases"
            )


def check_keys(spec: ReconciliationSpec, *, without_key: int, twice: int) -> None:
    """Checks that a key identifies a row."""
    key = ", ".join(spec.key)
    if without_key:
        raise DeclarationError(
            f"reconciliation {spec.name}: the key ({key}) of "
            f"{format_count(without_key, 'row')} has a NULL; a key must identify a row"
        )
    if twice:
        raise DeclarationError(
            f"reconciliation {spec.name}: {format_count(twice, 'key')} more than once in the "
            f"canonical rows; group them by {key or 'nothing: the state is one row'}"
        )


def without_rows(comparison: StateComparison) -> StateComparison:
    """Returns the same comparison without the rows of its differences."""
    differences = [
        replace(difference, expected=None, found=None) for difference in comparison.differences
    ]
    return replace(comparison, differences=differences)


def combine(comparisons: Sequence[StateComparison]) -> StateComparison:
    """Combines the comparisons of several sets of keys."""
    return StateComparison(
        sum(comparison.compared for comparison in comparisons),
        sum((Counter(comparison.counts) for comparison in comparisons), Counter()),
        [difference for comparison in comparisons for difference in comparison.differences],
        comparisons[0].columns,
        sum((Counter(comparison.by_column) for comparison in comparisons), Counter()),
    )


_FOR_SPARK = {"partitions", "partitioncolumn", "textcolumns"}
"""Options of ``penstock.table`` for Spark's tasks and types: Postgres needs none."""


class SparkNeededError(Exception):
    """A canonical function computes with DataFrames."""


@dataclass(frozen=True)
class Relation:
    """A table or a query; a method of a DataFrame called on it raises ``SparkNeededError``."""

    text: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise SparkNeededError(name)

    def __getitem__(self, _column: object) -> Any:
        raise SparkNeededError


class CanonicalTables:
    """The application's tables: the argument of ``canonical(tables)`` without Spark."""

    def __call__(self, table: Any, **options: str) -> Relation:
        """A table, given as a mapped class, a ``Table`` or a name.

        ``columns`` and ``where`` as in ``penstock.table``.
        """
        return _select(quote(*table_named(table)), options)

    def query(self, query: Query, **options: str) -> Relation:
        """Runs a query: text, or SQLAlchemy's ``select``, ``union_all`` or ``text``."""
        return _select(subquery(query_text(query)), options)

    @property
    def spark(self) -> Any:
        """Spark session; there is none."""
        raise SparkNeededError("spark")


def needs_spark(spec: ReconciliationSpec) -> bool:
    """True if the canonical function of a reconciliation computes with DataFrames."""
    try:
        spec.canonical(CanonicalTables())
    except SparkNeededError:
        return True
    return False


def canonical_query(spec: ReconciliationSpec) -> str:
    """Returns the query for the rows that belong in a state."""
    try:
        result = spec.canonical(CanonicalTables())
    except SparkNeededError:
        raise DeclarationError(
            f"reconciliation {spec.name}: the canonical function computes with DataFrames, which "
            "needs Spark: --engine spark; or let it return a query"
        ) from None
    if isinstance(result, Relation):
        return result.text
    if isinstance(result, Query):
        return query_text(result)
    raise wrong_result(spec, result)


def _select(source: str, options: dict[str, str]) -> Relation:
    lowered = {name.lower(): value for name, value in options.items()}
    unknown = sorted(lowered.keys() - {"columns", "where"} - _FOR_SPARK)
    if unknown:
        raise InvalidSetting(
            f"tables: there is no option {unknown[0]!r}; the options are columns and where"
        )
    try:
        columns = (
            ", ".join(map(quote, split_names(lowered["columns"]))) if "columns" in lowered else "*"
        )
    except ValueError:
        raise InvalidSetting(
            "tables: columns takes names with ',' between them, or a JSON list of names"
        ) from None
    return Relation(
        f"SELECT {columns} FROM {source} WHERE {condition(lowered.get('where') or 'true')}"
    )
