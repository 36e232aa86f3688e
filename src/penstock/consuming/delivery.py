"""Delivery: what is due, and what happens after an attempt.  Values in, values out; nothing here touches a server.

    compare    checkpoint, records      →  the records that come right after the checkpoint
    decide     policy, trouble, outcome →  done, retry, split, dead-letter or halt

A failing batch is retried, then bisected until the record at fault stands alone; alone it is retried again, then
dead-lettered, or its shard halts.  Only what is the record's own fault counts as an attempt:

    conflict       the transaction lost against another: retried soon, and counted as a failure after ``MAX_CONFLICTS``
    unavailable    a server cannot do it now: waited out; a record that meets it alone, while others pass, is at fault
    asked to wait  the handler raised ``TryAgain``: waited for, however long
    failed         the handler, its data, or its COMMIT: counted
    broken         no attempt can succeed, or another one could do harm: the shard halts
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, Protocol, assert_never

from typing_extensions import TypeVar  # with a default, which typing has since Python 3.13

from penstock.records import Offset, Record

Item = TypeVar("Item")


class HasOffset(Protocol):
    """A record, or only the place of one."""

    @property
    def offset(self) -> Offset:
        """Its place in the shard."""


Placed = TypeVar("Placed", bound=HasOffset, default=Record)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 10.0

MAX_ASKED_PAUSE_S = 86_400.0
"""Upper bound, in seconds, on the pause that a handler asks for."""

FIRST_CONFLICT_PAUSE_S = 0.005
LONGEST_CONFLICT_PAUSE_S = 1.0
MAX_CONFLICTS = 20
"""Transactions that may lose in a row, within about 14 seconds, before losing counts as failing."""

WAITS_BEFORE_SPLIT = 3
"""Times that a server may refuse a batch before half of it is tried: it may be too much at once."""

MAX_WAITS_ALONE = 30
"""Times, over about four minutes, that a server may refuse one record while it accepts others."""


@dataclass(frozen=True, slots=True)
class Comparison(Generic[Placed]):
    """What of a delivery is to be applied.

    Attributes:
        fresh: The records right after the checkpoint, without a hole.
        skipped: How many were at or below the checkpoint.
        gap: The delivery continues beyond what follows the checkpoint, or beyond a barrier.
    """

    fresh: Sequence[Placed]
    skipped: int
    gap: bool


def compare(checkpoint: Offset, records: Sequence[Placed], barrier: Offset | None = None) -> Comparison[Placed]:
    """Which of the delivered records, in order of their offsets, come right after the checkpoint and before a barrier."""
    offsets = get_offsets(records)
    first = bisect_right(offsets, checkpoint)
    due = _count_dense(offsets, first, checkpoint + 1)
    if barrier is not None:
        due = min(due, max(0, barrier - checkpoint))
    return Comparison(records[first : first + due], first, first + due < len(records))


def get_offsets(records: Sequence[Placed]) -> Sequence[Offset]:
    """The offsets alone, without making a record for each of ``Records``, or a place for each of a ``Span``."""
    offsets: Sequence[Offset] | None = getattr(records, "offsets", None)
    return [record.offset for record in records] if offsets is None else offsets


def _count_dense(offsets: Sequence[Offset], first: int, expected: int) -> int:
    """How many of the ascending offsets from ``first`` on are consecutive numbers from ``expected`` on."""
    left = len(offsets) - first
    if left and offsets[first] == expected and offsets[-1] == expected + left - 1:
        return left
    count = 0
    while count < left and offsets[first + count] == expected + count:
        count += 1
    return count


@dataclass(frozen=True, slots=True)
class Policy:
    """What a consumer chose: see ``ConsumerSpec``."""

    attempts: int = 3
    on_poison: Literal["dead_letter", "halt"] = "dead_letter"


@dataclass(frozen=True, slots=True)
class Trouble:
    """What has gone wrong with some items so far.

    Attributes:
        failures: Attempts that failed by the items' own fault.
        conflicts: Transactions that lost against another, in a row.
        waits: Times a server could not do it, in a row.
        asked: Times the handler asked to wait, in a row.
        items: How many items it is about; 0 if there is none.
    """

    failures: int = 0
    conflicts: int = 0
    waits: int = 0
    asked: int = 0
    items: int = 0

    @property
    def pauses(self) -> int:
        """Times in a row that something else than the items was waited for."""
        return self.waits + self.asked


NO_TROUBLE = Trouble()


@dataclass(frozen=True, slots=True)
class Conflict:
    """The transaction lost against another one; nothing of it happened."""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A server could not do it now.

    Attributes:
        others_pass: Items beside these have been applied since the trouble began.
    """

    others_pass: bool = False


