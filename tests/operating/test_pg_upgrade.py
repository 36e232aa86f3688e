"""``pg_upgrade`` makes another cluster with the same transaction ids, sequences and journal: the pipeline goes on by itself."""

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from fixtures.flow import stage_rows
from penstock import Log, Pipeline
from penstock.consuming import WorkerSetup
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import connect_postgres
from penstock.embedded import EmbeddedPostgres
from penstock.embedded.directories import hand_over
from penstock.embedded.postgres import account_for_postgres, postgres_binaries
from penstock.embedded.processes import account_options
from penstock.records import Record
from penstock.schema.initialise import initialise
from penstock.streaming import Streamer

pytestmark = pytest.mark.slow


def run(*command: str | Path, directory: Path) -> None:
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=directory, **account_options(account_for_postgres())
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory of the servers' user, with a short path: sockets are put there."""
    with TemporaryDirectory(prefix="up-", dir="/var/tmp") as made:
        hand_over(Path(made), account_for_postgres())
        yield Path(made)


def test_a_major_upgrade_goes_on_in_a_new_epoch(
    flow: Pipeline, things: Log, redis_url: str, tmp_path: Path, directory: Path
) -> None:
    """Records that were staged before the upgrade and not sequenced yet arrive once."""

    @flow.consumer(reads=things, name="reader")
    def reader(session: Session, records: Sequence[Record]) -> None:
        rows = [{"key": record.key} for record in records]
        session.execute(text("INSERT INTO public.effects VALUES (:key)"), rows)

    newest = postgres_binaries(account_for_postgres())
    earlier = sorted(newest.parent.parent.glob("pginstall*/bin"), key=lambda path: len(str(path)))
    if earlier[0] == newest:
        pytest.skip("the wheel has one release of Postgres")
    old = EmbeddedPostgres(tmp_path / "old", binaries=earlier[0])
    new = EmbeddedPostgres(tmp_path / "new", binaries=newest)
    try:
        old.start()
        initialise(old.url)
        with connect_postgres(old.url, application="test") as connection:
            connection.execute("CREATE TABLE public.effects (key text)")
            stage_rows(connection, things, 50, "streamed")
        work(flow, old.url, redis_url)
        with connect_postgres(old.url, application="test") as connection:
            stage_rows(connection, things, 20, "waiting")
        old.stop()
        new.start()
        new.drop_database("penstock")
        new.stop()
        # As the newer release has them by default.
        run(earlier[0] / "pg_checksums", "--enable", "-D", old.data_directory, directory=directory)
        run(
            *(newest / "pg_upgrade", "--username", "postgres"),
            *("-b", earlier[0], "-B", newest),
            *("-d", old.data_directory, "-D", new.data_directory),
            directory=directory,
        )

        new.start()
        with connect_postgres(new.url, application="test") as connection:
            stage_rows(connection, things, 10, "later")
            work(flow, new.url, redis_url)
            effects = connection.execute("SELECT key FROM public.effects ORDER BY 1").fetchall()
            staged = connection.execute("SELECT key FROM penstock.staged_records ORDER BY 1").fetchall()
            epochs = connection.execute("SELECT reason FROM penstock.epochs ORDER BY epoch").fetchall()
    finally:
        old.remove()
        new.remove()

    assert len(effects) == 80
    assert effects == staged
    assert len(epochs) == 2
    assert "cluster another" in epochs[1][0]


def work(flow: Pipeline, url: str, redis_url: str) -> None:
    """Streams and applies everything."""
    with Streamer(flow, url, redis_url) as streamer:
        streamer.drain()
    with LogWorker(WorkerSetup(flow, flow.get_consumer("reader"), url, redis_url)) as worker:
        worker.drain()
