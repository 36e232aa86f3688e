"""Files and directories of this user alone.

In a directory that others can write to, somebody may have put a file there before us: a URL that names his server, a link
in place of a log.  So what is read or written must belong to this user, or to root, and no link is followed to a file.
"""

import errno
import os
import stat
from pathlib import Path

from penstock.errors import Refused


def make_private(directory: Path, *, shared: bool = False) -> None:
    """Creates a directory for this user alone, or closes an existing one to others.

    Root's can be entered by all, because Postgres does not run as root; its files cannot be read.

    Args:
        directory: With the directories above it.
        shared: It may hold other things of this user: others only lose the right to write there.

    Raises:
        Refused: It belongs to somebody else.
        OSError: It cannot be created.
    """
    private = 0o711 if os.geteuid() == 0 else 0o700
    try:
        directory.mkdir(private, parents=True)
    except FileExistsError:
        check_own(directory)
        found = directory.stat()
        if found.st_uid == os.geteuid():
            directory.chmod(stat.S_IMODE(found.st_mode) & (0o755 if shared else private))


def check_own(path: Path) -> None:
    """Checks that a file or directory, and a link in its place, belongs to this user or to root.

    Raises:
        Refused: It belongs to somebody else.
        FileNotFoundError: It does not exist.
    """
    for found in (path.lstat(), path.stat()):
        _check_owner(path, found)


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in {os.geteuid(), 0}:
        raise Refused(
            f"{path} belongs to user {found.st_uid}, not to user {os.geteuid()}: somebody else may have put it there. "
            "Remove it, or name another directory: --data-directory"
        )


def open_own(path: Path, flags: int) -> int:
    """Opens a file of this user or of root, for this user alone if it is created; follows no link.

    Raises:
        Refused: It is a link, or belongs to somebody else.
        OSError: It cannot be opened.
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
    """The text of such a file; empty if it does not exist.

    Raises:
        Refused: It is a link, or belongs to somebody else.
    """
    try:
        descriptor = open_own(path, os.O_RDONLY)
    except FileNotFoundError:
        return ""
    with os.fdopen(descriptor, encoding="utf-8", errors="replace") as file:
        return file.read()


def write_private(path: Path, text: str) -> None:
    """Replace a file with one that only its owner can read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
