"""Dead letters are retried once, in order, or dropped."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from fixtures.constants import SetConstants
from fixtures.flow import OpenWorker, running
from penstock import Cancel, DeadLetter, Log, Pipeline, Snooze
from penstock.consuming import letter_retry
from penstock.consuming.letter_retry import DeadLetterRow, Retried
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import Connection, connect_postgres
from penstock.database.store import Store
from penstock.declaring.outcomes import HandlerOutcome
from penstock.errors import BrokenTransaction, DeclarationError, ServerUnavailable, Unknown
from penstock.operating.channels import reshard
from penstock.operating.letters import LetterFilter, at, drop, newest, of_consumer, read_record, request_retries, retry
from penstock.operating.pausing import pause, resume
from penstock.records import Record, parse_place
from penstock.streaming import Streamer
from penstock.testing import eventually


class Desk:
    """A consumer with dead letters, whose handler refuses the words of a set."""

    worker: LogWorker

    def __init__(self, flow: Pipeline, connection: Connection, streamer: Streamer, url: str) -> None:
        self.flow, self.connection, self.streamer, self.url = flow, connection, streamer, url
        self.refused = {"a1"}
        self.outcome: HandlerOutcome | None = None  # what the handler says of a1
        self.ends_transaction = False
        self.returned: Any = None
        self.meanwhile: Callable[[], object] = lambda: None

    def letters(self) -> list[DeadLetterRow]:
        return of_consumer(Store(self.connection), "reader")

    def retry(self, letters: list[DeadLetterRow] | None = None, **options: Any) -> list[Retried]:
        return retry(self.flow, self.letters() if letters is None else letters, self.url, **options)

    def effects(self) -> list[str]:
        rows = self.connection.execute("SELECT word FROM public.effects ORDER BY number").fetchall()
        return [word for (word,) in rows]


@pytest.fixture
def desk(
    flow: Pipeline, things: Log, connection: Connection, streamer: Streamer, database_url: str, open_worker: OpenWorker
) -> Iterator[Desk]:
    """Words a1 to a3 of key a and b1 of key b; a1 is refused, so a2 and a3 are parked behind it."""
    connection.execute("CREATE TABLE public.effects (number int GENERATED ALWAYS AS IDENTITY, word text UNIQUE)")
    desk = Desk(flow, connection, streamer, database_url)

    @flow.consumer(reads=things, name="reader", park_key=True, attempts=1)
    def apply(session: Session, records: Sequence[Record]) -> Any:
        for record in records:
            word = record.data["word"]
            session.execute(text("INSERT INTO public.effects (word) VALUES (:word)"), {"word": word})
            if word == "a1" and desk.outcome is not None:
                raise desk.outcome
            if word in desk.refused:
                raise ValueError(f"no {record.key}")
            desk.meanwhile()
            if desk.ends_transaction:
                session.connection().connection.driver_connection.commit()  # type: ignore[union-attr]  # psycopg's
        return desk.returned

    worker = desk.worker = open_worker()
    for word in ("a1", "b1", "a2", "a3"):
        connection.execute(
            "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, headers) "
            "VALUES ('things', 0, left(%s, 1), 'said', 'word', jsonb_build_object('word', %s::text), '{\"v\": 1}')",
            (word, word),
        )
    streamer.drain()
    worker.drain()
    yield desk
    worker.close()


def test_dead_letters_are_listed_without_payloads(desk: Desk) -> None:
    found = newest(Store(desk.connection))

    assert {(str(letter.place), letter.parked) for letter in found} == {
        ("things/0 offset 1", False),
        ("things/0 offset 3", True),
        ("things/0 offset 4", True),
    }
    assert not hasattr(found[0], "data")
    assert newest(Store(desk.connection), LetterFilter("nobody")) == []
    assert len(newest(Store(desk.connection), limit=1)) == 1


def test_a_dead_letter_is_shown_with_its_payload_and_any_other_offset_is_refused(desk: Desk) -> None:
    record = read_record(Store(desk.connection), at(desk.letters(), parse_place("things/0 offset 1")))

    assert record is not None
    assert (record.data, record.headers, record.key) == ({"word": "a1"}, {"v": 1}, "a")
    with pytest.raises(Unknown, match="list shows"):
        at(desk.letters(), parse_place("things/0 offset 2"))


def test_a_fixed_handler_applies_them_in_order_and_removes_them(desk: Desk) -> None:
    desk.refused = set()

    done = desk.retry(desk.letters()[::-1])

    assert [(each.letter.offset, each.outcome) for each in done] == [(1, "applied"), (3, "applied"), (4, "applied")]
    assert desk.effects() == ["b1", "a1", "a2", "a3"]
    assert desk.letters() == []
    assert counts(desk) == (4, 0)


def test_a_retry_passes_a_cancelled_record_and_continues_with_the_next(desk: Desk) -> None:
    desk.outcome = Cancel("not needed")

    assert [each.outcome for each in desk.retry()] == ["cancelled", "applied", "applied"]
    assert desk.effects() == ["b1", "a2", "a3"]
    assert desk.letters() == []
    assert counts(desk) == (3, 0)


@pytest.mark.parametrize("outcome", [DeadLetter("never"), Snooze(1)], ids=lambda outcome: type(outcome).__name__)
def test_any_other_outcome_of_a_handler_keeps_the_record_and_says_why(desk: Desk, outcome: HandlerOutcome) -> None:
    """A retry waits for nothing: it may be retried again."""
    desk.outcome = outcome

    failed, *others = desk.retry()
    assert [failed.outcome, *(each.outcome for each in others)] == ["failed", "kept", "kept"]
    assert next((letter.attempts, letter.reason) for letter in desk.letters()) == (2, failed.reason)
    assert failed.reason
    assert desk.effects() == ["b1"]


def test_a_record_that_fails_again_stays_with_the_others_of_its_key(desk: Desk) -> None:
    done = desk.retry()

    assert [each.outcome for each in done] == ["failed", "kept", "kept"]
    assert {each.reason for each in done[1:]} == {"an earlier record of its key has failed"}
    assert next((letter.attempts, letter.reason) for letter in desk.letters()) == (2, "ValueError: no a")
    assert desk.effects() == ["b1"]


def test_a_worker_retries_what_it_was_asked_to_and_nothing_while_paused(
    desk: Desk, set_constants: SetConstants, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its own process; a request ends when it is taken, so that what fails again is not tried for ever."""
    assert request_retries(Store(desk.connection), desk.letters()) == 3
    pause(Store(desk.connection), "consumer", "reader", reason="not yet", by="ann")

    def reasons() -> dict[int, tuple[int, bool]]:
        return {each.offset: (each.attempts, each.retry_requested_at is not None) for each in desk.letters()}

    set_constants("consuming.letter_retry", ASK_EVERY_S=0.01)
    asked = count()
    real = letter_retry.RequestedRetries.retry
    monkeypatch.setattr(letter_retry.RequestedRetries, "retry", lambda *args: (next(asked), real(*args)))
    with running(desk.worker.run):
        eventually(lambda: next(asked) > 5, "the worker has asked several times")
        assert [wanted for _, wanted in reasons().values()] == [True] * 3
        resume(Store(desk.connection), "consumer", "reader")
        eventually(lambda: reasons() == {1: (2, False), 3: (0, False), 4: (0, False)}, "it has failed again, once")
        desk.refused = set()
        request_retries(Store(desk.connection), desk.letters())
        eventually(lambda: not desk.letters(), "all are applied")

    assert desk.effects() == ["b1", "a1", "a2", "a3"]
    assert counts(desk) == (4, 0)


