"""A server process that belongs to us: started apart from the terminal, ended with its owner, alone in its directory.

The two servers share what is hard about owning a process:

* **Ctrl-C** in a terminal goes to every process of the session.  Servers get a session of their own, so that their
  owner can stop its work first and the servers after it.
* **SIGKILL of the owner** cannot be caught.  A guard, a few kilobytes of ``sh``, waits at the end of a pipe whose other
  end only the owner holds, and ends the server when the pipe breaks.  (Linux' parent-death signal would fire when the
  *thread* that started the server ends, which is too early.)
* **Two owners of one directory** would ruin it.  The lock is an ``flock`` whose file descriptor the server inherits:
  it is free when the last process of the server is gone, and not before.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from penstock.errors import ServerUnavailable

GRACE_S = 10.0
"""How long a directory may still be held by the server of an owner that has just died."""

_GUARD = """
server=$1 signal=$2 sockets=$3
read -r _ && exit          # dismissed: the owner has ended the server itself
kill -s "$signal" "$server"
for _ in 1 2 3 4 5 6 7 8 9 10; do
    kill -0 "$server" || break
    sleep 1
done
kill -s KILL "$server"
rm -rf "$sockets"
"""
_PORTS = range(20_000, 32_000)  # below the ports that outgoing connections take


@dataclass(frozen=True, slots=True)
class Account:
    """The user and group that a server runs as."""

    user: int
    group: int


class DirectoryLock:
    """Held by the owner and, by inheritance, by every process of the server."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def take(self) -> int:
        """Take the lock, waiting a little for a server whose owner has just died, and return its file descriptor.

        Raises:
            ServerUnavailable: Another process goes on holding it.
        """
        if self._descriptor is not None:
            return self._descriptor
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + GRACE_S
        while not _flock(descriptor):
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise ServerUnavailable(self._in_use())
            time.sleep(0.05)
        self._descriptor = descriptor
        return descriptor

    def release(self) -> None:
        """Give the lock back, also for processes that inherited it."""
        if self._descriptor is None:
            return
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)
        self._descriptor = None

    def _in_use(self) -> str:
        directory = self._path.parent
        where = url_file(directory)
        hint = where.read_text().strip() if where.exists() else "see its owner's output"
        return (
            f"{directory} is in use: another process runs its server there.\n"
            f"Stop that process, take another directory, or use its server: {hint}"
        )


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
        with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
            self._process = subprocess.Popen(  # noqa: S603  the caller's own server
                [os.fspath(word) for word in command],
                cwd="/",
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[lock],
                start_new_session=True,
                **as_account(account),
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
        """Whether the server process still lives."""
        return self._process.poll() is None

    def end(self, how: signal.Signals, *, timeout_s: float = 60) -> None:
        """Ask the server to end, and insist with SIGKILL after ``timeout_s``."""
        if self.is_running():
            self._process.send_signal(how)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
        self._dismiss_guard()

    def kill(self) -> None:
        """SIGKILL for the server and all its children, at one moment; returns when they are gone."""
        if self.is_running():
            self._process.send_signal(signal.SIGSTOP)  # a stopped server cannot fork or react
            children = descendants(self.pid)
            self._process.kill()
            for child in children:
                _send(child, signal.SIGKILL)
            self._process.wait()
            _wait_until_gone(children)
        self._dismiss_guard()

    def _dismiss_guard(self) -> None:
        try:
            self._guard.communicate(b"done\n", timeout=10)
        except (BrokenPipeError, ValueError, subprocess.TimeoutExpired):
            self._guard.kill()
            self._guard.wait()


class Identity(TypedDict, total=False):
    """The keyword arguments of ``subprocess`` that change who the child is."""

    user: int
    group: int
    extra_groups: list[int]


def as_account(account: Account | None) -> Identity:
    """What gives up root's rights for those of ``account``; nothing when there is no account."""
    if account is None:
        return {}
    return {"user": account.user, "group": account.group, "extra_groups": []}


def environment() -> dict[str, str]:
    """Our environment without the variables that would steer a server or a client of Postgres."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")}


def descendants(pid: int) -> list[int]:
    """The processes below ``pid``, nearest first; empty where there is no ``/proc``."""
    parents = {child: parent for child, parent, _ in _process_table()}
    found = [pid]
    for ancestor in found:  # grows while we walk it
        found += [child for child, parent in parents.items() if parent == ancestor]
    return found[1:]


def is_alive(pid: int) -> bool:
    """Whether the process exists and is not merely waiting to be reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return not any(process == pid and state == "Z" for process, _, state in _process_table([pid]))


def free_port() -> int:
    """A loopback port that nobody listens on, out of the range of outgoing connections, so that it stays free."""
    while True:
        port = secrets.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def private_socket_directory(owner: object, account: Account | None) -> Path:
    """A new directory that only we and ``account`` can enter, with a path short enough for sockets.

    It is removed when ``owner`` is.
    """
    home = tempfile.gettempdir()
    if account is not None or len(home) > 60:  # noqa: PLR2004  a socket's path has at most 107 bytes
        home = "/tmp"  # noqa: S108  mkdtemp's directory is 0700 and unguessable
    directory = Path(tempfile.mkdtemp(prefix="penstock-", dir=home))
    hand_over(directory, account)
    weakref.finalize(owner, _remove_if_ours, directory, os.getpid())
    return directory


def hand_over(path: Path, account: Account | None) -> None:
    """Make ``account`` the owner of a file, or of a directory and all that is in it."""
    if account is None:
        return
    os.chown(path, account.user, account.group)
    for directory, folders, files in os.walk(path):
        for name in (*folders, *files):
            os.chown(Path(directory, name), account.user, account.group, follow_symlinks=False)


def url_file(directory: Path) -> Path:
    """Where the URL of the server of ``directory`` is written down, for people and for error messages."""
    return directory / "url"


def note_url(directory: Path, url: str) -> None:
    """Write the URL down, readable for the owner alone: it may hold a password."""
    path = url_file(directory)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(url + "\n")


def last_words(log: Path, lines: int = 8) -> str:
    """The end of a server's log, for an error message."""
    if not log.exists():
        return "(it wrote no log)"
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def merged(defaults: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
    """Settings with the wanted ones in front of the defaults."""
    return {**defaults, **wanted}


def _flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _process_table(pids: Iterable[int] | None = None) -> list[tuple[int, int, str]]:
    """(process, its parent, its state) from ``/proc``."""
    names = [str(pid) for pid in pids] if pids else [p.name for p in _proc_entries()]
    table = []
    for name in names:
        try:
            after_name = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended while we looked, or there is no /proc
            continue
        table.append((int(name), int(after_name[1]), after_name[0]))
    return table


def _proc_entries() -> list[Path]:
    proc = Path("/proc")
    return [entry for entry in proc.iterdir() if entry.name.isdigit()] if proc.is_dir() else []


def _wait_until_gone(pids: Iterable[int], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    for pid in pids:
        while is_alive(pid) and time.monotonic() < deadline:
            time.sleep(0.01)


def _send(pid: int, which: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, which)


def _remove_if_ours(directory: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a fork of the owner
        shutil.rmtree(directory, ignore_errors=True)
