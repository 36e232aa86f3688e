"""The loop of a consumer's worker: rounds until it is told to stop, through servers that are away.

What a round is, is the subclasses' to know: a delivery of records from a log, or of members from an Ick.
"""

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import TypedDict, Unpack

import structlog
from sqlalchemy import Engine

from penstock.channels.server import RedisClient, connect_redis
from penstock.consuming.delivering import Delivered
from penstock.database.connections import Connection, connect_postgres, describe, make_engine
from penstock.database.registry import register_consumer
from penstock.declarations import ConsumerSpec
from penstock.errors import ServerUnavailable
from penstock.journal import check_tails
from penstock.pipeline import Pipeline
from penstock.records import Offset, ShardName

log = structlog.get_logger("penstock.consumer")

LONGEST_BACKOFF_S = 10.0

BLOCK_MS = 500
"""Longest wait for work, in milliseconds: a stop is noticed within it."""

HALTED_PAUSE_S = 5.0
"""How often a halted shard is looked at again: an operator may have let it go on."""


class Choices(TypedDict, total=False):
    """What can be chosen of a worker.

    Attributes:
        shards: Numbers of the shards to work on; None takes all.
        prepare: False behind a pooler that cannot keep prepared statements.
        block_ms: Longest wait for work, in milliseconds: a stop is noticed within it.
        reread_chance: How often, 0 to 1, a round that delivered is delivered again: to show that it is harmless.
    """

    shards: Collection[int] | None
    prepare: bool
    block_ms: int
    reread_chance: float


@dataclass
class Consumed:
    """What one round did, over all shards: see ``Delivered`` for the counts.

    Attributes:
        positions: Where the consumer stands in the shards that this round touched.
    """

    applied: int = 0
    skipped: int = 0
    dead: int = 0
    backfilled: int = 0
    halted: dict[ShardName, str] = field(default_factory=dict)
    positions: dict[ShardName, Offset] = field(default_factory=dict)
    latencies_us: list[int] = field(default_factory=list)

    def add(self, shard: ShardName, delivered: Delivered) -> None:
        """Counts a delivery."""
        self.applied += delivered.applied
        self.skipped += delivered.skipped
        self.dead += delivered.dead
        self.backfilled += delivered.backfilled
        self.latencies_us.extend(delivered.latencies_us)
        if delivered.halted is not None:
            self.halted[shard] = delivered.halted
        if delivered.position is not None:
            self.positions[shard] = delivered.position

    @property
    def idle(self) -> bool:
        """Nothing was delivered."""
        return not (self.applied or self.skipped or self.dead)


class Worker(ABC):
    """Runs one consumer over some or all of its shards, in one thread.

    Attributes:
        consumer: Which consumer.
    """

    consumer: ConsumerSpec

    def __init__(
        self,
        pipeline: Pipeline,
        consumer: ConsumerSpec,
        database_url: str,
        redis_url: str,
        **chosen: Unpack[Choices],
    ) -> None:
        """Sets up; ``open`` connects.

        Args:
            pipeline: The consumer's pipeline.
            consumer: Which consumer.
            database_url: Where its effects and checkpoints are.
            redis_url: Where its channel is.
            **chosen: See ``Choices``.
        """
        self.consumer = consumer
        self._pipeline = pipeline
        self._database_url, self._redis_url = database_url, redis_url
        self._prepare = chosen.get("prepare", True)
        self._block_ms = chosen.get("block_ms", BLOCK_MS)
        self._reread_chance = chosen.get("reread_chance", 0.0)
        shards = chosen.get("shards")
        self._shards = [
            s for s in consumer.channel.shard_names if shards is None or s.shard in shards
        ]
        self._stop: Callable[[], bool] = lambda: False
        self._engine: Engine | None = None
        self._client: RedisClient = None
        self._rest_until: dict[ShardName, float] = {}

    def open(self) -> None:
        """Connects, and registers the consumer if it is new.

        Raises:
            ServerUnavailable: A server does not answer.
            SchemaMissing: The tables are not there.
            DeclarationError: The pipeline does not fit what is registered.
            HistoryDiverged: Redis was told of records that Postgres does not know.
        """
        application = f"consumer {self.consumer.name}"
        schema, namespace = self._pipeline.schema, self._pipeline.namespace
        with connect_postgres(
            self._database_url, application=application, prepare=self._prepare
        ) as connection:
            register_consumer(connection, schema, self.consumer)
            self._registered(connection)
            self._client = connect_redis(self._redis_url)
            check_tails(connection, self._client, schema, namespace, self._shards)
        self._engine = make_engine(
            self._database_url, application=application, prepare=self._prepare
        )
        self._rest_until = {}
        _spare_what_is_loaded()

    def _registered(self, connection: Connection) -> None:  # noqa: B027  not every worker has something to ask
        """The consumer is registered now: what else is to be asked of Postgres at the start."""

    def close(self) -> None:
        """Closes the connections; what is under way is rolled back, and comes again."""
        if self._engine is not None:
            self._engine.dispose()
        if self._client is not None:
            self._client.close()
        self._engine = self._client = None

    def _rest_halted(self, shard: ShardName) -> None:
        """Says that a shard is halted, and leaves it alone for a while."""
        # Not the reason: it may hold what the handler said of a payload.
        log.error(
            "shard halted, see penstock status", consumer=self.consumer.name, shard=str(shard)
        )
        self._rest_until[shard] = monotonic() + HALTED_PAUSE_S

    @abstractmethod
    def round(self, block_ms: int | None = None) -> Consumed:
        """Waits for work, ``block_ms`` at the longest, and does what came."""

    @abstractmethod
    def drain(self, report: Callable[[Consumed], None] = lambda _: None) -> int:
        """Rounds until there is nothing more; gives the number of records or members applied."""

    def run(
        self,
        stop: Callable[[], bool],
        report: Callable[[Consumed], None] = lambda _: None,
    ) -> None:
        """Rounds until ``stop()`` is true; a server that does not answer is tried again, with growing pauses.

        Raises:
            ForeignLog: The log holds what is not ours.
            SchemaMissing: The tables are not there.
            BrokenTransaction: The handler ends its transaction.
        """
        self._stop = stop
        backoff = 0.0
        try:
            while not stop():
                try:
                    report(self.round())
                    backoff = 0.0
                except ServerUnavailable as error:
                    self.close()
                    backoff = min(LONGEST_BACKOFF_S, max(0.1, backoff * 2))
                    log.warning(
                        "waiting",
                        consumer=self.consumer.name,
                        reason=describe(error),
                        seconds=backoff,
                    )
                    self._pause(backoff)
        finally:
            self.close()

    def _pause(self, seconds: float) -> bool:
        """Waits; true if the worker is to stop."""
        end = monotonic() + seconds
        while not self._stop() and (left := end - monotonic()) > 0:
            sleep(min(left, 0.05))
        return self._stop()


def _spare_what_is_loaded() -> None:
    """Takes what the process has loaded out of the search for cycles, once.

    Records come by the thousand, and so many new objects make Python look through all it has several times a second:
    a fifth of a consumer's time, and pauses of 50 ms.  What comes later is looked through as ever.
    """
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()
