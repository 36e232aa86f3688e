"""A consumer's transactions keep their connection, or give it back after each."""

import pytest

from penstock import Log, Pipeline
from penstock.consuming import WorkerSetup
from penstock.consuming.transaction import HandlerTransaction, Locked, TransactionPlan
from penstock.database.connections import Connection
from penstock.database.executor import Executor
from penstock.testing import eventually

CONNECTED = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"


def read_process(executor: Executor, _: Locked) -> TransactionPlan[int]:
    [(process,)] = executor.execute(b"SELECT pg_backend_pid()").fetchall()
    return TransactionPlan(int(process))


@pytest.mark.parametrize("pooled", [True, False])
def test_a_connection_is_kept_only_if_it_is_pooled(
    flow: Pipeline,
    things: Log,
    connection: Connection,
    database_url: str,
    pooled: bool,  # noqa: FBT001
) -> None:
    flow.consumer(reads=things, name="reader")(lambda *_: None)
    consumer = flow.get_consumer("reader")
    transaction = HandlerTransaction(WorkerSetup(flow, consumer, database_url), pooled=pooled)
    first, second = (transaction.apply([], read_process) for _ in range(2))
    try:
        assert (first == second) == pooled
        count = int(pooled)
        eventually(
            lambda: connection.execute(CONNECTED, [second]).fetchone() == (count,), "the connection is kept or closed"
        )
    finally:
        transaction.close()
