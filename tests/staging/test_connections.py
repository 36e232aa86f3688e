"""Records are staged on connections of SQLAlchemy, psycopg and Django, in the transaction that is under way."""

import asyncio
import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row
from sqlalchemy import Engine, NullPool, create_engine, insert, text
from sqlalchemy.ext.asyncio import create_async_engine

from fixtures.application import Ride, StagedRecords
from fixtures.postgres import engine_url
from penstock import (
    Ick,
    Log,
    Pipeline,
    Queue,
    TenantLimits,
    cancel,
    cancel_async,
    find_group,
    find_job,
    limit,
    mark_dirty,
    mark_dirty_async,
    retry,
    stage,
    stage_async,
    stage_many,
    stage_many_async,
)
from penstock.errors import InvalidRecord, NotAttached, StagingError
from penstock.staging.rows import make_refusal, refusals_explained
from penstock.testing import assert_staged

INDEX = Ick("index")
LOG = Log("rides")
JOBS = Queue("jobs")
PIPELINE = Pipeline([LOG, INDEX, JOBS])
RECORD: dict[str, Any] = {"key": ("n", 7), "action": "moved", "object": "ride"}
DATA = {"a": "ü'\\ %s :x \U0001f600", "n": 1.5, "id": 2**70}


def stage_all(connection: Any) -> None:
    """Calls each function once."""
    stage(connection, to=LOG, **RECORD, data=DATA, headers={"v": 1}, pipeline=PIPELINE)
    many: Any = [{**RECORD, "data": number} for number in (1, 2)]
    assert stage_many(connection, to=LOG, records=many, pipeline=PIPELINE) == 2
    assert stage_many(connection, to=LOG, records=[], pipeline=PIPELINE) == 0
    assert mark_dirty(connection, to=INDEX, members=["x", ("y", 1)], pipeline=PIPELINE) == 2


async def stage_all_async(connection: Any) -> None:
    await stage_async(connection, to=LOG, **RECORD, data=DATA, headers={"v": 1}, pipeline=PIPELINE)
    many: Any = [{**RECORD, "data": number} for number in (1, 2)]
    assert await stage_many_async(connection, to=LOG, records=many, pipeline=PIPELINE) == 2
    assert await stage_many_async(connection, to=LOG, records=[], pipeline=PIPELINE) == 0
    assert await mark_dirty_async(connection, to=INDEX, members=["x", ("y", 1)], pipeline=PIPELINE) == 2


KEYS = ['["n", 7]'] * 3 + ["x", '["y", 1]']


class Abandoned(Exception):
    """Rolls a block back."""


def abandoned() -> AbstractContextManager[Any]:
    return pytest.raises(Abandoned)


Open = Callable[[str], AbstractContextManager[Any]]


@contextmanager
def by_sqlalchemy(url: str) -> Iterator[Any]:
    engine = create_engine(engine_url(url), poolclass=NullPool)
    with engine.begin() as connection:
        yield connection


@contextmanager
def by_psycopg(url: str) -> Iterator[Any]:
    with psycopg.connect(url) as connection:
        yield connection


@contextmanager
def by_psycopg_in_a_transaction(url: str) -> Iterator[Any]:
    with psycopg.connect(url, autocommit=True) as connection, connection.transaction():
        yield connection


@contextmanager
def by_psycopg_with_other_cursors(url: str) -> Iterator[Any]:
    with psycopg.connect(
        url, cursor_factory=psycopg.RawCursor, row_factory=dict_row, prepare_threshold=None
    ) as connection:
        yield connection


@contextmanager
def by_psycopg_in_pipeline_mode(url: str) -> Iterator[Any]:
    with by_psycopg_in_a_transaction(url) as connection, connection.pipeline():
        yield connection


@contextmanager
def by_django(url: str) -> Iterator[Any]:
    """Closed at the end: Django keeps a connection for each thread."""
    django_db = make_django(url)
    try:
        with django_db.transaction.atomic():
            yield django_db.connection
    finally:
        django_db.connections.close_all()


