"""Two sources under load, one of them restored to an older state: the other goes on, and the way out is exact."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psycopg
import pytest
import redis

from fixtures.flow import running
from fixtures.running_pipeline import Processes
from fixtures.sources import Backup, Regions, Source, keys
from penstock.database.connections import connect_postgres
from penstock.embedded import EmbeddedPostgres
from penstock.errors import HistoryDiverged
from penstock.operating.reset.epoch import reset_epoch
from penstock.streaming import Streamer
from penstock.testing import eventually

PAUSE_S = 0.005
APPLICATION = "from fixtures.sources import declare_totals\npipeline = declare_totals('totals')\n"
RUN = ("run", "--engine", "spark", "--no-streamer")


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


Consumers = Callable[[], AbstractContextManager[None]]


@pytest.fixture(params=["inline", pytest.param("spark", marks=[pytest.mark.spark, pytest.mark.storm])])
def consumers(request: pytest.FixtureRequest, regions: Regions, penstock_processes: Processes) -> Consumers:
    """Runs the consumer: two workers, as if in as many processes, or Spark with a task for each source."""

    @contextmanager
    def inline() -> Iterator[None]:
        with ExitStack() as stack:
            workers = [stack.enter_context(regions.worker()) for _ in range(2)]
            with running(*(worker.run for worker in workers)):
                yield

    return inline if request.param == "inline" else partial(on_spark, regions, penstock_processes)


@contextmanager
def on_spark(regions: Regions, processes: Processes) -> Iterator[None]:
    """The consumer in a Spark application of its own, which ends cleanly."""
    processes.write(APPLICATION)
    for name, url in regions.urls.items():
        processes.set(f"PENSTOCK_SOURCES__{name.upper()}", url)
    process = processes(*RUN)
    yield
    process.terminate()
    assert process.wait(180) == 0


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_on_spark_each_source_has_a_task(regions: Regions, penstock_processes: Processes, tmp_path: Path) -> None:
    penstock_processes.write(APPLICATION)
    missing = penstock_processes.run(*RUN)
    assert missing.returncode == 2
    assert "set PENSTOCK_SOURCES__EU to its URL" in missing.stderr

    for source, records in ((regions.eu, 30), (regions.us, 40)):
        source.stage(records, "k")
        source.stream()
    with on_spark(regions, penstock_processes):
        for source, records in ((regions.eu, 30), (regions.us, 40)):
            there = partial(_has, regions, source, keys("k", records))
            eventually(there, f"all of {source.name} is applied", timeout_s=180)
        regions.us.stage(5, "more ")
        regions.us.stream()
        there = partial(_has, regions, regions.us, [*keys("k", 40), *keys("more ", 5)])
        eventually(there, "more is applied", timeout_s=180)
    assert "totals[eu]" in (tmp_path / "penstock.log").read_text()


def _has(regions: Regions, source: Source, wanted: list[str]) -> bool:
    return regions.effects(source.name) == wanted


@pytest.mark.slow
def test_of_two_sources_under_load_one_is_restored_and_the_other_goes_on(
    regions: Regions, consumers: Consumers, postgres: EmbeddedPostgres, redis_client: redis.Redis
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
        load.enter_context(consumers())
        with running(*(producer.run for producer in producers.values())):
            for source in (eu, us):
                _wait_for_more(regions, source, 300)
            backup.restore()
            eventually(stopped.diverged.is_set, "the restored source's streamer stops", timeout_s=60)
            eventually(lambda: _halted(regions) == ["things@eu"] * 2, "its shards stop", timeout_s=60)
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
    has = Counter(key for life, keys in producers["eu"].committed.items() if life > 1 for key in keys)
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
        lambda: len(regions.effects(source.name)) >= before + records, f"{records} more of {source.name}", timeout_s=180
    )


def _halted(regions: Regions) -> list[object]:
    rows = regions.rows("SELECT channel FROM penstock.checkpoints WHERE halted IS NOT NULL")
    return [channel for (channel,) in rows]
