"""Delivers items of one shard: attempts, one transaction each, until ``decide`` has nothing more to try.

A short pause is waited out here.  A longer one ends the delivery, so that other shards go on meanwhile; the trouble so far
is kept for the shard's next delivery.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import psycopg
import structlog

from penstock.consuming.checkpoints import Checkpoints
from penstock.consuming.delivered import Delivered
from penstock.consuming.delivery import (
    NO_TROUBLE,
    Conflict,
    DeadLetter,
    Halt,
    Outcome,
    Policy,
    Retry,
    Split,
    Trouble,
    Unavailable,
    decide,
    divide,
    trouble_for_part,
)
from penstock.consuming.failures import FailureLog, NotApplied, reason
from penstock.consuming.transaction import HandlerTransaction, Locked, Plan, Planner
from penstock.database.errors import driver_error
from penstock.database.executor import Executor
from penstock.declaring.declarations import ConsumerSpec
from penstock.errors import HandlerCommitted, ServerReplaced, ServerUnavailable
from penstock.records import Offset, Scope, ShardName

log = structlog.get_logger("penstock.consumer")

Item = TypeVar("Item")
Item_contra = TypeVar("Item_contra", contravariant=True)

MAX_PAUSE_S = 0.5
MAX_PAUSES = 3
"""A delivery waits itself so many times, and so long: other shards wait meanwhile.  After that the shard rests instead."""

Pause = Callable[[float], bool]
"""Waits so many seconds; true if there is to be no other attempt, because the process stops."""


class Source(Protocol[Item_contra]):
    """Where items come from, and what the transaction that applies or dead-letters them writes.

    Attributes:
        name: Of the crash points.
    """

    name: str

    def plan(self, shard: ShardName, items: Sequence[Item_contra], /) -> Planner[Delivered]:
        """Applies what is due of the items."""

    def plan_dead_letter(
        self, shard: ShardName, item: Item_contra, reason: str, attempts: int, /
    ) -> Planner[Delivered]:
        """Dead-letters an item that has failed for good."""

    def identify(self, item: Item_contra, /) -> object:
        """What tells an item from the others of its shard."""

    def renew(self, items: Sequence[Item_contra], /) -> None:
        """Makes the items as they were before a handler had them."""

    def how_to_go_past(self, shard: ShardName, last: Offset, /) -> str:
        """What to type when a halted shard is to go on behind items whose effects are in the database."""

    def describe(self, shard: ShardName, item: Item_contra, /) -> str:
        """An item, for the reason of a halt: in a table, where keys may be seen."""

    def name_in_log(self, shard: ShardName, item: Item_contra, /) -> str:
        """An item, for the log: nothing that the application has chosen."""


@dataclass
class _Delivery(Generic[Item]):
    """A delivery that is going on.

    Attributes:
        transaction: Makes its transactions.
        shard: Where to.
        parts: What is left of it, each with what went wrong with it before.
        pause: Waits before another attempt.
        total: What was done.
    """

    transaction: HandlerTransaction
    shard: ShardName
    parts: list[tuple[Sequence[Item], Trouble]]
    pause: Pause
    total: Delivered


class Deliverer(Generic[Item]):
    """Delivers to one consumer."""

    def __init__(self, consumer: ConsumerSpec, scope: Scope, source: Source[Item]) -> None:
        self._consumer = consumer
        self._source = source
        self._checkpoints = Checkpoints(consumer, scope)
        self._policy = Policy(consumer.attempts, consumer.on_poison)
        self._trouble: dict[ShardName, tuple[object, Trouble]] = {}
        self._applied = 0
        self._applied_before: dict[ShardName, int] = {}
        self._failures = FailureLog(consumer.name)

    def deliver(
        self, transaction: HandlerTransaction, shard: ShardName, items: Sequence[Item], pause: Pause = lambda _: False
    ) -> Delivered:
        """Applies items in their order; some may have been applied before.

        Args:
            transaction: Makes its transactions.
            shard: Where they come from.
            items: Records in the order of their offsets, the first may lie anywhere; or members.
            pause: Waits before another attempt.

        Raises:
            ServerUnavailable: Postgres does not answer; what was under way may be committed, which the next delivery sees.
            HandlerExited: The handler wants the process to end.
        """
        delivery = _Delivery(transaction, shard, self._parts(shard, items), pause, Delivered())
        while delivery.parts and delivery.total.halted is None:
            if not self._deliver_part(delivery):
                break
        return delivery.total

    def _deliver_part(self, delivery: _Delivery[Item]) -> bool:
        """One attempt at the next part; false if the delivery is over."""
        part, trouble = delivery.parts.pop(0)
        try:
            plan = self._source.plan(delivery.shard, part)
            done = delivery.transaction.apply([delivery.shard], plan, name=self._source.name)
        except NotApplied as failed:
            self._source.renew(part)
            return self._goes_on(delivery, part, trouble, failed)
        if done.missing:
            # They come first, as a part of their own.
            delivery.parts[:0] = [(done.missing, NO_TROUBLE), (part, trouble)]
        self._count(delivery.shard, done)
        delivery.total.add(done)
        if delivery.parts and delivery.pause(0):
            self._keep_trouble(delivery)
            return False
        return done.position is not None

    def _keep_trouble(self, delivery: _Delivery[Item]) -> None:
        """Keeps what went wrong with the next part: the attempts of a slice count in the next one."""
        part, trouble = delivery.parts[0]
        if trouble.items:
            self._trouble[delivery.shard] = (self._source.identify(part[0]), trouble)

    def _parts(self, shard: ShardName, items: Sequence[Item]) -> list[tuple[Sequence[Item], Trouble]]:
        """The items, with those that were in trouble when the last delivery ended as a part of their own."""
        first, trouble = self._trouble.pop(shard, (None, NO_TROUBLE))
        known = (i for i, item in enumerate(items) if self._source.identify(item) == first)
        at = next(known, None) if trouble.items else None
        if at is None:
            return [(items, NO_TROUBLE)]
        sizes = (at, trouble.items, len(items) - at - trouble.items)
        parts = zip(divide(items, sizes), (NO_TROUBLE, trouble, NO_TROUBLE), strict=True)
        return [(part, known) for part, known in parts if part]

    def _count(self, shard: ShardName, done: Delivered) -> None:
        if done.applied:
            self._applied += done.applied
            self._applied_before.pop(shard, None)  # the trouble is over

    def _goes_on(self, delivery: _Delivery[Item], part: Sequence[Item], trouble: Trouble, failed: NotApplied) -> bool:
        """Carries out what is to happen after a failure; false if the delivery is over."""
        self._failures.show(delivery.shard, failed)
        outcome = self._outcome(delivery.shard, trouble, failed)
        match decide(self._policy, len(part), trouble, outcome):
            case Retry(after_s, known) if after_s > MAX_PAUSE_S or known.pauses > MAX_PAUSES:
                self._trouble[delivery.shard] = (self._source.identify(part[0]), known)
                self._postpone(delivery, after_s, failed)
                return False
            case Retry(after_s, known):
                delivery.parts.insert(0, (part, known))
                if delivery.pause(after_s * random.uniform(0.5, 1.0)):  # noqa: S311  spreads processes, no secret
                    self._keep_trouble(delivery)
                    delivery.total.retry_after_s = after_s
                    return False
            case Split(sizes, known):
                pieces = divide(part, sizes)
                delivery.parts[:0] = [(piece, trouble_for_part(known, len(piece))) for piece in pieces]
            case DeadLetter(attempts):
                return self._dead_letter(delivery, part[0], trouble, failed.reason, attempts)
            case Halt(attempts):
                self._halt(delivery, part, f"failed {attempts} times: {failed.reason}", failed)
        return True

    def halt(
        self, transaction: HandlerTransaction, shard: ShardName, items: Sequence[Item], failed: NotApplied
    ) -> Delivered:
        """Halts a shard whose items failed in a transaction that no attempt may follow."""
        delivery = _Delivery(transaction, shard, [(items, NO_TROUBLE)], lambda _: False, Delivered())
        self._failures.show(shard, failed)
        self._halt(delivery, items, f"failed: {failed.reason}", failed)
        return delivery.total

    def _outcome(self, shard: ShardName, trouble: Trouble, failed: NotApplied) -> Outcome:
        """What the failure means; only this worker knows whether others pass meanwhile."""
        if not isinstance(failed.outcome, Unavailable):
            return failed.outcome
        if not trouble.waits:
            self._applied_before[shard] = self._applied
        return Unavailable(others_pass=self._applied > self._applied_before.get(shard, 0))

    def _postpone(self, delivery: _Delivery[Item], after_s: float, failed: NotApplied) -> None:
        """Ends the delivery; the shard's next one begins with the same items and their trouble so far."""
        delivery.total.retry_after_s = after_s
        log.warning(
            "waiting",
            consumer=self._consumer.name,
            shard=str(delivery.shard),
            reason=type(driver_error(failed.error)).__name__,
            seconds=round(after_s, 1),
        )

        def plan(executor: Executor, locked: Locked) -> Plan[None]:
            if delivery.shard in locked:
                said = f"waiting after {failed.reason}"
                self._checkpoints.note_waiting(executor, delivery.shard, said)
            return Plan(None)

        try:
            delivery.transaction.apply([delivery.shard], plan)
        except ServerReplaced:
            raise
        except (NotApplied, ServerUnavailable):
            log.debug("note not written", shard=str(delivery.shard))  # `penstock status` can do without

    def _dead_letter(self, delivery: _Delivery[Item], item: Item, trouble: Trouble, why: str, attempts: int) -> bool:
        """Dead-letters an item; if even that is impossible, the shard halts.  False if the delivery is over."""
        log.warning("dead-lettering", consumer=self._consumer.name, item=self._source.name_in_log(delivery.shard, item))
        plan = self._source.plan_dead_letter(delivery.shard, item, why, attempts)
        try:
            delivery.total.add(delivery.transaction.apply([delivery.shard], plan))
        except NotApplied as lost:
            if isinstance(lost.outcome, Conflict | Unavailable):
                return self._goes_on(delivery, [item], trouble, lost)
            self._halt(delivery, [item], f"could not be dead-lettered: {lost.reason}")
        except psycopg.Error as error:
            self._halt(delivery, [item], f"could not be dead-lettered: {reason(error)}")
        return True

    def _halt(
        self, delivery: _Delivery[Item], part: Sequence[Item], why: str, failed: NotApplied | None = None
    ) -> None:
        """Stops the shard: nothing behind these items is applied until an operator lets it go on."""
        if failed is not None and isinstance(failed.error, HandlerCommitted):
            last = failed.reached.get(delivery.shard, Offset(0))
            why += f", then: {self._source.how_to_go_past(delivery.shard, last)}"
        which = self._source.describe(delivery.shard, part[0])
        said = f"{which} {why}" if len(part) == 1 else f"{len(part)} items from {which} {why}"

        def plan(executor: Executor, locked: Locked) -> Plan[Delivered]:
            checkpoint = locked.get(delivery.shard)
            if checkpoint is None:
                return Plan(Delivered())
            self._checkpoints.halt(executor, delivery.shard, said)
            return Plan(Delivered(position=checkpoint.offset, halted=said))

        with suppress(NotApplied):  # it fails again, and halts then
            delivery.total.add(delivery.transaction.apply([delivery.shard], plan))
        delivery.parts.clear()
