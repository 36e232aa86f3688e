"""Commands on a standalone cluster: a job of ``spark-submit``, which shows no password anywhere, and a reconciliation."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it ships no types
import pytest

from cli.test_secrets import PASSWORD, guarded, secret_redis  # noqa: F401  the same servers
from fixtures.bank import open_bank
from fixtures.command_line import CommandLine
from fixtures.spark_cluster import SPARK_HOME, SparkCluster, running_cluster
from penstock import Log
from penstock.database.connections import Connection
from penstock.spark.submission import find_java
from penstock.testing import eventually

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600), pytest.mark.xdist_group("cluster")]

SCRIPT = """
from penstock.cli.app import main

main()
"""
DEAD_LETTERS = "SELECT count(*) FROM penstock.dead_letters"


@pytest.fixture(scope="module")
def cluster() -> Iterator[SparkCluster]:
    """Three JVMs, and those of the executors: they show where the tasks run."""
    with running_cluster(workers=2, cores=1) as made:
        yield made


def test_a_submitted_pipeline_runs_on_its_cluster_and_shows_no_password(
    guarded: CommandLine,  # noqa: F811  the fixture
    cluster: SparkCluster,
    connection: Connection,
    tmp_path: Path,
) -> None:
    (guarded.directory / "job.py").write_text(SCRIPT)
    command = [str(SPARK_HOME / "bin" / "spark-submit"), "--master", cluster.url]
    command += ["--conf", "spark.executor.memory=512m", "--conf", "spark.ui.port=0"]
    command += ["--conf", "spark.eventLog.enabled=true"]
    command += ["--conf", f"spark.eventLog.dir={cluster.directory}"]
    command += ["job.py", "run", "--app", "shop:pipeline", "--log-level", "debug"]
    printed = tmp_path / "printed"
    with printed.open("wb") as output:
        submitted = subprocess.Popen(
            command,
            cwd=guarded.directory,
            env=guarded.environment | {"JAVA_HOME": str(find_java()), "PYSPARK_PYTHON": sys.executable},
            stdout=output,
            stderr=output,
        )
    try:
        eventually(
            lambda: connection.execute(DEAD_LETTERS).fetchone() == (4,) or submitted.poll() is not None,
            "the records have been delivered",
            timeout_s=300,
        )
        assert submitted.poll() is None, printed.read_text()
        assert cluster.executors("w1")
        tree = psutil.Process(submitted.pid).children(recursive=True)
        everything = [*tree, *psutil.Process().children(recursive=True)]
        lines = [" ".join(read_command(each)) for each in everything]
        shown = "\n".join([*lines, read_environment(printed.read_text())])
        assert PASSWORD not in shown
        assert "executorEnv.PENSTOCK_DATABASE_URL" in shown  # it is there, redacted

        [driver] = [each for each in tree if is_driver(read_command(each))]
        driver.send_signal(signal.SIGTERM)
        assert submitted.wait(180) == 0, printed.read_text()
    finally:
        submitted.kill()
        submitted.wait()
    written = [path for path in cluster.directory.rglob("*") if path.is_file()]
    assert len(written) >= 4
    for path in [printed, *written]:
        assert PASSWORD.encode() not in path.read_bytes(), path


def read_command(process: psutil.Process) -> list[str]:
    """Its command line; nothing if it has ended."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def is_driver(command: list[str]) -> bool:
    return len(command) > 1 and command[1].endswith("job.py")


def read_environment(log: str) -> str:
    """What Spark's UI shows of the driver's settings."""
    found = re.search(r"http://[^\s\"']+:\d+", log)
    assert found is not None, log
    with urllib.request.urlopen(f"{found[0]}/api/v1/applications") as reply:
        [application] = re.findall(r'"id" : "([^"]+)"', reply.read().decode())
    url = f"{found[0]}/api/v1/applications/{application}/environment"
    with urllib.request.urlopen(url) as reply:
        return str(reply.read().decode())


@pytest.mark.storm
def test_reconciliation_runs_on_two_workers(
    penstock: CommandLine, connection: Connection, things: Log, cluster: SparkCluster
) -> None:
    open_bank(penstock, connection, things)
    assert penstock("consume", "copies", "--drain").returncode == 0
    connection.execute("DELETE FROM public.copies WHERE number = 7")
    before = {*cluster.directory.glob("w*/app-*/*/stderr")}

    on_cluster = ("--master", cluster.url, "--conf", "spark.executor.memory=512m")
    repaired = penstock("reconcile", "--apply", "--json", *on_cluster)

    assert repaired.returncode == 0, repaired.stderr
    assert json.loads(repaired.stdout)[0]["repaired"] == 1
    assert len({*cluster.directory.glob("w*/app-*/*/stderr")} - before) >= 2
