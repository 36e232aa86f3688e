"""Which rows differ, and what they become, beside a plain model: every value in every place, on either side.

The whole comparison, that of a batch, a repair and a replacement see one and the same difference.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import count, product
from typing import Any

import pytest

from fixtures.reconciling import Run, declare
from penstock import Pipeline
from penstock.database.connections import Connection, connect_postgres
from penstock.errors import DeclarationError
from penstock.reconciling.comparison import DifferenceKind, StateComparison
from penstock.reconciling.cut import export_snapshot
from penstock.reconciling.inline_comparer import InlineComparer
from penstock.reconciling.reconciliation import Intent

SPECIAL = ["NaN", "Infinity", "-Infinity"]
LARGE = "9" * 40
NUMBERS = {
    "numeric": ["0", "1", "1.01", "0.99", "-1", LARGE, f"{LARGE}.01", *SPECIAL],
    "double precision": ["0", "-0", "1", "0.1", "0.10000000000000002", "-0.1", "1e308", *SPECIAL],
    "real": ["0", "-0", "1", "0.1", "0.10000001", "3e38", "-3e38", *SPECIAL],
    "smallint": ["0", "1", "2", "32767", "-32768"],
    "bigint": ["0", "1", "-1", "9223372036854775807", "9223372036854775806", "-9223372036854775808"],
}
TOLERANCES = {
    "numeric": [0.01, 1.0],
    "double precision": [2e-17, 1.5e-17, 0.2],
    "real": [1e-8, 0.2],
    "smallint": [0.0, 1.0, 65535.0],
    "bigint": [1.0],
}
OTHERS = {
    "text": ["", " ", "a", "a ", "A", "\u00e4", "NULL", '"', "\\N"],
    "boolean": ["true", "false"],
    "date": ["2026-01-01", "infinity", "-infinity", "0044-03-15 BC"],
    "timestamptz": ["2026-01-01 00:00:00.000001+00", "2026-01-01 00:00:00.000002+00", "infinity", "-infinity"],
    "bytea": ["\\x", "\\x00", "\\x0000"],
    "uuid": ["6ecd8c99-4036-403d-bf84-cf8400f67836", "6ecd8c99-4036-403d-bf84-cf8400f67837"],
    "interval": ["1 month", "30 days", "720 hours"],
    "jsonb": ["null", "{}", '{"a": 1}', '{"a": 1.0}', '""'],
    "text[]": ["{}", "{NULL}", '{"NULL"}', '{""}', "{a,NULL}"],
}


@dataclass(frozen=True)
class Column:
    """A column of both tables, and what it may differ by."""

    name: str
    type: str
    values: Sequence[str | None]
    tolerance: float | None = None

    def differs(self, one: str | None, other: str | None) -> bool:
        if one is None or other is None or self.type not in NUMBERS:
            return one != other
        if one in SPECIAL or other in SPECIAL or self.tolerance is None:
            return one != other and {one, other} != {"0", "-0"}
        return abs(Fraction(one) - Fraction(other)) > Fraction(str(self.tolerance))


def make_columns() -> Iterator[Column]:
    number = count()
    for type_, values in (NUMBERS | OTHERS).items():
        for tolerance in (None, *TOLERANCES.get(type_, ())):
            yield Column(f"c{next(number)}", type_, [None, *values], tolerance)


COLUMNS = list(make_columns())
ROWS = dict(enumerate((column, *pair) for column in COLUMNS for pair in product(column.values, column.values)))
"""Of each row, the column that is not NULL, and its values on either side: the canonical one, and the state's."""

DIFFERENT = {number: column.name for number, (column, one, other) in ROWS.items() if column.differs(one, other)}
Rows = Mapping[Any, Sequence[str | None]]


def create(
    connection: Connection, table: str, columns: Sequence[Column], keys: Sequence[str], rows: Sequence[Any]
) -> None:
    """Creates a table, and fills it from rows of texts."""
    typed = ", ".join([*keys, *(f"{column.name} {column.type}" for column in columns)])
    connection.execute(f"CREATE TABLE {table} ({typed})".encode())
    with connection.cursor().copy(f"COPY {table} FROM STDIN".encode()) as copy:
        for row in rows:
            copy.write_row(row)


def make_row(number: int, side: int) -> list[Any]:
    """The row of a table, with its key."""
    column, one, other = ROWS[number]
    return [number, *((one, other)[side] if each is column else None for each in COLUMNS)]


@contextmanager
def compared(
    flow: Pipeline, database_url: str, **declared: Any
) -> Iterator[Callable[[Sequence[str] | None], StateComparison]]:
    """Compares some keys, as a repair does, or all of them, in one snapshot."""
    spec = declare(flow, "keeper", "TABLE public.canonical", **declared)
    with connect_postgres(database_url, application="test") as holder, holder.transaction():
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        snapshot = export_snapshot(holder)
        yield lambda among: InlineComparer(database_url).compare(spec, snapshot, snapshot, among)


