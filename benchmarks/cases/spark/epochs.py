"""The engine on Spark, in epochs, with a large backlog, beside the inline engine."""

from collections.abc import Callable
from functools import partial
from time import monotonic, sleep

from benchmarks import watching
from benchmarks.application import BULK
from benchmarks.backlogs import Backlog, Scale
from benchmarks.cases.consuming import count_applied
from benchmarks.measuring import Case, Figures, NotMeasured
from benchmarks.servers import BenchServers
from penstock.channels.log.streams import extents

CORES = (1, 2)
"""Cores that the engine is bound to; the servers may use all."""

POLL_EVERY_S = 0.005
LONGEST_S = 300.0


def make_cases(servers: BenchServers, scale: Scale) -> list[Case]:
    """The streamer, and a consumer, each on one core and on two."""
    backlog = scale.large_backlog
    return [
        Case(
            name=f"spark-{who}-{cores}",
            unit="records/s",
            sentence=f"{sentence} a backlog of {backlog.records:,} from its first record, bound to {cores} of the cores",
            ours=partial(run, servers, backlog, "spark", cores),
            limits={"inline engine": partial(run, servers, backlog, "inline", cores)},
            slow=True,
            rounds=scale.few_rounds,
        )
        for who, sentence, run in (
            ("drain", "the streamer on Spark empties", _measure_streamer),
            ("consume", "a consumer on Spark applies, in bulk,", _measure_consumer),
        )
        for cores in CORES
    ]


def _measure_streamer(servers: BenchServers, backlog: Backlog, engine: watching.EngineName, cores: int) -> Figures:
    url = servers.stage(backlog)
    namespace, shards = backlog.pipeline.scope.namespace, backlog.shard_names
    with servers.redis() as client, watching.run_engine(engine, url, servers.redis_url, cores=cores):

        def published() -> int:
            return sum(extent.entries for extent in extents(client, namespace, shards).values())

        return measure_rate(published, backlog.records)


def _measure_consumer(servers: BenchServers, backlog: Backlog, engine: watching.EngineName, cores: int) -> Figures:
    url = servers.publish_and_register(backlog)
    with (
        servers.postgres(url) as connection,
        watching.run_engine(engine, url, servers.redis_url, streamer=False, consumers=[BULK], cores=cores),
    ):
        return measure_rate(lambda: count_applied(connection, BULK), backlog.records)


def measure_rate(done: Callable[[], int], records: int) -> Figures:
    """Records per second from the first poll that finds a record done to the last record; without any start-up.

    Raises:
        NotMeasured: It did not finish in time, or all records were done at the first poll that found any.
    """
    deadline = monotonic() + LONGEST_S
    while not (first := done()) and monotonic() < deadline:
        sleep(POLL_EVERY_S)
    began = monotonic()
    while (last := done()) < records and monotonic() < deadline:
        sleep(POLL_EVERY_S)
    took = monotonic() - began
    if last != records:
        raise NotMeasured(f"{last} of {records} records were done within {LONGEST_S:.0f} s")
    if first == records:
        raise NotMeasured("all records were done at the first poll that found any")
    return {"": (records - first) / took}
