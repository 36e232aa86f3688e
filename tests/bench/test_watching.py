"""What the benchmarks observe of other processes: when records arrived, and how much of a backlog is done."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import NotMeasured
from benchmarks.cases.spark import epochs
from benchmarks.watching import arrivals, run_engine
from benchmarks.watching.processes import start_process

ROOT = Path(__file__).parents[2]


def test_complete_lines_are_read_and_a_partial_line_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "arrivals"
    monkeypatch.setenv(arrivals.FILE, str(path))
    arrivals._file.cache_clear()
    assert arrivals.read_notes(path) == {}

    arrivals.note([1, 2])
    arrivals.note([3])
    with path.open("a") as file:
        file.write("17.5 4")
    arrivals._file.cache_clear()

    found = arrivals.read_notes(path)
    assert set(found) == {1, 2, 3}
    assert found[1] == found[2] <= found[3]


def test_a_rate_counts_from_the_first_record_seen_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([0, 0, 120, 150, 200])
    now = [0.0]
    monkeypatch.setattr(epochs, "monotonic", lambda: now[0])
    monkeypatch.setattr(epochs, "sleep", lambda _seconds: now.append(now.pop() + 1))

    assert epochs.measure_rate(lambda: next(seen), 200) == {"": 80.0}
    assert next(seen, None) is None


def test_a_run_that_ended_before_it_was_seen_is_not_measured() -> None:
    with pytest.raises(NotMeasured):
        epochs.measure_rate(lambda: 200, 200)


def test_an_engine_that_needs_more_cores_than_there_are_is_not_measured() -> None:
    with (
        pytest.raises(NotMeasured, match="10000 cores are needed, there are"),
        run_engine("inline", "postgresql://nowhere", "redis://nowhere", cores=10_000),
    ):
        pass


@pytest.mark.slow
def test_a_process_that_fails_to_start_fails_only_its_case() -> None:
    with pytest.raises(NotMeasured, match="ended while it was starting"), start_process(print):
        pass


SESSIONS = """
from benchmarks.cases.spark import session
from benchmarks.interrupts import remember_interrupts
from benchmarks.servers import BenchServers

stopped = []

def stop(spark):
    stopped.append(spark)
    spark.stop()

session._stop = stop
with remember_interrupts(), BenchServers() as servers:  # starts no server
    first = session.get_session(servers, 1)
    assert session.get_session(servers, 1) is first
    second = session.get_session(servers, 2)
    assert stopped == [first]
assert stopped == [first, second]
"""


@pytest.mark.slow
@pytest.mark.spark
def test_each_spark_session_is_stopped_once() -> None:
    """In a process of its own: the session of this one is that of other tests."""
    done = subprocess.run([sys.executable, "-c", SESSIONS], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
