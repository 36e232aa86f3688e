"""Nudges end a pause early; a flood of them costs next to nothing."""

from collections.abc import Iterator
from time import monotonic, thread_time
from unittest.mock import patch

import pytest
from structlog.testing import capture_logs

from fixtures.clocks import Clock
from fixtures.flow import stage_rows
from penstock import Log
from penstock.database.connections import Connection, connect_postgres
from penstock.records import DEFAULT_SCOPE
from penstock.streaming import Streamer
from penstock.streaming.nudges import MAX_NUDGES, MAX_PAYLOAD_BYTES, Nudges
from penstock.testing import eventually


@pytest.fixture
def nudges(database_url: str) -> Iterator[Nudges]:
    made = Nudges(database_url, DEFAULT_SCOPE)
    made.open()
    yield made
    made.close()


def listeners(connection: Connection) -> int:
    row = connection.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE split_part(application_name, '/', 1) = 'penstock nudges' AND datname = current_database()"
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


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timed(database_url: str, clock: Clock) -> Iterator[Nudges]:
    """Nudges by the test's clock."""
    made = Nudges(database_url, DEFAULT_SCOPE, clock)
    made.open()
    yield made
    made.close()


def notify(connection: Connection, times: int, size: int = 0) -> None:
    """Notifies as often, with payloads that differ, and of this size if there is one."""
    connection.execute(
        "SELECT count(pg_notify('penstock_nudge', CASE %s WHEN 0 THEN i::text ELSE repeat('x', %s) END)) "
        "FROM generate_series(1, %s) i",
        [size, size, times],
    )


def is_listening(nudges: Nudges) -> bool:
    """Whether nudges are listened for, once all that were sent have arrived."""
    with capture_logs() as logs:
        while nudges.wait(0.05):
            pass
    return "not listening for nudges" not in [each["event"] for each in logs]


@pytest.mark.parametrize("later_s", [0, 0.99, 1.0])
@pytest.mark.parametrize(
    ("most", "more"), [((MAX_NUDGES, 0), (1, 0)), ((1, MAX_PAYLOAD_BYTES), (1, 1))], ids=["nudges", "bytes"]
)
def test_what_a_second_may_bring_is_no_flood_and_more_is(
    most: tuple[int, int], more: tuple[int, int], later_s: float, timed: Nudges, clock: Clock, connection: Connection
) -> None:
    notify(connection, *most)
    assert is_listening(timed)
    clock.now += later_s
    notify(connection, *more)
    assert timed.wait(60) == (later_s == 1.0)


@pytest.mark.parametrize("reason", ["a flood", "a connection that is ended"])
def test_after_ten_seconds_nudges_are_listened_for_again(
    reason: str, timed: Nudges, clock: Clock, connection: Connection
) -> None:
    if reason == "a flood":
        notify(connection, 1, 2 * MAX_PAYLOAD_BYTES - 1000)
        eventually(lambda: not is_listening(timed), "it is noticed")
    else:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE split_part(application_name, '/', 1) = 'penstock nudges' "
            "AND datname = current_database()"
        )
        while timed._connection is not None:
            assert not timed.wait(60), "nobody has nudged"
    clock.now += 9.99
    assert not timed.wait(0.001)
    timed.open()  # as by a streamer that connects again
    eventually(lambda: listeners(connection) == 0, "nobody listens")
    clock.now += 0.01
    assert not timed.wait(0.001)
    assert listeners(connection) == 1
    connection.execute("NOTIFY penstock_nudge")
    assert timed.wait(60)


@pytest.mark.parametrize("fails", ["connecting", "listening"])
def test_a_streamer_that_cannot_listen_tries_again_after_ten_seconds(
    fails: str, database_url: str, connection: Connection, clock: Clock
) -> None:
    """Otherwise each of its pauses would begin with another attempt."""

    def connect(url: str, *, application: str) -> Connection:
        made = connect_postgres(url, application=application)
        if fails == "listening":
            made.close()
        return made

    made = Nudges(database_url + "nowhere" * (fails == "connecting"), DEFAULT_SCOPE, clock)
    with patch("penstock.streaming.nudges.connect_postgres", side_effect=connect) as connecting, capture_logs() as logs:
        for seconds, attempts in ((0.0, 1), (9.99, 1), (0.01, 2)):
            clock.now += seconds
            assert not made.wait(0.001)
            assert connecting.call_count == attempts
    assert listeners(connection) == 0
    assert [line["event"] for line in logs] == ["not listening for nudges"], "it is logged once"


def test_a_streamer_whose_listening_connection_is_ended_goes_on(
    connection: Connection, streamer: Streamer, things: Log
) -> None:
    streamer.drain()
    connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE split_part(application_name, '/', 1) = 'penstock nudges' "
        "AND datname = current_database()"
    )
    stage_rows(connection, things, 10)
    assert not streamer._nudges.wait(60)

    assert streamer.drain() == 10
