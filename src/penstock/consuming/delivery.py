"""Decides which records are due, and what follows an attempt.

Values in, values out; nothing here touches a server.

    compare    checkpoint, records      →  the records that come right after the checkpoint
    decide     policy, state, outcome   →  done, retry, split, dead-letter or halt

A failing batch is retried, then bisected until the record at fault stands alone; alone it is
retried again, then dead-lettered, or its shard halts.  Only what is the record's own fault counts
as an attempt:

    conflict       the transaction lost against another: retried soon, and after ``MAX_CONFLICTS``
                   waited out as the next
    unavailable    a server cannot do it now: waited out.  What the server itself states (a right, a
                   lock, a timeout, a table that is missing) is never the record's fault.  If nobody
                   knows why, as of a connection that ends without a word, a record that meets it
                   alone, while others pass, is at fault
    asked to wait  the handler said ``Snooze``: waited for, however long
    failed         the handler, its data, or its COMMIT: counted
    broken         no attempt can succeed, or another one could do harm: the shard halts
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, Protocol, assert_never

from typing_extensions import TypeVar  # with a default, which typing has since Python 3.13

from penstock.parallel import backoff_s
from penstock.records import Offset, Record, Shard, ShardName

Item = TypeVar("Item")


class HasOffset(Protocol):
    """A record, or only the place of one."""

    @property
    def offset(self) -> Offset:
        """Returns the offset in its shard."""


Placed = TypeVar("Placed", bound=HasOffset, default=Record)

FIRST_PAUSE_S = 0.05
MAX_BACKOFF_S = 10.0

MAX_ASKED_PAUSE_S = 86_400.0
"""Upper bound, in seconds, on the pause that a handler asks for."""

FIRST_CONFLICT_PAUSE_S = 0.005
MAX_CONFLICT_PAUSE_S = 1.0
MAX_CONFLICTS = 20
"""Transactions that may lose in a row, within about 14 seconds, before losing is waited out as a
refusal."""

WAITS_BEFORE_SPLIT = 3
"""Times that a server may refuse a batch before half of it is tried: it may be too much at once."""

MAX_WAITS_ALONE = 30
"""Times, over about four minutes, that a server may refuse one record while it accepts others."""


@dataclass(frozen=True, slots=True)
class Comparison(Generic[Placed]):
    """The part of a delivery that is to be applied: what comes right after the checkpoint.

    It has no hole.  ``skipped`` were at or below it; ``gap`` says that the delivery continues
    beyond what follows it, or beyond a barrier.
    """

    fresh: Sequence[Placed]
    skipped: int
    gap: bool


def compare(
    checkpoint: Offset, records: Sequence[Placed], barrier: Offset | None = None
) -> Comparison[Placed]:
    """Compares records, in order of their offsets, with the checkpoint and a barrier."""
    offsets = get_offsets(records)
    first = bisect_right(offsets, checkpoint)
    due = _count_dense(offsets, first, checkpoint + 1)
    if barrier is not None:
        due = min(due, max(0, barrier - checkpoint))
    return Comparison(records[first : first + due], first, first + due < len(records))


def get_offsets(records: Sequence[Placed]) -> Sequence[Offset]:
    """Returns the offsets alone.

    It makes no record for each of ``Records``, and no place for each of a ``Span``.
    """
    offsets: Sequence[Offset] | None = getattr(records, "offsets", None)
    return [record.offset for record in records] if offsets is None else offsets


def _count_dense(offsets: Sequence[Offset], first: int, expected: int) -> int:
    """Counts the ascending offsets from ``first`` on that are consecutive from ``expected`` on."""
    remaining = len(offsets) - first
    if remaining and offsets[first] == expected and offsets[-1] == expected + remaining - 1:
        return remaining
    count = 0
    while count < remaining and offsets[first + count] == expected + count:
        count += 1
    return count


@dataclass(frozen=True, slots=True)
class Policy:
    """A consumer's choices: see ``ConsumerSpec``."""

    attempts: int = 3
    on_poison: Literal["dead_letter", "halt"] = "dead_letter"


@dataclass(frozen=True, slots=True)
class RetryState:
    """Failures of some items so far."""

    failures: int = 0  # attempts that failed by the items' own fault
    conflicts: int = 0  # transactions that lost against another, in a row
    waits: int = 0  # times a server could not do it, in a row
    asked: int = 0  # times the handler asked to wait, in a row
    items: int = 0  # number of these items; 0 if nothing has failed

    @property
    def pauses(self) -> int:
        """Returns how often in a row a server or a service was waited for."""
        return self.waits + self.asked


NO_FAILURE = RetryState()


