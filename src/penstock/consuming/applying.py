"""One delivery to one shard: in a transaction, or in several if it has to be divided."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import structlog
from sqlalchemy import Connection as EngineConnection
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, sessionmaker

from penstock.consuming.backfill import backfill
from penstock.consuming.checkpoints import Checkpoint, Checkpoints, compare
from penstock.consuming.failures import (
    HandlerFailed,
    divide,
    parked_keys,
    pause_s,
    reason_of,
    set_aside,
)
from penstock.declarations import ConsumerSpec
from penstock.errors import BrokenTransaction, Gap, TryAgain
from penstock.pipeline import Pipeline
from penstock.postgres import (
    AGAIN,
    Connection,
    answering,
    is_servers_fault,
    serialization_failure,
    unwrapped,
)
from penstock.records import Offset, Record, ShardName
from penstock.telemetry import crashpoint

log = structlog.get_logger("penstock.consumer")


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
    latencies_us: list[int] = field(default_factory=list)


class Applier:
    """Applies deliveries for one consumer."""

    def __init__(self, pipeline: Pipeline, consumer: ConsumerSpec, engine: Engine) -> None:
        self._consumer, self._schema = consumer, pipeline.schema
        self._engine = engine.execution_options(isolation_level=consumer.isolation)
        self._checkpoints = Checkpoints(consumer, pipeline.schema)
        # Handlers may change classes that the pipeline tells of: their sessions stage like any other.
        self._sessions = sessionmaker(class_=Session, join_transaction_mode="rollback_only")
        if pipeline.rules:
            pipeline.attach(self._sessions)

    def deliver(
        self,
        shard: ShardName,
        records: Sequence[Record],
        pause: Callable[[float], bool] = lambda _: False,
    ) -> Delivered:
        """Applies records in the order of their offsets; some may have been applied before.

        Args:
            shard: Where they come from.
            records: In order; the first may lie anywhere.
            pause: Waits so many seconds before another attempt; true if there is to be none, because the process stops.

        Raises:
            ServerUnavailable: Postgres does not answer; what was under way may be committed, which the next delivery sees.
            BrokenTransaction: The handler ends its transaction: a defect of the handler that no retry mends.
        """
        total = Delivered()
        parts: list[tuple[Sequence[Record], int]] = [(records, 1)]
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

    def _once(self, shard: ShardName, records: Sequence[Record], total: Delivered) -> bool:
        """One transaction; what it did is added to ``total`` once it is committed. False if the shard is not ours now."""
        serialization_failures = 0
        done = Delivered()
        while True:
            try:
                with self._transaction(shard) as (session, connection, locked):
                    if locked is None or locked.halted is not None:
                        total.halted = locked.halted if locked else None
                        return False
                    done = self._apply(session, connection, shard, locked, records)
                break
            except (DBAPIError, *AGAIN) as error:
                if not serialization_failure(error):
                    raise
                serialization_failures += 1
                log.debug("again", consumer=self._consumer.name, times=serialization_failures)
        crashpoint("consumer.after_commit")
        _add(total, done)
        return True

    @contextmanager
    def _transaction(
        self, shard: ShardName
    ) -> Iterator[tuple[Session, Connection, Checkpoint | None]]:
        """A transaction with the shard's checkpoint locked, and a session in it."""
        with (
            answering(f"applying to {shard}"),
            unwrapped(),
            self._engine.connect() as engine_connection,
            engine_connection.begin(),
            self._sessions(bind=engine_connection) as session,
        ):
            connection = driver_connection(engine_connection)
            yield session, connection, self._checkpoints.lock(connection, shard)

    def _apply(
        self,
        session: Session,
        connection: Connection,
        shard: ShardName,
        locked: Checkpoint,
        records: Sequence[Record],
    ) -> Delivered:
        fresh, skipped, filled, gap = records, 0, 0, False
        if locked.held:
            return Delivered(position=locked.offset, held=True)
        comparison = compare(locked.offset, records, locked.barrier)
        if not comparison.fresh and comparison.gap:
            before = next(record.offset for record in records if record.offset > locked.offset)
            if locked.barrier is not None:
                before = Offset(min(before, locked.barrier + 1))
            try:
                fresh = backfill(
                    connection, self._schema, shard, locked.offset, before, self._consumer.batch
                )
            except Gap as error:
                self._checkpoints.halt(connection, shard, str(error))
                return Delivered(position=locked.offset, halted=str(error))
            filled, gap = len(fresh), True
        else:
            fresh, skipped, gap = comparison.fresh, comparison.skipped, comparison.gap
        if not fresh:
            if skipped:
                self._checkpoints.advance(
                    connection, shard, locked, locked.offset, applied=0, skipped=skipped
                )
            return Delivered(position=locked.offset, skipped=skipped)
        willing, parked = self._without_parked(connection, shard, fresh)
        if willing:
            self._handle(session, willing)
        crashpoint("consumer.after_apply")
        last = fresh[-1].offset
        self._checkpoints.advance(
            connection, shard, locked, last, applied=len(willing), skipped=skipped, dead=len(parked)
        )
        crashpoint("consumer.after_checkpoint")
        latencies = [max(0, locked.clock_us - record.staged_us) for record in willing]
        return Delivered(
            last, len(willing), skipped, len(parked), filled, more=gap, latencies_us=latencies
        )

    def _without_parked(
        self, connection: Connection, shard: ShardName, records: Sequence[Record]
    ) -> tuple[Sequence[Record], list[Record]]:
        """Sets aside what waits behind a record of its key that was set aside."""
        if not self._consumer.park_key:
            return records, []
        keys = parked_keys(connection, self._schema, self._consumer, shard, records)
        parked = [record for record in records if record.key in keys]
        if parked:
            set_aside(
                connection,
                self._schema,
                self._consumer,
                shard,
                parked,
                reason="an earlier record of its key was set aside",
                attempts=0,
                parked=True,
            )
        return [record for record in records if record.key not in keys], parked

    def _handle(self, session: Session, records: Sequence[Record]) -> None:
        """Calls the handler; its errors become ``HandlerFailed``, but for those that are the servers'."""
        culprit = None
        try:
            if self._consumer.each:
                for index, record in enumerate(records):
                    culprit = index
                    self._consumer.handler(session, record)
                culprit = None
            else:
                self._consumer.handler(session, records)
            session.flush()
        except (TryAgain, BrokenTransaction):
            raise
        except Exception as error:
            if is_servers_fault(error):
                raise
            raise HandlerFailed(error, culprit) from error

    def _give_up(
        self, shard: ShardName, record: Record, error: Exception, attempts: int, total: Delivered
    ) -> None:
        """A record has failed alone: it is set aside, or its shard halts."""
        reason = reason_of(error)
        log.warning(
            "record failed",
            consumer=self._consumer.name,
            place=record.place,
            record=record.id,
            error=type(error).__name__,
            then=self._consumer.on_poison,
        )
        with self._transaction(shard) as (_, connection, locked):
            if locked is None or locked.halted is not None or locked.offset + 1 != record.offset:
                return  # somebody else has moved on, or an operator has moved it back
            if self._consumer.on_poison == "halt":
                total.halted = (
                    f"{record.place} (record {record.id}) failed {attempts} times: {reason}"
                )
                total.position = locked.offset
                self._checkpoints.halt(connection, shard, total.halted)
                return
            set_aside(
                connection,
                self._schema,
                self._consumer,
                shard,
                [record],
                reason=reason,
                attempts=attempts,
                parked=False,
            )
            self._checkpoints.advance(
                connection, shard, locked, record.offset, applied=0, skipped=0, dead=1
            )
        _add(total, Delivered(position=record.offset, dead=1))


def _add(total: Delivered, done: Delivered) -> None:
    total.position = done.position
    total.applied += done.applied
    total.skipped += done.skipped
    total.dead += done.dead
    total.backfilled += done.backfilled
    total.halted = done.halted
    total.held = done.held
    total.more = done.more
    total.latencies_us.extend(done.latencies_us)


def driver_connection(connection: EngineConnection) -> Connection:
    """The psycopg connection below a connection of SQLAlchemy: in the same transaction."""
    return cast("Connection", cast("Any", connection.connection).driver_connection)
