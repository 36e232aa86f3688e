"""Every statement is prepared against the migrated schema; every script is loaded, and its header is checked."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis

from penstock.channels.routing import queue_keys
from penstock.channels.scripts import _without_unused, script, with_fragments
from penstock.database.connections import Connection
from penstock.database.statements import statements
from penstock.records import DEFAULT_SCOPE, Shard, ShardName
from penstock.streaming.sequencer import _LIMITS

SOURCE = Path(__file__).parents[2] / "src" / "penstock"
LUA = Path(__file__).parents[2] / "lua"
NAMED = [*statements(DEFAULT_SCOPE.schema)]
UTILITY = re.compile(r"^(--.*\n)*(LOCK|SET|CREATE)\b")  # Postgres cannot prepare utility statements
PREPARABLE = [name for name in NAMED if not UTILITY.match(statements(DEFAULT_SCOPE.schema)[name].decode())]
_PARAMETERS = re.compile(r"%\((\w+)\)s")
UNHANDLED = re.compile(r"pcall.*\n(?!.*\.err\b)")
"""A ``redis.pcall`` of which the next line does not handle the error."""

FILES = sorted(str(path.relative_to(LUA).with_suffix("")) for path in LUA.rglob("*.lua"))
SCRIPTS = [name for name in FILES if "_" not in name.rpartition("/")[2][:1]]
FRAGMENTS = [name for name in FILES if name not in SCRIPTS]


def statement(name: str) -> str:
    return statements(DEFAULT_SCOPE.schema)[name].decode()


def numbered(sql: str) -> str:
    """With parameters as PREPARE takes them."""
    order = [*dict.fromkeys(_PARAMETERS.findall(sql))]
    return _PARAMETERS.sub(lambda match: f"${order.index(match[1]) + 1}", sql).replace("%%", "%")


def test_every_statement_fits_the_schema(connection: Connection) -> None:
    refused = {}
    for name in PREPARABLE:
        sql = statement(name)
        try:
            with connection.transaction(force_rollback=True):
                connection.execute("SET LOCAL search_path = ''")
                for other in statements(DEFAULT_SCOPE.schema).values():
                    made = re.search(r"CREATE TEMPORARY TABLE (\w+)", other.decode())
                    if made and f"pg_temp.{made[1]}" in sql:
                        connection.execute(other)
                connection.execute(f"PREPARE checked AS {numbered(sql)}".encode())
                connection.execute("DEALLOCATE checked")
        except psycopg.Error as error:
            refused[name] = str(error)

    assert refused == {}


def used_in(path: Path) -> Iterator[str]:
    """The statements that a module may use, in calls and subscripts: a word may stand for many other things elsewhere."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(args=places):
                pass
            case ast.Subscript(slice=place, ctx=ast.Load()):
                places = [place]
            case _:
                places = []
        for place in places:
            yield from map(constant, [place.body, place.orelse] if isinstance(place, ast.IfExp) else [place])


