"""The recruiter draws by rate, and keeps what jobs do away from the caller."""

import threading

import pytest

from penstock.errors import InvalidChore, Unknown
from penstock.stealing import Outcome, Recruiter, time_left_s
from penstock.testing import eventually


def test_a_drawn_job_runs_in_another_thread() -> None:
    recruiter, ran = Recruiter(), threading.Event()
    where: list[threading.Thread] = []

    def job() -> None:
        where.append(threading.current_thread())
        ran.set()

    recruiter.install(job, "job", 1.0)

    assert recruiter.enlist()
    assert ran.wait(5)
    assert where[0] is not threading.current_thread()
    eventually(lambda: recruiter.counters()["job"].finished == 1, "the run is counted")


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan"), float("inf"), "1", None, True])
def test_a_rate_that_is_no_share_is_refused(rate: float) -> None:
    recruiter = Recruiter()

    with pytest.raises(InvalidChore) as refused:
        recruiter.install(lambda: None, "job", rate)

    assert refused.value.field == "rate"
    assert recruiter.counters() == {}


def test_rates_above_one_together_are_refused() -> None:
    recruiter = Recruiter()
    for number in range(10):
        recruiter.install(lambda: None, f"job {number}", 0.1)

    with pytest.raises(InvalidChore, match="above 1"):
        recruiter.install(lambda: None, "one more", 0.01)


@pytest.mark.parametrize(
    ("returned", "field"),
    [
        (None, "finished"),
        (5, "finished"),
        (Outcome.FINISHED, "finished"),
        (Outcome.NOTHING_TO_DO, "dismissed"),
        (Outcome.GAVE_UP, "aborted"),
        (Outcome.FAILED, "failed"),
    ],
)
def test_what_a_job_returns_is_counted(returned: object, field: str) -> None:
    recruiter = Recruiter()
    recruiter.install(lambda: returned, "job", 1.0)

    assert recruiter.enlist()

    eventually(lambda: getattr(recruiter.counters()["job"], field) == 1, f"it is {field}")


def test_a_job_sees_how_much_of_its_budget_is_left() -> None:
    recruiter = Recruiter(budget_s=5.0)
    left: list[float] = []
    recruiter.install(lambda: left.append(time_left_s()), "job", 1.0)

    recruiter.enlist()

    eventually(lambda: left, "the job ran")
    assert 0 < left[0] <= 5.0
    assert time_left_s() == float("inf")


def test_uninstalled_jobs_are_not_drawn() -> None:
    recruiter = Recruiter()
    recruiter.install(lambda: None, "job", 1.0)

    recruiter.uninstall("job")

    assert not recruiter.enlist()
    with pytest.raises(Unknown, match="nothing"):
        recruiter.uninstall("job")
