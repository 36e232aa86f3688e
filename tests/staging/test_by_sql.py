"""Staging by the functions of the schema, as services in other languages do it."""

import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from fixtures.documents import DOCS, ROOT
from fixtures.roles import UrlFor
from penstock import Ick, Log, Pipeline, Queue, Unique, cancel, mark_dirty, stage
from penstock.consuming import WorkerSetup
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import Connection
from penstock.database.registry import register_channel
from penstock.database.store import Store
from penstock.streaming import Streamer

RIDES = Log("rides", shards=7)
RECEIPTS = Queue("receipts", shards=3)
SEARCH = Ick("search", shards=5)
PIPELINE = Pipeline([RIDES, RECEIPTS, SEARCH])
PAGE = DOCS / "how-to" / "stage-from-other-languages.md"


@pytest.fixture
def registered(connection: Connection) -> Connection:
    """A connection to a database in which the channels are registered."""
    for channel in (RIDES, RECEIPTS, SEARCH):
        register_channel(Store(connection), channel)
    return connection


@pytest.fixture
def producer(registered: Connection, database_url_for: UrlFor) -> Iterator[Connection]:
    """A connection of a login that is a producer, and nothing else."""
    with psycopg.connect(database_url_for("a_producer"), autocommit=True) as opened:
        yield opened


def staged_rows(connection: Connection) -> list[tuple[Any, ...]]:
    """The rows, without what Postgres sets; they are deleted."""
    return connection.execute(
        "WITH gone AS (DELETE FROM penstock.staged_records RETURNING *) "
        "SELECT channel, shard, key, action, object, data, headers FROM gone ORDER BY id"
    ).fetchall()


@pytest.mark.slow
def test_shards_are_those_of_python(registered: Connection) -> None:
    """Of characters of every plane, and of every length of UTF-8."""
    dice = random.Random(4)
    planes = [(1, 0xD7FF), (0xE000, 0xFFFF), *((plane << 16, (plane << 16) + 0xFFFF) for plane in range(1, 17))]
    keys = ["".join(chr(dice.randint(*dice.choice(planes))) for _ in range(dice.randint(1, 20))) for _ in range(10_000)]
    registered.execute(
        "SELECT penstock.stage('rides', key, 'insert', 'ride', 'null') FROM unnest(%s::text[]) AS key", (keys,)
    )

    shards = {key: shard for _, shard, key, *_ in staged_rows(registered)}
    assert shards == {key: RIDES.shard_for(key) for key in keys}


DUE, DEADLINE = datetime(2040, 1, 2, 3, 4, 5, 678_901, UTC), datetime(2041, 1, 1, tzinfo=UTC)

JOBS: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("delay => '90 s'", {"delay": 90}),
    ("delay => '1 day 0.0015 s'", {"delay": timedelta(days=1, microseconds=1500)}),
    ("delay => '0 s'", {"delay": 0}),
    (f"due => '{DUE.isoformat()}'", {"due": DUE}),
    (f"due => '{DUE.isoformat()}', delay => '0 s'", {"due": DUE, "delay": 0}),
    (f"deadline => '{DEADLINE.isoformat()}'", {"deadline": DEADLINE}),
    (f"due => '{DUE.isoformat()}', deadline => '{DEADLINE.isoformat()}'", {"due": DUE, "deadline": DEADLINE}),
    ("due => '1901-01-01'", {"due": datetime(1901, 1, 1, tzinfo=UTC)}),
    ("priority => 'high'", {"priority": "high"}),
    ("priority => 'normal'", {"priority": "normal"}),
    ("key => 'k'", {"key": "k"}),
    ("unique_name => 'n'", {"unique": Unique("n")}),
    ("unique_name => 'n', unique_until => 'queued'", {"unique": Unique("n", until="queued")}),
    ("unique_name => 'n', unique_window => '1 h'", {"unique": Unique("n", window="1h")}),
    ("unique_name => 'n', unique_window => '0 s'", {"unique": Unique("n", window=0)}),
    ("unique_name => 'n', unique_within => 'tenant'", {"unique": Unique("n", within="tenant")}),
    ("""headers => '{"a": [1]}'""", {"headers": {"a": [1]}}),
    ("""headers => '{"a": 1}', key => 'k'""", {"headers": {"a": 1}, "key": "k"}),
]