@dataclass(frozen=True, slots=True)
class AskedToWait:
    """The handler raised ``TryAgain``.

    Attributes:
        after_s: Seconds that it named.
    """

    after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The items are at fault, or one of them.

    Attributes:
        culprit: Index of the item at fault, if it is known.
        for_certain: Another attempt would end the same: the payload does not fit its model.
    """

    culprit: int | None = None
    for_certain: bool = False


@dataclass(frozen=True, slots=True)
class Broken:
    """No attempt can succeed, or another one could do harm."""


Outcome = Conflict | Unavailable | AskedToWait | Failed | Broken


@dataclass(frozen=True, slots=True)
class Retry:
    """The same items again, after a pause."""

    after_s: float
    trouble: Trouble


@dataclass(frozen=True, slots=True)
class Split:
    """The items in parts, one after the other.

    Attributes:
        sizes: How many items each part has.
        trouble: What each part starts with; see ``trouble_for_part``.
    """

    sizes: tuple[int, ...]
    trouble: Trouble


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """The only item has failed for good."""

    attempts: int


@dataclass(frozen=True, slots=True)
class Halt:
    """The shard stops until an operator lets it go on."""

    attempts: int


Decision = Retry | Split | DeadLetter | Halt


def decide(policy: Policy, size: int, trouble: Trouble, outcome: Outcome) -> Decision:
    """What to do with ``size`` items that were not applied.

    Args:
        policy: What the consumer chose.
        size: Number of items, at least 1.
        trouble: What went wrong with them before.
        outcome: What went wrong now.
    """
    match outcome:
        case Conflict():
            lost = replace(trouble, conflicts=trouble.conflicts + 1, items=size)
            if lost.conflicts > MAX_CONFLICTS:
                return _after_failure(policy, size, lost, Failed())
            return Retry(_conflict_pause_s(lost.conflicts), lost)
        case Unavailable():
            return _after_refusal(policy, size, trouble, outcome)
        case AskedToWait(after_s):
            asked = replace(trouble, asked=trouble.asked + 1, items=size)
            pause = pause_s(asked.asked) if after_s is None else after_s
            return Retry(min(MAX_ASKED_PAUSE_S, max(FIRST_PAUSE_S, pause)), asked)
        case Failed():
            return _after_failure(policy, size, trouble, outcome)
        case Broken():
            return Halt(trouble.failures + 1)
        case _:
            assert_never(outcome)


def _after_failure(policy: Policy, size: int, trouble: Trouble, failed: Failed) -> Decision:
    failures = trouble.failures + 1
    counted = replace(trouble, failures=failures, items=size)
    if failures < policy.attempts and not failed.for_certain:
        return Retry(pause_s(failures), counted)
    if size > 1:
        # Each part has one attempt, unless it is a single item.
        return Split(_parts(size, failed.culprit), replace(counted, failures=policy.attempts - 1))
    return DeadLetter(failures) if policy.on_poison == "dead_letter" else Halt(failures)


def _after_refusal(policy: Policy, size: int, trouble: Trouble, refusal: Unavailable) -> Decision:
    waited = replace(trouble, waits=trouble.waits + 1, items=size)
    if size > 1 and waited.waits >= WAITS_BEFORE_SPLIT:
        return Split(_parts(size, None), replace(waited, waits=WAITS_BEFORE_SPLIT - 1))
    if size == 1 and waited.waits >= MAX_WAITS_ALONE and refusal.others_pass:
        return _after_failure(policy, size, waited, Failed(for_certain=True))
    return Retry(pause_s(waited.waits), waited)


def _parts(size: int, culprit: int | None) -> tuple[int, ...]:
    """Halves, or all around the item at fault."""
    if culprit is None:
        return (size // 2, size - size // 2)
    return tuple(part for part in (culprit, 1, size - culprit - 1) if part)


def pause_s(times: int) -> float:
    """How long to wait after the first time, the second, and so on, in seconds."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(times - 1, 20))


def _conflict_pause_s(times: int) -> float:
    return min(LONGEST_CONFLICT_PAUSE_S, FIRST_CONFLICT_PAUSE_S * 2.0 ** min(times - 1, 20))


def trouble_for_part(trouble: Trouble, size: int) -> Trouble:
    """What a part of a split batch starts with: one attempt is left to it, but a single item has all of its own.

    A part may lose against other transactions as often as the whole batch.
    """
    return replace(trouble, conflicts=0, items=size, failures=trouble.failures if size > 1 else 0)


def divide(items: Sequence[Item], sizes: Sequence[int]) -> list[Sequence[Item]]:
    """The items in consecutive parts of the given sizes."""
    parts, at = [], 0
    for size in sizes:
        parts.append(items[at : at + size])
        at += size
    return parts
