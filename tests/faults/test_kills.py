"""SIGKILL at random, repeatedly, under load."""

import os
import random
import signal
import threading

import pytest
import redis

from fixtures.engines import Start, effects
from fixtures.flow import stage_rows
from fixtures.running_pipeline import THINGS, Processes
from fixtures.truth import TABLES, Load, await_everything
from penstock import Log
from penstock.database.connections import Connection, connect_postgres
from penstock.testing import eventually

KILLS = {"inline": 47, "spark": 3}


@pytest.mark.storm
@pytest.mark.timeout(400)
def test_fifty_kills_under_load_lose_and_double_nothing(
    start: Start, connection: Connection, database_url: str, things: Log, request: pytest.FixtureRequest
) -> None:
    """Guarantee 4: streamer, consumers and Spark's driver, killed together as one process group."""
    engine = "spark" if "spark" in request.node.name else "inline"
    done, dice = threading.Event(), random.Random(7)

    def produce() -> None:
        with connect_postgres(database_url, application="producer") as producing:
            number = 0
            while not done.wait(0.02):
                number += 1
                stage_rows(producing, things, 5, f"{number} ")

    producer = threading.Thread(target=produce)
    producer.start()
    try:
        for _ in range(KILLS[engine]):
            before = len(effects(connection, "one"))
            process = start()
            grown = lambda before=before: len(effects(connection, "one")) > before  # noqa: E731
            eventually(grown, "records flow again after a kill", timeout_s=180)
            done.wait(dice.random() * 0.4)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    finally:
        done.set()
        producer.join()
    start()
    [(staged,)] = connection.execute("SELECT count(*) FROM penstock.staged_records").fetchall()

    everything = list(range(1, staged + 1))
    for consumer in ("one", "two"):
        arrived = lambda consumer=consumer: len(effects(connection, consumer)) >= staged  # noqa: E731
        eventually(arrived, "everything arrives", timeout_s=90)
        assert effects(connection, consumer) == everything


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_streamers_and_consumers_killed_one_by_one_lose_and_double_nothing(
    penstock_processes: Processes, connection: Connection, database_url: str, redis_client: redis.Redis
) -> None:
    """Guarantee 4: `penstock stream` and `penstock consume`, each in its own process, killed at any moment."""
    roles = [("stream",), ("stream",), ("consume", "one"), ("consume", "one"), ("consume", "two")]
    connection.execute(TABLES)
    dice, alive = random.Random(11), [penstock_processes(*role) for role in roles]
    with Load(database_url) as load:
        eventually(lambda: everything_flows(connection), "records flow", timeout_s=180)
        for _ in range(15):
            load.go_on(dice.random() * 0.7)
            victim = dice.randrange(len(roles))
            alive[victim].kill()
            alive[victim].wait()
            alive[victim] = penstock_processes(*roles[victim])

    assert await_everything(connection, redis_client, THINGS) > 50


def everything_flows(connection: Connection) -> bool:
    rows = connection.execute("SELECT DISTINCT consumer FROM public.effects").fetchall()
    return len(rows) == 2