Differing = set[tuple[str, DifferenceKind, tuple[str, ...]]]


def without_rows(found: StateComparison) -> Differing:
    return {(each.key, each.kind, each.columns) for each in found.differences}


def check_batches(compare: Callable[[Sequence[str] | None], StateComparison], keys: Sequence[str]) -> StateComparison:
    """The comparison of all keys, after checking that batches of them find the same."""
    whole = compare(None)
    for batch in (keys[:1], keys[1:8], keys[8:]):
        some = compare(batch)
        assert some.compared == len(batch)
        assert without_rows(some) == {each for each in without_rows(whole) if each[0] in set(batch)}
    return whole


TOLERATED = {column.name: column.tolerance for column in COLUMNS if column.tolerance is not None}


@pytest.mark.parametrize("intent", ["repair", "replace"])
def test_a_value_differs_from_another_as_in_a_plain_model_and_is_repaired_if_it_does(
    run: Run, flow: Pipeline, connection: Connection, database_url: str, intent: Intent
) -> None:
    """Guarantee 28: within its tolerance, a row stays as it is."""
    for side, table in enumerate(("public.canonical", "public.state")):
        create(connection, table, COLUMNS, ["id int"], [make_row(number, side) for number in ROWS])
    with compared(flow, database_url, tolerance=TOLERATED) as compare:
        found = check_batches(compare, [f'{{"id":{number}}}' for number in ROWS])
    before = read(connection, "id")

    assert without_rows(found) == {
        (f'{{"id":{number}}}', DifferenceKind.DIFFERENT, (column,)) for number, column in DIFFERENT.items()
    }
    assert run("TABLE public.canonical", intent, tolerance=TOLERATED).repaired == len(
        DIFFERENT if intent == "repair" else ROWS
    )
    canonical = read(connection, "id", "public.canonical")
    assert read(connection, "id") == {key: (canonical if int(key) in DIFFERENT else before)[key] for key in before}
    assert run("TABLE public.canonical", tolerance=TOLERATED).clean


def read(connection: Connection, key: str, table: str = "public.state") -> dict[str, list[str]]:
    """The rows of a table as text, by their keys."""
    found: dict[str, list[str]] = {}
    for at, row in connection.execute(f"SELECT CAST(ROW({key}) AS text), CAST(t.* AS text) FROM {table} t".encode()):
        found.setdefault(at.strip("()"), []).append(row)
    return {at: sorted(rows) for at, rows in found.items()}


KINDS = ("equal", *DifferenceKind)
KEYS = {
    **{type_: values for type_, values in NUMBERS.items() if type_ != "real"},
    **OTHERS,
    "numeric": ["0", "1.10", "-1", LARGE, f"0.{LARGE}", *SPECIAL],
    "double precision": ["0", "0.1", "0.10000000000000002", "1e308", "5e-324", *SPECIAL],
    "interval": ["1 month", "31 days", "00:00:00.000001"],
    "jsonb": ["null", "{}", '{"a": 1}', '""'],
}


def make_rows(key: Sequence[str], kind: str) -> tuple[list[list[str]], list[list[str]]]:
    """A key's canonical rows, and those of the state."""
    one, other = [*key, "1"], [*key, "2"]
    return {
        "equal": ([one], [one]),
        "missing": ([one], []),
        "surplus": ([], [other]),
        "different": ([one], [other]),
        "doubled": ([one], [one, other]),
    }[kind]


Compare = Callable[[Sequence[str], Mapping[Any, str]], StateComparison]


@pytest.fixture
def compare_keys(flow: Pipeline, keeper: str, connection: Connection, database_url: str) -> Compare:
    """Compares tables whose keys are of some types, each with its kind of difference."""

    def compare_all(types: Sequence[str], keys: Mapping[Any, str]) -> StateComparison:
        names = [f"k{number}" for number in range(len(types))]
        typed = [f"{name} {type_}" for name, type_ in zip(names, types, strict=True)]
        value = [Column("v", "int", ())]
        connection.execute("DROP TABLE IF EXISTS public.canonical, public.state")
        for side, table in enumerate(("public.canonical", "public.state")):
            create(
                connection,
                table,
                value,
                typed,
                [row for key, kind in keys.items() for row in make_rows(key, kind)[side]],
            )
        with compared(flow, database_url, key=names) as compare:
            whole = compare(None)
            batch = [each.key for each in whole.differences][::2]
            some = compare(batch)
        kinds = {kind: sum(each == kind for each in keys.values()) for kind in DifferenceKind}
        assert whole.counts == {kind: number for kind, number in kinds.items() if number}
        assert (whole.compared, some.compared) == (len(keys), len(batch))
        assert without_rows(some) == {each for each in without_rows(whole) if each[0] in batch}
        return whole

    return compare_all


