"""The schema is created, upgraded and removed; by several processes at once; as SQL; as a branch of the application's Alembic."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine
from sqlalchemy.dialects.postgresql import dialect
from sqlalchemy.exc import DBAPIError

from fixtures.constants import SetConstants
from fixtures.migrations import NEXT, get_revision, tables
from fixtures.postgres import engine_url
from penstock.database.statements import directory
from penstock.database.tables import TABLE_NAMES, staged_records
from penstock.embedded import EmbeddedPostgres
from penstock.errors import ServerUnavailable
from penstock.schema.initialise import alembic_config, initialise, migration_sql, reporting_waits
from penstock.schema.revisions import newest_shipped
from penstock.testing import eventually

TABLES = {"staged_records", "epochs", "ticks", "journal", "channels", "checkpoints", "dead_letters"}


@pytest.fixture
def fresh_url(postgres: EmbeddedPostgres) -> Iterator[str]:
    """A database without Penstock's tables."""
    yield postgres.create_database("fresh")
    postgres.drop_database("fresh")


def test_up_then_down_then_up(fresh_url: str) -> None:
    assert initialise(fresh_url) is None
    assert initialise(fresh_url) == newest_shipped()
    assert tables(fresh_url) >= TABLES

    initialise(fresh_url, revision="base")
    assert tables(fresh_url) == {"alembic_version"}

    initialise(fresh_url)
    assert tables(fresh_url) >= TABLES


CATALOGUE = """
SELECT 'column', table_name || '.' || column_name, concat_ws(' ', data_type, is_nullable, column_default)
FROM information_schema.columns
WHERE table_schema = 'penstock'
UNION ALL
SELECT 'function', proname, pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = 'penstock'::regnamespace
UNION ALL
SELECT 'index', indexname, indexdef FROM pg_indexes WHERE schemaname = 'penstock'
UNION ALL
SELECT 'constraint', conname, pg_get_constraintdef(oid) FROM pg_constraint WHERE connamespace = 'penstock'::regnamespace
UNION ALL
SELECT 'trigger', tgname, pg_get_triggerdef(t.oid)
FROM pg_trigger t JOIN pg_class c ON c.oid = tgrelid
WHERE relnamespace = 'penstock'::regnamespace AND NOT tgisinternal
"""


def test_each_downgrade_leaves_what_the_revision_before_had(fresh_url: str, next_migrations: Path) -> None:
    """Releases of before work with it again."""
    engine = create_engine(engine_url(fresh_url))
    with alembic_config("penstock") as config:
        revisions = [s.revision for s in ScriptDirectory.from_config(config).walk_revisions()][::-1]

        def migrate(run: Callable[[Config, str], None], revision: str) -> set[tuple[str, ...]]:
            with engine.begin() as connection:
                config.attributes["connection"] = connection
                run(config, revision)
                limit = connection.exec_driver_sql("SHOW lock_timeout").scalar()
                assert limit == "0", f"{revision} limits those after it"
                return {tuple(row) for row in connection.exec_driver_sql(CATALOGUE)}

        initialise(fresh_url, revision=revisions[0])
        found = {revision: migrate(command.upgrade, revision) for revision in revisions}
        for revision in revisions[-2::-1]:
            assert migrate(command.downgrade, revision) == found[revision], revision
    engine.dispose()


def test_the_newest_revision_is_read_from_the_names_of_the_files() -> None:
    with alembic_config("penstock") as config:
        scripts = ScriptDirectory.from_config(config)

    assert scripts.get_current_head() == newest_shipped()
    for script in scripts.walk_revisions():
        assert Path(script.path).name.startswith(script.revision.removeprefix("penstock_")[:4])


