"""Producers at full speed, with the streamer and a consumer at work beside them."""

from contextlib import ExitStack
from time import perf_counter

from penstock.bench import watching
from penstock.bench.application import BULK
from penstock.bench.cases.consuming import applied
from penstock.bench.measuring import Case, Sample
from penstock.bench.plant import Backlog, Plant, Scale
from penstock.bench.producing import produce_freely

SHARDS = 4
PRODUCERS = 2
AT_ONCE = 10
"""Records a transaction."""


def cases(plant: Plant, scale: Scale) -> list[Case]:
    """One: what is applied, and what the producers come to meanwhile."""
    return [
        Case(
            name="steady",
            unit="records/s",
            sentence=f"a consumer applies what {PRODUCERS} producers commit as fast as they can, {AT_ONCE} a transaction",
            ours=lambda: _beside_the_pipeline(plant, scale.seconds),
            limits={"producers alone": lambda: _alone(plant, scale.seconds)},
        )
    ]


def _beside_the_pipeline(plant: Plant, seconds: float) -> Sample:
    database_url = plant.staged(Backlog(0, shards=SHARDS))
    with (
        watching.running("inline", database_url, plant.redis_url, consumers=[BULK]),
        plant.postgres(database_url) as connection,
    ):
        began = perf_counter()
        produced = _produced(plant, database_url, seconds)
        took = perf_counter() - began
        return {"": applied(connection, BULK) / took, "-produced": produced}


def _alone(plant: Plant, seconds: float) -> Sample:
    produced = _produced(plant, plant.staged(Backlog(0, shards=SHARDS)), seconds)
    return {"": produced, "-produced": produced}


def _produced(plant: Plant, database_url: str, seconds: float) -> float:
    with ExitStack() as stack:
        connections = [stack.enter_context(plant.postgres(database_url)) for _ in range(PRODUCERS)]
        return produce_freely(connections, AT_ONCE, seconds, SHARDS)
