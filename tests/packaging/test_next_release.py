"""This release beside the next one, whose schema has one more migration: its workers on both schemas, and ours on both."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from fixtures.command_line import APPLICATION
from fixtures.migrations import NEXT, add_next_migration, get_revision
from penstock.embedded import EmbeddedPostgres
from penstock.schema.initialise import initialise
from penstock.schema.revisions import OLDEST, newest_shipped

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

STAGE = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
SELECT 'things', i % 2, 'k' || i, 'insert', 'thing', '{}'
FROM generate_series(1, 10) AS i
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def following(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout of the next release."""
    root = tmp_path_factory.mktemp("following")
    for name in ("src", "lua"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    add_next_migration(root / "migrations")
    return root


@pytest.fixture
def shared_url(postgres: EmbeddedPostgres) -> Iterator[str]:
    """A database for both releases, with a table for the effects and none of ours."""
    url = postgres.create_database("releases")
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE public.effects (record_id bigint)")
    yield url
    postgres.drop_database("releases")


@pytest.fixture
def run(following: Path, tmp_path: Path, shared_url: str, redis_url: str) -> Run:
    """Runs a command of the next release, or of this one."""
    (tmp_path / "shop.py").write_text(APPLICATION)
    settings = {"PENSTOCK_DATABASE_URL": shared_url, "PENSTOCK_REDIS_URL": redis_url, "PENSTOCK_APP": "shop:pipeline"}

    def command(release: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        path = {"next": following, "ours": ROOT}[release] / "src"
        return subprocess.run(
            [sys.executable, "-m", "penstock", *arguments],
            cwd=tmp_path,
            env={**os.environ, **settings, "PYTHONPATH": str(path)},
            capture_output=True,
            text=True,
            check=False,
        )

    return command


def effects(url: str) -> list[int]:
    with psycopg.connect(url) as connection:
        rows = connection.execute("SELECT record_id FROM public.effects ORDER BY 1").fetchall()
    return [number for (number,) in rows]


def stage(url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute(STAGE)


def test_our_workers_run_beside_those_of_the_next_release_on_its_schema(run: Run, shared_url: str) -> None:
    """Guarantee 26."""
    assert run("next", "init").returncode == 0
    assert get_revision(shared_url) == NEXT
    for streaming, consuming in (("ours", "next"), ("next", "ours"), ("ours", "ours")):
        stage(shared_url)
        for release, *command in ((streaming, "stream"), (consuming, "consume", "reader")):
            done = run(release, *command, "--drain")
            assert done.returncode == 0, f"{release} {command}: {done.stderr}"

    assert effects(shared_url) == list(range(1, 31))


def test_workers_of_the_next_release_run_on_our_schema_until_init(run: Run, shared_url: str) -> None:
    """Guarantee 26: as long as its statements need no newer table."""
    initialise(shared_url)
    stage(shared_url)
    assert run("next", "stream", "--drain").returncode == 0
    assert run("next", "consume", "reader", "--drain").returncode == 0
    assert get_revision(shared_url) == newest_shipped()
    assert effects(shared_url) == list(range(1, 11))


def test_workers_refuse_a_schema_that_is_older_than_what_they_need(run: Run, following: Path, shared_url: str) -> None:
    """Guarantee 26."""
    revisions = following / "src" / "penstock" / "schema" / "revisions.py"
    before = revisions.read_text()
    initialise(shared_url)
    stage(shared_url)
    assert run("ours", "stream", "--drain").returncode == 0
    try:
        revisions.write_text(before.replace(f'OLDEST = "{OLDEST}"', f'OLDEST = "{NEXT}"'))
        for command in ("stream", "consume reader", "run --engine inline", "status"):
            done = run("next", *command.split())
            assert done.returncode == 2, done.stderr
            assert f"schema penstock is at {newest_shipped()}; this release needs {NEXT}" in done.stderr
            assert "What to do: penstock init" in done.stderr

        assert run("next", "init").returncode == 0
        assert get_revision(shared_url) == NEXT
        assert run("next", "consume", "reader", "--drain").returncode == 0
    finally:
        revisions.write_text(before)
    assert effects(shared_url) == list(range(1, 11))
