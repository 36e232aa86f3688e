"""``penstock jobs`` and ``penstock queues``: unfinished jobs of a queue, and limits.

Jobs are listed and shown, cancelled, retried, or due at another time; limits are listed, set and
taken back.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, TypeVar

import typer

from penstock.channels.commands import RedisClient
from penstock.cli.command import NOTHING_CHANGED, Apply, Json, subcommand, whoami
from penstock.cli.connecting import Connections, open_connections
from penstock.cli.render import payload_lines, say, show, show_found, show_json, with_payload
from penstock.display import format_count
from penstock.errors import InvalidSetting
from penstock.operating.jobs.browsing import (
    JobFilter,
    QueuedJob,
    check_queue,
    list_jobs,
    read_job,
    read_without_redis,
)
from penstock.operating.jobs.changes import (
    JobCount,
    cancel_jobs,
    count_jobs,
    jobs_command,
    move_due,
    retry_jobs,
)
from penstock.operating.jobs.queue_limits import LimitChange, list_limits
from penstock.operating.pausing import note_action
from penstock.records import parse_moment
from penstock.settings import Settings

T = TypeVar("T")

jobs = typer.Typer(
    no_args_is_help=True, help="List, show, cancel, retry or move the jobs of a queue."
)

QueueArgument = Annotated[str, typer.Argument(metavar="QUEUE", help="Name of the queue.")]
Ids = Annotated[list[int] | None, typer.Argument(metavar="ID", min=0, help="Ids of the jobs.")]
All = Annotated[bool, typer.Option("--all", help="All jobs of the queue.")]
JobOptions = Annotated[
    JobFilter, {"tenant": None, "key": None, "unique": "NAME", "state": None, "before": "TIME"}
]
TenantOptions = Annotated[JobFilter, {"tenant": None, "key": None}]


@subcommand(jobs, "list")
def list_(
    settings: Settings,
    queue: QueueArgument,
    job_filter: JobOptions,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of jobs.")] = 50,
    after: Annotated[
        int,
        typer.Option(min=0, metavar="ID", help="Continue after the last id of the previous page."),
    ] = 0,
    json: Json = False,
) -> None:
    """List the unfinished jobs of a queue by id, without payloads, and show why each job waits."""
    with open_connections(settings, "jobs") as servers:
        listed = _read_jobs(
            servers,
            job_filter,
            lambda client: list_jobs(
                servers.store, client, queue, job_filter, after_id=after, limit=limit
            ),
        )
    if not listed and not json:
        say("no jobs")
        return
    show_found(
        listed, "id, tenant, key, unique, action, object, staged at, due, state, why", json=json
    )
    if len(listed) == limit and not json:
        say(f"There may be more: --after {listed[-1].id}")


@subcommand(jobs, "show")
def show_(
    settings: Settings,
    queue: QueueArgument,
    id_: Annotated[int, typer.Argument(metavar="ID", min=0, help="Id of the job.")],
    json: Json = False,
) -> None:
    """Show a job with its payload and progress, or the result of a finished job."""
    with open_connections(settings, "jobs") as servers:
        details = _read_jobs(
            servers, JobFilter(), lambda client: read_job(servers.store, client, queue, id_)
        )
    if json:
        facts = {name: getattr(details, name) for name in ("job", "progress", "note", "done_at")}
        show(with_payload(facts, details.record, result=details.result_json))
        return
    show(*([f"{queue} job {id_} has ended"] if details.job is None else _describe(details.job)))
    if details.progress is not None:
        show(f"progress: {details.progress:.0%}" + (f", {details.note}" if details.note else ""))
    if details.done_at and details.result_json:
        show(f"result, {details.done_at:%Y-%m-%d %H:%M:%S}: {_shorten(details.result_json)}")
    if details.record is not None:
        show(*payload_lines(details.record))


def _describe(job: QueuedJob) -> list[str]:
    return [
        f"{job.shard} job {job.id} of {job.tenant}" + (f", key {job.key}" if job.key else ""),
        f"{job.action} {job.object}, staged {job.staged_at:%Y-%m-%d %H:%M:%S}"
        + (f", due {job.due:%Y-%m-%d %H:%M:%S}" if job.due else ""),
        f"{job.state}: {job.why}",
        *([f"unique name: {job.unique}"] if job.unique else []),
    ]


RESULT_SHOWN = 2_000
"""Limit of a result's characters for people."""


