"""Dead letters: shown, dropped, or retried.

A retry is like a first delivery: the handler's effects and the removal of the dead letter are one transaction.  It holds
the checkpoint's row meanwhile, as the worker does, so that no later record of the key is parked, or applied, at that moment.
Records of one key are retried in the order of the log, from the oldest shards on; after one that fails, the others of its key
stay.  One of whose key a later record was applied is retried only if that is wanted: its effect would come after the later one.
The consumer has noted that record at the dead letter, in the transaction of its effect.

A dead letter of a queue is staged again instead: as a new record, at the end of its tenant's line.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from itertools import groupby
from time import monotonic, sleep
from typing import Any, Literal, TypeVar

import structlog

from penstock.batches import as_records
from penstock.consuming.checkpoints import Advance
from penstock.consuming.dead_lettering import DeadLetters
from penstock.consuming.delivery import NO_FAILURE, Broken, Conflict, Policy, Retry, Unavailable, decide
from penstock.consuming.failures import NotApplied
from penstock.consuming.setup import WorkerSetup
from penstock.consuming.transaction import HandlerTransaction, Locked, Planner, TransactionPlan
from penstock.database.connections import Connection, Database, connect_postgres, get_database_url
from penstock.database.driver_errors import postgres_errors
from penstock.database.executor import Executor
from penstock.database.statements import statements
from penstock.declaring.declarations import ConsumerSpec, Ick, Log, WorkerSpec
from penstock.errors import DeclarationError, HandlerCommitted, ServerUnavailable, Unknown
from penstock.pipeline import Pipeline
from penstock.records import DEFAULT_SCOPE, Offset, Place, Record, Scope, Shard, ShardName
from penstock.schema.roles import check_privileges

log = structlog.get_logger("penstock.operator")


@dataclass(frozen=True, slots=True)
class DeadLetterRow:
    """A dead letter of a consumer, without its payload.

    Attributes:
        reason: Class and first line of the error.
        parked: It did not fail itself: an earlier record of its key did.
        failed_at: Time of its last failure.
        later_shard: Shard of the first later record of its key that was applied.
        later_offset: Offset of that one; 0 if none was applied, and for what has no order: members and jobs.
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
        """The place of its record."""
        return Place(ShardName(self.channel, Shard(self.shard)), Offset(self.offset))

    @property
    def superseded_by(self) -> str:
        """The place of a later record of its key that was applied; empty if there is none."""
        return find_later(self.channel, self.later_shard, self.later_offset)


