"""Ticks at the boundaries of snapshots and of their own arrays."""

import pytest

from fixtures.crash_points import at_crash_points
from fixtures.flow import ReadLog, stage_rows
from penstock import Log
from penstock.database.connections import Connection, connect_postgres
from penstock.database.store import Store
from penstock.streaming import Streamer
from penstock.streaming.sequencer import tick

pytestmark = pytest.mark.things(shards=1)

ARRAY_BITS = 20
"""A tick has an array of ids for each 2^20 of them."""


def journaled(connection: Connection) -> list[int]:
    rows = connection.execute("SELECT record_ids FROM penstock.journal ORDER BY first_offset")
    return [id_ for [ids] in rows for id_ in ids]


def test_a_transaction_that_is_exactly_the_snapshots_xmax_is_sequenced(
    connection: Connection, database_url: str, things: Log
) -> None:
    """Guarantee 2: the only open transaction is the first id that the snapshot does not cover."""
    stage_rows(connection, things, 1, "before")
    with connect_postgres(database_url, application="open") as other, other.transaction():
        stage_rows(other, things, 1, "open")
        [(xid,)] = other.execute("SELECT pg_current_xact_id()::text::bigint").fetchall()
        assert tick(Store(connection)).sequenced == 1
        [(xmax,)] = connection.execute(
            "SELECT pg_snapshot_xmax(snapshot)::text::bigint FROM penstock.ticks ORDER BY tick DESC LIMIT 1"
        ).fetchall()
        assert xid == xmax

    assert tick(Store(connection)).sequenced == 1


def test_ids_within_a_tick_are_in_order_whatever_the_order_of_the_rows(connection: Connection, things: Log) -> None:
    """Ids are drawn before rows are written: those of concurrent transactions are in any order in the table."""
    connection.execute(
        "INSERT INTO penstock.staged_records (id, channel, shard, key, action, object, data) "
        "OVERRIDING SYSTEM VALUE "
        "SELECT id, 'things', 0, 'k', 'insert', 'thing', '{}' FROM unnest(ARRAY[5, 2, 4, 1, 3]) AS id"
    )
    tick(Store(connection))

    assert journaled(connection) == [1, 2, 3, 4, 5]


def test_a_tick_across_a_boundary_of_its_arrays_keeps_the_order_of_ids(
    connection: Connection, database_url: str, things: Log
) -> None:
    """Guarantee: order within a shard; here the ids on both sides of 2^20 and 2^21, staged in mixed order."""
    boundary = 1 << ARRAY_BITS
    sequence = "pg_get_serial_sequence('penstock.staged_records', 'id')"
    with connect_postgres(database_url, application="early") as early, early.transaction():
        early.execute("SELECT pg_current_xact_id()")
        for at in (boundary - 5, 2 * boundary - 5):
            connection.execute(f"SELECT setval({sequence}, {at})".encode())
            stage_rows(connection, things, 7, f"{at} ")
            stage_rows(early, things, 2, f"early {at} ")
    tick(Store(connection))

    ids = journaled(connection)
    assert len(ids) == 18
    assert ids == sorted(ids)


def test_nothing_reaches_redis_before_the_tick_is_committed(
    connection: Connection, database_url: str, things: Log, streamer: Streamer, logged: ReadLog
) -> None:
    """Guarantee 3: at every point of the round, what the log holds is in the journal that others can read."""
    [shard] = things.shard_names
    visible: list[tuple[int, int]] = []

    def compare(_: str) -> None:
        held = len(logged(things)[shard])
        with connect_postgres(database_url, application="other") as other:
            visible.append((held, len(journaled(other))))

    stage_rows(connection, things, 3)
    with at_crash_points(compare):
        streamer.round()

    assert (3, 3) in visible
    assert all(held <= sequenced for held, sequenced in visible)
