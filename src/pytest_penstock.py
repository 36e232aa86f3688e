"""Fixtures for the tests of an application that uses Penstock.

See docs/how-to/test-your-application.md.

pytest imports this module at the start of every run in an environment that has Penstock.  It is a
module of its own, and imports nothing until a fixture is used, because importing anything below
``penstock`` imports SQLAlchemy.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.orm import Session, sessionmaker

    from penstock import Pipeline
    from penstock.testing.databases import TemplateDatabases

APP, DATABASE_URL, REDIS_URL = "penstock_app", "penstock_database_url", "penstock_redis_url"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of ``pytest.ini`` and ``[tool.pytest.ini_options]``."""
    parser.addini(APP, "The pipeline under test, as module:attribute.", default="")
    for name, server in ((DATABASE_URL, "Postgres"), (REDIS_URL, "Redis or Valkey")):
        parser.addini(
            name,
            f"URL of a {server} for the tests; {_variable(name)} overrides it. By default one is started.",
            default="",
        )


@pytest.fixture(scope="session")
def penstock_postgres(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the run's Postgres, your own or an embedded one.

    Each test has its own database there.
    """
    if own_url := _given(request.config, DATABASE_URL):
        yield own_url
        return
    with _extra():
        from penstock.testing.databases import embedded_postgres  # noqa: PLC0415  not at start
    with embedded_postgres(tmp_path_factory.mktemp("penstock-postgres")) as url:
        yield url


@pytest.fixture(scope="session")
def penstock_redis(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the run's Redis: your own, or an embedded Valkey."""
    if own_url := _given(request.config, REDIS_URL):
        if hasattr(request.config, "workerinput"):
            pytest.fail(
                "pytest-xdist: the tests of several processes would delete each other's keys in "
                f"one Redis. Remove {_variable(REDIS_URL)} and {REDIS_URL}: each process then "
                "starts a Valkey of its own",
                pytrace=False,
            )
        yield own_url
        return
    with _extra():
        from penstock.testing.databases import embedded_redis  # noqa: PLC0415  not at start
    with embedded_redis(tmp_path_factory.mktemp("penstock-redis")) as url:
        yield url


@pytest.fixture(scope="session")
def penstock_create_tables() -> "Callable[[Engine], object]":
    """Override it to return a function that creates your tables.

    Called once, and copied for each test.
    """
    return lambda _: None


@pytest.fixture(scope="session")
def _penstock_databases(
    penstock_postgres: str, penstock_create_tables: "Callable[[Engine], object]"
) -> "Iterator[TemplateDatabases]":
    with _extra():
        from penstock.testing.databases import TemplateDatabases  # noqa: PLC0415  not at start
    databases = TemplateDatabases(penstock_postgres, penstock_create_tables)
    yield databases
    databases.close()


@pytest.fixture
def penstock_pipeline(request: pytest.FixtureRequest) -> "Pipeline":
    """Provides the pipeline that ``penstock_app`` names; override it to choose another."""
    with _extra():
        from penstock.pipeline import load_pipeline  # noqa: PLC0415  not at start
    app = request.config.getini(APP)
    if not app:
        pytest.fail(
            "no pipeline to test: set penstock_app = module:attribute in pytest's configuration, "
            "or override the fixture penstock_pipeline",
            pytrace=False,
        )
    return load_pipeline(app)


@pytest.fixture
def penstock_database_url(_penstock_databases: "TemplateDatabases", penstock_pipeline: "Pipeline") -> Iterator[str]:
    """URL of the test's database.

    Penstock's tables and yours, all empty, and the triggers that the pipeline declares.
    """
    with _extra():
        from penstock.schema.capture import install_triggers  # noqa: PLC0415  not at start
    with _penstock_databases.copy(penstock_pipeline.scope.schema) as url:
        install_triggers(url, penstock_pipeline)
        yield url


@pytest.fixture
def penstock_redis_url(penstock_redis: str, penstock_pipeline: "Pipeline") -> str:
    """URL of the Redis, without keys of the pipeline's namespace."""
    with _extra():
        from penstock.testing.databases import delete_keys  # noqa: PLC0415  not at start
    delete_keys(penstock_redis, penstock_pipeline.scope.namespace)
    return penstock_redis


@pytest.fixture
def penstock_engine(penstock_database_url: str) -> "Iterator[Engine]":
    """Provides an engine for the test's database, with psycopg as its driver."""
    from sqlalchemy import create_engine, make_url  # noqa: PLC0415  not at start

    url = make_url(penstock_database_url).set(drivername="postgresql+psycopg")
    engine = create_engine(url)
    yield engine
    engine.dispose()


@pytest.fixture
def penstock_sessions(penstock_engine: "Engine", penstock_pipeline: "Pipeline") -> "sessionmaker[Session]":
    """Provides a sessionmaker for the test's database, attached to the pipeline."""
    from sqlalchemy.orm import sessionmaker  # noqa: PLC0415  not at start

    sessions = sessionmaker(penstock_engine)
    penstock_pipeline.attach(sessions)
    return sessions


@pytest.fixture
def penstock_drain(
    penstock_pipeline: "Pipeline", penstock_database_url: str, penstock_redis_url: str
) -> Callable[..., dict[str, int]]:
    """``penstock.testing.drained`` for the pipeline and the servers of the test."""
    with _extra():
        from penstock.testing import drained  # noqa: PLC0415  not at start
    return partial(drained, penstock_pipeline, penstock_database_url, penstock_redis_url)


@pytest.fixture
def penstock_survives(
    penstock_pipeline: "Pipeline", penstock_engine: "Engine", penstock_database_url: str, penstock_redis_url: str
) -> Callable[..., None]:
    """``penstock.testing.survives`` for the pipeline and the servers of the test.

    It disposes of ``penstock_engine`` first.
    """
    with _extra():
        from penstock.testing import survives  # noqa: PLC0415  not at start

    def survive(**options: object) -> None:
        penstock_engine.dispose()
        survives(penstock_pipeline, penstock_database_url, penstock_redis_url, **options)  # type: ignore[arg-type]

    return survive


def _variable(option: str) -> str:
    return option.upper().replace("PENSTOCK_", "PENSTOCK_TEST_", 1)


def _given(config: pytest.Config, option: str) -> str | None:
    """Finds a URL in the environment or in pytest's configuration."""
    url = os.environ.get(_variable(option))
    if url is not None and not url.strip():
        pytest.fail(
            f"{_variable(option)} is empty, as an unset secret is: give a URL, or remove it to use an embedded server",
            pytrace=False,
        )
    return url or config.getini(option) or None


@contextmanager
def _extra() -> Iterator[None]:
    """Names what to install if an import fails.

    Applications that only stage have neither drivers nor servers.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        pytest.fail(f"Penstock's fixtures need {error.name}: pip install 'penstock-outbox[testing]'", pytrace=False)
