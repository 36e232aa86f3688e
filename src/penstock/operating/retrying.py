"""Dead letters, retried.

A retry is like a first delivery: the handler's effects and the removal of the dead letter are one transaction.  It holds
the checkpoint's row meanwhile, as the worker does, so that no later record of the key is parked, or applied, at that moment.
Records of one key are retried in the order of the log, from the oldest shards on; after one that fails, the others of its key
stay.  One of whose key a later record was applied is retried only if that is wanted: its effect would come after the later one.
The consumer has noted that record at the dead letter, in the transaction of its effect.

A dead letter of a queue is staged again instead: as a new record, at the end of its tenant's line.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from time import monotonic, sleep
from typing import Any, Literal, TypeVar

import structlog

from penstock.batches import Records
from penstock.consuming.checkpoints import Advance
from penstock.consuming.dead_lettering import DeadLetters
from penstock.consuming.delivery import NO_FAILURE, Broken, Conflict, Policy, Retry, Unavailable, decide
from penstock.consuming.failures import NotApplied
from penstock.consuming.setup import WorkerSetup
from penstock.consuming.transaction import HandlerTransaction, Locked, Plan, Planner
from penstock.database.connections import Database, connect_postgres, get_database_url
from penstock.database.executor import Executor
from penstock.database.statements import statements
from penstock.declaring.declarations import ConsumerSpec, Ick, Log, WorkerSpec
from penstock.errors import DeclarationError, HandlerCommitted, ServerUnavailable
from penstock.operating.dead_letters import DeadLetter, find_later, letter_key, make_record
from penstock.pipeline import Pipeline
from penstock.records import Offset, Place, Record, Scope, Shard, ShardName
from penstock.schema.roles import check_privileges

log = structlog.get_logger("penstock.operator")

Result = TypeVar("Result")

LOCK_TIMEOUT_S = 60.0
"""How long a retry waits, in seconds, for a moment in which no worker holds the shard."""

LOCK_POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class Retried:
    """What became of a dead letter.

    Attributes:
        letter: As it was.
        outcome: ``applied``; ``failed`` again; ``kept``, because one of its key before it failed; ``superseded``, and not
            retried: a later record of its key was applied; ``gone`` meanwhile; of a queue: ``staged`` again.
        reason: Why it failed or was not retried.
    """

    letter: DeadLetter
    outcome: Literal["applied", "failed", "kept", "superseded", "gone", "staged"]
    reason: str = ""


def retry(
    pipeline: Pipeline,
    letters: Sequence[DeadLetter],
    database: Database,
    *,
    superseded: bool = False,
    prepare: bool = True,
    make_frame: Callable[[Record], Any] | None = None,
) -> list[Retried]:
    """Retries dead letters in the order of the log, each in a transaction of its own.

    Args:
        pipeline: Declares their consumers.
        letters: Which to retry.
        database: Where effects and checkpoints are.
        superseded: Apply also those of whose key a later record was applied.
        prepare: Whether statements may be prepared; behind a pooler none are.
        make_frame: Makes a record the DataFrame that a set-based handler gets.

    Raises:
        DeclarationError: The pipeline does not declare a consumer, or it is set-based and there is no ``make_frame``.
        PrivilegeMissing: A dead letter of a queue is to be staged again, by a role that may not stage.
        BrokenTransaction: A handler committed its effects, or returned without having run.
        ServerUnavailable: Postgres cannot do it now; the letter under way may have been applied.
    """
    consumers = {letter.consumer: pipeline.get_consumer(letter.consumer) for letter in letters}
    for consumer in consumers.values():
        if consumer.dataframe and make_frame is None:
            raise DeclarationError(
                f"consumer {consumer.name} is set-based (dataframe=True), and its dead letters are retried on Spark: "
                f"penstock dead-letters retry {consumer.name}"
            )
    if any(isinstance(consumer, WorkerSpec) for consumer in consumers.values()):
        _check_may_stage(pipeline, database)
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


def _check_may_stage(pipeline: Pipeline, database: Database) -> None:
    """A job is staged again: the role needs the rights of a producer as well."""
    url = get_database_url(database)
    with connect_postgres(url, application="dead letters", prepare=False) as connection:
        check_privileges(connection, pipeline.scope, "producer")


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

    def run(self, letter: DeadLetter) -> Retried:
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

    def _apply(self, letter: DeadLetter, plan: Planner[Result]) -> Result:
        """Between two transactions of a worker: its next one leaves the shard alone while this one holds it.

        Waiting for the row's lock is no way: at REPEATABLE READ it fails if the worker has moved the checkpoint meanwhile.
        """
        shard = letter.place.shard

        def planner(executor: Executor, locked: Locked) -> Plan[Result]:
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

    def _plan(self, letter: DeadLetter) -> Planner[Retried]:
        """Effect and removal in one transaction."""

        def planner(executor: Executor, locked: Locked) -> Plan[Retried]:
            checkpoint = locked[letter.place.shard]
            row = executor.execute(self._sql["lock_dead_letter"], letter_key(letter)).fetchone()
            if row is None:
                return Plan(Retried(letter, "gone"))
            if isinstance(self._consumer, WorkerSpec):
                executor.execute(self._sql["stage_again"], letter_key(letter))
                self._remove(executor, letter)
                advance = Advance(checkpoint, checkpoint.offset, dead=-1)
                return Plan(Retried(letter, "staged"), advances=[advance])
            *record, later_shard, later_offset, earlier_shard, earlier_offset = row
            later = find_later(letter.channel, later_shard, later_offset)
            if later and self._checks_order:
                return Plan(_superseded(letter, later))
            if earlier_shard is not None and self._consumer.park_key:
                earlier = ShardName(letter.channel, Shard(earlier_shard))
                why = f"{Place(earlier, Offset(earlier_offset))} of its key is dead-lettered, and comes first"
                return Plan(Retried(letter, "kept", why))

            def settle(settling: Executor) -> None:
                self._remove(settling, letter)
                if earlier_shard is not None and self._is_ordered:
                    place = letter.place
                    self._dead_letters.note_later(settling, place.shard, [letter.key], [place.offset])

            return Plan(
                Retried(letter, "applied"),
                self._items(make_record(letter, record)),
                [Advance(checkpoint, checkpoint.offset, applied=1, dead=-1)],
                settle=settle,
            )

        return planner

    def _items(self, record: Record) -> Any:
        """What the handler is called with."""
        if self._consumer.dataframe and self._make_frame is not None:
            return self._make_frame(record)
        if isinstance(self._consumer.channel, Ick):
            return [record.key]
        return Records.of([record])

    def _remove(self, executor: Executor, letter: DeadLetter) -> None:
        executor.execute(self._sql["remove_dead_letter"], letter_key(letter))

    def _note(self, letter: DeadLetter, reason: str) -> None:
        def planner(executor: Executor, _: Locked) -> Plan[None]:
            executor.execute(self._sql["failed_again"], {**letter_key(letter), "reason": reason})
            return Plan(None)

        self._apply(letter, planner)


def _raise_if_not_its_fault(letter: DeadLetter, failed: NotApplied) -> None:
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


def _superseded(letter: DeadLetter, later: str) -> Retried:
    return Retried(letter, "superseded", f"a later record of its key was applied: {later}")