def _shorten(text: str) -> str:
    remaining = len(text) - RESULT_SHOWN
    return (
        text
        if remaining <= 0
        else f"{text[:RESULT_SHOWN]} … and {format_count(remaining, 'more character')}: --json"
    )


TENANTS_SHOWN = 50
"""Limit of a plan's lines, which have the most jobs."""


@subcommand(jobs, "cancel")
def cancel(
    settings: Settings,
    *,
    queue: QueueArgument,
    ids: Ids = None,
    job_filter: JobOptions,
    all_: All = False,
    apply: Apply = False,
    json: Json = False,
) -> None:
    """Cancel jobs. A worker that has begun to write is asked to roll back."""
    job_filter = _choose(job_filter, ids, all_=all_)
    with open_connections(settings, "jobs") as servers:
        if not apply:
            counts = _read_jobs(
                servers,
                job_filter,
                lambda client: count_jobs(servers.store, client, queue, job_filter),
            )
            _show_plan(counts, json=json)
            return
        _note(servers, "Cancel", job_filter, "cancel", queue)
        client = servers.client if job_filter.state else None
        result = cancel_jobs(servers.store, client, queue, job_filter)
    if json:
        show_json(result)
        return
    show(
        f"cancelled {format_count(result.cancelled, 'job')}, asked the workers of "
        f"{result.running:,} more to roll back"
    )


@subcommand(jobs, "retry")
def retry(
    settings: Settings,
    *,
    queue: QueueArgument,
    ids: Ids = None,
    job_filter: JobOptions,
    all_: All = False,
    apply: Apply = False,
    json: Json = False,
) -> None:
    """Try jobs again: workers stage dead letters again, and delayed or snoozed jobs without a
    unique name become due now.

    Args:
        state: Only jobs in this state. Only delayed jobs and dead letters (dead) are retried.
    """
    job_filter = _choose(job_filter, ids, all_=all_)
    with open_connections(settings, "jobs") as servers:
        if apply:
            _note(servers, "Retry", job_filter, "retry", queue)
        outcomes = retry_jobs(servers.store, servers.client, queue, job_filter, apply=apply)
    if not outcomes and not json:
        say("no jobs")
        return
    show_found(outcomes, "tenant, state, #jobs, outcome", json=json)
    if not apply:
        say(NOTHING_CHANGED)


@subcommand(jobs, "move-due")
def move_due_(
    settings: Settings,
    *,
    queue: QueueArgument,
    due: Annotated[
        str,
        typer.Argument(
            metavar="TIME", help="New due time, in ISO 8601, or a delay such as 2h. 0s means now."
        ),
    ],
    ids: Ids = None,
    job_filter: TenantOptions,
    all_: All = False,
    apply: Apply = False,
    json: Json = False,
) -> None:
    """Change the due time of waiting and delayed jobs, except jobs with a unique name."""
    moment = parse_moment(due)
    due_at = datetime.now(UTC) + moment if isinstance(moment, timedelta) else moment
    job_filter = _choose(job_filter, ids, all_=all_)
    with open_connections(settings, "jobs") as servers:
        if not apply:
            counts = count_jobs(servers.store, servers.client, queue, job_filter, movable=True)
            _show_plan(counts, json=json)
            say("Running jobs, and jobs with a unique name, are not moved.")
            return
        _note(servers, "Move", job_filter, "move-due", queue, due_at.isoformat(timespec="seconds"))
        count = move_due(servers.store, servers.client, queue, job_filter, due_at)
    show(f"{format_count(count, 'job')} due at {due_at:%Y-%m-%d %H:%M:%S} UTC")


def _read_jobs(
    servers: Connections, job_filter: JobFilter, read: Callable[[RedisClient | None], T]
) -> T:
    """Returns what is read; without Redis if it does not answer, and says so.

    Only Redis knows which jobs are in a state, so that a filter by state needs it.
    """
    if job_filter.state is not None:
        return read(servers.client)
    jobs_read, away = read_without_redis(servers.client, read)
    if away is not None:
        say(f"What jobs in Redis wait for, and whether a worker has them, is unknown: {away}")
    return jobs_read


