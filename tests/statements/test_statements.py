"""Every statement is prepared against the migrated schema; every script is loaded, and its header is checked."""

import re
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.channels.scripts import script
from penstock.database.connections import Connection
from penstock.database.statements import statements
from penstock.records import DEFAULT_SCOPE
from penstock.streaming.sequencer import _LIMITS

SOURCE = Path(__file__).parents[2] / "src" / "penstock"
LUA = Path(__file__).parents[2] / "lua"
PACKAGES = sorted(
    ".".join(("penstock", *path.parent.relative_to(SOURCE).parts))
    for path in SOURCE.rglob("statements.sql")
)
NAMED = [
    (package, name) for package in PACKAGES for name in statements(package, DEFAULT_SCOPE.schema)
]
UTILITY = re.compile(r"^(--.*\n)*(LOCK|SET|CREATE)\b")  # Postgres cannot prepare utility statements
PREPARABLE = [
    (p, name)
    for p, name in NAMED
    if not UTILITY.match(statements(p, DEFAULT_SCOPE.schema)[name].decode())
]
_PARAMETERS = re.compile(r"%\((\w+)\)s")
UNHANDLED = re.compile(r"pcall.*\n(?!.*\.err\b)")
"""A ``redis.pcall`` of which the next line does not handle the error."""

FILES = sorted(str(path.relative_to(LUA).with_suffix("")) for path in LUA.rglob("*.lua"))
SCRIPTS = [name for name in FILES if "_" not in name.rpartition("/")[2][:1]]
FRAGMENTS = [name for name in FILES if name not in SCRIPTS]


@pytest.mark.parametrize(("package", "name"), PREPARABLE)
def test_a_statement_fits_the_schema(connection: Connection, package: str, name: str) -> None:
    sql = statements(package, DEFAULT_SCOPE.schema)[name].decode()
    order: list[str] = []

    def numbered(match: re.Match[str]) -> str:
        if match[1] not in order:
            order.append(match[1])
        return f"${order.index(match[1]) + 1}"

    prepared = re.sub(r"%\((\w+)\)s", numbered, sql).replace("%%", "%")
    with connection.transaction():
        connection.execute("SET search_path = ''")
        for other in statements(package, DEFAULT_SCOPE.schema).values():
            if b"CREATE TEMPORARY TABLE" in other and "pg_temp." in sql:
                connection.execute(other)
        connection.execute(f"PREPARE checked AS {prepared}".encode())


@pytest.mark.parametrize(("package", "name"), NAMED)
def test_a_statement_is_used(package: str, name: str) -> None:
    python = "\n".join(path.read_text() for path in SOURCE.rglob("*.py"))
    assert f'"{name}"' in python


@pytest.mark.parametrize(("package", "name"), NAMED)
def test_two_parameters_are_added_as_wide_numbers(package: str, name: str) -> None:
    """The driver sends 30000 and 5000 as numbers of two bytes each, and so would their sum be."""
    sql = statements(package, DEFAULT_SCOPE.schema)[name].decode()

    assert not re.search(r"%\(\w+\)s *[-+*] *%\(\w+\)s", sql)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_compiles_and_declares_every_key_it_uses(
    redis_client: redis.Redis, name: str
) -> None:
    loaded = redis_client.script_load(script(name).text)
    body = (LUA / f"{name}.lua").read_text()

    assert loaded == script(name).sha
    assert "-- returns: " in body
    assert not re.search(r"(KEYS|ARGV)\[\d", body)
    assert not UNHANDLED.search(body)
    assert len(body.splitlines()) <= 120


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_error_in_a_script_names_the_line_in_its_file(
    redis_client: redis.Redis, name: str
) -> None:
    text = (LUA / f"{name}.lua").read_text()

    assert script(name).text.splitlines()[1:] == text.splitlines()[1:]


