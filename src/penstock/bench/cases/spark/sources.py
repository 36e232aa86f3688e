"""The data sources of a log: rows that Spark reads, rows that it writes, and what a small micro-batch costs."""

import tempfile
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

from penstock.bench.application import CHANNEL, NOTE
from penstock.bench.cases import limits
from penstock.bench.cases.spark.session import session, swallowed
from penstock.bench.measuring import Case, NotMeasured, Sample, percentile
from penstock.bench.plant import ACCOUNTS, Backlog, Plant, Scale
from penstock.channels.log import extents
from penstock.testing import eventually

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

WARM_RECORDS = 1000
WARM_BATCHES, BATCHES = 30, 60
LONGEST_S = 300.0
COPY = "copy"
"""The namespace that a stream is copied to."""


def cases(plant: Plant, scale: Scale) -> list[Case]:
    """Reading, writing, and both in small."""
    backlog = scale.large_backlog
    rounds = scale.few_rounds
    return [
        Case(
            name="spark-log-read",
            unit="rows/s",
            sentence=f"penstock.log reads {backlog.records:,} records of four shards into Spark",
            ours=lambda: _read(plant, backlog),
            limits={"xrange": lambda: limits.entries(plant, backlog)},
            slow=True,
            rounds=rounds,
        ),
        Case(
            name="spark-log-write",
            unit="rows/s",
            sentence=f"penstock.log appends {backlog.records:,} rows that Spark makes to four shards",
            ours=lambda: _written(plant, backlog),
            limits={"xadd": lambda: limits.append(plant, backlog)},
            slow=True,
            rounds=rounds,
        ),
        Case(
            name="spark-micro-batch",
            unit="ms",
            sentence="a micro-batch of one record a shard, from penstock.log to penstock.log, four shards (p50, p99)",
            ours=lambda: _overhead(_copying(plant, Backlog(scale.records))),
            limits={"rate to noop": lambda: _overhead(_counting(plant))},
            better="less",
            slow=True,
            rounds=rounds,
        ),
    ]


def _options(plant: Plant, backlog: Backlog, **more: object) -> dict[str, Any]:
    return {
        "channel": CHANNEL,
        "shards": backlog.shards,
        "redisUrl": plant.redis_url,
        **more,
    }


def _read(plant: Plant, backlog: Backlog) -> Sample:
    plant.published(backlog)
    source = session(plant).read.format("penstock.log")
    few = str(dict.fromkeys(map(str, range(backlog.shards)), WARM_RECORDS)).replace("'", '"')
    swallowed(source.options(**_options(plant, backlog, endingOffsets=few)).load())
    began = perf_counter()
    found = swallowed(source.options(**_options(plant, backlog, endingOffsets="latest")).load())
    took = perf_counter() - began
    if found != backlog.records:
        raise NotMeasured(f"{found} of {backlog.records} rows were read")
    return {"": found / took}


def _written(plant: Plant, backlog: Backlog) -> Sample:
    session(plant)
    plant.empty_redis()
    _write(plant, backlog, WARM_RECORDS, COPY)
    began = perf_counter()
    _write(plant, backlog, backlog.records, "penstock")
    took = perf_counter() - began
    with plant.redis() as client:
        found = sum(e.tail for e in extents(client, "penstock", backlog.shard_names).values())
    if found != backlog.records:
        raise NotMeasured(f"{found} of {backlog.records} rows were written")
    return {"": found / took}


def _write(plant: Plant, backlog: Backlog, records: int, namespace: str) -> None:
    rows = _rows(plant, records, backlog.shards)
    options = _options(plant, backlog, namespace=namespace)
    rows.write.format("penstock.log").options(**options).mode("append").save()


def _rows(plant: Plant, records: int, shards: int) -> "DataFrame":
    """Records that Spark makes by itself, as they would come from a log: a partition a shard, in order."""
    a_shard = records // shards
    return (
        session(plant)
        .range(0, a_shard * shards, 1, shards)
        .selectExpr(
            f"'{CHANNEL}' AS channel",
            f"int(id div {a_shard}) AS shard",
            f"id % {a_shard} + 1 AS offset",
            "id",
            f"string(id % {ACCOUNTS}) AS key",
            "'insert' AS action",
            "'movement' AS object",
            f"""'{{"id": ' || id || ', "account": ' || id % {ACCOUNTS} || ', "cents": ' || id % 977 """
            f"""|| ', "note": "{NOTE}"}}' AS data""",
            "string(null) AS headers",
            "current_timestamp() AS timestamp",
        )
    )


def _copying(plant: Plant, backlog: Backlog) -> Callable[[str], "StreamingQuery"]:
    def start(directory: str) -> "StreamingQuery":
        plant.published(backlog)
        with plant.redis() as client:
            for key in client.scan_iter(f"{COPY}:*"):
                client.delete(key)
        each = _options(plant, backlog, maxRecordsPerTrigger=backlog.shards)
        rows = session(plant).readStream.format("penstock.log").options(**each)
        return (
            rows.option("startingOffsets", "earliest")
            .load()
            .writeStream.format("penstock.log")
            .options(**_options(plant, backlog, namespace=COPY, checkpointLocation=directory))
            .start()
        )

    return start


def _counting(plant: Plant) -> Callable[[str], "StreamingQuery"]:
    """Spark's own source of rows, which needs no Python, into Spark's own sink, which keeps none."""

    def start(directory: str) -> "StreamingQuery":
        rows = session(plant).readStream.format("rate-micro-batch")
        return (
            rows.options(rowsPerBatch=4, numPartitions=4)
            .load()
            .writeStream.format("noop")
            .option("checkpointLocation", directory)
            .start()
        )

    return start


def _overhead(start: Callable[[str], "StreamingQuery"]) -> Sample:
    """What a micro-batch takes that has next to nothing to do, in ms; one follows the other.

    Raises:
        NotMeasured: A batch had something else to do.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        query = start(directory)
        try:
            eventually(
                lambda: (
                    not query.isActive
                    or (query.lastProgress or {"batchId": 0})["batchId"] >= WARM_BATCHES + BATCHES
                ),
                "the batches are done",
                timeout_s=LONGEST_S,
            )
            if not query.isActive:
                raise NotMeasured(f"the query has ended: {query.exception()}")
            done = [each for each in query.recentProgress if each["batchId"] >= WARM_BATCHES]
        finally:
            query.stop()
    if any(each["numInputRows"] != 4 for each in done):  # noqa: PLR2004  one a shard
        raise NotMeasured("a micro-batch had not one record a shard")
    took = [float(each["durationMs"]["triggerExecution"]) for each in done]
    return {"": percentile(took, 0.5), "-p99": percentile(took, 0.99)}
