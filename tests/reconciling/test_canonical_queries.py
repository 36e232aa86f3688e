"""A canonical query reaches Postgres as it was written."""

import pytest
from sqlalchemy import bindparam, literal, select

from fixtures.selects import OPTIONS, SELECTS, Case, compare, create_items
from penstock import Log, Pipeline
from penstock.database.connections import Connection
from penstock.database.driver_errors import postgres_errors
from penstock.database.query_text import Query, query_text
from penstock.errors import InvalidSetting, ObjectMissing, Unknown
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

    text = "/* here */ TABLE public.items; /* all /* of */ them */ -- all"
    for relation in (tables("public.items", **options), tables.query(text, **options)):
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
        ("SELECT 1; /* all */ SELECT 2", "one statement"),
        (select(bindparam("x")), "'x'"),
        (select(literal(object())), "cannot be written"),
    ],
)
def test_what_is_no_single_query_is_refused(query: Query, said: str) -> None:
    with pytest.raises(InvalidSetting, match=said):
        query_text(query)


MISSING = {
    "table": "SELECT 1 AS id, v FROM public.absent",
    "column": "SELECT 1 AS id, absent AS v FROM public.items",
    "schema": "SELECT 1 AS id, v FROM absent.items",
    "function": "SELECT 1 AS id, absent(1) AS v",
    "function of a schema": "SELECT 1 AS id, absent.f(1) AS v",
    "operator": "SELECT 1 AS id, 1 - 'a'::text AS v",
    "type": "SELECT 1 AS id, 'a'::absent AS v",
    "collation": "SELECT 1 AS id, 'a' COLLATE absent AS v",
    "text search": "SELECT 1 AS id, to_tsvector('absent', 'a')::text AS v",
    "window": "SELECT 1 AS id, count(*) OVER absent AS v",
    "sequence": "SELECT 1 AS id, lastval()::text AS v",
}


@pytest.mark.parametrize("query", MISSING.values(), ids=MISSING.keys())
def test_what_a_canonical_query_lacks_is_the_querys_own(
    flow: Pipeline, things: Log, connection: Connection, database_url: str, query: str
) -> None:
    """Guarantee 48: no table of Penstock's is missing."""
    create_items(connection)

    with pytest.raises(Unknown) as refused:
        compare(InlineComparer(database_url), flow, things, connection, Case(query, "text", ()))
    assert "penstock init" not in str(refused.value)


@pytest.mark.parametrize("name", ["ticks", "absent"])
def test_what_a_statement_of_penstock_lacks_is_made_by_init(connection: Connection, name: str) -> None:
    with pytest.raises(ObjectMissing, match="penstock init"), postgres_errors("reading"):
        connection.execute(f"SELECT absent FROM penstock.{name}".encode())