@pytest.mark.parametrize(("options", "same"), JOBS, ids=[options or "none" for options, _ in JOBS])
def test_a_job_is_that_of_python(options: str, same: dict[str, Any], registered: Connection) -> None:
    given = ", ".join(["'receipts', 't', '[1.50]', action => 'a', object => 'o'", *filter(None, [options])])
    [(number,)] = registered.execute(f"SELECT penstock.stage_job({given})".encode()).fetchall()
    assert registered.execute("SELECT id FROM penstock.staged_records").fetchall() == [(number,)]
    by_sql = staged_rows(registered)
    with registered.transaction():
        stage(registered, to=RECEIPTS, tenant="t", action="a", object="o", data=[1.5], pipeline=PIPELINE, **same)

    assert by_sql == staged_rows(registered)


def test_a_record_and_a_mark_are_those_of_python(registered: Connection) -> None:
    registered.execute("""SELECT penstock.stage('rides', 'k', 'insert', 'ride', '{"a": null}', '{"h": 1}')""")
    registered.execute("SELECT penstock.stage('rides', 'k', 'insert', 'ride', 'null')")
    registered.execute("SELECT penstock.mark_dirty('search', 'm')")
    by_sql = staged_rows(registered)
    with registered.transaction():
        values: dict[str, Any] = {"to": RIDES, "key": "k", "action": "insert", "object": "ride", "pipeline": PIPELINE}
        stage(registered, data={"a": None}, headers={"h": 1}, **values)
        stage(registered, data=None, **values)
        mark_dirty(registered, ["m"], to=SEARCH, pipeline=PIPELINE)

    assert by_sql == staged_rows(registered)


LOG, JOB = "stage('rides', 'k', 'a', 'o', '1'", "stage_job('receipts', 't', '1'"

