"""Lists that a handler binds reach Postgres as they are."""

import asyncio
from collections.abc import Iterator

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.abc import Dumper
from psycopg.adapt import PyFormat
from psycopg.types.array import ListDumper
from psycopg.types.json import JsonbBinaryDumper
from psycopg.types.string import StrDumper
from sqlalchemy import Engine
from sqlalchemy.exc import DataError

from penstock.database.connections import make_async_engine, make_engine

NUMBERS = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])) | st.sampled_from(
    ["", "NULL", "null", "{}", ",", '"', "\\", ' "a\\" ', '\\",\\"', "\n", '{"note": "a, \\"b\\""}']
)

READ = "SELECT %s::numeric[]::bigint[], %s::text[]"


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = make_engine(database_url, application="test")
    yield engine
    engine.dispose()


@given(numbers=st.lists(NUMBERS) | st.lists(NUMBERS | st.none()), texts=st.lists(TEXTS) | st.lists(TEXTS | st.none()))
def test_a_list_arrives_as_it_was(engine: Engine, numbers: list[int | None], texts: list[str | None]) -> None:
    with engine.connect() as connection:
        [(read_numbers, read_texts)] = connection.exec_driver_sql(READ, (numbers, texts)).fetchall()

    assert (read_numbers, read_texts) == (numbers, texts)


def test_so_does_one_of_a_handler_that_is_async_and_a_nested_one(database_url: str) -> None:
    lists = [[1, 2], [3, -4]], ["a,b", '"', "\\"]

    async def read() -> list[object]:
        engine = make_async_engine(database_url, application="test")
        async with engine.connect() as connection:
            rows = (await connection.exec_driver_sql(READ, lists)).fetchall()
        await engine.dispose()
        return [*rows]

    assert asyncio.run(read()) == [lists]


def test_a_text_with_a_nul_is_refused_and_not_divided(engine: Engine) -> None:
    with engine.connect() as connection, pytest.raises(DataError):
        connection.exec_driver_sql("SELECT %s::text[]", (["a\0b", "c"],))


class _Sum(ListDumper):
    def dump(self, obj: list[object]) -> bytes:
        return b"{%d}" % sum(map(int, map(str, obj)))


class _Upper(StrDumper):
    def dump(self, obj: str) -> bytes:
        return obj.upper().encode()


@pytest.mark.parametrize(
    ("kind", "dumper", "query", "bound", "found"),
    [
        (list, _Sum, "SELECT %s::int[]", [1, 2], [3]),
        (list, JsonbBinaryDumper, "SELECT pg_typeof(%s)::text", [1, 2], "jsonb"),
        (str, _Upper, "SELECT %s::text[]", ["a", "b"], ["A", "B"]),
    ],
)
def test_an_application_may_have_its_own_way_for_a_list_or_for_its_members(
    database_url: str, kind: type, dumper: type[Dumper], query: str, bound: list[object], found: object
) -> None:
    usual = psycopg.adapters.get_dumper(kind, PyFormat.AUTO)
    psycopg.adapters.register_dumper(kind, dumper)
    try:
        engine = make_engine(database_url, application="test")
        with engine.connect() as connection:
            assert connection.exec_driver_sql(query, (bound,)).scalar() == found
        engine.dispose()
    finally:
        psycopg.adapters.register_dumper(kind, usual)
