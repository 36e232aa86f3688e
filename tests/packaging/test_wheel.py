"""The built wheel instead of the checkout: made from the sdist, and installed into an empty environment."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

pytestmark = pytest.mark.xdist_group("wheel")  # it is built once

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """An environment that has the wheel installed, and nothing of the checkout."""
    directory = tmp_path_factory.mktemp("empty")
    venv.create(directory, with_pip=False)
    site = next((directory / "lib").glob("python*/site-packages"))
    with ZipFile(wheel) as archive:
        archive.extractall(site)
    return directory


def run(environment: Path, code: str, *, borrow: tuple[str, ...]) -> str:
    """Runs code in that environment, with some packages borrowed from the tests' environment."""
    site = next((environment / "lib").glob("python*/site-packages"))
    home = next(Path(p) for p in sys.path if p.endswith("site-packages"))
    for package in borrow:
        for found in [*home.glob(package), *home.glob(f"{package}.py"), *home.glob(f"{package}.*.so")]:
            link = site / found.name
            if not link.exists():
                link.symlink_to(found)
    done = subprocess.run(
        [str(environment / "bin" / "python"), "-I", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=environment,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_contains_every_script_and_migration(wheel: Path) -> None:
    names = set(ZipFile(wheel).namelist())

    for directory, pattern in (("lua", "*.lua"), ("migrations", "*.py")):
        for path in (ROOT / directory).rglob(pattern):
            assert f"penstock/_{directory}/{path.relative_to(ROOT / directory)}" in names
    for path in (ROOT / "src" / "penstock").rglob("*"):
        if path.is_file() and path.suffix in {".py", ".sql", ".typed"}:
            assert f"penstock/{path.relative_to(ROOT / 'src' / 'penstock')}" in names


def test_the_wheel_contains_only_the_package(wheel: Path) -> None:
    folders = {name.partition("/")[0] for name in ZipFile(wheel).namelist()}

    assert {re.sub(r"-\d.*(?=\.dist-info)", "", folder) for folder in folders} == {
        "penstock",
        "penstock_outbox.dist-info",
        "pyspark_penstock_ick.py",
        "pyspark_penstock_log.py",
        "pyspark_penstock_staged.py",
        "pyspark_penstock_table.py",
        "pytest_penstock.py",
    }


def test_an_application_that_only_stages_needs_only_sqlalchemy(empty: Path) -> None:
    loaded = run(
        empty,
        "from penstock import *; import sys; print(*sorted({n.partition('.')[0] for n in sys.modules}))",
        borrow=("sqlalchemy", "typing_extensions"),
    ).split()

    heavy = {"redis", "pyspark", "pyarrow", "typer", "rich", "pydantic", "structlog", "alembic", "psycopg"}
    assert "sqlalchemy" in loaded
    assert not heavy & set(loaded)


def test_the_installed_package_finds_its_scripts_and_migrations(empty: Path) -> None:
    code = (
        "from penstock.channels.scripts import script; from penstock.schema.initialise import migration_sql; "
        "print(len(script('log/append').sha), 'CREATE TABLE' in migration_sql())"
    )
    borrow = (
        "sqlalchemy", "typing_extensions", "redis", "alembic", "mako", "markupsafe", "psycopg", "psycopg_binary*",
        "greenlet", "hiredis", "structlog",
    )  # fmt: skip
    assert run(empty, code, borrow=borrow).split() == ["40", "True"]


def test_files_of_another_distribution_called_penstock_are_refused_at_import(empty: Path) -> None:
    site = next((empty / "lib").glob("python*/site-packages"))
    foreign = site / "penstock-0.1.0.dist-info"
    foreign.mkdir()
    try:
        done = subprocess.run(
            [str(empty / "bin" / "python"), "-I", "-c", "import penstock"], capture_output=True, text=True, check=False
        )
    finally:
        foreign.rmdir()

    assert done.returncode == 1
    assert "holds the distribution 'penstock', another project's" in done.stderr.splitlines()[-1]
    assert "pip install penstock-outbox" in done.stderr.splitlines()[-1]


def test_a_zipped_wheel_can_be_imported(wheel: Path, tmp_path: Path) -> None:
    """As Spark ships it to executors."""
    code = (
        f"import sys; sys.path.insert(0, {str(wheel)!r}); import penstock; assert '.whl' in penstock.__file__; "
        "from penstock.channels.scripts import script; from penstock.database.statements import statements; "
        "print(len(script('log/append').sha), len(statements('penstock')) > 5)"
    )
    paths = [p for p in sys.path if p.endswith("site-packages")]
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.extend({paths!r}); {code}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["40", "True"]
