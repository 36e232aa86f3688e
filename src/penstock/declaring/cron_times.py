"""Times of cron expressions.

What a field matches is a local time, which no change of the clocks concerns; it is looked for without a time zone, within fifty years.
What it is in UTC depends on the hours of the expression:

- all of them: each time that the clocks show, so that time passes evenly: ``*/10 * * * *`` goes on every ten minutes while they go back
- some of them: each local time once, the first if it exists twice; and if it does not exist, when the clocks have gone forward
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from heapq import merge

FIELDS = 5

HOURS = frozenset(range(24))


def check_cron(expression: str, zone: tzinfo) -> str | None:
    """Returns what is wrong with a cron expression; where the library that reads it is missing, the streamer does."""
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
    """The times after a moment, in UTC and in their order, without end; none if there is none within fifty years."""
    from cronsim import CronSim  # noqa: PLC0415  as above

    local = start.astimezone(zone)
    second, first = local.replace(fold=1), local.replace(fold=0)
    repeated = second.astimezone(UTC) - first.astimezone(UTC)  # the hour that the clocks show twice; or nothing
    begin = local.replace(tzinfo=None) - repeated
    moments: Iterator[datetime]
    if CronSim(expression, begin).hours == HOURS:
        moments = merge(*(_shown_times(CronSim(expression, begin), zone, again) for again in (0, 1)))
    else:
        moments = _first_times(CronSim(expression, begin), zone)
    last = start
    for moment in moments:
        if moment > last:
            yield moment
            last = moment


def _shown_times(times: Iterator[datetime], zone: tzinfo, again: int) -> Iterator[datetime]:
    """Local times as the clocks show them for the first time, or for the last, ``again``; without those that they skip."""
    for local in times:
        moment = local.replace(tzinfo=zone, fold=again).astimezone(UTC)
        if _local_time(moment, zone) == local:
            yield moment


def _first_times(times: Iterator[datetime], zone: tzinfo) -> Iterator[datetime]:
    """Local times as the clocks show them for the first time; those that they skip as soon as they have."""
    for local in times:
        moment = local.replace(tzinfo=zone, fold=0).astimezone(UTC)
        yield moment if _local_time(moment, zone) == local else _find_change(local, zone)


def _local_time(moment: datetime, zone: tzinfo) -> datetime:
    return moment.astimezone(zone).replace(tzinfo=None)


def _find_change(skipped: datetime, zone: tzinfo) -> datetime:
    """The moment at which the clocks skip a local time."""
    early, late = (skipped.replace(tzinfo=zone, fold=again).astimezone(UTC) for again in (1, 0))
    offset = early.astimezone(zone).utcoffset()
    while (apart := (late - early) // timedelta(seconds=1)) > 1:
        middle = early + timedelta(seconds=apart // 2)
        if middle.astimezone(zone).utcoffset() == offset:
            early = middle
        else:
            late = middle
    return late
