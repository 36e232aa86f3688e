"""The Django project of ``examples/django_shop``, which docs/how-to/use-with-django.md shows, in processes of its own."""

import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from fixtures.documents import ROOT, blocks

PROJECT = ROOT / "examples" / "django_shop"

HEAVY = """
import sys
from django.contrib import admin
from django.db import transaction
from orders.models import Order
admin.autodiscover()
Order(customer="Ann", cents=1).full_clean()
print(*sorted({"alembic", "pyspark", "redis", "rich", "structlog", "typer"} & set(sys.modules)))
"""


def run(*arguments: str, database_url: str) -> subprocess.CompletedProcess[str]:
    """Runs ``manage.py``."""
    parts = psycopg.conninfo.conninfo_to_dict(database_url)
    variables = {"PGHOST": "host", "PGPORT": "port", "PGUSER": "user", "PGDATABASE": "dbname"}
    environment = {name: str(parts[part]) for name, part in variables.items()}
    path = os.pathsep.join(str(folder) for folder in (ROOT / "src", Path(__file__).parent))
    return subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "manage.py", *arguments],
        cwd=PROJECT,
        env={**os.environ, **environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_page_shows_the_example() -> None:
    for block in blocks(ROOT / "docs" / "how-to" / "use-with-django.md", "python"):
        name, _, body = block.removeprefix("# ").partition("\n")

        assert body in (PROJECT / name).read_text(), block


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_tests_of_the_project_pass(database_url: str) -> None:
    """In a process of theirs: a process has one project.  They create a database."""
    done = run("test", "--noinput", "orders", "project_tests", database_url=database_url)

    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_process_that_only_stages_loads_nothing_for_workers(database_url: str) -> None:
    done = run("shell", "-v", "0", "-c", HEAVY, database_url=database_url)

    assert (done.stdout.strip(), done.returncode) == ("", 0), done.stderr
