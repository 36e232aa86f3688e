"""Two sources under load, one of them restored to an older state: the other goes on, and the way out is exact."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

import psycopg
import pytest
import redis

from fixtures.flow import running
from fixtures.sources import Backup, Regions, Source
from penstock.database.connections import connect_postgres
from penstock.embedded import EmbeddedPostgres
from penstock.errors import HistoryDiverged
from penstock.operating.reset import reset_epoch
from penstock.streaming import Streamer
from penstock.testing import eventually

PAUSE_S = 0.005


@dataclass
class Producer:
    """Commits a few records at a time, and knows in which life of its database each was committed."""

    source: Source
    committed: dict[int, list[str]] = field(default_factory=lambda: {0: []})
    numbers: int = 0

    def run(self, stop: Callable[[], bool]) -> None:
        paused = threading.Event()
        while not stop():
            with suppress(psycopg.OperationalError), psycopg.connect(self.source.url) as connection:
                life = max(self.committed) + 1
                while not stop():
                    keys = [f"{life}-{self.numbers + i}" for i in range(3)]
                    self.numbers += 3
                    for key in keys:
                        connection.execute(
                            "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
                            "VALUES (%s, abs(hashtext(%s)) %% %s, %s, 'insert', 'thing', '1')",
                            (self.source.channel.name, key, self.source.channel.shards, key),
                        )
                    connection.commit()
                    self.committed.setdefault(life, []).extend(keys)
                    paused.wait(PAUSE_S)
            paused.wait(PAUSE_S)


@dataclass
class Streaming:
    """A streamer that runs until its source has diverged."""

    source: Source
    diverged: threading.Event = field(default_factory=threading.Event)

    def run(self, stop: Callable[[], bool]) -> None:
        try:
            Streamer(self.source.pipeline, self.source.url, self.source.redis_url).run(stop)
        except HistoryDiverged:
            self.diverged.set()


@contextmanager
def consumers(regions: Regions, number: int) -> Iterator[None]:
    """Several workers of the consumer, as if in as many processes."""
    with ExitStack() as stack:
        workers = [stack.enter_context(regions.worker()) for _ in range(number)]
        with running(*(worker.run for worker in workers)):
            yield


@pytest.mark.slow
def test_of_two_sources_under_load_one_is_restored_and_the_other_goes_on(
    regions: Regions, postgres: EmbeddedPostgres, redis_client: redis.Redis
) -> None:
    """Guarantees 10 and 5: nothing of what the sources have is lost or doubled, also in the restored one."""
    eu, us = regions.eu, regions.us
    for source in (eu, us):
        source.stage(100, "kept ")
        source.stream()
    regions.drain()
    backup = Backup.of(eu, postgres)
    producers = {source.name: Producer(source) for source in (eu, us)}
    stopped = Streaming(eu)

    with ExitStack() as load:
        load.enter_context(running(Streaming(us).run, stopped.run))
        load.enter_context(consumers(regions, 2))
        with running(*(producer.run for producer in producers.values())):
            for source in (eu, us):
                _wait_for_more(regions, source, 300)
            backup.restore()
            eventually(
                stopped.diverged.is_set, "the restored source's streamer stops", timeout_s=60
            )
            eventually(
                lambda: _halted(regions) == ["things@eu"] * 2, "its shards stop", timeout_s=60
            )
            at_halt = len(regions.effects("eu"))
            _wait_for_more(regions, us, 300)
            assert len(regions.effects("eu")) == at_halt

            with connect_postgres(eu.url, application="test") as connection:
                assert reset_epoch(connection, redis_client, eu.pipeline, apply=True).applied
            with running(Streaming(eu).run):
                _wait_for_more(regions, us, 100)
                assert len(regions.effects("eu")) == at_halt
                plan = regions.accept("eu", apply=True)
                _wait_for_more(regions, eu, 300)
    for source in (eu, us):
        source.stream()
    regions.drain()

    in_doubt = sum(each.in_doubt for each in plan)
    lost = Counter(producers["eu"].committed[1])
    has = Counter(
        key for life, keys in producers["eu"].committed.items() if life > 1 for key in keys
    )
    kept = Counter(f"kept {n}" for n in range(1, 101))
    effects = Counter(regions.effects("eu"))
    assert set(has) > set()
    assert effects & (has + kept) == has + kept
    assert (effects - has - kept).total() == in_doubt == (effects & lost).total() > 0
    assert Counter(regions.effects("us")) == kept + Counter(producers["us"].committed[1])
    assert _halted(regions) == []


def _wait_for_more(regions: Regions, source: Source, records: int) -> None:
    before = len(regions.effects(source.name))
    eventually(
        lambda: len(regions.effects(source.name)) >= before + records,
        f"{records} more of {source.name}",
        timeout_s=90,
    )


def _halted(regions: Regions) -> list[object]:
    rows = regions.rows("SELECT channel FROM penstock.checkpoints WHERE halted IS NOT NULL")
    return [channel for (channel,) in rows]
