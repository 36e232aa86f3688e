"""Limits of a queue hold whatever Redis has lost: nothing is handed over before they are declared again.

A reader asks, and keeps all that it gets, after each call of a script that the streamer makes.  None of it is done,
so that whatever was handed over is in flight together.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import pytest
from sqlalchemy.orm import Session

from fixtures.clients import RedisClient
from penstock import Pipeline, Queue, limit, stage
from penstock.channels.queue.shard import QueueShard
from penstock.clients import FairQueue, Lease, QueueReader
from penstock.consuming import WorkerSetup
from penstock.consuming.queue.queue_worker import QueueWorker
from penstock.database.connections import Connection
from penstock.declaring.outcomes import Job
from penstock.declaring.unique import KeyLimits, TenantLimits
from penstock.streaming import Streamer
from penstock.testing import eventually

QUEUE = Queue("jobs", streams=4, hand=2)
JOBS = 6
JOB: Any = {"action": "send", "object": "receipt"}

SLOW = 1e-6
"""A rate at which only the burst goes during a test."""


@dataclass(frozen=True)
class Case:
    """Limits, and how many of six jobs of one tenant and key they let go at once."""

    most: int
    declared: dict[str, Any] = field(default_factory=dict)
    tenants: dict[str, TenantLimits] = field(default_factory=dict)
    """Set while it runs."""
    keys: dict[str, KeyLimits] = field(default_factory=dict)
    shards: int = 1

    @property
    def queue(self) -> Queue:
        return replace(QUEUE, shards=self.shards, **self.declared)


CASES = {
    "a tenant in flight": Case(2, {"limits": {"t": TenantLimits(in_flight=2)}}),
    "all tenants in flight": Case(1, {"limits": {"": TenantLimits(in_flight=1)}}),
    "a tenant's rate": Case(1, {"limits": {"t": TenantLimits(rate=SLOW)}}),
    "a rate with a burst": Case(3, {"limits": {"t": TenantLimits(rate=SLOW, burst=3)}}),
    "a paused tenant": Case(0, {"limits": {"t": TenantLimits(is_paused=True)}}),
    "a pause of all": Case(0, {"limits": {"": TenantLimits(is_paused=True)}}),
    "a weight": Case(JOBS, {"limits": {"t": TenantLimits(weight=3)}}),
    "an elastic limit": Case(JOBS, {"limits": {"t": TenantLimits(elastic=1)}}),
    "a tenant's bytes": Case(2, {"limits": {"t": TenantLimits(bytes=20)}}),
    "a key in flight": Case(1, {"key_limits": {"k": KeyLimits(in_flight=1)}}),
    "all keys in flight": Case(2, {"key_limits": {"": KeyLimits(in_flight=2)}}),
    "a key's rate": Case(1, {"key_limits": {"k": KeyLimits(rate=SLOW)}}),
    "a paused key": Case(0, {"key_limits": {"k": KeyLimits(is_paused=True)}}),
    "a key within each tenant": Case(1, {"key_limits": {"k": KeyLimits(in_flight=1)}, "keys_within": "tenant"}),
    "a key within each tenant of two shards": Case(
        1, {"key_limits": {"": KeyLimits(in_flight=1)}, "keys_within": "tenant"}, shards=2
    ),
    "a tenant and a key": Case(
        1, {"limits": {"t": TenantLimits(in_flight=2)}, "key_limits": {"k": KeyLimits(in_flight=1)}}
    ),
    "a tenant's, set while it runs": Case(1, tenants={"t": TenantLimits(in_flight=1)}),
    "a pause, set while it runs": Case(0, tenants={"": TenantLimits(is_paused=True)}),
    "a key's, set while it runs": Case(1, keys={"k": KeyLimits(in_flight=1)}),
    "a key's pause, set while it runs": Case(0, keys={"": KeyLimits(is_paused=True)}),
    "one set before a declared one": Case(
        1, {"key_limits": {"k": KeyLimits(in_flight=3)}}, keys={"k": KeyLimits(in_flight=1)}
    ),
}


def flush(client: RedisClient, _older: dict[bytes, bytes]) -> None:
    client.flushall()


def restore(client: RedisClient, older: dict[bytes, bytes]) -> None:
    """An older snapshot, or a failover to a replica that lags."""
    client.flushall()
    for key, value in older.items():
        client.restore(key, 0, value)


def delete_limits(client: RedisClient, _older: dict[bytes, bytes]) -> None:
    if keys := client.keys("*:q-limits"):
        client.delete(*keys)


def restore_limits(client: RedisClient, older: dict[bytes, bytes]) -> None:
    delete_limits(client, older)
    for key, value in older.items():
        if key.endswith(b":q-limits"):
            client.restore(key, 0, value, replace=True)


Harm = Callable[[RedisClient, dict[bytes, bytes]], None]


class Bench:
    """Jobs, a streamer, and a reader that keeps what it gets."""

    def __init__(self, case: Case, database_url: str, redis_url: str, client: RedisClient) -> None:
        self._urls, self._client, self._case = (database_url, redis_url), client, case
        self._queue = replace(QUEUE, shards=case.shards)
        self._flow, self._plain = make_flow(case.queue), make_flow(self._queue)
        self._worker: QueueWorker | None = None
        self._reader: QueueReader | None = None
        self.held: list[Lease] = []

    def stage_jobs(self, connection: Connection) -> None:
        with connection.transaction():
            for number in range(JOBS):
                stage(connection, to=self._queue, tenant="t", key="k", data={"n": number}, pipeline=self._plain, **JOB)

    def limit(self, connection: Connection) -> None:
        """What is set while it runs."""
        queue = self._case.queue
        for tenant, limits in self._case.tenants.items():
            limit(connection, limits, of=queue, tenant=tenant, pipeline=self._flow)
        for key, own in self._case.keys.items():
            limit(connection, own, of=queue, key=key, pipeline=self._flow)

    def copy_of_before(self) -> dict[bytes, bytes]:
        """Redis as it was with all the jobs, before there was any limit."""
        with Streamer(self._plain, *self._urls) as streamer:
            streamer.drain()
        return {key: self._client.dump(key) for key in self._client.scan_iter()}

    def streamer(self) -> Streamer:
        return Streamer(self._flow, *self._urls)

    def open_worker(self) -> None:
        """The reader is that of a worker that starts now."""
        self.close()
        self._worker = QueueWorker(WorkerSetup(self._flow, self._flow.get_consumer("work"), *self._urls))
        self._worker.open()
        self._reader = self._worker._opened_reader()

    def open_reader(self) -> None:
        """The reader knows nothing of the pipeline."""
        queue = FairQueue(self._client, QUEUE.name, streams=4, hand=2, shards=self._case.shards)
        self._reader = queue.reader()

    def take(self) -> int:
        assert self._reader is not None
        self.held += self._reader.read(100)
        assert len(self.held) <= self._case.most
        return len(self.held)

    def suffer(self, harm: Harm, older: dict[bytes, bytes]) -> None:
        """Harms Redis.  After a loss of everything, former leases are not known any more."""
        if harm in {flush, restore}:
            self.forget()
        harm(self._client, older)

    def forget(self) -> None:
        assert self._reader is not None
        self._reader.forget(self.held)
        self.held = []

    def settle(self, streamer: Streamer) -> None:
        """As many go in the end as may."""

        def is_settled() -> bool:
            streamer.drain()
            streamer.maintain()
            return self.take() == self._case.most

        eventually(is_settled, "as many are handed over as may be")

    def close(self) -> None:
        if self._worker is not None:
            self.forget()
            self._worker.close()
        elif self._reader is not None:
            self._reader.close()


def make_flow(queue: Queue) -> Pipeline:
    flow = Pipeline([queue])

    @flow.worker(reads=queue)
    def work(_session: Session, _job: Job[Any]) -> None: ...

    return flow


@pytest.fixture
def bench(
    case: Case, database_url: str, redis_url: str, redis_client: RedisClient, connection: Connection
) -> Iterator[Bench]:
    made = Bench(case, database_url, redis_url, redis_client)
    with made.streamer() as streamer:  # makes the channel known
        streamer.drain()
    made.stage_jobs(connection)
    yield made
    made.close()


@contextmanager
def after_each_call(monkeypatch: pytest.MonkeyPatch, do: Callable[[int], None]) -> Iterator[None]:
    """Calls ``do`` with its number after each call of a script of a queue, other than those that ``do`` makes."""
    call, numbers, is_within = QueueShard.call, count(), False

    def calling(self: QueueShard, name: str, arguments: Any, before: Any = ()) -> Any:
        nonlocal is_within
        reply = yield from call(self, name, arguments, before)
        if not is_within:
            is_within = True
            do(next(numbers))
            is_within = False
        return reply

    with monkeypatch.context() as patched:
        patched.setattr(QueueShard, "call", calling)
        yield


def losses() -> Iterator[Any]:
    """All cases under the loss of everything, and each under every second other harm and reader, in turn."""
    others = [
        (harm, opens)
        for harm in (restore, delete_limits, restore_limits, flush)
        for opens in ("open_worker", "open_reader")
    ]
    # An older copy leaves no trace that a reader without a pipeline sees; the loss of everything has its own line below.
    others = [other for other in others if other not in {(restore, "open_reader"), (flush, "open_worker")}]
    for number, (name, case) in enumerate(CASES.items()):
        yield pytest.param(case, flush, "open_worker", id=f"{name}, flush, open_worker")
        for place, (harm, opens) in enumerate(others):
            # What is in an older copy was not refused; and a key's rate begins anew when what keys have in flight is counted again.
            if harm in {restore, restore_limits} and "bytes" in name:
                continue
            if harm in {delete_limits, restore_limits} and name == "a key's rate":
                continue
            if (number + place) % 2:
                yield pytest.param(case, harm, opens, id=f"{name}, {harm.__name__}, {opens}")


@pytest.mark.slow
@pytest.mark.parametrize(("case", "harm", "opens"), [*losses()])
def test_limits_hold_at_each_step_of_a_refill(
    harm: Harm, opens: str, bench: Bench, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee 46: Redis is lost once, and again at some call of the streamer's that writes it anew."""
    older = bench.copy_of_before() if harm in {restore, restore_limits} else {}
    bench.limit(connection)
    with bench.streamer() as streamer:
        streamer.drain()
        getattr(bench, opens)()
        bench.settle(streamer)
        at, is_reached = 0, True
        while is_reached:
            is_reached = False

            def do(number: int, at: int = at) -> None:
                nonlocal is_reached
                if number == at:
                    is_reached = True
                    bench.suffer(harm, older)
                bench.take()

            bench.suffer(harm, older)
            bench.take()
            with after_each_call(monkeypatch, do):
                streamer.drain()
                streamer.maintain()
            bench.settle(streamer)
            at += 1
    assert at > 3


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items() if "bytes" not in name])
def test_a_worker_that_starts_on_an_older_copy_of_redis_hands_over_nothing_under_its_limits(
    bench: Bench, connection: Connection, redis_client: RedisClient
) -> None:
    """Guarantee 46: though no streamer is there to declare those of now."""
    older = bench.copy_of_before()
    bench.limit(connection)
    with bench.streamer() as streamer:
        streamer.drain()
    restore(redis_client, older)
    bench.open_worker()

    eventually(lambda: bench.take() == bench._case.most, "as many are handed over as may be")
    assert list(redis_client.scan_iter("*:q-limits"))
