"""Nudges end a pause early; a flood of them costs next to nothing."""

from collections.abc import Iterator
from time import monotonic, thread_time

import pytest
from structlog.testing import capture_logs

from fixtures.flow import stage_rows
from penstock import Log
from penstock.database.connections import Connection
from penstock.records import DEFAULT_SCOPE
from penstock.streaming import Streamer
from penstock.streaming.nudges import Nudges
from penstock.testing import eventually


@pytest.fixture
def nudges(database_url: str) -> Iterator[Nudges]:
    made = Nudges(database_url, DEFAULT_SCOPE)
    made.open()
    yield made
    made.close()


def listeners(connection: Connection) -> int:
    row = connection.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'penstock nudges' AND datname = current_database()"
    ).fetchone()
    assert row is not None
    return int(row[0])


def test_a_nudge_ends_the_pause(connection: Connection, nudges: Nudges) -> None:
    connection.execute("NOTIFY penstock_nudge")
    began = monotonic()

    assert nudges.wait(60)
    assert monotonic() - began < 50
    assert not nudges.wait(0.01)
    assert listeners(connection) == 1


def test_a_nudged_round_sequences_without_looking_first(
    connection: Connection, streamer: Streamer, things: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round trip less for a lone record; nothing is written if the nudge was a false one."""
    streamer.round()
    sequencer = streamer.opened().sequencer
    monkeypatch.setattr(sequencer, "newest_tick", lambda: pytest.fail("it looked first"))
    ticks = "SELECT count(*) FROM penstock.ticks"
    before = connection.execute(ticks).fetchone()
    assert streamer.round(expects_records=True).sequenced == 0
    assert connection.execute(ticks).fetchone() == before
    stage_rows(connection, things, 1)

    assert streamer.round(expects_records=True).added == 1


@pytest.mark.parametrize(("count", "size"), [(200_000, 0), (20_000, 7000)])
def test_a_flood_of_nudges_is_dropped_with_the_connection_that_it_came_on(
    connection: Connection, streamer: Streamer, things: Log, count: int, size: int
) -> None:
    """Anybody may NOTIFY.  Publishing goes on, and the streamer polls for a while."""
    streamer.drain()
    connection.execute(
        "SELECT count(pg_notify('penstock_nudge', i || repeat('x', %s))) FROM generate_series(1, %s) i", [size, count]
    )
    with capture_logs() as logs:
        stage_rows(connection, things, 10)
        began = thread_time()
        published = streamer.drain()
        took = thread_time() - began

        def is_dropped() -> bool:
            streamer._nudges.wait(0.01)
            return "not listening for nudges" in [each["event"] for each in logs]

        eventually(is_dropped, "the connection is dropped", interval_s=0)

    assert published == 10
    assert took < 1
    eventually(lambda: listeners(connection) == 0, "the connection is closed")


def test_a_streamer_whose_listening_connection_is_ended_goes_on(
    connection: Connection, streamer: Streamer, things: Log
) -> None:
    streamer.drain()
    connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'penstock nudges' "
        "AND datname = current_database()"
    )
    stage_rows(connection, things, 10)
    streamer._nudges.wait(1)

    assert streamer.drain() == 10
