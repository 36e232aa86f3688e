"""What is sent to Postgres around a handler."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection as EngineConnection
from sqlalchemy import text

from fixtures.proxy import Proxy, behind
from penstock.database.connections import make_async_engine, make_engine
from penstock.database.executor import make_executor

SYNC = b"S\0\0\0\4"


class Listener(Proxy):
    """Keeps what the client has sent."""

    def __init__(self, upstream: Path) -> None:
        super().__init__(upstream)
        self.requests: list[bytes] = []

    def _strikes(self, piece: bytes) -> bool:
        self.requests.append(piece)
        return super()._strikes(piece)


def handle(connection: EngineConnection, listener: Listener) -> list[Any]:
    """Runs transactions, of which the last has its statements prepared."""
    rows: list[Any] = []
    for _ in range(4):
        listener.requests.clear()
        transaction = connection.begin()
        executor = make_executor(connection, 60.0)
        rows = executor.execute(b"SELECT %(one)s + %(two)s, %(one)s", {"one": 1, "two": 2}).fetchall()
        connection.execute(text("SELECT 'the handler'"))
        executor.commit_after(b"SELECT %(name)s::text", {"name": "last"})
        transaction.commit()
    return rows


@pytest.mark.parametrize("is_async", [False, True])
def test_the_statements_on_either_side_of_a_handler_are_one_message_each(database_url: str, *, is_async: bool) -> None:
    found = re.search(r"host=([^&]+)&port=(\d+)", database_url)
    assert found is not None
    listener = Listener(Path(found[1]) / f".s.PGSQL.{found[2]}")
    url = behind(listener, database_url)

    async def handle_async() -> list[Any]:
        engine = make_async_engine(url, application="test")
        async with engine.connect() as connection:
            rows = await connection.run_sync(handle, listener)
        await engine.dispose()
        return rows

    try:
        if is_async:
            rows = asyncio.run(handle_async())
        else:
            with make_engine(url, application="test", pooled=False).connect() as connection:
                rows = handle(connection, listener)
        first, *_, last = [request for request in listener.requests if request[:1] != b"X"]
    finally:
        listener.close()

    assert rows == [(3, 1)]
    assert b"BEGIN" in first
    assert b"COMMIT" in last
    assert [request.count(SYNC) for request in (first, last)] == [1, 1]
    assert first.endswith(SYNC)
    assert last.endswith(SYNC)
    assert b"the handler" not in first + last
