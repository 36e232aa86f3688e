"""The end of Spark's Python workers: Spark closes their connections, and nobody is to read of it."""

import os
import socket
import struct
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil  # type: ignore[import-untyped]  # it ships no types
import pytest

from penstock.testing import eventually

pytestmark = pytest.mark.slow  # processes of Python that import PySpark


def end_of_a_worker(module: str, directory: str) -> str:
    """Starts a daemon as Spark does, has it fork a worker, and closes the worker's connection; returns what they print."""
    daemon = subprocess.Popen(
        [sys.executable, "-m", module, "pyspark.worker"],
        env=os.environ
        | {
            "PYTHON_UNIX_DOMAIN_ENABLED": "true",
            "PYTHON_WORKER_FACTORY_SOCK_DIR": directory,
            "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "1",
            "SPARK_REUSE_WORKER": "1",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert daemon.stdout is not None
    try:
        (length,) = struct.unpack("!i", daemon.stdout.read(4))
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(daemon.stdout.read(length).decode())
            (worker,) = struct.unpack("!i", connection.recv(4))
        eventually(lambda: not psutil.pid_exists(worker), "the worker ends", timeout_s=90)
        _, said = daemon.communicate(timeout=30)  # closes its standard input, which ends it
    finally:
        daemon.kill()
    return said.decode()


@pytest.mark.parametrize(("module", "prints"), [("penstock.spark.daemon", False), ("pyspark.daemon", True)])
def test_a_worker_whose_connection_spark_has_closed_ends_quietly(module: str, *, prints: bool) -> None:
    """Once Spark's own daemon does as well, ours is not needed any more."""
    with TemporaryDirectory(prefix="d-") as directory:
        said = end_of_a_worker(module, directory)

    assert ("BrokenPipeError" in said) is prints
    assert bool(said) is prints


def test_the_daemon_starts_no_thread_before_it_forks() -> None:
    """PyArrow would."""
    threads = "len(os.listdir('/proc/self/task'))" if Path("/proc/self/task").exists() else "1"
    done = subprocess.run(
        [sys.executable, "-c", f"import os, sys, penstock.spark.daemon as d; d.preload(); print('pyarrow' in sys.modules, {threads})"],
        capture_output=True,
        text=True,
        check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["False", "1"]