@dataclass(frozen=True, slots=True)
class Conflict:
    """The transaction lost against another one; nothing of it happened.  See ``Unavailable``."""

    others_pass: bool = False


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A server could not do it now.

    ``others_pass`` says that other items have been applied since the first failure.  ``is_stated``:
    the server has said which state of its own keeps it; then the items are not at fault, whatever
    others do.
    """

    others_pass: bool = False
    is_stated: bool = False


@dataclass(frozen=True, slots=True)
class AskedToWait:
    """The handler said ``Snooze``, and so many seconds."""

    after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The items are at fault, or one of them: ``culprit`` is its index, if it is known.

    ``for_certain`` says that another attempt would end the same: the payload does not fit its
    model.
    """

    culprit: int | None = None
    for_certain: bool = False


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The handler said ``Cancel`` of the items, or of one: ``culprit`` is its index, if known."""

    culprit: int | None = None


@dataclass(frozen=True, slots=True)
class Broken:
    """No attempt can succeed, or another one could do harm."""


Outcome = Conflict | Unavailable | AskedToWait | Cancelled | Failed | Broken


@dataclass(frozen=True, slots=True)
class Retry:
    """The same items again, after a pause."""

    after_s: float
    state: RetryState


@dataclass(frozen=True, slots=True)
class Split:
    """The items in parts of these sizes, one after the other.

    They keep the failures so far; see ``state_for_part``.
    """

    sizes: tuple[int, ...]
    state: RetryState


@dataclass(frozen=True, slots=True)
class DeadLetterItem:
    """The only item has failed for good."""

    attempts: int


@dataclass(frozen=True, slots=True)
class PassItem:
    """The only item needs no effect."""


@dataclass(frozen=True, slots=True)
class Halt:
    """The shard stops until an operator lets it go on."""

    attempts: int


Decision = Retry | Split | DeadLetterItem | PassItem | Halt


def decide(policy: Policy, size: int, state: RetryState, outcome: Outcome) -> Decision:
    """Decides what to do with ``size`` items, at least one, that were not applied."""
    match outcome:
        case Conflict():
            return _after_conflict(
                policy, size, replace(state, conflicts=state.conflicts + 1, items=size), outcome
            )
        case Unavailable():
            return _after_refusal(policy, size, state, outcome)
        case AskedToWait(after_s):
            next_state = replace(state, asked=state.asked + 1, items=size)
            pause = pause_s(next_state.asked) if after_s is None else after_s
            return Retry(min(MAX_ASKED_PAUSE_S, max(FIRST_PAUSE_S, pause)), next_state)
        case Cancelled(culprit):
            return (
                Split(_parts(size, culprit), replace(state, items=size)) if size > 1 else PassItem()
            )
        case Failed():
            return _after_failure(policy, size, state, outcome)
        case Broken():
            return Halt(state.failures + 1)
        case _:
            assert_never(outcome)


def _after_conflict(policy: Policy, size: int, lost: RetryState, conflict: Conflict) -> Decision:
    if lost.conflicts > MAX_CONFLICTS:
        return _after_refusal(policy, size, lost, Unavailable(conflict.others_pass))
    return Retry(backoff_s(lost.conflicts, FIRST_CONFLICT_PAUSE_S, MAX_CONFLICT_PAUSE_S), lost)


def _after_failure(policy: Policy, size: int, state: RetryState, failed: Failed) -> Decision:
    failures = state.failures + 1
    counted = replace(state, failures=failures, items=size)
    if failures < policy.attempts and not failed.for_certain:
        return Retry(pause_s(failures), counted)
    if size > 1:
        # Each part has one attempt, unless it is a single item.
        return Split(_parts(size, failed.culprit), replace(counted, failures=policy.attempts - 1))
    return DeadLetterItem(failures) if policy.on_poison == "dead_letter" else Halt(failures)


def _after_refusal(policy: Policy, size: int, state: RetryState, refusal: Unavailable) -> Decision:
    waited = replace(state, waits=state.waits + 1, items=size)
    if size > 1 and waited.waits >= WAITS_BEFORE_SPLIT:
        return Split(_parts(size, None), replace(waited, waits=WAITS_BEFORE_SPLIT - 1))
    if (
        size == 1
        and waited.waits >= MAX_WAITS_ALONE
        and refusal.others_pass
        and not refusal.is_stated
    ):
        return _after_failure(policy, size, waited, Failed(for_certain=True))
    return Retry(pause_s(waited.waits), waited)


def _parts(size: int, culprit: int | None) -> tuple[int, ...]:
    """Returns the sizes of halves, or of all around the item at fault."""
    if culprit is None:
        return (size // 2, size - size // 2)
    return tuple(part for part in (culprit, 1, size - culprit - 1) if part)


def pause_s(times: int) -> float:
    """Returns the pause after a failure, the first being 1, in seconds."""
    return backoff_s(times, FIRST_PAUSE_S, MAX_BACKOFF_S)


def state_for_part(state: RetryState, size: int) -> RetryState:
    """Returns the state of a part of a split batch.

    It has one attempt left; a single item has all of its own.
    """
    return replace(state, conflicts=0, items=size, failures=state.failures if size > 1 else 0)


def divide(items: Sequence[Item], sizes: Sequence[int]) -> list[Sequence[Item]]:
    """Returns the items in consecutive parts of the given sizes."""
    parts, start = [], 0
    for size in sizes:
        parts.append(items[start : start + size])
        start += size
    return parts


COUNTED = ("applied", "skipped", "dead", "backfilled", "cancelled", "snoozed", "retried", "stale")


@dataclass(kw_only=True)
class Counts:
    """Numbers of records, members or jobs."""

    applied: int = 0  # those whose effects are committed
    skipped: int = 0  # those that had been applied before
    dead: int = 0  # those that were dead-lettered
    backfilled: int = 0  # records that came from the journal, because the log has lost them
    cancelled: int = 0  # those that were passed without an effect, because the handler said so
    snoozed: int = 0  # jobs that the handler has put off
    retried: int = 0  # jobs that have failed, and wait for another attempt
    # jobs whose lease had ended when their handler returned: nothing of it was committed
    stale: int = 0
    # for each applied record the time from staging to COMMIT, as far as it was measured
    latencies_us: list[int] = field(default_factory=list)

    def count(self, other: "Counts") -> None:
        """Adds the numbers of another delivery or round."""
        for name in COUNTED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.latencies_us += other.latencies_us

    @property
    def done(self) -> int:
        """Returns the number of items that need not be delivered again."""
        return self.applied + self.skipped + self.dead + self.cancelled


@dataclass(kw_only=True)
class Delivered(Counts):
    """Result of a delivery to one shard."""

    # the checkpoint afterwards; None if another process holds the shard
    position: Offset | None = None
    halted: str | None = None  # why the shard stopped; None if it did not
    is_paused: bool = False  # the consumer is paused: nothing was applied
    held: bool = False  # the shard stands at a barrier, and has not applied what lies behind
    # of a held shard: the shard of an earlier generation that it waits for; None at a barrier
    waits_for: Shard | None = None
    # seconds until failed items are to be delivered again; None if none are
    retry_after_s: float | None = None
    # records that the log has lost, from the journal: nothing was applied, they have to be
    # delivered first
    missing: Sequence[Any] = ()
    members: list[bytes] = field(default_factory=list)  # members of an Ick that need not come again
    # when the applied records were staged, and when their checkpoint was locked: microseconds since
    # 1970 by Postgres' clock
    staged_us: Sequence[int] = ()
    clock_us: int = 0

    def measure(self, committed_us: int) -> None:
        """Notes the latencies of records whose COMMIT was so long after the lock."""
        now = self.clock_us + committed_us
        if self.staged_us and max(self.staged_us) > now:  # Postgres' clock was set back
            self.latencies_us = [max(0, now - time_us) for time_us in self.staged_us]
        else:
            self.latencies_us = [now - time_us for time_us in self.staged_us]

    @property
    def is_stopped(self) -> bool:
        """Returns whether the shard goes on only once an operator lets it."""
        return self.is_paused or self.halted is not None

    @property
    def is_left(self) -> bool:
        """Returns whether the shard is left for later.

        Another process holds it, or an attempt has failed.
        """
        return self.position is None and not self.is_stopped

    def add(self, delivered: "Delivered") -> None:
        """Adds the result of one transaction."""
        self.count(delivered)
        self.position = delivered.position
        self.halted = delivered.halted
        self.is_paused = delivered.is_paused
        self.held, self.waits_for = delivered.held, delivered.waits_for
        self.members.extend(delivered.members)


@dataclass(kw_only=True)
class Consumed(Counts):
    """Result of one round, over all shards."""

    halted: dict[ShardName, str] = field(default_factory=dict)  # shards that have stopped, and why
    # where the consumer stands in the shards that this round touched
    positions: dict[ShardName, Offset] = field(default_factory=dict)
    # shards that were left for later: another process was working on them, or an attempt has failed
    left: set[ShardName] = field(default_factory=set)

    def add(self, shard: ShardName, delivered: Delivered) -> None:
        """Counts a delivery."""
        self.count(delivered)
        if delivered.halted is not None:
            self.halted[shard] = delivered.halted
        if delivered.position is not None:
            self.positions[shard] = delivered.position
        elif delivered.is_left:
            self.left.add(shard)

    def merge(self, later: "Consumed") -> None:
        """Adds the result of a later round."""
        self.count(later)
        self.halted |= later.halted
        self.positions |= later.positions
        self.left |= later.left

    @property
    def idle(self) -> bool:
        """Returns whether nothing was delivered."""
        return not self.done
