"""The benchmark command, on its own servers."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from benchmarks.backlogs import FULL
from benchmarks.cases import all_cases
from benchmarks.command import app, choose_cases
from benchmarks.servers import BenchServers

ROOT = Path(__file__).parents[2]
BENCH = (sys.executable, "-m", "benchmarks")

pytestmark = pytest.mark.xdist_group("bench")  # they share a run


def bench(
    *arguments: str, cwd: Path = ROOT, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*BENCH, *arguments], capture_output=True, text=True, check=False, cwd=cwd, env=env
    )


def only(*cases: str) -> list[str]:
    return [word for case in cases for word in ("--only", case)]


@pytest.fixture(scope="module")
def report() -> subprocess.CompletedProcess[str]:
    chosen = (
        *("limit-commit", "drain-200b-4", "consume-bulk", "stage-orm-100", "latency-10"),
        *("cost-cpu", "drain-removed"),
    )
    return bench("--quick", "--json", *only(*chosen))


@pytest.fixture(scope="module")
def more() -> subprocess.CompletedProcess[str]:
    """What ``make storm`` looks at."""
    return bench(
        "--quick", "--json", *only("ick-reserve", "ick-block", "cost-wal", "cost-memory", "steady")
    )


@pytest.mark.slow
def test_it_prints_one_object(report: subprocess.CompletedProcess[str]) -> None:
    assert report.returncode == 0, report.stderr
    found = json.loads(report.stdout)
    cases = {case["case"]: case for case in found["cases"]}

    assert found["machine"]["cores"] >= 1
    assert {"python", "penstock", "postgres"} <= set(found["versions"])
    assert {"limit-commit", "drain-200b-4", "consume-bulk", "stage-orm-100"} <= set(cases)
    for case in cases.values():
        assert {"case", "unit", "value", "limit", "ratio_to_limit", "peers", "runs"} <= set(case)
        assert case["value"] > 0


@pytest.mark.slow
def test_a_figure_is_printed_with_its_limits(report: subprocess.CompletedProcess[str]) -> None:
    cases = {case["case"]: case for case in json.loads(report.stdout)["cases"]}
    drain = cases["drain-200b-4"]

    assert set(drain["limits"]) == {"select", "xadd"}
    assert drain["limit"] == min(each["value"] for each in drain["limits"].values())
    assert drain["ratio_to_limit"] == pytest.approx(drain["value"] / drain["limit"])
    assert cases["latency-10-p99"]["value"] >= cases["latency-10"]["value"]


@pytest.mark.storm
def test_an_ick_is_compared_with_plain_sorted_set_commands(
    more: subprocess.CompletedProcess[str],
) -> None:
    cases = {case["case"]: case for case in json.loads(more.stdout)["cases"]}

    assert set(cases["ick-reserve"]["limits"]) == {"zpopmin"}
    for name in ("ick-block-add", "ick-block-reserve"):
        assert 0 < cases[f"{name}-p99"]["value"] <= cases[name]["value"]
        assert cases[f"{name}-clock"]["value"] > 0


@pytest.mark.storm
def test_the_cost_of_a_record_is_compared_with_a_plain_row_and_a_plain_entry(
    more: subprocess.CompletedProcess[str],
) -> None:
    cases = {case["case"]: case for case in json.loads(more.stdout)["cases"]}

    assert cases["cost-wal"]["value"] > cases["cost-wal-staged"]["value"]
    assert cases["cost-wal-staged"]["ratio_to_limit"] > 1
    assert 0.9 < cases["cost-memory"]["ratio_to_limit"] < 1.1
    assert cases["cost-memory"]["variants"]["plain entries"]["ratio"] < 1
    assert cases["cost-memory"]["variants"]["zstd"]["ratio"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("half", ["publish", "consume"])
def test_the_processor_time_of_a_record_is_that_of_the_worker_and_of_both_servers(
    report: subprocess.CompletedProcess[str], half: str
) -> None:
    cases = {case["case"]: case for case in json.loads(report.stdout)["cases"]}
    parts = [cases[f"cost-cpu-{half}-{who}"] for who in ("worker", "postgres", "redis")]
    whole = cases[f"cost-cpu-{half}"]

    assert whole["value"] == pytest.approx(sum(part["value"] for part in parts))
    assert all(part["value"] > 0 for part in parts)
    assert {"plain entries", "zstd"} <= set(whole["variants"])
    assert parts[-1]["variants"]["plain entries"]["ratio"] < 1  # Redis has fewer entries


@pytest.mark.storm
def test_throughput_under_load_is_compared_with_producers_alone(
    more: subprocess.CompletedProcess[str],
) -> None:
    cases = {case["case"]: case for case in json.loads(more.stdout)["cases"]}

    assert 0 < cases["steady"]["value"] <= cases["steady-produced"]["value"]
    assert set(cases["steady-produced"]["limits"]) == {"producers alone"}


@pytest.mark.slow
def test_a_drain_that_removes_everything_is_compared_with_one_that_removes_nothing(
    report: subprocess.CompletedProcess[str],
) -> None:
    cases = {case["case"]: case for case in json.loads(report.stdout)["cases"]}

    assert cases["drain-removed"]["limits"]["nothing else"]["value"] > 0


@pytest.mark.storm
@pytest.mark.spark
@pytest.mark.timeout(400)
def test_spark_compares_with_one_and_with_two_concurrent_tasks() -> None:
    done = bench("--quick", "--json", "--only", "spark-compare")

    assert done.returncode == 0, done.stderr
    cases = {case["case"]: case for case in json.loads(done.stdout)["cases"]}
    assert cases["spark-compare-1"]["value"] > 0
    assert cases["spark-compare-2"]["value"] > 0


@pytest.mark.storm
def test_idle_workers_use_some_processor_time() -> None:
    done = bench("--quick", "--json", "--only", "cost-idle-streamer")

    cases = {case["case"]: case for case in json.loads(done.stdout)["cases"]}
    assert cases["cost-idle-streamer"]["value"] > 0
    assert cases["cost-idle-streamer-servers"]["value"] > 0


def test_an_unknown_case_is_refused_with_the_list_of_cases() -> None:
    done = bench("--only", "speed")

    assert done.returncode == 2
    assert "drain-200b-4" in done.stderr


def test_the_cases_can_be_listed_without_measuring() -> None:
    done = bench("--list", "--only", "drain", "--json")

    names = [case["case"] for case in json.loads(done.stdout)]
    assert names
    assert all(name.startswith("drain-") for name in names)


def test_the_full_name_of_a_case_selects_only_that_case() -> None:
    done = bench("--list", "--only", "stage-orm-100", "--only", "stage-core-1000", "--json")

    assert [case["case"] for case in json.loads(done.stdout)] == [
        "stage-orm-100",
        "stage-core-1000",
    ]


@pytest.mark.storm
@pytest.mark.spark
@pytest.mark.timeout(400)
def test_the_spark_engine_is_compared_with_inline_and_its_micro_batch_with_sparks_own() -> None:
    done = bench("--quick", "--json", *only("spark-drain-1", "spark-micro-batch"))

    assert done.returncode == 0, done.stderr
    cases = {case["case"]: case for case in json.loads(done.stdout)["cases"]}
    assert cases["spark-drain-1"]["limits"]["inline engine"]["value"] > 0
    assert cases["spark-micro-batch"]["limits"]["rate to noop"]["value"] > 0
    assert cases["spark-micro-batch-p99"]["value"] >= cases["spark-micro-batch"]["value"]


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
    output, _ = interrupted.communicate(timeout=60)

    assert interrupted.returncode == 130
    found = json.loads(output)
    assert [case["case"] for case in found["cases"]] == ["limit-commit"]
    assert found["skipped"] == dict.fromkeys(["latency-10", "ick-reserve"], "interrupted by Ctrl-C")
    assert found["failed"] == []


@pytest.mark.slow
def test_child_processes_find_the_benchmarks_from_another_directory(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

    done = bench(
        "--quick", "--json", *only("steady"), cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["cases"][0]["value"] > 0


def test_make_starts_it_with_its_arguments() -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "bench", "ARGS=--list --json"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )

    assert done.stdout.splitlines()[-1].endswith("bin/python -m benchmarks --list --json")


@pytest.mark.parametrize("page", ["reference/bench.md", "explanation/icks.md"])
def test_commands_in_the_docs_name_options_and_cases_that_exist(page: str) -> None:
    commands = re.findall(r'make bench ARGS="(.*?)"', (ROOT / "docs" / page).read_text())
    with BenchServers() as servers:  # starts no server
        cases = all_cases(servers, FULL)

    assert commands
    for words in map(shlex.split, commands):
        if "--help" not in words:
            options = get_command(app).make_context("bench", words).params
            assert choose_cases(cases, options["only"] or [])
