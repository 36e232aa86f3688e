"""Producers at full speed, with the streamer and a consumer at work beside them, and nothing kept that was applied."""

from penstock.bench import watching
from penstock.bench.application import BULK
from penstock.bench.cases.consuming import applied
from penstock.bench.measuring import Case, NotMeasured, Sample
from penstock.bench.plant import NOTHING, Plant, Scale
from penstock.bench.producing import produce_freely
from penstock.testing import eventually

APP = "penstock.bench.application:keeping_nothing"
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
    """What is applied when the producers end; the rest has to follow.

    Raises:
        NotMeasured: It does not.
    """
    database_url = plant.staged(NOTHING)
    with (
        watching.running("inline", database_url, plant.redis_url, consumers=[BULK], app=APP),
        plant.postgres(database_url) as connection,
    ):
        committed, took = produce_freely(database_url, PRODUCERS, AT_ONCE, seconds, NOTHING.shards)
        done = applied(connection, BULK)
        try:
            eventually(
                lambda: applied(connection, BULK) == committed,
                f"all {committed} records are applied",
                timeout_s=watching.LATE_S,
            )
        except AssertionError as error:
            raise NotMeasured(str(error)) from None
        return {"": done / took, "-produced": committed / took}


def _alone(plant: Plant, seconds: float) -> Sample:
    committed, took = produce_freely(
        plant.staged(NOTHING), PRODUCERS, AT_ONCE, seconds, NOTHING.shards
    )
    return {"": committed / took, "-produced": committed / took}