@pytest.mark.parametrize("type_", KEYS)
def test_a_key_of_any_type_and_value_meets_itself_and_no_other(compare_keys: Compare, type_: str) -> None:
    """Guarantee 28: the keys of a batch are found again, whatever their text looks like."""
    for shift in range(2):
        compare_keys([type_], {(value,): KINDS[(n + 3 * shift) % len(KINDS)] for n, value in enumerate(KEYS[type_])})


@pytest.mark.parametrize("intent", ["repair", "replace"])
def test_a_key_of_many_columns_meets_itself_and_no_other(
    compare_keys: Compare, run: Run, connection: Connection, intent: Intent
) -> None:
    """Guarantee 28: what is compared is repaired."""
    longest = max(map(len, KEYS.values()))
    keys = {
        (kind, *(values[number % len(values)] for values in KEYS.values())): kind
        for number, kind in product(range(longest), KINDS)
    }
    compare_keys(["text", *KEYS], keys)
    names = [f"k{number}" for number in range(len(KEYS) + 1)]
    run("TABLE public.canonical", intent, key=names)

    assert read(connection, ", ".join(names)) == read(connection, ", ".join(names), "public.canonical")
    assert run("TABLE public.canonical", key=names).clean


COARSE = {
    "interval": ("1 month", "30 days", "720:00:00", "29 days 24:00:00"),
    "jsonb": ('{"a": 1}', '{"a": 1.0}', '{"a": 1.00}', '{"a": 1.000}'),
}
"""Values that Postgres takes for equal."""


@pytest.mark.parametrize("intent", ["repair", "replace"])
@pytest.mark.parametrize("type_", COARSE)
def test_keys_that_are_equal_to_postgres_and_have_other_texts_are_other_keys(
    run: Run, connection: Connection, type_: str, intent: Intent
) -> None:
    equal, different, surplus, missing = COARSE[type_]
    columns, keys = [Column("v", "int", ())], [f"id {type_}"]
    create(connection, "public.canonical", columns, keys, [(equal, "1"), (different, "2"), (missing, "4")])
    create(connection, "public.state", columns, keys, [(equal, "1"), (different, "0"), (surplus, "3")])

    found = run("TABLE public.canonical").comparison
    assert found is not None
    assert found.counts == dict.fromkeys(set(DifferenceKind) - {DifferenceKind.DOUBLED}, 1)
    assert run("TABLE public.canonical", intent).repaired == 3
    assert read(connection, "id") == read(connection, "id", "public.canonical")


@pytest.mark.parametrize("side", ["canonical", "state"])
@pytest.mark.parametrize("key", [("NULL", "1"), ("1", "NULL"), ("NULL", "NULL")])
def test_a_key_with_null_identifies_no_row_on_either_side(
    run: Run, connection: Connection, key: tuple[str, str], side: str
) -> None:
    """A whole replacement removes such rows of a state."""
    for table in ("canonical", "state"):
        connection.execute(f"CREATE TABLE public.{table} AS SELECT 1 AS a, 1 AS b, 1 AS v".encode())
    for _ in range(2):
        connection.execute(f"INSERT INTO public.{side} VALUES ({', '.join(key)}, 2)".encode())
    names = ("a", "b")

    with pytest.raises(DeclarationError, match=r"the key \(a, b\) of 2 rows has a NULL"):
        run("TABLE public.canonical", key=names)
    if side == "canonical":
        with pytest.raises(DeclarationError, match=r"the key \(a, b\) of 2 rows has a NULL"):
            run("TABLE public.canonical", "replace", key=names)
        return
    run("TABLE public.canonical", "replace", key=names)
    assert connection.execute("TABLE public.state").fetchall() == [(1, 1, 1)]


@pytest.mark.parametrize("intent", ["repair", "replace"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_without_a_key_is_one_row(
    run: Run, flow: Pipeline, connection: Connection, database_url: str, kind: str, intent: Intent
) -> None:
    canonical, state = make_rows([], kind)
    for table, rows in (("public.canonical", canonical), ("public.state", state)):
        create(connection, table, [Column("v", "int", ())], [], rows)
    with compared(flow, database_url, key=()) as compare:
        whole, again = compare(None), compare(["{}"])

    assert without_rows(whole) == without_rows(again)
    assert whole.counts == ({} if kind == "equal" else {kind: 1})
    run("TABLE public.canonical", intent, key=())
    assert connection.execute("TABLE public.state").fetchall() == [(1,) for _ in canonical]
