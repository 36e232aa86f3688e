"""Decisions that need no server."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.batches.columns import Columns
from penstock.channels.batch_outcomes import Batch
from penstock.consuming.deliverer import retry_conflicts
from penstock.consuming.delivery import (
    COUNTED,
    MAX_BACKOFF_S,
    MAX_CONFLICTS,
    MAX_WAITS_ALONE,
    NO_FAILURE,
    AskedToWait,
    Broken,
    Cancelled,
    Conflict,
    Consumed,
    DeadLetterItem,
    Decision,
    Delivered,
    Failed,
    Halt,
    Outcome,
    PassItem,
    Policy,
    Retry,
    RetryState,
    Split,
    Unavailable,
    compare,
    decide,
    divide,
    pause_s,
    state_for_part,
)
from penstock.consuming.failures import NotApplied
from penstock.records import Epoch, Offset, Record, RecordId, Shard, ShardName

POLICIES = st.builds(Policy, st.integers(1, 9), st.sampled_from(["dead_letter", "halt"]))
TROUBLES = st.builds(RetryState, *(st.integers(0, n) for n in (9, MAX_CONFLICTS + 2, 10_000, 10_000)), st.just(0))
OUTCOMES: st.SearchStrategy[Outcome] = st.one_of(
    st.just(Conflict()),
    st.builds(Unavailable, st.booleans()),
    st.builds(AskedToWait, st.none() | st.floats(-1, 1e6)),
    st.builds(Cancelled, st.none()),
    st.builds(Failed, st.none(), st.booleans()),
    st.just(Broken()),
)


def record(offset: int) -> Record:
    return Record("c", Shard(0), Offset(offset), RecordId(offset), "k", "a", "o", "{}")


@given(st.sets(st.integers(1, 60)), st.integers(0, 60))
def test_only_records_that_follow_the_checkpoint_without_a_hole_are_fresh(offsets: set[int], checkpoint: int) -> None:
    delivered = [record(offset) for offset in sorted(offsets)]
    comparison = compare(Offset(checkpoint), delivered)

    fresh = [r.offset for r in comparison.fresh]
    assert fresh == list(range(checkpoint + 1, checkpoint + 1 + len(fresh)))
    assert comparison.skipped == sum(offset <= checkpoint for offset in offsets)
    assert comparison.gap == (len(fresh) + comparison.skipped < len(offsets))
    assert comparison.gap or len(fresh) + comparison.skipped == len(offsets)
    assert checkpoint + 1 + len(fresh) not in offsets


@given(POLICIES, st.integers(2, 100), st.none() | st.integers(0, 99))
def test_a_split_batch_keeps_every_record_in_order(policy: Policy, size: int, culprit: int | None) -> None:
    records = [record(offset) for offset in range(1, size + 1)]
    at = None if culprit is None or culprit >= size else culprit
    decision = decide(policy, size, NO_FAILURE, Failed(at, for_certain=True))

    assert isinstance(decision, Split)
    parts = divide(records, decision.sizes)
    assert [r for part in parts for r in part] == records
    assert all(0 < len(part) < size for part in parts)
    assert at is None or [records[at]] in parts


@given(POLICIES, st.integers(1, 1000), TROUBLES, OUTCOMES)
def test_only_a_single_item_is_dead_lettered_and_not_if_the_consumer_halts(
    policy: Policy, size: int, state: RetryState, outcome: Outcome
) -> None:
    """Guarantee 21."""
    decision = decide(policy, size, state, outcome)

    if isinstance(decision, DeadLetterItem):
        assert (size, policy.on_poison) == (1, "dead_letter")
        assert not isinstance(outcome, AskedToWait | Broken)
    if isinstance(outcome, Broken):
        assert decision == Halt(state.failures + 1)
    if isinstance(outcome, AskedToWait):
        assert isinstance(decision, Retry)


@given(POLICIES, st.integers(1, 1000), TROUBLES, OUTCOMES)
def test_pauses_are_bounded_after_any_number_of_failures(
    policy: Policy, size: int, state: RetryState, outcome: Outcome
) -> None:
    """Even after hours, pauses neither overflow nor exceed the bound."""
    decision = decide(policy, size, state, outcome)

    if isinstance(decision, Retry):
        named = outcome.after_s if isinstance(outcome, AskedToWait) else None
        assert 0 <= decision.after_s <= max(MAX_BACKOFF_S, named or 0)


@given(policy=POLICIES, waits=st.integers(0, 10_000), others_pass=st.booleans())
def test_a_state_that_the_server_names_is_no_fault_of_a_record_whatever_others_do(
    policy: Policy, waits: int, *, others_pass: bool
) -> None:
    """Guarantee 48."""
    state = RetryState(waits=waits, items=1)

    assert isinstance(decide(policy, 1, state, Unavailable(others_pass, is_stated=True)), Retry)


def test_a_record_that_loses_for_long_is_waited_for() -> None:
    """Guarantee 48: others that write the same rows are no fault of its."""
    decision: Decision = decide(Policy(), 1, RetryState(conflicts=MAX_CONFLICTS, items=1), Conflict())
    for _ in range(100):
        assert isinstance(decision, Retry)
        decision = decide(Policy(), 1, decision.state, Conflict())
    assert isinstance(decision, Retry)
    assert decision.state.failures == 0


@given(POLICIES, st.integers(0, 10_000))
def test_a_refusal_by_the_server_is_not_the_records_fault_while_no_other_passes(policy: Policy, waits: int) -> None:
    """Guarantee 13: a lock that is held for hours dead-letters nothing."""
    state = RetryState(waits=waits, items=1)

    assert isinstance(decide(policy, 1, state, Unavailable(others_pass=False)), Retry)


def test_a_record_that_alone_is_refused_while_others_pass_is_at_fault() -> None:
    waited = RetryState(waits=MAX_WAITS_ALONE - 2, items=1)
    first = decide(Policy(), 1, waited, Unavailable(others_pass=True))

    assert isinstance(first, Retry)
    assert decide(Policy(), 1, first.state, Unavailable(others_pass=True)) == DeadLetterItem(1)


def follow(policy: Policy, size: int, poison: set[int], outcome: Outcome) -> tuple[list[int], list[int], int]:
    """Follows the decisions on a batch with items that always fail; returns those applied, those not, and the attempts."""
    parts: list[tuple[Sequence[int], RetryState]] = [(range(size), NO_FAILURE)]
    applied: list[int] = []
    dead: list[int] = []
    attempts = 0
    while parts:
        part, state = parts.pop(0)
        attempts += 1
        if not poison & set(part):
            applied.extend(part)
            continue
        decision: Decision = decide(policy, len(part), state, outcome)
        match decision:
            case Retry(_, known):
                parts.insert(0, (part, known))
            case Split(sizes, known):
                pieces = divide(part, sizes)
                parts[:0] = [(piece, state_for_part(known, len(piece))) for piece in pieces]
            case DeadLetterItem() | PassItem() | Halt():
                dead.extend(part)
    return applied, dead, attempts


@given(
    st.integers(1, 64),
    st.sets(st.integers(0, 63), max_size=4),
    st.integers(1, 4),
    st.sampled_from([Failed(), Conflict(others_pass=True), Unavailable(others_pass=True)]),
)
def test_poison_is_isolated_and_all_other_items_are_applied(
    size: int, poison: set[int], attempts: int, outcome: Outcome
) -> None:
    """Guarantee 21: for any reason of failure, isolation ends, and dead-letters no healthy item."""
    poison = {each for each in poison if each < size}
    applied, dead, tried = follow(Policy(attempts), size, poison, outcome)

    assert applied == [each for each in range(size) if each not in poison]
    assert dead == sorted(poison)
    assert tried < 2 * size + (len(poison) + 1) * 8 * (MAX_CONFLICTS + MAX_WAITS_ALONE + 40)


def test_a_batch_of_several_shards_has_its_attempts_and_a_part_has_one() -> None:
    once = decide(Policy(3), 8, NO_FAILURE, Failed())
    assert isinstance(once, Retry)
    twice = decide(Policy(3), 8, once.state, Failed())
    assert isinstance(twice, Retry)
    split = decide(Policy(3), 8, twice.state, Failed())
    assert isinstance(split, Split)

    assert state_for_part(split.state, 4) == replace(split.state, items=4, failures=2)
    assert state_for_part(split.state, 1).failures == 0


def test_pauses_grow_to_a_bound() -> None:
    pauses = [pause_s(attempt) for attempt in range(1, 5000)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == MAX_BACKOFF_S


def test_a_batch_knows_its_extent() -> None:
    columns = Columns.pack([(number, "k", "insert", "thing", "{}", "", 0) for number in range(3)])
    batch = Batch(ShardName("c", Shard(0)), Epoch(1), Offset(5), begins=False, columns=columns)
    assert (batch.count, batch.last) == (3, 7)


def test_a_part_of_a_batch_has_as_many_retries_after_conflicts_as_the_whole() -> None:
    """Guarantee 17: a conflict is not the record's fault; a smaller part has fewer of them."""
    part = state_for_part(RetryState(failures=2, conflicts=23, items=20), 1)
    lost = 0
    while isinstance(decision := decide(Policy(), 1, part, Conflict()), Retry) and not decision.state.waits:
        part, lost = decision.state, lost + 1

    assert lost >= MAX_CONFLICTS


