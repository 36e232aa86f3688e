"""The directory of a server: who holds it, who owns its files, and what is written there for people.

Two servers in one directory would destroy its data.  The lock is an ``flock`` whose file descriptor the server process
inherits, so it is released when the last process of the server has exited, and not before.
"""

import fcntl
import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path

from penstock.embedded.ownership import open_own, read_own
from penstock.embedded.processes import Account
from penstock.errors import ServerUnavailable

GRACE_S = 10.0
"""How long to wait for a directory that is still held by a server whose owner has just died."""


class DirectoryLock:
    """A lock on a directory, held by the owner and, through inheritance, by every process of the server."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def take(self) -> int:
        """Take the lock and return its file descriptor; wait ``GRACE_S`` if another process holds it.

        Raises:
            ServerUnavailable: Another process still holds it.
        """
        if self._descriptor is not None:
            return self._descriptor
        descriptor = open_own(self._path, os.O_RDWR | os.O_CREAT)
        deadline = time.monotonic() + GRACE_S
        while not _flock(descriptor):
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise ServerUnavailable(self._in_use())
            time.sleep(0.05)
        self._descriptor = descriptor
        return descriptor

    def release(self) -> None:
        """Release the lock, also on behalf of processes that inherited it."""
        if self._descriptor is None:
            return
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)
        self._descriptor = None

    def _in_use(self) -> str:
        directory = self._path.parent
        hint = read_own(url_file(directory)).strip() or "see its owner's output"
        return (
            f"{directory} is in use: another process runs its server there.\n"
            f"Stop that process, choose another directory, or use its server: {hint}"
        )


def url_file(directory: Path) -> Path:
    """The file that holds the URL of the server in ``directory``, for people and for error messages."""
    return directory / "url"


def log_tail(log: Path, lines: int = 8) -> str:
    """The last lines of a server's log, for an error message."""
    return "\n".join(read_own(log).splitlines()[-lines:]) or "(it wrote no log)"


def private_socket_directory(owner: object, account: Account | None) -> Path:
    """Create a directory that only we and ``account`` can enter, with a path short enough for sockets.

    It is removed when ``owner`` is garbage-collected or the process exits.
    """
    parent = tempfile.gettempdir()
    if account is not None or len(parent) > 60:  # noqa: PLR2004  a socket's path has at most 107 bytes
        parent = "/tmp"  # noqa: S108  mkdtemp's directory is 0700 and unguessable
    directory = Path(tempfile.mkdtemp(prefix="penstock-", dir=parent))
    hand_over(directory, account)
    weakref.finalize(owner, _remove_in_process, directory, os.getpid())
    return directory


def hand_over(path: Path, account: Account | None) -> None:
    """Make ``account`` the owner of a file, or of a directory and everything in it."""
    if account is None:
        return
    os.chown(path, account.user, account.group)
    for directory, folders, files in os.walk(path):
        for name in (*folders, *files):
            os.chown(Path(directory, name), account.user, account.group, follow_symlinks=False)


def _flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_in_process(directory: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in a fork of the owner
        shutil.rmtree(directory, ignore_errors=True)
