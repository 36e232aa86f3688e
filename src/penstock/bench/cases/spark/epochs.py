"""The engine on Spark, in epochs, with a large backlog: beside the inline engine with the same."""

from collections.abc import Callable
from functools import partial
from time import monotonic, sleep

from penstock.bench import watching
from penstock.bench.application import BULK
from penstock.bench.cases.consuming import applied
from penstock.bench.measuring import Case, NotMeasured, Sample
from penstock.bench.plant import Backlog, Plant, Scale
from penstock.channels.log import extents

CORES = (1, 2)
"""Of the engine; its servers have all."""

LOOK_EVERY_S = 0.005
LONGEST_S = 300.0


def cases(plant: Plant, scale: Scale) -> list[Case]:
    """The streamer, and a consumer, on one core and on two."""
    backlog = scale.large_backlog
    return [
        Case(
            name=f"spark-{who}-{cores}",
            unit="records/s",
            sentence=f"{sentence} a backlog of {backlog.records:,} from its first record, bound to {cores} of the cores",
            ours=partial(run, plant, backlog, "spark", cores),
            limits={"inline engine": partial(run, plant, backlog, "inline", cores)},
            slow=True,
            rounds=scale.few_rounds,
        )
        for who, sentence, run in (
            ("drain", "the streamer on Spark empties", _drained),
            ("consume", "a consumer on Spark applies, in bulk,", _consumed),
        )
        for cores in CORES
    ]


def _drained(plant: Plant, backlog: Backlog, engine: watching.Engine, cores: int) -> Sample:
    url = plant.staged(backlog)
    namespace, shards = backlog.pipeline.namespace, backlog.shard_names
    with plant.redis() as client, watching.running(engine, url, plant.redis_url, cores=cores):

        def published() -> int:
            return sum(extent.entries for extent in extents(client, namespace, shards).values())

        return rate_of(published, backlog.records)


def _consumed(plant: Plant, backlog: Backlog, engine: watching.Engine, cores: int) -> Sample:
    url = plant.registered(backlog)
    with (
        plant.postgres(url) as connection,
        watching.running(
            engine, url, plant.redis_url, streamer=False, consumers=[BULK], cores=cores
        ),
    ):
        return rate_of(lambda: applied(connection, BULK), backlog.records)


def rate_of(done: Callable[[], int], records: int) -> Sample:
    """Records a second between the first sight of any and the last record: whatever starts is not in it.

    Raises:
        NotMeasured: It did not come to an end, or was over before it was seen.
    """
    deadline = monotonic() + LONGEST_S
    while not (first := done()) and monotonic() < deadline:
        sleep(LOOK_EVERY_S)
    began = monotonic()
    while (last := done()) < records and monotonic() < deadline:
        sleep(LOOK_EVERY_S)
    took = monotonic() - began
    if last != records:
        raise NotMeasured(f"{last} of {records} records were done within {LONGEST_S:.0f} s")
    if first == records:
        raise NotMeasured("it was over before it was seen")
    return {"": (records - first) / took}
