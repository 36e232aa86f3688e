"""A canonical query reaches Postgres as it was written."""

import pytest
from sqlalchemy import bindparam, literal, select

from fixtures.selects import OPTIONS, SELECTS, Case, compare, create_items
from penstock import Log, Pipeline
from penstock.database.connections import Connection
from penstock.database.query_text import Query, query_text
from penstock.errors import InvalidSetting
from penstock.reconciling.comparison import CanonicalTables
from penstock.reconciling.inline_comparer import InlineComparer


@pytest.mark.parametrize("case", SELECTS.values(), ids=SELECTS.keys())
def test_a_canonical_query_is_what_postgres_runs(
    flow: Pipeline, things: Log, connection: Connection, database_url: str, case: Case
) -> None:
    """A right state differs in nothing, and a repair has every row."""
    create_items(connection)

    equal, rows = compare(InlineComparer(database_url), flow, things, connection, case)

    assert equal
    assert sorted(rows) == list(range(1, len(case.values) + 1))


@pytest.mark.parametrize("options", OPTIONS)
def test_the_options_of_a_table_are_those_of_spark(connection: Connection, options: dict[str, str]) -> None:
    create_items(connection)
    tables = CanonicalTables()

    for relation in (tables("public.items", **options), tables.query("TABLE public.items; -- all", **options)):
        assert connection.execute(relation.text.encode()).fetchall() == [(1, 1)]
    with pytest.raises(InvalidSetting, match="or a JSON list of names"):
        tables("public.items", columns="[1]")


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("", "is empty"),
        (" ; -- nothing\n /* at all", "is empty"),
        ("SELECT 1; SELECT 2", "one statement"),
        ("; SELECT 1", "one statement"),
        (select(bindparam("x")), "'x'"),
        (select(literal(object())), "cannot be written"),
    ],
)
def test_what_is_no_single_query_is_refused(query: Query, said: str) -> None:
    with pytest.raises(InvalidSetting, match=said):
        query_text(query)
