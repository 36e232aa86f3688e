"""The sequencer numbers everything committed, once, without gaps, whatever the order of commits."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from psycopg.errors import RaiseException

from fixtures.flow import stage_rows
from penstock import Log
from penstock.database.connections import Connection, connect_postgres
from penstock.database.store import Store
from penstock.errors import ServerUnavailable, UnsafeSetting
from penstock.streaming.sequencer import JOURNAL_CHUNK, MAX_INLINE_RECORDS, Sequencer, check_identity_cache, tick
from penstock.streaming.unpublished import BATCH_BYTES
from penstock.testing import eventually

JOURNAL = "SELECT shard, first_offset, last_offset, record_ids FROM penstock.journal ORDER BY shard, first_offset"


def sequenced_ids(connection: Connection) -> list[int]:
    return sorted(id_ for row in connection.execute(JOURNAL) for id_ in row[3])


def test_a_tick_sequences_exactly_what_is_committed(connection: Connection, database_url: str, things: Log) -> None:
    """Guarantee 2: records of an open transaction are not visible yet, and are sequenced later."""
    with connect_postgres(database_url, application="other") as other:
        with other.transaction():
            stage_rows(other, things, 3, "open")
            stage_rows(connection, things, 5, "committed")

            assert tick(Store(connection)).sequenced == 5
            assert tick(Store(connection)).sequenced == 0

        assert tick(Store(connection)).sequenced == 3


def test_a_lower_id_that_commits_later_is_sequenced(connection: Connection, database_url: str, things: Log) -> None:
    """Guarantee 2: ids are drawn before commit; the usual `id > last` would lose this record."""
    with connect_postgres(database_url, application="slow") as slow:
        with slow.transaction():
            stage_rows(slow, things, 1, "early id, late commit")
            stage_rows(connection, things, 1, "late id, early commit")
            tick(Store(connection))
        tick(Store(connection))

    assert sequenced_ids(connection) == [1, 2]


def test_a_transaction_that_gets_its_id_after_drawing_from_the_sequence_is_sequenced(
    connection: Connection, database_url: str, things: Log
) -> None:
    """Guarantee 2: nextval comes before the transaction's id."""
    with connect_postgres(database_url, application="slow") as slow, slow.transaction():
        slow.execute("SELECT nextval(pg_get_serial_sequence('penstock.staged_records', 'id'))")
        stage_rows(connection, things, 2)
        tick(Store(connection))
        stage_rows(slow, things, 1, "late")
    tick(Store(connection))

    assert len(sequenced_ids(connection)) == 3


def test_rolled_back_records_and_savepoints_leave_no_hole_in_the_offsets(connection: Connection, things: Log) -> None:
    """Guarantee 8: only committed records get offsets, and the offsets have no hole."""
    for number in range(10):
        with connection.transaction():
            stage_rows(connection, things, 3, f"kept {number}")
            with connection.transaction(force_rollback=True):
                stage_rows(connection, things, 3, f"undone {number}")
        tick(Store(connection))

    for shard in range(things.shards):
        entries = [row for row in connection.execute(JOURNAL).fetchall() if row[0] == shard]
        offsets = [at for row in entries for at in range(row[1], row[2] + 1)]
        assert offsets == list(range(1, len(offsets) + 1))
    assert len(sequenced_ids(connection)) == 30


def test_two_sequencers_at_once_do_not_number_a_record_twice(
    connection: Connection, database_url: str, things: Log
) -> None:
    """Guarantee 3: the primary key of ticks admits only one of them."""
    stage_rows(connection, things, 100)
    with connect_postgres(database_url, application="rival") as rival, ThreadPoolExecutor(1) as thread:
        with connection.transaction():
            connection.execute(
                "INSERT INTO penstock.ticks (tick, snapshot, epoch) VALUES (1, pg_current_snapshot(), 1)"
            )
            waiting = thread.submit(tick, Store(rival))
            eventually(lambda: waits_for_a_lock(connection), "it waits for the tick's primary key")

            def gives_up() -> bool:
                """Once would be taken for a limit of Postgres: it would try a part of the records."""
                rival.cancel_safe()
                return waiting.done()

            eventually(gives_up, "it gives up", timeout_s=90)
            with pytest.raises(ServerUnavailable, match="canceling statement"):
                waiting.result(60)
        contended = tick(Store(rival))

    assert contended.number == 1
    assert len(sequenced_ids(connection)) == contended.sequenced


