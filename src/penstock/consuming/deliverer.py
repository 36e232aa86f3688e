"""Delivers items of a shard: attempts, one transaction each, until ``decide`` has no more to try.

A short pause is taken inside the delivery.  A longer one ends it, so that other shards go on
meanwhile; the failures so far are kept for the shard's next delivery.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import psycopg
import structlog

from penstock.consuming.checkpoints import Checkpoints
from penstock.consuming.delivery import (
    NO_FAILURE,
    Conflict,
    DeadLetterItem,
    Delivered,
    Halt,
    Outcome,
    PassItem,
    Policy,
    Retry,
    RetryState,
    Split,
    Unavailable,
    decide,
    divide,
    pause_s,
    state_for_part,
)
from penstock.consuming.failures import FailureLog, NotApplied, reason
from penstock.consuming.transaction import HandlerTransaction, Locked, Planner, TransactionPlan
from penstock.database.executor import Executor
from penstock.database.store import Store
from penstock.declaring.declarations import ConsumerSpec
from penstock.display import format_count
from penstock.errors import HandlerCommitted, ServerReplaced, ServerUnavailable
from penstock.logs import Repeats
from penstock.observer import DeadLettered, ShardHalted
from penstock.records import Offset, ShardName

log = structlog.get_logger("penstock.consumer")

Item = TypeVar("Item")
Item_contra = TypeVar("Item_contra", contravariant=True)
Result = TypeVar("Result")

MAX_PAUSE_S = 0.5
MAX_PAUSES = 3
"""Short pauses taken inside one delivery, blocking other shards; longer ones skip the shard."""

MAX_REMEMBERED = 10_000
"""Items for which this process remembers since when a server has refused them."""

Pause = Callable[[float], bool]
"""Waits so many seconds; true if there is to be no other attempt, because the process stops."""


def is_long(retry: Retry) -> bool:
    """Returns whether a pause is too long inside a delivery, or one of too many."""
    return retry.after_s > MAX_PAUSE_S or retry.state.pauses > MAX_PAUSES


def spread(seconds: float) -> float:
    """Returns a pause at random, at most as long.

    Processes that have lost together do not come together.
    """
    return seconds * random.uniform(0.5, 1.0)  # noqa: S311  no secret


def retry_conflicts(attempt: Callable[[], Result], pause: Pause) -> Result:
    """Returns the result of a transaction that may lose against others.

    Raises the last ``NotApplied``.
    """
    state, policy = NO_FAILURE, Policy(attempts=1)
    while True:
        try:
            return attempt()
        except NotApplied as failed:
            decision = decide(policy, 1, state, failed.outcome)
            if (
                not (isinstance(failed.outcome, Conflict) and isinstance(decision, Retry))
                or decision.state.waits
            ):
                raise
            state = decision.state
            if pause(decision.after_s):
                raise


class UnavailableItems:
    """Items that a server has refused, and whether others were applied since.

    Only this process knows.
    """

    def __init__(self) -> None:
        self._applied = 0
        self._applied_before: dict[object, int] = {}

    def count_applied(self, applied: int) -> None:
        """Counts applied items."""
        self._applied += applied

    def outcome(self, key: object, state: RetryState, failed: NotApplied) -> Outcome:
        """Returns the meaning of a failure of the items with this key."""
        if not isinstance(failed.outcome, Conflict | Unavailable):
            return failed.outcome
        if not state.waits:
            if len(self._applied_before) >= MAX_REMEMBERED:
                self._applied_before.clear()
            self._applied_before[key] = self._applied
        return replace(
            failed.outcome, others_pass=self._applied > self._applied_before.get(key, self._applied)
        )


class Items(Protocol[Item_contra]):
    """Items, as far as attempts are concerned."""

    name: str  # of the crash points

    def identify(self, item: Item_contra, /) -> object:
        """Returns a value that no other item of the shard has."""

    def renew(self, items: Sequence[Item_contra], /) -> None:
        """Makes the items as they were before a handler had them."""

    def describe(self, shard: ShardName, item: Item_contra, /) -> str:
        """Names an item in the reason of a halt: in a table, where keys may be seen."""

    def name_in_log(self, shard: ShardName, item: Item_contra, /) -> str:
        """Names an item in the log, with nothing that the application has chosen."""


class Plans(Protocol[Item_contra]):
    """The plans of the transactions that apply items, pass or dead-letter them."""

    def plan(self, shard: ShardName, items: Sequence[Item_contra], /) -> Planner[Delivered]:
        """Applies those of the items that are due."""

    def plan_dead_letter(
        self, shard: ShardName, item: Item_contra, reason: str, attempts: int, /
    ) -> Planner[Delivered]:
        """Dead-letters an item that has failed for good."""

    def plan_pass(self, shard: ShardName, item: Item_contra, /) -> Planner[Delivered]:
        """Passes an item without an effect."""

    def skip_command(self, shard: ShardName, last: Offset, /) -> str:
        """Returns the command by which a halted shard goes on behind items that are applied."""


@dataclass
class _Delivery(Generic[Item]):
    """A delivery that is going on."""

    transaction: HandlerTransaction  # makes its transactions
    shard: ShardName  # where the items come from
    # the items that are left, each part with its failures
    parts: list[tuple[Sequence[Item], RetryState]]
    pause: Pause  # waits before another attempt
    total: Delivered  # the result so far

    def apply(self, plan: Planner[Result], **options: Any) -> Result:
        return self.transaction.apply([self.shard], plan, **options)


class Deliverer(Generic[Item]):
    """Delivers to one consumer."""

    def __init__(self, consumer: ConsumerSpec, plans: Plans[Item], items: Items[Item]) -> None:
        self._consumer, self._plans, self._items = consumer, plans, items
        self._checkpoints = Checkpoints(consumer)
        self._policy = Policy(consumer.attempts, consumer.on_poison)
        self._states: dict[ShardName, tuple[object, RetryState]] = {}
        self._repeats = Repeats()
        self._refusals = UnavailableItems()
        self._failures = FailureLog(consumer.name)

    def deliver(
        self,
        transaction: HandlerTransaction,
        shard: ShardName,
        items: Sequence[Item],
        pause: Pause = lambda _: False,
    ) -> Delivered:
        """Applies records in order, or members; some may have been applied before."""
        delivery = _Delivery(transaction, shard, self._parts(shard, items), pause, Delivered())
        try:
            while delivery.parts and not delivery.total.is_stopped and self._deliver_part(delivery):
                if delivery.parts and delivery.pause(0):
                    self._keep_state(delivery)
                    break
        finally:
            # what is committed stays, even if the next part raises
            transaction.report(delivery.total)
        return delivery.total

    def _deliver_part(self, delivery: _Delivery[Item]) -> bool:
        """Attempts the next part; returns false if the delivery is over."""
        part, state = delivery.parts.pop(0)
        try:
            delivered = delivery.apply(
                self._plans.plan(delivery.shard, part), name=self._items.name
            )
        except NotApplied as failed:
            self._items.renew(part)
            return self._goes_on(delivery, part, state, failed)
        if delivered.missing:
            # They come first, as a part of their own.
            delivery.parts[:0] = [(delivered.missing, NO_FAILURE), (part, state)]
        self._refusals.count_applied(delivered.applied)
        delivered.measure(delivery.transaction.committed_us)
        if delivered.applied:
            self._repeats.end(delivery.shard)
        delivery.total.add(delivered)
        return delivered.position is not None

    def _keep_state(self, delivery: _Delivery[Item]) -> None:
        """Keeps the failures of the next part: the attempts of a slice count in the next one."""
        part, state = delivery.parts[0]
        if state.items:
            self._states[delivery.shard] = (self._items.identify(part[0]), state)

    def _parts(
        self, shard: ShardName, items: Sequence[Item]
    ) -> list[tuple[Sequence[Item], RetryState]]:
        """Returns the items in parts: those that failed in the last delivery are one."""
        first, state = self._states.pop(shard, (None, NO_FAILURE))
        index = next(
            (i for i, item in enumerate(items) if self._items.identify(item) == first), None
        )
        if index is None:
            return [(items, NO_FAILURE)]
        sizes = (index, state.items, len(items) - index - state.items)
        parts = zip(divide(items, sizes), (NO_FAILURE, state, NO_FAILURE), strict=True)
        return [(part, part_state) for part, part_state in parts if part]

    def _goes_on(
        self, delivery: _Delivery[Item], part: Sequence[Item], state: RetryState, failed: NotApplied
    ) -> bool:
        """Carries out the decision after a failure; returns false if the delivery is over."""
        self._failures.show(delivery.shard, failed)
        outcome = self._refusals.outcome(delivery.shard, state, failed)
        match decide(self._policy, len(part), state, outcome):
            case Retry(after_s, next_state) as retry:
                delivery.parts.insert(0, (part, next_state))
                if is_long(retry):
                    self._keep_state(delivery)
                    self._postpone(delivery, after_s, failed)
                    return False
                if delivery.pause(spread(after_s)):
                    self._keep_state(delivery)
                    delivery.total.retry_after_s = after_s
                    return False
            case Split(sizes, next_state):
                pieces = divide(part, sizes)
                delivery.parts[:0] = [
                    (piece, state_for_part(next_state, len(piece))) for piece in pieces
                ]
            case DeadLetterItem(attempts):
                return self._dead_letter(delivery, part[0], state, failed, attempts)
            case PassItem():
                return self._pass(delivery, part[0], state)
            case Halt(attempts):
                self._halt(
                    delivery,
                    part,
                    f"failed {format_count(attempts, 'time')}: {failed.reason}",
                    failed,
                )
        return True

    def halt(
        self,
        transaction: HandlerTransaction,
        shard: ShardName,
        items: Sequence[Item],
        failed: NotApplied,
    ) -> Delivered:
        """Halts a shard whose items failed in a transaction that no attempt may follow."""
        delivery = _Delivery(
            transaction, shard, [(items, NO_FAILURE)], lambda _: False, Delivered()
        )
        self._failures.show(shard, failed)
        self._halt(delivery, items, f"failed: {failed.reason}", failed)
        return delivery.total

    def _postpone(self, delivery: _Delivery[Item], after_s: float, failed: NotApplied) -> None:
        """Ends the delivery; the next one begins with the same items and their failures so far."""
        delivery.total.retry_after_s, seconds = after_s, round(after_s, 1)
        shard, note = delivery.shard, failed.waits_for
        if self._repeats.is_due(shard, failed.kind):
            log.warning(
                "waiting",
                consumer=self._consumer.name,
                shard=str(shard),
                reason=failed.kind,
                retry_s=seconds,
            )
        try:
            delivery.transaction.write(
                shard, lambda store, _: self._checkpoints.note_waiting(store, shard, note)
            )
        except ServerReplaced:
            raise
        except (NotApplied, ServerUnavailable):
            # `penstock status` can do without
            log.debug("shard note not written", shard=str(delivery.shard))

    def _pass(self, delivery: _Delivery[Item], item: Item, state: RetryState) -> bool:
        """Passes an item that the handler has cancelled; returns false if the delivery is over."""
        log.info(
            "cancelled",
            consumer=self._consumer.name,
            item=self._items.name_in_log(delivery.shard, item),
        )
        try:
            delivery.total.add(delivery.apply(self._plans.plan_pass(delivery.shard, item)))
        except NotApplied as lost:
            return self._goes_on(delivery, [item], state, lost)
        return True

    def _dead_letter(
        self,
        delivery: _Delivery[Item],
        item: Item,
        state: RetryState,
        failed: NotApplied,
        attempts: int,
    ) -> bool:
        """Dead-letters an item; returns false if the delivery is over.

        If even that is impossible, the shard halts.
        """
        log.warning(
            "dead-lettering",
            consumer=self._consumer.name,
            item=self._items.name_in_log(delivery.shard, item),
        )
        try:
            plan = self._plans.plan_dead_letter(delivery.shard, item, failed.reason, attempts)
            self._note_trouble(delivery, delivery.apply(plan), failed.kind)
        except NotApplied as lost:
            if isinstance(lost.outcome, Conflict | Unavailable):
                return self._goes_on(delivery, [item], state, lost)
            self._halt(delivery, [item], f"could not be dead-lettered: {lost.reason}", lost)
        except psycopg.Error as error:
            self._halt(delivery, [item], f"could not be dead-lettered: {reason(error)}", failed)
        return True

    def _note_trouble(self, delivery: _Delivery[Item], delivered: Delivered, kind: str) -> None:
        """Adds the result of a transaction that dead-lettered an item, or halted the shard."""
        delivery.total.add(delivered)
        names = self._consumer.name, delivery.shard.channel, delivery.shard.shard, kind
        if delivered.dead:
            delivery.transaction.observers(DeadLettered(*names))
        if delivered.halted is not None:
            delivery.transaction.observers(ShardHalted(*names))

    def _halt(
        self, delivery: _Delivery[Item], part: Sequence[Item], why: str, failed: NotApplied
    ) -> None:
        """Stops the shard behind these items until an operator lets it go on."""
        if isinstance(failed.error, HandlerCommitted):
            last = failed.reached.get(delivery.shard, Offset(0))
            why += f", then: {self._plans.skip_command(delivery.shard, last)}"
        item = self._items.describe(delivery.shard, part[0])
        text = f"{item} {why}" if len(part) == 1 else f"{len(part)} items from {item} {why}"

        def plan(store: Store[Executor], locked: Locked) -> TransactionPlan[Delivered]:
            checkpoint = locked.get(delivery.shard)
            if checkpoint is None:
                return TransactionPlan(Delivered())
            self._checkpoints.halt(store, delivery.shard, text)
            return TransactionPlan(Delivered(position=checkpoint.offset, halted=text))

        try:
            self._note_trouble(delivery, delivery.apply(plan), failed.kind)
        except NotApplied:  # it fails again, and halts then
            delivery.total.retry_after_s = pause_s(1)
        delivery.parts.clear()
