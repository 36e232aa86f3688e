"""Retries dead letters, for an operator's command, or in a worker that the console has asked.

A retry is like a first delivery: the handler's effects and the removal of the dead letter are one
transaction.  It holds the checkpoint's row meanwhile, as the worker does, so that no later record
of the key is parked, or applied, at that moment.  Records of one key are retried in the order of
the log, from the oldest shards on; after one that fails, the others of its key stay.  One of whose
key a later record was applied is retried only if that is wanted: its effect would come after the
later one.  The consumer has noted that record at the dead letter, in the transaction of its effect.

A dead letter of a queue is staged again instead: as a new record, at the end of its tenant's line.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from time import monotonic, sleep
from typing import Any, Literal, TypeVar

import structlog

from penstock.batches.record_batch import as_records
from penstock.consuming.checkpoints import Advance
from penstock.consuming.dead_lettering import DeadLetters
from penstock.consuming.deliverer import retry_conflicts
from penstock.consuming.delivery import Broken, Cancelled, Conflict, Unavailable
from penstock.consuming.failures import NotApplied
from penstock.consuming.transaction import HandlerTransaction, Locked, Planner, TransactionPlan
from penstock.database.driver_errors import describe
from penstock.database.executor import Executor
from penstock.database.store import Store
from penstock.declaring.declarations import ConsumerSpec, WorkerSpec
from penstock.errors import HandlerCommitted, PenstockError, ServerUnavailable
from penstock.parallel import pause
from penstock.records import Offset, Place, Record, Shard, ShardName

log = structlog.get_logger("penstock.consumer")


@dataclass(frozen=True, slots=True)
class DeadLetterRow:
    """A dead letter of a consumer, without its payload."""

    consumer: str
    channel: str
    shard: int
    offset: int
    record_id: int
    key: str
    action: str
    object: str
    staged_at: datetime
    reason: str  # class and first line of the error
    attempts: int
    parked: bool  # it did not fail itself: an earlier record of its key did
    failed_at: datetime  # time of its last failure
    later_shard: int | None = None  # shard of the first later record of its key that was applied
    # offset of that one; 0 if none was applied, and for what has no order: members and jobs
    later_offset: int = 0
    # when a worker was asked to retry it, and has not begun yet
    retry_requested_at: datetime | None = None

    @property
    def place(self) -> Place:
        """Returns the place of its record."""
        return Place(ShardName(self.channel, Shard(self.shard)), Offset(self.offset))

    @property
    def superseded_by(self) -> str:
        """Returns the place of a later applied record of its key; empty if there is none."""
        return find_later(self.channel, self.later_shard, self.later_offset)


def find_later(channel: str, shard: int | None, offset: int | None) -> str:
    """Returns ``superseded_by`` of a dead letter, from the columns of its row."""
    if offset is None or shard is None:
        return ""
    return str(Place(ShardName(channel, Shard(shard)), Offset(offset)))


def letter_key(letter: DeadLetterRow) -> dict[str, str | int]:
    """Returns the values that name its row."""
    return {
        "consumer": letter.consumer,
        "channel": letter.channel,
        "shard": letter.shard,
        "offset": letter.offset,
    }


def letter_keys(letters: Sequence[DeadLetterRow]) -> dict[str, list[Any]]:
    """Returns the values that name the rows of several."""
    keys = [letter_key(letter) for letter in letters]
    return {
        f"{name}s": [key[name] for key in keys]
        for name in ("consumer", "channel", "shard", "offset")
    }


def _position(letter: DeadLetterRow) -> tuple[str, int, int]:
    return letter.channel, letter.shard, letter.offset


def make_record(letter: DeadLetterRow, row: Sequence[Any]) -> Record:
    """Returns a record by number, key, action, object, data, headers and time of staging."""
    return Record(letter.channel, Shard(letter.shard), Offset(letter.offset), *row)


Result = TypeVar("Result")

LOCK_POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class Retried:
    """The outcome of a retry."""

    letter: DeadLetterRow
    # ``applied``; ``cancelled`` by the handler; ``failed`` again; ``kept``, because one of its key
    # before it failed; ``superseded``, and not retried: a later record of its key was applied;
    # ``held``, because another process works on its shard all the time; ``gone`` meanwhile; of a
    # queue: ``staged`` again
    outcome: Literal[
        "applied", "cancelled", "failed", "kept", "superseded", "held", "gone", "staged"
    ]
    reason: str = ""  # cause of the failure, or reason that it was not retried


class _ShardBusy(NotApplied):
    """Another process holds the shard."""

    def __init__(self) -> None:
        super().__init__(Conflict(), self)


class LetterTrial:
    """Retries the dead letters of one consumer, one after the other."""

    def __init__(
        self,
        transaction: HandlerTransaction,
        consumer: ConsumerSpec,
        make_frame: Callable[[Record], Any] | None,
        *,
        patience_s: float,
        superseded: bool = False,
        respects_pause: bool = False,
    ) -> None:
        """Sets up; ``make_frame`` is for a set-based consumer.

        ``patience_s`` is for a shard that another process holds.  ``superseded`` also retries those
        of whose key a later record was applied; ``respects_pause``: not while it is paused.
        """
        self._transaction, self._consumer = transaction, consumer
        self._patience_s, self._respects_pause = patience_s, respects_pause
        self._make_frame = make_frame
        self._dead_letters = DeadLetters(consumer)
        self._is_ordered = consumer.channel.traits.keeps_records
        self._checks_order = self._is_ordered and not superseded
        self._failed: set[tuple[str, str]] = set()

    def run(self, letter: DeadLetterRow) -> Retried:
        """Applies a letter, or notes why it failed again."""
        key = (letter.channel, letter.key)
        if key in self._failed:
            return Retried(letter, "kept", "an earlier record of its key has failed")
        if self._checks_order and (later := letter.superseded_by):  # without a transaction
            return _superseded(letter, later)
        try:
            return self._try(letter)
        except _ShardBusy:
            return Retried(letter, "held", f"another process works on {letter.place.shard}")
        except NotApplied as failed:
            _raise_if_not_its_fault(letter, failed)
            self._failed.add(key)
            self._note(letter, failed.reason)
            return Retried(letter, "failed", failed.reason)

    def _try(self, letter: DeadLetterRow) -> Retried:
        """Applies a letter, or removes it if its handler says that it need not be done."""
        try:
            return self._apply(letter, self._plan(letter))
        except NotApplied as failed:
            if isinstance(failed.outcome, Cancelled):  # passed without an effect, as by the worker
                return self._apply(letter, self._plan(letter, "cancelled"))
            raise

    def _apply(self, letter: DeadLetterRow, plan: Planner[Result]) -> Result:
        """Runs between two transactions of a worker, whose next one leaves the held shard alone.

        Waiting for the row's lock is no way: at REPEATABLE READ it fails if the worker has moved
        the checkpoint meanwhile.
        """
        shard = letter.place.shard

        def planner(store: Store[Executor], locked: Locked) -> TransactionPlan[Result]:
            if shard not in locked or (self._respects_pause and locked[shard].is_paused):
                raise _ShardBusy
            return plan(store, locked)

        deadline = monotonic() + self._patience_s
        while True:
            try:
                return self._transaction.apply([shard], planner)
            except NotApplied as failed:
                if not isinstance(failed.outcome, Conflict):
                    raise
                if monotonic() > deadline:
                    raise _ShardBusy from failed
            sleep(LOCK_POLL_S)

    def _plan(
        self, letter: DeadLetterRow, outcome: Literal["applied", "cancelled"] = "applied"
    ) -> Planner[Retried]:
        """Plans effect and removal in one transaction; of a cancelled letter, the removal."""

        def planner(store: Store[Executor], locked: Locked) -> TransactionPlan[Retried]:
            checkpoint = locked[letter.place.shard]
            row = store.row("lock_dead_letter", letter_key(letter))
            if row is None:
                return TransactionPlan(Retried(letter, "gone"))
            if isinstance(self._consumer, WorkerSpec):
                store.execute("stage_again", letter_key(letter))
                store.execute("remove_dead_letter", letter_key(letter))
                is_own = letter.consumer == self._consumer.name
                advance = Advance(checkpoint, checkpoint.offset, dead=-1 if is_own else 0)
                return TransactionPlan(Retried(letter, "staged"), advances=[advance])
            *record, later_shard, later_offset, earlier_shard, earlier_offset = row
            later = find_later(letter.channel, later_shard, later_offset)
            if later and self._checks_order:
                return TransactionPlan(_superseded(letter, later))
            if earlier_shard is not None and self._consumer.park_key:
                earlier = ShardName(letter.channel, Shard(earlier_shard))
                why = (
                    f"{Place(earlier, Offset(earlier_offset))} of its key is dead-lettered, and "
                    "comes first"
                )
                return TransactionPlan(Retried(letter, "kept", why))

            def settle(store: Store[Executor]) -> None:
                store.execute("remove_dead_letter", letter_key(letter))
                if earlier_shard is not None and self._is_ordered:
                    place = letter.place
                    self._dead_letters.note_later(store, place.shard, [letter.key], [place.offset])

            is_due = outcome == "applied"
            return TransactionPlan(
                Retried(letter, outcome),
                self._items(make_record(letter, record)) if is_due else None,
                [Advance(checkpoint, checkpoint.offset, applied=int(is_due), dead=-1)],
                settle=settle,
            )

        return planner

    def _items(self, record: Record) -> Any:
        """Returns the handler's argument."""
        if self._consumer.dataframe and self._make_frame is not None:
            return self._make_frame(record)
        return as_records([record]) if self._consumer.channel.traits.has_payloads else [record.key]

    def _note(self, letter: DeadLetterRow, reason: str) -> None:
        """Notes why it failed again; if that is impossible, the reason that it had stays."""
        try:
            self._apply(
                letter, _plan_statement("failed_again", {**letter_key(letter), "reason": reason})
            )
        except NotApplied as failed:
            _raise_if_not_its_fault(letter, failed)


