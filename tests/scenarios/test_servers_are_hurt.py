"""Under load, with consumers at work, on both engines: Redis and Postgres are hurt, and everything is exact afterwards."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from fixtures.running_pipeline import RunningPipeline
from fixtures.truth import Load
from penstock.testing import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]


def test_redis_flushed_under_load(running_pipeline: RunningPipeline) -> None:
    """Guarantee 9: the log is filled again from the journal."""
    with Load(running_pipeline.url) as load, running_pipeline.client() as client:
        for _ in range(4):
            load.go_on(0.8)
            client.flushall()
        load.go_on(0.8)

    assert running_pipeline.exact() > 100


def test_redis_put_back_to_an_older_directory_under_load(
    running_pipeline: RunningPipeline, tmp_path: Path
) -> None:
    """Guarantee 9: what the copy lacks comes again, at the same offsets; consumers that were farther skip it."""
    with Load(running_pipeline.url) as load:
        load.go_on(0.5)
        running_pipeline.redis.copy_to(tmp_path / "older")
        for _ in range(2):
            load.go_on(1.5)
            running_pipeline.redis.restore(tmp_path / "older")
        load.go_on(0.5)

    assert running_pipeline.exact() > 100


def test_redis_away_for_some_seconds(running_pipeline: RunningPipeline) -> None:
    """Guarantee 13: everything catches up, and nobody knocks in a loop meanwhile."""
    with Load(running_pipeline.url) as load:
        load.go_on(0.5)
        before = running_pipeline.redis_proxy.accepted
        running_pipeline.redis.stop()
        load.go_on(5)
        attempts = running_pipeline.redis_proxy.accepted - before
        running_pipeline.redis.start()
        load.go_on(0.5)

    # A streamer and two consumers, on Spark in two tasks each; pauses of 0.1, 0.2, 0.4 … s, and two connections a time.
    assert 3 <= attempts <= 100
    assert running_pipeline.exact() > 100


def test_postgres_crashes_under_load(running_pipeline: RunningPipeline) -> None:
    """Guarantees 4 and 16: what was committed is there, what was under way is done again."""
    with Load(running_pipeline.url) as load:
        for _ in range(2):
            load.go_on(1)
            running_pipeline.postgres.kill()
            running_pipeline.postgres.start()
        load.go_on(1)

    assert running_pipeline.exact() > 100


def test_two_runs_at_once(running_pipeline: RunningPipeline) -> None:
    """Guarantees 3 and 5: two streamers and two of each consumer are slow, never wrong; one stops, the other goes on."""
    second = running_pipeline.run()
    with Load(running_pipeline.url) as load:
        load.go_on(6 if running_pipeline.engine == "inline" else 15)
        second.send_signal(signal.SIGTERM)
        load.go_on(1)

    assert second.wait(20) == 0
    assert running_pipeline.exact() > 100


def test_sparks_workers_killed_under_load(running_pipeline: RunningPipeline) -> None:
    """Guarantee 4: Spark starts a task again that is gone; what it had not committed, its successor does."""
    if running_pipeline.engine == "inline":
        pytest.skip("the inline engine has no workers beside its own process")
    killed = 0
    with Load(running_pipeline.url) as load:
        for _ in range(5):
            load.go_on(1.5)
            for worker in running_pipeline.spark_workers():
                os.kill(worker, signal.SIGKILL)
                killed += 1
        load.go_on(1.5)

    assert killed >= 5
    assert running_pipeline.exact() > 100


def test_sparks_checkpoints_deleted_between_and_during_runs(
    running_pipeline: RunningPipeline,
) -> None:
    """Guarantee 4: nothing leans on Spark's own directory."""
    if running_pipeline.engine == "inline":
        pytest.skip("the inline engine has no directory of its own")

    def deleted() -> int:
        found = list(running_pipeline.directory.glob("penstock-spark-*"))
        for directory in found:
            shutil.rmtree(directory, ignore_errors=True)
        return len(found)

    with Load(running_pipeline.url) as load:
        assert deleted() == 1
        load.go_on(5)  # beyond an epoch: Spark misses what it has written
        deleted()
        load.go_on(5)
    during = running_pipeline.exact()
    assert running_pipeline.stop() == 0
    deleted()
    running_pipeline.begin()

    eventually(lambda: running_pipeline.exact() > during, "it goes on", timeout_s=60)
