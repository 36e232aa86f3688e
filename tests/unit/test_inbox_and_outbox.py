"""The jobs of one worker: what waits for its slots, what has ended, and what wakes the thread that reads."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from penstock import Pipeline, Queue
from penstock.channels.queue.leases import LeaseState
from penstock.channels.queue.queue_messages import Message
from penstock.clients import Lease
from penstock.consuming.delivery import Counts
from penstock.consuming.queue.inbox import ThreadInbox
from penstock.consuming.queue.job_deliverer import RetryStates
from penstock.consuming.queue.job_notes import MAX_ATTEMPTS, MAX_NOTES, OWN_RETRY_S, JobCounts, JobNotes
from penstock.consuming.queue.outbox import Ended, Outbox, released
from penstock.consuming.queue.prefetch import Prefetch, find_working
from penstock.consuming.queue.worker_slots import HungSlots, Slot, TransactionSlot
from penstock.declaring.declarations import WorkerSpec
from penstock.errors import HandlerExited, HandlerHung, ServerReplaced, ServerUnavailable
from penstock.records import RecordId, Shard, ShardName

LONG_S = 1000.0
JOBS = ShardName("jobs", Shard(0))


def make_lease(id_: str = "1", *, since_s: float = 0.0, **fields: Any) -> Lease:
    """A lease that was read some seconds ago."""
    message = Message(0, id_, "t", "", fields.pop("attempts", 1), 0, 0, b"", "", **fields)
    now = monotonic()
    return Lease(cast("Any", None), cast("Any", None), LeaseState(message, "token", now, begun_at=now - since_s))


def make_ended(lease: Lease, **counts: Any) -> Ended:
    return Ended(lease, Counts(**counts), lease.held.settlement("done"))


def take_ended(outbox: Outbox, calls: int) -> list[Ended]:
    """The jobs that have ended in so many calls."""
    return [ended for _ in range(calls) for ended in outbox.ended.get() or ()]


def make_worker(**options: Any) -> WorkerSpec:
    jobs = Queue("jobs")
    pipeline = Pipeline([jobs])
    pipeline.worker(reads=jobs, name="receipts", **options)(lambda _session, _job: None)
    return cast("WorkerSpec", pipeline.get_consumer("receipts"))


class Host:
    """Slots whose jobs are begun by hand."""

    def __init__(self, outbox: Outbox, deliver: Callable[[Lease], Ended] = make_ended) -> None:
        self._outbox, self._deliver = outbox, deliver
        self.slots: list[Slot] = []
        self.inbox = ThreadInbox()

    def start(self) -> None:
        deliverer = cast("Any", self)
        self.slots.append(TransactionSlot(make_worker(), deliverer, self._outbox))

    def deliver_all(self, leases: Sequence[Lease]) -> Iterator[Sequence[Ended]]:
        for lease in leases:
            self.exiting = lease
            lease.begin()
            yield [self._deliver(lease)]

    def close(self, slots: int, wait_s: float) -> None:
        """Nothing runs."""


def test_a_job_waits_is_at_work_is_settled_and_is_gone() -> None:
    inbox, outbox, lease = ThreadInbox(), Outbox(), make_lease()
    states = [(outbox.expected, outbox.is_idle, outbox.is_settling)]
    inbox.put([lease])
    for step in (
        lambda: outbox.expect([lease]),
        inbox.take,
        lambda: outbox.put(make_ended(lease)),
        lambda: outbox.settled([make_ended(lease)]),
        outbox.collect,
    ):
        step()
        states.append((outbox.expected, outbox.is_idle, outbox.is_settling))

    idle, not_collected = (0, True, False), (0, False, False)
    assert states == [idle, (1, False, False), (1, False, False), (0, False, True), not_collected, idle]


def test_a_job_is_begun_once_and_ends_once() -> None:
    inbox, outbox, leases = ThreadInbox(), Outbox(), [make_lease(), make_lease("2"), make_lease("3")]
    outbox.expect(leases)
    inbox.put(leases)
    inbox.end(1)
    assert inbox.take() is leases[0]
    assert inbox.take_back() == leases[1:]
    assert (inbox.take(), inbox.take_back()) == (None, [])
    for lease in (leases[0], leases[0], leases[1], make_lease("4"), leases[2]):
        outbox.put(make_ended(lease))
    assert [ended.lease for ended in take_ended(outbox, len(leases))] == leases
    assert outbox.ended.empty()
    outbox.settled([make_ended(lease) for lease in leases[:2]])
    assert outbox.is_settling
    outbox.settled([make_ended(leases[2])])
    assert len(outbox.collect()) == 3
    assert outbox.is_idle


def test_a_job_beside_which_no_other_is_to_be_is_alone_until_it_has_ended() -> None:
    outbox, lease = Outbox(), make_lease(is_alone=True)
    outbox.expect([lease])
    assert outbox.is_alone
    outbox.put(make_ended(lease))
    assert not outbox.is_alone
    outbox.expect([make_lease("2")])
    assert not outbox.is_alone


def test_jobs_that_wait_too_long_for_a_slot_are_taken_back_and_those_at_work_are_not() -> None:
    inbox = ThreadInbox()
    running, old, new = make_lease("1", since_s=LONG_S), make_lease("2", since_s=LONG_S), make_lease("3")
    inbox.put([running, old, new])
    assert inbox.take() is running

    assert inbox.take_back(LONG_S / 2) == [old]
    assert inbox.take_back(LONG_S / 2) == []
    assert inbox.take() is new
    assert inbox.take_back() == []


def test_a_slot_has_its_job_until_it_has_ended_and_its_time_counts_from_when_it_began() -> None:
    outbox, lease, other, seen = Outbox(), make_lease(since_s=LONG_S), make_lease("2"), []

    def deliver(lease: Lease) -> Ended:
        seen.append([(each, each.held.begun_at > monotonic() - LONG_S / 2) for _, [each] in find_working(host.slots)])
        return make_ended(lease)

    host = Host(outbox, deliver)
    host.start()
    outbox.expect([lease, other])
    for each in (lease, other):
        host.slots[0].deliver([each])
    assert seen == [[(lease, True)], [(other, True)]]
    assert find_working(host.slots) == []
    assert outbox.is_settling


def test_a_handler_that_hangs_is_replaced_its_job_comes_back_and_what_it_returns_is_not_heard() -> None:
    outbox, leases, limit_s = Outbox(), [make_lease(str(number)) for number in (1, 2)], 300.0
    host = Host(outbox)
    hung = HungSlots(make_worker(limit=limit_s, concurrency=1), host, outbox)
    outbox.expect(leases)
    for lease in leases:
        host.start()
        host.slots[-1].leases = [lease]
        hung.replace()
        assert len(host.slots) == 1
        lease.held.begun_at -= limit_s + 1
        with capture_logs() as logs:
            if lease is leases[1]:
                with pytest.raises(HandlerHung, match="2 handlers have hung for longer than their limit"):
                    hung.replace()
            else:
                hung.replace()
        assert [(each["event"], each["record"]) for each in logs] == [("handler hangs", int(lease.message.id))]
        assert lease.is_stale
        assert len(host.slots) == 2
        late = host.slots.pop(0)
        assert late.is_abandoned
        late.deliver([lease])
        host.slots.clear()
    ends = take_ended(outbox, len(leases))
    assert [(ended.lease, ended.error, ended.comes_back) for ended in ends] == [
        (lease, "HandlerHung", True) for lease in leases
    ]
    assert outbox.ended.empty()


def test_a_worker_failure_returns_the_job_and_a_handler_exit_counts_as_an_attempt() -> None:
    failures: list[BaseException] = [ServerUnavailable("x"), HandlerExited("x"), HandlerExited("x"), KeyError("x")]
    outbox, leases = Outbox(), [make_lease(str(number)) for number in range(4)]

    def deliver(lease: Lease) -> Ended:
        raise failures[leases.index(lease)]

    host = Host(outbox, deliver)
    host.start()
    outbox.expect(leases)
    found = []
    for lease in leases:
        host.slots[0].is_cancelled = lease is leases[1]
        host.slots[0].deliver([lease])
        [ended] = take_ended(outbox, 1)
        found.append((ended.is_released, ended.error, outbox.take_unavailable(), outbox.error))
    assert found == [
        (True, "", failures[0], None),
        (True, "", None, None),
        (False, "HandlerExited", None, failures[2]),
        (True, "", None, failures[2]),
    ]


def test_prefetch_grows_with_short_jobs_and_stops_at_long_ones() -> None:
    outbox = Outbox()
    host = Host(outbox)
    prefetch = Prefetch(make_worker(concurrency=2), outbox)
    prefetch.slots = host.slots
    assert (prefetch.enough, prefetch.room(LONG_S), prefetch.room(1)) == (2, 2, 1)
    outbox.job_s = 0.01  # ten jobs are 50 ms for two slots
    assert (prefetch.enough, prefetch.room(LONG_S), prefetch.together_s()) == (7, 12, 0.0)
    leases = [make_lease(str(number)) for number in range(7)]
    outbox.expect(leases)
    assert prefetch.room(LONG_S) == 0
    assert prefetch.together_s() > 0.0
    for lease in leases[:2]:
        host.start()
        host.slots[-1].leases = [lease]
        lease.held.begun_at -= LONG_S
    assert (prefetch.enough, prefetch.together_s()) == (2, 0.0)
    leases[0].held.begin()
    assert prefetch.enough == 7


@pytest.mark.parametrize(
    ("concurrency", "together", "job_s", "ahead", "batch"),
    [
        (8, 20, 0.004, 200, 20),
        (8, 20, 0.02, 40, 5),  # 100 ms of each slot
        (8, 20, 0.2, 4, 1),
        (8, 20, 0.0, 300, 20),
        (1, 100, 0.0, 300, 100),
        (8, 1, 0.004, 100, 1),  # 50 ms of each slot
    ],
)
def test_enough_jobs_are_read_ahead_for_the_transactions_of_all_slots(
    concurrency: int, together: int, job_s: float, ahead: int, batch: int
) -> None:
    outbox = Outbox()
    prefetch = Prefetch(make_worker(concurrency=concurrency, together=together), outbox)
    assert prefetch.count_more(1000) == 0  # nobody knows yet that jobs are short
    outbox.job_s = job_s
    assert (prefetch.enough - concurrency, prefetch.count_more(ahead) + 1) == (ahead // 2, batch)
    assert prefetch.count_more(0) == 0
    assert prefetch.count_more(2 * concurrency - 1) == min(together, int(0.1 / max(job_s, 1e-5)) or 1, 2) - 1


def test_results_are_collected_once_and_counts_are_kept_if_they_cannot_be_written() -> None:
    outbox, counts, halted = Outbox(), JobCounts(make_worker()), make_lease("9")
    ends = [
        make_ended(make_lease(str(number)), **done)
        for number, done in enumerate(({"applied": 1}, {"cancelled": 1}, {"skipped": 1}, {"dead": 1}, {"retried": 1}))
    ]
    outbox.settled([*ends, Ended(halted, Counts(), None, halted="reason")])

    consumed = counts.count(outbox.collect())
    assert (consumed.applied, consumed.skipped, consumed.dead, consumed.cancelled, consumed.retried) == (1, 1, 1, 1, 1)
    assert consumed.halted == {JOBS: "reason"}
    assert counts.count(outbox.collect()).idle
    assert (counts.applied, counts.skipped) == ({JOBS: 2}, {JOBS: 1})
    answers = [False, True]

    class Transaction:
        def apply(self, shards: object, _: object) -> bool:
            assert shards == [JOBS]
            return answers.pop(0)

    counts.write(cast("Any", Transaction()), [JOBS])
    counts.count(ends[:1])
    assert (counts.applied, counts.skipped) == ({JOBS: 3}, {JOBS: 1})
    counts.write(cast("Any", Transaction()), [JOBS])
    assert not counts.applied
    assert not counts.skipped


@pytest.mark.parametrize(
    ("delay_s", "comes_back", "is_retrying"),
    [(LONG_S, True, True), (0.0, True, True), (-OWN_RETRY_S, True, False), (LONG_S, False, False)],
)
def test_a_job_that_failed_is_to_come_back_until_it_has_ended_anew_or_another_worker_has_it(
    delay_s: float, *, comes_back: bool, is_retrying: bool
) -> None:
    counts, lease = JobCounts(make_worker()), make_lease()
    settlement = lease.held.settlement("retry")
    ended = Ended(lease, Counts(), settlement, comes_back=comes_back)
    object.__setattr__(settlement, "delay_s", delay_s)
    counts.count([ended])

    assert counts.is_retrying() == is_retrying
    counts.count([released(make_lease())])
    assert not counts.is_retrying()


def end_and_settle(outbox: Outbox, lease: Lease) -> None:
    outbox.put(make_ended(lease))
    outbox.settled([make_ended(lease)])


WAKES: dict[str, Callable[[Outbox, Lease], object]] = {
    "a slot is free": lambda outbox, lease: outbox.put(make_ended(lease)),
    "all are settled": end_and_settle,
    "the worker has to end": lambda outbox, _: outbox.fail(ValueError()),
    "a server does not answer": lambda outbox, _: outbox.fail(ServerUnavailable("x")),
}


@pytest.mark.parametrize("name", WAKES)
def test_the_thread_that_reads_goes_on_as_soon_as_it_can(name: str) -> None:
    """It would otherwise wait for its whole time; whether it waits already is up to the machine, so it is tried again."""
    for _ in range(20):
        outbox, lease = Outbox(), make_lease()
        outbox.expect([lease])
        both = threading.Barrier(2)

        def wait(outbox: Outbox = outbox, both: threading.Barrier = both) -> None:
            both.wait()
            outbox.wait(LONG_S, below=0 if name == "all are settled" else 1)

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        both.wait()
        waiting.join(0.002)
        WAKES[name](outbox, lease)
        waiting.join(30)
        assert not waiting.is_alive()


def test_a_server_that_did_not_answer_is_said_once_and_the_first_error_ends_the_worker() -> None:
    outbox, error = Outbox(), ServerUnavailable("x")
    assert outbox.take_unavailable() is None
    outbox.fail(error)
    assert [outbox.take_unavailable(), outbox.take_unavailable()] == [error, None]
    assert outbox.error is None
    first = ServerReplaced("x")
    outbox.fail(first)
    outbox.fail(KeyError())
    assert outbox.error is first
    assert outbox.take_unavailable() is None


def test_the_mean_time_of_a_job_follows_the_newest_ones_and_counts_no_job_that_was_not_begun() -> None:
    outbox, lease = Outbox(), make_lease()
    outbox.expect([lease])
    outbox.put(released(lease))
    assert outbox.job_s is None
    outbox.expect([lease])
    outbox.put(make_ended(lease))
    assert outbox.job_s is not None
    assert 0.0 <= outbox.job_s < LONG_S
    outbox.job_s = LONG_S
    outbox.expect([lease])
    outbox.put(make_ended(lease))
    assert LONG_S * 0.8 < outbox.job_s < LONG_S * 0.95


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


def test_job_notes_keep_the_last_attempts_and_the_newest_progress() -> None:
    notes, writer = JobNotes("jobs"), Writer()
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
