"""What a streamer notes of faults: once, and nothing that is none."""

import pytest
from structlog.testing import capture_logs

from fixtures.flow import stage_rows
from penstock import Log
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.errors import DamagedJournal
from penstock.records import Shard, ShardName
from penstock.streaming import tick
from penstock.streaming.faults import FaultLog, check_missed
from penstock.streaming.retention import TICKS_KEPT, remove_old_ticks


def test_an_unknown_shard_is_logged_when_it_is_found_and_not_again(connection: Connection) -> None:
    stage_rows(connection, Log("unknown", shards=1), 2)
    tick(Store(connection))
    faults = FaultLog()
    found = []
    for _ in range(2):
        with capture_logs() as logs:
            faults.update(Store(connection))
        found.append([entry["shard"] for entry in logs if entry["event"] == "shard unknown"])

    assert found == [["unknown/0"], []]


def test_records_that_the_last_tick_did_not_see_are_not_missed(connection: Connection, things: Log) -> None:
    stage_rows(connection, things, 5)

    for shard in things.shard_names:
        check_missed(Store(connection), shard)


def test_one_record_that_has_lost_its_offset_is_missed(connection: Connection, things: Log) -> None:
    for _ in range(3):
        stage_rows(connection, things, 1)
        tick(Store(connection))
    [(number, record)] = connection.execute(
        "DELETE FROM penstock.journal WHERE ctid = (SELECT max(ctid) FROM penstock.journal) "
        "RETURNING shard, record_ids[1]"
    ).fetchall()

    with pytest.raises(DamagedJournal, match=rf"1 record \(the first is record {record}\)"):
        check_missed(Store(connection), ShardName(things.name, Shard(number)))


def test_the_last_ticks_are_kept(connection: Connection) -> None:
    connection.execute(
        "INSERT INTO penstock.ticks (tick, snapshot, epoch) "
        "SELECT i, pg_current_snapshot(), 1 FROM generate_series(1000, 1300) AS i"
    )
    remove_old_ticks(Store(connection))

    assert connection.execute("SELECT min(tick), max(tick) FROM penstock.ticks").fetchall() == [
        (1300 - TICKS_KEPT, 1300)
    ]
