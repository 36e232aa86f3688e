"""The how-to of the migrations, followed word by word in a fresh project, with the templates of ``alembic init``."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from alembic.config import main
from sqlalchemy import MetaData, Table

from fixtures.forking import fork, redirect
from fixtures.migrations import NEXT, get_revision, tables
from penstock.embedded import EmbeddedPostgres
from penstock.schema.initialise import initialise
from penstock.schema.migrations import include_object
from penstock.schema.revisions import newest_shipped

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "put-the-migrations-beside-yours.md"
MIGRATION, CONFIGURE = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
NAMED = re.findall(r"penstock_\d{4}(?:_since_\d{4})?", MIGRATION)[0]
"""The revision that the page names."""

FUNCTIONS = re.compile(r"^def upgrade\(\).*", re.MULTILINE | re.DOTALL)
CONFIGURED = re.compile(r"context\.configure\(\s*connection=connection.*?\)\n", re.DOTALL)

TEMPLATES = [
    ("generic", "psycopg"),
    ("async", "asyncpg"),
    pytest.param("async", "psycopg", marks=pytest.mark.slow),
    pytest.param("pyproject_async", "asyncpg", marks=pytest.mark.slow),
]

MODELS = """
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

class Base(DeclarativeBase):
    pass

class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
"""


def _run_alembic(directory: Path, commands: tuple[str, ...]) -> None:
    redirect(directory, dict(os.environ), directory / "stdout", directory / "stderr")
    for command in commands:
        main(command.split())


class Project:
    """A project with an Alembic of its own."""

    def __init__(self, directory: Path, database_url: str, template: str, driver: str) -> None:
        self._directory = directory
        (directory / "models.py").write_text(MODELS)
        self.alembic(f"init -t {template} migrations")
        url = database_url.replace("postgresql:", f"postgresql+{driver}:", 1).replace("%", "%%")
        ini = directory / "alembic.ini"
        ini.write_text(
            re.sub(r"^sqlalchemy\.url = .*$", f"sqlalchemy.url = {url}", ini.read_text(), flags=re.MULTILINE)
        )

    @property
    def versions(self) -> list[Path]:
        """The files of its migrations."""
        return list((self._directory / "migrations" / "versions").glob("*.py"))

    def alembic(self, *commands: str) -> str:
        """Runs commands, and returns what they print."""
        done = self.run(*commands)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run(self, *commands: str) -> subprocess.CompletedProcess[str]:
        """Runs commands one after the other, in a fork of a process that has imported Alembic."""
        process = fork(_run_alembic, self._directory, commands)
        process.join(250)
        out, err = ((self._directory / name).read_text() for name in ("stdout", "stderr"))
        assert process.exitcode is not None, f"alembic {commands} does not end: {err}"
        return subprocess.CompletedProcess(commands, process.exitcode, out, err)

    def add_penstock(self) -> None:
        """``alembic revision -m penstock``, with the functions of the page."""
        self.alembic("revision -m penstock")
        [made] = self.versions
        made.write_text(FUNCTIONS.sub("", made.read_text()) + MIGRATION)

    def edit_environment(self) -> None:
        """Puts the page's lines into ``env.py``, and its own models."""
        file = self._directory / "migrations" / "env.py"
        importing, _, call = CONFIGURE.partition("\n\n")
        text = file.read_text().replace("target_metadata = None", "target_metadata = Base.metadata")
        found = CONFIGURED.search(text)
        assert found is not None
        indent = re.search(r"[ ]*$", text[: found.start()])
        assert indent is not None
        call = call.replace("\n", "\n" + indent[0]).rstrip() + "\n"
        text = text[: found.start()] + call + text[found.end() :]
        file.write_text(f"{importing}\nfrom models import Base\n{text}")
        ini = self._directory / "alembic.ini"
        if "prepend_sys_path" not in ini.read_text() + self._toml():
            ini.write_text(ini.read_text().replace("[alembic]", "[alembic]\nprepend_sys_path = ."))

    def _toml(self) -> str:
        file = self._directory / "pyproject.toml"
        return file.read_text() if file.exists() else ""


@pytest.fixture
def own_url(postgres: EmbeddedPostgres) -> Iterator[str]:
    """A database without Penstock's tables."""
    yield postgres.create_database("own")
    postgres.drop_database("own")


def test_the_page_names_the_newest_revision() -> None:
    assert newest_shipped() == NAMED


