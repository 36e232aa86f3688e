"""Every lock in Postgres: what it locks, that nothing else is locked, and that another session's lock is waited for, or skipped."""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest

from fixtures.locking import HoldingSession, holding
from penstock.database.connections import Connection
from penstock.database.statements import statements
from penstock.records import DEFAULT_SCOPE
from statements.test_statements import SOURCE

LOCKING = re.compile(r"\bFOR (NO KEY )?(UPDATE|(KEY )?SHARE)\b|\bLOCK TABLE\b|\bpg_(try_)?advisory|with_for_update")

LOCKS_IN_PYTHON = {
    "demo/api.py:_ride",
    "reconciling/state_table.py:StateTable._move",
    "reconciling/state_table.py:StateTable.find_surplus",
    "spark/sources/exactly_once.py:claim",
    "staging/stored_rows.py:_make_statement",
}
"""Where a statement is made that locks: ``test_uses_of_locks`` tries each."""

WORLD = """
INSERT INTO penstock.channels (channel, kind, shards, keep)
SELECT channel, kind, 3, '1h' FROM (VALUES ('logged', 'log'), ('other', 'log'), ('jobs', 'queue'), ('more', 'queue')) c (channel, kind);

INSERT INTO penstock.checkpoints (consumer, channel, shard, "offset", epoch, dead_in_a_row, applied_at_dead, halted)
SELECT consumer, channel, shard, 1, 1, (shard IN (1, 3))::int, 0, CASE shard WHEN 3 THEN 'why' END
FROM unnest(ARRAY['c', 'd']) consumer, unnest(ARRAY['logged', 'other']) channel, generate_series(3, 0, -1) shard
ORDER BY consumer DESC, channel DESC, shard DESC;

INSERT INTO penstock.dead_letters
    (consumer, channel, shard, "offset", record_id, key, action, object, data, staged_at, reason, attempts, later_offset,
     retry_requested_at)
SELECT consumer, channel, shard, number, number, 'k', 'a', 'o', '{}', now(), 'why', 1, 0, CASE WHEN number < 3 THEN now() END
FROM unnest(ARRAY['c', 'd']) consumer, unnest(ARRAY['logged', 'other']) channel, generate_series(0, 1) shard, generate_series(1, 3) number;

INSERT INTO penstock.reconciliations (name, consumer, intent, engine, remaining)
SELECT name, 'c', 'repair', 'inline', remaining
FROM unnest(ARRAY['m', 'n']) name, unnest(ARRAY[1, 2, 3]) number,
     LATERAL (SELECT CASE number WHEN 3 THEN NULL ELSE ARRAY['1'] END AS remaining) r
ORDER BY number, name;

INSERT INTO penstock.job_groups (name, channel, members, waits_for, ended_at)
SELECT 'g' || number, 'jobs', '{}', 0, CASE number WHEN 3 THEN now() END FROM generate_series(1, 4) number;

INSERT INTO penstock.schedules (name, channel, every, timezone, next_at)
SELECT name, 'jobs', '1h', 'UTC', now() - interval '1s' FROM unnest(ARRAY['s', 't']) name;

INSERT INTO penstock.staged_records (id, channel, shard, key, action, object, data) OVERRIDING SYSTEM VALUE
SELECT id, CASE WHEN id < 5 THEN 'jobs' ELSE 'more' END, 0, 'k', 'a', 'o', '{}' FROM generate_series(6, 1, -1) id;
"""
"""Of each table rows that a statement locks, and others that differ in one value."""

OF_C, IN_LOGGED = "consumer = 'c'", "consumer = 'c' AND channel = 'logged'"
CONSUMER = {"consumer": "c", "channel": "logged"}


@dataclass(frozen=True)
class RowLock:
    """A statement that locks rows."""

    table: str
    own: str  # the condition of the rows that it locks
    values: Mapping[str, Any] = field(default_factory=dict)
    skips: bool = False  # rows that others have locked; otherwise it waits for each
    order: str = ""  # of the locks
    call: str = ""  # of a function


