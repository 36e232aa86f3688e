"""A consumer's transactions keep their connection."""

from penstock import Log, Pipeline
from penstock.consuming import WorkerSetup
from penstock.consuming.transaction import HandlerTransaction, Locked, TransactionPlan
from penstock.database.connections import Connection
from penstock.database.executor import Executor
from penstock.database.store import Store

CONNECTED = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"


def read_process(store: Store[Executor], _: Locked) -> TransactionPlan[int]:
    [(process,)] = store.connection.execute(b"SELECT pg_backend_pid()").fetchall()
    return TransactionPlan(int(process))


def test_a_connection_is_kept(flow: Pipeline, things: Log, connection: Connection, database_url: str) -> None:
    flow.consumer(reads=things, name="reader")(lambda *_: None)
    consumer = flow.get_consumer("reader")
    transaction = HandlerTransaction(WorkerSetup(flow, consumer, database_url))
    first, second = (transaction.apply([], read_process) for _ in range(2))
    try:
        assert first == second
        assert connection.execute(CONNECTED, [second]).fetchone() == (1,)
    finally:
        transaction.close()
