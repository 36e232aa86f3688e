"""Several streamers share the shards; what one of them does not do, another takes over."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from fixtures.clocks import Clock
from fixtures.constants import SetConstants
from fixtures.flow import ReadLog, Site, retain_now, running, stage_rows
from fixtures.intervals import refresh_now
from penstock import Log, Pipeline, Queue
from penstock.channels.routing import log_keys
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.engines import inline
from penstock.errors import InvalidSetting
from penstock.operating.status.gathering import status
from penstock.records import Record, Shard, ShardName
from penstock.streaming import Share, Streamer, tick
from penstock.streaming.sequencer import MAX_INLINE_RECORDS
from penstock.streaming.share import ShardTakeover, TickTakeover, parse_share
from penstock.testing import eventually

pytestmark = [pytest.mark.things(shards=4), pytest.mark.channels("things", Queue("jobs", shards=4))]

Start = Callable[[str], Streamer]

MANY = 5 * MAX_INLINE_RECORDS
"""Records of a tick that does not return them, so that each shard is read by its own streamer."""

STAGE_JOBS = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
SELECT 'jobs', shard, 'tenant', 'send', 'mail', '{}' FROM generate_series(0, 3) AS shard
"""


@pytest.fixture
def start(flow: Pipeline, database_url: str, redis_url: str) -> Iterator[Start]:
    """Opens a streamer of a share, such as ``1/2``."""
    with ExitStack() as stack:

        def open_streamer(share: str) -> Streamer:
            made = Streamer(flow, database_url, redis_url, share=parse_share(share))
            return stack.enter_context(made)

        yield open_streamer


@pytest.fixture
def impatient(set_constants: SetConstants) -> None:
    """Stalled work is taken over within a tenth of a second."""
    set_constants("streaming.share", TAKEOVER_S=0.1, STEP_S=0.1)
    set_constants("streaming.streamer", REFRESH_EVERY_S=0.02)


def lengths(log: Mapping[ShardName, list[Record]]) -> list[int]:
    return [len(records) for records in log.values()]


def count(log: Mapping[ShardName, list[Record]]) -> int:
    return sum(lengths(log))


def await_records(logged: ReadLog, things: Log, records: int) -> None:
    eventually(lambda: count(logged(things)) == records, "all shards are published")


def stopped_shards(connection: Connection, client: redis.Redis) -> list[str]:
    return [str(each.shard) for each in status(Store(connection), client).faults.stopped]


def check_whole(log: Mapping[ShardName, list[Record]], records: int) -> None:
    """Every record once, and dense offsets."""
    assert sorted(r.id for r in chain(*log.values())) == list(range(1, records + 1))
    for found in log.values():
        assert [record.offset for record in found] == list(range(1, len(found) + 1))


@given(st.integers(1, 9), st.dictionaries(st.sampled_from("abc"), st.integers(1, 12)))
def test_every_shard_belongs_to_one_share_and_shares_are_equal(of: int, channels: dict[str, int]) -> None:
    shards = [ShardName(c, Shard(n)) for c, many in channels.items() for n in range(many)]
    owned = [
        [shard for shard, distance in Share(number, of).distances(shards).items() if distance == 0]
        for number in range(1, of + 1)
    ]

    assert sorted(chain(*owned)) == sorted(shards)
    assert max(map(len, owned)) - min(map(len, owned)) <= 1


def test_the_next_shares_take_over_one_after_the_other() -> None:
    shards = [ShardName("a", Shard(n)) for n in range(4)]
    of_the_third = shards[2]
    distances = [Share(number, 4).distances(shards)[of_the_third] for number in (3, 4, 1, 2)]
    assert distances == [0, 1, 2, 3]


A, B, C, OWN = (ShardName("a", Shard(number)) for number in range(4))
DISTANCES = {A: 1, B: 1, C: 2, OWN: 0}


