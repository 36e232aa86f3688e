"""Set-based consumers: a handler that gets a DataFrame, with the checkpoints of its shards in its transaction.

A micro-batch of ``penstock.log`` is a proposal.  What of it is applied is decided in ``HandlerTransaction``, as for every
consumer: the checkpoints are locked and compared in the transaction that carries the effects.  Spark's own offsets are an
upper bound, so its checkpoint directory may be lost, copied or old: a query begins at the checkpoints in Postgres.
"""

import json
import tempfile
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial, reduce
from time import monotonic, sleep
from uuid import uuid4

import structlog
from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  as everybody writes it
from pyspark.sql.streaming.query import StreamingQuery

from penstock.capture import check_triggers
from penstock.channels.log import extents
from penstock.channels.server import connect_redis
from penstock.consuming.checkpoints import Advance, Checkpoint, Checkpoints
from penstock.consuming.delivery import (
    NO_TROUBLE,
    Broken,
    Policy,
    Retry,
    Trouble,
    Unavailable,
    decide,
)
from penstock.consuming.failures import NotApplied
from penstock.consuming.transaction import HandlerTransaction, Locked, Plan
from penstock.database.connections import connect_postgres
from penstock.database.executor import Executor
from penstock.database.registry import register_consumer
from penstock.database.revisions import check_revision
from penstock.database.roles import check_privileges
from penstock.declarations import ConsumerSpec
from penstock.errors import ForeignLog, Gap, Halted, ServerUnavailable
from penstock.pipeline import Pipeline
from penstock.records import Offset, Shard, ShardName
from penstock.spark.names import named_jobs

log = structlog.get_logger("penstock.consumer")

RECORDS_A_BATCH = 100_000
"""Most records of a micro-batch: a DataFrame's cost is in the micro-batch, not in its records."""

LOOK_AGAIN_S = 0.05
"""Pause, in seconds, before another attempt at a shard that another process holds, or that stands at a barrier."""


def start_dataframes(  # noqa: PLR0913, PLR0917  what a query needs
    spark: SparkSession,
    pipeline: Pipeline,
    consumer: ConsumerSpec,
    database_url: str,
    redis_url: str,
    directory: str,
    stop: Callable[[], bool] = lambda: False,
    *,
    available_now: bool = False,
) -> StreamingQuery:
    """Starts the query of a set-based consumer, from its checkpoints in Postgres.

    Args:
        spark: A session that knows ``penstock.log``.
        pipeline: The consumer's pipeline.
        consumer: One that is declared with ``dataframe=True``.
        database_url: Where its effects and checkpoints are.
        redis_url: Where the log is.
        directory: For Spark's own checkpoints; each query makes a new one in it.
        stop: Asked while the query waits for a shard.
        available_now: Apply what there is, and end.

    Raises:
        ServerUnavailable: Postgres does not answer.
        SchemaMissing: This release does not work with the schema.
        TriggerMissing: A trigger that a rule declares is not there.
        PrivilegeMissing: The role may not consume; the text has the grants.
        DeclarationError: The consumer does not fit what is registered.
    """
    with connect_postgres(database_url, application=f"consumer {consumer.name}") as connection:
        check_revision(connection, pipeline.scope)
        check_privileges(connection, pipeline.scope, "consumer")
        check_triggers(connection, pipeline)
        register_consumer(connection, pipeline.scope, consumer)
        standing = Checkpoints(consumer, pipeline.scope).all(connection)
    options = {
        "channel": consumer.channel.name,
        "shards": str(consumer.channel.shards),
        "namespace": pipeline.scope.namespace,
        "schema": pipeline.scope.schema,
        "redisUrl": redis_url,
        "databaseUrl": database_url,
        "maxRecordsPerTrigger": str(RECORDS_A_BATCH),
        "startingOffsets": json.dumps(
            {str(shard.shard): offset + 1 for shard, offset in standing.items()}
        ),
    }
    rows = (
        spark.readStream.format(_source(redis_url, pipeline.scope.namespace, standing))
        .options(**options)
        .load()
        .where(F.col("shard").isin([shard.shard for shard in standing]))
    )
    dataframes = DataFrames(pipeline, consumer, database_url, stop)

    def apply(frame: DataFrame, batch: int) -> None:
        name = f"consumer {consumer.name}"
        with named_jobs(frame.sparkSession, name, f"{name}, micro-batch {batch}"):
            dataframes.apply(frame, batch)

    trigger = {"availableNow": True} if available_now else {"processingTime": "0 seconds"}
    return (
        rows.writeStream.foreachBatch(apply)
        .queryName(
            f"penstock {consumer.name} {uuid4().hex[:8]}"
        )  # another session of ours may run one too
        .option("checkpointLocation", tempfile.mkdtemp(dir=directory))
        .trigger(**trigger)
        .start()
    )


def _source(redis_url: str, namespace: str, standing: Mapping[ShardName, Offset]) -> str:
    """The log; or Postgres, if the log has lost what comes after a checkpoint, or is not Penstock's alone."""
    try:
        with closing(connect_redis(redis_url)) as client:
            held = extents(client, namespace, list(standing))
    except ForeignLog:
        return "penstock.staged"
    complete = all(held[shard].first <= offset + 1 for shard, offset in standing.items())
    return "penstock.log" if complete else "penstock.staged"


