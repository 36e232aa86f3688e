"""Network faults at the streamer and at a consumer: lost replies, cut connections, hanging ones."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from time import monotonic

import pytest
import redis
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from fixtures.constants import SetConstants
from fixtures.flow import Publish, Site, running
from fixtures.proxy import APPEND, COMMIT, Harm, Proxy, behind
from fixtures.truth import change, check_exact, declare_consumers
from penstock import Log, Pipeline
from penstock.consuming import WorkerSetup
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import Connection
from penstock.errors import ServerUnavailable
from penstock.records import Record
from penstock.streaming import Streamer
from penstock.testing import eventually

INSERT = text("INSERT INTO public.effects VALUES (:id)")
KEYS = [f"k{number}" for number in range(6)]


class Workers:
    """A streamer and two consumers, whose servers are behind proxies, and the truth of what they do."""

    def __init__(self, pipeline: Pipeline, books: Connection, client: redis.Redis, urls: tuple[str, str]) -> None:
        self.pipeline, self.books, self.client = pipeline, books, client
        self.streamer = Streamer(pipeline, *urls)
        self.consumers = [
            LogWorker(WorkerSetup(pipeline, spec, *urls, block_ms=50)) for spec in pipeline.consumers.values()
        ]

    def change(self) -> None:
        change(self.books, KEYS)

    def check(self, times: int) -> None:
        """Asserts that every change of so many times has its effects, once."""
        [things] = self.pipeline.channels.values()
        assert isinstance(things, Log)
        assert check_exact(self.books, self.client, things) == times * len(KEYS)

    def have_done_all(self) -> bool:
        [(missing,)] = self.books.execute(
            "SELECT (SELECT 2 * count(*) FROM public.truth) - (SELECT count(*) FROM public.effects)"
        ).fetchall()
        return bool(missing == 0)

    def running(self) -> AbstractContextManager[None]:
        return running(self.streamer.run, *(worker.run for worker in self.consumers))

    def drain(self) -> None:
        """Drains all of them; network failures are retried, as the loops do."""
        persist(self.streamer.drain, self.streamer.close)
        for worker in self.consumers:
            persist(worker.drain, worker.close)

    def close(self) -> None:
        self.streamer.close()
        for worker in self.consumers:
            worker.close()


def persist(work: Callable[[], int], close: Callable[[], None]) -> None:
    for _ in range(4):
        try:
            work()
        except ServerUnavailable:
            close()
        else:
            return
    raise AssertionError("it keeps failing")


@pytest.fixture
def proxies(postgres_proxy: Proxy, redis_proxy: Proxy) -> dict[str, Proxy]:
    return {"postgres": postgres_proxy, "redis": redis_proxy}


@pytest.fixture
def workers(
    flow: Pipeline,
    things: Log,
    books: Connection,
    redis_client: redis.Redis,
    database_url: str,
    redis_url: str,
    proxies: dict[str, Proxy],
) -> Iterator[Workers]:
    declare_consumers(flow, things)
    urls = behind(proxies["postgres"], database_url), behind(proxies["redis"], redis_url)
    made = Workers(flow, books, redis_client, urls)
    yield made
    made.close()


@pytest.mark.parametrize("harm", Harm)
def test_an_append_whose_reply_is_lost_is_sent_again_and_adds_nothing(
    workers: Workers, redis_proxy: Proxy, harm: Harm
) -> None:
    """Guarantee 1: the log itself is asked whether the append was carried out."""
    workers.change()
    workers.drain()
    workers.change()
    redis_proxy.harm(APPEND, harm)

    done = workers.streamer.round()
    workers.drain()

    # The shards' calls are in flight together: after the first, none or all may have been carried out.
    assert redis_proxy.harmed == 1
    assert (done.added, done.backlog) == ((len(KEYS), 0) if harm is Harm.LOSE_REQUEST else (0, 0))
    workers.check(2)


@pytest.mark.slow
@pytest.mark.parametrize("harm", Harm)
def test_a_cut_at_any_commit_loses_and_doubles_nothing(workers: Workers, postgres_proxy: Proxy, harm: Harm) -> None:
    """Guarantee 16: at the first COMMIT of a streamer and two consumers, at the second, and so on; with both outcomes."""
    commits = 0
    while postgres_proxy.harmed == commits:
        workers.change()
        workers.close()
        workers.streamer.upkeep.retain_at = 0.0  # retention is one of the commits
        postgres_proxy.harm(COMMIT, harm, skip=commits)
        workers.drain()
        postgres_proxy.heal()
        commits += 1
        workers.check(commits)

    # Registrations, the tick, retention, the consumers' batches.
    assert commits > 8


@pytest.mark.slow
@pytest.mark.parametrize("harm", Harm)
@pytest.mark.usefixtures("short_pauses")
def test_a_cut_at_any_request_to_redis_loses_and_doubles_nothing(
    workers: Workers, redis_proxy: Proxy, harm: Harm
) -> None:
    """Guarantee 1: at the first request, at the second, and so on, until the work is done without a fault."""
    requests = 0
    while redis_proxy.harmed == requests:
        workers.change()
        workers.close()
        redis_proxy.harm(b"", harm, skip=requests)
        workers.drain()
        redis_proxy.heal()
        requests += 1
        workers.check(requests)

    assert requests > 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_async", "harm"), [(False, Harm.LOSE_REQUEST), (True, Harm.LOSE_REPLY)], ids=["plain, request", "async, reply"]
)
@pytest.mark.usefixtures("short_intervals", "short_pauses")
def test_a_cut_at_any_request_to_postgres_ends_no_consumer(
    site: Site, publish: Publish, postgres_proxy: Proxy, harm: Harm, *, is_async: bool
) -> None:
    """Guarantee 15: also while the worker connects or registers."""
    site.connection.execute("CREATE TABLE public.effects (record_id bigint)")

    def plain(session: Session, records: Sequence[Record]) -> None:
        session.execute(INSERT, [{"id": record.id} for record in records])

    async def asynchronous(session: AsyncSession, records: Sequence[Record]) -> None:
        await session.execute(INSERT, [{"id": record.id} for record in records])

    site.flow.consumer(reads=site.things, name="reader")(asynchronous if is_async else plain)
    url = behind(postgres_proxy, site.database_url)
    requests = 0

    def effects() -> list[int]:
        rows = site.connection.execute("SELECT record_id FROM public.effects ORDER BY 1")
        return [number for (number,) in rows]

    while postgres_proxy.harmed == requests:
        publish(4, f"{requests} ")
        worker = LogWorker(WorkerSetup(site.flow, site.flow.get_consumer("reader"), url, site.redis_url, block_ms=20))
        postgres_proxy.harm(b"", harm, skip=requests)
        wanted = 4 * (requests + 1)
        end = monotonic() + 60
        worker.run(lambda: len(effects()) >= wanted or monotonic() > end)  # noqa: B023  called in this round
        postgres_proxy.heal()
        requests += 1
        assert effects() == list(range(1, wanted + 1))

    # Connecting, registering, the batches.
    assert requests > 11


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["postgres", "redis"])
def test_waiting_loops_survive_a_cut(workers: Workers, cut: str, proxies: dict[str, Proxy]) -> None:
    """Guarantee 15: a restarted server usually interrupts a wait, not a statement."""
    proxy = proxies[cut]
    with workers.running():
        for number in range(3):
            workers.change()
            eventually(workers.have_done_all, "records flow", timeout_s=45)
            proxy.refuse()
            proxy.heal()
            assert proxy.accepted > number
        workers.change()
        eventually(workers.have_done_all, "records flow again", timeout_s=45)

    workers.check(4)


@pytest.fixture
def short_time_limits(set_constants: SetConstants, limit_silence: Callable[[float], None]) -> float:
    """Sets all time limits to about a second, so that tests need not wait for them."""
    limit_silence(1.0)
    set_constants("channels.server", REPLY_TIMEOUT_S=1.0, CONNECT_TIMEOUT_S=1.0)
    return 1.0


@pytest.mark.chaos
@pytest.mark.parametrize("silent", ["postgres", "redis"])
@pytest.mark.parametrize("who", ["streamer", "consumer"])
@pytest.mark.usefixtures("short_time_limits")
def test_a_server_that_stops_answering_times_out_and_is_tried_again(
    workers: Workers, silent: str, who: str, proxies: dict[str, Proxy]
) -> None:
    """Guarantee 15: nothing waits for ever, neither on an open connection nor for a new one."""
    workers.change()
    workers.drain()
    workers.change()
    if who == "consumer":
        workers.streamer.drain()
    proxy = proxies[silent]
    worker = workers.streamer if who == "streamer" else workers.consumers[0]

    proxy.hold_back()
    for _ in range(2):
        began = monotonic()
        with pytest.raises(ServerUnavailable):
            worker.drain()
        assert monotonic() - began < 60
        worker.close()
    proxy.heal()
    workers.drain()

    workers.check(2)


@pytest.mark.slow
def test_slow_servers_cause_no_failure(workers: Workers, postgres_proxy: Proxy, redis_proxy: Proxy) -> None:
    """Guarantee 15: a delay is not a failure."""
    postgres_proxy.delay(0.01)
    redis_proxy.delay(0.01)
    workers.change()
    workers.drain()

    workers.check(1)


@pytest.mark.chaos
def test_an_unreachable_redis_is_retried_at_growing_intervals(workers: Workers, redis_proxy: Proxy) -> None:
    """Guarantee 13: no busy loop, and everything arrives once it is back."""
    with workers.running():
        workers.change()
        eventually(workers.have_done_all, "records flow")
        redis_proxy.refuse()
        before, began = redis_proxy.accepted, monotonic()
        workers.change()
        eventually(lambda: monotonic() - began > 2, "two seconds go by")
        attempts = redis_proxy.accepted - before
        redis_proxy.heal()
        eventually(workers.have_done_all, "records flow again", timeout_s=45)

    # 0.1 + 0.2 + 0.4 + 0.8 + 1.6 s: five attempts each, of at most two connections.
    assert 1 <= attempts <= 30
    workers.check(2)
