"""The way of settings to Java: on the command line that starts it, or over the connection to it.

Every user of a machine can read the command lines of its processes, so a secret takes the connection.  With ``spark-submit``,
Java has been started already, and has settings of its own.
"""

import os
import re
from collections.abc import Iterable, Mapping

from pyspark import SparkConf, SparkContext

from penstock.display import mask
from penstock.errors import InvalidSetting

SECRET = "(?i)secret|password|token|access[.]?key|_url|penstock_sources"  # noqa: S105  a pattern
"""Pattern of the names of settings whose values Spark shows nowhere."""

URLS = ("PENSTOCK_DATABASE_URL", "PENSTOCK_REDIS_URL")
"""The environment variables that tell executors where the servers are."""

_SOURCES = "PENSTOCK_SOURCES__"

SECRET_KEY = "spark.kubernetes.executor.secretKeyRef."  # noqa: S105  a name
"""Prefix of a setting that takes an environment variable of executors from a secret."""

_GATEWAY_PORT = "PYSPARK_GATEWAY_PORT"


def name_source(source: str) -> str:
    """The environment variable that tells executors where the Postgres of a source is."""
    return _SOURCES + source.upper()


def set_urls(database_url: str, redis_url: str, sources: Mapping[str, str]) -> None:
    """Sets the environment variables with the URLs: what this process starts has them."""
    os.environ.update(zip(URLS, (database_url, redis_url), strict=True))
    os.environ.update({name_source(source): url for source, url in sources.items()})


def find_url(name: str) -> str:
    """The URL in an environment variable of this executor."""
    if url := os.environ.get(name):
        return url
    raise InvalidSetting(
        f"executors have no {name}. On Kubernetes, give them a secret: --conf {SECRET_KEY}{name}=NAME:KEY"
    )


def read_submitted() -> dict[str, str]:
    """The settings that ``spark-submit`` was given, if it has started this process; nothing otherwise."""
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


def find_cluster(submitted: Mapping[str, str]) -> str | None:
    """The master that ``spark-submit`` was given; None without a cluster."""
    master = submitted.get("spark.master", "local")
    return None if master.startswith("local") else master


def share(names: Iterable[str], master: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Settings that give executors environment variables of this process, and the URLs of sources.

    On Kubernetes, only those without a password, and not what a secret of the cluster gives: everyone who may see pods sees
    the values of their environment variables.
    """
    sources = [name for name in os.environ if name.startswith(_SOURCES)]
    on_kubernetes = master.startswith("k8s")
    return {
        f"spark.executorEnv.{name}": value
        for name in (*names, *sources)
        if (value := os.environ.get(name)) is not None
        and not (on_kubernetes and (mask(value) != value or SECRET_KEY + name in settings))
    }