WRONG = [
    ("stage(NULL, 'k', 'a', 'o', '1')", "channel is NULL", ""),
    ("stage('none', 'k', 'a', 'o', '1')", "channel none is not registered", "penstock stream"),
    ("stage('old', 'k', 'a', 'o', '1')", "channel old was retired", "penstock channels adopt old --apply"),
    ("stage('receipts', 'k', 'a', 'o', '1')", "channel receipts is registered as a queue", "stage_job("),
    ("stage('search', 'k', 'a', 'o', '1')", "channel search is registered as an ick", "mark_dirty("),
    ("stage('rides', NULL, 'a', 'o', '1')", "key is NULL", "1 to 1024 characters"),
    ("stage('rides', '', 'a', 'o', '1')", "key has 0 characters", "1 to 1024 characters"),
    ("stage('rides', repeat('k', 1025), 'a', 'o', '1')", "key has 1025 characters", "1 to 1024 characters"),
    ("stage('rides', 'k', NULL, 'o', '1')", "action is NULL", "1 to 255 characters"),
    ("stage('rides', 'k', '', 'o', '1')", "action has 0 characters", "1 to 255 characters"),
    ("stage('rides', 'k', repeat('a', 256), 'o', '1')", "action has 256 characters", "1 to 255 characters"),
    ("stage('rides', 'k', 'a', NULL, '1')", "object is NULL", "1 to 255 characters"),
    ("stage('rides', 'k', 'a', repeat('o', 256), '1')", "object has 256 characters", "1 to 255 characters"),
    ("stage('rides', 'k', 'a', 'o', NULL)", "data is NULL", "null"),
    ("stage('rides', 'k', 'a', 'o', to_jsonb(repeat('x', 1048575)))", "data has 1048577 bytes", "1048576"),
    (
        # as long as text as this, and half of it in jsonb
        "stage('rides', 'k', 'a', 'o', (SELECT jsonb_agg(repeat('9', 131072)::numeric) FROM generate_series(1, 9)))",
        "data has 1179666 bytes",
        "1048576",
    ),
    (
        "stage('rides', 'k', 'a', 'o', '[1e100000, 1e100000, 1e100000, 1e100000, 1e100000, 1e100000, 1e100000, 1e100000, 1e100000, 1e100000, 1e100000]')",
        "data has 1100",
        "1048576",
    ),
    (
        "stage('rides', 'k', 'a', 'o', (repeat('[', 101) || repeat(']', 101))::jsonb)",
        "data is nested deeper",
        "Flatten",
    ),
    (
        "stage('rides', 'k', 'a', 'o', (repeat('[', 100) || '{}' || repeat(']', 100))::jsonb)",
        "data is nested deeper",
        "Flatten",
    ),
    (
        "stage('rides', 'k', 'a', 'o', (repeat('{\"a\": ', 101) || '1' || repeat('}', 101))::jsonb)",
        "data is nested deeper",
        "Flatten",
    ),
    (
        "stage('rides', 'k', 'a', 'o', (repeat('[', 102) || repeat('1, ', 400) || '1' || repeat(']', 102))::jsonb)",
        "data is nested deeper than 100 levels",
        "Flatten",
    ),
    (f"{LOG}, '[]')", "headers is of type array", "an object"),
    (f"""{LOG}, '{{"penstock": 1}}')""", "headers.penstock is Penstock's own", "another name"),
    (f"{LOG}, jsonb_build_object('h', repeat('x', 65536)))", "headers has 65545 bytes", "65536"),
    ("stage_job(NULL, 't', '1')", "queue is NULL", ""),
    ("stage_job('rides', 't', '1')", "queue rides is registered as a log", "stage("),
    ("stage_job('receipts', NULL, '1')", "tenant is NULL", "1 to "),
    ("stage_job('receipts', '', '1')", "tenant is no name", "1 to 256 bytes"),
    ("stage_job('receipts', repeat('ä', 129), '1')", "tenant is no name", "1 to 256 bytes"),
    ("stage_job('receipts', E't\\x01', '1')", "tenant is no name", "U+0001"),
    ("stage_job('receipts', 't', NULL)", "data is NULL", "null"),
    (f"{JOB}, key => '')", "key is no name", "1 to 256 bytes"),
    (f"{JOB}, unique_name => repeat('n', 257))", "unique_name is no name", "1 to 256 bytes"),
    (f"{JOB}, delay => '-1 s')", "delay is out of range", "ten years"),
    (f"{JOB}, delay => '87601 hours')", "delay is out of range", "ten years"),
    (f"{JOB}, delay => '1 s', due => now())", "due and a delay exclude each other", "one of them"),
    (f"{JOB}, due => 'infinity')", "due is infinite", "a moment"),
    (f"{JOB}, deadline => '-infinity')", "deadline is infinite", "a moment"),
    (f"{JOB}, due => '2040-01-01', deadline => '2040-01-01')", "deadline is not after due", "a later one"),
    (f"{JOB}, priority => 'urgent')", "priority is none", "high, normal or low"),
    (f"{JOB}, priority => NULL)", "priority is none", "high, normal or low"),
    (f"{JOB}, unique_until => 'done')", "unique_until is none", "queued or running"),
    (f"{JOB}, unique_within => 'shard')", "unique_within is none", "queue or tenant"),
    (f"{JOB}, unique_window => '-1 s')", "unique_window is out of range", "ten years"),
    (f"""{JOB}, headers => '{{"penstock": {{}}}}')""", "headers.penstock is Penstock's own", "another name"),
    (f"{JOB}, headers => '1')", "headers is of type number", "an object"),
    ("mark_dirty('rides', 'm')", "channel rides is registered as a log", "stage("),
    ("mark_dirty('search', NULL)", "member is NULL", "1 to 1024 characters"),
    ("mark_dirty('search', '')", "member has 0 characters", "1 to 1024 characters"),
    ("cancel_job('receipts')", "id is NULL", "unique_name"),
]


def test_an_invalid_call_names_field_limit_and_fix_and_writes_nothing(registered: Connection) -> None:
    registered.execute("INSERT INTO penstock.retired_channels VALUES ('old')")
    for call, message, hint in WRONG:
        with pytest.raises(psycopg.errors.InvalidParameterValue) as refused:
            registered.execute(f"SELECT penstock.{call}".encode())
        said = refused.value.diag
        assert (said.message_primary or "").startswith(f"penstock: {message}"), call
        assert hint in (said.message_hint or ""), call
    assert staged_rows(registered) == []


RIGHT = [
    "stage('rides', 'k', 'a', 'o', (repeat('[', 100) || repeat(']', 100))::jsonb)",
    "stage('rides', 'k', 'a', 'o', (repeat('{\"a\": ', 100) || '1' || repeat('}', 100))::jsonb)",
    "stage('rides', repeat('k', 1024), repeat('a', 255), repeat('o', 255), to_jsonb(repeat('x', 1048574)))",
    "stage('rides', 'k', 'a', 'o', (repeat('[', 100) || repeat('1, ', 400) || '1' || repeat(']', 100))::jsonb)",
    f"{LOG}, jsonb_build_object('h', repeat('x', 65527)))",
    "stage_job('receipts', repeat('ä', 128), '1', key => repeat('k', 256), unique_name => repeat('n', 256))",
    f"{JOB}, delay => '87600 hours')",
    "mark_dirty('search', repeat('m', 1024))",
]