ROW_LOCKS = {
    "take_checkpoints": RowLock(
        "checkpoints", f"{IN_LOGGED} AND shard IN (0, 1)", CONSUMER | {"shards": "{0,1}"}, skips=True
    ),
    "halt_failing": RowLock(
        "checkpoints", f"{IN_LOGGED} AND shard = 1", CONSUMER | {"shard": 0, "reason": "why"}, skips=True
    ),
    "lock_dead_letter": RowLock(
        "dead_letters", f'{IN_LOGGED} AND shard = 1 AND "offset" = 2', CONSUMER | {"shard": 1, "offset": 2}
    ),
    "take_requested_retries": RowLock(
        "dead_letters", f'{IN_LOGGED} AND "offset" < 3', CONSUMER | {"of_any": False}, skips=True
    ),
    "lock_channel": RowLock("channels", "channel = 'logged'", {"channel": "logged"}),
    "lock_checkpoints": RowLock("checkpoints", OF_C, {"consumer": "c"}, order='channel COLLATE "C", shard'),
    "lock_shard": RowLock("checkpoints", f"{IN_LOGGED} AND shard = 1", CONSUMER | {"shard": 1}),
    "lock_progress": RowLock("checkpoints", f"{IN_LOGGED} AND shard = 1", CONSUMER | {"shard": 1}),
    "lock_positions": RowLock("checkpoints", IN_LOGGED, CONSUMER, order="shard"),
    "take_over_remaining": RowLock("reconciliations", "id = 4", {"name": "n", "run": 6}),
    "end_groups": RowLock("job_groups", "name IN ('g1', 'g2')", {"names": ["g1", "g2", "g3"]}, skips=True),
    "take_schedule": RowLock(
        "schedules",
        "name = 's'",
        {"name": "s", "channel": "jobs", "every": "1h", "timezone": "UTC", "digest": ""},
        skips=True,
    ),
    "finish_records": RowLock(
        "staged_records",
        "id IN (1, 2, 3)",
        order="id",
        call="SELECT penstock.finish_records('jobs', ARRAY[3, 1, 2, 5])",
    ),
    "cancel_jobs": RowLock(
        "staged_records",
        "id IN (1, 2)",
        skips=True,
        call="SELECT penstock.cancel_jobs('jobs', ARRAY[2, 1, 5], NULL, NULL)",
    ),
    "move_jobs": RowLock(
        "staged_records", "id IN (1, 2)", skips=True, call="SELECT penstock.move_jobs('jobs', ARRAY[2, 1, 5], now())"
    ),
}

TABLE_LOCKS = {
    "lock_registry": ["channels"],
    "lock_ticks": ["ticks", "journal"],
    "lock_pipeline": ["ticks", "journal", "staged_records", "checkpoints"],
    "hold_sequencers": ["ticks"],
}
"""In the order in which they are locked."""

ADVISORY_LOCKS = {"lock_migrations": "waits", "lock_troubles": "refuses"}


def find_named(name: str, schema: str = DEFAULT_SCOPE.schema) -> bytes:
    return statements(schema)[name]


