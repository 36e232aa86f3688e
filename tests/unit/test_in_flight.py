"""The jobs of one worker: what its slots have, what has ended, and what wakes the thread that reads."""

import json
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any, cast

import pytest

from penstock.channels.queue.queue_messages import Message
from penstock.clients import Lease
from penstock.clients.queue.leases import Held
from penstock.consuming.delivery import Counts
from penstock.consuming.queue.in_flight import MAX_ATTEMPTS, MAX_NOTES, OWN_RETRY_S, InFlight, JobNotes
from penstock.consuming.queue.job_deliverer import Ended, RetryStates, released
from penstock.consuming.queue.worker_slots import WorkerSlot
from penstock.errors import ServerUnavailable
from penstock.records import DEFAULT_SCOPE, RecordId, Shard, ShardName

SLOT = WorkerSlot(cast("Any", None))
LONG_S = 1000.0
JOBS = ShardName("jobs", Shard(0))


def make_lease(id_: str = "1", *, since_s: float = 0.0, **fields: Any) -> Lease:
    """A lease that was read some seconds ago."""
    message = Message(0, id_, "t", "", fields.pop("attempts", 1), 0, 0, b"", "", **fields)
    now = monotonic()
    return Lease(cast("Any", None), cast("Any", None), Held(message, "token", now, begun_at=now - since_s))


def make_ended(lease: Lease, **counts: Any) -> Ended:
    return Ended(lease, Counts(**counts), lease.held.settlement("done"))


def test_a_job_waits_is_at_work_is_settled_and_is_gone() -> None:
    jobs, lease = InFlight("jobs"), make_lease()
    states = [(jobs.size, jobs.is_idle, jobs.is_settling)]
    for step in (
        lambda: jobs.take([lease]),
        lambda: jobs.begin(SLOT, lease),
        lambda: jobs.end(lease),
        lambda: jobs.settled([make_ended(lease)]),
    ):
        step()
        states.append((jobs.size, jobs.is_idle, jobs.is_settling))

    idle = (0, True, False)
    assert states == [idle, (1, False, False), (1, False, False), (0, False, True), idle]


def test_a_job_is_begun_once_and_ends_once() -> None:
    jobs, lease, other = InFlight("jobs"), make_lease(), make_lease("2")
    jobs.take([lease, other])
    assert [jobs.begin(SLOT, each) for each in (lease, lease)] == [True, False]
    assert jobs.running_ids() == ["1"]
    assert [jobs.end(each) for each in (lease, lease, other)] == [True, False, True]
    assert not jobs.begin(SLOT, other)
    assert not jobs.end(make_lease())
    jobs.settled([make_ended(lease)])
    assert jobs.is_settling
    jobs.settled([make_ended(other)])
    assert jobs.is_idle


def test_a_job_beside_which_no_other_is_to_be_is_alone_until_it_has_ended() -> None:
    jobs, lease = InFlight("jobs"), make_lease(is_alone=True)
    jobs.take([lease])
    assert jobs.is_alone
    jobs.end(lease)
    assert not jobs.is_alone
    jobs.take([make_lease("2")])
    assert not jobs.is_alone


def test_jobs_that_wait_too_long_for_a_slot_are_taken_back_and_those_at_work_are_not() -> None:
    jobs = InFlight("jobs")
    old, running, new = make_lease("1", since_s=LONG_S), make_lease("2", since_s=LONG_S), make_lease("3")
    jobs.take([old, running, new])
    jobs.begin(SLOT, running)

    assert jobs.take_back(LONG_S / 2) == [old]
    assert jobs.take_back(LONG_S / 2) == []
    assert (jobs.size, jobs.begin(SLOT, old), jobs.end(old)) == (2, False, False)
    assert [each.lease for each in jobs.overdue(-1.0)] == [running]
    assert jobs.overdue(LONG_S) == []
    assert jobs.begun_s() < LONG_S / 2  # since its slot has begun
    assert jobs.stop() == [new]
    assert jobs.is_stopping
    for lease in (running, new):
        jobs.end(lease)
    assert jobs.is_settling
    jobs.settled([released(old), *(make_ended(lease) for lease in (running, new))])
    assert (jobs.is_idle, jobs.begun_s()) == (True, 0.0)


def test_results_are_collected_once_and_counts_are_given_back_if_they_cannot_be_written() -> None:
    jobs, halted = InFlight("jobs"), make_lease("9")
    ends = [
        make_ended(make_lease(str(number)), **counts)
        for number, counts in enumerate(({"applied": 1}, {"cancelled": 1}, {"skipped": 1}, {"dead": 1}, {"retried": 1}))
    ]
    jobs.settled([*ends, Ended(halted, Counts(), None, halted="reason")])

    consumed = jobs.collect()
    assert (consumed.applied, consumed.skipped, consumed.dead, consumed.cancelled, consumed.retried) == (1, 1, 1, 1, 1)
    assert consumed.halted == {JOBS: "reason"}
    assert jobs.collect().idle
    counts = jobs.uncounted()
    assert counts == {(JOBS, "applied"): 2, (JOBS, "skipped"): 1}
    assert not jobs.uncounted()
    jobs.settled(ends[:1])
    jobs.count_again(counts)
    assert jobs.uncounted() == {(JOBS, "applied"): 3, (JOBS, "skipped"): 1}


