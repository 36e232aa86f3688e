"""Processor time: of a worker, of Redis, and of the whole of Postgres, whose backends come and go."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from time import process_time

import psycopg
import pytest

from benchmarks import processor
from fixtures.clients import connect_redis
from penstock.database.connections import plain_url

BUSY = "SELECT count(sha256(n::text::bytea)) FROM generate_series(1, 200000) n"


def busy(seconds: float) -> None:
    until = process_time() + seconds
    while process_time() < until:
        pass


@pytest.fixture
def processes(database_url: str, redis_url: str) -> Iterator[tuple[int, int, int]]:
    with psycopg.connect(plain_url(database_url)) as watching, connect_redis(redis_url) as client:
        redis = int(client.info("server")["process_id"])
        yield os.getpid(), watching.info.backend_pid, redis


def test_the_worker_is_this_process(processes: tuple[int, int, int]) -> None:
    used = processor.measure_costs(lambda: busy(0.1), *processes)

    assert used["worker"] >= 0.1 > used["redis"]


def test_a_backend_that_has_ended_is_counted(database_url: str, processes: tuple[int, int, int]) -> None:
    def work_and_disconnect() -> None:
        with psycopg.connect(plain_url(database_url)) as connection:
            connection.execute(BUSY)

    with psycopg.connect(plain_url(database_url)) as beside:
        living = processor.measure_costs(lambda: beside.execute(BUSY), *processes)["postgres"]
    ended = processor.measure_costs(work_and_disconnect, *processes)["postgres"]

    assert ended > living / 2 > 0


def test_a_peer_reads_the_same_by_the_script(processes: tuple[int, int, int]) -> None:
    before = processor.read_costs(*processes)
    read = subprocess.run(
        [sys.executable, processor.__file__, *map(str, processes)],
        capture_output=True,
        check=True,
        cwd="/",
        env={},
        text=True,
    )
    after = processor.read_costs(*processes)

    found = json.loads(read.stdout)
    assert set(found) == {"worker", "postgres", "redis"}
    for who in found:  # of a process that has ended, hundredths of a second are counted
        assert before[who] - 0.05 <= found[who] <= after[who] + 0.05
