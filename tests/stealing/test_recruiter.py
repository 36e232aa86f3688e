"""The recruiter draws at most one job a call, as often as its rate says, and counts all of them."""

import gc
import queue
import threading
import weakref
from math import inf
from typing import Any

import pytest

from fixtures.recruiting import MakeRecruiter, RunProgram
from penstock import Log, Pipeline
from penstock.engines.stealing import Chores, JobCounters, Outcome, Recruiter, time_left_s, when_idle
from penstock.errors import DeclarationError, InvalidChore, Unknown
from penstock.testing import eventually

CHI_SQUARE_ONE_IN_A_MILLION = 33.38
"""With 4 degrees of freedom, chance alone exceeds this once in a million runs."""


def ended(counters: JobCounters) -> int:
    return counters.dismissed + counters.finished + counters.aborted + counters.failed


def test_a_drawn_job_runs_in_another_thread(recruiter: Recruiter) -> None:
    where: list[threading.Thread] = []
    recruiter.install(lambda: where.append(threading.current_thread()), "job", 1.0)

    assert recruiter.enlist()

    eventually(lambda: recruiter.counters()["job"].finished == 1, "the run is counted")
    assert where[0] is not threading.current_thread()
    assert where[0].daemon


def test_jobs_are_drawn_as_often_as_their_rates_say(recruiter: Recruiter) -> None:
    rates = {"rare": 0.002, "stream": 0.02, "never": 0.0, "consume": 0.1, "often": 0.3}
    for name, rate in rates.items():
        recruiter.install(lambda: None, name, rate)
    calls = 200_000

    for _ in range(calls):
        recruiter.enlist()

    drawn = {name: counters.recruited for name, counters in recruiter.counters().items()}
    assert drawn.pop("never") == 0
    expected = {name: rates[name] * calls for name in drawn}
    drawn["none"], expected["none"] = (calls - sum(drawn.values()), calls - sum(expected.values()))
    distance = sum((drawn[n] - expected[n]) ** 2 / expected[n] for n in drawn)
    assert distance < CHI_SQUARE_ONE_IN_A_MILLION, drawn
    assert {c.enlisted for c in recruiter.counters().values()} == {calls}


def test_a_call_draws_at_most_one_job(recruiter: Recruiter) -> None:
    for number in range(10):
        recruiter.install(lambda: None, f"job {number}", 0.1)

    for _ in range(1000):
        recruiter.enlist()

    assert sum(c.recruited for c in recruiter.counters().values()) == 1000


