"""The engine on Spark, in epochs, with a large backlog: beside the inline engine with the same."""

from collections.abc import Callable
from time import monotonic, sleep

from penstock.bench import watching
from penstock.bench.application import BULK
from penstock.bench.measuring import Case, NotMeasured, Sample
from penstock.bench.plant import Backlog, Plant, Scale
from penstock.channels.log import extents

LOOK_EVERY_S = 0.005
LONGEST_S = 300.0


def cases(plant: Plant, scale: Scale) -> list[Case]:
    """The streamer, and a consumer."""
    backlog = scale.large_backlog
    return [
        Case(
            name="spark-drain",
            unit="records/s",
            sentence=f"the streamer on Spark empties a backlog of {backlog.records:,}, from the first record that it publishes",
            ours=lambda: _drained(plant, backlog, "spark"),
            limits={"inline engine": lambda: _drained(plant, backlog, "inline")},
            slow=True,
            rounds=scale.few_rounds,
        ),
        Case(
            name="spark-consume",
            unit="records/s",
            sentence=f"a consumer on Spark applies a backlog of {backlog.records:,} in bulk, from the first record that it applies",
            ours=lambda: _consumed(plant, backlog, "spark"),
            limits={"inline engine": lambda: _consumed(plant, backlog, "inline")},
            slow=True,
            rounds=scale.few_rounds,
        ),
    ]


def _drained(plant: Plant, backlog: Backlog, engine: watching.Engine) -> Sample:
    url = plant.staged(backlog)
    namespace, shards = backlog.pipeline.namespace, backlog.shard_names
    with plant.redis() as client, watching.running(engine, url, plant.redis_url):

        def published() -> int:
            return sum(extent.entries for extent in extents(client, namespace, shards).values())

        return rate_of(published, backlog.records)


def _consumed(plant: Plant, backlog: Backlog, engine: watching.Engine) -> Sample:
    url = plant.registered(backlog)
    with (
        plant.postgres(url) as connection,
        watching.running(engine, url, plant.redis_url, streamer=False, consumers=[BULK]),
    ):

        def applied() -> int:
            [(count,)] = connection.execute(
                "SELECT coalesce(sum(applied), 0)::bigint FROM penstock.checkpoints WHERE consumer = %s",
                [BULK],
            ).fetchall()
            return int(count)

        return rate_of(applied, backlog.records)


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
    if last != records or first == records:
        raise NotMeasured(f"{last} of {records} records were done within {LONGEST_S:.0f} s")
    return {"": (records - first) / took}