@dataclass(frozen=True, slots=True)
class _Share:
    """What a micro-batch has of a shard."""

    first: Offset
    last: Offset


class DataFrames:
    """Applies micro-batches for one set-based consumer."""

    def __init__(
        self,
        pipeline: Pipeline,
        consumer: ConsumerSpec,
        database_url: str,
        stop: Callable[[], bool],
        *,
        prepare: bool = True,
    ) -> None:
        self._consumer = consumer
        self._transaction = HandlerTransaction(
            pipeline, consumer, database_url, prepare=prepare, pooled=False
        )
        self._stop = stop
        self._checkpoints = Checkpoints(consumer, pipeline.scope)

    def apply(self, frame: DataFrame, _batch: int) -> None:
        """Applies what of a micro-batch no other has applied, in one transaction or, at a barrier, in several.

        Raises:
            Gap: A checkpoint was moved back: the query is to begin again from it.
            Halted: A shard is halted until an operator lets it go on.
            ServerUnavailable: Postgres cannot do it now.
        """
        frame = frame.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            left, trouble = self._shares(frame), NO_TROUBLE
            while left and not self._stop():
                try:
                    left = self._transaction.apply(
                        left, partial(self._plan, frame, left), name="dataframes"
                    )
                    trouble = NO_TROUBLE
                    pause_s = LOOK_AGAIN_S if left else 0.0
                except NotApplied as failed:
                    if isinstance(failed.outcome, Broken):
                        self._halt(left, failed)
                    trouble, pause_s = _again(trouble, failed)
                self._pause(pause_s)
        finally:
            frame.unpersist()

    def _pause(self, seconds: float) -> None:
        end = monotonic() + seconds
        while not self._stop() and (left := end - monotonic()) > 0:
            sleep(min(left, LOOK_AGAIN_S))

    def _halt(self, left: Collection[ShardName], failed: NotApplied) -> None:
        """Stops the shards for good: the query would begin again, and double the effects.

        Raises:
            Halted: Always.
        """

        def plan(executor: Executor, locked: Locked) -> Plan[None]:
            for shard in locked:
                self._checkpoints.halt(executor, shard, failed.reason)
            return Plan(None)

        self._transaction.apply(left, plan)
        raise Halted(f"consumer {self._consumer.name} is halted: {failed.reason}") from failed.error

    def _shares(self, frame: DataFrame) -> dict[ShardName, _Share]:
        rows = frame.groupBy("shard").agg(F.min("offset"), F.max("offset")).collect()
        name = self._consumer.channel.name
        return {ShardName(name, Shard(n)): _Share(first, last) for n, first, last in rows}

    def _plan(
        self, frame: DataFrame, left: dict[ShardName, _Share], _: Executor, locked: Locked
    ) -> Plan[dict[ShardName, _Share]]:
        """One call of the handler with all that is due; the plan's result is what is still to be done."""
        taken = {
            shard: (checkpoint, _end(checkpoint, left[shard]))
            for shard, checkpoint in locked.items()
        }
        for checkpoint, _last in taken.values():
            self._refuse(checkpoint, left[checkpoint.shard])
        due = {s: (c, last) for s, (c, last) in taken.items() if last > c.offset}
        done = {s for s, (c, last) in taken.items() if max(c.offset, last) >= left[s].last}
        return Plan(
            {shard: share for shard, share in left.items() if shard not in done},
            frame.where(_behind(due)) if due else None,
            [Advance(c, last, applied=last - c.offset) for c, last in due.values()],
        )

    def _refuse(self, checkpoint: Checkpoint, share: _Share) -> None:
        if checkpoint.halted is not None:
            raise Halted(
                f"consumer {self._consumer.name} is halted in {checkpoint.shard}, see penstock status"
            )
        if checkpoint.offset + 1 < share.first:
            raise Gap(
                f"{checkpoint.shard}: the checkpoint is at offset {checkpoint.offset}, the micro-batch begins at "
                f"{share.first}; begin again from the checkpoint"
            )


def _again(trouble: Trouble, failed: NotApplied) -> tuple[Trouble, float]:
    """Pause before another attempt at the same DataFrame, in seconds; what only a fixed handler ends is raised.

    Raises:
        ServerUnavailable: A server cannot do it now: the query is started again after a pause.
    """
    if isinstance(failed.outcome, Unavailable):
        raise ServerUnavailable(f"applying a DataFrame: {failed.reason}") from failed.error
    decision = decide(Policy(attempts=1), 1, trouble, failed.outcome)
    if not isinstance(decision, Retry):
        raise failed.error
    return decision.trouble, decision.after_s


def _end(locked: Checkpoint, share: _Share) -> Offset:
    """The last that may be applied now."""
    return share.last if locked.barrier is None else min(share.last, locked.barrier)


def _behind(due: dict[ShardName, tuple[Checkpoint, Offset]]) -> Column:
    """The rows that are due: behind the checkpoint of their shard, and not behind its barrier."""
    return reduce(
        lambda a, b: a | b,
        (
            (F.col("shard") == shard.shard) & F.col("offset").between(locked.offset + 1, last)
            for shard, (locked, last) in due.items()
        ),
    )
