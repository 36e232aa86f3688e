"""Reconciliation on a standalone Spark cluster: a master and two workers, each its own process."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

from cli.test_reconcile_command import bank  # noqa: F401  the same application
from fixtures.command_line import CommandLine
from penstock.database.connections import Connection
from penstock.spark.java import find_java
from penstock.testing import eventually

pytestmark = [pytest.mark.spark, pytest.mark.chaos, pytest.mark.timeout(300)]

SPARK = Path(pyspark.__file__).parent / "bin" / "spark-class"


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    """The URL of a cluster with two workers."""
    environment = {
        **os.environ,
        "JAVA_HOME": str(find_java()),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_WORKER_DIR": str(tmp_path / "work"),
        "SPARK_DAEMON_MEMORY": "256m",
    }
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, role: str, *arguments: str) -> Path:
        words = tmp_path / f"{name}.log"
        with words.open("wb") as out:
            command = [str(SPARK), f"org.apache.spark.deploy.{role}", "--host", "127.0.0.1"]
            processes.append(
                subprocess.Popen([*command, *arguments], env=environment, stdout=out, stderr=out)
            )
        return words

    def said(words: Path, what: str) -> str | None:
        found = re.search(what, words.read_text())
        return found[0] if found else None

    try:
        words = start("master", "master.Master", "--port", "0", "--webui-port", "0")
        address = r"spark://127\.0\.0\.1:\d+"
        eventually(lambda: said(words, address) is not None, "the master is up", timeout_s=180)
        url = str(said(words, address))
        for number in range(2):
            start(
                f"worker-{number}", "worker.Worker", "--webui-port", "0", "-c", "1", "-m", "1g", url
            )
        eventually(
            lambda: words.read_text().count("Registering worker") == 2, "two workers", timeout_s=180
        )
        yield url
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)


@pytest.mark.parametrize("bank", ["spark"], indirect=True)
def test_reconciliation_runs_on_two_workers(
    bank: CommandLine,  # noqa: F811  the fixture
    connection: Connection,
    master: str,
    tmp_path: Path,
) -> None:
    assert bank("consume", "copies", "--drain").returncode == 0
    connection.execute("DELETE FROM public.copies WHERE number = 7")
    conf = ("--conf", "spark.executor.memory=512m", "--conf", "spark.executor.cores=1")

    repaired = bank("reconcile", "--apply", "--json", "--master", master, *conf)

    assert repaired.returncode == 0, repaired.stderr
    assert json.loads(repaired.stdout)[0]["repaired"] == 1
    assert len(list((tmp_path / "work").glob("app-*/*/stderr"))) >= 2
