"""Times of cron expressions.

The fields match local times, found without a time zone, within fifty years.
Their times in UTC depend on the hours of the expression:

- all hours: every time that the clocks show, so ``*/10 * * * *`` goes on every ten minutes while
  they go back
- some hours: each local time once: the first if it exists twice; if the clocks skip it, the moment
  of the skip
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from heapq import merge

FIELDS = 5

HOURS = frozenset(range(24))


def check_cron(expression: str, zone: tzinfo) -> str | None:
    """Returns what is wrong with a cron expression; None if nothing is.

    Without the library that parses it, the streamer checks it instead.
    """
    try:
        from cronsim import CronSimError  # noqa: PLC0415  an application that only stages does not have it
    except ModuleNotFoundError:
        return None
    usage = "it takes five fields, such as 17 3 * * *, or an interval, such as 6h"
    if (fields := len(expression.split())) != FIELDS:
        return f"it has {fields} fields; {usage}"
    try:
        times = cron_times(expression, zone, datetime.now(UTC))
        return None if next(times, None) else f"there is no such time within fifty years; {usage}"
    except CronSimError as error:
        return f"{error}; {usage}"


def cron_times(expression: str, zone: tzinfo, start: datetime) -> Iterator[datetime]:
    """Yields the times after ``start`` in UTC, in order and without end.

    None if there is none in fifty years.
    """
    from cronsim import CronSim  # noqa: PLC0415  as above

    local = start.astimezone(zone)
    second, first = local.replace(fold=1), local.replace(fold=0)
    # the hour that the clocks show twice; or nothing
    repeated = second.astimezone(UTC) - first.astimezone(UTC)
    begin = local.replace(tzinfo=None) - repeated
    moments: Iterator[datetime]
    if CronSim(expression, begin).hours == HOURS:
        moments = merge(
            *(_shown_times(CronSim(expression, begin), zone, again) for again in (0, 1))
        )
    else:
        moments = _first_times(CronSim(expression, begin), zone)
    last = start
    for moment in moments:
        if moment > last:
            yield moment
            last = moment


def _shown_times(times: Iterator[datetime], zone: tzinfo, again: int) -> Iterator[datetime]:
    """Yields the moments at which the clocks show local times.

    The first, or with ``again`` the last.  Local times that the clocks skip are left out.
    """
    for local in times:
        moment = local.replace(tzinfo=zone, fold=again).astimezone(UTC)
        if _local_time(moment, zone) == local:
            yield moment


def _first_times(times: Iterator[datetime], zone: tzinfo) -> Iterator[datetime]:
    """Yields the moments at which the clocks first show local times.

    A skipped one is the moment of the skip.
    """
    for local in times:
        moment = local.replace(tzinfo=zone, fold=0).astimezone(UTC)
        yield moment if _local_time(moment, zone) == local else _find_change(local, zone)


def _local_time(moment: datetime, zone: tzinfo) -> datetime:
    return moment.astimezone(zone).replace(tzinfo=None)


def _find_change(skipped: datetime, zone: tzinfo) -> datetime:
    """Returns the moment at which the clocks skip a local time."""
    early, late = (skipped.replace(tzinfo=zone, fold=again).astimezone(UTC) for again in (1, 0))
    offset = early.astimezone(zone).utcoffset()
    while (apart := (late - early) // timedelta(seconds=1)) > 1:
        middle = early + timedelta(seconds=apart // 2)
        if middle.astimezone(zone).utcoffset() == offset:
            early = middle
        else:
            late = middle
    return late