@dataclass(frozen=True, slots=True)
class LetterFilter:
    """Which dead letters; None leaves an attribute open.

    Attributes:
        error: The class of the error, with which the reason begins.
        since: They failed then or later.
        until: They failed before.
    """

    consumer: str | None = None
    channel: str | None = None
    key: str | None = None
    error: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    @property
    def values(self) -> dict[str, Any]:
        """As parameters of a statement."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


def newest(
    connection: Connection,
    of: LetterFilter = LetterFilter(),
    *,
    after: DeadLetterRow | None = None,
    limit: int = 50,
    scope: Scope = DEFAULT_SCOPE,
) -> list[DeadLetterRow]:
    """A page of dead letters, the newest first; ``after``: the last one of the page before."""
    sql = statements("penstock.operating", scope.schema)["dead_letters"]
    names = ("failed_at", "consumer", "channel", "shard", "offset")
    time, *rest = (getattr(after, name) for name in names) if after else (None, "", "", 0, 0)
    begin = dict(zip((f"after_{name}" for name in names[1:]), rest, strict=True))
    return _read(connection, sql, {**of.values, "after_time": time, **begin, "limit": limit})


@dataclass(frozen=True, slots=True)
class LetterGroup:
    """Dead letters of a consumer with the same class of error.

    Attributes:
        error: The class.
        letters: How many.
        first_at: Time of the first failure.
        last_at: Time of the last.
    """

    consumer: str
    channel: str
    error: str
    letters: int
    first_at: datetime
    last_at: datetime


MAX_GROUPED = 100_000
"""Dead letters that ``group`` counts at most: the newest."""


def group(
    connection: Connection, of: LetterFilter = LetterFilter(), *, scope: Scope = DEFAULT_SCOPE
) -> list[LetterGroup]:
    """The newest ``MAX_GROUPED`` dead letters, counted by the class of their error; the largest groups first."""
    sql = statements("penstock.operating", scope.schema)["dead_letter_groups"]
    with postgres_errors("counting dead letters"):
        rows = connection.execute(sql, {**of.values, "most": MAX_GROUPED}, binary=True)
        return [LetterGroup(*row) for row in rows]


def of_consumer(
    connection: Connection, consumer: str, of: LetterFilter = LetterFilter(), *, scope: Scope = DEFAULT_SCOPE
) -> list[DeadLetterRow]:
    """All dead letters of a consumer, or those that a filter takes, in the order of the log."""
    sql = statements("penstock.operating", scope.schema)["dead_letters_of"]
    return _read(connection, sql, {**of.values, "consumer": consumer})


def find(connection: Connection, consumer: str, place: Place, *, scope: Scope = DEFAULT_SCOPE) -> DeadLetterRow:
    """The dead letter of a consumer at a place.

    Raises:
        Unknown: There is none.
    """
    where = {"consumer": consumer, "channel": place.shard.channel, "shard": place.shard.shard, "offset": place.offset}
    return at(_read(connection, statements("penstock.operating", scope.schema)["dead_letter_at"], where), place)


def _read(connection: Connection, sql: bytes, values: dict[str, Any]) -> list[DeadLetterRow]:
    with postgres_errors("reading dead letters"):
        return [DeadLetterRow(*row) for row in connection.execute(sql, values, binary=True)]


def find_later(channel: str, shard: int | None, offset: int | None) -> str:
    """``superseded_by`` of a dead letter, from the columns of its row."""
    if offset is None or shard is None:
        return ""
    return str(Place(ShardName(channel, Shard(shard)), Offset(offset)))


def at(letters: Iterable[DeadLetterRow], place: Place) -> DeadLetterRow:
    """The dead letter at a place."""
    for letter in letters:
        if letter.place == place:
            return letter
    raise Unknown(f"no dead letter at {place}; penstock dead-letters list shows where they are")


def read_record(connection: Connection, letter: DeadLetterRow, *, scope: Scope = DEFAULT_SCOPE) -> Record | None:
    """The record with its payload; None if the dead letter is gone."""
    with postgres_errors("reading a dead letter"):
        row = connection.execute(
            statements("penstock.operating", scope.schema)["dead_letter"], letter_key(letter), binary=True
        ).fetchone()
    return None if row is None else make_record(letter, row)


def drop(connection: Connection, letters: Sequence[DeadLetterRow], *, scope: Scope = DEFAULT_SCOPE) -> int:
    """Gives dead letters up for ever: their records will have had no effect. Gives their number."""
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


def letter_key(letter: DeadLetterRow) -> dict[str, str | int]:
    """The values that name its row."""
    return {"consumer": letter.consumer, "channel": letter.channel, "shard": letter.shard, "offset": letter.offset}


def make_record(letter: DeadLetterRow, row: Sequence[Any]) -> Record:
    """The record of a letter's row, whose first seven columns are number, key, action, object, data, headers, time of staging."""
    return Record(letter.channel, Shard(letter.shard), Offset(letter.offset), *row[:7])


Result = TypeVar("Result")

LOCK_TIMEOUT_S = 60.0
"""Seconds that a retry waits until no worker holds the shard."""

LOCK_POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class Retried:
    """The outcome of a retry.

    Attributes:
        outcome: ``applied``; ``failed`` again; ``kept``, because one of its key before it failed; ``superseded``, and not
            retried: a later record of its key was applied; ``gone`` meanwhile; of a queue: ``staged`` again.
        reason: Cause of the failure, or reason that it was not retried.
    """

    letter: DeadLetterRow
    outcome: Literal["applied", "failed", "kept", "superseded", "gone", "staged"]
    reason: str = ""


