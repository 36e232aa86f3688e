"""Processes of the demo: they end with it, and those that crash are started again."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import IO

import psutil  # type: ignore[import-untyped]  # it ships no types

from penstock.demo.mischief import CRASHED

_DIES_WITH = (0, 1, CRASHED, -signal.SIGKILL, -signal.SIGTERM)
"""Exit codes of what is started again: it crashed, was killed, or lost a worker too often."""

LAST_WORDS = 5
"""Lines that are told of a process that cannot run."""


class Supervised:
    """A command of Penstock that is started again, at once, when it crashes or is killed.

    Attributes:
        failure: Why it cannot run; None as long as it can.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.failure: str | None = None
        self._command, self._environment = command, environment
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="supervisor", daemon=True)

    @property
    def pid(self) -> int | None:
        """Number of the process, if it runs."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def end(self, patience_s: float) -> None:
        """Ends it: with SIGKILL after ``patience_s`` seconds."""
        self._ended.set()
        end(self._process, patience_s)

    def _supervise(self) -> None:
        while not self._ended.is_set():
            # Not to the terminal, which is the demo's: its last words are kept for the case that it cannot run.
            with tempfile.TemporaryFile() as words:
                self._process = leashed(["penstock", *self._command], self._environment, words)
                code = self._process.wait()
                if code not in _DIES_WITH:
                    self.failure = f"penstock {self._command[0]} ended with exit code {code}\n{last_words(words)}"
                    return
            self._ended.wait(0.1)


def leashed(
    command: Sequence[str],
    environment: Mapping[str, str],
    words: IO[bytes] | None = None,
    answer: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Runs a module in a process that ends with this one, whatever ends this one.

    Args:
        command: The module and its arguments.
        environment: Of the process.
        words: Where its standard error goes.
        answer: Where its standard output goes.
    """
    return subprocess.Popen(  # noqa: S603  our own
        [sys.executable, "-m", "penstock.demo.leashed", *command],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=answer,
        stderr=words,
        start_new_session=True,
    )


def last_words(words: IO[bytes]) -> str:
    """The end of what a process wrote."""
    words.seek(0)
    return "\n".join(words.read().decode(errors="replace").strip().splitlines()[-LAST_WORDS:])


def end(process: subprocess.Popen[bytes] | None, patience_s: float) -> None:
    """SIGTERM, and SIGKILL for what does not end in time: with all that it has started."""
    if process is None or process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def busy_workers(pid: int) -> list[int]:
    """The Python workers of a Spark application that a long task runs in; none if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(pid).children(recursive=True)
        return [child.pid for child in children if _is_busy_worker(child)]
    return []


def _is_busy_worker(process: psutil.Process) -> bool:
    try:
        is_worker = "pyspark.daemon" in process.cmdline() and not process.children()
        return is_worker and bool(process.net_connections("tcp"))
    except psutil.Error:
        return False
