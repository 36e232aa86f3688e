"""The benchmark command, on its own servers: which cases there are, that they run, and how their figures go together.

How fast anything is depends on the machine, and no test asks for it.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from benchmarks import Case
from benchmarks.backlogs import FULL
from benchmarks.cases import all_cases
from benchmarks.command import _check_plot, app, choose_cases
from benchmarks.servers import BenchServers
from penstock.errors import InvalidSetting, Unknown

ROOT = Path(__file__).parents[2]
BENCH = (sys.executable, "-m", "benchmarks")


@pytest.fixture
def cases() -> Iterator[list[Case]]:
    with BenchServers() as servers:  # starts no server
        yield all_cases(servers, FULL)


def test_an_unknown_case_is_refused_with_the_list_of_cases(cases: list[Case]) -> None:
    with pytest.raises(Unknown, match=r"no case speed; there are: .*drain-200b-4"):
        choose_cases(cases, ["speed"])


def test_a_case_is_named_in_full_or_by_its_beginning(cases: list[Case]) -> None:
    drains = [case.name for case in choose_cases(cases, ["drain"])]
    named = [case.name for case in choose_cases(cases, ["stage-core-1000", "stage-orm-100"])]

    assert len(drains) > 1
    assert all(name.startswith("drain-") for name in drains)
    assert named == ["stage-orm-100", "stage-core-1000"]


def test_commands_in_the_docs_name_options_and_cases_that_exist(cases: list[Case]) -> None:
    pages = [page.read_text() for page in (ROOT / "docs").rglob("*.md")]
    commands = re.findall(r'make bench ARGS="(.*?)"', "\n".join(pages))

    assert commands
    for words in map(shlex.split, commands):
        if "--help" not in words:
            options = get_command(app).make_context("bench", words).params
            assert choose_cases(cases, options["only"] or [])


def test_a_plot_is_refused_before_anything_is_measured(cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(InvalidSetting, match="--plot needs matplotlib"):
        _check_plot(choose_cases(cases, ["latency-10"]))


def only(*cases: str) -> list[str]:
    return [word for case in cases for word in ("--only", case)]


def measure(directory: Path, *cases: str) -> dict[str, Any]:
    """Measures cases from another directory; returns what is printed of each.  None may fail."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*BENCH, "--quick", "--json", *only(*cases)],
        capture_output=True,
        text=True,
        check=False,
        cwd=directory,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["failed"] == []
    assert found["machine"]["cores"] >= 1
    assert {"python", "penstock-outbox", "postgres"} <= set(found["versions"])
    return {case["case"]: case for case in found["cases"]}


@pytest.mark.slow
def test_cases_run_and_their_figures_go_together(tmp_path: Path) -> None:
    cases = measure(tmp_path, *("limit-commit", "drain-200b-4", "latency-10", "cost-cpu"))
    drain = cases["drain-200b-4"]

    assert "limit-commit" in cases
    assert set(drain["limits"]) == {"select", "xadd"}
    assert drain["limit"] == min(each["value"] for each in drain["limits"].values())
    assert drain["ratio_to_limit"] == pytest.approx(drain["value"] / drain["limit"])
    assert cases["latency-10-p99"]["value"] >= cases["latency-10"]["value"]
    for half in ("publish", "consume"):  # the worker's and both servers'
        parts = [cases[f"cost-cpu-{half}-{who}"] for who in ("worker", "postgres", "redis")]
        whole = cases[f"cost-cpu-{half}"]
        assert whole["value"] == pytest.approx(sum(part["value"] for part in parts))
        assert {"plain entries", "zstd"} <= set(whole["variants"])


@pytest.mark.storm
def test_costs_are_compared_with_a_plain_row_and_a_plain_entry(tmp_path: Path) -> None:
    cases = measure(
        tmp_path,
        *("ick-reserve", "ick-block", "cost-wal", "cost-memory", "steady", "cost-idle"),
        *("consume-bulk", "stage-orm-100", "drain-removed"),
    )

    assert {"consume-bulk", "stage-orm-100", "drain-removed"} <= set(cases)
    assert set(cases["ick-reserve"]["limits"]) == {"zpopmin"}
    assert set(cases["steady-produced"]["limits"]) == {"producers alone"}
    for name in ("ick-block-add", "ick-block-reserve"):
        assert cases[f"{name}-p99"]["value"] <= cases[name]["value"]
    assert cases["cost-wal"]["value"] > cases["cost-wal-staged"]["value"]
    assert cases["cost-wal-staged"]["ratio_to_limit"] > 1
    assert 0.9 < cases["cost-memory"]["ratio_to_limit"] < 1.1
    assert cases["cost-memory"]["variants"]["plain entries"]["ratio"] < 1
    assert cases["cost-memory"]["variants"]["zstd"]["ratio"] > 1


@pytest.mark.storm
@pytest.mark.spark
@pytest.mark.timeout(400)
def test_cases_on_spark_run(tmp_path: Path) -> None:
    cases = measure(tmp_path, "spark-compare", "spark-drain-1", "spark-micro-batch")

    assert {"spark-compare-1", "spark-compare-2"} <= set(cases)
    assert set(cases["spark-drain-1"]["limits"]) == {"inline engine"}
    assert set(cases["spark-micro-batch"]["limits"]) == {"rate to noop"}


@pytest.mark.slow
def test_ctrl_c_prints_the_figures_so_far_and_names_the_other_cases() -> None:
    interrupted = subprocess.Popen(
        [*BENCH, "--quick", "--json", *only("limit-commit", "latency-10", "ick-reserve")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    assert interrupted.stderr is not None
    for line in interrupted.stderr:
        if line.startswith("latency-10:"):
            break
    os.killpg(interrupted.pid, signal.SIGINT)  # to every process, as a terminal does
    output, _ = interrupted.communicate(timeout=250)

    assert interrupted.returncode == 130
    found = json.loads(output)
    assert [case["case"] for case in found["cases"]] == ["limit-commit"]
    assert found["skipped"] == dict.fromkeys(["latency-10", "ick-reserve"], "interrupted by Ctrl-C")
    assert found["failed"] == []