def test_a_shard_is_taken_over_once_it_has_stalled_for_long_and_is_given_back_once_it_moves() -> None:
    """At once it is not: what lacks nothing meanwhile, or moves, begins anew; and so does what was given back."""
    clock = Clock()
    takeover = ShardTakeover(Share(3, 3), clock)
    begun, unknown = clock.now, ShardName("b", Shard(0))
    for at, lacking, moved, taken in (
        (0, {A, B, C, OWN, unknown}, set(), set()),
        (1, {A, C, OWN, unknown}, set(), set()),
        (2, {A, B, C, OWN, unknown}, {unknown}, set()),
        (2.9, {A, B, C, OWN}, set(), set()),
        (3, {A, B, C, OWN}, set(), {A}),
        (3.9, {A, B, C, OWN}, set(), {A}),
        (4, {A, B, C, OWN}, set(), {A, C}),
        (4.5, {A, B, C, OWN}, {B, C, OWN}, {A}),
        (7.4, {A, B, C, OWN}, set(), {A}),
        (7.5, set(), {A}, set()),
        (8, {A, B, C, OWN}, set(), set()),
        (11, {A, B, C}, set(), {A, B}),
        (12, {C}, set(), {A, B, C}),
        (99, {OWN}, set(), {A, B, C}),
    ):
        clock.now = begun + at
        takeover.update(DISTANCES, lacking, moved)
        assert takeover.taken == taken, at


@pytest.mark.parametrize(("number", "later"), [(2, 0), (3, 1)])
def test_waiting_records_lead_to_a_takeover_of_ticks_until_their_streamer_ticks_again(number: int, later: int) -> None:
    """However long nothing came before the first of them.  One's own ticks are none of another."""
    clock = Clock()
    takeover = TickTakeover(Share(number, 3), clock)
    begun = clock.now
    for at, tick_number, has_new, is_due in (
        (0, 7, False, False),
        (50, 7, False, False),
        (52.9 + later, 7, True, False),
        (53 + later, 7, True, True),
        (54 + later, 7, False, False),
        (55 + later, 8, True, True),
        (60 + later, 9, True, False),
        (62.9 + 2 * later, 9, True, False),
        (63 + 2 * later, 10, True, False),
        (65.9 + 3 * later, 10, True, False),
        (66 + 3 * later, 10, True, True),
    ):
        clock.now = begun + at
        assert takeover.is_due(tick_number, has_new=has_new) == is_due, at
        if at == 54 + later:
            takeover.ticked(8)


@pytest.mark.parametrize("text", ["", "2", "0/2", "3/2", "1/0", "-1/2", "1/2/3", "1/1001", "a/b"])
def test_a_share_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidSetting, match="such as 1/2 or 2/2"):
        parse_share(text)


def test_each_streamer_publishes_its_share_of_a_backlog_and_together_they_publish_all(
    start: Start, connection: Connection, things: Log, logged: ReadLog
) -> None:
    first, second = start("1/2"), start("2/2")
    stage_rows(connection, things, MANY)

    done = first.round()
    assert done.sequenced == MANY
    assert [n > 0 for n in lengths(logged(things))] == [True, False, True, False]
    also = second.round()

    assert done.added + also.added == MANY
    assert done.known == also.known == 0
    assert not first.round().backlog
    check_whole(logged(things), MANY)


def test_a_small_tick_is_published_at_once_by_who_made_it(
    start: Start, connection: Connection, things: Log, logged: ReadLog
) -> None:
    """The others would have to hear of it first.  They find nothing to do, and send nothing again."""
    first, second = start("1/2"), start("2/2")
    for number in range(1, 4):
        stage_rows(connection, things, 20, f"{number} ")
        assert first.round().added == 20
        assert second.round().idle
    check_whole(logged(things), 60)