def _raise_if_not_its_fault(letter: DeadLetterRow, failed: NotApplied) -> None:
    """Raises what another letter would meet as well."""
    if isinstance(failed.error, HandlerCommitted):
        raise HandlerCommitted(
            f"consumer {letter.consumer}: the handler committed the transaction that removes the "
            "dead letter: its effects are in the database, and would be doubled by another retry. "
            "Take the COMMIT out of the handler, check the effects of this record, then: penstock "
            f"dead-letters drop {letter.consumer} '{letter.place}' --apply"
        ) from failed.error
    if isinstance(failed.outcome, Broken):
        raise failed.error
    if isinstance(failed.outcome, Unavailable):
        raise ServerUnavailable(f"retrying {letter.place}: {failed.reason}") from failed.error


def _plan_statement(name: str, values: Mapping[str, Any]) -> Planner[None]:
    def planner(store: Store[Executor], _: Locked) -> TransactionPlan[None]:
        store.execute(name, values)
        return TransactionPlan(None)

    return planner


def _superseded(letter: DeadLetterRow, later: str) -> Retried:
    return Retried(letter, "superseded", f"a later record of its key was applied: {later}")


ASK_EVERY_S = 2.0
"""Interval, in seconds, at which a worker asks whether letters are to be retried."""

PATIENCE_S = 0.5
"""Seconds that a worker waits for a shard that another process holds; then the letter stays
requested."""


