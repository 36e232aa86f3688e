"""A streamer whose server is away waits, longer each time."""

from pathlib import Path
from time import monotonic

import pytest
from structlog.testing import capture_logs

from penstock import Pipeline
from penstock.streaming import RoundResult, Streamer
from penstock.streaming.share import pause_after


def test_the_pauses_double_and_are_waited_out(flow: Pipeline, database_url: str, tmp_path: Path) -> None:
    began = monotonic()
    with capture_logs() as logs:

        def pauses() -> list[float]:
            return [entry["retry_s"] for entry in logs if entry["event"] == "waiting"]

        Streamer(flow, database_url, f"unix://{tmp_path}/none.sock?db=0").run(lambda: len(pauses()) == 3)

    assert pauses() == [0.1, 0.2, 0.4]
    assert monotonic() - began >= 0.3


@pytest.mark.parametrize(
    ("done", "expected_ms"),
    [
        (RoundResult(sequenced=2, added=2), 0.5),
        (RoundResult(sequenced=30, added=30), 3.0),
        (RoundResult(sequenced=5000, added=5000), 5.0),
        (RoundResult(sequenced=5000, added=500, backlog=4500), 0.0),
        (RoundResult(), 3.0),
    ],
    ids=["few", "many", "a flood", "a backlog", "none"],
)
def test_the_more_records_come_the_more_of_them_a_round_takes(done: RoundResult, expected_ms: float) -> None:
    assert pause_after(done, pause_s=0.002, idle_s=0.025) * 1000 == pytest.approx(expected_ms)
