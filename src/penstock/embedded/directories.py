"""The directory of a server: who holds it, who owns its files, and the files for people.

In a directory that others can write to, somebody may have put a file there before us: a URL that
names his server, a link in place of a log.  So what is read or written must belong to this user, or
to root, and no link is followed to a file.

Two servers in one directory would destroy its data.  The lock is an ``flock`` whose file descriptor
the server process inherits, so it is released when the last process of the server has exited, and
not before.
"""

import errno
import fcntl
import os
import shutil
import stat
import tempfile
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import Refused, ServerUnavailable

GRACE_S = 10.0
"""Longest wait, in seconds, for a directory that a server still holds whose owner has died."""


@dataclass(frozen=True, slots=True)
class Account:
    """The user and group that a server runs as."""

    user: int
    group: int


class DirectoryLock:
    """A lock on a directory, held by the owner and by every process that inherits it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def take(self) -> int:
        """Takes the lock, waiting up to ``GRACE_S``; returns its file descriptor."""
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
        """Releases the lock, also on behalf of processes that inherited it."""
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
    """Returns the file with the URL of the server in ``directory``, for people and errors."""
    return directory / "url"


def log_tail(log: Path) -> str:
    """Returns the last lines of a server's log, for an error message."""
    return "\n".join(read_own(log).splitlines()[-8:]) or "(it wrote no log)"


def private_socket_directory(owner: object, account: Account | None) -> Path:
    """Creates a directory that only we and ``account`` can enter, with a path that suits sockets.

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
    """Makes ``account`` the owner of a file, or of a directory and everything in it."""
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


def make_private(directory: Path, *, shared: bool = False) -> None:
    """Creates a directory for this user alone, or closes an existing one to others.

    Root's can be entered by all, because Postgres does not run as root; its files cannot be read.
    """
    private = 0o711 if os.geteuid() == 0 else 0o700
    try:
        directory.mkdir(private, parents=True)
    except FileExistsError:
        check_own(directory)
        status = directory.stat()
        if status.st_uid == os.geteuid():
            directory.chmod(stat.S_IMODE(status.st_mode) & (0o755 if shared else private))


def check_own(path: Path) -> None:
    """Checks that a file or directory, and a link in its place, belongs to this user or to root."""
    for status in (path.lstat(), path.stat()):
        _check_owner(path, status)


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in {os.geteuid(), 0}:
        raise Refused(
            f"{path} belongs to user {status.st_uid}, not to user {os.geteuid()}: somebody else "
            "may have put it there. Remove it, or name another directory: --data-directory"
        )


def open_own(path: Path, flags: int) -> int:
    """Opens a file of this user or of root, for this user alone if it is created.

    Follows no link.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Refused(f"{path} is a link, and Penstock makes none: remove it") from error
        raise
    try:
        _check_owner(path, os.fstat(descriptor))
    except Refused:
        os.close(descriptor)
        raise
    return descriptor


def read_own(path: Path) -> str:
    """Reads a file of this user or of root; empty if it does not exist."""
    try:
        descriptor = open_own(path, os.O_RDONLY)
    except FileNotFoundError:
        return ""
    with os.fdopen(descriptor, encoding="utf-8", errors="replace") as file:
        return file.read()


def write_private(path: Path, text: str) -> None:
    """Replaces a file with one that only its owner can read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