def test_a_sequencer_that_loses_the_race_continues_from_the_others_tick(
    connection: Connection, database_url: str, things: Log
) -> None:
    """Guarantee 3: it waits, does nothing, and does not fail."""
    stage_rows(connection, things, 100)
    with connect_postgres(database_url, application="rival") as rival, ThreadPoolExecutor(1) as thread:
        with connection.transaction():
            connection.execute(
                "INSERT INTO penstock.ticks (tick, snapshot, epoch) VALUES (1, pg_current_snapshot(), 1)"
            )
            losing = thread.submit(Sequencer(Store(rival)).tick)
            eventually(lambda: waits_for_a_lock(connection), "it waits for the other")
        lost = losing.result(60)

    assert (lost.number, lost.sequenced, lost.inline_records) == (1, 0, [])
    assert sequenced_ids(connection) == []


def waits_for_a_lock(connection: Connection) -> bool:
    row = connection.execute(
        "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'"
    ).fetchone()
    return row == (1,)


@pytest.mark.parametrize("prepare", [False, True])
def test_a_tick_whose_commit_fails_has_not_happened(connection: Connection, things: Log, *, prepare: bool) -> None:
    """Guarantee 3: a result returned before the commit does not count."""
    connection.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'refused'; END $$; "
        "CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON penstock.journal "
        "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    stage_rows(connection, things, 3)
    sequencer = Sequencer(Store(connection), prepare=prepare)

    with pytest.raises(RaiseException, match="refused"):
        sequencer.tick()
    connection.execute("DROP TRIGGER at_commit ON penstock.journal")

    assert sequencer.tick().number == 1
    assert sequenced_ids(connection) == [1, 2, 3]


@pytest.mark.parametrize("prepare", [False, True])
def test_a_tick_is_durable_before_it_returns_whatever_the_default_is(
    connection: Connection, database_url: str, things: Log, *, prepare: bool
) -> None:
    """Guarantee 3: a crash of Postgres never takes back what was sent to Redis."""
    connection.execute(
        "CREATE TABLE public.seen (setting text); "
        "CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN INSERT INTO public.seen VALUES (current_setting('synchronous_commit')); RETURN NULL; END $$; "
        "CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON penstock.ticks "
        "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION see()"
    )
    with connect_postgres(database_url, application="lax") as lax:
        lax.execute("SET synchronous_commit = off")
        sequencer = Sequencer(Store(lax), prepare=prepare)
        for _ in range(3):
            stage_rows(connection, things, 1)
            sequencer.tick()

        assert lax.execute("SELECT setting FROM public.seen").fetchall() == [("on",)] * 3
        assert lax.execute("SHOW synchronous_commit").fetchone() == ("off",)


@pytest.mark.parametrize("lost", ["DISCARD ALL", "DEALLOCATE ALL"])
def test_a_session_that_lost_its_prepared_statements_is_usable(connection: Connection, things: Log, lost: str) -> None:
    """Guarantee 18: behind a pooler that keeps the protocol's prepared statements, and not those of SQL."""
    sequencer = Sequencer(Store(connection), prepare=True)
    for _ in range(3):
        stage_rows(connection, things, 2)
        assert sequencer.tick().sequenced == 2
        connection.execute(lost.encode())

    idle = Sequencer(Store(connection), prepare=True)
    for _ in range(3):
        assert not idle.newest_tick()[1]
        connection.execute(lost.encode())
    assert sequenced_ids(connection) == [1, 2, 3, 4, 5, 6]


def test_a_session_that_another_sequencer_used_before_is_usable(connection: Connection, things: Log) -> None:
    """Guarantee 18: the other's prepared statement still exists."""
    for _ in range(2):
        stage_rows(connection, things, 2)
        assert Sequencer(Store(connection), prepare=True).tick().sequenced == 2

    assert sequenced_ids(connection) == [1, 2, 3, 4]


