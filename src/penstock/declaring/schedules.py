"""Schedules: when jobs are staged by themselves, at an interval or by a cron expression in a time zone."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from typing import Any, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from penstock.declaring.kinds import Queue, checked_name
from penstock.errors import DeclarationError
from penstock.parsing import find_duration

CatchUp = Literal["skip", "one", "all"]
"""What becomes of slots that passed while no streamer ran: none, the last one, or all, at most ``MAX_AT_ONCE`` in a second."""

MIN_INTERVAL_S, MAX_INTERVAL_S = 1.0, 366 * 86_400.0
"""Bounds of an interval, in seconds: a streamer looks once a second."""

LATE_S = 60.0
"""Seconds after which a slot has been missed."""

MAX_AT_ONCE = 1_000


@dataclass(frozen=True)
class ScheduleSpec:
    """A schedule."""

    name: str  # unique in the pipeline; workers get it as ``job.object``
    queue: Queue  # where its jobs go
    # a cron expression of five fields, such as ``17 3 * * *``; or an interval: seconds, a ``timedelta``, or a text such as
    # ``"10m"``, counted from 1970-01-01 on, so that ``"1h"`` is the full hour
    every: str | timedelta | float
    tenant: object = None  # whose the jobs are; by default the schedule's name
    data: Any = None  # the payload of each job
    # For a cron expression, a name of the IANA database.  A time that does not exist on a day is the first one after it, and
    # one that exists twice is the first.
    timezone: str = "UTC"
    catch_up: CatchUp = "one"  # see ``CatchUp``

    def __post_init__(self) -> None:
        checked_name(self.name, "schedule")
        if not isinstance(self.queue, Queue):
            raise self._error("to", self.queue, "it takes a Queue: what is scheduled is a job")
        if self.catch_up not in {"skip", "one", "all"}:
            raise self._error("catch_up", self.catch_up, "it takes skip, one or all")
        try:
            ZoneInfo(self.timezone)
        except (ZoneInfoNotFoundError, ValueError, TypeError, OSError) as error:
            raise self._error("timezone", self.timezone, "it takes a name such as Europe/Berlin") from error
        if not self._is_cron and not MIN_INTERVAL_S <= find_duration(self.every) <= MAX_INTERVAL_S:
            raise self._error("every", self.every, f"an interval is {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g} seconds")
        self._check_cron()

    @property
    def text(self) -> str:
        """The schedule as it is registered: two that differ in nothing have one text."""
        return " ".join(str(self.every).split()) if self._is_cron else f"{find_duration(self.every):g}s"

    def slots(self, after: datetime) -> Iterator[datetime]:
        """Its times after a moment, without end; none if there is none within fifty years."""
        if not self._is_cron:
            interval = timedelta(seconds=find_duration(self.every))
            epoch = datetime(1970, 1, 1, tzinfo=UTC)
            slot = epoch + ((after - epoch) // interval + 1) * interval
            while True:
                yield slot
                slot += interval
        from cronsim import CronSim  # noqa: PLC0415  an application that only stages does not have it

        for at in CronSim(self.text, after.astimezone(ZoneInfo(self.timezone))):
            slot = at.astimezone(UTC)
            if slot > after:  # in the second of an hour that is twice, it gives those of the first
                yield slot

    def due(self, first: datetime, now: datetime) -> list[datetime]:
        """The slots of which jobs are to be staged now, out of those from ``first`` on that have passed."""
        if self.catch_up == "all":
            return [first, *islice(takewhile(lambda slot: slot <= now, self.slots(first)), MAX_AT_ONCE - 1)]
        last = self._last_slot(first, now)
        return [] if self.catch_up == "skip" and now - last > timedelta(seconds=LATE_S) else [last]

    def _last_slot(self, first: datetime, now: datetime) -> datetime:
        """The last slot that has passed: looked for in the last hour, then day, then month, as there may have been millions."""
        for span in (timedelta(hours=1), timedelta(days=1), timedelta(days=32)):
            if now - span <= first:
                break
            if passed := list(takewhile(lambda slot: slot <= now, self.slots(now - span))):
                return passed[-1]
        return [first, *takewhile(lambda slot: slot <= now, self.slots(first))][-1]

    def next_slot(self, after: datetime) -> datetime | None:
        """Its first time after a moment; None if there is none any more."""
        return next(islice(self.slots(after), 1), None)

    @property
    def _is_cron(self) -> bool:
        return isinstance(self.every, str) and " " in self.every.strip()

    def _check_cron(self) -> None:
        """Refuses what is no cron expression; where its library is missing, the streamer does."""
        if not self._is_cron:
            return
        try:
            from cronsim import CronSim, CronSimError  # noqa: PLC0415  as above
        except ModuleNotFoundError:
            return
        try:
            CronSim(self.text, datetime.now(UTC))
        except CronSimError as error:
            raise self._error(
                "every", self.every, f"{error}; it takes five fields, such as 17 3 * * *, or an interval, such as 6h"
            ) from error

    def _error(self, field: str, given: object, why: str) -> DeclarationError:
        return DeclarationError(f"schedule {self.name}: {field} is {given!r}; {why}")
