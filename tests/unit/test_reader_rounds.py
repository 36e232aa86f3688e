"""What a reader of a queue remembers between two rounds: how long it waits, which shards it leaves out, which leases it keeps."""

from collections.abc import Callable
from dataclasses import replace
from math import nan
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.channels.queue.leases import (
    FIRST_PAUSE_S,
    MAX_PAUSE_S,
    PROCESS,
    LeaseBook,
    LeaseState,
    ProcessLeases,
    pause_s,
)
from penstock.channels.queue.queue_messages import Message
from penstock.channels.queue.rounds import CLUSTER_POLL_S, LEFT_OUT_S, MAX_WAIT_S, ReaderOptions, Rounds
from penstock.channels.queue.shard import Company, QueueShape, TakenMessages, worker_name
from penstock.errors import ForeignQueue, InvalidMessage, PenstockError, ServerUnavailable

MESSAGE = Message(0, "m", "t", "", 1, 0, 0, b"", "")
LONG_S = 1000.0


def make_rounds(shards: int = 1, **fields: Any) -> Rounds:
    options = ReaderOptions()
    return Rounds(QueueShape("jobs", shards=shards), "w", options, LeaseBook(options.limit_s), **fields)


def read_all(rounds: Rounds, due_s: float | None = None) -> list[int]:
    """A round in which each shard says when it has something; returns their numbers in its order."""
    shards = rounds.begin()
    for shard in shards:
        rounds.take(shard, 1)
        rounds.taken(shard, TakenMessages([], due_s, 0))
    return [shard.number for shard in shards]


def test_a_wait_ends_when_something_is_due_by_the_last_round_alone() -> None:
    rounds = make_rounds()
    read_all(rounds, due_s=0.0)
    assert rounds.wait_s(LONG_S) == 0.0
    read_all(rounds, due_s=None)
    assert rounds.wait_s(LONG_S) == MAX_WAIT_S
    assert rounds.wait_s(0.25) == 0.25
    read_all(rounds, due_s=0.5)
    assert 0.0 <= rounds.wait_s(LONG_S) <= 0.5
    assert rounds.wait_s(-1.0) == 0.0


def test_the_earliest_of_all_shards_is_waited_for() -> None:
    rounds = make_rounds(shards=3)
    for due_s, shard in zip((LONG_S, 0.0, None), rounds.begin(), strict=True):
        rounds.take(shard, 1)
        rounds.taken(shard, TakenMessages([], due_s, 0))

    assert rounds.wait_s(LONG_S) == 0.0


def test_a_reader_is_quiet_after_a_round_until_something_is_due() -> None:
    rounds = make_rounds(shards=2)
    assert not rounds.is_quiet()
    first, second = rounds.begin()
    for shard, is_quiet in ((first, False), (second, True)):
        rounds.take(shard, 1)
        rounds.taken(shard, TakenMessages([], LONG_S, 0))
        assert rounds.is_quiet() == is_quiet
    rounds.leave_out(frozenset({1}))
    assert not rounds.is_quiet()
    assert read_all(rounds) == [0]
    assert rounds.is_quiet()
    rounds.leave_out(frozenset({1}))  # as before
    assert rounds.is_quiet()
    read_all(rounds, due_s=0.0)
    assert not rounds.is_quiet()


def test_each_shard_is_first_in_its_turn() -> None:
    rounds = make_rounds(shards=3)

    assert [read_all(rounds) for _ in range(4)] == [[1, 2, 0], [2, 0, 1], [0, 1, 2], [1, 2, 0]]


def fail(error: PenstockError, rounds: Rounds, number: int = 0) -> None:
    with rounds.trying(rounds.shape.shards[number]):
        raise error


def test_a_failed_shard_is_left_out_and_its_error_is_raised_once_or_observed() -> None:
    rounds = make_rounds(shards=2)
    read_all(rounds)
    fail(ForeignQueue("x"), rounds)

    assert read_all(rounds) == [1]
    assert [shard.number for shard in rounds.read_shards] == [1]
    assert rounds.wakes() == [rounds.shape.shards[1].keys.wakes]
    with pytest.raises(ForeignQueue):
        rounds.raise_error()
    rounds.raise_error()
    rounds.unusable.check_now()
    assert sorted(read_all(rounds)) == [0, 1]
    fail(ForeignQueue("x"), rounds)
    with rounds.trying(rounds.shape.shards[0]):
        pass
    rounds.raise_error()
    assert rounds.unusable.errors == {}

    reported: list[tuple[int, PenstockError]] = []
    rounds.on_error = lambda number, error: reported.append((number, error))
    fail(error := ForeignQueue("x"), rounds, 1)
    rounds.raise_error()
    assert reported == [(1, error)]


def test_a_server_that_does_not_answer_is_left_out_in_a_cluster_alone() -> None:
    with pytest.raises(ServerUnavailable):
        fail(ServerUnavailable("x"), make_rounds())
    rounds = make_rounds(is_cluster=True)
    fail(ServerUnavailable("x"), rounds)
    assert rounds.begin() == []


def test_a_reader_pauses_where_it_cannot_be_woken() -> None:
    rounds = make_rounds(shards=2)
    assert [rounds.pause_s(seconds) for seconds in (0.01, LONG_S)] == [0.01, LEFT_OUT_S]
    read_all(rounds)
    assert rounds.pause_s(LONG_S) is None
    rounds.is_cluster = True
    assert [rounds.pause_s(seconds) for seconds in (0.01, LONG_S)] == [0.01, CLUSTER_POLL_S]
    rounds.leave_out(frozenset({1}))
    assert rounds.pause_s(LONG_S) is None


def test_a_sweep_is_due_once_in_its_interval() -> None:
    rounds = make_rounds()
    assert [rounds.is_sweep_due() for _ in range(3)] == [True, False, False]
    rounds.sweep_at = monotonic()
    assert rounds.is_sweep_due()