@pytest.mark.parametrize(
    "lock",
    ["SELECT pg_advisory_xact_lock(hashtextextended('penstock migrations', 0))", "LOCK TABLE penstock.staged_records"],
)
@pytest.mark.usefixtures("next_migrations")
def test_an_init_that_waits_says_for_whom(lock: str, fresh_url: str, set_constants: SetConstants) -> None:
    set_constants("schema.initialise", WATCH_S=0.05)
    initialise(fresh_url, revision="penstock_0001")
    said: list[str] = []

    with (
        ThreadPoolExecutor(1) as pool,
        reporting_waits(fresh_url, said.append),
        psycopg.connect(fresh_url, application_name="shop") as other,
    ):
        other.execute(lock)
        pid = other.info.backend_pid
        upgrade = pool.submit(initialise, fresh_url)
        eventually(lambda: len(said) > 0, "it says for whom it waits")
        assert not upgrade.done()
        other.rollback()
        assert upgrade.result(60) == "penstock_0001"

    assert re.fullmatch(rf"waiting for a lock of process {pid} \(shop, user postgres\)\. .*\({pid}\)", said[0])


@pytest.mark.slow
@pytest.mark.usefixtures("next_migrations")
def test_a_migration_does_not_queue_for_long_behind_a_writer(fresh_url: str) -> None:
    """Guarantee 26: other writers wait behind the migration, so it gives up, and changes nothing."""
    initialise(fresh_url, revision="penstock_0001")
    with psycopg.connect(fresh_url) as writer:
        writer.execute("LOCK TABLE penstock.staged_records IN ROW EXCLUSIVE MODE")
        with pytest.raises(ServerUnavailable, match="LockNotAvailable"):
            initialise(fresh_url)
    assert initialise(fresh_url) == "penstock_0001"
    assert get_revision(fresh_url) == NEXT


