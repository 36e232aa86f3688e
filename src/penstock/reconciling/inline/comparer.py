"""The implementation of ``penstock.reconciling.Comparer`` in one process: both sides are read in key order and merged."""

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from penstock.database.statements import quote
from penstock.declaring.declarations import ReconciliationSpec
from penstock.errors import DeclarationError, InvalidSetting
from penstock.reconciling.comparison import DIFFERENCES_KEPT, SAMPLES, Difference, DifferenceKind, StateComparison
from penstock.reconciling.inline.sides import Group, Side, describe_side, in_snapshot, read_groups, read_rows
from penstock.reconciling.inline.tables import canonical_query
from penstock.reconciling.inline.values import NUMBERS, IsEqual, Order, make_equal, make_order, to_json
from penstock.reconciling.repair import Rows

_FIELDS = ("key", "kind", "columns")
_ROWS = ("expected", "found")


class InlineComparer:
    """Compares in one process; memory holds a few thousand rows of either side, and the keys that differ."""

    engine = "inline"

    def __init__(self, database_url: str, report: str | None = None, *, with_rows: bool = False) -> None:
        """Sets up.

        Args:
            database_url: Postgres.
            report: Directory for CSV files of every difference, one for each reconciliation; its name ends with ``.csv``.
            with_rows: Give the rows of both sides as well: in the report all, in the comparison ``SAMPLES``.

        Raises:
            InvalidSetting: The report is not CSV.
        """
        if report is not None and not report.endswith(".csv"):
            raise InvalidSetting(
                f"--report {report}: without Spark a report is CSV; end its name with .csv, or take --engine spark"
            )
        self._database_url, self._report, self._with_rows = database_url, report, with_rows

    def compare(
        self, spec: ReconciliationSpec, canonical: str, state: str, among: Sequence[str] | None = None
    ) -> StateComparison:
        """Compares every key of both sides.

        Raises:
            DeclarationError: A column is missing, a key is NULL, or the canonical rows have a key twice.
            SnapshotLost: A snapshot is gone.
            ServerUnavailable: Postgres does not answer.
        """
        with ExitStack() as stack:
            one = stack.enter_context(in_snapshot(self._database_url, canonical))
            other = stack.enter_context(in_snapshot(self._database_url, state))
            expected = describe_side(one, f"({canonical_query(spec)}\n) AS q", None)
            columns = _choose_columns(spec, expected)
            table = quote(spec.schema, spec.table)
            found = describe_side(other, table, (*spec.key, *columns))
            report = None if among is not None else self._report
            merge = _Merge(
                spec,
                columns,
                expected,
                found,
                stack.enter_context(_open(report, spec.name)),
                rows_kept=DIFFERENCES_KEPT if among is not None else SAMPLES * self._with_rows,
                reports_rows=self._with_rows,
            )
            merge.run(
                read_groups(one, expected, expected, spec.key, columns, among),
                read_groups(other, found, expected, spec.key, columns, among),
            )
        return merge.result()

    def rows(self, spec: ReconciliationSpec, canonical: str) -> Rows:
        """The canonical rows; they are read as they are consumed.

        Raises:
            DeclarationError: A column is missing.
            SnapshotLost: The snapshot is gone.
            ServerUnavailable: Postgres does not answer.
        """
        source = f"({canonical_query(spec)}\n) AS q"
        with in_snapshot(self._database_url, canonical) as connection:
            expected = describe_side(connection, source, None)
        columns = _choose_columns(spec, expected)
        names = (*spec.key, *columns)

        def each() -> Iterator[str]:
            with in_snapshot(self._database_url, canonical) as connection:
                for row in read_rows(connection, expected, names):
                    yield to_json(names, expected.oids, row)

        return Rows(columns, each())


def _choose_columns(spec: ReconciliationSpec, canonical: Side) -> tuple[str, ...]:
    """The columns that are compared.

    Raises:
        DeclarationError: The canonical rows lack a column of the declaration, or a tolerance is for none of numbers.
    """
    there = canonical.oids
    chosen = spec.columns or tuple(c for c in there if c not in spec.key)
    missing = [c for c in (*spec.key, *chosen, *spec.tolerance) if c not in there]
    if missing:
        raise DeclarationError(
            f"reconciliation {spec.name}: the canonical rows have no column {missing[0]!r}; they have {', '.join(there)}"
        )
    for column in spec.tolerance:
        if there[column] not in NUMBERS:
            raise DeclarationError(
                f"reconciliation {spec.name}: tolerance is for numbers; {column} is {canonical.names[column]}"
            )
    return chosen


