"""A role that may create functions and operators in a schema of the search_path cannot have Penstock run them."""

import ast
import shlex
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from fixtures.clients import connect_redis
from fixtures.command_line import CommandLine
from fixtures.flow import retain_now
from fixtures.traps import SOURCE, lay_traps, trapped
from penstock import Ick, Log, Pipeline
from penstock.channels.routing import log_keys
from penstock.consuming import make_worker
from penstock.database.connections import connect_postgres
from penstock.reconciling.cut import cut
from penstock.records import DEFAULT_SCOPE, Record
from penstock.streaming import Streamer

STAGE = (
    "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
    "VALUES ('{channel}', 0, '{key}', 'insert', 'thing', '{data}')"
)
OPENING = {"connect", "create_engine", "create_async_engine", "Cursor", "Connection", "ClientCursor"}
"""Calls that make a connection or a cursor, of psycopg, SQLAlchemy and ADBC."""


@pytest.fixture
def hostile(database_url: str) -> Iterator[str]:
    """A database full of traps; nothing may go into one."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE public.effects (id bigint)")
    lay_traps(database_url)
    yield database_url
    assert not trapped(database_url)


def stage(url: str, *keys: str, channel: str = "things", data: str = "{}") -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for key in keys:
            connection.execute(STAGE.format(channel=channel, key=key, data=data).encode())


def test_the_traps_are_laid(database_url: str) -> None:
    lay_traps(database_url)

    with psycopg.connect(database_url, autocommit=True) as connection:
        for statement in ("SELECT 1 = 1", "SELECT cardinality(ARRAY[1::bigint])", "SELECT clock_timestamp()"):
            with pytest.raises(psycopg.errors.RaiseException, match="trapped"):
                connection.execute(statement.encode())

    assert trapped(database_url)


@pytest.mark.parametrize(("prepare", "handler"), [(True, "plain"), (False, "async")])
def test_workers_run_no_function_of_another_schema(
    hostile: str,
    redis_url: str,
    prepare: bool,  # noqa: FBT001
    handler: str,
) -> None:
    """Guarantee 31: in the journal, at retries, dead letters, parked keys, gaps, barriers, and in Icks."""
    things, index = Log("things", shards=1, keep=timedelta(0)), Ick("index", shards=1)
    flow = Pipeline([things, index])
    paths: set[str] = set()

    def apply(session: Session, records: Sequence[Record]) -> None:
        paths.add(str(session.scalar(text("SHOW search_path"))))
        if any(record.key == "bad" for record in records):
            raise ValueError
        for record in records:
            session.execute(text("INSERT INTO public.effects VALUES (:id)"), {"id": record.id})

    async def apply_async(session: AsyncSession, records: Sequence[Record]) -> None:
        await session.run_sync(apply, records)

    options = {"attempts": 1, "park_key": True, "name": "reader"}
    flow.consumer(reads=things, **options)(apply if handler == "plain" else apply_async)  # type: ignore[call-overload]

    @flow.consumer(reads=index)
    def indexer(_session: Session, _members: Sequence[str]) -> None: ...

    streamer = Streamer(flow, hostile, redis_url, prepare=prepare)
    workers = [make_worker(flow, spec, hostile, redis_url, prepare=prepare) for spec in flow.consumers.values()]
    try:
        for keys in (["a", "b"], ["bad", "c"], ["bad", "d"]):
            stage(hostile, *keys)
            stage(hostile, *keys, channel="index")
            streamer.drain()
            for worker in workers:
                worker.drain()
        stage(hostile, "lost")
        streamer.drain()
        with connect_redis(redis_url) as client:  # the consumer reads the journal then
            client.xtrim(log_keys("penstock", things.shard_names[0]).stream, maxlen=0)
        with cut(lambda: connect_postgres(hostile, application="test"), DEFAULT_SCOPE):
            pass
        for worker in workers:
            worker.drain()
        retain_now(streamer)
    finally:
        streamer.close()
        for worker in workers:
            worker.close()

    with psycopg.connect(hostile) as connection:
        applied = connection.execute("SELECT FROM public.effects").fetchall()
        dead = connection.execute("SELECT FROM penstock.dead_letters").fetchall()
    assert (len(applied), len(dead)) == (5, 2)
    assert paths == {"public, pg_catalog"}  # the handler keeps its own


COMMANDS = (
    "doctor",
    "status",
    "consumers list",
    "dead-letters list",
    "dead-letters show reader 'things/0 offset 2'",
    "dead-letters retry reader --all",
    "dead-letters drop reader 'things/0 offset 2' --apply",
    "reset checkpoint reader --to earliest --apply",
    "reset epoch --apply",
    "tail things",
    "consumers retire reader --apply",
)


@pytest.mark.slow
def test_commands_run_no_function_of_another_schema(hostile: str, penstock: CommandLine) -> None:
    """Guarantee 31."""
    stage(hostile, "a")
    stage(hostile, "b", data='{"bad": true}')

    said = {words: penstock(*words.split()) for words in ("init", "stream --drain")}
    said["consume"] = penstock("consume", "reader", "--drain")
    said |= {words: penstock(*shlex.split(words)) for words in COMMANDS}

    assert [words for words, done in said.items() if "trapped" in done.stdout + done.stderr] == []


def test_nobody_opens_a_connection_without_our_settings() -> None:
    """Statements of ours go through ``connect_postgres``, a handler's executor, the sequencer, or ``arrow``."""
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and _opens(call.func)
    }

    assert found == {
        "database/connections.py",
        "spark/sources/task_process.py",
        "spark/sources/table_reader.py",  # sends the settings after BEGIN
        "streaming/sequencer.py",  # sends the settings in its own message
        "staging/driver_connections.py",  # a cursor of the application's own connection
        "embedded/postgres.py",  # creates databases on our own server
    }


def _opens(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id in {"create_engine", "create_async_engine"}
    return (
        isinstance(function, ast.Attribute)
        and function.attr in OPENING
        and isinstance(function.value, ast.Name)
        and function.value.id in {"psycopg", "adbc", "kind", "HandlerConnection"}
    )


def test_every_function_of_ours_has_a_fixed_search_path_or_is_bound() -> None:
    """A body that Postgres parses at each call finds what the caller's search_path has."""
    sources = [*SOURCE.rglob("*.py"), *Path(SOURCE.parents[1], "migrations").rglob("*.py")]
    for path in sources:
        for function in path.read_text().split("CREATE FUNCTION")[1:]:
            assert "BEGIN ATOMIC" in function or "SET search_path" in function, path
        for function in path.read_text().split("CREATE OR REPLACE FUNCTION")[1:]:
            assert "BEGIN ATOMIC" in function or "SET search_path" in function, path
