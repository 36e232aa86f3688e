"""Records that were set aside: looked at, tried again, or given up.

Trying again is like a first delivery: the handler's effects and the removal of the dead letter are one transaction.  It
holds the checkpoint's row meanwhile, as the worker does, so that no later record of the key is parked at that moment.
Records of one key are tried in the order of the log; after one that fails, the others of its key stay.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import structlog
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, sessionmaker

from penstock.consuming.delivering import driver_connection
from penstock.consuming.failures import reason_of
from penstock.database.connections import (
    AGAIN,
    Connection,
    driver_errors,
    is_servers_fault,
    make_engine,
    postgres_errors,
    serialization_failure,
)
from penstock.database.statements import DEFAULT_SCHEMA, statements
from penstock.declarations import ConsumerSpec, Ick
from penstock.errors import BrokenTransaction, Unknown
from penstock.pipeline import Pipeline
from penstock.records import Offset, Record, RecordId, Shard

log = structlog.get_logger("penstock.operator")


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that a consumer has set aside; its payload is not part of it.

    Attributes:
        consumer: Which consumer.
        channel: Where the record stands.
        shard: Where the record stands.
        offset: Where the record stands.
        record_id: Number of the staged record.
        key: Its key.
        action: What happened.
        object: What it happened to.
        staged_at: When it was staged.
        reason: Why it was set aside: class and first line of the error.
        attempts: How often it was tried.
        parked: It did not fail itself: an earlier record of its key did.
        failed_at: When it was set aside, or failed last.
    """

    consumer: str
    channel: str
    shard: int
    offset: int
    record_id: int
    key: str
    action: str
    object: str
    staged_at: datetime
    reason: str
    attempts: int
    parked: bool
    failed_at: datetime

    @property
    def place(self) -> str:
        """What commands call it: ``rides/2/4118``."""
        return f"{self.channel}/{self.shard}/{self.offset}"


@dataclass(frozen=True, slots=True)
class Retried:
    """What became of a dead letter.

    Attributes:
        letter: As it was.
        outcome: ``applied``; ``failed`` again; ``kept``, because one of its key before it failed; ``gone`` meanwhile.
        reason: Why it failed or was kept.
    """

    letter: DeadLetter
    outcome: Literal["applied", "failed", "kept", "gone"]
    reason: str = ""


def newest(
    connection: Connection,
    consumer: str | None = None,
    *,
    limit: int = 50,
    schema: str = DEFAULT_SCHEMA,
) -> list[DeadLetter]:
    """The newest dead letters, of one consumer or of all.

    Raises:
        ServerUnavailable: Postgres does not answer.
        SchemaMissing: The tables are not there.
    """
    with postgres_errors("reading dead letters"):
        rows = connection.execute(
            statements("penstock.operating", schema)["dead_letters"],
            {"consumer": consumer, "limit": limit},
        ).fetchall()
    return [DeadLetter(*row) for row in rows]


def of_consumer(
    connection: Connection, consumer: str, *, schema: str = DEFAULT_SCHEMA
) -> list[DeadLetter]:
    """All dead letters of a consumer, in the order of the log.

    Raises:
        ServerUnavailable: Postgres does not answer.
        SchemaMissing: The tables are not there.
    """
    with postgres_errors("reading dead letters"):
        rows = connection.execute(
            statements("penstock.operating", schema)["dead_letters_of"], {"consumer": consumer}
        ).fetchall()
    return [DeadLetter(*row) for row in rows]


def at(letters: Iterable[DeadLetter], place: str) -> DeadLetter:
    """The dead letter at ``rides/2/4118``, or ``2/4118`` for short.

    Raises:
        Unknown: There is none.
    """
    for letter in letters:
        if place in (letter.place, f"{letter.shard}/{letter.offset}"):
            return letter
    raise Unknown(f"no dead letter at {place}; penstock dead-letters list shows where they are")


def record_of(
    connection: Connection, letter: DeadLetter, *, schema: str = DEFAULT_SCHEMA
) -> Record | None:
    """The record with its payload; None if the dead letter is gone.

    Raises:
        ServerUnavailable: Postgres does not answer.
    """
    with postgres_errors("reading a dead letter"):
        row = connection.execute(
            statements("penstock.operating", schema)["dead_letter"], _key(letter)
        ).fetchone()
    return None if row is None else _record(letter, row)


