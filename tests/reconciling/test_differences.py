"""What a reconciliation tells of its differences: which columns, in what order, and whole rows only where asked for."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fixtures.constants import SetConstants
from penstock import Pipeline
from penstock.database.connections import Connection, connect_postgres
from penstock.reconciling.comparison import StateComparison
from penstock.reconciling.inline_comparer import InlineComparer
from penstock.reconciling.reconciliation import Intent, Reconciled, reconcile
from penstock.records import DEFAULT_SCOPE

TABLES = """
CREATE TABLE public.canonical AS
SELECT i AS id, i * 1.5 AS number, 'c' || i AS code, i AS cents, 'name ' || i AS name, 0.5 * i AS share
FROM generate_series(1, 120) i;
CREATE TABLE public.state AS TABLE public.canonical;
UPDATE public.state SET cents = cents + 1 WHERE id IN (2, 9, 10, 100);
UPDATE public.state SET name = NULL WHERE id IN (9, 10);
UPDATE public.state SET share = share + 0.0001 WHERE id IN (11, 12);
DELETE FROM public.state WHERE id = 20;
INSERT INTO public.state SELECT 1000, 1500, 'c1000', 0, 'name', 0
"""

Run = Callable[..., StateComparison]


@pytest.fixture
def run(flow: Pipeline, keeper: str, connection: Connection, database_url: str) -> Run:
    """Compares ``public.state``, whose rows differ in several columns."""

    for statement in TABLES.split(";"):
        connection.execute(statement.encode())
    for key in ("id", "number", "code"):
        flow.reconciliation(of=keeper, state="public.state", key=key, name=key, tolerance={"share": 0.01})(
            lambda tables: tables("public.canonical")
        )

    def go(name: str = "id", intent: Intent = "compare", **options: Any) -> StateComparison:
        done: Reconciled = reconcile(
            lambda: connect_postgres(database_url, application="test"),
            DEFAULT_SCOPE,
            flow.get_reconciliation(name),
            InlineComparer(database_url, **options),
            intent=intent,
        )
        assert done.comparison is not None
        return done.comparison

    return go


def test_the_columns_that_differ_are_named_and_counted(run: Run) -> None:
    """Within its tolerance a column does not differ; a key of one side alone differs in no column."""
    found = run()

    assert found.by_column == {"cents": 4, "name": 2}
    assert [(json.loads(d.key)["id"], str(d.kind), d.columns) for d in found.differences] == [
        (2, "different", ("cents",)),
        (9, "different", ("cents", "name")),
        (10, "different", ("cents", "name")),
        (20, "missing", ()),
        (100, "different", ("cents",)),
        (1000, "surplus", ()),
    ]


def test_keys_are_in_the_order_of_their_type(run: Run) -> None:
    numbers = [float(json.loads(d.key)["number"]) for d in run("number").differences]
    codes = [json.loads(d.key)["code"] for d in run("code").differences]

    assert numbers == [3.0, 13.5, 15.0, 30.0, 150.0, 1500.0]
    assert codes == ["c10", "c100", "c1000", "c2", "c20", "c9"]


def test_whole_rows_are_given_only_where_asked_for(run: Run, tmp_path: Path) -> None:
    """Guarantee 33: rows may hold what nobody else should read."""
    report, with_rows = tmp_path / "keys.csv", tmp_path / "rows.csv"
    without, whole = run(report=str(report)), run(report=str(with_rows), with_rows=True)

    assert {(d.expected, d.found) for d in without.differences} == {(None, None)}
    assert json.loads(whole.differences[1].found or "")["name"] is None
    assert json.loads(whole.differences[1].expected or "")["name"] == "name 9"
    assert _read(report)[1] == {"key": '{"id":9}', "kind": "different", "columns": "cents, name"}
    [nine] = [row for row in _read(with_rows) if row["key"] == '{"id":9}']
    assert json.loads(nine["expected"])["name"] == "name 9"


@pytest.mark.parametrize(("intent", "kept"), [("compare", 4), ("repair", 6)])
@pytest.mark.parametrize("with_rows", [False, True])
def test_a_report_has_every_difference_however_few_are_kept(
    run: Run, tmp_path: Path, set_constants: SetConstants, intent: Intent, kept: int, *, with_rows: bool
) -> None:
    """A repair compares again in batches, and leaves the report as it is."""
    set_constants("reconciling.comparison", SAMPLES=2, DIFFERENCES_KEPT=kept)
    set_constants("reconciling.reconciliation", REPAIR_BATCH=2)
    report = tmp_path / "report.csv"
    found = run(intent=intent, report=str(report), with_rows=with_rows)

    assert [d.expected is not None for d in found.differences] == [with_rows] * 2 + [False] * (kept - 2)
    assert [json.loads(row["key"])["id"] for row in _read(report)] == [2, 9, 10, 20, 100, 1000]
    assert set(_read(report)[0]) - {"key", "kind", "columns"} == ({"expected", "found"} if with_rows else set())


def test_each_reconciliation_has_a_report_of_its_own(run: Run, tmp_path: Path) -> None:
    """The second one would overwrite the first one's."""
    report = tmp_path / "report.csv"
    for name in ("id", "code"):
        run(name, report=str(report))

    assert sorted(path.name for path in report.iterdir()) == ["code.csv", "id.csv"]
    assert [len(_read(report, name)) for name in ("code", "id")] == [6, 6]


def _read(report: Path, name: str = "id") -> list[dict[str, str]]:
    with (report / f"{name}.csv").open(newline="") as lines:
        return list(csv.DictReader(lines))
