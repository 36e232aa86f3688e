"""``penstock jobs`` and ``penstock queues``: the jobs of a queue that are not done, and the limits of its tenants and keys.

Jobs are listed and shown, cancelled, retried, or due at another time; limits are listed, set and taken back.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from penstock.cli.command import NOTHING_CHANGED, Apply, Json, subcommand, whoami
from penstock.cli.connecting import Connections, open_connections
from penstock.cli.render import payload_lines, say, show, show_found, show_json, with_payload
from penstock.display import format_count
from penstock.errors import InvalidSetting
from penstock.operating.jobs.browsing import JobFilter, QueuedJob, check_queue, list_jobs, read_job
from penstock.operating.jobs.changes import JobCount, cancel_jobs, count_jobs, jobs_command, move_due, retry_jobs
from penstock.operating.jobs.queue_limits import LimitChange, list_limits
from penstock.operating.pausing import note_action
from penstock.records import parse_moment
from penstock.settings import Settings

jobs = typer.Typer(no_args_is_help=True, help="List, show, cancel, retry or move the unfinished jobs of a queue.")

QueueArgument = Annotated[str, typer.Argument(metavar="QUEUE", help="Name of the queue.")]
Ids = Annotated[list[int] | None, typer.Argument(metavar="ID", min=0, help="Ids of the jobs.")]
All = Annotated[bool, typer.Option("--all", help="All jobs of the queue.")]
JobOptions = Annotated[JobFilter, {"tenant": None, "key": None, "unique": "NAME", "state": None}]
TenantOptions = Annotated[JobFilter, {"tenant": None, "key": None}]


@subcommand(jobs, "list")
def list_(
    settings: Settings,
    queue: QueueArgument,
    of: JobOptions,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of jobs.")] = 50,
    after: Annotated[
        int, typer.Option(min=0, metavar="ID", help="Continue after this id, the last of the previous page.")
    ] = 0,
    json: Json = False,
) -> None:
    """List the unfinished jobs of a queue, in the order of their ids, and what each waits for; without payloads."""
    with open_connections(settings, "jobs") as servers:
        found = list_jobs(servers.store, servers.client, queue, of, after=after, limit=limit)
    if not found and not json:
        say("no jobs")
        return
    show_found(found, "id, tenant, key, unique, action, object, staged at, due, state, why", json=json)
    if len(found) == limit and not json:
        say(f"There may be more: --after {found[-1].id}")


@subcommand(jobs, "show")
def show_(
    settings: Settings,
    queue: QueueArgument,
    id_: Annotated[int, typer.Argument(metavar="ID", min=0, help="Id of the job.")],
    json: Json = False,
) -> None:
    """Show a job with its payload; for a finished job, its progress and result."""
    with open_connections(settings, "jobs") as servers:
        found = read_job(servers.store, servers.client, queue, id_)
    if json:
        known = {name: getattr(found, name) for name in ("job", "progress", "note", "done_at")}
        show(with_payload(known, found.record, result=found.result_json))
        return
    show(*([f"{queue} job {id_} has ended"] if found.job is None else _describe(found.job)))
    if found.progress is not None:
        show(f"progress: {found.progress:.0%}" + (f", {found.note}" if found.note else ""))
    if found.done_at and found.result_json:
        show(f"result, {found.done_at:%Y-%m-%d %H:%M:%S}: {_shorten(found.result_json)}")
    if found.record is not None:
        show(*payload_lines(found.record))


def _describe(job: QueuedJob) -> list[str]:
    return [
        f"{job.shard} job {job.id} of {job.tenant}" + (f", key {job.key}" if job.key else ""),
        f"{job.action} {job.object}, staged {job.staged_at:%Y-%m-%d %H:%M:%S}"
        + (f", due {job.due:%Y-%m-%d %H:%M:%S}" if job.due else ""),
        f"{job.state}: {job.why}",
        *([f"unique name: {job.unique}"] if job.unique else []),
    ]


RESULT_SHOWN = 2_000
"""Characters of a result for people."""


def _shorten(text: str) -> str:
    left = len(text) - RESULT_SHOWN
    return text if left <= 0 else f"{text[:RESULT_SHOWN]} … and {format_count(left, 'more character')}: --json"


TENANTS_SHOWN = 50
"""Lines of a plan; those with the most jobs."""


@subcommand(jobs, "cancel")
def cancel(
    settings: Settings,
    *,
    queue: QueueArgument,
    ids: Ids = None,
    of: JobOptions,
    all_: All = False,
    apply: Apply = False,
    json: Json = False,
) -> None:
    """Cancel jobs: they will have no effect. A worker that has begun to write is asked to roll back."""
    of = _choose(of, ids, all_=all_)
    with open_connections(settings, "jobs") as servers:
        if not apply:
            _show_plan(count_jobs(servers.store, servers.client, queue, of), json=json)
            return
        _note(servers, "Cancel", of, "cancel", queue)
        done = cancel_jobs(servers.store, servers.client, queue, of)
    if json:
        show_json(done)
        return
    show(f"cancelled {format_count(done.cancelled, 'job')}, asked the workers of {done.running:,} more to roll back")


@subcommand(jobs, "retry")
def retry(
    settings: Settings,
    *,
    queue: QueueArgument,
    ids: Ids = None,
    of: JobOptions,
    all_: All = False,
    apply: Apply = False,
    json: Json = False,
) -> None:
    """Try jobs again: workers stage dead letters again, and delayed or snoozed jobs become due now.

    Args:
        state: Only jobs in this state: delayed, or dead for dead letters.
    """
    of = _choose(of, ids, all_=all_)
    with open_connections(settings, "jobs") as servers:
        if apply:
            _note(servers, "Retry", of, "retry", queue)
        found = retry_jobs(servers.store, servers.client, queue, of, apply=apply)
    if not found and not json:
        say("no jobs")
        return
    show_found(found, "tenant, state, #jobs, outcome", json=json)
    if not apply:
        say(NOTHING_CHANGED)


@subcommand(jobs, "move-due")
def move_due_(
    settings: Settings,
    *,
    queue: QueueArgument,
    due: Annotated[str, typer.Argument(metavar="TIME", help="ISO 8601, or 2h for in two hours; 0s is now.")],
    ids: Ids = None,
    of: TenantOptions,
    all_: All = False,
    apply: Apply = False,
    json: Json = False,
) -> None:
    """Change when waiting and delayed jobs are due; jobs with a unique name stay."""
    moment = parse_moment(due)
    at = datetime.now(UTC) + moment if isinstance(moment, timedelta) else moment
    of = _choose(of, ids, all_=all_)
    with open_connections(settings, "jobs") as servers:
        if not apply:
            counts = count_jobs(servers.store, servers.client, queue, of, movable=True)
            _show_plan(counts, json=json)
            say("Jobs at work, and those with a unique name, are left alone.")
            return
        _note(servers, "Move", of, "move-due", queue, at.isoformat(timespec="seconds"))
        moved = move_due(servers.store, servers.client, queue, of, at)
    show(f"{format_count(moved, 'job')} due at {at:%Y-%m-%d %H:%M:%S} UTC")


def _choose(of: JobFilter, ids: list[int] | None, *, all_: bool) -> JobFilter:
    """The filter with its ids; without any, all jobs have to be wanted."""
    chosen = replace(of, ids=ids or None)
    if (chosen == JobFilter()) is not all_:
        raise InvalidSetting(
            "which? Give ids, --tenant, --key, --unique or --state; or --all alone, for all of the queue"
        )
    return chosen


def _note(servers: Connections, title: str, of: JobFilter, command: str, queue: str, *more: str) -> None:
    """Notes what is about to be done to the jobs of a queue that there is."""
    check_queue(servers.store, queue)
    words = f"{title} jobs of {queue}", jobs_command(of, command, queue, *more)
    note_action(servers.store, whoami(), *words)


def _show_plan(counts: Sequence[JobCount], *, json: bool) -> None:
    show_found(counts if json else counts[:TENANTS_SHOWN], "tenant, state, #jobs", json=json)
    say(f"{format_count(sum(each.jobs for each in counts), 'job')}. {NOTHING_CHANGED}")


queues = typer.Typer(no_args_is_help=True, help="List or set limits of the tenants and keys of a queue.")


@subcommand(queues, "limits")
def limits_(settings: Settings, queue: QueueArgument, json: Json = False) -> None:
    """List the limits that hold, set and declared; an empty name means all others."""
    with open_connections(settings, "queues") as servers:
        found, _ = list_limits(servers.store, queue)
    show_found(found, "kind, name, limits=text, set at", json=json)


@subcommand(queues, "limit")
def limit_(
    settings: Settings,
    queue: QueueArgument,
    tenant: Annotated[
        str | None, typer.Option(help="The tenant; empty for all tenants without limits of their own.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="The key; empty for all keys without limits of their own.")] = None,
    in_flight: Annotated[int | None, typer.Option(help="Maximum number in flight.")] = None,
    rate: Annotated[float | None, typer.Option(help="Maximum number a second.")] = None,
    burst: Annotated[int | None, typer.Option(help="With a rate: maximum number at once after a pause.")] = None,
    weight: Annotated[float | None, typer.Option(help="Share of a tenant beside other waiting tenants.")] = None,
    elastic: Annotated[
        int | None, typer.Option(help="Number in flight above which a tenant goes only when no other is ready.")
    ] = None,
    bytes_: Annotated[
        int | None, typer.Option("--bytes", help="Maximum bytes of a tenant's payloads in Redis.")
    ] = None,
    pause: Annotated[bool, typer.Option("--pause", help="Hand over nothing of the tenant or key.")] = False,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove the set limits, so that the declared ones hold.")
    ] = False,
    apply: Apply = False,
) -> None:
    """Replace all limits of a tenant or a key; they are kept in Postgres."""
    of_tenant = {"weight": weight, "elastic": elastic, "bytes": bytes_}
    given: dict[str, Any] = {"in_flight": in_flight, "rate": rate, "burst": burst, **of_tenant}
    given = {name: value for name, value in given.items() if value is not None} | ({"is_paused": True} if pause else {})
    if bool(given) is remove:
        raise InvalidSetting(
            "which limits? Give --in-flight, --rate, --weight, --elastic, --bytes or --pause; or --remove alone"
        )
    if (tenant is None) is (key is None) or (key is not None and given.keys() & of_tenant.keys()):
        raise InvalidSetting(
            "of what? Give --tenant or --key, one of them; a key has no --weight, --elastic or --bytes"
        )
    change = LimitChange(queue, *(("tenant", tenant) if tenant is not None else ("key", str(key))), given)
    with open_connections(settings, "queues") as servers:
        show(change.describe(change.find(servers.store)))
        if not apply:
            say(NOTHING_CHANGED)
            return
        note_action(servers.store, whoami(), change.title, change.command)
        change.apply(servers.store)
    show("holds within a second or two, once the streamer has read it")