def test_many_threads_enlist_and_one_job_runs_at_a_time(recruiter: Recruiter) -> None:
    at_work, seen = threading.Lock(), []

    def job() -> None:
        seen.append(at_work.acquire(blocking=False))
        at_work.release()

    for name in ("a", "b"):
        recruiter.install(job, name, 0.5)
    accepted = [0] * 8

    def enlist(thread: int) -> None:
        accepted[thread] = sum(recruiter.enlist() for _ in range(5000))

    threads = [threading.Thread(target=enlist, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    def counted() -> list[JobCounters]:
        return list(recruiter.counters().values())

    eventually(lambda: sum(map(ended, counted())) == 40_000, "every draw is counted once")
    assert all(seen)
    assert [c.enlisted for c in counted()] == [40_000, 40_000]
    assert sum(c.recruited for c in counted()) == 40_000
    assert sum(c.finished for c in counted()) == sum(accepted) == len(seen) > 0


def test_a_draw_while_the_thread_is_busy_is_dismissed(recruiter: Recruiter) -> None:
    release, runs = threading.Event(), threading.Event()

    def job() -> None:
        runs.set()
        release.wait(60)

    recruiter.install(job, "job", 1.0)
    assert recruiter.enlist()
    assert runs.wait(60)

    assert [recruiter.enlist() for _ in range(3)] == [False] * 3

    assert recruiter.counters()["job"].dismissed == 3
    release.set()
    eventually(lambda: recruiter.counters()["job"].finished == 1, "the first run ends")
    assert recruiter.counters()["job"].recruited == 4


def test_a_draw_before_the_thread_begins_the_job_that_it_has_taken_is_dismissed(
    recruiter: Recruiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, begins = threading.Event(), threading.Event()

    class Inbox(queue.SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:  # noqa: FBT001, FBT002  as the queue's
            job = super().get(block, timeout)
            taken.set()
            begins.wait(60)
            return job

    monkeypatch.setattr(queue, "SimpleQueue", Inbox)
    recruiter.install(lambda: None, "job", 1.0)
    assert recruiter.enlist()
    assert taken.wait(60)

    assert [recruiter.enlist() for _ in range(3)] == [False] * 3
    begins.set()
    eventually(lambda: recruiter.counters()["job"].finished == 1, "the first run ends")


@pytest.mark.slow
def test_enlisting_in_a_signal_handler_waits_for_nothing(run_program: RunProgram) -> None:
    """A lock that enlist held when the signal came would never be released."""
    lines = run_program(
        """
        import signal
        from penstock.engines.stealing import Recruiter

        recruiter = Recruiter()
        recruiter.install(lambda: None, "job", 0.5)
        handled = calls = armed = 0

        def handle(*_):
            global handled
            handled += 1
            recruiter.enlist()

        signal.signal(signal.SIGALRM, handle)
        while handled < 500:
            if armed == handled:
                armed += 1
                signal.setitimer(signal.ITIMER_REAL, 0.0002)
            recruiter.enlist()
            calls += 1
        print(recruiter.counters()["job"].enlisted - calls - handled)
        """
    )

    assert lines == ["0"]


@pytest.mark.parametrize(
    ("returned", "field"),
    [
        (None, "finished"),
        (0, "finished"),
        (Outcome.FINISHED, "finished"),
        (Outcome.NOTHING_TO_DO, "dismissed"),
        (Outcome.GAVE_UP, "aborted"),
        (Outcome.FAILED, "failed"),
    ],
)
def test_what_a_job_returns_is_counted(recruiter: Recruiter, returned: object, field: str) -> None:
    recruiter.install(lambda: returned, "job", 1.0)

    assert recruiter.enlist()

    eventually(lambda: ended(recruiter.counters()["job"]) == 1, "the run is counted")
    counters = recruiter.counters()["job"]
    assert getattr(counters, field) == 1
    assert counters.seconds > 0


def test_a_job_sees_how_much_of_its_budget_is_left(make_recruiter: MakeRecruiter) -> None:
    recruiter = make_recruiter(budget_s=5.0)
    left: list[float] = []
    recruiter.install(lambda: left.append(time_left_s()), "job", 1.0)

    recruiter.enlist()

    eventually(lambda: left, "the job ran")
    assert 0 < left[0] <= 5.0
    assert time_left_s() == inf


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan"), float("inf"), "1", None, True])
def test_a_rate_that_is_no_share_is_refused(recruiter: Recruiter, rate: float) -> None:
    with pytest.raises(InvalidChore, match="take a number from 0 to 1") as refused:
        recruiter.install(lambda: None, "job", rate)

    assert refused.value.field == "rate"
    assert recruiter.counters() == {}


@pytest.mark.parametrize("name", ["", None, 7])
def test_a_job_needs_a_name(recruiter: Recruiter, name: str) -> None:
    with pytest.raises(InvalidChore, match="empty or no text"):
        recruiter.install(lambda: None, name, 0.1)


def test_a_name_is_taken_once(recruiter: Recruiter) -> None:
    recruiter.install(lambda: None, "job", 0.1)

    with pytest.raises(InvalidChore, match="already installed") as refused:
        recruiter.install(lambda: None, "job", 0.1)

    assert refused.value.field == "name"
    assert recruiter.rates() == {"job": 0.1}


@pytest.mark.parametrize("job", [None, "stream"])
def test_a_job_that_cannot_be_called_is_refused(recruiter: Recruiter, job: object) -> None:
    with pytest.raises(InvalidChore, match="cannot be called"):
        recruiter.install(job, "job", 0.1)  # type: ignore[arg-type]  # the test's point


def test_rates_above_one_together_are_refused(recruiter: Recruiter) -> None:
    for number in range(10):
        recruiter.install(lambda: None, f"job {number}", 0.1)

    with pytest.raises(InvalidChore, match=r"is 1.01, above 1 \(job 0 0.1"):
        recruiter.install(lambda: None, "one more", 0.01)
    with pytest.raises(InvalidChore, match="above 1"):
        recruiter.set_rate("job 0", 0.2)
    assert set(recruiter.rates().values()) == {0.1}


def test_a_rate_can_be_changed_and_the_counters_stay(recruiter: Recruiter) -> None:
    recruiter.install(lambda: None, "job", 1.0)
    recruiter.install(lambda: None, "other", 0.0)
    recruiter.enlist()

    recruiter.set_rate("job", 0.0)
    recruiter.set_rate("other", 1.0)
    recruiter.enlist()

    assert recruiter.rates() == {"job": 0.0, "other": 1.0}
    assert [c.recruited for c in recruiter.counters().values()] == [1, 1]
    assert [c.enlisted for c in recruiter.counters().values()] == [2, 2]


def test_an_uninstalled_job_is_not_drawn(recruiter: Recruiter) -> None:
    recruiter.install(lambda: None, "job", 1.0)
    recruiter.install(lambda: None, "other", 0.0)

    recruiter.uninstall("job")

    assert not recruiter.enlist()
    assert list(recruiter.counters()) == ["other"]
    with pytest.raises(Unknown, match="no job 'job' is installed; installed: other"):
        recruiter.uninstall("job")


def test_a_job_installed_again_counts_from_zero(recruiter: Recruiter) -> None:
    recruiter.install(lambda: None, "job", 1.0)
    recruiter.enlist()
    recruiter.uninstall("job")
    recruiter.install(lambda: None, "job", 0.0)

    assert recruiter.counters()["job"] == JobCounters(0, 0, 0, 0, 0, 0, 0.0)


@pytest.mark.parametrize("option", ["budget_s", "hangs_s", "idle_s"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "1", None])
def test_a_time_that_is_none_is_refused(option: str, value: float) -> None:
    options: dict[str, Any] = {option: value}

    with pytest.raises(DeclarationError, match=option):
        Recruiter(**options)


def test_a_job_may_not_hang_within_its_budget() -> None:
    with pytest.raises(DeclarationError, match="within budget_s"):
        Recruiter(budget_s=5.0, hangs_s=5.0)


def test_an_application_is_given_the_counters_after_each_job(make_recruiter: MakeRecruiter) -> None:
    reported: list[tuple[str, JobCounters]] = []
    recruiter = make_recruiter(report=lambda name, counters: reported.append((name, counters)))
    recruiter.install(lambda: Outcome.GAVE_UP, "job", 1.0)

    recruiter.enlist()

    eventually(lambda: reported, "the job is reported")
    [(name, counters)] = reported
    assert (name, counters.recruited, counters.aborted) == ("job", 1, 1)


def test_a_report_that_fails_costs_no_job(make_recruiter: MakeRecruiter, caplog: pytest.LogCaptureFixture) -> None:
    def report(*_: object) -> None:
        raise SystemExit("secret")

    recruiter = make_recruiter(report=report)
    recruiter.install(lambda: None, "job", 1.0)

    def finished() -> bool:
        recruiter.enlist()
        return recruiter.counters()["job"].finished > 1

    eventually(finished, "the thread goes on")
    assert "report failed: SystemExit" in caplog.text
    assert "secret" not in caplog.text


def test_what_is_patched_after_the_import_is_used(
    make_recruiter: MakeRecruiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gevent does so in each process of a server that has loaded the application before: a C queue stops all greenlets."""
    made: list[str] = []

    class Local(threading.local):
        pass

    class Queue:
        def __init__(self) -> None:
            made.append("a queue")
            self._inner: Any = original()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    original = queue.SimpleQueue

    recruiter = make_recruiter()
    chores = Chores(Pipeline([Log("things")]), "postgresql://127.0.0.1:1/none", "redis://127.0.0.1:1")
    recruiter.install(chores.stream(), "job", 1.0)
    monkeypatch.setattr(queue, "SimpleQueue", Queue)
    monkeypatch.setattr(threading, "local", Local)

    assert recruiter.enlist()

    eventually(lambda: ended(recruiter.counters()["job"]), "the job has ended")
    assert made == ["a queue"]
    assert any(isinstance(value, Local) for value in vars(chores).values())


def test_a_recruiter_that_nobody_holds_ends_its_thread_and_closes_what_its_jobs_kept_open() -> None:
    closed, where = threading.Event(), list[threading.Thread]()

    def use_and_drop() -> weakref.ref[Recruiter]:
        recruiter = Recruiter()

        def job() -> None:
            where.append(threading.current_thread())
            when_idle(closed.set)
            recruiter.rates()  # it may refer to its recruiter

        recruiter.install(job, "job", 1.0)
        assert recruiter.enlist()
        eventually(lambda: recruiter.counters()["job"].finished, "the job has ended")
        return weakref.ref(recruiter)

    dropped = use_and_drop()

    def is_gone() -> bool:
        gc.collect()  # the thread lets go of the job a moment after it has counted it
        return dropped() is None

    eventually(is_gone, "nobody holds it")
    assert closed.wait(60)
    where[0].join(60)
    assert not where[0].is_alive()