@pytest.mark.parametrize("call", RIGHT)
def test_what_is_at_a_limit_is_staged(call: str, registered: Connection) -> None:
    """As Postgres writes JSON, which is how the streamer reads it."""
    registered.execute(f"SELECT penstock.{call}".encode())
    assert len(staged_rows(registered)) == 1


def test_a_registered_limit_of_bytes_holds(registered: Connection) -> None:
    register_channel(Store(registered), Log("rides", shards=7, max_bytes=10))
    registered.execute("SELECT penstock.stage('rides', 'k', 'a', 'o', '[1, 2, 34]')")
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="data has 11 bytes"):
        registered.execute("SELECT penstock.stage('rides', 'k', 'a', 'o', '[1, 2, 345]')")


def test_the_newest_number_of_shards_counts(registered: Connection) -> None:
    registered.execute("UPDATE penstock.channels SET generations = '{64}', first_shard = 7 WHERE channel = 'rides'")
    registered.execute("SELECT penstock.stage('rides', 'key', 'a', 'o', '1')")
    [(_, shard, *_)] = staged_rows(registered)
    assert shard == Log("rides", shards=64).shard_for("key")


def test_jobs_are_cancelled_by_id_and_by_name(registered: Connection, database_url: str) -> None:
    def stage_job(options: str = "") -> int:
        [(number,)] = registered.execute(
            f"SELECT penstock.stage_job('receipts', 't', '1'{options})".encode()
        ).fetchall()
        return int(number)

    def cancel_job(options: str) -> bool | None:
        rows = registered.execute(f"SELECT penstock.cancel_job('receipts', {options})".encode()).fetchall()
        is_cancelled: bool | None = rows[0][0]
        return is_cancelled

    first, second, third = stage_job(), stage_job(", unique_name => 'n'"), stage_job()
    with psycopg.connect(database_url) as worker:
        worker.execute("SELECT FROM penstock.staged_records WHERE id = %s FOR UPDATE", (third,))
        assert cancel_job(str(third)) is False
    assert cancel_job(str(first)) is True
    assert cancel_job("unique_name => 'n', tenant => 'other'") is None
    assert cancel_job("unique_name => 'n'") is True
    assert cancel_job(str(first)) is None
    with registered.transaction():
        assert cancel(registered, second, of=RECEIPTS, pipeline=PIPELINE).ids == ()


CALLS = (f"{LOG})", f"{JOB})", "mark_dirty('search', 'm')", "cancel_job('receipts', 1)")


def test_a_producer_may_call_them_and_nobody_else(producer: Connection, database_url_for: UrlFor) -> None:
    for call in CALLS:
        producer.execute(f"SELECT penstock.{call}".encode())
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        producer.execute("SELECT penstock.stage_record('rides', 'log', 'k', 'a', 'o', '1', NULL)")
    with psycopg.connect(database_url_for("a_viewer"), autocommit=True) as viewer:
        for call in CALLS:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                viewer.execute(f"SELECT penstock.{call}".encode())


def test_a_caller_cannot_slip_in_functions_of_its_own(producer: Connection) -> None:
    """They run with the owner's rights, whatever the search path of the session."""
    producer.execute(
        "CREATE FUNCTION pg_temp.sha256(bytea) RETURNS bytea LANGUAGE sql AS $$ SELECT 1/0; SELECT ''::bytea $$"
    )
    producer.execute("CREATE TEMPORARY TABLE channels (channel text)")
    producer.execute("SET search_path = pg_temp, pg_catalog")
    producer.execute(f"SELECT penstock.{LOG})".encode())


# Programs in other languages


def find_block(language: str) -> str:
    """The program that the page shows."""
    [block] = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(block)


Run = Callable[[str], None]


@pytest.fixture
def run_psql(database_url: str) -> Run:
    """Runs a script with psql."""
    if (psql := shutil.which("psql")) is None:
        pytest.skip("there is no psql")
    return lambda script: _run(
        [psql, "-q", "-v", "ON_ERROR_STOP=1", "-d", database_url, "-f", "-"], script, database_url
    )


