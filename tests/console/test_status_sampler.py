"""One reader for all viewers: what it keeps, what it tells, and when it reads."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import redis

from fixtures.constants import SetConstants
from penstock import Pipeline
from penstock.channels.queue.stats import Dwell
from penstock.console import Visitor, status_sampler
from penstock.console.reading import HIDDEN, ConnectionPool
from penstock.console.reading import Reading as PageReading
from penstock.console.status_sampler import HOUR_POINTS, MAX_NAMES, Point, Sample, StatusSampler, make_point
from penstock.database.connections import Connection, connect_postgres
from penstock.database.store import Store
from penstock.errors import ServerUnavailable
from penstock.operating.status.gathering import status
from penstock.operating.status.snapshot import ConsumerShard, ConsumerStatus
from penstock.streaming import Streamer
from penstock.testing import eventually


def make_sample(*points: tuple[float, int, int], hour: Sequence[Point] = ()) -> Sample:
    """A sample whose points have a time, and the sequenced records of two channels."""
    return Sample(
        None, None, [Point(at, {"a": a, "b": b}, {"a": 0}, {}, {("reads", "a"): a}) for at, a, b in points], hour
    )


@pytest.mark.parametrize(
    ("points", "names", "rate"),
    [
        ([(0, 5, 7)], "a", None),
        ([(0, 5, 7), (10, 25, 8)], "a", 2.0),
        ([(0, 5, 7), (10, 25, 8)], "ab", 2.1),
        ([(0, 5, 7), (1, 9, 9), (10, 25, 8)], "b", 0.1),
        ([(0, 5, 7), (10, 25, 8)], "c", 0.0),
        ([(0, 5, 7), (10, 5, 8)], "a", 0.0),
        ([(0, 25, 7), (10, 5, 8)], "a", 0.0),
        ([(0, 5, 7), (0, 6, 8)], "a", 1000.0),
        ([(100, 5, 7), (104, 6, 8)], "a", 0.25),
    ],
)
def test_a_rate_is_what_was_added_between_the_first_point_and_the_last_a_second(
    points: list[tuple[float, int, int]], names: str, rate: float | None
) -> None:
    assert make_sample(*points).rate("sequenced", *names) == rate


def test_lags_are_those_of_the_hour_and_the_last() -> None:
    reads = ConsumerStatus("reads", "a", None, ())
    hour = make_sample((0, 3, 0), (15, 4, 0)).recent
    before = [Point(0, {}, {}, {}, {}), *hour]

    assert make_sample((30, 5, 0), (31, 6, 0), hour=before).lags(reads) == [3, 4, 6]
    assert Sample(None, None).lags(reads) == []
    assert make_sample((30, 5, 0)).lags(replace(reads, channel="b")) == []


@pytest.mark.usefixtures("streamer")
def test_points_of_a_minute_are_kept_and_each_quarter_of_a_minute_one_for_an_hour(
    connection: Connection, redis_client: redis.Redis, flow: Pipeline
) -> None:
    found, now = status(Store(connection), redis_client, flow), [0.0]
    sampler = StatusSampler(flow, "", "", clock=lambda: now[0])
    for now[0] in range(0, 2 * 3600 + 2, 2):
        sampler.store(found, None)
    sampler.store(None, "it is away")

    sample = sampler.sample

    assert sample is not None
    assert (sample.status, sample.error, sample.is_stale) == (found, "it is away", True)
    assert [point.time_s for point in sample.recent] == list(range(7142, 7202, 2))
    assert len(sample.hour) == HOUR_POINTS
    assert {later.time_s - before.time_s for before, later in zip(sample.hour, sample.hour[1:], strict=False)} == {16}
    assert sample.hour[-1].time_s == 7200


@pytest.mark.usefixtures("crowd")
def test_a_point_has_the_counts_of_all_shards_and_of_so_many_names(
    connection: Connection, redis_client: redis.Redis
) -> None:
    found = status(Store(connection), redis_client)
    [late] = [each for each in found.consumers if each.consumer == "late"]
    many = tuple(replace(late, consumer=f"c{number}") for number in range(MAX_NAMES + 5))

    point = make_point(found, 7.0)

    assert (point.time_s, point.sequenced["orders"], point.published["orders"]) == (7.0, 22, 20)
    assert (point.published["lost"], point.passed["late", "orders"], point.lag["late", "orders"]) == (0, 10, 12)
    assert len(make_point(replace(found, consumers=many), 7.0).lag) == MAX_NAMES


@pytest.mark.usefixtures("crowd")
def test_who_may_not_see_keys_sees_each_sample_without_its_reasons(
    connection: Connection, redis_client: redis.Redis
) -> None:
    found = status(Store(connection), redis_client)
    samples = iter([Sample(found, None), Sample(replace(found, consumers=()), None)])
    sampler: Any = SimpleNamespace(look=lambda: next(samples))
    reading = PageReading(None, "", "", sampler)

    _, shown = reading.status(Visitor("ann"))
    reasons = {reason for c in shown.consumers for shard in c.shards for reason in (shard.halted, shard.waiting)}
    assert {str(reason).partition(": penstock reset ")[0] for reason in reasons} == {"None", HIDDEN}
    assert {pause.reason for pause in shown.pauses} == {HIDDEN}
    assert reading.status(Visitor("ann"))[1].consumers == ()


def test_a_failure_of_postgres_is_remembered_for_a_while(database_url: str, set_constants: SetConstants) -> None:
    set_constants("console.reading", REMEMBERED_S=3600.0)
    pool = ConnectionPool("postgresql://postgres@127.0.0.1:1/none")
    for _ in range(2):
        with pytest.raises(ServerUnavailable), pool.connection():
            pass
        pool.url = database_url
    set_constants("console.reading", REMEMBERED_S=0.0)

    with pool.connection() as connection:
        assert connection.execute("SELECT 1").fetchall() == [(1,)]


@pytest.mark.usefixtures("scene")
def test_a_point_has_how_long_jobs_waited_in_the_worst_queue(
    connection: Connection, redis_client: redis.Redis, flow: Pipeline
) -> None:
    """Of queues from which nobody took a job, nothing is known."""
    found = status(Store(connection), redis_client, flow)
    [jobs] = [each for each in found.channels if each.channel == "jobs"]
    [shard] = jobs.shards
    queue: Any = shard.queue

    def with_dwells(quiet: Dwell, noisy: Dwell) -> Any:
        stats = replace(queue.stats, quiet=quiet, noisy=noisy)
        return replace(jobs, shards=(replace(shard, queue=replace(queue, stats=stats)),))

    none = Dwell(0, 9.0, 9.0)
    queues = (with_dwells(Dwell(5, 0.5, 2.0), none), with_dwells(Dwell(1, 0.1, 3.0), none), with_dwells(none, none))

    assert make_point(found, 7.0).dwell_s == (None, None)
    assert make_point(replace(found, channels=(*found.channels, *queues)), 7.0).dwell_s == (0.5, 3.0)


@pytest.mark.parametrize(
    ("latencies", "expected"),
    [
        ([], (None, None)),
        ([None], (None, None)),
        ([2.0], (2.0, 2.0)),
        ([9.0, None, 0.5, 0.1], (0.5, 9.0)),
        ([4.0, 1.0], (4.0, 4.0)),
    ],
)
@pytest.mark.usefixtures("streamer")
def test_latencies_are_the_median_and_the_maximum_of_all_shards(
    connection: Connection,
    redis_client: redis.Redis,
    flow: Pipeline,
    latencies: list[float | None],
    expected: tuple[float | None, float | None],
) -> None:
    found = status(Store(connection), redis_client, flow)
    read = ConsumerShard(0, 1, 0, 0.0, 1, 0, 0, 0, None, None, None, unread=False)
    consumers = [
        ConsumerStatus(f"c{n}", "a", None, (replace(read, latency_s=latency_s),))
        for n, latency_s in enumerate(latencies)
    ]
    assert make_point(replace(found, consumers=tuple(consumers)), 7.0).latency_s == expected


@pytest.fixture
def hurried(set_constants: SetConstants) -> None:
    """Samples follow each other without a pause."""
    set_constants("console.status_sampler", WATCHED_S=0.0, BUSY_SHARE=0)


@pytest.mark.usefixtures("hurried")
def test_the_reader_survives_any_error(
    flow: Pipeline, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([RuntimeError("once")])

    def fail_once(*arguments: Any, **options: Any) -> Any:
        for error in failures:
            raise error
        return status(*arguments, **options)

    monkeypatch.setattr("penstock.operating.status.gathering.status", fail_once)
    sampler = StatusSampler(flow, database_url, redis_url)

    assert sampler.look().status is None
    eventually(lambda: sampler.look().status is not None, "the next sample")
    sampler.close()


def test_viewers_share_one_reader(flow: Pipeline, database_url: str, redis_url: str) -> None:
    sampler = StatusSampler(flow, database_url, redis_url)

    found = [sampler.look() for _ in range(50)]
    sampler.close()

    assert found[0].status is not None
    assert sampler.samples <= 2
    assert len({id(each) for each in found}) <= 2


@contextmanager
def closing(sampler: StatusSampler) -> Iterator[StatusSampler]:
    try:
        yield sampler
    finally:
        sampler.close()


@pytest.fixture
def patient(set_constants: SetConstants) -> None:
    """Nothing is read but when it is wanted, and a viewer waits for it."""
    set_constants(
        "console.status_sampler",
        WATCHED_S=3600.0,
        WAIT_S=3600.0,
        TIMEOUTS=replace(status_sampler.TIMEOUTS, statement_s=3600.0, lock_s=3600.0),
    )


class Reading(NamedTuple):
    """A sampler whose first sample has its snapshot of Postgres, and waits for a lock until it is let go."""

    sampler: StatusSampler
    pool: ThreadPoolExecutor
    first: Future[Sample]
    let_go: Callable[[], object]


WAITS = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


@pytest.fixture
def reading(
    patient: None, streamer: Streamer, flow: Pipeline, connection: Connection, database_url: str, redis_url: str
) -> Iterator[Reading]:
    with (
        closing(StatusSampler(flow, database_url, redis_url)) as sampler,
        ThreadPoolExecutor(2) as pool,
        connect_postgres(database_url, application="test") as holder,
        holder.transaction(),
    ):
        holder.execute("LOCK TABLE penstock.reconciliations IN ACCESS EXCLUSIVE MODE")
        first = pool.submit(sampler.look)
        eventually(lambda: connection.execute(WAITS).fetchall(), "it waits for the lock")
        yield Reading(sampler, pool, first, lambda: holder.execute("COMMIT"))


def test_what_was_changed_while_a_sample_was_read_is_in_the_next(reading: Reading, connection: Connection) -> None:
    sampler, pool, first, let_go = reading
    connection.execute(
        "INSERT INTO penstock.pauses (kind, name, reason, paused_by) VALUES ('channel', 'things', 'a deploy', 'ann')"
    )
    sampler.forget()
    second = pool.submit(sampler.look)
    eventually(lambda: not second.running() or sampler.is_wanted, "the second viewer waits")
    let_go()
    before, after = first.result(), second.result()

    assert before.status is not None
    assert after.status is not None
    assert [each.name for each in after.status.pauses] == ["things"]


def test_who_comes_while_the_first_sample_is_read_waits_for_that_one(reading: Reading) -> None:
    sampler, pool, first, let_go = reading
    second = pool.submit(sampler.look)
    eventually(lambda: second.running() or second.done(), "another viewer is there")
    let_go()

    assert first.result().status is not None
    assert second.result() is first.result()


def test_a_sampler_that_is_closed_while_it_reads_ends_with_that_sample(reading: Reading) -> None:
    sampler, pool, first, let_go = reading
    closed = pool.submit(sampler.close)
    eventually(lambda: sampler.is_closing, "it is to end")
    let_go()

    assert first.result().status is not None
    closed.result()
    assert sampler.samples == 1