@pytest.mark.parametrize(("template", "driver"), TEMPLATES)
def test_a_fresh_project_follows_the_page(tmp_path: Path, own_url: str, template: str, driver: str) -> None:
    """Guarantee 26."""
    project = Project(tmp_path, own_url, template, driver)
    project.add_penstock()
    project.edit_environment()
    project.alembic("upgrade head", "revision --autogenerate -m orders", "upgrade head", "check")

    generated = next(file.read_text() for file in project.versions if "orders" in file.name)
    assert "op.create_table('orders'" in generated
    assert "drop_" not in generated.partition("def downgrade")[0]
    assert len(project.versions) == 2, "every migration is the project's own"
    assert tables(own_url, "public") == {"orders", "alembic_version"}

    project.alembic("downgrade -1")
    assert tables(own_url, "public") == {"alembic_version"}
    assert "staged_records" in tables(own_url)
    assert get_revision(own_url) == initialise(own_url, revision=NAMED) == NAMED

    project.alembic("downgrade -1")
    assert tables(own_url) == {"alembic_version"}
    assert get_revision(own_url) is None


@pytest.fixture
def project(tmp_path: Path, own_url: str) -> Project:
    """A project whose first migration is Penstock's."""
    made = Project(tmp_path, own_url, "generic", "psycopg")
    made.add_penstock()
    return made


def test_the_migration_can_be_printed_as_sql(project: Project, own_url: str) -> None:
    printed = project.alembic("upgrade head --sql")
    with psycopg.connect(own_url, autocommit=True) as connection:
        connection.execute(printed.encode())

    assert initialise(own_url) == NAMED
    with psycopg.connect(own_url, autocommit=True) as connection:
        connection.execute(project.alembic("downgrade head:base --sql").encode())
    assert get_revision(own_url) is None


def test_a_migration_that_finds_the_tables_there_changes_nothing(project: Project, own_url: str) -> None:
    initialise(own_url)
    project.alembic("upgrade head")

    assert get_revision(own_url) == NAMED


def test_a_migration_leaves_tables_alone_that_are_newer_than_what_it_names(
    project: Project, own_url: str, next_migrations: Path
) -> None:
    [migration] = project.versions
    ship = f"from penstock.schema import initialise\ninitialise.directory = lambda _: __import__('pathlib').Path({str(next_migrations)!r})\n"
    migration.write_text(ship + migration.read_text())
    initialise(own_url)
    project.alembic("upgrade head")

    assert get_revision(own_url) == NEXT


def test_tables_whose_revision_is_lost_are_left_alone(project: Project, own_url: str) -> None:
    initialise(own_url)
    with psycopg.connect(own_url) as connection:
        connection.execute("DROP TABLE penstock.alembic_version")

    assert "does not name their revision" in project.run("upgrade head").stderr


def test_tables_that_hold_records_stay_although_their_migration_is_undone(project: Project, own_url: str) -> None:
    """Guarantee 26."""
    project.alembic("upgrade head")
    with psycopg.connect(own_url) as connection:
        connection.execute(
            "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
            "VALUES ('things', 0, 'k', 'a', 'o', '{}')"
        )
    refused = project.run("downgrade -1")

    assert refused.returncode == 1
    assert "To lose them on purpose, TRUNCATE" in refused.stderr
    assert get_revision(own_url) == NAMED


def test_another_schema_is_named_in_both_calls(tmp_path: Path, project: Project, own_url: str) -> None:
    [migration] = project.versions
    migration.write_text(migration.read_text().replace('")', '", schema="outbox")'))
    project.alembic("upgrade head")

    assert get_revision(own_url, "outbox") == NAMED
    assert get_revision(own_url) is None
    project.alembic("downgrade base")
    assert get_revision(own_url, "outbox") is None


def test_an_unknown_revision_is_named(project: Project) -> None:
    [migration] = project.versions
    migration.write_text(migration.read_text().replace(NAMED, "penstock_9999"))

    assert "ships no revision 'penstock_9999'" in project.run("upgrade head").stderr


@pytest.mark.parametrize("schema", ["outbox", "public"])
def test_autogenerate_leaves_the_tables_of_another_schema_alone(schema: str) -> None:
    where = None if schema == "public" else schema
    theirs = Table("staged_records", MetaData(), schema=where)
    own = Table("orders", MetaData())

    assert not include_object(theirs, theirs.name, "table", True, None, schema=schema)
    assert include_object(own, own.name, "table", True, None, schema=schema)
    assert include_object(theirs, theirs.name, "table", False, None, schema=schema)