@pytest.mark.parametrize("by", ["another process", "a pause"])
def test_a_request_that_is_held_up_is_kept(desk: Desk, set_constants: SetConstants, by: str) -> None:
    """When a worker has taken it already.  An operator who waits sees why."""
    set_constants("consuming.letter_retry", PATIENCE_S=0.0, ASK_EVERY_S=0.0)
    set_constants("operating.letters", LOCK_TIMEOUT_S=0.0)
    desk.refused = set()
    request_retries(Store(desk.connection), desk.letters())
    with connect_postgres(desk.url, application="busy") as busy, busy.transaction():
        if by == "a pause":
            desk.meanwhile = lambda: pause(Store(desk.connection), "consumer", "reader", reason="not yet", by="ann")
        else:
            busy.execute("SELECT FROM penstock.checkpoints WHERE shard = 0 FOR UPDATE")
            with pytest.raises(ServerUnavailable, match=r"retrying things/0 offset 1: .* Try again, or stop it"):
                desk.retry()
        desk.worker.slice(1, lambda: False)

    held = {letter.offset: letter.retry_requested_at is not None for letter in desk.letters()}
    assert held == dict.fromkeys((3, 4) if by == "a pause" else (1, 3, 4), True)
    desk.meanwhile = lambda: None
    resume(Store(desk.connection), "consumer", "reader")
    desk.worker.slice(10, lambda: False)
    assert desk.effects() == ["b1", "a1", "a2", "a3"]


def test_a_worker_that_works_in_slices_takes_requests_as_well(desk: Desk, set_constants: SetConstants) -> None:
    """As recruits do: there is no loop that a request could wait for.  More than it takes at once, it takes at once again."""
    set_constants("consuming.letter_retry", ASK_EVERY_S=1e6)
    desk.refused = set()
    more = (
        'INSERT INTO penstock.dead_letters (consumer, channel, shard, "offset", record_id, key, action, object, data, '
        "staged_at, reason, attempts) SELECT 'reader', 'things', 0, n, n, 'c' || n, 'said', 'word', "
        "jsonb_build_object('word', 'c' || n), now(), 'r', 1 FROM generate_series(101, 120) n"
    )
    desk.connection.execute(more)
    request_retries(Store(desk.connection), desk.letters())

    for _ in range(4):  # the last one finds no request, and asks no more for a while
        desk.worker.slice(10, lambda: False)

    assert desk.letters() == []
    desk.connection.execute(more.replace("101, 120", "121, 121"))
    assert request_retries(Store(desk.connection), desk.letters()) == 1
    desk.worker.slice(10, lambda: False)
    assert [letter.retry_requested_at is not None for letter in desk.letters()] == [True]