def retry(
    pipeline: Pipeline,
    letters: Sequence[DeadLetterRow],
    database: Database,
    *,
    superseded: bool = False,
    prepare: bool = True,
    make_frame: Callable[[Record], Any] | None = None,
) -> list[Retried]:
    """Retries dead letters in the order of the log, each in a transaction of its own."""
    consumers = {letter.consumer: pipeline.get_consumer(letter.consumer) for letter in letters}
    for consumer in consumers.values():
        if consumer.dataframe and make_frame is None:
            raise DeclarationError(
                f"consumer {consumer.name} is set-based (dataframe=True), and its dead letters are retried on Spark: "
                f"penstock dead-letters retry {consumer.name}"
            )
    if any(isinstance(consumer, WorkerSpec) for consumer in consumers.values()):
        # A job is staged again: the role needs the rights of a producer as well.
        with connect_postgres(get_database_url(database), application="dead letters", prepare=False) as connection:
            check_privileges(connection, pipeline.scope, "producer")
    done: list[Retried] = []
    ordered = sorted(letters, key=lambda each: (each.consumer, each.channel, each.shard, each.offset))
    for (name, channel), group in groupby(ordered, key=lambda each: (each.consumer, each.channel)):
        consumer = _reading(consumers[name], channel)
        transaction = HandlerTransaction(WorkerSetup(pipeline, consumer, database, prepare=prepare))
        trial = _Trial(transaction, consumer, pipeline.scope, make_frame, superseded=superseded)
        try:
            for letter in group:
                done.append(trial.run(letter))
                log.info("dead letter retried", consumer=name, place=str(letter.place), outcome=done[-1].outcome)
        finally:
            transaction.close()
    return done


def _reading(consumer: ConsumerSpec, channel: str) -> ConsumerSpec:
    """The consumer; one of several sources as the reader of the source whose log it is."""
    reads = consumer.channel
    if isinstance(reads, Log) and reads.sources:
        return replace(consumer, channel=reads.of_source(channel.partition("@")[2]))
    return consumer


class _ShardBusy(NotApplied):
    """A worker holds the shard."""

    def __init__(self) -> None:
        super().__init__(Conflict(), self)