@pytest.mark.usefixtures("next_migrations")
def test_a_migration_that_loses_a_deadlock_runs_again(fresh_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee 26: as against a streamer that holds one table and waits for another."""
    initialise(fresh_url, revision="penstock_0001")
    attempts: list[int] = []
    with (
        psycopg.connect(fresh_url, options="-c deadlock_timeout=1h") as other,
        psycopg.connect(fresh_url, autocommit=True) as observer,
        ThreadPoolExecutor(1) as pool,
    ):
        other.execute("LOCK TABLE penstock.staged_records")

        def is_waiting() -> bool:
            sql = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s"
            return observer.execute(sql, (other.info.backend_pid,)).fetchone() == (True,)

        def take_migrations() -> None:
            other.execute("SELECT pg_advisory_xact_lock(hashtextextended('penstock migrations', 0))")
            other.rollback()

        def wait_for_each_other(*_: object) -> None:
            attempts.append(len(attempts))
            if attempts == [0]:
                pool.submit(take_migrations)
                eventually(is_waiting, "it waits for the migration")

        monkeypatch.setattr("penstock.schema.initialise._become_owner", wait_for_each_other)
        assert initialise(f"{fresh_url}&options=-c%20deadlock_timeout%3D10ms") == "penstock_0001"
    assert attempts == [0, 1]
    assert get_revision(fresh_url) == NEXT


def test_tables_that_hold_records_are_not_dropped(fresh_url: str) -> None:
    """Guarantee 26."""
    initialise(fresh_url)
    with psycopg.connect(fresh_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
            "VALUES ('things', 0, 'k', 'a', 'o', '{}')"
        )
        with pytest.raises(DBAPIError, match="TRUNCATE"):
            initialise(fresh_url, revision="base")
        assert tables(fresh_url) >= TABLES

        connection.execute("TRUNCATE penstock.staged_records")
        connection.execute(
            'INSERT INTO penstock.dead_letters (consumer, channel, shard, "offset", record_id, key, action, object, data, staged_at, '
            "reason, attempts) VALUES ('reader', 'things', 0, 1, 1, 'k', 'a', 'o', '{}', now(), 'test', 1)"
        )
        with pytest.raises(DBAPIError, match="TRUNCATE"):
            initialise(fresh_url, revision="base")
        connection.execute("TRUNCATE penstock.dead_letters")
        initialise(fresh_url, revision="base")
        assert not tables(fresh_url) & TABLES


def test_an_empty_journal_begins_at_1_and_ends_at_0(fresh_url: str) -> None:
    initialise(fresh_url)
    with psycopg.connect(fresh_url) as connection:
        row = connection.execute("SELECT * FROM penstock.journal_bounds('none', 0)").fetchone()

    assert row == (1, 0)


def test_several_at_once_run_one_after_the_other(fresh_url: str) -> None:
    """Guarantee 26."""
    with ThreadPoolExecutor(6) as pool:
        before = list(pool.map(lambda _: initialise(fresh_url), range(6)))

    assert sorted(map(str, before)) == ["None", *[newest_shipped()] * 5]


def test_another_schema_is_independent(fresh_url: str) -> None:
    initialise(fresh_url)
    initialise(fresh_url, "outbox_two")

    assert tables(fresh_url, "outbox_two") == tables(fresh_url)


def test_the_sql_makes_the_same_tables(fresh_url: str) -> None:
    """In one transaction: all of it, or nothing."""
    assert migration_sql().count("COMMIT;") == 1
    with psycopg.connect(fresh_url, autocommit=True) as connection:
        connection.execute(migration_sql().encode())

    assert tables(fresh_url) >= TABLES
    assert initialise(fresh_url) == newest_shipped()


def test_the_migrated_schema_matches_the_tables_in_the_code(fresh_url: str) -> None:
    postgres_dialect = dialect()  # type: ignore[no-untyped-call]  # untyped in SQLAlchemy
    initialise(fresh_url)
    with psycopg.connect(fresh_url) as connection:
        columns = connection.execute(
            "SELECT attname, format_type(coalesce(nullif(typbasetype, 0), atttypid), atttypmod), attnotnull "
            "FROM pg_attribute JOIN pg_type t ON t.oid = atttypid "
            "WHERE attrelid = 'penstock.staged_records'::regclass AND attnum > 0 ORDER BY attnum"
        ).fetchall()

    assert tables(fresh_url) == {*TABLE_NAMES}
    assert columns == [
        (column.name, column.type.compile(postgres_dialect).lower(), not column.nullable)
        for column in staged_records("penstock").columns
    ]


@pytest.mark.parametrize("separator", ["newline", "space"])
def test_the_migrations_run_as_a_branch_beside_the_applications_own(
    fresh_url: str, tmp_path: Path, separator: str
) -> None:
    ours = Path(str(directory("migrations"))) / "versions"
    own = tmp_path / "migrations"
    (own / "versions").mkdir(parents=True)
    (own / "env.py").write_text(
        "from alembic import context\nfrom sqlalchemy import create_engine\n"
        f"engine = create_engine({engine_url(fresh_url)!r})\n"
        "with engine.connect() as c:\n    context.configure(connection=c)\n"
        "    with context.begin_transaction():\n        context.run_migrations()\n"
    )
    (own / "versions" / "1_own.py").write_text(
        "from alembic import op\nrevision = 'own_1'\ndown_revision = None\nbranch_labels = ('own',)\ndepends_on = None\n"
        "def upgrade():\n    op.execute('CREATE TABLE public.own (id int)')\n"
    )
    between = "\n    " if separator == "newline" else " "
    (tmp_path / "alembic.ini").write_text(
        f"[alembic]\nscript_location = {own}\npath_separator = {separator}\n"
        f"version_locations = {own / 'versions'}{between}{ours}\n"
    )
    subprocess.run([sys.executable, "-m", "alembic", "upgrade", "heads"], check=True, cwd=tmp_path, capture_output=True)

    assert tables(fresh_url) >= TABLES
    assert tables(fresh_url, "public") == {"own", "alembic_version"}
    assert get_revision(fresh_url) == initialise(fresh_url) == newest_shipped()
    assert "alembic_version" not in tables(fresh_url)
