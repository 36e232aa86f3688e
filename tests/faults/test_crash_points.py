"""A process exits between two writes, at every crash point, twice; its successor continues exactly."""

import re
from pathlib import Path

import pytest
import redis

from fixtures.crash_points import (
    CHANNEL_CRASH_POINTS,
    CRASH_POINTS,
    JOB_CRASH_POINTS,
    QUEUE_CRASH_POINTS,
    RECONCILING_CRASH_POINTS,
    REPEAT_POINTS,
    SPARK_CRASH_POINTS,
    at_crash_points,
)
from fixtures.crashing import CRASHED, INDEX, THINGS, run_until_crash, work
from fixtures.dirty import check_copy
from fixtures.truth import check_exact
from penstock import crash_points
from penstock.batches.columns import Columns
from penstock.channels.batch_outcomes import Batch
from penstock.channels.log.appending import append_together
from penstock.channels.log.streams import extents
from penstock.database.connections import Connection
from penstock.records import Epoch, Offset

ONCE = {
    *("streamer.before_register", "streamer.after_channels", "streamer.after_register"),
    *("epoch.before_commit", "epoch.after_commit"),
    *("reset.before_commit", "reset.after_commit", "reset.before_redis"),
}
"""Points that a process passes once, at its start: the second process does not get to a second passing."""

ALL_CRASH_POINTS = (
    *(CRASH_POINTS + QUEUE_CRASH_POINTS + JOB_CRASH_POINTS + CHANNEL_CRASH_POINTS),
    *(RECONCILING_CRASH_POINTS + SPARK_CRASH_POINTS),
)

SOURCES = Path(__file__).parents[2] / "src" / "penstock"


def make_history_diverge(point: str, books: Connection, client: redis.Redis) -> None:
    """Sets up what the crash points of an epoch and of a reset need: a promoted server, or a log that is ahead."""
    if point.startswith("epoch."):
        books.execute("UPDATE penstock.epochs SET timeline = 77")
    if point.startswith("reset."):
        for shard in THINGS.shard_names:
            after = Offset(extents(client, "penstock", [shard])[shard].tail + 1)
            lost = Columns.pack([(5, "key", "update", "thing", '{"version": 1}', "", 5)])
            append_together(client, "penstock", [Batch(shard, Epoch(1), after, False, lost)])


@pytest.mark.slow
@pytest.mark.parametrize("point", CRASH_POINTS)
def test_a_crash_at_any_point_loses_and_doubles_nothing(
    point: str, books: Connection, database_url: str, redis_url: str, redis_client: redis.Redis
) -> None:
    """Guarantees 4 and 6: the process exits at the first passing, its successor at the second; the third one finishes the work."""
    work(database_url, redis_url, rounds=(8, 4))
    make_history_diverge(point, books, redis_client)
    reset = point.startswith("reset.")

    first = run_until_crash(point, 1, database_url, redis_url, reset=reset)
    second = run_until_crash(point, 2, database_url, redis_url, reset=reset)
    work(database_url, redis_url, reset=reset, rounds=(8, 4))

    assert (first, second) == (CRASHED, 0 if point in ONCE else CRASHED)
    assert check_exact(books, redis_client, THINGS) >= 24
    check_copy(books, redis_client, INDEX)


def test_every_crash_point_in_the_sources_is_listed_and_none_has_another_name() -> None:
    """The tuple is complete: the test above skips no point.  A job passes the same ones, finished alone or with others."""
    passed = [
        name for path in SOURCES.rglob("*.py") for name in set(re.findall(r'crashpoint\("([^"]+)"\)', path.read_text()))
    ]

    # A handler's transaction puts its own name before the point's.
    passed += [
        f"{applies}.{point}"
        for path in SOURCES.rglob("*.py")
        for point in re.findall(r'crashpoint\(f"\{name\}\.([^"]+)"\)', path.read_text())
        for applies in ("consumer", "together", "members", "dataframes")
    ]

    assert sorted(passed) == sorted(ALL_CRASH_POINTS)
    texts = [path.read_text() for path in SOURCES.rglob("*.py")]
    assert sorted(p for text in texts for p in re.findall(r'is_repeated\("([^"]+)"\)', text)) == sorted(REPEAT_POINTS)


def test_the_docstring_lists_every_crash_point() -> None:
    lines = re.findall(r"^    (\w+) +([a-z_]+(?:, [a-z_]+)*)", str(crash_points.__doc__), re.MULTILINE)
    described = [f"{who}.{place}" for who, places in lines for place in places.split(", ")]

    assert sorted(described) == sorted(ALL_CRASH_POINTS + REPEAT_POINTS)


def test_without_an_installed_crash_the_work_passes_every_point(
    books: Connection, database_url: str, redis_url: str, redis_client: redis.Redis
) -> None:
    """All but those of an epoch and of a reset, which need a diverged history."""
    passed: set[str] = set()
    with at_crash_points(passed.add):
        work(database_url, redis_url)

    unusual = {point for point in CRASH_POINTS if point.startswith(("epoch.", "reset."))}
    assert passed == set(CRASH_POINTS) - unusual
    assert check_exact(books, redis_client, THINGS) == 24
