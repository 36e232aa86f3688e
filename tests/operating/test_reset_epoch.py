"""After Postgres has lost what was published, an operator resets the epoch, and everything is exact again."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

import pytest
import redis
from sqlalchemy import text
from sqlalchemy.orm import Session

from fixtures.constants import SetConstants
from fixtures.damage import copy_data, restore_data
from fixtures.flow import stage_rows
from fixtures.restored import Scene
from penstock import Log, Pipeline
from penstock.channels.routing import log_keys
from penstock.clients import LogGroup
from penstock.consuming import WorkerSetup
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import Connection, connect_postgres
from penstock.embedded import EmbeddedPostgres
from penstock.embedded.postgres import account_for_postgres, postgres_binaries
from penstock.errors import Fenced, HistoryDiverged, LogDiverged, Refused
from penstock.operating.reset import epoch as epoch_module
from penstock.operating.reset.epoch import reset_epoch
from penstock.records import Record
from penstock.streaming import Streamer
from penstock.testing import eventually

EFFECTS = "CREATE TABLE IF NOT EXISTS public.effects (record_id bigint, key text)"


class ReadScene(Scene):
    """With one consumer."""

    def declare(self) -> None:
        @self.flow.consumer(reads=self.things, name="reader")
        def reader(session: Session, records: Sequence[Record]) -> None:
            for record in records:
                session.execute(
                    text("INSERT INTO public.effects VALUES (:id, :key)"), {"id": record.id, "key": record.key}
                )

    def consume(self, url: str) -> None:
        with connect_postgres(url, application="test") as connection:
            connection.execute(EFFECTS)
        with LogWorker(WorkerSetup(self.flow, self.flow.get_consumer("reader"), url, self.redis_url)) as worker:
            worker.drain()

    def finish(self, url: str) -> None:
        """Publishes and applies everything, and asserts that it is exact."""
        self.stream(url)
        self.consume(url)
        self.assert_exact(url)

    def assert_exact(self, url: str) -> None:
        """Asserts that every committed record is in the log once and has one effect, and that nothing else is there."""
        with connect_postgres(url, application="test") as connection:
            committed = connection.execute("SELECT id, key FROM penstock.staged_records ORDER BY id").fetchall()
            effects = connection.execute("SELECT record_id, key FROM public.effects ORDER BY record_id").fetchall()
            named = connection.execute("SELECT unnest(record_ids) FROM penstock.journal ORDER BY 1").fetchall()
        log = self.log()
        assert effects == committed
        assert [record_id for (record_id,) in named] == [record_id for record_id, _ in committed]
        assert sorted((r.id, r.key) for records in log.values() for r in records) == committed
        for records in log.values():
            assert [record.offset for record in records] == list(range(1, len(records) + 1))


@pytest.fixture
def scene(flow: Pipeline, things: Log, redis_client: redis.Redis, redis_url: str) -> ReadScene:
    made = ReadScene(flow, things, redis_client, redis_url)
    made.declare()
    return made


@pytest.mark.slow
def test_a_database_restored_from_an_older_copy_continues_in_a_new_epoch(
    scene: ReadScene, flow: Pipeline, server: EmbeddedPostgres, tmp_path: Path
) -> None:
    """Records that were published and then lost leave the log; those that Postgres has are delivered once."""
    scene.publish(server.url, 50, "kept")
    scene.consume(server.url)
    copy_data(server, tmp_path / "older")
    scene.publish(server.url, 30, "lost")
    scene.consume(server.url)
    group = LogGroup(scene.client, "things", "sharers", shards=2)
    assert len(read_all(group)[0]) == 80
    restore_data(server, tmp_path / "older")
    scene.stage(server.url, 40, "after")

    with pytest.raises(HistoryDiverged, match="lost commits"):
        scene.stream(server.url)
    with connect_postgres(server.url, application="test") as connection:
        plan = reset_epoch(connection, scene.client, flow)
        with pytest.raises(HistoryDiverged):  # a plan changes nothing
            scene.stream(server.url)
        done = reset_epoch(connection, scene.client, flow, apply=True)
        again = reset_epoch(connection, scene.client, flow, apply=True)

    assert plan.new_epoch == 2
    assert sum((plan.unsequenced or {}).values()) == 40
    assert {each.shard for each in plan.deleted} == {"things/0", "things/1"}
    assert plan.rewound == ()
    assert done.applied
    assert again.reason is None
    scene.stream(server.url)
    scene.consume(server.url)
    scene.stage(server.url, 10, "later")
    scene.finish(server.url)
    keys, diverged = read_all(group)
    assert diverged == 2, "a group's reader is warned in each shard"
    assert sorted(keys) == sorted([f"after{n}" for n in range(1, 41)] + [f"later{n}" for n in range(1, 11)])


def read_all(group: LogGroup) -> tuple[list[str], int]:
    """The keys that a group gets, and how often it is warned that the log is another one."""
    keys: list[str] = []
    diverged = 0
    while True:
        try:
            taken = group.read(1000)
        except LogDiverged:
            diverged += 1
            continue
        if not taken:
            return keys, diverged
        keys += taken.records.keys


@pytest.mark.slow
def test_ids_of_lost_records_are_not_reused(
    scene: ReadScene, flow: Pipeline, server: EmbeddedPostgres, tmp_path: Path
) -> None:
    scene.publish(server.url, 5, "kept")
    copy_data(server, tmp_path / "older")
    scene.publish(server.url, 200, "lost")
    highest = max(record.id for records in scene.log().values() for record in records)
    restore_data(server, tmp_path / "older")

    with connect_postgres(server.url, application="test") as connection:
        reset_epoch(connection, scene.client, flow, apply=True)
        scene.stage(server.url, 1, "new")
        row = connection.execute("SELECT max(id) FROM penstock.staged_records").fetchone()

    assert row is not None
    assert row[0] > highest


@pytest.mark.slow
def test_a_database_loaded_into_another_cluster_continues_in_a_new_epoch(
    scene: ReadScene, flow: Pipeline, database_url: str, server: EmbeddedPostgres
) -> None:
    """Its records' transaction ids mean nothing there: no record is sequenced twice, and none is missed."""
    with connect_postgres(database_url, application="test") as connection:
        # Far ahead of the new cluster.
        for _ in range(2000):
            connection.execute("SELECT pg_current_xact_id()")
    scene.publish(database_url, 50, "streamed")
    scene.consume(database_url)
    scene.stage(database_url, 25, "waiting")
    moved = server.create_database("moved")
    dump_and_load(database_url, moved)

    with pytest.raises(HistoryDiverged, match="another cluster"):
        scene.stream(moved)
    with (
        connect_postgres(moved, application="test") as connection,
        connect_postgres(moved, application="early") as early,
    ):
        early.execute("BEGIN")
        early.execute("SELECT pg_current_xact_id()")
        plan = reset_epoch(connection, scene.client, flow, apply=True)
        stage_rows(early, scene.things, 5, "early")
        early.execute("COMMIT")

    assert plan.deleted == ()
    assert plan.foreign == 75
    scene.stream(moved)
    # The new cluster reaches the transaction ids of the records.
    with connect_postgres(moved, application="test") as connection:
        for _ in range(4000):
            connection.execute("SELECT pg_current_xact_id()")
    scene.stage(moved, 10, "later")
    scene.finish(moved)