def test_a_message_is_exhausted_only_after_its_last_attempt() -> None:
    rounds = make_rounds()
    [shard] = rounds.begin()
    rounds.take(shard, 9)
    taken = [replace(MESSAGE, id=str(attempts), attempts=attempts) for attempts in (1, 5, 6)]
    good, exhausted = rounds.taken(shard, TakenMessages(taken, None, 0))

    assert [each.message.attempts for each in good] == [1, 5]
    assert [end.outcome for end in rounds.exhausted(exhausted)] == ["dead"]
    assert len(rounds.book.all()) == 3


def test_a_request_is_the_same_until_its_reply_has_come_and_another_one_afterwards() -> None:
    rounds = make_rounds(shards=2)
    first, second = rounds.begin()
    for shard in (first, first, second):
        rounds.take(shard, 1)
    before = dict(rounds.requests)
    rounds.take(first, 1)
    assert rounds.requests == before
    rounds.taken(first, TakenMessages([], None, 0))
    rounds.take(first, 1)

    tokens = {token for token, _ in (*before.values(), *rounds.requests.values())}
    assert len(tokens) == 3
    assert all(token.startswith("w/") for token in tokens)


@pytest.mark.parametrize(("attempts", "longest"), [(1, 1), (2, 2), (9, 256), (10, 300), (1000, 300)])
def test_a_pause_is_doubled_by_each_attempt_up_to_its_maximum_and_at_least_half_as_long(
    attempts: int, longest: float
) -> None:
    pauses = [pause_s(attempts) for _ in range(200)]

    assert longest / 2 <= min(pauses) < longest * 0.7
    assert longest * 0.8 < max(pauses) <= longest
    assert pause_s(attempts, 0.001) <= 0.001 * 2 ** min(attempts - 1, 60)
    assert (FIRST_PAUSE_S, MAX_PAUSE_S) == (1, 300)


def make_held(**fields: Any) -> LeaseState:
    return LeaseState(fields.pop("message", MESSAGE), "token", monotonic(), **fields)


@pytest.mark.parametrize(("attempts", "outcome"), [(1, "retry"), (4, "retry"), (5, "dead"), (6, "dead")])
def test_after_the_last_attempt_a_failure_is_the_end(attempts: int, outcome: str) -> None:
    end = make_held(message=replace(MESSAGE, attempts=attempts)).failed("Reason", attempts=5, delay_s=7.0)

    assert (end.outcome, end.delay_s, end.reason) == (
        (outcome, 7.0, "") if outcome == "retry" else (outcome, 0.0, "Reason")
    )


def test_a_settlement_says_how_long_the_work_took_since_it_began() -> None:
    held = make_held(begun_at=monotonic() - LONG_S)
    assert held.settlement("done").seconds >= LONG_S
    assert held.settlement("done", seconds=0.0).seconds == 0.0
    held.begin()
    assert held.settlement("done").seconds < LONG_S
    with pytest.raises(InvalidMessage, match="seconds"):
        held.settlement("done", seconds=nan)
    assert len(held.settlement("dead", reason="ä" * 4000).reason) == 2000


def test_leases_are_extended_while_their_work_is_within_its_limit_and_they_are_ours() -> None:
    book, now = LeaseBook(limit_s=LONG_S), monotonic()
    kinds: dict[str, Callable[[Message], LeaseState]] = {
        "new": lambda message: make_held(message=message),
        "long": lambda message: make_held(message=message, begun_at=now - LONG_S + 100),
        "hung": lambda message: make_held(message=message, begun_at=now - LONG_S - 1),
        "stale": lambda message: make_held(message=message, is_stale=True),
        "removed": lambda message: make_held(message=message),
    }
    held = {name: make(replace(MESSAGE, id=name, shard=len(name))) for name, make in kinds.items()}
    book.add([*held.values()])
    book.remove([held["removed"]])

    assert book.to_extend() == {3: [held["new"]], 4: [held["long"]]}
    assert [each.message.id for each in book.all()] == ["new", "long", "hung", "stale"]
    process, other = ProcessLeases(), LeaseBook(limit_s=LONG_S)
    for each in (book, other):
        process.add(each)
    other.add([held["removed"]])
    assert ([each.message.id for each in process.held()], process.readers) == (["new", "long", "hung", "removed"], 2)
    process.remove(book)
    assert (process.held(), process.readers) == ([held["removed"]], 1)


@pytest.mark.parametrize(
    ("isolates", "shards", "others", "company"),
    [
        (False, 1, 1, None),
        (True, 1, 0, Company(1, may_get_others=False)),
        (True, 1, 1, Company(2, may_get_others=True)),
        (True, 2, 0, Company(1, may_get_others=True)),
    ],
)
def test_a_shard_knows_what_a_process_has_whose_messages_may_end_it(
    shards: int, others: int, company: Company | None, *, isolates: bool
) -> None:
    rounds = replace(make_rounds(shards=shards), options=ReaderOptions(isolates=isolates))
    books = [rounds.book, *(LeaseBook(limit_s=LONG_S) for _ in range(others))]
    shard: Any = SimpleNamespace(number=0, take=lambda *_, company, **__: company)
    for book in books:
        PROCESS.add(book)
        book.add([make_held(), make_held(message=replace(MESSAGE, id="stale"), is_stale=True)])
    passed: Any = rounds.take(shard, 1)
    for book in books:
        PROCESS.remove(book)

    assert passed == company


def test_a_worker_has_a_name_that_no_other_has() -> None:
    assert len({worker_name("w") for _ in range(100)}) == 100
    assert worker_name("w").startswith("w-")
    assert not worker_name("").startswith("-")