@pytest.mark.parametrize("name", FRAGMENTS)
def test_a_fragment_begins_a_script(name: str) -> None:
    texts = [(LUA / f"{other}.lua").read_text() for other in SCRIPTS]
    body = (LUA / f"{name}.lua").read_text()

    assert any(re.search(rf"^-- includes: .*\b{name}\b", text, re.MULTILINE) for text in texts)
    assert not re.search(r"\S.*--", body)  # comments are on lines of their own
    assert not re.search(r"(KEYS|ARGV)\[\d", body)
    assert not UNHANDLED.search(body)
    assert len(body.splitlines()) <= 120


JOURNAL_BOUNDS = [
    (p, n)
    for p, n in PREPARABLE
    if "journal_bounds" in statements(p, DEFAULT_SCOPE.schema)[n].decode()
]


@pytest.mark.parametrize(("package", "name"), JOURNAL_BOUNDS)
def test_the_extent_of_the_journal_is_an_index_probe(
    connection: Connection, package: str, name: str
) -> None:
    """Postgres inlines the function: the plan names the index, and neither a function nor a sequential scan."""
    connection.execute(
        "INSERT INTO penstock.journal (channel, shard, first_offset, last_offset, record_ids, epoch) "
        "SELECT 'c', i % 4, i, i, ARRAY[i::bigint], 1 FROM generate_series(1, 20000) i"
    )
    connection.execute("ANALYZE penstock.journal")
    sql = statements(package, DEFAULT_SCOPE.schema)[name].decode()
    integers = {"shard", "tail", "records", "bytes", "shards", "most", "count"}
    values: dict[str, Any] = {
        key: 1 if key in integers else "c" for key in _PARAMETERS.findall(sql)
    }
    values |= {"latest": True} if "latest" in values else {}
    values |= _LIMITS if name == "sequence_committed" else {}
    values |= {"channels": ["c"]} if "channels" in values else {}
    values |= {name: [1] for name in ("firsts", "offsets") if name in values}
    values |= {"at": None, "ago": "1s", "margin": "1s"} if "margin" in values else {}
    if re.search(r"%\(shards\)s::int\w*\[\]", sql):
        values["shards"] = [1]
    with connection.transaction():
        if name == "sequence_committed":
            connection.execute(statements(package, DEFAULT_SCOPE.schema)["prepare_tick"])
        plan = "\n".join(
            line for (line,) in connection.execute(f"EXPLAIN {sql}".encode(), values or None)
        )

    assert "using journal_pkey on journal" in plan
    assert "Seq Scan on journal" not in plan
    assert "Function Scan on journal_bounds" not in plan


@pytest.mark.parametrize("name", ["newest_tick", "sequence_committed"])
def test_statements_of_every_round_scan_no_table(connection: Connection, name: str) -> None:
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "SELECT 'c', 0, 'k', 'a', 'o', '{}' FROM generate_series(1, 20000)"
    )
    connection.execute("ANALYZE penstock.staged_records")
    sql = statements("penstock.streaming", DEFAULT_SCOPE.schema)
    with connection.transaction():
        if name == "sequence_committed":
            connection.execute(sql["prepare_tick"])
        plan = connection.execute(b"EXPLAIN " + sql[name], _LIMITS).fetchall()

    assert not [line for (line,) in plan if "Seq Scan on staged_records" in line]


def test_batches_are_looked_up_by_id_by_a_plan_made_while_the_table_was_small(
    connection: Connection,
) -> None:
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "SELECT 'c', 0, 'k', 'a', 'o', '{}' FROM generate_series(1, 20)"
    )
    connection.execute("ANALYZE penstock.staged_records")
    sql = statements("penstock.streaming", DEFAULT_SCOPE.schema)
    with connection.transaction():
        connection.execute(sql["prepare_reading"])
        plan = connection.execute(
            b"EXPLAIN " + sql["unpublished"],
            {"channel": "c", "shard": 0, "tail": 0, "records": 500, "bytes": 1},
        ).fetchall()

    assert not [line for (line,) in plan if "Seq Scan on staged_records" in line]
    assert [line for (line,) in plan if "Full Join" in line]
