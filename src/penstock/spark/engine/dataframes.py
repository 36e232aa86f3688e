"""Set-based consumers: a handler that gets a DataFrame, with the checkpoints of its shards in its transaction.

A micro-batch of ``penstock.log`` is a proposal.  What of it is applied is decided where every consumer decides it: the
checkpoints are locked and compared in the transaction that carries the effects.  Spark's own offsets are an upper bound,
so its checkpoint directory may be lost, copied or old: a query begins at the checkpoints in Postgres.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import reduce
from time import sleep
from uuid import uuid4

import structlog
from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  as everybody writes it
from pyspark.sql.streaming.query import StreamingQuery
from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker

from penstock.channels.log import extents
from penstock.channels.server import connect_redis
from penstock.consuming.checkpoints import Checkpoint, Checkpoints, Move
from penstock.consuming.delivering import driver_connection
from penstock.crashpoints import crashpoint
from penstock.database.connections import (
    Connection,
    connect_postgres,
    driver_errors,
    make_engine,
    postgres_errors,
    serialization_failure,
)
from penstock.database.registry import register_consumer
from penstock.declarations import ConsumerSpec
from penstock.errors import Gap, Halted
from penstock.pipeline import Pipeline
from penstock.records import Offset, Shard, ShardName

log = structlog.get_logger("penstock.consumer")

RECORDS_A_BATCH = 100_000
"""Most records of a micro-batch: a frame's price is in the micro-batch, not in its records."""

LOOK_AGAIN_S = 0.05
"""How often a shard is asked for that another process holds, or that stands at a barrier."""


def start_frames(  # noqa: PLR0913, PLR0917  what a query needs
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
        DeclarationError: The consumer does not fit what is registered.
    """
    with connect_postgres(database_url, application=f"consumer {consumer.name}") as connection:
        register_consumer(connection, pipeline.schema, consumer)
        standing = Checkpoints(consumer, pipeline.schema).all(connection)
    options = {
        "channel": consumer.channel.name,
        "shards": str(consumer.channel.shards),
        "namespace": pipeline.namespace,
        "schema": pipeline.schema,
        "redisUrl": redis_url,
        "databaseUrl": database_url,
        "maxRecordsPerTrigger": str(RECORDS_A_BATCH),
        "startingOffsets": json.dumps(
            {str(shard.shard): offset + 1 for shard, offset in standing.items()}
        ),
    }
    rows = (
        spark.readStream.format(_source(redis_url, pipeline.namespace, standing))
        .options(**options)
        .load()
        .where(F.col("shard").isin([shard.shard for shard in standing]))
    )
    frames = Frames(
        pipeline,
        consumer,
        make_engine(database_url, application=f"consumer {consumer.name}", pooled=False),
        stop,
    )
    trigger = {"availableNow": True} if available_now else {"processingTime": "0 seconds"}
    return (
        rows.writeStream.foreachBatch(frames.apply)
        .queryName(
            f"penstock {consumer.name} {uuid4().hex[:8]}"
        )  # another session of ours may run one too
        .option("checkpointLocation", tempfile.mkdtemp(dir=directory))
        .trigger(**trigger)
        .start()
    )


def _source(redis_url: str, namespace: str, standing: Mapping[ShardName, Offset]) -> str:
    """The log; or Postgres, if the log has lost what comes after a checkpoint."""
    with closing(connect_redis(redis_url)) as client:
        held = extents(client, namespace, list(standing))
    complete = all(held[shard].first <= offset + 1 for shard, offset in standing.items())
    return "penstock.log" if complete else "penstock.staged"


@dataclass(frozen=True, slots=True)
class _Share:
    """What a micro-batch has of a shard."""

    first: Offset
    last: Offset


class Frames:
    """Applies micro-batches for one set-based consumer."""

    def __init__(
        self, pipeline: Pipeline, consumer: ConsumerSpec, engine: Engine, stop: Callable[[], bool]
    ) -> None:
        self._consumer = consumer
        self._engine = engine.execution_options(isolation_level=consumer.isolation)
        self._checkpoints = Checkpoints(consumer, pipeline.schema)
        self._stop = stop
        self._sessions = sessionmaker(class_=Session, join_transaction_mode="rollback_only")
        if pipeline.rules:
            pipeline.attach(self._sessions)

    def apply(self, frame: DataFrame, _batch: int) -> None:
        """Applies what of a micro-batch no other has applied, in one transaction or, at a barrier, in several.

        Raises:
            Gap: A checkpoint was moved back: the query is to begin again from it.
            Halted: A shard stands still until an operator lets it go on.
            ServerUnavailable: Postgres does not answer.
        """
        frame = frame.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            left = self._shares(frame)
            while left and not self._stop():
                with postgres_errors(f"applying to {self._consumer.channel.name}"), driver_errors():
                    left = self._once(frame, left)
        finally:
            frame.unpersist()

    def _shares(self, frame: DataFrame) -> dict[ShardName, _Share]:
        rows = frame.groupBy("shard").agg(F.min("offset"), F.max("offset")).collect()
        name = self._consumer.channel.name
        return {ShardName(name, Shard(n)): _Share(first, last) for n, first, last in rows}

    def _once(self, frame: DataFrame, left: dict[ShardName, _Share]) -> dict[ShardName, _Share]:
        """One transaction; gives what is still to be done."""
        try:
            with self._transaction() as (session, connection):
                taken = {
                    shard: (locked, _end(locked, left[shard]))
                    for shard, locked in self._locked(connection, left).items()
                }
                due = {s: (c, last) for s, (c, last) in taken.items() if last > c.offset}
                if due:
                    self._consumer.handler(session, frame.where(_behind(due)))
                    session.flush()
                    crashpoint("dataframes.after_apply")
                moves = [
                    Move(locked, last, applied=last - locked.offset)
                    for locked, last in due.values()
                ]
                self._checkpoints.advance(connection, *moves)
                crashpoint("dataframes.after_checkpoint")
        except Exception as error:
            if not serialization_failure(error):
                raise
            return left
        done = {s for s, (c, last) in taken.items() if max(c.offset, last) >= left[s].last}
        rest = {shard: share for shard, share in left.items() if shard not in done}
        if rest:
            sleep(LOOK_AGAIN_S)
        return rest

    @contextmanager
    def _transaction(self) -> Iterator[tuple[Session, Connection]]:
        with (
            self._engine.connect() as connection,
            connection.begin(),
            self._sessions(bind=connection) as session,
        ):
            yield session, driver_connection(connection)

    def _locked(
        self, connection: Connection, left: Mapping[ShardName, _Share]
    ) -> dict[ShardName, Checkpoint]:
        taken = self._checkpoints.lock(connection, left)
        for shard, locked in taken.items():
            if locked.halted is not None:
                raise Halted(
                    f"consumer {self._consumer.name} has halted in {shard}, see penstock status"
                )
            if locked.offset + 1 < left[shard].first:
                raise Gap(
                    f"{shard}: the checkpoint stands at offset {locked.offset}, the micro-batch begins at "
                    f"{left[shard].first}; begin again from the checkpoint"
                )
        return taken


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