def test_dead_letters_of_a_set_based_consumer_are_retried_on_spark(desk: Desk, things: Log) -> None:
    desk.flow.consumer(reads=things, name="frames", dataframe=True)(lambda _session, _frame: None)
    letters = [replace(letter, consumer="frames") for letter in desk.letters()]
    with pytest.raises(DeclarationError, match="retried on Spark: penstock dead-letters retry frames"):
        desk.retry(letters)


def test_a_parked_record_waits_for_the_earlier_one(desk: Desk) -> None:
    desk.refused = set()

    # Frames are for set-based consumers alone.
    done = desk.retry([at(desk.letters(), parse_place("things/0 offset 3"))], make_frame=pytest.fail)

    assert [each.outcome for each in done] == ["kept"]
    assert desk.effects() == ["b1"]
    assert {each.outcome for each in desk.retry(make_frame=pytest.fail)} == {"applied"}


def test_a_letter_that_another_process_has_retried_is_not_applied_twice(desk: Desk) -> None:
    desk.refused = set()
    letters = desk.letters()
    desk.retry(letters)

    again = desk.retry(letters)

    assert {each.outcome for each in again} == {"gone"}
    assert desk.effects() == ["b1", "a1", "a2", "a3"]


def meets_a_lock() -> None:
    raise psycopg.errors.LockNotAvailable


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        ({"ends_transaction": True}, BrokenTransaction, "would be doubled by another retry"),
        ({"returned": map(str, ())}, BrokenTransaction, "the handler returned a map"),
        ({"meanwhile": meets_a_lock}, ServerUnavailable, "retrying things/0 offset 1"),
    ],
    ids=["commit", "map", "lock"],
)
def test_what_is_not_the_records_fault_ends_the_retry(
    desk: Desk, fault: dict[str, Any], error: type[Exception], says: str
) -> None:
    desk.refused, letters = set(), desk.letters()
    vars(desk).update(fault)

    with pytest.raises(error, match=says):
        desk.retry([at(letters, parse_place("things/0 offset 1"))])

    assert desk.letters() == letters


def test_a_record_of_the_key_is_not_parked_while_the_key_is_being_freed(desk: Desk, streamer: Streamer) -> None:
    """Both lock the checkpoint's row: the worker skips the shard until the key is free."""
    desk.refused = set()
    with connect_postgres(desk.url, application="retry") as busy, busy.transaction():
        busy.execute("SELECT FROM penstock.checkpoints WHERE shard = 0 FOR UPDATE")
        desk.connection.execute(
            "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
            "VALUES ('things', 0, 'a', 'said', 'word', '{\"word\": \"a4\"}')"
        )
        streamer.drain()
        assert desk.worker.round(0).dead == 0
        busy.execute("DELETE FROM penstock.dead_letters")

    eventually(lambda: desk.worker.round(50).applied, "the worker applies it")
    assert desk.effects() == ["b1", "a4"]


def test_a_dropped_dead_letter_is_removed_without_an_effect(desk: Desk) -> None:
    dropped = drop(Store(desk.connection), [at(desk.letters(), parse_place("things/0 offset 1"))])

    assert dropped == 1
    assert [letter.offset for letter in desk.letters()] == [3, 4]
    assert desk.effects() == ["b1"]
    assert drop(Store(desk.connection), []) == 0


def counts(desk: Desk) -> Any:
    return desk.connection.execute("SELECT applied, dead FROM penstock.checkpoints WHERE shard = 0").fetchone()


def test_the_order_of_a_key_holds_after_a_change_of_the_shards(desk: Desk) -> None:
    """Guarantee 6: its later records are in another shard."""
    reshard(Store(desk.connection), "things", 3, apply=True)
    desk.connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "VALUES ('things', 0, 'a', 'said', 'word', '{\"word\": \"a4\"}')"
    )
    desk.streamer.drain()
    desk.worker.drain()
    letters = desk.letters()
    assert [(letter.shard > 1, letter.key) for letter in letters] == [(False, "a")] * 3 + [(True, "a")]

    [alone] = desk.retry(letters[3:])
    assert (alone.outcome, alone.reason[:18]) == ("kept", "things/0 offset 1 ")
    assert [each.outcome for each in desk.retry()] == ["failed", "kept", "kept", "kept"]
    desk.refused = set()
    assert {each.outcome for each in desk.retry()} == {"applied"}
    assert desk.effects() == ["b1", "a1", "a2", "a3", "a4"]
