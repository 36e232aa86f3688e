"""A streamer whose server is away waits, longer each time."""

from pathlib import Path
from time import monotonic

from structlog.testing import capture_logs

from penstock import Pipeline
from penstock.streaming import Streamer


def run_without_redis(flow: Pipeline, database_url: str, tmp_path: Path, seconds: float) -> list[float]:
    """Runs a streamer for so many seconds; returns the pauses that it has logged."""
    end = monotonic() + seconds
    with capture_logs() as logs:
        Streamer(flow, database_url, f"unix://{tmp_path}/none.sock?db=0").run(lambda: monotonic() >= end)
    return [entry["retry_s"] for entry in logs if entry["event"] == "waiting"]


def test_the_pauses_double_and_are_waited_out(flow: Pipeline, database_url: str, tmp_path: Path) -> None:
    pauses = run_without_redis(flow, database_url, tmp_path, 0.6)

    assert pauses == [0.1, 0.2, 0.4][: len(pauses)]
    assert pauses