def constant(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_every_statement_is_used_and_has_a_name_of_its_own() -> None:
    used = {name for path in SOURCE.rglob("*.py") for name in used_in(path)}
    headings = [
        name
        for path in SOURCE.rglob("*.sql")
        for name in re.findall(r"^-- :name (\w+)$", path.read_text(), re.MULTILINE)
    ]

    assert [name for name in headings if headings.count(name) > 1] == []
    assert [name for name in headings if name not in used] == []


def test_two_parameters_are_added_as_wide_numbers() -> None:
    """The driver sends 30000 and 5000 as numbers of two bytes each, and so would their sum be."""
    added = re.compile(r"%\(\w+\)s *[-+*] *%\(\w+\)s")

    assert [name for name in NAMED if added.search(statement(name))] == []


def test_every_script_compiles_and_its_errors_name_lines_of_its_file(redis_client: redis.Redis) -> None:
    for name in SCRIPTS:
        assert redis_client.script_load(script(name).text) == script(name).sha
        body = (LUA / f"{name}.lua").read_text()
        assert script(name).text.splitlines()[1:] == body.splitlines()[1:], name


def test_every_script_declares_the_keys_that_it_uses_and_handles_errors() -> None:
    bodies = {name: (LUA / f"{name}.lua").read_text() for name in FILES}

    assert [name for name in SCRIPTS if "-- returns: " not in bodies[name]] == []
    for pattern in (r"(KEYS|ARGV)\[\d", UNHANDLED):
        assert [name for name in FILES if re.search(pattern, bodies[name])] == [], pattern
    assert [name for name in FILES if len(bodies[name].splitlines()) > 120] == []


def test_every_fragment_begins_a_script() -> None:
    needed = {fragment for name in SCRIPTS for fragment in with_fragments(name)}
    for name in FRAGMENTS:
        body = (LUA / f"{name}.lua").read_text()
        assert name in needed or not without_comments(body).strip(), name
        assert not re.search(r"\S.*--", re.sub(r"^--.*", "", body, flags=re.MULTILINE)), (
            name
        )  # comments are on lines of their own


def without_comments(text: str) -> str:
    return re.sub(r"^ *--.*", "", text, flags=re.MULTILINE)


def test_a_file_includes_nothing_that_comes_with_another_fragment() -> None:
    for name in FILES:
        body = (LUA / f"{name}.lua").read_text()
        included = [
            fragment for line in re.findall(r"^-- includes: (.+)$", body, re.MULTILINE) for fragment in line.split(", ")
        ]
        for fragment in included:
            others = {each for other in included if other != fragment for each in with_fragments(other)}
            assert fragment not in others, name


def test_a_script_has_just_those_functions_of_its_fragments_that_it_names() -> None:
    """Lua makes all of them anew at each call.  A local function that is missing would be an error of that call."""
    for name in SCRIPTS:
        *fragments, _ = with_fragments(name).values()
        offered = {each for text in fragments for each in re.findall(r"^local function (\w+)", text, re.MULTILINE)}
        words = re.findall(r"\w+", without_comments(script(name).text))
        defined = re.findall(r"local function (\w+)", script(name).text)

        assert offered.intersection(words) == offered.intersection(defined), name
        assert [each for each in offered.intersection(words) if words.count(each) < 2] == [], name


_NO_FUNCTIONS = {"and", "or", "not", "if", "elseif", "while", "until", "return", "function", "in"}
_BUILT_IN = {"error", "ipairs", "pairs", "select", "tonumber", "tostring", "type", "unpack"}


def test_a_script_has_the_functions_constants_and_keys_that_it_names() -> None:
    keys = re.findall(
        r"\w+", "".join(with_fragments("queue/_keys").values()).partition("-- keys: ")[2].partition("\n")[0]
    )
    for name in SCRIPTS:
        code = re.sub(r'"(?:\\.|[^"\\])*"', '""', without_comments(script(name).text))
        called = {*re.findall(r"(?<![.:\w])(\w+)\(", code)} - _NO_FUNCTIONS - _BUILT_IN
        constants = {*re.findall(r"(?<![.\w])([A-Z][A-Z_]+)\b", code)} - {"KEYS", "ARGV"}
        used = {key for key in keys if re.search(rf"redis\.call\([^)]*\b{key}\b", code)}
        names = re.findall(r"\blocal (?!function )((?:\w+, )*\w+)|\bfunction ?([\w.]*)\(([\w, .]*)\)", code)
        defined = {word for parts in names for part in parts for word in part.split(", ")}

        assert (called | constants | used) - defined == set(), name


def test_the_keys_of_a_queue_are_listed_as_they_are_given() -> None:
    names = [
        key.partition("}:")[2].removeprefix("q-") for key in queue_keys("penstock", ShardName("jobs", Shard(0))).all(1)
    ]

    assert script("queue/stats").text.startswith(
        "".join(f"local {each} = KEYS[{i}]; " for i, each in enumerate(names[:-1], 1))
    )


def test_a_function_on_one_line_takes_nothing_of_what_follows_with_it() -> None:
    fragment = "local function one() return 1 end\nlocal two = 2\nlocal function three()\n  return two\nend\n"

    assert "local two = 2" in _without_unused(fragment, "")


JOURNAL_BOUNDS = [name for name in PREPARABLE if "journal_bounds" in statement(name)]


def values_for(name: str, sql: str) -> dict[str, Any] | None:
    """Any values of the right types."""
    integers = {"shard", "tail", "records", "bytes", "shards", "limit", "max_records", "count"}
    values: dict[str, Any] = {key: 1 if key in integers else "c" for key in _PARAMETERS.findall(sql)}
    values |= {name: True for name in ("latest", "with_latency") if name in values}
    values |= _LIMITS if name == "sequence_committed" else {}
    values |= {"channels": ["c"]} if "channels" in values else {}
    values |= {name: [1] for name in ("firsts", "offsets") if name in values}
    values |= {"at": None, "ago": "1s", "margin": "1s"} if "margin" in values else {}
    if re.search(r"%\(shards\)s::int\w*\[\]", sql):
        values["shards"] = [1]
    return values or None


def test_the_extent_of_the_journal_is_an_index_probe(connection: Connection) -> None:
    """Postgres inlines the function: the plan names the index, and neither a function nor a sequential scan."""
    connection.execute(
        "INSERT INTO penstock.journal (channel, shard, first_offset, last_offset, record_ids, epoch) "
        "SELECT 'c', i % 4, i, i, ARRAY[i::bigint], 1 FROM generate_series(1, 20000) i"
    )
    connection.execute("ANALYZE penstock.journal")
    assert len(JOURNAL_BOUNDS) > 10
    for name in JOURNAL_BOUNDS:
        sql = statement(name)
        with connection.transaction(force_rollback=True):
            if name == "sequence_committed":
                connection.execute(statements(DEFAULT_SCOPE.schema)["prepare_tick"])
            rows = connection.execute(f"EXPLAIN {sql}".encode(), values_for(name, sql))
            plan = "\n".join(line for (line,) in rows)

        assert "using journal_pkey on journal" in plan, name
        assert "Seq Scan on journal" not in plan, name
        assert "Function Scan on journal_bounds" not in plan, name


@pytest.mark.parametrize("name", ["newest_tick", "sequence_committed"])
def test_statements_of_every_round_scan_no_table(connection: Connection, name: str) -> None:
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "SELECT 'c', 0, 'k', 'a', 'o', '{}' FROM generate_series(1, 20000)"
    )
    connection.execute("ANALYZE penstock.staged_records")
    sql = statements(DEFAULT_SCOPE.schema)
    with connection.transaction():
        if name == "sequence_committed":
            connection.execute(sql["prepare_tick"])
        plan = connection.execute(b"EXPLAIN " + sql[name], _LIMITS).fetchall()

    assert not [line for (line,) in plan if "Seq Scan on staged_records" in line]


@pytest.mark.parametrize("removed", [0, 100, 20000])
@pytest.mark.parametrize(
    ("name", "step"), [("unpublished", "Index Scan using staged_records_pkey"), ("unpublished_checked", "Full Join")]
)
def test_batches_are_looked_up_by_id_by_a_plan_made_while_the_table_was_small(
    connection: Connection, name: str, step: str, removed: int
) -> None:
    insert = (
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "SELECT 'c', 0, 'k', 'a', 'o', '{}' FROM generate_series(1, %s)"
    )
    connection.execute(insert, [removed])
    connection.execute("DELETE FROM penstock.staged_records")
    connection.execute(insert, [20])
    connection.execute("ANALYZE penstock.staged_records")
    sql = statements(DEFAULT_SCOPE.schema)
    with connection.transaction():
        connection.execute(sql["prepare_reading"])
        plan = connection.execute(
            b"EXPLAIN " + sql[name], {"channel": "c", "shard": 0, "tail": 0, "records": 500, "bytes": 1}
        ).fetchall()

    assert not [line for (line,) in plan if "Seq Scan on staged_records" in line]
    assert [line for (line,) in plan if step in line]