@pytest.mark.parametrize(
    ("outcomes", "stops_at", "attempts"),
    [
        ([], 99, 1),
        ([Conflict()] * 3, 99, 4),
        ([Conflict()] * 99, 99, MAX_CONFLICTS + 1),
        ([Conflict()] * 99, 2, 2),
        ([Conflict(), Unavailable()], 99, 2),
        ([Failed()], 99, 1),
    ],
)
def test_a_transaction_that_may_lose_is_tried_again_while_it_loses_but_not_for_ever(
    outcomes: list[Outcome], stops_at: int, attempts: int
) -> None:
    left, done = iter(outcomes), count(1)

    def attempt() -> bool:
        next(done)
        if (outcome := next(left, None)) is not None:
            raise NotApplied(outcome, ValueError())
        return True

    pauses = count(1)
    succeeds = attempts > len(outcomes)
    with nullcontext() if succeeds else pytest.raises(NotApplied):
        assert retry_conflicts(attempt, lambda _: next(pauses) >= stops_at)
    assert next(done) - 1 == attempts


def test_a_delivery_sums_its_transactions_and_ends_where_the_last_one_does() -> None:
    """Every field, but what only the deliverer says of a whole delivery."""
    numbers = count(2)

    def make(**marks: Any) -> Delivered:
        counted: dict[str, Any] = {name: next(numbers) for name in COUNTED}
        latest: dict[str, Any] = {
            name: f"{name} {next(numbers)}" for name in ("position", "halted", "is_paused", "held", "waits_for")
        }
        return Delivered(**counted, **latest, latencies_us=[next(numbers)], members=[b"%d" % next(numbers)], **marks)

    first, last = make(), make(retry_after_s=1.0, missing=[record(1)])
    total = Delivered()
    for each in (first, last):
        total.add(each)

    both = {name: getattr(first, name) + getattr(last, name) for name in (*COUNTED, "latencies_us", "members")}
    assert {field.name: getattr(total, field.name) for field in fields(total)} == {
        **{field.name: getattr(last, field.name) for field in fields(last)},
        **both,
        "retry_after_s": None,
        "missing": (),
    }


def test_rounds_have_the_counts_the_positions_and_the_troubles_of_all_their_shards() -> None:
    going, busy, halted, paused = (ShardName("c", Shard(number)) for number in range(4))
    first, second = Consumed(), Consumed()
    for consumed in (first, second):
        consumed.add(going, Delivered(applied=2, position=Offset(consumed is second), latencies_us=[1, 2]))
    first.add(busy, Delivered())
    second.add(halted, Delivered(dead=1, position=Offset(7), halted="why"))
    second.add(paused, Delivered(is_paused=True))
    assert Consumed().idle
    assert not any(each.idle for each in (first, second))
    first.merge(second)

    assert first == Consumed(
        applied=4,
        dead=1,
        latencies_us=[1, 2, 1, 2],
        halted={halted: "why"},
        positions={going: Offset(1), halted: Offset(7)},
        left={busy},
    )
    first.merge(Consumed(halted={busy: "late"}, positions={busy: Offset(1)}, left={paused}))
    assert (first.halted, first.left) == ({halted: "why", busy: "late"}, {busy, paused})
    assert first.positions == {going: Offset(1), halted: Offset(7), busy: Offset(1)}
