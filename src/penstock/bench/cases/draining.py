"""The streamer with a backlog: sequenced, published, by one process."""

from contextlib import closing
from time import perf_counter

from penstock.bench.cases import limits
from penstock.bench.measuring import Case, NotMeasured, Sample
from penstock.bench.peers import peers_of
from penstock.bench.plant import Backlog, Plant, Scale
from penstock.streaming import Streamer

SIZES = ((200, 1), (2_000, 5), (20_000, 50))
"""Bytes of a payload, and by how much fewer records there are of them."""


def cases(plant: Plant, scale: Scale) -> list[Case]:
    """One for each number of shards and size of payload."""
    return [
        _case(plant, Backlog(scale.records // fewer, payload_bytes, shards))
        for payload_bytes, fewer in SIZES
        for shards in (4, 1)
    ]


def _case(plant: Plant, backlog: Backlog) -> Case:
    return Case(
        name=f"drain-{backlog.payload_bytes}b-{backlog.shards}",
        unit="records/s",
        sentence=f"the streamer empties a backlog: payloads of {backlog.payload_bytes} bytes, {backlog.shards} shards",
        ours=lambda: drained(plant, backlog, plant.staged(backlog)),
        limits={
            "select": lambda: limits.select(plant, backlog),
            "xadd": lambda: limits.append(plant, backlog),
        },
        peers=peers_of("drain", plant, backlog) if backlog.shards == 1 else {},
    )


def drained(plant: Plant, backlog: Backlog, database_url: str) -> Sample:
    """Records a second of one streamer that empties what is staged there, once it has connected: as of the peers.

    Raises:
        NotMeasured: It published another number of records.
    """
    with closing(Streamer(backlog.pipeline, database_url, plant.redis_url)) as streamer:
        streamer.open()
        began = perf_counter()
        published = streamer.drain()
        took = perf_counter() - began
    if published != backlog.records:
        raise NotMeasured(f"{published} of {backlog.records} records were published")
    return {"": published / took}