def find_functions(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """The functions of a module by their qualified names, with what stands outside of any; none is part of another."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{prefix}{child.name}", child
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")

    yield from walk(ast.parse(path.read_text()), "")


def locks_in(function: ast.AST) -> bool:
    docstrings = {id(node.value) for node in ast.walk(function) if isinstance(node, ast.Expr)}
    return any(
        (isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings and LOCKING.search(node.value))
        or (isinstance(node, ast.Attribute) and LOCKING.search(node.attr))
        or (isinstance(node, ast.keyword) and LOCKING.search(node.arg or ""))
        for node in ast.walk(function)
    )  # fmt: skip


def test_every_lock_is_listed(connection: Connection) -> None:
    """In the statements, in the functions of the database, and in statements that Python makes."""
    named = {name for name, text in statements(DEFAULT_SCOPE.schema).items() if LOCKING.search(text.decode())}
    bodies = connection.execute(
        "SELECT proname, coalesce(pg_get_function_sqlbody(oid), prosrc) FROM pg_proc WHERE pronamespace = 'penstock'::regnamespace"
    ).fetchall()
    made = {
        f"{path.relative_to(SOURCE).as_posix()}:{name}"
        for path in SOURCE.rglob("*.py")
        if LOCKING.search(path.read_text())
        for name, function in find_functions(path)
        if locks_in(function)
    }

    assert named | {name for name, body in bodies if LOCKING.search(body)} == {
        *ROW_LOCKS,
        *TABLE_LOCKS,
        *ADVISORY_LOCKS,
    }
    assert made == LOCKS_IN_PYTHON


def read_rows(connection: Connection, table: str, rest: str) -> set[str]:
    return {row for (row,) in connection.execute(f"SELECT ctid::text FROM penstock.{table} {rest}".encode())}


def read_locked(connection: Connection, table: str) -> set[str]:
    """The rows that another session has locked as for an update of their key, or for their deletion."""
    return read_rows(connection, table, "") - read_rows(connection, table, "FOR KEY SHARE SKIP LOCKED")


def run(session: psycopg.Connection[Any], name: str) -> None:
    lock = ROW_LOCKS[name]
    session.execute(lock.call.encode() or find_named(name), lock.values or None)


@pytest.fixture
def locking(database_url: str, connection: Connection) -> Iterator[psycopg.Connection[Any]]:
    """A session that waits for nothing for long."""
    connection.execute(WORLD)
    with psycopg.connect(database_url, options="-c lock_timeout=10ms") as session:
        yield session


@pytest.fixture
def holder(database_url: str) -> Iterator[HoldingSession]:
    with holding(database_url) as made:
        yield made


@pytest.mark.parametrize("name", ROW_LOCKS)
def test_a_statement_locks_its_rows_alone_and_waits_for_each_or_skips_it(
    name: str, connection: Connection, locking: psycopg.Connection[Any], holder: HoldingSession
) -> None:
    """``FOR KEY SHARE`` holds up nothing weaker than ``FOR UPDATE``: what writes a row later does not stand in for its lock."""
    lock = ROW_LOCKS[name]
    own = read_rows(connection, lock.table, f"WHERE {lock.own}")
    run(locking, name)
    assert read_locked(connection, lock.table) == own
    locking.rollback()

    for row in own:
        holder.session.execute(f"SELECT FROM penstock.{lock.table} WHERE ctid = '{row}' FOR KEY SHARE".encode())
        if lock.skips:
            run(locking, name)
            assert read_locked(connection, lock.table) == own - {row}
        else:
            with pytest.raises(psycopg.errors.LockNotAvailable):
                run(locking, name)
        locking.rollback()
        holder.session.rollback()
    assert own


@pytest.mark.parametrize("name", [name for name, lock in ROW_LOCKS.items() if lock.order])
def test_rows_are_locked_in_one_order(
    name: str, connection: Connection, locking: psycopg.Connection[Any], holder: HoldingSession
) -> None:
    """Two that lock the same rows wait for each other, and do not end in a deadlock.  No index has the rows in this order by chance."""
    lock = ROW_LOCKS[name]
    ordered = connection.execute(
        f"SELECT ctid::text FROM penstock.{lock.table} WHERE {lock.own} ORDER BY {lock.order}".encode()
    ).fetchall()
    middle = len(ordered) // 2
    holder.session.execute("SELECT FROM penstock.%s WHERE ctid = '%s' FOR KEY SHARE" % (lock.table, *ordered[middle]))  # noqa: UP031
    locking.execute("SET lock_timeout = 0; SET enable_indexscan = off; SET enable_bitmapscan = off")
    locking.commit()

    seen: list[set[str]] = []
    holder.hold_up(lambda: run(locking, name), lambda *_: seen.append(read_locked(connection, lock.table)))

    assert seen == [{row for (row,) in ordered[:middle]}]


@pytest.mark.parametrize("name", TABLE_LOCKS)
def test_a_statement_locks_its_tables_in_one_order_against_all_who_write(
    name: str, connection: Connection, locking: psycopg.Connection[Any], holder: HoldingSession
) -> None:
    held = "SELECT relation::regclass::text, mode FROM pg_locks WHERE granted AND pid = %s AND locktype = 'relation'"
    locking.execute("SET lock_timeout = 0")
    locking.commit()
    tables = [f"penstock.{table}" for table in TABLE_LOCKS[name]]

    def read_held(pid: int) -> dict[str, str]:
        return dict(connection.execute(held, [pid]).fetchall())

    def lock() -> None:
        locking.execute(find_named(name))

    before: list[set[str]] = []
    for table in tables:
        holder.session.execute(f"LOCK TABLE {table} IN ROW EXCLUSIVE MODE".encode())
        holder.hold_up(lock, lambda pid, _: before.append({*read_held(pid)}))
        found = read_held(locking.info.backend_pid)
        locking.rollback()
        assert found == dict.fromkeys(tables, "ShareRowExclusiveLock")

    assert before == [set(tables[:number]) for number in range(len(tables))]


@pytest.mark.parametrize("name", ADVISORY_LOCKS)
def test_one_session_at_a_time_has_an_advisory_lock(
    name: str, locking: psycopg.Connection[Any], holder: HoldingSession
) -> None:
    holder.session.execute(find_named(name))
    if ADVISORY_LOCKS[name] == "waits":
        with pytest.raises(psycopg.errors.LockNotAvailable):
            locking.execute(find_named(name))
        locking.rollback()
    else:
        assert locking.execute(find_named(name)).fetchall() == [(False,)]
    holder.session.rollback()
    assert locking.execute(find_named(name)).fetchall() != [(False,)]


def test_the_reports_of_two_pipelines_do_not_wait_for_each_other(
    locking: psycopg.Connection[Any], holder: HoldingSession
) -> None:
    name = "lock_troubles"
    holder.session.execute(find_named(name))

    assert locking.execute(find_named(name, "shop")).fetchall() == [(True,)]
