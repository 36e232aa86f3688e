"""Under load, with consumers at work, on both engines: Redis and Postgres are hurt, and everything is exact afterwards."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from fixtures.plant import Plant
from fixtures.truth import Load
from penstock.testing import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]


def test_redis_flushed_under_load(plant: Plant) -> None:
    """Guarantee 9: the log is filled again from the journal."""
    with Load(plant.url) as load, plant.client() as client:
        for _ in range(4):
            load.go_on(0.8)
            client.flushall()
        load.go_on(0.8)

    assert plant.exact() > 100


def test_redis_put_back_to_an_older_directory_under_load(plant: Plant, tmp_path: Path) -> None:
    """Guarantee 9: what the copy lacks comes again, at the same offsets; consumers that were farther skip it."""
    with Load(plant.url) as load:
        load.go_on(0.5)
        plant.redis.copy_to(tmp_path / "older")
        for _ in range(2):
            load.go_on(1.5)
            plant.redis.restore(tmp_path / "older")
        load.go_on(0.5)

    assert plant.exact() > 100


def test_redis_away_for_some_seconds(plant: Plant) -> None:
    """Guarantee 13: everything catches up, and nobody knocks in a loop meanwhile."""
    with Load(plant.url) as load:
        load.go_on(0.5)
        before = plant.redis_proxy.accepted
        plant.redis.stop()
        load.go_on(5)
        attempts = plant.redis_proxy.accepted - before
        plant.redis.start()
        load.go_on(0.5)

    # A streamer and two consumers, on Spark in two tasks each; pauses of 0.1, 0.2, 0.4 … s, and two connections a time.
    assert 3 <= attempts <= 100
    assert plant.exact() > 100


def test_postgres_crashes_under_load(plant: Plant) -> None:
    """Guarantees 4 and 16: what was committed is there, what was under way is done again."""
    with Load(plant.url) as load:
        for _ in range(2):
            load.go_on(1)
            plant.postgres.kill()
            plant.postgres.start()
        load.go_on(1)

    assert plant.exact() > 100


def test_two_runs_at_once(plant: Plant) -> None:
    """Guarantees 3 and 5: two streamers and two of each consumer are slow, never wrong; one stops, the other goes on."""
    second = plant.run()
    with Load(plant.url) as load:
        load.go_on(6 if plant.engine == "inline" else 15)
        second.send_signal(signal.SIGTERM)
        load.go_on(1)

    assert second.wait(20) == 0
    assert plant.exact() > 100


def test_sparks_workers_killed_under_load(plant: Plant) -> None:
    """Guarantee 4: Spark starts a task again that is gone; what it had not committed, its successor does."""
    if plant.engine == "inline":
        pytest.skip("the inline engine has no workers beside its own process")
    killed = 0
    with Load(plant.url) as load:
        for _ in range(5):
            load.go_on(1.5)
            for worker in plant.spark_workers():
                os.kill(worker, signal.SIGKILL)
                killed += 1
        load.go_on(1.5)

    assert killed >= 5
    assert plant.exact() > 100


def test_sparks_checkpoints_deleted_between_and_during_runs(plant: Plant) -> None:
    """Guarantee 4: nothing leans on Spark's own directory."""
    if plant.engine == "inline":
        pytest.skip("the inline engine has no directory of its own")

    def deleted() -> int:
        found = list(plant.directory.glob("penstock-spark-*"))
        for directory in found:
            shutil.rmtree(directory, ignore_errors=True)
        return len(found)

    with Load(plant.url) as load:
        assert deleted() == 1
        load.go_on(5)  # beyond an epoch: Spark misses what it has written
        deleted()
        load.go_on(5)
    during = plant.exact()
    assert plant.stop() == 0
    deleted()
    plant.begin()

    eventually(lambda: plant.exact() > during, "it goes on", timeout_s=60)
