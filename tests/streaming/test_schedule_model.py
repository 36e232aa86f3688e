"""Guarantee 47: a schedule under a clock of Postgres' that jumps, looked after by two streamers, beside a walk through the calendar."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import ClassVar

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from fixtures.clocks import stop_clock, tell_time
from penstock import Pipeline, Queue
from penstock.database.store import Store
from penstock.declaring.schedules import CatchUp
from penstock.streaming.scheduler import Scheduler

JOBS = Queue("jobs")
BEGINNING = datetime(2026, 3, 1, 0, 0, 7, tzinfo=UTC)
MINUTE = timedelta(minutes=1)

IS_SLOT: dict[str, Callable[[datetime], bool]] = {
    "1h": lambda at: at.minute == at.second == 0,
    "90s": lambda at: at.timestamp() % 90 == 0,
    "*/20 * * * *": lambda at: at.minute % 20 == at.second == 0,
    "15 3 * * *": lambda at: (at.hour, at.minute, at.second) == (3, 15, 0),
}


def walk(every: str, after: datetime) -> Iterator[datetime]:
    """The times of a schedule after a moment."""
    at = after.replace(second=after.second // 30 * 30, microsecond=0)
    while True:
        if at > after and IS_SLOT[every](at):
            yield at
        at += timedelta(seconds=30)


ENDS = (-1, 0, 1, 59, 60, 61)
"""Seconds from a slot: one before it, and until it is late."""


@dataclass
class Calendar:
    """What a schedule has staged, and what is next: what is there in its row, too."""

    every: str
    catch_up: str
    next: datetime | None  # None if somebody has written that
    last: datetime | None = None
    skipped: tuple[datetime | None, datetime | None] = (None, None)
    staged: Counter[datetime] = field(default_factory=Counter)

    def look(self, now: datetime) -> int:
        if self.next is None or self.next > now:
            self._move_back(now)
            return 0
        passed = [self.next]
        for slot in walk(self.every, self.next):
            if slot > now:
                break
            passed.append(slot)
        chosen = passed[-1000:][:100] if self.catch_up == "all" else passed[-1:]
        if self.catch_up == "skip" and now - chosen[0] > MINUTE:
            chosen = []
        if not chosen or chosen[0] != self.next:
            self.skipped = self.next, chosen[0] if chosen else now
        self.staged.update(chosen)
        self.last = chosen[-1] if chosen else self.last
        self.next = next(walk(self.every, chosen[-1] if self.catch_up == "all" else now))
        return len(chosen)

    def _move_back(self, now: datetime) -> None:
        due = next(slot for slot in walk(self.every, now) if slot != self.last)
        if self.next is None or self.next - due > MINUTE:
            self.next = due


class ScheduleModel(RuleBasedStateMachine):
    """One schedule, and the calendar."""

    connection: ClassVar[psycopg.Connection]

    @initialize(every=st.sampled_from([*IS_SLOT]), catch_up=st.sampled_from(["skip", "one", "all"]))
    def begin(self, every: str, catch_up: str) -> None:
        self.connection.execute("TRUNCATE penstock.schedules, penstock.staged_records")
        self.now = BEGINNING
        self.catch_up = catch_up
        self._deploy(every)

    def _deploy(self, every: str) -> None:
        pipeline = Pipeline([JOBS])
        pipeline.every(every, to=JOBS, name="s", catch_up=self.catch_up)  # type: ignore[arg-type]
        self.streamers = [Scheduler(pipeline) for _ in range(2)]
        self._tell_time()
        for streamer in self.streamers:
            streamer.declare(Store(self.connection))
        self.calendar = Calendar(every, self.catch_up, next(walk(every, self.now)))

    def _tell_time(self) -> None:
        tell_time(self.connection, self.now)

    @rule(seconds=st.sampled_from([1, 29, 59, 61, 89, 600, 3593, 3600, 7200, 86_400]))
    def pass_time(self, seconds: int) -> None:
        self.now += timedelta(seconds=seconds)

    @rule(seconds=st.sampled_from([-1, -60, -61, -1200, -3600, -90_000, 3600, 7261, 200_000]))
    def set_the_clock(self, seconds: int) -> None:
        self.now += timedelta(seconds=seconds)

    @rule(slots=st.integers(0, 3), seconds=st.sampled_from(ENDS), number=st.integers(0, 1))
    def look_around_a_slot(self, slots: int, seconds: int, number: int) -> None:
        at = self.calendar.next or self.now
        for _ in range(slots):
            at = next(walk(self.calendar.every, at))
        self.now = at + timedelta(seconds=seconds)
        self._stage_due(number)

    @rule()
    def write_no_time(self) -> None:
        self.connection.execute("UPDATE penstock.schedules SET next_at = NULL")
        self.calendar.next = None

    @rule(number=st.integers(0, 1))
    def look(self, number: int) -> None:
        self._stage_due(number)

    def _stage_due(self, number: int) -> None:
        self._tell_time()
        assert self.streamers[number].stage_due(Store(self.connection)) == self.calendar.look(self.now)

    @rule(number=st.integers(0, 1))
    def restart(self, number: int) -> None:
        """As it was declared, it goes on."""
        self._tell_time()
        pipeline = Pipeline([JOBS])
        pipeline.every(self.calendar.every, to=JOBS, name="s", catch_up=self.catch_up)  # type: ignore[arg-type]
        self.streamers[number] = Scheduler(pipeline)
        self.streamers[number].declare(Store(self.connection))

    @rule(every=st.sampled_from([*IS_SLOT]))
    def change(self, every: str) -> None:
        """With other times, it begins anew; what it has staged and skipped stays."""
        before = self.calendar
        self._deploy(every)
        self.calendar.last, self.calendar.skipped, self.calendar.staged = before.last, before.skipped, before.staged
        if every == before.every:
            self.calendar.next = before.next

    @invariant()
    def row_and_jobs_are_those_of_the_calendar(self) -> None:
        jobs = self.connection.execute("SELECT headers ->> 'slot' FROM penstock.staged_records").fetchall()
        rows = self.connection.execute(
            "SELECT next_at, last_at, skipped_since, skipped_until FROM penstock.schedules"
        ).fetchall()

        assert Counter(datetime.fromisoformat(slot) for (slot,) in jobs) == self.calendar.staged
        assert rows == [(self.calendar.next, self.calendar.last, *self.calendar.skipped)]


STORIES: list[list[tuple[int, int]]] = [
    *([(0, 3593 + seconds + later_s)] for seconds, later_s in product(ENDS, (0, 3600))),
    [(0, 0), (0, -7200)],  # set back, after it has been looked for what is next
    [(0, 3600), (0, 0), (0, 3593), (0, 7193)],  # the slot has its job already
    [(0, 0), (1, 3600), (0, 10), (1, 10), (0, 3593), (1, 7193)],
    [(0, 0), (1, 200_000), (0, 20), (0, 3593), (1, 3594), (1, 200_000), (0, 203_600)],
    [(0, 200_000), (0, -90_000), (1, -86_400), (0, 0), (1, 3593), (0, 3594)],
]
"""Who looks, and when, in seconds from the beginning."""


@pytest.mark.parametrize("catch_up", ["skip", "one", "all"])
def test_a_schedule_matches_the_calendar_in_each_of_these_stories(
    catch_up: CatchUp, connection: psycopg.Connection
) -> None:
    """A slot is due in its own second, and late after a minute; a next time that is a minute too late is left, and a later one is not."""
    stop_clock(connection, BEGINNING)
    pipeline = Pipeline([JOBS])
    pipeline.every("1h", to=JOBS, name="s", catch_up=catch_up)
    late = [(late_s, [(0, seconds)]) for late_s, seconds in product((60, 61), (0, 3592, 3593))]
    for late_s, story in [*((0, story) for story in STORIES), *late]:
        compare(connection, pipeline, story, late_s=late_s, catch_up=catch_up)


def compare(
    connection: psycopg.Connection, pipeline: Pipeline, story: list[tuple[int, int]], *, late_s: int, catch_up: CatchUp
) -> None:
    connection.execute("TRUNCATE penstock.schedules, penstock.staged_records")
    tell_time(connection, BEGINNING)
    streamers = [Scheduler(pipeline) for _ in range(2)]
    streamers[0].declare(Store(connection))
    calendar = Calendar("1h", catch_up, next(walk("1h", BEGINNING)) + timedelta(seconds=late_s))
    connection.execute("UPDATE penstock.schedules SET next_at = %s", [calendar.next])
    for number, seconds in story:
        now = BEGINNING + timedelta(seconds=seconds)
        tell_time(connection, now)
        assert streamers[number].stage_due(Store(connection, pipeline.scope)) == calendar.look(now), (story, seconds)
        [row] = connection.execute("SELECT next_at, last_at, skipped_since, skipped_until FROM penstock.schedules")
        assert row == (calendar.next, calendar.last, *calendar.skipped), (story, seconds)


@pytest.mark.slow
def test_a_schedule_matches_the_calendar_whatever_the_clock_does(connection: psycopg.Connection) -> None:
    stop_clock(connection, BEGINNING)
    ScheduleModel.connection = connection
    run_state_machine_as_test(
        ScheduleModel,
        settings=settings(max_examples=15, stateful_step_count=25, suppress_health_check=list(HealthCheck)),
    )
