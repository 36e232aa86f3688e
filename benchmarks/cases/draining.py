"""A streamer with a backlog: one process sequences and publishes it."""

from contextlib import closing
from functools import partial
from time import perf_counter

from benchmarks.backlogs import Backlog, Scale, make_observed, make_variants
from benchmarks.cases import limits
from benchmarks.measuring import Case, Figures, NotMeasured
from benchmarks.peer_scripts import find_peers
from benchmarks.servers import BenchServers
from penstock.streaming import Streamer

SIZES = ((200, 1), (2_000, 5), (20_000, 50))
"""Bytes of a payload, and the divisor of the number of records."""


def make_cases(servers: BenchServers, scale: Scale) -> list[Case]:
    """One for each size of payload and number of shards."""
    return [
        _make_case(servers, Backlog(scale.records // fewer, payload_bytes, shards))
        for payload_bytes, fewer in SIZES
        for shards in (4, 1)
    ]


def _make_case(servers: BenchServers, backlog: Backlog) -> Case:
    return Case(
        name=f"drain-{backlog.payload_bytes}b-{backlog.shards}",
        unit="records/s",
        sentence=f"the streamer empties a backlog: payloads of {backlog.payload_bytes} bytes, {backlog.shards} shards",
        ours=lambda: _measure(servers, backlog),
        limits={
            "select": lambda: limits.select_rows(servers, backlog),
            "xadd": lambda: limits.append_records(servers, backlog),
        },
        variants=make_variants(partial(_measure, servers), backlog)
        | make_observed(partial(_measure, servers), backlog),
        peers=find_peers("drain", servers, backlog) if backlog.shards == 1 else {},
    )


def _measure(servers: BenchServers, backlog: Backlog) -> Figures:
    return measure_drain(servers, backlog, servers.stage(backlog))


def measure_drain(servers: BenchServers, backlog: Backlog, database_url: str) -> Figures:
    """Records per second of one streamer that publishes all staged records; as with the peers, without connecting.

    Raises:
        NotMeasured: It published a different number of records.
    """
    with closing(Streamer(backlog.pipeline, database_url, servers.redis_url)) as streamer:
        streamer.open()
        began = perf_counter()
        published = streamer.drain()
        took = perf_counter() - began
    if published != backlog.records:
        raise NotMeasured(f"{published} of {backlog.records} records were published")
    return {"": published / took}