@dataclass
class _Merge:
    """Walks both sides in the order of their keys, and notes the keys that differ."""

    spec: ReconciliationSpec
    columns: tuple[str, ...]
    expected: Side
    found: Side
    report: TextIO | None
    rows_kept: int
    reports_rows: bool
    compared: int = 0
    without_key: int = 0
    twice: int = 0
    counts: Counter[DifferenceKind] = field(default_factory=Counter)
    by_column: Counter[str] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)

    def run(self, expected: Iterator[Group], found: Iterator[Group]) -> None:
        """Compares the groups of both sides."""
        equals, order = self._make_equals(), self._make_order()
        report = None if self.report is None else _Report(self.report, with_rows=self.reports_rows)
        for one, other in _pair(self._with_key(expected), self._with_key(found), order):
            self.compared += 1
            self.twice += one is not None and one.count > 1
            kind = _kind(one, other, equals)
            if kind is None:
                continue
            self.counts[kind] += 1
            columns = self._differing(kind, one, other, equals)
            self.by_column.update(columns)
            is_kept = len(self.differences) < DIFFERENCES_KEPT
            has_rows = len(self.differences) < self.rows_kept
            if is_kept:
                self.differences.append(self._describe(kind, columns, one, other, with_rows=has_rows))
            if report is not None:
                report.write(self._describe(kind, columns, one, other, with_rows=self.reports_rows))

    def result(self) -> StateComparison:
        """What was found.

        Raises:
            DeclarationError: A key is NULL, or the canonical rows have a key twice.
        """
        key = ", ".join(self.spec.key)
        if self.without_key:
            raise DeclarationError(
                f"reconciliation {self.spec.name}: {self.without_key:,} rows have NULL in their key ({key}); a key must identify a row"
            )
        if self.twice:
            raise DeclarationError(
                f"reconciliation {self.spec.name}: {self.twice:,} keys occur more than once in the canonical rows; "
                f"group them by {key or 'nothing: the state is one row'}"
            )
        kinds = {kind: self.counts[kind] for kind in DifferenceKind if self.counts[kind]}
        by_column = {c: self.by_column[c] for c in self.columns if self.by_column[c]}
        return StateComparison(self.compared, kinds, self.differences, self.columns, by_column)

    def _make_order(self) -> Order:
        return make_order([self.expected.oids[column] for column in self.spec.key])

    def _make_equals(self) -> list[IsEqual]:
        return [
            make_equal(self.expected.oids[column], self.found.oids[column], self.spec.tolerance.get(column))
            for column in self.columns
        ]

    def _with_key(self, groups: Iterator[Group]) -> Iterator[Group]:
        for group in groups:
            if None in group.key:
                self.without_key += group.count
            else:
                yield group

    def _differing(
        self, kind: DifferenceKind, one: Group | None, other: Group | None, equals: Sequence[IsEqual]
    ) -> tuple[str, ...]:
        """The columns that differ."""
        if kind is not DifferenceKind.DIFFERENT or one is None or other is None:
            return ()
        values = zip(self.columns, equals, one.values, other.values, strict=True)
        return tuple(column for column, is_equal, a, b in values if not is_equal(a, b))

    def _describe(
        self, kind: DifferenceKind, columns: tuple[str, ...], one: Group | None, other: Group | None, *, with_rows: bool
    ) -> Difference:
        either = one or other
        assert either is not None
        key = to_json(self.spec.key, self.expected.oids, either.key)
        if not with_rows:
            return Difference(key, kind, columns)
        return Difference(
            key,
            kind,
            columns,
            None if one is None else self._row(self.expected, one),
            None if other is None else self._row(self.found, other),
        )

    def _row(self, side: Side, group: Group) -> str:
        """A group's row; the key was read in the canonical type."""
        oids = {**side.oids, **{column: self.expected.oids[column] for column in self.spec.key}}
        return to_json((*self.spec.key, *self.columns), oids, (*group.key, *group.values))


class _Report:
    """The file of a reconciliation."""

    def __init__(self, file: TextIO, *, with_rows: bool) -> None:
        self._fields = (*_FIELDS, *_ROWS) if with_rows else _FIELDS
        self._writer = csv.writer(file)
        self._writer.writerow(self._fields)

    def write(self, difference: Difference) -> None:
        """Writes a line."""
        line = {**asdict(difference), "columns": ", ".join(difference.columns)}
        self._writer.writerow([line[name] for name in self._fields])


def _pair(
    expected: Iterator[Group], found: Iterator[Group], order: Order
) -> Iterator[tuple[Group | None, Group | None]]:
    """The groups of each key of either side."""
    ones, others = _with_place(expected, order), _with_place(found, order)
    one, other = next(ones, None), next(others, None)
    while one is not None or other is not None:
        if other is None or (one is not None and one[0] < other[0]):
            yield one[1] if one is not None else None, None
            one = next(ones, None)
        elif one is None or other[0] < one[0]:
            yield None, other[1]
            other = next(others, None)
        else:
            yield one[1], other[1]
            one, other = next(ones, None), next(others, None)


def _with_place(groups: Iterator[Group], order: Order) -> Iterator[tuple[Any, Group]]:
    """The groups, each with what it is ordered by.  A side in another order would differ in keys that are equal."""
    last: Any = None
    for group in groups:
        place: Any = order(group.key)  # without NULL
        assert last is None or last < place, "keys are not in the order in which they are merged"
        yield place, group
        last = place


def _kind(one: Group | None, other: Group | None, equals: Sequence[IsEqual]) -> DifferenceKind | None:
    if other is None:
        return DifferenceKind.MISSING
    if one is None:
        return DifferenceKind.SURPLUS
    if other.count > 1:
        return DifferenceKind.DOUBLED
    same = all(is_equal(a, b) for is_equal, a, b in zip(equals, one.values, other.values, strict=True))
    return None if same else DifferenceKind.DIFFERENT


def _open(report: str | None, name: str) -> Any:
    """The file of a reconciliation in the directory of the report."""
    if report is None:
        return nullcontext()
    directory = Path(report)
    directory.mkdir(parents=True, exist_ok=True)
    return (directory / f"{name}.csv").open("w", encoding="utf-8", newline="")
