"""Which shards a streamer retains in a round, and when the next one is due."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from math import inf

import pytest
import redis

from fixtures.clocks import Clock
from fixtures.constants import SetConstants
from fixtures.flow import retain_now, stage_rows
from fixtures.intervals import refresh_now
from penstock import Log, Pipeline, Queue
from penstock.channels.routing import log_keys
from penstock.database.connections import Connection
from penstock.streaming import RoundResult, Streamer
from penstock.streaming.retention import EVERYWHERE_EVERY
from penstock.streaming.share import parse_share
from penstock.streaming.streamer import MAINTAIN_EVERYWHERE_EVERY

Start = Callable[[str], Streamer]


@pytest.fixture
def things() -> Log:
    return Log("things", shards=4, keep=timedelta(0))


@pytest.fixture
def flow(things: Log) -> Pipeline:
    return Pipeline([things, Queue("jobs", keep=timedelta(0))])


@pytest.fixture
def start(flow: Pipeline, database_url: str, redis_url: str, set_constants: SetConstants) -> Iterator[Start]:
    """Opens a streamer of a share, such as ``1/2``, that retains at its start and when it is called upon."""
    set_constants("streaming.retention", RETAIN_EVERY_S=inf)
    with ExitStack() as stack:
        yield lambda share: stack.enter_context(Streamer(flow, database_url, redis_url, share=parse_share(share)))


def rows_left(connection: Connection, things: Log) -> list[int]:
    """Rows of the journal in each shard; the newest always stays."""
    found: dict[int, int] = dict(
        connection.execute("SELECT shard, count(*) FROM penstock.journal GROUP BY shard").fetchall()
    )
    return [found.get(number, 0) for number in range(things.shards)]


def test_a_streamer_retains_its_own_shards_and_every_sixth_time_those_of_others(
    start: Start, connection: Connection, things: Log
) -> None:
    """Their streamer may be down."""
    first, second = start("1/2"), start("2/2")
    of_others = []
    for number in range(1, 2 * EVERYWHERE_EVERY + 1):
        stage_rows(connection, things, 40, f"{number} ")
        for streamer in (first, second):
            refresh_now(streamer)
        if number == 1:  # each retains at its start
            first.drain()
            second.drain()
        else:
            first.stream()
            second.stream()
            refresh_now(first)
            retain_now(first)
        others, *_ = left = rows_left(connection, things)
        assert (number, left) == (number, [others, 1] * 2)  # the first share begins with the queue
        of_others.append(others)

    assert of_others == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6, 1]


def test_a_streamer_refreshes_and_maintains_queues_each_second_and_those_of_others_every_eighth_time(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamer, clock = start("1/2"), Clock()
    publisher = streamer.opened().publisher
    refreshed, maintained = list[float](), list[tuple[float, bool]]()
    monkeypatch.setattr("penstock.streaming.streamer.monotonic", clock)
    monkeypatch.setattr(publisher, "refresh", lambda: refreshed.append(clock.now))

    def maintain(*, everywhere: bool) -> int:
        maintained.append((clock.now, everywhere))
        return 0

    monkeypatch.setattr(publisher, "maintain_queues", maintain)
    for _ in range(4 * MAINTAIN_EVERYWHERE_EVERY):
        streamer.round()
        clock.now += 0.5

    seconds = [1000.0 + number for number in range(2 * MAINTAIN_EVERYWHERE_EVERY)]
    assert refreshed == seconds
    assert maintained == [(second, second in {seconds[7], seconds[15]}) for second in seconds]


@pytest.mark.parametrize("share", ["1/2", "2/2"])
def test_a_streamer_pauses_before_its_next_round_and_the_one_that_sequences_takes_a_nudge_for_a_record(
    share: str, flow: Pipeline, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamer = Streamer(flow, database_url, redis_url, share=parse_share(share))
    pauses, expected = list[float](), list[bool]()
    monkeypatch.setattr("penstock.streaming.streamer.sleep", pauses.append)
    run_round = streamer.round

    def nudge(pause_s: float) -> bool:
        pauses.append(pause_s)
        return True

    def note(*, expects_records: bool = False) -> RoundResult:
        expected.append(expects_records)
        return run_round(expects_records=expects_records)

    monkeypatch.setattr(streamer._nudges, "wait", nudge)
    monkeypatch.setattr(streamer, "round", note)
    streamer.run(lambda: len(expected) == 3)

    assert expected == [False, *[share == "1/2"] * 2]
    assert len(pauses) == 2
    assert 0 < pauses[0] < pauses[1]


def test_a_shard_whose_log_cannot_be_used_is_left_as_it_is_and_retained_once_it_can(
    start: Start, connection: Connection, things: Log, redis_client: redis.Redis
) -> None:
    streamer, stream = start("1/1"), log_keys("penstock", things.shard_names[1]).stream
    for number in range(3):
        stage_rows(connection, things, 40, f"{number} ")
        streamer.drain()
    redis_client.rename(stream, "kept")
    redis_client.set(stream, "of another type")
    refresh_now(streamer)
    streamer.refresh()
    retain_now(streamer)
    assert rows_left(connection, things) == [1, 3, 1, 1]

    redis_client.rename("kept", stream)
    streamer.drain()
    retain_now(streamer)
    assert rows_left(connection, things) == [1, 1, 1, 1]


def test_retention_ends_with_old_ticks_and_notes_on_records_that_are_gone(
    start: Start, connection: Connection, things: Log, set_constants: SetConstants
) -> None:
    set_constants("streaming.retention", TICKS_KEPT=1)
    streamer = start("1/1")
    for number in range(3):
        stage_rows(connection, things, 1, f"{number} ")
        streamer.drain()
    connection.execute("INSERT INTO penstock.isolated_records VALUES (99, DEFAULT, '3', 'things', 0, 'why')")
    retain_now(streamer)

    counts = "SELECT (SELECT count(*) FROM penstock.ticks), (SELECT count(*) FROM penstock.isolated_records)"
    assert connection.execute(counts.encode()).fetchall() == [(2, 0)]


@pytest.mark.parametrize(("results", "left"), [(4999, 1), (5000, 0), (5001, 0)])
def test_old_results_are_removed_in_short_transactions_one_after_the_other(
    results: int, left: int, start: Start, connection: Connection, things: Log
) -> None:
    """After a full one it goes on at once, and otherwise in its time: what is added meanwhile waits for that."""
    streamer = start("1/1")
    add = "INSERT INTO penstock.job_results SELECT i, 'jobs', '1', now() - interval '1 day' FROM generate_series(%s::int, %s::int) i"
    connection.execute(add.encode(), [1, results])
    retain_now(streamer)
    connection.execute(add.encode(), [9000, 9000])
    for _ in range(2 * things.shards):  # each goes on for a while alone
        streamer.round()

    [(found,)] = connection.execute("SELECT count(*) FROM penstock.job_results").fetchall()
    assert found == left
