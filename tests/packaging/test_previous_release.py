"""The wheel of an older commit beside this checkout: its workers on this schema, and ours on its."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from zipfile import ZipFile

import psycopg
import pytest

from fixtures.command_line import APPLICATION
from fixtures.migrations import get_revision
from penstock.embedded import EmbeddedPostgres
from penstock.schema.initialise import initialise
from penstock.schema.revisions import newest_shipped

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
OLDER_THAN = "migrations/versions/0003_*.py"
"""The older release is the last commit that lacks this migration."""

STAGE = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
SELECT 'things', i % 2, 'k' || i, 'insert', 'thing', '{}'
FROM generate_series(1, 10) AS i
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


def git(*arguments: str) -> bytes:
    """What git prints; skips the test in a directory that has no history."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no history to build the older release from: {done.stderr.decode().strip()}")
    return done.stdout


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contents of the older release's wheel."""
    if git("rev-parse", "--is-shallow-repository").strip() == b"true":
        pytest.skip("a shallow clone lacks the commit of the older release: git fetch --unshallow")
    added = git("log", "--diff-filter=A", "--format=%H", "--", OLDER_THAN).decode().split()
    if not added:
        pytest.skip(f"the history does not show when {OLDER_THAN} was added")
    source, built, unpacked = (tmp_path_factory.mktemp(n) for n in ("source", "built", "older"))
    archive = git("archive", f"{added[-1]}^")
    subprocess.run(["tar", "-x", "-C", str(source)], input=archive, check=True)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(built)]
    subprocess.run([*build, str(source)], check=True, capture_output=True)
    [wheel] = built.glob("*.whl")
    with ZipFile(wheel) as contents:
        contents.extractall(unpacked)
    return unpacked


@pytest.fixture
def shared_url(postgres: EmbeddedPostgres) -> Iterator[str]:
    """A database for both releases, with a table for the effects and none of ours."""
    url = postgres.create_database("releases")
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE public.effects (record_id bigint)")
    yield url
    postgres.drop_database("releases")


@pytest.fixture
def run(older: Path, tmp_path: Path, shared_url: str, redis_url: str) -> Run:
    """Runs a command of the older release, or of this one."""
    (tmp_path / "shop.py").write_text(APPLICATION)
    (tmp_path / "plain.py").write_text(APPLICATION.replace("shards=2", "shards=2, entries='plain'"))
    settings = {"PENSTOCK_DATABASE_URL": shared_url, "PENSTOCK_REDIS_URL": redis_url}

    def command(release: str, *arguments: str, app: str = "shop") -> subprocess.CompletedProcess[str]:
        path = {"older": older, "ours": ROOT / "src"}[release]
        settings["PENSTOCK_APP"] = f"{app}:pipeline"
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


def test_workers_of_the_older_release_run_beside_ours_on_our_schema(run: Run, shared_url: str) -> None:
    """Guarantee 26: with ``entries="plain"``, until all consumers are of ours."""
    initialise(shared_url)
    for streaming, consuming in (("older", "ours"), ("ours", "older"), ("older", "older")):
        stage(shared_url)
        for release, command in ((streaming, "stream"), (consuming, "consume")):
            app = "plain" if release == "ours" else "shop"
            reader = ["reader"] * (command == "consume")
            done = run(release, command, *reader, "--drain", app=app)
            assert done.returncode == 0, f"{release} {command}: {done.stderr}"

    assert effects(shared_url) == list(range(1, 31))


def test_a_consumer_of_the_older_release_refuses_packed_entries_and_ours_goes_on(run: Run, shared_url: str) -> None:
    """Guarantee 26: nothing is skipped, and nothing taken for something else."""
    initialise(shared_url)
    stage(shared_url)
    assert run("older", "stream", "--drain").returncode == 0
    stage(shared_url)
    assert run("ours", "stream", "--drain").returncode == 0

    refused = run("older", "consume", "reader", "--drain")

    assert refused.returncode == 5
    assert "it was not written by Penstock" in refused.stderr
    assert set(effects(shared_url)) <= set(range(1, 11))
    assert run("ours", "consume", "reader", "--drain").returncode == 0
    assert effects(shared_url) == list(range(1, 21))


def test_our_workers_refuse_the_schema_of_the_older_release_until_init(run: Run, shared_url: str) -> None:
    """Guarantee 26."""
    assert run("older", "init").returncode == 0
    before = "penstock_0002"
    assert get_revision(shared_url) == before
    stage(shared_url)
    assert run("older", "stream", "--drain").returncode == 0

    for command in ("stream", "consume reader", "run --engine inline", "status"):
        done = run("ours", *command.split())
        assert done.returncode == 2, done.stderr
        assert f"schema penstock is at {before}" in done.stderr
        assert "What to do: penstock init" in done.stderr

    assert run("ours", "init").returncode == 0
    assert get_revision(shared_url) == newest_shipped()
    assert run("ours", "consume", "reader", "--drain").returncode == 0
    assert effects(shared_url) == list(range(1, 11))
