"""Redis and Postgres fail under load, with consumers running, on both engines; afterwards everything is exact."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from fixtures.damage import copy_data, restore_data
from fixtures.running_pipeline import READY_S, RunningPipeline
from fixtures.truth import Load

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


@pytest.mark.storm_on_spark
def test_redis_flushed_under_load(running_pipeline: RunningPipeline) -> None:
    """Guarantee 9: the log is filled again from the journal."""
    with Load(running_pipeline.url) as load, running_pipeline.client() as client:
        for _ in range(4):
            load.go_on(0.8)
            client.flushall()
        load.go_on(0.8)

    assert running_pipeline.exact() > 20


@pytest.mark.storm_on_spark
def test_redis_put_back_to_an_older_directory_under_load(running_pipeline: RunningPipeline, tmp_path: Path) -> None:
    """Guarantee 9: what the copy lacks is sent again with the same offsets; consumers that are ahead skip it."""
    with Load(running_pipeline.url) as load:
        load.go_on(0.5)
        copy_data(running_pipeline.redis, tmp_path / "older")
        for _ in range(2):
            load.go_on(1.5)
            restore_data(running_pipeline.redis, tmp_path / "older")
        load.go_on(0.5)

    assert running_pipeline.exact() > 20


@pytest.mark.storm_on_spark
def test_redis_down_for_some_seconds(running_pipeline: RunningPipeline) -> None:
    """Guarantee 13: everything catches up, without a busy loop of connection attempts."""
    with Load(running_pipeline.url) as load:
        load.go_on(0.5)
        before = running_pipeline.redis_proxy.accepted
        running_pipeline.redis.stop()
        load.go_on(5)
        attempts = running_pipeline.redis_proxy.accepted - before
        running_pipeline.redis.start()
        load.go_on(0.5)

    # A streamer and two consumers, two tasks each on Spark; pauses of 0.1, 0.2, 0.4 … s, two connections per attempt.
    assert 3 <= attempts <= 100
    assert running_pipeline.exact() > 20


@pytest.mark.storm_on_spark
def test_postgres_crashes_under_load(running_pipeline: RunningPipeline) -> None:
    """Guarantees 4 and 16: committed records remain, and interrupted work is done again."""
    with Load(running_pipeline.url) as load:
        for _ in range(2):
            load.go_on(1)
            running_pipeline.postgres.kill()
            running_pipeline.postgres.start()
        load.go_on(1)

    assert running_pipeline.exact() > 20


@pytest.mark.storm_on_spark
def test_two_runs_at_once(running_pipeline: RunningPipeline) -> None:
    """Guarantees 3 and 5: two streamers and two workers per consumer are slow, never wrong; one run stops, the other goes on."""
    second = running_pipeline.run_beside()
    with Load(running_pipeline.url) as load:
        load.go_on(5)
        second.send_signal(signal.SIGTERM)
        load.go_on(1)

    assert second.wait(READY_S) == 0
    assert running_pipeline.exact() > 20


def test_sparks_workers_and_the_servers_killed_in_turn_under_load(running_pipeline: RunningPipeline) -> None:
    """Guarantees 4, 9 and 16: Spark restarts a killed task; its successor does what it had not committed."""
    if running_pipeline.engine == "inline":
        pytest.skip("the inline engine has no workers beside its own process")
    killed = 0
    with Load(running_pipeline.url) as load, running_pipeline.client() as client:
        for _ in range(2):
            load.go_on(1.5)
            for worker in running_pipeline.spark_workers():
                os.kill(worker, signal.SIGKILL)
                killed += 1
            load.go_on(0.8)
            client.flushall()
            load.go_on(0.8)
            running_pipeline.postgres.kill()
            running_pipeline.postgres.start()
        load.go_on(1.5)

    assert killed >= 2
    assert running_pipeline.exact() > 20


def test_sparks_directories_deleted_between_and_during_runs(running_pipeline: RunningPipeline) -> None:
    """Guarantee 4: nothing depends on Spark's checkpoints; without its temporary files no task starts, and the run ends."""
    if running_pipeline.engine == "inline":
        pytest.skip("the inline engine has no directory of its own")

    def deleted() -> int:
        found = list(running_pipeline.directory.glob("penstock-spark-*"))
        for directory in found:
            shutil.rmtree(directory, ignore_errors=True)
        return len(found)

    with Load(running_pipeline.url) as load:
        assert deleted() == 1
        load.go_on(5)  # longer than an epoch: Spark finds its own files missing
        deleted()
        load.go_on(5)
    during = running_pipeline.exact()
    [directory] = running_pipeline.directory.glob("penstock-java-*")
    shutil.rmtree(directory, ignore_errors=True)
    assert running_pipeline.running is not None
    assert running_pipeline.running.wait(READY_S) == 3
    deleted()
    running_pipeline.begin()

    assert running_pipeline.exact() > during
    deleted()
    assert running_pipeline.stop() == 0