def make_django(url: str) -> Any:
    """Django's database package, with ``default`` at the test's database."""
    settings = pytest.importorskip("django.conf", reason="Django is not installed").settings
    parts = psycopg.conninfo.conninfo_to_dict(url)
    options = {"HOST": "host", "PORT": "port", "USER": "user", "NAME": "dbname"}
    default = {name: parts.get(part, "") for name, part in options.items()}
    default["ENGINE"] = "django.db.backends.postgresql"
    lite = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    django: Any = importlib.import_module("django")
    if not settings.configured:
        databases = {"default": default, "second": {}, "lite": lite}
        contributed = ("postgres", "auth", "contenttypes", "sessions", "messages", "admin")
        installed = [*(f"django.contrib.{name}" for name in contributed), "django_app.accounts", "penstock.django"]
        templates = {"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}
        settings.configure(
            DATABASES=databases,
            INSTALLED_APPS=installed,
            ROOT_URLCONF="django_app.accounts.urls",
            SECRET_KEY="none",
            TEMPLATES=[templates],
            USE_TZ=True,
        )
        django.setup()
    importlib.import_module("django.db.transaction")
    for alias in ("default", "second"):
        django.db.connections[alias].settings_dict.update(default)
    return django.db


KINDS: list[Open] = [
    by_sqlalchemy,
    by_psycopg,
    by_psycopg_in_a_transaction,
    by_psycopg_with_other_cursors,
    by_psycopg_in_pipeline_mode,
    by_django,
]


@pytest.fixture(params=KINDS)
def opened(request: pytest.FixtureRequest) -> Open:
    found: Open = request.param
    return found


def test_records_are_rows_of_the_connections_transaction(
    opened: Open, application: Engine, database_url: str, staged: StagedRecords
) -> None:
    """Guarantee 8: with its commit, and not before."""
    with opened(database_url) as connection:
        stage_all(connection)
        assert staged() == []
        assert assert_staged(connection, to=LOG, data=DATA, headers={"v": 1}).key == KEYS[0]

    records = staged()
    assert [r.key for r in records] == KEYS
    assert [r.shard for r in records[:3]] == [LOG.shard_for(KEYS[0])] * 3
    assert (records[0].data, records[0].headers) == (DATA, {"v": 1})
    assert [r.data for r in records[1:]] == [1, 2, {}, {}]


def test_a_job_has_its_id_at_once(opened: Open, application: Engine, database_url: str, connection: Any) -> None:
    with opened(database_url) as own:
        ids = [
            stage(own, to=JOBS, action="send", object="mail", data=n, tenant="t", pipeline=PIPELINE) for n in range(2)
        ]

    assert connection.execute("SELECT array_agg(id ORDER BY data) FROM penstock.staged_records").fetchone() == (ids,)


def test_a_rollback_removes_the_records(
    opened: Open, application: Engine, database_url: str, staged: StagedRecords
) -> None:
    """Guarantee 8."""
    with abandoned(), opened(database_url) as connection:
        stage_all(connection)
        raise Abandoned

    assert staged() == []


def test_a_record_that_is_refused_names_its_field_and_writes_nothing(
    opened: Open, application: Engine, database_url: str, staged: StagedRecords
) -> None:
    """Guarantee 22."""
    with opened(database_url) as connection:
        with pytest.raises(InvalidRecord, match=r"data.a: contains a NUL"):
            stage(connection, to=LOG, **RECORD, data={"a": "\0"}, pipeline=PIPELINE)
        with pytest.raises(NotAttached, match=r"stage\(connection, to=channel, …, pipeline=pipeline\)"):
            stage(connection, to=LOG, **RECORD, data=None)
        with pytest.raises(NotAttached, match=r"does not have this channel other"):
            stage(connection, to=Log("other"), **RECORD, data=None, pipeline=PIPELINE)

    assert staged() == []


@pytest.mark.parametrize("opened", [kind for kind in KINDS if kind is not by_psycopg_in_pipeline_mode])
def test_a_refusal_by_postgres_is_one_typed_error_without_the_payload(
    opened: Open, engine: Engine, database_url: str
) -> None:
    """Guarantee 33.  In pipeline mode, psycopg raises the server's errors later, at the next sync."""
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE penstock.staged_records ADD CHECK (key <> 'k')"))
    with abandoned(), opened(database_url) as connection:
        with pytest.raises(StagingError, match=r"Postgres refused.*SQLSTATE 23514") as failure:
            stage(connection, to=LOG, **{**RECORD, "key": "k"}, data={"a": "canary"}, pipeline=PIPELINE)
        assert "canary" not in str(failure.value)
        assert failure.value.__context__ is None
        raise Abandoned


POOLED, OLDER = 'connect_args={"prepare_threshold": None}', "upgrade Penstock's tables: penstock init"
REMEDIES = {
    **dict.fromkeys(("26000", "42P05"), POOLED),
    **dict.fromkeys(("42P01", "42703", "42883", "3F000"), OLDER),
    "42501": "GRANT penstock_producer",
}


@pytest.mark.parametrize(("state", "remedy"), REMEDIES.items())
def test_what_a_pooler_older_tables_or_a_role_refuse_is_refused_with_its_remedy(state: str, remedy: str) -> None:
    """Records, and queries about jobs."""
    error = psycopg.errors.lookup(state)()
    assert remedy in str(make_refusal(error))
    with pytest.raises(StagingError, match=f"Postgres refused the query .*{re.escape(remedy)}"), refusals_explained():
        raise error


@pytest.mark.parametrize("state", ["22P02", "57014", "40001", "08006"])
def test_what_has_no_remedy_of_ours_stays_the_drivers_error(state: str) -> None:
    with pytest.raises(psycopg.errors.lookup(state)), refusals_explained():
        raise psycopg.errors.lookup(state)


ABOUT_JOBS: list[Callable[[Any], object]] = [
    lambda target: cancel(target, 1, of=JOBS, pipeline=PIPELINE),
    lambda target: retry(target, 1, of=JOBS, pipeline=PIPELINE),
    lambda target: limit(target, TenantLimits(), of=JOBS, tenant="t", pipeline=PIPELINE),
    lambda target: find_job(target, 1),
    lambda target: find_group(target, "g"),
]


@pytest.mark.parametrize("opened", [kind for kind in KINDS if kind is not by_psycopg_in_pipeline_mode])
@pytest.mark.parametrize("call", ABOUT_JOBS)
def test_what_asks_for_jobs_in_older_tables_names_the_remedy(
    opened: Open, call: Callable[[Any], object], engine: Engine, database_url: str
) -> None:
    with engine.begin() as connection:
        connection.execute(text("ALTER SCHEMA penstock RENAME TO older"))
    with abandoned(), opened(database_url) as connection:
        with pytest.raises(StagingError, match=r"Postgres refused the query .*(3F000|42P01|42883).*: penstock init"):
            call(connection)
        raise Abandoned

    async def ask() -> None:
        async with await psycopg.AsyncConnection.connect(database_url) as connection:
            await cancel_async(connection, 1, of=JOBS, pipeline=PIPELINE)

    with pytest.raises(StagingError, match=r"Postgres refused the query .*: penstock init"):
        asyncio.run(ask())


def test_psycopg_in_autocommit_mode_is_refused(application: Engine, database_url: str, staged: StagedRecords) -> None:
    """The change and its record would be two transactions."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        for block in (contextmanager(lambda: iter([None])), connection.pipeline):
            with block(), pytest.raises(StagingError, match=r"AUTOCOMMIT.*connection.transaction"):
                stage(connection, to=LOG, **RECORD, data=None, pipeline=PIPELINE)
        with connection.pipeline():
            connection.execute("SELECT 1")
            with pytest.raises(StagingError, match="AUTOCOMMIT"):
                stage(connection, to=LOG, **RECORD, data=None, pipeline=PIPELINE)

    assert staged() == []


def test_sqlalchemys_connection_in_autocommit_mode_is_refused(application: Engine, staged: StagedRecords) -> None:
    with (
        application.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        pytest.raises(StagingError, match="AUTOCOMMIT"),
    ):
        stage(connection, to=LOG, **RECORD, data=None, pipeline=PIPELINE)

    assert staged() == []


def test_a_savepoint_of_django_takes_its_records_along(
    application: Engine, database_url: str, staged: StagedRecords
) -> None:
    with by_django(database_url) as connection:
        stage(connection, to=LOG, **RECORD, data=1, pipeline=PIPELINE)
        with abandoned(), make_django(database_url).transaction.atomic():
            stage(connection, to=LOG, **RECORD, data=2, pipeline=PIPELINE)
            raise Abandoned

    assert [record.data for record in staged()] == [1]


def test_django_in_autocommit_mode_or_on_another_database_is_refused(
    application: Engine, database_url: str, staged: StagedRecords
) -> None:
    db = make_django(database_url)
    try:
        with pytest.raises(StagingError, match=r"AUTOCOMMIT.*transaction.atomic"):
            stage(db.connection, to=LOG, **RECORD, data=None, pipeline=PIPELINE)
        with pytest.raises(NotAttached, match="'lite' is to sqlite"):
            stage(db.connections["lite"], to=LOG, **RECORD, data=None, pipeline=PIPELINE)
    finally:
        db.connections.close_all()

    assert staged() == []


def test_async_connections_of_psycopg(application: Engine, database_url: str, staged: StagedRecords) -> None:
    """Guarantee 8."""

    async def run() -> None:
        async with await psycopg.AsyncConnection.connect(database_url) as connection:
            await stage_all_async(connection)
        async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as connection:
            with pytest.raises(StagingError, match="AUTOCOMMIT"):
                await stage_all_async(connection)
            async with connection.transaction(force_rollback=True):
                await stage_all_async(connection)
            with pytest.raises(NotAttached, match=r"not AsyncConnection: await stage_async\("):
                stage(connection, to=LOG, **RECORD, data=None, pipeline=PIPELINE)

    asyncio.run(run())

    assert [record.key for record in staged()] == KEYS


def test_async_connections_of_sqlalchemy(application: Engine, database_url: str, staged: StagedRecords) -> None:
    """Guarantee 8."""

    async def run() -> None:
        engine = create_async_engine(engine_url(database_url))
        async with engine.begin() as connection:
            await stage_all_async(connection)
        async with engine.connect() as connection:
            await stage_all_async(connection)
            with pytest.raises(NotAttached, match=r"await mark_dirty_async\("):
                mark_dirty(connection, to=INDEX, members=[1], pipeline=PIPELINE)  # type: ignore[arg-type]
        await engine.dispose()

    asyncio.run(run())

    assert [record.key for record in staged()] == KEYS


def test_a_connection_is_not_flushed_and_a_session_is(application: Engine, rides: Log, staged: StagedRecords) -> None:
    """A session's own changes come first; on a connection, what was executed before."""
    with application.begin() as connection:
        connection.execute(insert(Ride).values(id=1))
        stage(connection, to=rides, **RECORD, data=None, pipeline=Pipeline([rides]))

    assert len(staged()) == 1
