"""Settings that a role or a database may carry: each kind of worker does its work under each of them."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import psycopg
import pytest
from sqlalchemy import text

from fixtures.all_kinds import STAGE, AllKinds, check_all_kinds, drain
from fixtures.proxy import Proxy, behind
from penstock.database.connections import Connection, TableConnection, connect_postgres, make_async_engine, make_engine
from penstock.database.transactions import Timeouts, handler_settings, set_local_in_one
from penstock.streaming import Streamer

TIMEOUTS = {  # one by one: the shortest would hide the others; a busy machine lets more than 20 ms pass between two statements
    "idle_in_transaction_session_timeout": "1ms",
    "idle_session_timeout": "1s",
    "statement_timeout": "5ms",
    "lock_timeout": "1ms",
    "transaction_timeout": "1ms",
    "deadlock_timeout": "1ms",
}
SETTINGS: dict[str, dict[str, str]] = {
    **{name: {name: value} for name, value in TIMEOUTS.items()},
    "transactions": {
        "default_transaction_isolation": "serializable",
        "default_transaction_deferrable": "on",
        "session_replication_role": "replica",
        "row_security": "off",
    },
    "names": {
        "search_path": "nowhere",
        "default_tablespace": "",
        "temp_tablespaces": "",
        "default_table_access_method": "heap",
        "quote_all_identifiers": "on",
        "check_function_bodies": "off",
    },
    "texts of values": {
        "client_encoding": "LATIN1",
        "standard_conforming_strings": "off",
        "escape_string_warning": "off",
        "backslash_quote": "off",
        "DateStyle": "German, DMY",
        "IntervalStyle": "postgres_verbose",
        "TimeZone": "Asia/Kathmandu",
        "timezone_abbreviations": "India",
        "bytea_output": "escape",
        "extra_float_digits": "-15",
        "array_nulls": "off",
        "xmlbinary": "hex",
        "xmloption": "document",
        "lc_messages": "C",
        "lc_monetary": "C",
        "lc_numeric": "C",
        "lc_time": "C",
        "transform_null_equals": "on",
    },
    "planning": {
        "jit": "on",
        "jit_above_cost": "0",
        "plan_cache_mode": "force_generic_plan",
        "enable_seqscan": "off",
        "enable_indexscan": "off",
        "from_collapse_limit": "1",
        "debug_parallel_query": "on",
        "work_mem": "64kB",
        "temp_file_limit": "0",
        "synchronous_commit": "off",
        "client_min_messages": "debug5",
        "log_statement": "all",
        "default_statistics_target": "1",
        "default_toast_compression": "pglz",
    },
}


def change_settings(connection: Connection, settings: dict[str, str]) -> None:
    """Of the database, those that this version of Postgres has."""
    rows = connection.execute("SELECT name FROM pg_settings WHERE name = ANY (%s)", [[*settings]]).fetchall()
    for (name,) in rows:
        value = settings[name] if name in {"search_path", "DateStyle"} else f"'{settings[name]}'"
        connection.execute(f'ALTER DATABASE "{connection.info.dbname}" SET {name} = {value}'.encode())


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_each_kind_of_worker_works_under_settings_of_the_database(
    settings: dict[str, str], connection: Connection, database_url: str, redis_url: str
) -> None:
    """Guarantee 13: what a worker needs it sets itself, from its first statement on."""
    kinds = AllKinds()
    with Streamer(kinds.flow, database_url, redis_url) as streamer:
        streamer.drain()
    connection.execute(STAGE.encode())
    change_settings(connection, settings)

    check_all_kinds(connection, kinds, database_url, redis_url)


def ours(**options: Any) -> Callable[[str], AbstractContextManager[Connection]]:
    return lambda url: connect_postgres(url, application="test", **options)


@contextmanager
def of_a_handler(url: str) -> Iterator[Connection]:
    with psycopg.connect(url) as connection:
        connection.execute(set_local_in_one(handler_settings(connection.info.server_version, 90.0)))
        yield connection


LIMITS = "statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "transaction_timeout"
THEIRS = {"search_path": "public", "row_security": "on", "jit": "on", **dict.fromkeys(LIMITS, "9s")}


@pytest.mark.parametrize(
    ("connect", "expected"),
    [
        (ours(), "pg_catalog, pg_temp|off|off|5min|1min|1min|0"),
        (ours(timeouts=Timeouts()), "pg_catalog, pg_temp|off|off|1s|50ms|1min|0"),
        (ours(kind=TableConnection), "public|off|on|0|1min|0|0"),
        (of_a_handler, "public|on|on|30min|0|90s|0"),
    ],
)
def test_a_transaction_has_the_settings_of_its_kind(
    connect: Callable[[str], AbstractContextManager[Connection]],
    expected: str,
    connection: Connection,
    database_url: str,
) -> None:
    """An application's tables are read by the role's names, for however long; a handler runs as its role says, without haste."""
    change_settings(connection, THEIRS)
    shown = ", ".join(f"coalesce(current_setting('{name}', true), '0')" for name in THEIRS)
    ask = f"SELECT concat_ws('|', {shown})".encode()

    with connect(database_url) as opened:
        assert opened.execute(ask).fetchone() == (expected,)
        with opened.transaction():
            assert opened.execute(ask).fetchone() == (expected,)


@pytest.mark.parametrize("kind", ["ours", "plain", "async"])
def test_a_session_may_be_idle_whatever_the_database_says(kind: str, connection: Connection, database_url: str) -> None:
    """Guarantee 13."""
    connection.execute(f"ALTER DATABASE \"{connection.info.dbname}\" SET idle_session_timeout = '10s'".encode())
    asked = text("SHOW idle_session_timeout")

    async def ask() -> object:
        engine = make_async_engine(database_url, application="test")
        async with engine.connect() as opened:
            answer = (await opened.execute(asked)).scalar_one()
        await engine.dispose()
        return answer

    if kind == "ours":
        with connect_postgres(database_url, application="test") as opened:
            assert opened.execute("SHOW idle_session_timeout").fetchone() == ("0",)
    elif kind == "plain":
        engine = make_engine(database_url, application="test", pooled=False)
        with engine.connect() as session:
            assert session.execute(asked).scalar_one() == "0"
    else:
        assert asyncio.run(ask()) == "0"


def test_no_transaction_is_idle_before_it_has_timeouts_of_ours(
    connection: Connection, database_url: str, redis_url: str, postgres_proxy: Proxy
) -> None:
    """Guarantee 13: connecting opens none, even if the way to the server takes longer than a transaction may be idle."""
    kinds = AllKinds()
    drain(lambda: Streamer(kinds.flow, database_url, redis_url))
    connection.execute(STAGE.encode())
    postgres_proxy.delay(0.01)
    short = "SET idle_in_transaction_session_timeout = '6ms'"
    connection.execute(f'ALTER DATABASE "{connection.info.dbname}" {short}'.encode())

    check_all_kinds(connection, kinds, behind(postgres_proxy, database_url), redis_url)
