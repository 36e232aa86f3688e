"""Delivering: items of one shard to a handler, in one transaction or in several if they have to be divided.

What an item is, a record of a log or a member of an Ick, and which of them are due, is the subclasses' to know.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import structlog
from sqlalchemy import Connection as EngineConnection
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, sessionmaker

from penstock.consuming.checkpoints import Checkpoint, Checkpoints
from penstock.consuming.failures import HandlerFailed, divide, pause_s, reason_of
from penstock.crashpoints import crashpoint
from penstock.database.connections import (
    AGAIN,
    Connection,
    driver_errors,
    is_servers_fault,
    postgres_errors,
    serialization_failure,
)
from penstock.declarations import ConsumerSpec
from penstock.errors import BrokenTransaction, TryAgain
from penstock.pipeline import Pipeline
from penstock.records import Offset, ShardName

log = structlog.get_logger("penstock.consumer")

Item = TypeVar("Item")


@dataclass
class Delivered:
    """What became of a delivery.

    Attributes:
        position: The checkpoint afterwards; None if another process holds the shard.
        applied: Records whose effects are committed.
        skipped: Records that had been applied before.
        dead: Records that were set aside.
        backfilled: Records that came from the journal, because the log has lost them.
        halted: Why the shard stopped; None if it did not.
        held: The shard stands at a barrier, and has not applied what lies behind.
        more: The delivery was not used up: it continues beyond ``position``.
        members: Members of an Ick that need not come again.
        latencies_us: For each applied record the time from staging to its handler, by Postgres' clock.
    """

    position: Offset | None = None
    applied: int = 0
    skipped: int = 0
    dead: int = 0
    backfilled: int = 0
    halted: str | None = None
    held: bool = False
    more: bool = False
    members: list[bytes] = field(default_factory=list)
    latencies_us: list[int] = field(default_factory=list)


class Applier(ABC, Generic[Item]):
    """Applies deliveries for one consumer."""

    def __init__(self, pipeline: Pipeline, consumer: ConsumerSpec, engine: Engine) -> None:
        self._consumer, self._schema = consumer, pipeline.schema
        self._engine = engine.execution_options(isolation_level=consumer.isolation)
        self._connection: EngineConnection | None = None
        self._checkpoints = Checkpoints(consumer, pipeline.schema)
        # Handlers may change classes that the pipeline tells of: their sessions stage like any other.
        self._sessions = sessionmaker(class_=Session, join_transaction_mode="rollback_only")
        if pipeline.rules:
            pipeline.attach(self._sessions)

    def deliver(
        self,
        shard: ShardName,
        items: Sequence[Item],
        pause: Callable[[float], bool] = lambda _: False,
    ) -> Delivered:
        """Applies items in their order; some may have been applied before.

        Args:
            shard: Where they come from.
            items: Records in the order of their offsets, the first may lie anywhere; or members.
            pause: Waits so many seconds before another attempt; true if there is to be none, because the process stops.

        Raises:
            ServerUnavailable: Postgres does not answer; what was under way may be committed, which the next delivery sees.
            BrokenTransaction: The handler ends its transaction: a defect of the handler that no retry mends.
        """
        total = Delivered()
        parts: list[tuple[Sequence[Item], int]] = [(items, 1)]
        while parts and not total.halted:
            part, attempt = parts.pop(0)
            try:
                if not self._once(shard, part, total):
                    break
            except TryAgain as error:
                log.info(
                    "handler asks to wait",
                    consumer=self._consumer.name,
                    shard=str(shard),
                    reason=reason_of(error),
                )
                if pause(pause_s(attempt)):
                    return total
                parts.insert(0, (part, attempt + 1))
            except HandlerFailed as failed:
                if attempt < self._consumer.attempts:
                    if pause(pause_s(attempt)):
                        return total
                    parts.insert(0, (part, attempt + 1))
                elif len(part) > 1:
                    last_attempt = max(1, self._consumer.attempts)
                    parts[:0] = [
                        (piece, 1 if len(piece) == 1 else last_attempt)
                        for piece in divide(part, failed.culprit)
                    ]
                else:
                    self._give_up(shard, part[0], failed.error, attempt, total)
        return total

    def _once(self, shard: ShardName, items: Sequence[Item], total: Delivered) -> bool:
        """One transaction; what it did is added to ``total`` once it is committed. False if the shard is not ours now."""
        serialization_failures = 0
        done = Delivered()
        while True:
            try:
                with self._transaction([shard]) as (session, connection, taken):
                    locked = taken.get(shard)
                    if locked is None or locked.halted is not None:
                        total.halted = locked.halted if locked else None
                        return False
                    done = self._apply(session, connection, locked, items)
                break
            except (DBAPIError, *AGAIN) as error:
                if not serialization_failure(error):
                    raise
                serialization_failures += 1
                log.debug("again", consumer=self._consumer.name, times=serialization_failures)
        crashpoint("consumer.after_commit")
        add(total, done)
        return True

    @contextmanager
    def _transaction(
        self, shards: Collection[ShardName]
    ) -> Iterator[tuple[Session, Connection, dict[ShardName, Checkpoint]]]:
        """A transaction with those of the shards' checkpoints locked that are free, and a session in it."""
        with (
            postgres_errors(f"applying for {self._consumer.name}"),
            driver_errors(),
            self._connected() as engine_connection,
            engine_connection.begin(),
            self._sessions(bind=engine_connection) as session,
        ):
            connection = driver_connection(engine_connection)
            yield session, connection, self._checkpoints.lock(connection, shards)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """The applier's connection, for a look between deliveries: the transaction is rolled back."""
        with driver_errors(), self._connected() as engine_connection:
            transaction = engine_connection.begin()
            yield driver_connection(engine_connection)
            transaction.rollback()

    @contextmanager
    def _connected(self) -> Iterator[EngineConnection]:
        """The applier's connection, kept from one transaction to the next; given back to the pool after an error."""
        if self._connection is None:
            self._connection = self._engine.connect()
        try:
            yield self._connection
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Gives the connection back to its pool."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    @abstractmethod
    def _apply(
        self,
        session: Session,
        connection: Connection,
        locked: Checkpoint,
        items: Sequence[Item],
    ) -> Delivered:
        """Calls the handler with what is due, and notes it in the transaction of the lock."""

    @abstractmethod
    def _give_up(
        self, shard: ShardName, item: Item, error: Exception, attempts: int, total: Delivered
    ) -> None:
        """An item has failed alone: it is set aside, or its shard halts."""

    def _handle(self, session: Session, items: Sequence[Any]) -> None:
        """Calls the handler; its errors become ``HandlerFailed``, but for those that are the servers'."""
        culprit = None
        try:
            if self._consumer.each:
                for index, item in enumerate(items):
                    culprit = index
                    self._consumer.handler(session, item)
                culprit = None
            else:
                self._consumer.handler(session, items)
            session.flush()
        except (TryAgain, BrokenTransaction):
            raise
        except Exception as error:
            if is_servers_fault(error):
                raise
            raise HandlerFailed(error, culprit) from error


def add(total: Delivered, done: Delivered) -> None:
    """Adds what one transaction did."""
    total.position = done.position
    total.applied += done.applied
    total.skipped += done.skipped
    total.dead += done.dead
    total.backfilled += done.backfilled
    total.halted = done.halted
    total.held = done.held
    total.more = done.more
    total.members.extend(done.members)
    total.latencies_us.extend(done.latencies_us)


def driver_connection(connection: EngineConnection) -> Connection:
    """The psycopg connection below a connection of SQLAlchemy: in the same transaction."""
    return cast("Connection", cast("Any", connection.connection).driver_connection)