def test_concurrent_transactions_are_neither_lost_nor_doubled_by_a_reset(scene: ReadScene, database_url: str) -> None:
    """One has already staged: the reset waits for it.  The other has its id, and stages after the reset."""
    scene.publish(database_url, 20, "first")
    pretend_loss(scene, 7)
    with (
        connect_postgres(database_url, application="staged") as staged,
        connect_postgres(database_url, application="later") as later,
    ):
        later.execute("BEGIN")
        later.execute("SELECT pg_current_xact_id()")
        staged.execute("BEGIN")
        stage_rows(staged, scene.things, 5, "staged")
        resetting = Thread(target=lambda: scene.reset(database_url, apply=True), daemon=True)
        resetting.start()
        eventually(lambda: waits_for_a_lock(database_url), "the reset waits for the open transaction")
        staged.execute("COMMIT")
        resetting.join(60)
        stage_rows(later, scene.things, 5, "later")
        later.execute("COMMIT")

    scene.finish(database_url)


@pytest.mark.parametrize("apply", [False, True])
def test_records_committed_beside_a_running_transaction_are_not_taken_for_another_clusters(
    scene: ReadScene, database_url: str, connection: Connection, *, apply: bool
) -> None:
    """Their ids lie beyond that of the running one, which has staged nothing."""
    scene.publish(database_url, 20, "first")
    pretend_loss(scene, 7)
    with connect_postgres(database_url, application="running") as running, running.transaction():
        running.execute("SELECT pg_current_xact_id()")
        scene.stage(database_url, 5, "beside")
        before = connection.execute("SELECT id, xid::text FROM penstock.staged_records ORDER BY id")
        xids = before.fetchall()

        plan = scene.reset(database_url, apply=apply)

        after = connection.execute("SELECT id, xid::text FROM penstock.staged_records ORDER BY id")
        assert after.fetchall() == xids
    assert plan.foreign == 0
    assert sum((plan.unsequenced or {}).values()) == 5
    if apply:
        scene.stage(database_url, 5, "after")
        scene.finish(database_url)


