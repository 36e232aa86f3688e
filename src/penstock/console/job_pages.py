"""Shows a queue's jobs by state, tenant, key, name and age, and one job from staging to end.

Postgres says which jobs there are, Redis what each waits for: while Redis is away, states are
unknown.  Jobs in a state are therefore searched, for at most ``SEARCH_S``, and not counted.  The
sample that all pages share has their numbers.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, get_args
from urllib.parse import urlencode

from starlette.requests import Request

from penstock.channels.commands import RedisClient
from penstock.console.access import Visitor
from penstock.console.reading import HIDDEN, Page, PageContent, Reading
from penstock.console.status_sampler import Sample
from penstock.database.store import Store
from penstock.declaring.kinds import get_traits
from penstock.errors import InvalidName, Unknown
from penstock.operating.jobs.browsing import (
    JobFilter,
    JobState,
    QueuedJob,
    find_group_name,
    find_jobs,
    list_jobs,
    parse_filter,
    read_job,
    read_without_redis,
)
from penstock.operating.status.snapshot import ChannelStatus, Status
from penstock.operating.tracing.causes import trace
from penstock.records import RecordId

JOBS = 50
"""Jobs on a page."""

SEARCH_S = 2.0
"""Seconds in which jobs in a state are looked for, in the order of their ids."""

FIELDS = ("id", "tenant", "key", "unique", "state", "before")
"""Names of the filters in an address."""

SECRET_FIELDS = frozenset({"tenant", "key", "unique"})


@dataclass(frozen=True, slots=True)
class JobPage:
    """Jobs that a filter takes."""

    jobs: Sequence[QueuedJob]
    last: int | None  # id after which the next page begins; None if this is the last
    is_partial: bool  # true if time was up before the page was full


def _read_jobs(reading: Reading, visitor: Visitor, request: Request) -> PageContent:
    sample, status = reading.status(visitor)
    queues = [
        channel
        for channel in status.channels
        if get_traits(channel.kind).has_jobs and channel.keep_s is not None
    ]
    filters = {name: text for name in FIELDS if (text := request.query_params.get(name))}
    lags = {consumer.channel: consumer.lag for consumer in status.consumers}
    busiest = max(queues, key=lambda queue: lags.get(queue.channel, 0), default=None)
    name = request.query_params.get("queue") or (busiest.channel if busiest else "")
    after = request.query_params.get("after") or "0"
    if not visitor.may("keys") and filters.keys() & SECRET_FIELDS:
        raise InvalidName(
            "this visitor may not see tenants, keys and names: filter by id, state or before"
        )
    if not after.isdecimal():
        raise InvalidName(f"after={after!r}: give the id of a job")
    job_filter = parse_filter(filters)
    page, redis = JobPage((), None, is_partial=False), None
    if name:
        with reading.redis() as client, reading.postgres() as store:
            page, redis = read_without_redis(
                client, lambda redis: find_page(store, redis, name, job_filter, int(after))
            )
    jobs = [_conceal(job, visitor) for job in page.jobs]
    fixed = dict(filters)
    if job_filter.before is not None:
        fixed["before"] = job_filter.before.isoformat(timespec="seconds")
    values = {
        "queues": [queue.channel for queue in queues],
        "queue": name,
        "counts": next(
            (_count(sample, status, queue) for queue in queues if queue.channel == name), None
        ),
        "jobs": jobs,
        "redis": redis,
        "page_of_jobs": page,
        "filters": {name: filters.get(name) for name in FIELDS},
        "after": int(after),
        "states": get_args(JobState),
        "chosen": urlencode({"channel": name, **(fixed or {"all": "on"})}),
        "next": None
        if page.last is None
        else urlencode({"queue": name, **filters, "after": page.last}),
        "other_filters": urlencode(
            {"queue": name, **{key: text for key, text in filters.items() if key != "state"}}
        ),
    }
    twin = {"queue": name, "jobs": jobs, "next": page.last, "redis": redis}
    return PageContent(values, twin, sample, redis is not None)


def find_page(
    store: Store, client: RedisClient | None, queue: str, job_filter: JobFilter, after: int
) -> JobPage:
    """Returns the next page of jobs that a filter takes, those of an unknown state included.

    Those in a state are searched for ``SEARCH_S`` at most.
    """
    if job_filter.state is None:
        jobs = list_jobs(store, client, queue, job_filter, after_id=after, limit=JOBS + 1)
        return JobPage(
            jobs[:JOBS], jobs[JOBS - 1].id if len(jobs) > JOBS else None, is_partial=False
        )
    end, matches, last = monotonic() + SEARCH_S, list[QueuedJob](), after
    for page in find_jobs(store, client, queue, replace(job_filter, state=None), after_id=after):
        if last > after and monotonic() > end:
            return JobPage(matches, last, is_partial=True)
        for job in page:
            if job.state in {job_filter.state, "unknown"}:
                matches.append(job)
            if len(matches) > JOBS:
                return JobPage(matches[:JOBS], matches[JOBS - 1].id, is_partial=False)
            last = job.id
    return JobPage(matches, None, is_partial=False)


def _count(sample: Sample, status: Status, channel: ChannelStatus) -> Mapping[str, float | None]:
    """Returns how many jobs of a queue are in each state; None where Redis did not say.

    Those that are done have been passed since the oldest point of the history, ``done_s`` ago.
    """
    queues = [shard.queue for shard in channel.shards]
    readers = [consumer for consumer in status.consumers if consumer.channel == channel.channel]
    points = (*sample.hour, *sample.recent)
    first, last = (
        sum(points[i].passed.get((reader.consumer, reader.channel), 0) for reader in readers)
        if points
        else 0
        for i in (0, -1)
    )
    return {
        **{
            name: None if None in queues else sum(getattr(queue, name) for queue in queues)
            for name in ("waiting", "leased", "delayed")
        },
        "in_postgres": sum(shard.in_postgres for shard in channel.shards),
        "dead_letters": sum(reader.dead_letters for reader in readers),
        "done": max(0, last - first) if points else None,
        "done_s": points[-1].time_s - points[0].time_s if points else 0.0,
    }


def _conceal(job: QueuedJob, visitor: Visitor) -> QueuedJob:
    if visitor.may("keys"):
        return job
    hidden: dict[str, Any] = {
        name: getattr(job, name) and HIDDEN for name in ("tenant", "key", "unique")
    }
    return replace(job, why=HIDDEN, object=HIDDEN, **hidden)


def _read_job(reading: Reading, visitor: Visitor, request: Request) -> PageContent:
    queue, id_ = request.path_params["queue"], request.path_params["id"]
    values: dict[str, Any] = {"queue": queue, "id": id_}
    values |= dict.fromkeys(("payload", "result", "note"))
    with reading.redis() as client, reading.postgres() as store:
        jobs, values["redis"] = read_without_redis(
            client, lambda redis: list_jobs(store, redis, queue, JobFilter((id_,)))
        )
        values["group"] = jobs and visitor.may("keys") and find_group_name(store, queue, id_)
        stories: list[Any] = []
        with suppress(Unknown):
            stories += [s for s in trace(store, client, RecordId(id_)) if s.channel == queue]
        if visitor.may("payloads") and "payload" in request.query_params:
            values |= _read_payload(store, queue, id_)
    if not jobs and not stories:
        raise Unknown(
            f"nothing is known of a job {id_} of {queue}: penstock trace {id_} shows more"
        )
    twin = {
        "job": _conceal(jobs[0], visitor) if jobs else None,
        "story": conceal_story(stories[0] if stories else None, visitor),
    }
    return PageContent(values | twin, twin, is_partial=values["redis"] is not None)


def _read_payload(store: Store, queue: str, id_: int) -> Mapping[str, Any]:
    try:
        reported = read_job(store, None, queue, id_)
    except Unknown:
        return {"payload": "It is done, and has left none."}
    payload = "It is done." if reported.record is None else reported.record.data_json
    return {"payload": payload, "result": reported.result_json, "note": reported.note}


def conceal_story(story: Any, visitor: Visitor) -> Any:
    """Returns a story without the key and reasons for those who may not see them."""
    if story is None or visitor.may("keys"):
        return story
    readers = tuple(
        replace(reader, reason=None if reader.reason is None else HIDDEN)
        for reader in story.readers
    )
    return replace(story, key=HIDDEN, isolated=None, why=None, readers=readers)


PAGES = (
    Page("jobs.html", _read_jobs, "/jobs", "Jobs", is_live=False),
    Page("job.html", _read_job, "/jobs/{queue}/{id:int}", is_live=False),
)
