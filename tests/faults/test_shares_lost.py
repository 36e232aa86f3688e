"""Streamers that share the shards, each in its own process: killed, suspended, replaced by other shares, under load."""

import signal
from collections.abc import Iterator
from time import monotonic

import pytest
import redis

from fixtures.running_pipeline import THINGS, Process, Processes
from fixtures.truth import TABLES, Load, await_everything, change
from penstock.database.connections import Connection
from penstock.testing import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

MANY = [f"key {number}" for number in range(120)]
"""Keys of a transaction whose tick does not return its records: each shard is read by its own streamer."""

RECOVERY_S = 90.0
"""Bound, in seconds, that tells a takeover from waiting for ever; on an idle machine it takes 4 s."""


class Streamers:
    """``penstock stream`` for some shares, and two consumers that note what arrives."""

    def __init__(self, processes: Processes, connection: Connection) -> None:
        self._processes, self._connection = processes, connection
        self.running: dict[str, Process] = {}

    def start(self, *shares: str) -> None:
        for share in shares:
            self.running[share] = self._processes("stream", "--share", share)

    def kill(self, *shares: str) -> None:
        for share in shares:
            process = self.running.pop(share)
            process.kill()
            process.wait()

    def send(self, share: str, what: signal.Signals) -> None:
        self.running[share].send_signal(what)

    def await_flow(self) -> float:
        """Waits until new records of every shard arrive at both consumers; returns how long that took, in seconds."""
        began = monotonic()
        change(self._connection, MANY)
        newest = self._connection.execute("SELECT max(id) FROM public.truth GROUP BY shard").fetchall()

        def arrived() -> bool:
            return self._connection.execute(
                "SELECT count(*) FROM public.effects WHERE id = ANY (%s)", ([id_ for (id_,) in newest],)
            ).fetchone() == (4,)

        eventually(arrived, "records of every shard flow", timeout_s=180)
        return monotonic() - began


@pytest.fixture
def streamers(penstock_processes: Processes, connection: Connection) -> Iterator[Streamers]:
    """Streamers ``1/2`` and ``2/2``."""
    connection.execute(TABLES)
    made = Streamers(penstock_processes, connection)
    for name in ("one", "two"):
        penstock_processes("consume", name)
    made.start("1/2", "2/2")
    made.await_flow()
    yield made
    assert [p.poll() for p in made.running.values()] == [None] * len(made.running)


def test_the_work_of_a_streamer_that_is_killed_or_suspended_is_taken_over_within_seconds(
    streamers: Streamers, connection: Connection, database_url: str, redis_client: redis.Redis
) -> None:
    """Guarantees 3 and 4: the one that sequences, or one that only publishes; a suspended one wakes late, and does no harm."""
    took: dict[str, float] = {}
    with Load(database_url):
        for lost in ("2/2", "1/2"):
            streamers.kill(lost)
            took[f"{lost} killed"] = streamers.await_flow()
            streamers.start(lost)
            streamers.await_flow()
        streamers.send("2/2", signal.SIGSTOP)
        took["2/2 suspended"] = streamers.await_flow()
        streamers.send("2/2", signal.SIGCONT)
        streamers.await_flow()

    print("records flowed again after", took)  # noqa: T201  shown by pytest -s
    assert max(took.values()) < RECOVERY_S
    assert await_everything(connection, redis_client, THINGS) > 6 * len(MANY)


def test_old_and_new_shares_that_overlap_make_one_log(
    streamers: Streamers, connection: Connection, database_url: str, redis_client: redis.Redis
) -> None:
    """Guarantee 3: a plan changes, and for a while both the old streamers and the new ones publish."""
    with Load(database_url):
        streamers.start("1/1", "1/3", "2/3", "3/3")
        for _ in range(4):
            streamers.await_flow()
        streamers.kill("1/2", "2/2")
        streamers.await_flow()
        streamers.kill("1/1", "2/3")
        assert streamers.await_flow() < RECOVERY_S

    assert await_everything(connection, redis_client, THINGS) > 6 * len(MANY)
