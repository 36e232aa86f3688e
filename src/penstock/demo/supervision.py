"""The processes of the demo: they end with it, and are restarted when they crash."""

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import IO

import httpx
import psutil  # type: ignore[import-untyped]  # it ships no types

from penstock.demo.rides import CRASHED
from penstock.embedded.processes import free_port

_RESTARTED = (0, 1, CRASHED, -signal.SIGKILL, -signal.SIGTERM)
"""Exit codes after which a command is restarted.

It crashed, was killed, or lost a worker too often.
"""

RATE = "PENSTOCK_DEMO_RATE"
"""Environment variable: share of requests recruited for each chore that moves records."""

LAST_LINES = 5
"""Number of lines of stderr that are shown if a process cannot run."""


class SupervisedProcess:
    """A module that is restarted when it crashes or is killed, until it has a ``failure``."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.failure: str | None = None
        self._command, self._environment = command, environment
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="supervisor", daemon=True)

    @property
    def pid(self) -> int | None:
        """Process id; None if it does not run."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> None:
        """Starts the command."""
        self._thread.start()

    def end(self, timeout_s: float) -> None:
        """Stops it: with SIGTERM, and with SIGKILL after ``timeout_s`` seconds."""
        self._ended.set()
        end(self._process, timeout_s)

    def _supervise(self) -> None:
        while not self._ended.is_set():
            # The terminal shows the demo's own table; stderr is kept for the case that the command
            # cannot run.
            with tempfile.TemporaryFile() as stderr:
                self._process = start_child(self._command, self._environment, stderr)
                code = self._process.wait()
                assert self._process.stdin is not None
                self._process.stdin.close()
                if code not in _RESTARTED:
                    self.failure = (
                        f"{' '.join(self._command[:2])} ended with exit code "
                        f"{code}\n{last_lines(stderr)}"
                    )
                    return
            self._ended.wait(0.1)


def start_child(
    command: Sequence[str],
    environment: Mapping[str, str],
    stderr: IO[bytes] | None = None,
    stdout: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Runs a module in a process that ends with this one, however this one ends."""
    return subprocess.Popen(  # noqa: S603  our own
        [sys.executable, "-m", "penstock.demo.supervision", *command],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


def last_lines(output: IO[bytes]) -> str:
    """Returns the last ``LAST_LINES`` lines that a process wrote."""
    output.seek(0)
    return "\n".join(output.read().decode(errors="replace").strip().splitlines()[-LAST_LINES:])


def end(process: subprocess.Popen[bytes] | None, timeout_s: float) -> None:
    """Sends SIGTERM, and after ``timeout_s`` seconds SIGKILL to the whole process group."""
    if process is None or process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.stdin is not None
    process.stdin.close()


def busy_workers(pid: int) -> list[int]:
    """Returns the process ids of a Spark application's Python workers that run a long task.

    None if it has ended.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(pid).children(recursive=True)
        return [child.pid for child in children if _is_busy_worker(child)]
    return []


def _is_busy_worker(process: psutil.Process) -> bool:
    try:
        is_worker = "penstock.spark.daemon" in process.cmdline() and not process.children()
        return is_worker and bool(process.net_connections("tcp"))
    except psutil.Error:
        return False


class ApiProcesses:
    """The processes of the API: supervised, and counted."""

    def __init__(self, environment: dict[str, str], count: int) -> None:
        """Starts nothing yet."""
        ports = [free_port() for _ in range(count)]
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        self.processes = [
            SupervisedProcess(["penstock.demo.api"], {**environment, "PORT": str(port)})
            for port in ports
        ]
        self._counts: dict[int, dict[str, int]] = {}

    def start(self) -> None:
        """Starts them."""
        for process in self.processes:
            process.start()

    def count(self) -> dict[str, int]:
        """Adds up the counters of the recruits.

        The last moments of a killed process are missing.
        """
        for url in self.urls:
            try:
                counters = httpx.get(f"{url}/recruits", timeout=2).json()
            except httpx.TransportError:
                continue
            self._counts[counters.pop("process")] = counters
        names = ("recruited", "finished", "aborted", "failed")
        return {name: sum(counts[name] for counts in self._counts.values()) for name in names}


def check_health(urls: Sequence[str]) -> None:
    """Sends cheap requests, which recruit like all others."""
    for number in range(20):
        try:
            httpx.get(f"{urls[number % len(urls)]}/health", timeout=10)
        except httpx.TransportError:
            return


def _watch_parent() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Runs a module that ends with its parent.

    ``python -m penstock.demo.supervision MODULE ARGUMENT…``.

    Its standard input is a pipe held open by the parent.  When the parent ends, even by SIGKILL,
    the pipe closes, and the whole process group is killed, including Spark's JVM.
    """
    threading.Thread(target=_watch_parent, name="parent watch", daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