def test_an_idle_part_asks_postgres_once_a_round_and_redis_nothing(
    start: Start, connection: Connection, redis_client: redis.Redis, things: Log, tmp_path: Path
) -> None:
    first, second = start("1/2"), start("2/2")
    stage_rows(connection, things, 20)
    first.round()
    second.round()
    asked = second.opened().store.connection.pgconn
    before = redis_client.info("stats")["total_commands_processed"]
    with (tmp_path / "trace").open("wb") as trace:
        asked.trace(trace.fileno())
        for _ in range(20):
            second.stream()
        asked.untrace()
    assert redis_client.info("stats")["total_commands_processed"] == before + 1  # this one
    assert (tmp_path / "trace").read_text().count("ReadyForQuery") == 20


def test_tails_are_not_read_after_every_tick(
    start: Start, connection: Connection, things: Log, set_constants: SetConstants, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many shards that takes long, and most small ticks leave nothing to publish."""
    set_constants("streaming.streamer", TAILS_PAUSE=1e6, REFRESH_EVERY_S=1e6)
    first, second = start("1/2"), start("2/2")
    second.round()
    read = list[None]()
    monkeypatch.setattr(second.opened().publisher.tails, "read", lambda _: read.append(None))
    for number in range(10):
        stage_rows(connection, things, 1, f"{number} ")
        first.round()
        second.round()
    assert read == []


def test_the_inline_engine_streams_the_share_that_it_is_given(site: Site, set_constants: SetConstants) -> None:
    set_constants("streaming.share", TAKEOVER_S=600.0)
    run = partial(inline.run, site.flow, site.database_url, site.redis_url, share=Share(1, 2))
    with running(lambda stop: run(stop=stop)):
        stage_rows(site.connection, site.things, 1)
        await_records(site.logged, site.things, 1)
        stage_rows(site.connection, site.things, MANY)
        eventually(lambda: lengths(site.log())[0] > MANY / 8, "its share is published")
        assert lengths(site.log())[1] < MANY / 8


@pytest.mark.usefixtures("impatient")
def test_the_shards_of_a_missing_streamer_are_taken_over_and_given_back(
    start: Start, connection: Connection, things: Log, logged: ReadLog
) -> None:
    first, second = start("1/2"), start("2/2")
    others = [things.shard_names[1], things.shard_names[3]]
    with capture_logs() as logs:
        stage_rows(connection, things, MANY)
        eventually(lambda: first.round().idle and count(logged(things)) == MANY, "all is published")
        before = logged(things)

        stage_rows(connection, things, MANY, "later")
        tick(Store(connection))

        def has_published_its_share() -> bool:
            second.round()
            return all(len(logged(things)[shard]) > len(before[shard]) for shard in others)

        eventually(has_published_its_share, "the other one is back")
        eventually(lambda: first.round().idle, "the first one has seen it")

    taken = [e for e in logs if e["event"] == "taking over shards"]
    assert taken[0]["shards"] == ["things/1", "things/3"]
    given_back = [e["shard"] for e in logs if e["event"] == "giving back shard"]
    assert sorted(given_back) == ["things/1", "things/3"]


@pytest.mark.usefixtures("impatient")
def test_sending_records_again_gives_no_shard_back(
    start: Start, connection: Connection, things: Log, logged: ReadLog
) -> None:
    first = start("1/2")
    with capture_logs() as logs:
        stage_rows(connection, things, MANY)
        eventually(lambda: first.round().idle and count(logged(things)) == MANY, "all is published")
        first.opened().publisher.resend(5)
    assert "giving back shard" not in [e["event"] for e in logs]


@pytest.mark.usefixtures("impatient")
def test_without_the_streamer_that_sequences_another_ticks_until_it_is_back(
    start: Start, connection: Connection, things: Log, logged: ReadLog
) -> None:
    second = start("2/2")
    with capture_logs() as logs, running(second.run):
        for number in range(1, 4):
            stage_rows(connection, things, 30, f"{number} ")
            await_records(logged, things, 30 * number)
        assert [e["event"] for e in logs].count("taking over ticks") == 1

        first = start("1/2")
        with running(first.run):

            def has_left() -> bool:
                stage_rows(connection, things, 1, f"{len(logs)} ")
                return "giving back ticks" in [e["event"] for e in logs]

            eventually(has_left, "the first one ticks again", interval_s=0.02)


def test_a_streamer_that_moves_its_shards_is_left_alone_however_large_its_backlog(
    start: Start, connection: Connection, things: Log, set_constants: SetConstants
) -> None:
    set_constants("streaming.share", TAKEOVER_S=0.05)
    set_constants("streaming.streamer", REFRESH_EVERY_S=0.0)
    set_constants("streaming.publisher", ROUND_S=0.0)
    first, second = start("1/2"), start("2/2")
    stage_rows(connection, things, 20_000)
    rounds = 1
    with capture_logs() as logs:
        first.round()
        while second.round().backlog:
            first.round()
            rounds += 1
    assert rounds > 5
    assert [e for e in logs if "taking" in e["event"]] == []


def test_jobs_of_a_missing_streamer_are_fed_now_and_then(
    start: Start, connection: Connection, set_constants: SetConstants
) -> None:
    """Jobs that are due move no log, so nobody could see that they wait."""
    set_constants("streaming.queues", MAINTAIN_S=60.0)
    first = start("1/2")
    connection.execute(STAGE_JOBS)
    first.round()
    waiting = "SELECT count(*) FROM penstock.waiting_records WHERE NOT is_given"
    connection.execute(
        "INSERT INTO penstock.waiting_records (channel, shard, record_id, due) "
        "SELECT channel, shard, id, now() FROM penstock.staged_records"
    )
    first.maintain()
    assert connection.execute(waiting).fetchone() == (2,)

    def has_fed_all() -> bool:
        first.maintain()
        return connection.execute(waiting).fetchone() == (0,)

    eventually(has_fed_all, "the other share's jobs are fed, too")


def test_shards_of_a_missing_streamer_are_retained_now_and_then(
    connection: Connection, database_url: str, redis_url: str
) -> None:
    things = Log("things", shards=4, keep=timedelta(0))
    first = Streamer(Pipeline([things]), database_url, redis_url, share=Share(1, 2))
    first.refresh()
    for number in range(3):
        stage_rows(connection, things, 40, f"{number} ")
        first.stream()
    left = "SELECT DISTINCT shard FROM penstock.journal WHERE first_offset = 1 ORDER BY shard"

    retain_now(first)
    assert connection.execute(left).fetchall() == [(1,), (3,)]
    for _ in range(5):
        retain_now(first)
    first.close()
    assert connection.execute(left).fetchall() == []


def test_a_stopped_shard_that_another_streamer_has_noted_stays_noted(
    start: Start, connection: Connection, redis_client: redis.Redis, things: Log
) -> None:
    first, second = start("1/2"), start("2/2")
    stage_rows(connection, things, MANY)
    first.round()
    stream = log_keys("penstock", ShardName("things", Shard(1))).stream
    second.refresh()
    redis_client.set(stream, "somebody's")
    second.round()
    refresh_now(second)
    second.refresh()
    assert stopped_shards(connection, redis_client) == ["things/1"]

    connection.execute("DELETE FROM penstock.stopped_shards")  # as by a restore
    second.upkeep.reopen()
    second.upkeep.note_faults(Store(connection), second.opened().publisher, sequences=False)
    assert stopped_shards(connection, redis_client) == ["things/1"]

    first.opened().publisher.unusable.check_now()
    first.upkeep.reopen()
    first.upkeep.note_faults(Store(connection), first.opened().publisher, sequences=True)
    assert stopped_shards(connection, redis_client) == ["things/1"]
    second.opened().publisher.unusable.check_now()
    redis_client.delete(stream)
    for streamer in (second, second):
        refresh_now(streamer)
        streamer.refresh()
    assert stopped_shards(connection, redis_client) == []
