"""From the producer's transaction to the log, and to the consumer's commit, at a rate that is given."""

from collections.abc import Callable, Mapping

from penstock.bench import watching
from penstock.bench.application import BULK
from penstock.bench.cases import limits
from penstock.bench.measuring import Case, NotMeasured, Sample, percentile
from penstock.bench.peers import peers_of
from penstock.bench.plant import NOTHING, Plant, Scale
from penstock.bench.producing import Load, produce

LOADS = ((10, 1), (1_000, 1), (10_000, 10))
"""Records a second, and records a transaction."""

SPARKS_LOAD = (1_000, 1)

KEPT_UP = 0.9
"""Share of the wanted rate below which a run says nothing."""


def cases(plant: Plant, scale: Scale) -> list[Case]:
    """To the effect, and to the log, at each rate."""
    found = []
    for rate, at_once in LOADS:
        load = Load(rate, at_once, seconds=scale.seconds * (3 if rate < 100 else 1))  # noqa: PLR2004
        found.append(
            Case(
                name=f"latency-{rate}",
                unit="ms",
                sentence=f"from a producer's BEGIN to the consumer's COMMIT, inline, {rate:,} records/s (p50, p99)",
                ours=lambda load=load: _to_the_effect(plant, load, "inline"),  # type: ignore[misc]  # bound now
                limits={"a commit": lambda: limits.commits(plant)},
                better="less",
            )
        )
        found.append(
            Case(
                name=f"latency-log-{rate}",
                unit="ms",
                sentence=f"from a producer's BEGIN to a reader of the log, inline, {rate:,} records/s (p50, p99)",
                ours=lambda load=load: _to_the_log(plant, load),  # type: ignore[misc]  # the same
                limits={"a commit": lambda: limits.commits(plant)},
                peers=peers_of(
                    "latency", plant, NOTHING, rate=rate, at_once=at_once, seconds=load.seconds
                ),
                better="less",
            )
        )
    return [*found, _on_spark(plant, scale)]


def _on_spark(plant: Plant, scale: Scale) -> Case:
    load = Load(*SPARKS_LOAD, seconds=scale.seconds)
    return Case(
        name=f"latency-spark-{load.rate}",
        unit="ms",
        sentence=f"from a producer's BEGIN to the consumer's COMMIT, on Spark in epochs, {load.rate:,} records/s (p50, p99)",
        ours=lambda: _to_the_effect(plant, load, "spark"),
        limits={
            "inline engine": lambda: _to_the_effect(plant, load, "inline"),
            "a commit": lambda: limits.commits(plant),
        },
        better="less",
        slow=True,
        rounds=scale.few_rounds,
    )


def _to_the_effect(plant: Plant, load: Load, engine: watching.Engine) -> Sample:
    database_url = plant.staged(NOTHING)
    with watching.effects(engine, database_url, plant.redis_url, [BULK]) as arrivals:
        return _latencies(plant, database_url, load, arrivals)


def _to_the_log(plant: Plant, load: Load) -> Sample:
    database_url = plant.staged(NOTHING)
    with (
        watching.running("inline", database_url, plant.redis_url),
        watching.entries(plant.redis_url, NOTHING.streams) as arrivals,
    ):
        return _latencies(plant, database_url, load, arrivals)


def _latencies(
    plant: Plant, database_url: str, load: Load, arrivals: Callable[[int], Mapping[int, float]]
) -> Sample:
    with plant.postgres(database_url) as connection:
        produced = produce(connection, load, NOTHING.shards)
    arrived = arrivals(len(produced.began))
    if produced.rate < KEPT_UP * load.rate:
        raise NotMeasured(f"the producer came to {produced.rate:.0f} of {load.rate} records/s")
    missing = len(produced.began) - len(arrived)
    if missing:
        raise NotMeasured(f"{missing} records did not arrive within {watching.LATE_S:.0f} s")
    # The first tenth warms up connections and prepared statements.
    counted = sorted(arrived)[len(arrived) // 10 :]
    took = [(arrived[number] - produced.began[number]) * 1000 for number in counted]
    return {"": percentile(took, 0.5), "-p99": percentile(took, 0.99)}
