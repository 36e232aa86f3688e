"""What an application registers with psycopg for all connections of its process changes no statement of Penstock's."""

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.adapt import AdaptersMap, Dumper, Loader
from psycopg.types.json import set_json_dumps, set_json_loads

from fixtures.all_kinds import STAGE, AllKinds, check_all_kinds
from penstock.database.connections import Connection
from penstock.streaming import Streamer

TYPES = """bool int2 int4 int8 oid xid8 numeric float8 timestamptz timestamp date interval
uuid bytea json jsonb inet int4[] int8[] text[] txid_snapshot int8range"""

reached: set[str] = set()
"""Types and classes whose values went through an adapter of the application's."""


class Foreign(Loader):
    """Reads everything as something else."""

    def load(self, data: Any) -> object:  # noqa: ARG002
        reached.add(psycopg.adapters.types[self.oid].name)
        return object()


class Unwilling(Dumper):
    """Writes nothing."""

    def dump(self, obj: Any) -> bytes:  # noqa: ARG002
        reached.add(self.cls.__name__)
        raise ValueError("not by us")


@pytest.fixture
def foreign_adapters(monkeypatch: pytest.MonkeyPatch) -> Iterator[AdaptersMap]:
    """The adapters of all connections, which a test may change."""
    adapters = AdaptersMap(psycopg.adapters)
    monkeypatch.setattr("psycopg.postgres.adapters", adapters)
    yield adapters
    set_json_loads(json.loads)
    set_json_dumps(json.dumps)


@pytest.fixture
def kinds(database_url: str, redis_url: str) -> AllKinds:
    made = AllKinds()
    with Streamer(made.flow, database_url, redis_url) as streamer:
        streamer.drain()
    return made


def check(connection: Connection, kinds: AllKinds, database_url: str, redis_url: str) -> None:
    reached.clear()
    connection.execute(STAGE.encode())
    try:
        check_all_kinds(connection, kinds, database_url, redis_url)
    finally:
        assert reached == set()


def test_other_loaders_reach_no_statement_of_ours(
    foreign_adapters: AdaptersMap, connection: Connection, kinds: AllKinds, database_url: str, redis_url: str
) -> None:
    for name in TYPES.split():
        info = psycopg.adapters.types.get(name.removesuffix("[]"))
        assert info is not None
        foreign_adapters.register_loader(info.array_oid if name.endswith("[]") else info.oid, Foreign)
    check(connection, kinds, database_url, redis_url)


def test_other_dumpers_reach_no_statement_of_ours(
    foreign_adapters: AdaptersMap, connection: Connection, kinds: AllKinds, database_url: str, redis_url: str
) -> None:
    for kind in (int, bool, float, bytes, list, tuple, dict, set):
        foreign_adapters.register_dumper(kind, Unwilling)
    check(connection, kinds, database_url, redis_url)


@pytest.mark.usefixtures("foreign_adapters")
def test_another_json_reaches_no_statement_of_ours(
    connection: Connection, kinds: AllKinds, database_url: str, redis_url: str
) -> None:
    set_json_loads(lambda _: object())
    set_json_dumps(lambda _: "no JSON")
    check(connection, kinds, database_url, redis_url)
