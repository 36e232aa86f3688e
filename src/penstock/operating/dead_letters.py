"""Dead letters: shown, or dropped; ``retrying`` retries them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

import structlog

from penstock.database.connections import Connection
from penstock.database.errors import postgres_errors
from penstock.database.statements import statements
from penstock.errors import Unknown
from penstock.records import DEFAULT_SCOPE, Offset, Place, Record, RecordId, Scope, Shard, ShardName

log = structlog.get_logger("penstock.operator")


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A dead letter of a consumer, without its payload.

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
        reason: Why it was dead-lettered: class and first line of the error.
        attempts: How often it was tried.
        parked: It did not fail itself: an earlier record of its key did.
        failed_at: When it was dead-lettered, or failed last.
        later_shard: Where the first later record of its key stands that was applied.
        later_offset: Where that one stands; 0 if none was applied, and for what has no order: members and jobs.
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
    later_shard: int | None = None
    later_offset: int = 0

    @property
    def place(self) -> Place:
        """Where its record stands."""
        return Place(ShardName(self.channel, Shard(self.shard)), Offset(self.offset))

    @property
    def superseded_by(self) -> str:
        """The place of a later record of its key that was applied; empty if there is none."""
        return find_later(self.channel, self.later_shard, self.later_offset)


def newest(
    connection: Connection, consumer: str | None = None, *, limit: int = 50, scope: Scope = DEFAULT_SCOPE
) -> list[DeadLetter]:
    """The newest dead letters, of one consumer or of all.

    Raises:
        ServerUnavailable: Postgres does not answer.
        SchemaMissing: The tables are not there.
    """
    with postgres_errors("reading dead letters"):
        rows = connection.execute(
            statements("penstock.operating", scope.schema)["dead_letters"],
            {"consumer": consumer, "limit": limit},
            binary=True,
        ).fetchall()
    return [DeadLetter(*row) for row in rows]


def of_consumer(connection: Connection, consumer: str, *, scope: Scope = DEFAULT_SCOPE) -> list[DeadLetter]:
    """All dead letters of a consumer, in the order of the log.

    Raises:
        ServerUnavailable: Postgres does not answer.
        SchemaMissing: The tables are not there.
    """
    with postgres_errors("reading dead letters"):
        rows = connection.execute(
            statements("penstock.operating", scope.schema)["dead_letters_of"], {"consumer": consumer}, binary=True
        ).fetchall()
    return [DeadLetter(*row) for row in rows]


def find_later(channel: str, shard: int | None, offset: int | None) -> str:
    """What ``DeadLetter.superseded_by`` is, of the columns of a row."""
    if offset is None or shard is None:
        return ""
    return str(Place(ShardName(channel, Shard(shard)), Offset(offset)))


def at(letters: Iterable[DeadLetter], place: Place) -> DeadLetter:
    """The dead letter at a place.

    Raises:
        Unknown: There is none.
    """
    for letter in letters:
        if letter.place == place:
            return letter
    raise Unknown(f"no dead letter at {place}; penstock dead-letters list shows where they are")


def read_record(connection: Connection, letter: DeadLetter, *, scope: Scope = DEFAULT_SCOPE) -> Record | None:
    """The record with its payload; None if the dead letter is gone.

    Raises:
        ServerUnavailable: Postgres does not answer.
    """
    with postgres_errors("reading a dead letter"):
        row = connection.execute(
            statements("penstock.operating", scope.schema)["dead_letter"], letter_key(letter), binary=True
        ).fetchone()
    return None if row is None else make_record(letter, row)


def drop(connection: Connection, letters: Sequence[DeadLetter], *, scope: Scope = DEFAULT_SCOPE) -> int:
    """Gives dead letters up for ever: their records will have had no effect. Gives their number.

    Raises:
        ServerUnavailable: Postgres does not answer.
    """
    sql = statements("penstock.operating", scope.schema)
    dropped = 0
    for letter in letters:
        with postgres_errors("dropping a dead letter"), connection.transaction():
            connection.execute(sql["lock_shard"], letter_key(letter))
            removed = connection.execute(sql["remove_dead_letter"], letter_key(letter)).rowcount
        dropped += removed
        if removed:
            log.warning(
                "dead letter dropped", consumer=letter.consumer, place=str(letter.place), record=letter.record_id
            )
    return dropped


def letter_key(letter: DeadLetter) -> dict[str, str | int]:
    """The values that name its row."""
    return {"consumer": letter.consumer, "channel": letter.channel, "shard": letter.shard, "offset": letter.offset}


def make_record(letter: DeadLetter, row: Sequence[object]) -> Record:
    """The record of a letter's row, whose first seven columns are number, key, action, object, data, headers, time of staging."""
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