@pytest.mark.parametrize("prepare", [False, True])
def test_a_tick_is_not_serializable_whatever_the_default_is(
    connection: Connection, database_url: str, things: Log, *, prepare: bool
) -> None:
    """A serializable tick would make serializable producers fail, since it reads where they write."""
    stage_rows(connection, things, 3)
    with (
        connect_postgres(database_url, application="strict") as strict,
        connect_postgres(database_url, application="producer") as producer,
    ):
        for each in (strict, producer):
            each.execute("SET default_transaction_isolation = serializable")
        with producer.transaction():
            producer.execute("SELECT count(*) FROM penstock.checkpoints")
            assert Sequencer(Store(strict), prepare=prepare).tick().sequenced == 3
            held = connection.execute(
                "SELECT count(*) FROM pg_locks WHERE mode = 'SIReadLock' AND pid = %s", [strict.info.backend_pid]
            ).fetchone()

    assert held == (0,)


def test_a_small_tick_returns_its_records_inline(connection: Connection, things: Log) -> None:
    stage_rows(connection, things, MAX_INLINE_RECORDS)
    few = tick(Store(connection))
    stage_rows(connection, things, MAX_INLINE_RECORDS + 1)
    many = tick(Store(connection))

    assert sum(batch.count for batch in few.inline_records) == MAX_INLINE_RECORDS
    assert {batch.shard: batch.last for batch in few.inline_records} == few.tails
    assert (many.sequenced, many.inline_records) == (MAX_INLINE_RECORDS + 1, [])


def test_of_few_heavy_records_the_first_are_inline(connection: Connection, things: Log) -> None:
    connection.execute("ALTER TABLE penstock.staged_records ALTER COLUMN data SET STORAGE EXTERNAL")
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "SELECT 'things', i %% 2, 'k', 'a', 'o', to_jsonb(repeat('x', %s)) FROM generate_series(1, 8) i",
        [BATCH_BYTES // 2],
    )
    done = tick(Store(connection))

    assert [(str(b.shard), b.first, b.count) for b in done.inline_records] == [("things/0", 1, 2)]
    assert done.tails == dict.fromkeys(things.shard_names, 4)


def test_an_idle_tick_writes_nothing(connection: Connection, things: Log) -> None:
    """It takes no transaction id: an idle pipeline costs one query."""
    stage_rows(connection, things, 5)
    sequencer = Sequencer(Store(connection))
    sequencer.tick()
    before = connection.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())").fetchone()
    for _ in range(20):
        sequencer.tick()

    after = connection.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())").fetchone()
    assert after == before


def test_a_backlog_is_split_into_journal_rows_of_bounded_size(connection: Connection, things: Log) -> None:
    stage_rows(connection, things, 5000)
    done = tick(Store(connection))

    sizes = [row[2] - row[1] + 1 for row in connection.execute(JOURNAL)]
    assert (done.sequenced, max(sizes), sum(sizes)) == (5000, JOURNAL_CHUNK, 5000)
    assert connection.execute(
        "SELECT max(pg_column_size(record_ids)) > 8 * %s FROM penstock.journal", [JOURNAL_CHUNK]
    ).fetchone() == (True,)  # stored uncompressed


def test_an_identity_cache_is_refused(connection: Connection) -> None:
    """Guarantee 2: CACHE 50 puts the changes of one key out of order within a connection pool."""
    check_identity_cache(Store(connection))
    connection.execute("ALTER TABLE penstock.staged_records ALTER COLUMN id SET CACHE 50")

    with pytest.raises(UnsafeSetting, match="SET CACHE 1"):
        check_identity_cache(Store(connection))


def test_a_prepared_transaction_delays_only_itself(connection: Connection, things: Log) -> None:
    """Guarantee 14."""
    connection.execute("BEGIN")
    stage_rows(connection, things, 1, "prepared")
    connection.execute("PREPARE TRANSACTION 'waits'")
    stage_rows(connection, things, 2)

    assert tick(Store(connection)).sequenced == 2
    connection.execute("COMMIT PREPARED 'waits'")
    assert tick(Store(connection)).sequenced == 1
