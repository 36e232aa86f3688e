"""Plots: which cases have one, which files are written, and the error when matplotlib is missing."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import Outcome

ROOT = Path(__file__).parents[2]


def outcome(case: str, *runs: float) -> Outcome:
    return Outcome(case, "records/s", "more", runs[0], None, None, {}, {}, list(runs), {})


def test_a_plot_is_written_as_png_and_svg_and_is_reproducible(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: the group bench")
    from benchmarks.plot import draw  # noqa: PLC0415  needs matplotlib

    found = [
        *(outcome(f"backlog-streamer-{10**n}", 1000.0 * n, 900.0 * n) for n in (4, 5, 6)),
        *(
            outcome(f"latency-{rate}{suffix}", 4.0)
            for rate in (10, 1000)
            for suffix in ("", "-p99")
        ),
    ]
    first = draw(found, tmp_path / "first", "a machine")
    second = draw(found, tmp_path / "second", "a machine")

    names = [path.name for path in first]
    assert names == ["backlog.png", "backlog.svg", "latency.png", "latency.svg"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert max(path.stat().st_size for path in first) < 60_000


def bench_without_matplotlib(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = (
        "import sys; sys.modules['matplotlib'] = None; from benchmarks.command import main; main()"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


def test_without_matplotlib_a_plot_is_refused_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    done = bench_without_matplotlib("--only", "latency-10", "--plot", str(tmp_path / "pictures"))

    assert done.returncode == 2
    assert "--plot needs matplotlib: type .venv/bin/uv pip install --group bench" in done.stderr
    assert not (tmp_path / "pictures").exists()


def test_without_matplotlib_everything_else_goes_on() -> None:
    done = bench_without_matplotlib("--list", "--only", "backlog")

    assert done.returncode == 0
    assert "backlog-streamer-10000000" in done.stdout
