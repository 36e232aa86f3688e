"""Schedules: jobs that are staged at an interval, or by a cron expression in a time zone."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import chain, takewhile
from typing import Any, Literal, TypedDict
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from penstock.declaring.cron_times import check_cron, cron_times
from penstock.declaring.kinds import Queue, checked_name
from penstock.declaring.unique import MAX_DELAY_S, Priority, Unique
from penstock.errors import DeclarationError
from penstock.parsing import Duration, find_duration, parse_duration

CatchUp = Literal["skip", "one", "all"]
"""What becomes of slots that passed while no streamer ran.

None, the last one, or the last ``MAX_CATCH_UP``.
"""

MIN_INTERVAL_S, MAX_INTERVAL_S = 1.0, 366 * 86_400.0
"""Bounds of an interval, in seconds: a streamer looks once a second."""

LATE_S = 60.0
"""Seconds after which a slot has been missed."""

MAX_CATCH_UP = 1_000
"""Most slots that ``all`` catches up with: those before were missed."""

MAX_AT_ONCE = 100
"""Most jobs of a schedule that a streamer stages in a second."""


class ScheduleOptions(TypedDict, total=False):
    """Arguments of ``Pipeline.every`` besides the queue, the name and the data.

    See ``ScheduleSpec``.
    """

    tenant: object
    timezone: str
    catch_up: CatchUp
    key: object
    unique: Unique | None
    deadline: Duration | None
    priority: Priority


@dataclass(frozen=True)
class ScheduleSpec:
    """A schedule."""

    name: str  # unique in the pipeline; workers get it as ``job.object``
    queue: Queue  # where its jobs go
    # a cron expression of five fields, such as ``17 3 * * *``; or an interval: seconds, a
    # ``timedelta``, or a text such as ``"10m"``, counted from 1970-01-01 on, so that ``"1h"`` is
    # the full hour
    every: str | timedelta | float
    tenant: object = None  # whose the jobs are; by default the schedule's name
    data: Any = None  # the payload of each job
    # For a cron expression, a name of the IANA database; see ``cron_times`` for what happens when
    # its clocks change.
    timezone: str = "UTC"
    catch_up: CatchUp = "one"  # see ``CatchUp``
    key: object = None  # as of any job, and so are the others
    unique: Unique | None = None
    deadline: Duration | None = None  # from the slot on
    priority: Priority = "normal"

    def __post_init__(self) -> None:
        checked_name(self.name, "schedule")
        if not isinstance(self.queue, Queue):
            raise self._error("to", self.queue, "it takes a Queue: what is scheduled is a job")
        if self.catch_up not in {"skip", "one", "all"}:
            raise self._error("catch_up", self.catch_up, "it takes skip, one or all")
        if self.deadline is not None and not 0 < find_duration(self.deadline) <= MAX_DELAY_S:
            why = (
                f'it takes a duration from the slot on, such as "30m", up to {MAX_DELAY_S:,.0f} '
                "seconds"
            )
            raise self._error("deadline", self.deadline, why)
        try:
            zone = self._zone
        except (ZoneInfoNotFoundError, ValueError, TypeError, OSError) as error:
            raise self._error(
                "timezone", self.timezone, "it takes a name such as Europe/Berlin"
            ) from error
        if self._is_cron:
            if (reason := check_cron(self.text, zone)) is not None:
                raise self._error("every", self.every, reason)
        elif not MIN_INTERVAL_S <= find_duration(self.every) <= MAX_INTERVAL_S:
            raise self._error(
                "every",
                self.every,
                f"an interval is {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g} seconds",
            )
        elif zone is not UTC:
            why = (
                "an interval has no time zone; for times of day in one, write a cron "
                "expression, such as 0 0 * * *"
            )
            raise self._error("timezone", self.timezone, why)

    @property
    def text(self) -> str:
        """Registered form of the schedule; equal schedules have equal texts."""
        if self._is_cron:
            return " ".join(str(self.every).split())
        return f"{find_duration(self.every):.6f}".rstrip("0").rstrip(".") + "s"

    def slots(self, start: datetime) -> Iterator[datetime]:
        """Yields its times after ``start``, without end.

        None if there is none within fifty years.
        """
        return find_slots(self.text, self.timezone, start)

    def due(self, first: datetime, now: datetime) -> list[datetime]:
        """Returns the slots, from ``first`` on, whose jobs are due to be staged now."""
        if self.catch_up == "all":
            return self._last_slots(first, now, MAX_CATCH_UP)[:MAX_AT_ONCE]
        [last] = self._last_slots(first, now, 1)
        return [] if self.catch_up == "skip" and now - last > timedelta(seconds=LATE_S) else [last]

    def _last_slots(self, first: datetime, now: datetime, limit: int) -> list[datetime]:
        """Returns the last slots that have passed.

        Searches the last hour, then further back: there may have been millions.
        """
        span = timedelta(hours=1)
        while now - span > first:
            slots = self.slots(now - span)
            passed = deque(takewhile(lambda slot: slot <= now, slots), maxlen=limit)
            if len(passed) == limit:
                return list(passed)
            span *= 8
        slots = chain([first], self.slots(first))
        return list(deque(takewhile(lambda slot: slot <= now, slots), maxlen=limit))

    def next_slot(self, start: datetime) -> datetime | None:
        """Returns its first time after ``start``; None if there is none."""
        return next(self.slots(start), None)

    @property
    def _is_cron(self) -> bool:
        return isinstance(self.every, str) and " " in self.every.strip()

    @property
    def _zone(self) -> tzinfo:
        """Time zone of the cron expression."""
        return _find_zone(self.timezone)

    def _error(self, field: str, value: object, why: str) -> DeclarationError:
        return DeclarationError(f"schedule {self.name}: {field} is {value!r}; {why}")


def find_slots(text: str, timezone: str, start: datetime) -> Iterator[datetime]:
    """Yields the times after ``start`` of a schedule in its registered form, without end.

    None if there is none within fifty years.
    """
    if " " in text:
        yield from cron_times(text, _find_zone(timezone), start)
        return
    interval = timedelta(seconds=parse_duration(text))
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    slot = epoch + ((start - epoch) // interval + 1) * interval
    while True:
        yield slot
        slot += interval


def _find_zone(timezone: str) -> tzinfo:
    """Returns a time zone; UTC needs no time zone database."""
    return UTC if timezone == "UTC" else ZoneInfo(timezone)
