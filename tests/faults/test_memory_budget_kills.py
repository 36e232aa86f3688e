"""A consumer that is far behind a small memory budget, while streamer and consumer are killed."""

import random
import threading

import pytest
import redis

from fixtures.running_pipeline import APPLICATION, Processes
from fixtures.truth import TABLES, Load, await_everything, change
from penstock import Log
from penstock.channels.log.appending import memory_used
from penstock.channels.log.streams import extents
from penstock.database.connections import Connection
from penstock.testing import eventually

BUDGET, A_BATCH = 60_000, 20_000
"""In bytes; batches of these loads have some ten records each."""

LIMITED = APPLICATION.replace("keep=timedelta(seconds=2)", f"keep=timedelta(seconds=2), redis_memory={BUDGET}")
THINGS = Log("things", shards=2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_consumer_far_behind_catches_up_through_the_journal_with_kills(
    penstock_processes: Processes, connection: Connection, database_url: str, redis_client: redis.Redis
) -> None:
    """Guarantees 4, 12 and 25: lost 0, doubled 0, and memory within the budget all the time."""
    penstock_processes.write(LIMITED)
    connection.execute(TABLES)
    most, done = 0, threading.Event()

    def used() -> int:
        return sum(memory_used(redis_client, "penstock", THINGS.shard_names).values())

    def measure() -> None:
        nonlocal most
        while not done.wait(0.005):
            most = max(most, used())

    def first() -> int:
        return max(e.first for e in extents(redis_client, "penstock", THINGS.shard_names).values())

    watcher = threading.Thread(target=measure)
    dice = random.Random(5)
    streamer = penstock_processes("stream")
    eventually(lambda: registered(connection) == 4, "both consumers are registered", timeout_s=180)
    watcher.start()
    try:
        for number in range(40):  # what three days would leave
            change(connection, [f"k{(number * 7 + each) % 200}" for each in range(100)])
        eventually(lambda: first() > 500, "most of it has left Redis", timeout_s=180)
        consumers = [penstock_processes("consume", name) for name in ("one", "one", "two")]
        with Load(database_url, producers=1) as load:
            for _ in range(2):
                load.go_on(0.5 + dice.random())
                for victim in (streamer, *consumers):
                    victim.kill()
                    victim.wait()
                streamer = penstock_processes("stream")
                consumers = [penstock_processes("consume", name) for name in ("one", "one", "two")]
                await_more(connection)
        assert await_everything(connection, redis_client, THINGS) > 4000
    finally:
        done.set()
        watcher.join()

    assert BUDGET / 2 < most <= BUDGET + A_BATCH


def registered(connection: Connection) -> int:
    [(count,)] = connection.execute("SELECT count(*) FROM penstock.checkpoints").fetchall()
    return int(count)


def applied(connection: Connection) -> int:
    [(count,)] = connection.execute("SELECT count(*) FROM public.effects").fetchall()
    return int(count)


def await_more(connection: Connection) -> None:
    before = applied(connection)
    eventually(lambda: applied(connection) > before, "it goes on", timeout_s=180)