@pytest.mark.parametrize(
    ("delay_s", "comes_back", "is_retrying"),
    [(LONG_S, True, True), (0.0, True, True), (-OWN_RETRY_S, True, False), (LONG_S, False, False)],
)
def test_a_job_that_failed_is_to_come_back_until_it_is_read_or_another_worker_has_it(
    delay_s: float,
    comes_back: bool,  # noqa: FBT001
    is_retrying: bool,  # noqa: FBT001
) -> None:
    jobs, lease = InFlight("jobs"), make_lease()
    settlement = lease.held.settlement("retry")
    ended = Ended(lease, Counts(), settlement, comes_back=comes_back)
    object.__setattr__(settlement, "delay_s", delay_s)
    jobs.settled([ended])

    assert jobs.is_retrying() == is_retrying
    jobs.take([make_lease()])
    assert not jobs.is_retrying()


WAKES: dict[str, Callable[[InFlight, Lease], object]] = {
    "a slot is free": lambda jobs, lease: jobs.end(lease),
    "all are settled": lambda jobs, lease: jobs.end(lease) and jobs.settled([make_ended(lease)]),  # type: ignore[func-returns-value]
    "the worker has to end": lambda jobs, _: jobs.fail(ValueError()),
}


@pytest.mark.parametrize("name", WAKES)
def test_the_thread_that_reads_goes_on_as_soon_as_it_can(name: str) -> None:
    """It would otherwise wait for its whole time; whether it waits already is up to the machine, so it is tried again."""
    for _ in range(20):
        jobs, lease = InFlight("jobs"), make_lease()
        jobs.take([lease])
        jobs.begin(SLOT, lease)
        both = threading.Barrier(2)

        def wait(jobs: InFlight = jobs, both: threading.Barrier = both) -> None:
            both.wait()
            jobs.wait(LONG_S, below=0 if name == "all are settled" else 1)

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        both.wait()
        waiting.join(0.002)
        WAKES[name](jobs, lease)
        waiting.join(30)
        assert not waiting.is_alive()


def test_a_server_that_did_not_answer_is_said_once_and_the_first_error_ends_the_worker() -> None:
    jobs, error = InFlight("jobs"), ServerUnavailable("x")
    assert jobs.take_unavailable() is None
    jobs.note_unavailable(error)
    assert [jobs.take_unavailable(), jobs.take_unavailable()] == [error, None]
    first = ValueError()
    jobs.fail(first)
    jobs.fail(KeyError())
    assert jobs.error is first


def test_the_mean_time_of_a_job_follows_the_newest_ones_and_counts_no_job_that_was_not_begun() -> None:
    jobs, lease = InFlight("jobs"), make_lease()
    jobs.take([lease])
    jobs.end(lease)
    assert jobs.job_s is None
    jobs.take([lease])
    jobs.begin(SLOT, lease)
    jobs.end(lease)
    assert jobs.job_s is not None
    assert 0.0 <= jobs.job_s < LONG_S
    jobs.job_s = LONG_S
    jobs.take([lease])
    jobs.begin(SLOT, lease)
    jobs.end(lease)
    assert LONG_S * 0.8 < jobs.job_s < LONG_S * 0.95


class Writer:
    """A transaction that keeps what is written, if it is to."""

    def __init__(self) -> None:
        self.written: list[dict[str, Any]] = []

    def apply(self, _: object, plan: Callable[..., Any]) -> bool:
        class Executor:
            @staticmethod
            def execute(_: object, values: dict[str, str]) -> None:
                self.written.append(values)

        plan(Executor, {})
        return True


def test_notes_of_a_job_are_its_last_attempts_and_its_newest_progress_and_no_more_than_may_wait() -> None:
    notes, writer = JobNotes("jobs", DEFAULT_SCOPE), Writer()
    for attempt in range(1, MAX_ATTEMPTS + 3):
        lease = make_lease("7", attempts=attempt)
        notes.note_attempt(Ended(lease, Counts(retried=1), None, error=f"E{attempt}"))
    notes.note_attempt(make_ended(make_lease("8"), applied=1))  # at once: nothing to say
    notes.note_attempt(make_ended(make_lease("9", attempts=2), applied=1))
    notes.note_attempt(make_ended(make_lease("10", attempts=2), snoozed=1))
    notes.note_progress(RecordId(7), 0.1, "early")
    notes.note_progress(RecordId(7), 0.7, "late")
    for record in range(1000, 1000 + MAX_NOTES):
        notes.note_progress(RecordId(record), 0.5, "")
    notes.note_progress(RecordId(7), 0.9, "latest")
    notes.write(cast("Any", writer))
    notes.write(cast("Any", writer))

    [values] = writer.written
    written = {note["record_id"]: note for note in json.loads(values["notes"])}
    assert len(written) == MAX_NOTES
    assert not {8, 10, 999 + MAX_NOTES} & written.keys()
    assert [each["error"] for each in written[7]["attempts"]] == [f"E{n}" for n in range(3, MAX_ATTEMPTS + 3)]
    assert (written[7]["progress"], written[7]["note"]) == (0.9, "latest")
    assert [(each["attempt"], each["error"]) for each in written[9]["attempts"]] == [(2, None)]
    assert written[1000]["attempts"] == []


def test_what_a_server_was_to_blame_for_is_remembered_until_the_job_comes_again() -> None:
    states = RetryStates("receipts")
    lease = make_lease(attempts=3)
    state = states.take(lease)
    assert (state.failures, state.items) == (2, 1)
    states.remember(lease, state)
    again = states.take(make_lease(attempts=5))

    assert again.failures == 4  # the queue counts them
