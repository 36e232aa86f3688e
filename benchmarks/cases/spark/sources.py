"""The data source of a log: rows that Spark reads, rows that it writes, and the cost of a small micro-batch."""

import tempfile
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from benchmarks.application import CHANNEL, NOTE, make_channel
from benchmarks.backlogs import ACCOUNTS, Backlog, Scale, make_variants
from benchmarks.cases import limits
from benchmarks.cases.spark.session import count_rows, get_session
from benchmarks.measuring import Case, Figures, NotMeasured, percentile
from benchmarks.servers import BenchServers
from penstock.channels.log.streams import extents
from penstock.testing import eventually

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

WARM_RECORDS = 1000
WARM_BATCHES, BATCHES = 30, 60
LONGEST_S = 300.0
COPY = "copy"
"""The namespace that a stream is copied to."""


def make_cases(servers: BenchServers, scale: Scale) -> list[Case]:
    """Reading, writing, and both in micro-batches."""
    backlog = scale.large_backlog
    rounds = scale.few_rounds
    return [
        Case(
            name="spark-log-read",
            unit="rows/s",
            sentence=f"penstock.log reads {backlog.records:,} records of four shards into Spark",
            ours=lambda: _measure_reading(servers, backlog),
            limits={"xrange": lambda: limits.read_entries(servers, backlog)},
            variants=make_variants(partial(_measure_reading, servers), backlog),
            slow=True,
            rounds=rounds,
        ),
        Case(
            name="spark-log-write",
            unit="rows/s",
            sentence=f"penstock.log appends {backlog.records:,} rows that Spark generates to four shards",
            ours=lambda: _measure_writing(servers, backlog),
            limits={"xadd": lambda: limits.append_records(servers, backlog)},
            variants=make_variants(partial(_measure_writing, servers), backlog),
            slow=True,
            rounds=rounds,
        ),
        Case(
            name="spark-micro-batch",
            unit="ms",
            sentence="a micro-batch of one record per shard, from penstock.log to penstock.log, four shards (p50, p99)",
            ours=lambda: _measure_micro_batch(_make_copy_query(servers, Backlog(scale.records))),
            limits={"rate to noop": lambda: _measure_micro_batch(_make_rate_query(servers))},
            better="less",
            slow=True,
            rounds=rounds,
        ),
    ]


def _make_options(servers: BenchServers, backlog: Backlog, **more: object) -> dict[str, Any]:
    return {"channel": CHANNEL, "shards": backlog.shards, "redisUrl": servers.redis_url, **more}


def _measure_reading(servers: BenchServers, backlog: Backlog) -> Figures:
    servers.publish(backlog)
    source = get_session(servers).read.format("penstock.log")
    few = str(dict.fromkeys(map(str, range(backlog.shards)), WARM_RECORDS)).replace("'", '"')
    count_rows(source.options(**_make_options(servers, backlog, endingOffsets=few)).load())
    began = perf_counter()
    found = count_rows(source.options(**_make_options(servers, backlog, endingOffsets="latest")).load())
    took = perf_counter() - began
    if found != backlog.records:
        raise NotMeasured(f"{found} of {backlog.records} rows were read")
    return {"": found / took}


def _measure_writing(servers: BenchServers, backlog: Backlog) -> Figures:
    get_session(servers)
    servers.empty_redis()
    _write(servers, backlog, WARM_RECORDS, COPY)
    began = perf_counter()
    _write(servers, backlog, backlog.records, "penstock")
    took = perf_counter() - began
    with servers.redis() as client:
        found = sum(e.tail for e in extents(client, "penstock", backlog.shard_names).values())
    if found != backlog.records:
        raise NotMeasured(f"{found} of {backlog.records} rows were written")
    return {"": found / took}


def _write(servers: BenchServers, backlog: Backlog, records: int, namespace: str) -> None:
    rows = _make_rows(servers, records, backlog.shards)
    channel = make_channel(backlog.form)
    form = {"entries": channel.entries, "compression": channel.compression}
    options = _make_options(servers, backlog, namespace=namespace, **form)
    rows.write.format("penstock.log").options(**options).mode("append").save()


def _make_rows(servers: BenchServers, records: int, shards: int) -> "DataFrame":
    """Records that Spark generates, as they would come from a log: one partition per shard, in order."""
    a_shard = records // shards
    return (
        get_session(servers)
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


def _make_copy_query(servers: BenchServers, backlog: Backlog) -> Callable[[str], "StreamingQuery"]:
    def start(directory: str) -> "StreamingQuery":
        servers.publish(backlog)
        with servers.redis() as client:
            for key in client.scan_iter(f"{COPY}:*"):
                client.delete(key)
        each = _make_options(servers, backlog, maxRecordsPerTrigger=backlog.shards)
        rows = get_session(servers).readStream.format("penstock.log").options(**each)
        return (
            rows.option("startingOffsets", "earliest")
            .load()
            .writeStream.format("penstock.log")
            .options(**_make_options(servers, backlog, namespace=COPY, checkpointLocation=directory))
            .start()
        )

    return start


def _make_rate_query(servers: BenchServers) -> Callable[[str], "StreamingQuery"]:
    """Spark's own source of rows, which needs no Python, into Spark's own sink, which keeps none."""

    def start(directory: str) -> "StreamingQuery":
        rows = get_session(servers).readStream.format("rate-micro-batch")
        return (
            rows.options(rowsPerBatch=4, numPartitions=4)
            .load()
            .writeStream.format("noop")
            .option("checkpointLocation", directory)
            .start()
        )

    return start


def _measure_micro_batch(start: Callable[[str], "StreamingQuery"]) -> Figures:
    """How long a micro-batch of four records takes, in ms; each follows the previous one at once.

    Raises:
        NotMeasured: The query ended, or a batch had a different number of records.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        query = start(directory)
        try:
            eventually(
                lambda: (
                    not query.isActive or (query.lastProgress or {"batchId": 0})["batchId"] >= WARM_BATCHES + BATCHES
                ),
                "the batches are done",
                timeout_s=LONGEST_S,
            )
            if not query.isActive:
                raise NotMeasured(f"the query ended: {query.exception()}")
            done = [each for each in query.recentProgress if each["batchId"] >= WARM_BATCHES]
        finally:
            query.stop()
    if any(each["numInputRows"] != 4 for each in done):  # noqa: PLR2004  one per shard
        raise NotMeasured("a micro-batch did not have one record per shard")
    took = [float(each["durationMs"]["triggerExecution"]) for each in done]
    return {"": percentile(took, 0.5), "-p99": percentile(took, 0.99)}