@pytest.fixture
def run_node(database_url: str, tmp_path: Path) -> Run:
    """Runs a module with Node.js and its driver, which .ci/run installs."""
    node, modules = shutil.which("node"), ROOT / ".venv" / "node" / "node_modules"
    if node is None or not modules.is_dir():
        pytest.skip("there is no Node.js with pg: npm install --prefix .venv/node pg")
    (tmp_path / "node_modules").symlink_to(modules)

    def run(script: str) -> None:
        (tmp_path / "program.mjs").write_text(script)
        _run([node, str(tmp_path / "program.mjs")], "", database_url)

    return run


@pytest.fixture
def run_ruby(database_url: str) -> Run:
    """Runs a script with Ruby and its driver."""
    ruby = shutil.which("ruby")
    if ruby is None or subprocess.run([ruby, "-e", "require 'pg'"], capture_output=True, check=False).returncode:
        pytest.skip("there is no Ruby with pg: apt-get install ruby-pg")
    return lambda script: _run([ruby, "-"], script, database_url)


def _run(command: list[str], script: str, database_url: str) -> None:
    environment = os.environ | {"DATABASE_URL": database_url}
    done = subprocess.run(
        command, input=script, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("language", "ride"), [("sql", 17), ("javascript", 18), ("ruby", 19)])
def test_the_pages_program_stages_with_its_change(
    language: str, ride: int, registered: Connection, request: pytest.FixtureRequest
) -> None:
    run: Run = request.getfixturevalue({"sql": "run_psql", "javascript": "run_node", "ruby": "run_ruby"}[language])
    registered.execute("CREATE TABLE rides (id bigint, city text)")
    run(find_block(language))

    assert registered.execute("SELECT id, city FROM rides").fetchall() == [(ride, "Ulm")]
    record, job, *marks = staged_rows(registered)
    assert record[2:] == (str(ride), "insert", "ride", {"id": ride, "city": "Ulm"}, None)
    assert job[2:6] == ("account-7", "stage_job", "job", {"ride": ride})
    assert [mark[:1] + mark[2:5] for mark in marks] == [("search", "17", "dirty", "member")] * (language == "sql")


PROGRAM = """
import pg from "pg";
const client = new pg.Client({ connectionString: process.env.DATABASE_URL });
await client.connect();
for (const statement of %s) await client.query(statement);
await client.end();
"""


def test_ten_thousand_committed_records_of_two_languages_are_applied_once_in_order(
    registered: Connection, run_psql: Run, run_node: Run, database_url: str, redis_url: str
) -> None:
    scripts, wanted = [], dict[str, list[int]]()
    for who in ("psql", "node"):
        dice, statements, number = random.Random(who), list[str](), 0
        while number < 5_000:
            statements.append("BEGIN")
            kept, is_committed = list[tuple[str, int]](), dice.random() < 0.8
            for _ in range(dice.randint(1, 30)):
                key, is_kept, some = f"{who}-{dice.randrange(50)}", dice.random() < 0.8, dice.randint(1, 20)
                numbers = range(number, number + some)
                number += some
                statements += ["SAVEPOINT s"]
                statements += [f"SELECT penstock.stage('rides', '{key}', 'insert', 'ride', '{n}')" for n in numbers]
                statements += ["RELEASE s" if is_kept else "ROLLBACK TO s"]
                kept += [(key, n) for n in numbers if is_kept]
            statements.append("COMMIT" if is_committed else "ROLLBACK")
            for key, n in kept if is_committed else ():
                wanted.setdefault(key, []).append(n)
        scripts.append(statements)
    run_psql("\\o /dev/null\n" + ";\n".join(scripts[0]) + ";\n")
    run_node(PROGRAM % json.dumps(scripts[1]))

    applied = dict[str, list[int]]()
    pipeline = Pipeline([RIDES])

    @pipeline.consumer(reads=RIDES, each=True)
    def copy(_session: Any, record: Any) -> None:
        applied.setdefault(record.key, []).append(record.data)

    with (
        Streamer(pipeline, database_url, redis_url) as streamer,
        LogWorker(WorkerSetup(pipeline, pipeline.consumers["copy"], database_url, redis_url)) as worker,
    ):
        streamer.drain()
        worker.drain()
    assert applied == wanted
