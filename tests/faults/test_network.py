"""Faults of the network: lost replies, connections cut at the worst moment, servers that fall silent."""

import threading
from collections.abc import Callable, Iterator
from time import monotonic

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from fixtures.flow import LookAtLog, stage_rows
from fixtures.proxy import Proxy
from penstock import Log, Pipeline
from penstock.channels import server
from penstock.consuming import ConsumerWorker
from penstock.errors import ServerUnavailable
from penstock.postgres import Connection
from penstock.records import Record
from penstock.streaming import Streamer
from penstock.testing import eventually


@pytest.fixture
def effects(connection: Connection, flow: Pipeline, things: Log) -> Connection:
    """A table of effects that shows every double, and the consumer that fills it."""
    connection.execute("CREATE TABLE public.effects (record_id bigint)")

    @flow.consumer(reads=things, batch=50)
    def reader(session: Session, records: list[Record]) -> None:
        for record in records:
            session.execute(text("INSERT INTO public.effects VALUES (:id)"), {"id": record.id})

    return connection


Running = Callable[[Callable[[Callable[[], bool]], None]], None]


@pytest.fixture
def running() -> Iterator[Running]:
    """Runs a worker's loop in a thread, as its process would."""
    stop = threading.Event()
    threads: list[threading.Thread] = []

    def start(loop: Callable[[Callable[[], bool]], None]) -> None:
        threads.append(threading.Thread(target=loop, args=(stop.is_set,)))
        threads[-1].start()

    yield start
    stop.set()
    for thread in threads:
        thread.join(30)


def effect_ids(connection: Connection) -> list[int]:
    rows = connection.execute("SELECT record_id FROM public.effects ORDER BY 1")
    return [record_id for (record_id,) in rows]


@pytest.mark.parametrize("moment", ["cut_before", "cut_after"])
def test_a_consumer_that_loses_its_connection_at_commit_has_each_effect_once(
    flow: Pipeline,
    things: Log,
    effects: Connection,
    streamer: Streamer,
    postgres_proxy: Proxy,
    proxied_database_url: str,
    redis_url: str,
    running: Running,
    moment: str,
) -> None:
    """Guarantee 16: whether it was committed is not known, and need not be."""
    stage_rows(effects, things, 500)
    streamer.drain()
    worker = ConsumerWorker(flow, flow.consumer_named("reader"), proxied_database_url, redis_url)
    worker.open()
    setattr(postgres_proxy, moment, b"COMMIT")
    running(worker.run)

    eventually(lambda: len(effect_ids(effects)) >= 500, "all is applied")
    assert effect_ids(effects) == list(range(1, 501))
    assert postgres_proxy.cuts == 1


@pytest.mark.parametrize("moment", ["cut_before", "cut_after"])
def test_a_sequencer_that_loses_its_connection_at_commit_sequences_each_record_once(
    flow: Pipeline,
    things: Log,
    connection: Connection,
    postgres_proxy: Proxy,
    proxied_database_url: str,
    redis_url: str,
    logged: LookAtLog,
    running: Running,
    moment: str,
) -> None:
    """Guarantee 16."""
    streamer = Streamer(flow, proxied_database_url, redis_url)
    streamer.open()
    stage_rows(connection, things, 500)
    setattr(postgres_proxy, moment, b"COMMIT")
    running(streamer.run)

    def published() -> list[int]:
        return sorted(record.id for records in logged(things).values() for record in records)

    eventually(lambda: len(published()) >= 500, "all is published")
    assert published() == list(range(1, 501))
    assert postgres_proxy.cuts == 1


@pytest.mark.parametrize("moment", ["cut_before", "cut_after"])
def test_an_append_whose_reply_is_lost_is_not_doubled(
    flow: Pipeline,
    things: Log,
    connection: Connection,
    database_url: str,
    redis_proxy: Proxy,
    proxied_redis_url: str,
    logged: LookAtLog,
    running: Running,
    moment: str,
) -> None:
    """Guarantee 1: nobody's library sends it again behind our back, and we look before we do."""
    streamer = Streamer(flow, database_url, proxied_redis_url)
    streamer.open()
    stage_rows(connection, things, 500)
    setattr(redis_proxy, moment, b"EVALSHA")
    running(streamer.run)

    def published() -> list[int]:
        return [record.id for records in logged(things).values() for record in records]

    eventually(lambda: len(published()) >= 500, "all is published")
    assert sorted(published()) == list(range(1, 501))
    assert redis_proxy.cuts == 1


def test_a_redis_that_falls_silent_is_given_up_and_taken_again(
    flow: Pipeline,
    things: Log,
    connection: Connection,
    database_url: str,
    redis_proxy: Proxy,
    proxied_redis_url: str,
    logged: LookAtLog,
    running: Running,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guarantee 15: every call has a time limit; there is a pause between attempts."""
    monkeypatch.setattr(server, "REPLY_TIMEOUT_S", 0.3)
    streamer = Streamer(flow, database_url, proxied_redis_url)
    streamer.open()
    stage_rows(connection, things, 100)
    redis_proxy.silent = True
    running(streamer.run)
    before = redis_proxy.accepted
    eventually(lambda: redis_proxy.accepted >= before + 2, "it is tried again")
    tried, began = redis_proxy.accepted, monotonic()
    eventually(lambda: monotonic() - began > 1.0, "a second goes by")
    assert redis_proxy.accepted - tried < 5

    redis_proxy.silent = False

    eventually(
        lambda: sum(map(len, logged(things).values())) == 100, "all is published", timeout_s=20
    )


def test_a_postgres_that_accepts_and_does_not_answer_is_given_up(
    flow: Pipeline,
    postgres_proxy: Proxy,
    proxied_database_url: str,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guarantee 15."""
    monkeypatch.setitem(_keepalive(), "connect_timeout", 2)
    postgres_proxy.silent = True
    began = monotonic()

    with pytest.raises(ServerUnavailable, match="Postgres does not answer"):
        Streamer(flow, proxied_database_url, redis_url).round()
    assert monotonic() - began < 10


def _keepalive() -> dict[str, object]:
    from penstock import postgres  # noqa: PLC0415  the fixture has the name

    return postgres._KEEPALIVE