def retry(
    pipeline: Pipeline, letters: Sequence[DeadLetter], database_url: str, *, prepare: bool = True
) -> list[Retried]:
    """Tries dead letters again, in the order of the log, each in a transaction of its own.

    Args:
        pipeline: Declares their consumers.
        letters: Which to try.
        database_url: Where effects and checkpoints are.
        prepare: False behind a pooler that cannot keep prepared statements.

    Raises:
        DeclarationError: The pipeline does not declare a consumer.
        BrokenTransaction: A handler ends its transaction.
        ServerUnavailable: Postgres does not answer; the letter under way may have been applied.
    """
    consumers = {letter.consumer: pipeline.get_consumer(letter.consumer) for letter in letters}
    engine = make_engine(database_url, application="dead letters", prepare=prepare)
    sessions = sessionmaker(class_=Session, join_transaction_mode="rollback_only")
    if pipeline.rules:
        pipeline.attach(sessions)
    failed: set[tuple[str, str, int, str]] = set()
    done = []
    try:
        for letter in sorted(
            letters, key=lambda each: (each.consumer, each.channel, each.shard, each.offset)
        ):
            key = (letter.consumer, letter.channel, letter.shard, letter.key)
            if key in failed:
                done.append(Retried(letter, "kept", "an earlier record of its key has failed"))
                continue
            retried = _Trial(
                engine, sessions, pipeline.schema, consumers[letter.consumer], letter
            ).run()
            if retried.outcome == "failed":
                failed.add(key)
            done.append(retried)
            log.info(
                "dead letter tried again",
                consumer=letter.consumer,
                place=letter.place,
                outcome=retried.outcome,
            )
    finally:
        engine.dispose()
    return done


def drop(
    connection: Connection, letters: Sequence[DeadLetter], *, schema: str = DEFAULT_SCHEMA
) -> int:
    """Gives dead letters up for ever: their records will have had no effect. Gives their number.

    Raises:
        ServerUnavailable: Postgres does not answer.
    """
    sql = statements("penstock.operating", schema)
    dropped = 0
    for letter in letters:
        with postgres_errors("dropping a dead letter"), connection.transaction():
            connection.execute(sql["lock_shard"], _key(letter))
            removed = connection.execute(
                sql["remove_dead_letter"], {**_key(letter), "transaction": None}
            ).rowcount
        dropped += removed
        if removed:
            log.warning(
                "dead letter dropped",
                consumer=letter.consumer,
                place=letter.place,
                record=letter.record_id,
            )
    return dropped


@dataclass(frozen=True, slots=True)
class _Trial:
    """One dead letter, tried once."""

    engine: Engine
    sessions: sessionmaker[Session]
    schema: str
    consumer: ConsumerSpec
    letter: DeadLetter

    def run(self) -> Retried:
        while True:
            try:
                with postgres_errors(f"trying {self.letter.place} again"), driver_errors():
                    return self._apply()
            except (DBAPIError, *AGAIN) as error:
                if not serialization_failure(error):
                    raise
            except _Failed as failed:
                reason = reason_of(failed.error)
                self._note(reason)
                return Retried(self.letter, "failed", reason)

    def _apply(self) -> Retried:
        """Effect and removal in one transaction."""
        sql, key = statements("penstock.operating", self.schema), _key(self.letter)
        engine = self.engine.execution_options(isolation_level=self.consumer.isolation)
        with engine.connect() as opened, opened.begin():
            connection = driver_connection(opened)
            connection.execute(sql["lock_shard"], key)
            row = connection.execute(sql["lock_dead_letter"], key).fetchone()
            if row is None:
                return Retried(self.letter, "gone")
            if self.consumer.park_key:
                [(earlier,)] = connection.execute(
                    sql["earlier_of_key"], {**key, "key": self.letter.key}
                )
                if earlier is not None:
                    return Retried(
                        self.letter,
                        "kept",
                        f"offset {earlier} of its key is set aside, and comes first",
                    )
            with self.sessions(bind=opened) as session:
                self._handle(session, _record(self.letter, row))
            removed = connection.execute(
                sql["remove_dead_letter"], {**key, "transaction": row[7]}
            ).rowcount
            if removed != 1:
                raise BrokenTransaction(
                    f"consumer {self.consumer.name}, {self.letter.place}: the transaction that carries the dead letter is gone. "
                    "A handler must not commit or roll back its session: return to commit, raise to roll back"
                )
            connection.execute(sql["count_revived"], key)
        return Retried(self.letter, "applied")

    def _handle(self, session: Session, record: Record) -> None:
        try:
            item = record.key if isinstance(self.consumer.channel, Ick) else record
            self.consumer.handler(session, item if self.consumer.each else [item])
            session.flush()
        except BrokenTransaction:
            raise
        except Exception as error:
            if is_servers_fault(error):
                raise
            raise _Failed(error) from error

    def _note(self, reason: str) -> None:
        with postgres_errors("noting a failure"), self.engine.begin() as opened:
            driver_connection(opened).execute(
                statements("penstock.operating", self.schema)["failed_again"],
                {**_key(self.letter), "reason": reason},
            )


@dataclass
class _Failed(Exception):
    """The handler raised; passed between functions, never shown."""

    error: Exception


def _key(letter: DeadLetter) -> dict[str, str | int]:
    return {
        "consumer": letter.consumer,
        "channel": letter.channel,
        "shard": letter.shard,
        "offset": letter.offset,
    }


def _record(letter: DeadLetter, row: Sequence[object]) -> Record:
    """The first seven columns are number, key, action, object, data, headers, time of staging."""
    record_id, key, action, what, data, headers, staged_us = row[:7]
    return Record(
        letter.channel,
        Shard(letter.shard),
        Offset(letter.offset),
        RecordId(int(str(record_id))),
        str(key),
        str(action),
        str(what),
        str(data),
        str(headers),
        int(str(staged_us)),
    )