def test_a_prepared_transaction_that_has_staged_stops_the_reset(
    scene: ReadScene, database_url: str, connection: Connection, set_constants: SetConstants
) -> None:
    set_constants("operating.reset.epoch", LOCK_TIMEOUT_S=1)
    scene.stream(database_url)
    pretend_loss(scene, 3)
    with connect_postgres(database_url, application="prepared") as prepared:
        prepared.execute("BEGIN")
        stage_rows(prepared, scene.things, 1)
        prepared.execute("PREPARE TRANSACTION 'left'")

    with pytest.raises(Refused, match="nothing was changed"):
        scene.reset(database_url, apply=True)

    connection.execute("ROLLBACK PREPARED 'left'")
    assert scene.reset(database_url, apply=True).applied


def test_a_streamer_of_the_old_epoch_is_fenced_out(
    scene: ReadScene, database_url: str, connection: Connection, streamer: Streamer
) -> None:
    stage_rows(connection, scene.things, 5, "a")
    streamer.drain()
    scene.client.delete(log_keys("penstock", scene.things.shard_names[0]).stream)
    pretend_loss(scene, 4)

    scene.reset(database_url, apply=True)
    stage_rows(connection, scene.things, 20, "b")

    with pytest.raises(Fenced):
        streamer.drain()


def test_an_interrupted_reset_is_noticed_and_can_be_repeated(
    scene: ReadScene, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.publish(database_url, 20, "first")
    pretend_loss(scene, 2)
    original = epoch_module._Opening._fence

    def crash(*arguments: object) -> None:
        original(*arguments)  # type: ignore[arg-type]  # passed on unchanged
        raise KeyboardInterrupt

    monkeypatch.setattr(epoch_module._Opening, "_fence", crash)
    with pytest.raises(KeyboardInterrupt):
        scene.reset(database_url, apply=True)
    monkeypatch.undo()

    with pytest.raises(HistoryDiverged, match="was not finished"):
        scene.stream(database_url)
    assert scene.reset(database_url, apply=True).new_epoch == 4
    scene.finish(database_url)


def test_a_checkpoint_beyond_the_journal_is_moved_back_to_its_end(
    scene: ReadScene, database_url: str, connection: Connection
) -> None:
    """It has passed records that Postgres has lost; the same offsets now belong to other records."""
    scene.publish(database_url, 20, "first")
    scene.consume(database_url)
    connection.execute('UPDATE penstock.checkpoints SET "offset" = "offset" + 5 WHERE shard = 0')
    pretend_loss(scene, 2)
    scene.stage(database_url, 30, "second")

    plan = scene.reset(database_url, apply=True)

    assert [(each.consumer, each.shard, each.offset - each.journal) for each in plan.rewound] == [
        ("reader", "things/0", 5)
    ]
    scene.finish(database_url)


def test_a_record_that_is_gone_keeps_its_offset_where_somebody_has_read_that_far(
    scene: ReadScene, database_url: str, connection: Connection
) -> None:
    """Sequenced again, the records behind it would be at offsets that were passed."""
    for part in range(3):
        scene.publish(database_url, 10, f"k{part}")
    scene.consume(database_url)
    connection.execute("DELETE FROM penstock.staged_records WHERE id = 15")
    pretend_loss(scene, 2)
    journal = "SELECT channel, shard, first_offset, record_ids FROM penstock.journal ORDER BY 1, 2, 3"
    before = connection.execute(journal).fetchall()

    plan = scene.reset(database_url, apply=True)

    assert (plan.missing, plan.deleted) == (1, ())
    assert connection.execute(journal).fetchall() == before


def test_a_log_that_agrees_is_not_replayed(scene: ReadScene, database_url: str) -> None:
    scene.publish(database_url, 20, "first")
    before = scene.tails()
    pretend_loss(scene, 2)

    plan = scene.reset(database_url, apply=True)

    assert plan.deleted == ()
    assert scene.tails() == before


def pretend_loss(scene: Scene, epoch: int) -> None:
    """Makes the log look as if written in an epoch that Postgres does not know."""
    for shard in scene.things.shard_names:
        scene.client.set(log_keys("penstock", shard).epoch, epoch)


def waits_for_a_lock(url: str) -> bool:
    with connect_postgres(url, application="watching") as connection:
        return bool(connection.execute("SELECT FROM pg_locks WHERE NOT granted").fetchall())


def dump_and_load(source: str, target: str) -> None:
    binaries = postgres_binaries(account_for_postgres())
    dumped = subprocess.run([binaries / "pg_dump", source], check=True, capture_output=True)
    subprocess.run(
        [binaries / "psql", "--quiet", "--set=ON_ERROR_STOP=1", target],
        check=True,
        input=dumped.stdout,
        capture_output=True,
    )
