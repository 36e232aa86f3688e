"""A Python process of Spark's keeps one connection of a kind to each server, and none that is broken or another process's."""

import os
from typing import Any

import pytest

from penstock.database.connections import Connection, TableConnection, WorkerConnection
from penstock.spark.sources import task_process
from penstock.spark.sources.task_process import arrow, postgres, redis_client

TERMINATE = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE split_part(application_name, '/', 1) = 'penstock spark'"


@pytest.fixture
def urls(database_url: str, redis_url: str) -> tuple[tuple[Any, ...], ...]:
    """What a connection is of."""
    return (
        (postgres, database_url, WorkerConnection),
        (postgres, database_url, TableConnection),
        (postgres, f"{database_url}&connect_timeout=7", WorkerConnection),
        (redis_client, redis_url),
        (redis_client, f"{redis_url}&socket_timeout=7"),
    )


@pytest.mark.slow
def test_each_server_and_kind_has_a_connection_of_its_own_which_is_kept(urls: tuple[tuple[Any, ...], ...]) -> None:
    opened = [open_(*of) for open_, *of in (*urls, *urls)]

    assert len({id(each) for each in opened}) == len(urls)
    assert all(one is other for one, other in zip(opened[: len(urls)], opened[len(urls) :], strict=True))
    assert [type(each) for each in opened[:2]] == [WorkerConnection, TableConnection]
    assert [each.prepare_threshold is None for each in opened[:2]] == [False, True], "tables of others may change"


def test_a_forked_process_opens_its_own(urls: tuple[tuple[Any, ...], ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """As the fork sees it: what it has inherited is by the number of another process."""
    parents = [open_(*of) for open_, *of in urls]
    monkeypatch.setattr(os, "getpid", lambda: -1)

    assert not {id(open_(*of)) for open_, *of in urls} & {id(each) for each in parents}
    task_process._close()
    assert not any(each.closed for each in parents[:3]), "at its end it closes its own alone"


@pytest.mark.parametrize("kind", [WorkerConnection, TableConnection])
def test_a_connection_that_is_closed_or_was_ended_by_the_server_is_opened_again(
    kind: Any, database_url: str, connection: Connection
) -> None:
    def close() -> None:
        first.close()

    def end() -> None:
        assert connection.execute(TERMINATE).rowcount > 0

    for ends in (close, end):
        first = postgres(database_url, kind)
        ends()
        again = postgres(database_url, kind)
        assert again is not first
        assert first.closed
        assert again.execute("SELECT 1").fetchall() == [(1,)]


def test_a_task_reads_with_settings_of_its_own_whatever_the_database_has(
    database_url: str, connection: Connection
) -> None:
    """Penstock's tables by its own search path, the application's by theirs; neither with a timeout, or without hidden rows."""
    for setting in ("statement_timeout = '7s'", "search_path = elsewhere", "row_security = on"):
        connection.execute(f'ALTER DATABASE "{connection.info.dbname}" SET {setting}'.encode())
    found = {}
    names = ("search_path", "statement_timeout", "row_security", "client_encoding")
    shown = ", ".join(f"current_setting('{name}')" for name in names)
    for kind in (WorkerConnection, TableConnection):
        with arrow(database_url, kind) as cursor:
            cursor.execute(f"SELECT {shown}")
            [found[kind]] = cursor.fetchall()

    assert found == {
        WorkerConnection: ("pg_catalog, pg_temp", "0", "off", "UTF8"),
        TableConnection: ("elsewhere", "0", "off", "UTF8"),
    }
