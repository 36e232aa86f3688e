"""Several streamers that share the shards of a backlog, and what a record costs each process on its way."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import monotonic, sleep

from benchmarks.backlogs import Backlog, Scale
from benchmarks.cases.costs import REST_S
from benchmarks.clusters import start_cluster
from benchmarks.measuring import Case, Figures, NotMeasured
from benchmarks.processor import read_processor_s
from benchmarks.servers import BenchServers
from benchmarks.watching.streamers import run_streamers
from penstock.channels.commands import RedisClient
from penstock.channels.log.streams import extents
from penstock.channels.server import connect_redis
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.streaming import tick

ONE, TWO = ("1/1",), ("1/2", "2/2")
POLL_EVERY_S = 0.02
LONGEST_S = 300.0


def make_cases(servers: BenchServers, scale: Scale) -> list[Case]:
    """Two streamers beside one, on one Redis and on a Cluster of two; the costs of one."""
    backlog = Backlog(3 * scale.records)
    return [
        *(
            Case(
                name=name,
                unit="records/s",
                sentence=f"two streamers that share four shards empty a backlog of {backlog.records:,}: {where}",
                ours=partial(measure, servers, backlog, TWO),
                limits={"one streamer": partial(measure, servers, backlog, ONE)},
                slow=True,
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
            ours=partial(_measure_costs, servers, backlog, ONE),
            limits={"two streamers": partial(_measure_costs, servers, backlog, TWO)},
            better="less",
            slow=True,
        ),
        Case(
            name="shares-idle",
            unit="% of a core",
            sentence="processor time of an idle streamer that does not sequence, and of the servers that it polls",
            ours=partial(_measure_idle, servers, 3 * scale.seconds),
            better="less",
            slow=True,
            rounds=1,
        ),
    ]


def _measure_idle(servers: BenchServers, seconds: float) -> Figures:
    """Percent of a core: used by a streamer that does not sequence, and by the servers that it polls."""
    backlog = Backlog(0)
    url = servers.stage(backlog)
    with (
        servers.postgres(url) as connection,
        servers.redis() as client,
        run_streamers(["2/2"], backlog.shards, url, servers.redis_url) as (begin, processes),
    ):
        begin()
        sleep(REST_S)
        polled = [*_find_backends(connection), int(client.info("server")["process_id"])]
        with _processor_time({"": processes, "-servers": polled}) as used:
            sleep(seconds)
    return {name: 100 * took / seconds for name, took in used.items()}


def _measure_on_one_redis(servers: BenchServers, backlog: Backlog, shares: Sequence[str]) -> Figures:
    url = servers.stage(backlog)
    with servers.redis() as client:
        return {"": _measure_rate(backlog, shares, url, servers.redis_url, client)}


def _measure_on_a_cluster(servers: BenchServers, backlog: Backlog, shares: Sequence[str]) -> Figures:
    url = servers.stage(backlog)
    with start_cluster(backlog.streams) as (redis_url, _), connect_redis(redis_url) as client:
        return {"": _measure_rate(backlog, shares, url, redis_url, client)}


def _measure_rate(
    backlog: Backlog, shares: Sequence[str], database_url: str, redis_url: str, client: RedisClient
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


def _measure_costs(servers: BenchServers, backlog: Backlog, shares: Sequence[str]) -> Figures:
    """Processor time of sequencing, and then of each process that publishes, in microseconds per record."""
    url = servers.stage(backlog)
    with servers.postgres(url) as connection, servers.redis() as client:
        with _processor_time({"": [connection.info.backend_pid]}) as sequencing:
            tick(Store(connection))
        with run_streamers(shares, backlog.shards, url, servers.redis_url) as (begin, processes):
            who = {
                "-python": processes,
                "-postgres": _find_backends(connection),
                "-redis": [int(client.info("server")["process_id"])],
            }
            with _processor_time(who) as publishing:
                begin()
                _await_published(backlog, client)
    used = {"-sequencer": sequencing[""], **publishing}
    return {name: 1e6 * took / backlog.records for name, took in used.items()}


def _find_backends(connection: Connection) -> list[int]:
    """The processes of Postgres that serve streamers."""
    rows = connection.execute(
        "SELECT pid FROM pg_stat_activity WHERE split_part(application_name, '/', 1) = 'penstock streamer' AND datname = current_database()"
    )
    return [int(pid) for (pid,) in rows]


@contextmanager
def _processor_time(processes: Mapping[str, Sequence[int]]) -> Iterator[dict[str, float]]:
    """Fills the dictionary when the block ends: seconds that the processes have used, by their name."""

    def read() -> dict[str, float]:
        return {name: sum(map(read_processor_s, pids)) for name, pids in processes.items()}

    used: dict[str, float] = {}
    before = read()
    yield used
    used |= {name: after - before[name] for name, after in read().items()}
