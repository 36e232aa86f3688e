"""What a record costs: microseconds of processor time, by process; the figure that hardly moves with the machine's load."""

import os
from collections.abc import Callable
from contextlib import closing
from functools import partial

from benchmarks.application import BULK
from benchmarks.backlogs import Backlog, Scale, make_observed, make_variants
from benchmarks.cases import limits
from benchmarks.cases.consuming import make_bulk_variants, prepare_consumer
from benchmarks.cases.costs import insert, make_source
from benchmarks.measuring import Case, Figures, NotMeasured
from benchmarks.peer_scripts import find_peers
from benchmarks.processor import Costs, measure_costs
from benchmarks.servers import BenchServers
from penstock.channels.commands import RedisClient
from penstock.database.connections import Connection
from penstock.pipeline import Pipeline
from penstock.streaming import Streamer


def make_cases(servers: BenchServers, scale: Scale) -> list[Case]:
    """From the staged row to the log, and from the log to the committed effect."""
    backlog = Backlog(scale.records)
    return [
        Case(
            name="cost-cpu-publish",
            unit="µs",
            sentence="processor time per record from staged to published: the sum, the worker, Postgres, Redis; and of staging it",
            ours=lambda: {**_measure_publishing(servers, backlog), **_measure_staging(servers, backlog)},
            limits={"xadd": lambda: _measure_append(servers, backlog)},
            variants=make_variants(partial(_measure_publishing, servers), backlog)
            | make_observed(partial(_measure_publishing, servers), backlog),
            peers=find_peers("drain", servers, Backlog(scale.records, shards=1), costs=True),
            better="less",
            rounds=scale.few_rounds,
        ),
        Case(
            name="cost-cpu-consume",
            unit="µs",
            sentence="processor time per record that a consumer applies in bulk: the sum, the worker, Postgres, Redis",
            ours=lambda: _measure_consuming(servers, backlog, BULK),
            variants=make_bulk_variants(partial(_measure_consuming, servers), backlog),
            peers=find_peers("consume", servers, backlog.kept_as("plain"), costs=True),
            better="less",
            rounds=scale.few_rounds,
        ),
    ]


def _measure_publishing(servers: BenchServers, backlog: Backlog) -> Figures:
    """One streamer, which has connected.

    Raises:
        NotMeasured: It published a different number of records.
    """
    url = servers.stage(backlog)
    with closing(Streamer(backlog.pipeline, url, servers.redis_url)) as streamer:
        streamer.open()

        def drain() -> None:
            published = streamer.drain()
            if published != backlog.records:
                raise NotMeasured(f"{published} of {backlog.records} records were published")

        return describe_costs(measure(servers, url, drain), backlog.records)


def _measure_staging(servers: BenchServers, backlog: Backlog) -> Figures:
    """Postgres' share of a producer that inserts records; the client's is what the peers' is."""
    url = make_source(servers, backlog)
    with servers.postgres(url) as connection:
        connection.execute("TRUNCATE penstock.staged_records")
        used = measure(servers, url, lambda: insert(connection, "penstock.staged_records", backlog))
    return {"-staged": 1e6 * used["postgres"] / backlog.records}


def _measure_append(servers: BenchServers, backlog: Backlog) -> Figures:
    """What it costs to append plain entries, without reading them from Postgres and without packing commands."""
    with limits.prepare_append(servers, backlog) as append:
        used = measure(servers, servers.database(backlog.database), append)
    return describe_costs({who: used[who] for who in ("worker", "redis")}, backlog.records)


def _measure_consuming(servers: BenchServers, backlog: Backlog, name: str, pipeline: Pipeline | None = None) -> Figures:
    url = servers.publish_and_register(backlog)
    with prepare_consumer(servers, backlog, url, name, pipeline) as apply_all:
        return describe_costs(measure(servers, url, apply_all), backlog.records)


def measure(servers: BenchServers, database_url: str, work: Callable[[], object]) -> Costs:
    """Processor time of this process and of the servers while this runs."""
    connection: Connection
    client: RedisClient
    with servers.postgres(database_url) as connection, servers.redis() as client:
        redis = int(client.info("server")["process_id"])
        return measure_costs(work, os.getpid(), connection.info.backend_pid, redis)


def describe_costs(costs: Costs, records: int) -> Figures:
    """Microseconds per record, by process; the first figure is their sum."""
    figures = {f"-{who}": 1e6 * used / records for who, used in costs.items()}
    return {"": sum(figures.values()), **figures}
