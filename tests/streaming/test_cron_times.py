"""Guarantee 47: the times of cron expressions in all time zones, wherever their clocks change, beside a walk through the minutes."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from zoneinfo import ZoneInfo, available_timezones

import pytest

from penstock import Queue
from penstock.declaring.schedules import ScheduleSpec

MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)

YEARS = range(2024, 2028)

UNUSUAL = {  # by half an hour, by two hours, at midnight, over the date line, and without summer time
    "Africa/Cairo": range(1990, 2028),
    "Africa/Casablanca": range(2006, 2030),
    "Africa/Juba": range(2000, 2028),
    "America/Caracas": range(2000, 2028),
    "America/Havana": range(1990, 2028),
    "America/Scoresbysund": range(1990, 2028),
    "America/St_Johns": range(1985, 2028),
    "Antarctica/Casey": range(2000, 2028),
    "Antarctica/Troll": range(2000, 2028),
    "Asia/Almaty": range(1990, 2028),
    "Asia/Gaza": range(2000, 2028),
    "Asia/Kathmandu": range(1980, 2028),
    "Asia/Pyongyang": range(2000, 2028),
    "Asia/Tehran": range(1990, 2028),
    "Australia/Lord_Howe": range(1980, 2028),
    "Europe/Volgograd": range(1990, 2028),
    "Pacific/Apia": range(2000, 2028),
    "Pacific/Chatham": range(1980, 2028),
    "Pacific/Kiritimati": range(1980, 2028),
    "Pacific/Kwajalein": range(1980, 2028),
}

SAMPLE = ("Europe/Berlin", "America/New_York", "Antarctica/Troll", "Australia/Lord_Howe", "Pacific/Chatham")


def local_time(moment: datetime, zone: ZoneInfo) -> datetime:
    return moment.astimezone(zone).replace(tzinfo=None)


def find_changes(zone: ZoneInfo, years: range) -> Iterator[datetime]:
    """The moments at which the clocks of a zone change."""
    before = datetime(years.start, 1, 1, tzinfo=UTC)
    while before.year < years.stop:
        low, high = before, before + DAY
        if low.astimezone(zone).utcoffset() != high.astimezone(zone).utcoffset():
            while high - low > MINUTE:
                middle = low + (high - low) // MINUTE // 2 * MINUTE
                same = middle.astimezone(zone).utcoffset() == low.astimezone(zone).utcoffset()
                low, high = (middle, high) if same else (low, middle)
            yield high
        before += DAY


def parse(field: str, values: range) -> set[int]:
    """A field of the few forms that are tried here."""
    matched: set[int] = set()
    for part in field.split(","):
        span, _, step = part.partition("/")
        first, _, last = span.partition("-")
        chosen = list(values) if span == "*" else list(range(int(first), int(last or first) + 1))
        matched.update(chosen[:: int(step or 1)])
    return matched


class Walk:
    """All minutes around a change."""

    def __init__(self, zone: ZoneInfo, change: datetime) -> None:
        before, after = local_time(change - MINUTE, zone), local_time(change, zone)
        reach = timedelta(hours=3) + abs(after - before - MINUTE)
        self.begin, self.end = change - reach, change + reach
        self.shown = [(moment, local_time(moment, zone)) for moment in self._moments()]
        self.first = list(self._first())
        hours = sorted({before.hour, after.hour, (after - MINUTE).hour, min(before, after).hour})
        fixed = [f"{minutes} {h} * * *" for h in hours for minutes in ("0", "30", "15,45", "*/15", "*")]
        dated = [f"20 {before.hour} {before.day} {before.month} *", f"20 {after.hour} * * {after.isoweekday() % 7}"]
        even = ["* * * * *", "*/10 * * * *", "30 * * * *", "7,37 0-23 * * *"]
        self.expressions = [*fixed, *dated, f"*/30 0-{hours[-1]} * * *", "0 0 * * *", "0 */2 * * *", *even]

    def times(self, expression: str) -> list[datetime]:
        """The times of an expression."""
        ranges = range(60), range(24), range(1, 32), range(1, 13), range(7)
        minutes, hours, days, months, weekdays = (parse(*each) for each in zip(expression.split(), ranges, strict=True))
        return sorted(
            {
                moment
                for moment, local in (self.shown if len(hours) == len(ranges[1]) else self.first)
                if moment > self.begin and local.minute in minutes and local.hour in hours
                if local.day in days and local.month in months and local.isoweekday() % 7 in weekdays
            }
        )

    def _moments(self) -> Iterator[datetime]:
        for n in range((self.end - self.begin) // MINUTE + 1):
            yield self.begin + n * MINUTE

    def _first(self) -> Iterator[tuple[datetime, datetime]]:
        """Each local time, with the moment at which the clocks show it or a later one."""
        latest = self.shown[0][1] - MINUTE
        for moment, local in self.shown:
            while latest < local:
                latest += MINUTE
                yield moment, latest


Change = tuple[datetime, timedelta | None, timedelta | None]


def check_zone(name: str, years: range, *, restarts: bool = False, known: set[Change] | None = None) -> int:
    """Compares all times around all changes but the known ones; returns how many expressions were tried."""
    zone, tried = ZoneInfo(name), 0
    known = set() if known is None else known
    for change in find_changes(zone, years):
        key = change, (change - MINUTE).astimezone(zone).utcoffset(), change.astimezone(zone).utcoffset()
        if key in known:
            continue
        known.add(key)
        walk = Walk(zone, change)
        for expression in walk.expressions:
            spec, expected = ScheduleSpec("s", Queue("jobs"), expression, timezone=name), walk.times(expression)
            slots = list(takewhile(lambda at: at <= walk.end, spec.slots(walk.begin)))  # noqa: B023  used at once
            assert slots == expected, (name, expression, change)
            for number in range(0, len(walk.shown), 13) if restarts else ():  # a streamer begins anywhere
                after = walk.begin + number * MINUTE + timedelta(seconds=number % 60)
                if following := [at for at in expected if at > after]:
                    assert spec.next_slot(after) == following[0], (name, expression, after)
            tried += 1
    return tried


@pytest.mark.parametrize("name", SAMPLE)
def test_each_local_time_is_once_and_time_passes_evenly_where_clocks_change(name: str) -> None:
    assert check_zone(name, range(2026, 2027), restarts=True) > 10


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_each_local_time_is_once_at_every_change_of_every_time_zone() -> None:
    known: set[Change] = set()  # zones with the same change have the same times around it
    assert sum(check_zone(name, YEARS, known=known) for name in sorted(available_timezones())) > 3_000


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", UNUSUAL)
def test_each_local_time_is_once_where_clocks_changed_as_nowhere_else(name: str) -> None:
    assert check_zone(name, UNUSUAL[name]) > 10
