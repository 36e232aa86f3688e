"""Several streamers that share the shards of a backlog, and what a record costs each process on its way."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import monotonic, sleep

from benchmarks.backlogs import Backlog, Scale
from benchmarks.cases.costs import read_processor_s
from benchmarks.clusters import start_cluster
from benchmarks.measuring import Case, Figures, NotMeasured
from benchmarks.servers import BenchServers
from benchmarks.watching.streamers import run_streamers
from penstock.channels.log import extents
from penstock.channels.server import RedisClient, connect_redis
from penstock.database.connections import Connection
from penstock.records import DEFAULT_SCOPE
from penstock.streaming import tick

ONE, TWO = ("1/1",), ("1/2", "2/2")
POLL_EVERY_S = 0.005
LONGEST_S = 300.0


def make_cases(servers: BenchServers, scale: Scale) -> list[Case]:
    """Two streamers beside one, on one Redis and on a Cluster of two; the costs of one."""
    backlog = scale.large_backlog
    return [
        *(
            Case(
                name=name,
                unit="records/s",
                sentence=f"two streamers that share four shards empty a backlog of {backlog.records:,}: {where}",
                ours=partial(measure, servers, backlog, TWO),
                limits={"one streamer": partial(measure, servers, backlog, ONE)},
                slow=True,
                rounds=scale.few_rounds,
            )
            for name, where, measure in (
                ("shares-2", "one Redis", _measure_on_one_redis),
                ("shares-2-cluster", "a Cluster of two", _measure_on_a_cluster),
            )
        ),
        Case(
            name="shares-cost",
            unit="µs",
            sentence=f"processor time for each of {backlog.records:,} records, by process",
            ours=partial(_measure_costs, servers, backlog),
            better="less",
            slow=True,
            rounds=scale.few_rounds,
        ),
    ]


def _measure_on_one_redis(
    servers: BenchServers, backlog: Backlog, shares: Sequence[str]
) -> Figures:
    url = servers.stage(backlog)
    with servers.redis() as client:
        return {"": _measure_rate(backlog, shares, url, servers.redis_url, client)}


def _measure_on_a_cluster(
    servers: BenchServers, backlog: Backlog, shares: Sequence[str]
) -> Figures:
    url = servers.stage(backlog)
    with start_cluster(backlog.streams) as (redis_url, _), connect_redis(redis_url) as client:
        return {"": _measure_rate(backlog, shares, url, redis_url, client)}


def _measure_rate(
    backlog: Backlog,
    shares: Sequence[str],
    database_url: str,
    redis_url: str,
    client: RedisClient,
) -> float:
    """Records per second from the start of the first tick until all records are in the log; without connecting."""
    with run_streamers(shares, backlog.shards, database_url, redis_url) as (begin, _):
        began = monotonic()
        begin()
        _await_published(backlog, client)
        return backlog.records / (monotonic() - began)


def _await_published(backlog: Backlog, client: RedisClient) -> None:
    namespace, shards = backlog.pipeline.scope.namespace, backlog.shard_names
    deadline = monotonic() + LONGEST_S
    while monotonic() < deadline:
        found = extents(client, namespace, shards).values()
        if sum(extent.tail for extent in found) >= backlog.records:
            return
        sleep(POLL_EVERY_S)
    raise NotMeasured(f"not all records were published within {LONGEST_S:.0f} s")


def _measure_costs(servers: BenchServers, backlog: Backlog) -> Figures:
    """Processor time of sequencing, and then of each process that publishes, in microseconds per record."""
    url = servers.stage(backlog)
    with servers.postgres(url) as connection, servers.redis() as client:
        with _processor_time({"": _backends(connection, own=True)}, backlog) as sequencing:
            tick(connection, DEFAULT_SCOPE)
        with run_streamers(ONE, backlog.shards, url, servers.redis_url) as (begin, processes):
            who = {
                "-python": processes,
                "-postgres": _backends(connection, own=False),
                "-redis": [int(client.info("server")["process_id"])],
            }
            with _processor_time(who, backlog) as publishing:
                begin()
                _await_published(backlog, client)
    return {"-sequencer": sequencing[""], **publishing}


def _backends(connection: Connection, *, own: bool) -> list[int]:
    """The server process of this connection, or those of all streamers."""
    if own:
        return [connection.info.backend_pid]
    return [
        int(pid)
        for (pid,) in connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE application_name = 'penstock streamer' AND datname = current_database()"
        )
    ]


@contextmanager
def _processor_time(
    processes: Mapping[str, Sequence[int]], backlog: Backlog
) -> Iterator[dict[str, float]]:
    """Fills the dictionary when the block ends: microseconds per record, by the name of the processes."""

    def read() -> dict[str, float]:
        return {name: sum(map(read_processor_s, pids)) for name, pids in processes.items()}

    figures: dict[str, float] = {}
    before = read()
    yield figures
    figures |= {
        name: 1e6 * (after - before[name]) / backlog.records for name, after in read().items()
    }
