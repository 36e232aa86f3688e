"""What is calculated and drawn beside the figures: pictures, and a simulation of many streamers."""

from pathlib import Path

import pytest

from benchmarks import Outcome
from benchmarks.scaling import Costs, Machines, bound, simulate

COSTS = Costs(sequencer=0.8e-6, postgres=2.6e-6, python=3.4e-6, redis=2.3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("machines", [Machines(1, 1, 4), Machines(2, 4, 16), Machines(8, 1, 2)], ids=str)
def test_what_is_scarce_decides(machines: Machines) -> None:
    """One streamer, two, and a Postgres of two cores."""
    assert simulate(COSTS, machines) == pytest.approx(bound(COSTS, machines), rel=0.15)


def outcome(case: str, *runs: float) -> Outcome:
    return Outcome(case, "records/s", "more", runs[0], None, None, {}, {}, list(runs), {})


def test_a_plot_is_written_as_png_and_svg_and_is_reproducible(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: the group bench")
    from benchmarks.plot import draw  # noqa: PLC0415  needs matplotlib

    found = [
        *(outcome(f"backlog-streamer-{10**n}", 1000.0 * n, 900.0 * n) for n in (4, 5, 6)),
        *(outcome(f"latency-{rate}{suffix}", 4.0) for rate in (10, 1000) for suffix in ("", "-p99")),
    ]
    first = draw(found, tmp_path / "first", "a machine")
    second = draw(found, tmp_path / "second", "a machine")

    names = [path.name for path in first]
    assert names == ["backlog.png", "backlog.svg", "latency.png", "latency.svg"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert max(path.stat().st_size for path in first) < 60_000
