"""Slices of structures as jobs of a recruiter."""

from collections.abc import Callable

import pytest

from fixtures.clients import RedisClient
from penstock.clients import PinnedKeys, QueuedIds, QueueTracker, VolatileHash
from penstock.engines.stealing import Outcome, Recruiter, make_slice
from penstock.errors import ServerUnavailable
from penstock.testing import eventually


def test_recruits_delete_what_is_over_and_keep_a_tracker_true(
    redis_url: str, redis_client: RedisClient, recruiter: Recruiter
) -> None:
    sessions = VolatileHash.connect(redis_url, "sessions", scheme="sorted-set")
    pins = PinnedKeys.connect(redis_url, "reports")
    source = QueuedIds(lambda *_: ["ann"], lambda ids: [id_ for id_ in ids if id_ == "ann"])
    tracker = QueueTracker.connect(redis_url, "jobs", source)
    sessions.hset_many({str(n): "x" for n in range(100)}, 0.001)
    for n in range(30):
        pins.put(str(n), "x", 0.05)
    tracker.add(["eve"])
    recruiter.install(make_slice(sessions.gc), "sessions", 0.3)
    recruiter.install(make_slice(pins.reap), "pins", 0.3)
    recruiter.install(make_slice(tracker.sync), "tracker", 0.3)

    def is_done() -> bool:
        recruiter.enlist()
        left = redis_client.exists("penstock:{sessions}:volatile", "penstock:{reports}:pins")
        return not left and tracker.sample(5) == ["ann"]

    eventually(is_done, "all is deleted, and the tracker true", interval_s=0.002)
    recruiter.close()
    eventually(lambda: not recruiter._supervisor._in_charge.is_alive(), "the last job has ended")
    counters = recruiter.counters()
    assert all(each.failed == each.aborted == 0 for each in counters.values())
    assert all(each.finished >= 1 for each in counters.values())
    for made in (sessions, pins, tracker):
        made.close()


def test_a_server_that_is_away_is_no_failure() -> None:
    sessions = VolatileHash.connect("unix:///nowhere/redis.sock", "sessions")

    assert make_slice(sessions.gc)() is Outcome.GAVE_UP
    with pytest.raises(ServerUnavailable):
        sessions.gc()


class Slice:
    """Another process was faster."""

    gave_up = True


@pytest.mark.parametrize(
    ("work", "outcome"),
    [
        (lambda: 0, Outcome.NOTHING_TO_DO),
        (lambda: 3, Outcome.FINISHED),
        (lambda: None, Outcome.NOTHING_TO_DO),
        (Slice, Outcome.GAVE_UP),
    ],
)
def test_what_a_slice_returns_becomes_an_outcome(work: Callable[[], object], outcome: Outcome) -> None:
    assert make_slice(work)() is outcome