class RequestedRetries:
    """Retries what an operator has asked a consumer's workers to retry, between their rounds.

    A request ends when a worker takes it, before it calls the handler, so that a letter that kills
    the process is not retried for ever.
    """

    def __init__(
        self, consumer: ConsumerSpec, make_frame: Callable[[Record], Any] | None = None
    ) -> None:
        """Sets up; without ``make_frame`` those of a set-based consumer are left to others."""
        self._consumer, self._make_frame = consumer, make_frame
        is_worker = isinstance(consumer, WorkerSpec)
        self._which = {
            "consumer": consumer.name,
            "channel": consumer.channel.name,
            "of_any": is_worker,
        }
        self._ask_at = 0.0

    def retry(self, transaction: HandlerTransaction) -> None:
        """Retries a few, if that was asked for since ``ASK_EVERY_S``."""
        if monotonic() < self._ask_at or (self._consumer.dataframe and self._make_frame is None):
            return
        self._ask_at = monotonic() + ASK_EVERY_S
        if not transaction.read(self._are_requested):
            return
        try:
            letters = transaction.apply([], self._take)
        except NotApplied as failed:
            if not isinstance(failed.outcome, Conflict):
                raise
            self._ask_at = 0.0  # another worker has taken some of them
            return
        trial = LetterTrial(
            transaction,
            self._consumer,
            self._make_frame,
            patience_s=PATIENCE_S,
            respects_pause=True,
        )
        for letter in letters:
            self._retry_one(transaction, trial, letter)
        if letters:  # there may be more
            self._ask_at = 0.0

    def _are_requested(self, store: Store[Executor]) -> bool:
        are_requested = store.value("retries_requested", self._which)
        return bool(are_requested)

    def _take(self, store: Store[Executor], _: Locked) -> TransactionPlan[list[DeadLetterRow]]:
        rows = store.rows("take_requested_retries", self._which)
        return TransactionPlan(sorted((DeadLetterRow(*row) for row in rows), key=_position))

    def _retry_one(
        self, transaction: HandlerTransaction, trial: LetterTrial, letter: DeadLetterRow
    ) -> None:
        names = {"consumer": letter.consumer, "place": str(letter.place)}
        try:
            retried = trial.run(letter)
        except ServerUnavailable:
            raise
        except PenstockError as error:
            log.error("requested retry failed", **names, reason=describe(error))  # noqa: TRY400  of ours, in words
            return
        log.info("dead letter retried", **names, outcome=retried.outcome)
        if retried.outcome == "held":
            self._request_again(transaction, letter)

    def _request_again(self, transaction: HandlerTransaction, letter: DeadLetterRow) -> None:
        plan = _plan_statement("request_retries", letter_keys([letter]))
        retry_conflicts(
            lambda: transaction.apply([], plan), lambda seconds: pause(seconds, lambda: False)
        )