class _Trial:
    """Retries the dead letters of one consumer, one after the other."""

    def __init__(
        self,
        transaction: HandlerTransaction,
        consumer: ConsumerSpec,
        scope: Scope,
        make_frame: Callable[[Record], Any] | None,
        *,
        superseded: bool,
    ) -> None:
        self._transaction, self._consumer = transaction, consumer
        self._make_frame = make_frame
        self._sql = statements("penstock.operating", scope.schema)
        self._dead_letters = DeadLetters(consumer, scope)
        self._is_ordered = isinstance(consumer.channel, Log)
        self._checks_order = self._is_ordered and not superseded
        self._failed: set[tuple[str, str]] = set()

    def run(self, letter: DeadLetterRow) -> Retried:
        """Applies a letter, or notes why it failed again."""
        key = (letter.channel, letter.key)
        if key in self._failed:
            return Retried(letter, "kept", "an earlier record of its key has failed")
        if self._checks_order and (later := letter.superseded_by):  # without a transaction
            return _superseded(letter, later)
        state = NO_FAILURE
        while True:
            try:
                return self._apply(letter, self._plan(letter))
            except NotApplied as failed:
                _raise_if_not_its_fault(letter, failed)
                decision = decide(Policy(attempts=1), 1, state, failed.outcome)
                if not (isinstance(failed.outcome, Conflict) and isinstance(decision, Retry)):
                    self._failed.add(key)
                    self._note(letter, failed.reason)
                    return Retried(letter, "failed", failed.reason)
                state = decision.state
                sleep(decision.after_s)

    def _apply(self, letter: DeadLetterRow, plan: Planner[Result]) -> Result:
        """Between two transactions of a worker: its next one leaves the shard alone while this one holds it.

        Waiting for the row's lock is no way: at REPEATABLE READ it fails if the worker has moved the checkpoint meanwhile.
        """
        shard = letter.place.shard

        def planner(executor: Executor, locked: Locked) -> TransactionPlan[Result]:
            if shard not in locked:
                raise _ShardBusy
            return plan(executor, locked)

        deadline = monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                return self._transaction.apply([shard], planner)
            except _ShardBusy:
                if monotonic() > deadline:
                    raise ServerUnavailable(
                        f"retrying {letter.place}: a worker has held {shard} for {LOCK_TIMEOUT_S:.0f} s. "
                        "Try again, or stop it"
                    ) from None
            sleep(LOCK_POLL_S)

    def _plan(self, letter: DeadLetterRow) -> Planner[Retried]:
        """Effect and removal in one transaction."""

        def planner(executor: Executor, locked: Locked) -> TransactionPlan[Retried]:
            checkpoint = locked[letter.place.shard]
            row = executor.execute(self._sql["lock_dead_letter"], letter_key(letter)).fetchone()
            if row is None:
                return TransactionPlan(Retried(letter, "gone"))
            if isinstance(self._consumer, WorkerSpec):
                executor.execute(self._sql["stage_again"], letter_key(letter))
                executor.execute(self._sql["remove_dead_letter"], letter_key(letter))
                advance = Advance(checkpoint, checkpoint.offset, dead=-1)
                return TransactionPlan(Retried(letter, "staged"), advances=[advance])
            *record, later_shard, later_offset, earlier_shard, earlier_offset = row
            later = find_later(letter.channel, later_shard, later_offset)
            if later and self._checks_order:
                return TransactionPlan(_superseded(letter, later))
            if earlier_shard is not None and self._consumer.park_key:
                earlier = ShardName(letter.channel, Shard(earlier_shard))
                why = f"{Place(earlier, Offset(earlier_offset))} of its key is dead-lettered, and comes first"
                return TransactionPlan(Retried(letter, "kept", why))

            def settle(settling: Executor) -> None:
                settling.execute(self._sql["remove_dead_letter"], letter_key(letter))
                if earlier_shard is not None and self._is_ordered:
                    place = letter.place
                    self._dead_letters.note_later(settling, place.shard, [letter.key], [place.offset])

            return TransactionPlan(
                Retried(letter, "applied"),
                self._items(make_record(letter, record)),
                [Advance(checkpoint, checkpoint.offset, applied=1, dead=-1)],
                settle=settle,
            )

        return planner

    def _items(self, record: Record) -> Any:
        """The handler's argument."""
        if self._consumer.dataframe and self._make_frame is not None:
            return self._make_frame(record)
        return [record.key] if isinstance(self._consumer.channel, Ick) else as_records([record])

    def _note(self, letter: DeadLetterRow, reason: str) -> None:
        def planner(executor: Executor, _: Locked) -> TransactionPlan[None]:
            executor.execute(self._sql["failed_again"], {**letter_key(letter), "reason": reason})
            return TransactionPlan(None)

        self._apply(letter, planner)


def _raise_if_not_its_fault(letter: DeadLetterRow, failed: NotApplied) -> None:
    """Raises what another letter would meet as well."""
    if isinstance(failed.error, HandlerCommitted):
        raise HandlerCommitted(
            f"consumer {letter.consumer}: the handler committed the transaction that removes the dead letter: its effects are in the "
            "database, and would be doubled by another retry. Take the COMMIT out of the handler, and see to the effects of this "
            f"record, then: penstock dead-letters drop {letter.consumer} '{letter.place}' --apply"
        ) from failed.error
    if isinstance(failed.outcome, Broken):
        raise failed.error
    if isinstance(failed.outcome, Unavailable):
        raise ServerUnavailable(f"retrying {letter.place}: {failed.reason}") from failed.error


def _superseded(letter: DeadLetterRow, later: str) -> Retried:
    return Retried(letter, "superseded", f"a later record of its key was applied: {later}")