def _choose(job_filter: JobFilter, ids: list[int] | None, *, all_: bool) -> JobFilter:
    """Returns the filter with its ids.

    Without a restriction, ``all_`` has to be given.
    """
    chosen = replace(job_filter, ids=ids or None)
    if (chosen == JobFilter()) is not all_:
        raise InvalidSetting(
            "which jobs? Give ids, --tenant, --key, --unique, --state or --before; or --all alone, "
            "for all jobs of the queue"
        )
    return chosen


def _note(
    servers: Connections,
    title: str,
    job_filter: JobFilter,
    command: str,
    queue: str,
    *arguments: str,
) -> None:
    """Notes an action on the jobs of a queue before it happens; the queue must exist."""
    check_queue(servers.store, queue)
    words = f"{title} jobs of {queue}", jobs_command(job_filter, command, queue, *arguments)
    note_action(servers.store, whoami(), *words)


def _show_plan(counts: Sequence[JobCount], *, json: bool) -> None:
    show_found(counts if json else counts[:TENANTS_SHOWN], "tenant, state, #jobs", json=json)
    say(f"{format_count(sum(count.jobs for count in counts), 'job')}. {NOTHING_CHANGED}")


queues = typer.Typer(
    no_args_is_help=True, help="List or set limits of the tenants and keys of a queue."
)


@subcommand(queues, "limits")
def limits_(settings: Settings, queue: QueueArgument, json: Json = False) -> None:
    """List the limits in force, both set and declared. A row without a name is for all others."""
    with open_connections(settings, "queues") as servers:
        limits, _ = list_limits(servers.store, queue)
    show_found(limits, "kind, name, limits=text, set at", json=json)


@subcommand(queues, "limit")
def limit_(
    settings: Settings,
    queue: QueueArgument,
    tenant: Annotated[
        str | None,
        typer.Option(help="The tenant. An empty name means all tenants without their own limits."),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(help="The key. An empty name means all keys without their own limits."),
    ] = None,
    in_flight: Annotated[int | None, typer.Option(help="Maximum number of jobs in flight.")] = None,
    rate: Annotated[float | None, typer.Option(help="Maximum number of jobs a second.")] = None,
    burst: Annotated[
        int | None, typer.Option(help="With --rate: maximum number of jobs at once after a pause.")
    ] = None,
    weight: Annotated[
        float | None, typer.Option(help="Share of the tenant among waiting tenants.")
    ] = None,
    elastic: Annotated[
        int | None,
        typer.Option(help="Number of jobs in flight above which other tenants' jobs go first."),
    ] = None,
    bytes_: Annotated[
        int | None, typer.Option("--bytes", help="Maximum bytes of a tenant's payloads in Redis.")
    ] = None,
    pause: Annotated[
        bool, typer.Option("--pause", help="Hand over no jobs of the tenant or key.")
    ] = False,
    remove: Annotated[
        bool,
        typer.Option("--remove", help="Remove these limits, so that the declared limits apply."),
    ] = False,
    apply: Apply = False,
) -> None:
    """Replace all limits of a tenant or a key. Postgres keeps the new limits."""
    of_tenant = {"weight": weight, "elastic": elastic, "bytes": bytes_}
    limits: dict[str, Any] = {"in_flight": in_flight, "rate": rate, "burst": burst, **of_tenant}
    limits = {name: value for name, value in limits.items() if value is not None} | (
        {"is_paused": True} if pause else {}
    )
    if bool(limits) is remove:
        raise InvalidSetting(
            "which limits? Give --in-flight, --rate, --weight, --elastic, --bytes or --pause; or "
            "--remove alone"
        )
    if (tenant is None) is (key is None) or (key is not None and limits.keys() & of_tenant.keys()):
        raise InvalidSetting(
            "whose limits? Give either --tenant or --key; a key has no --weight, --elastic or "
            "--bytes"
        )
    change = LimitChange(
        queue, *(("tenant", tenant) if tenant is not None else ("key", str(key))), limits
    )
    with open_connections(settings, "queues") as servers:
        show(change.describe(change.find(servers.store)))
        if not apply:
            say(NOTHING_CHANGED)
            return
        note_action(servers.store, whoami(), change.title, change.command)
        change.apply(servers.store)
    show("holds within a second or two, once the streamer has read it")
