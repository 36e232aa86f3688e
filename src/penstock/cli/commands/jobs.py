"""``penstock jobs``: lists, shows and cancels the jobs of a queue that are not done."""

from typing import Annotated

import typer

from penstock.cli.command import NOTHING_CHANGED, Apply, Json, command, whoami
from penstock.cli.connecting import open_connections
from penstock.cli.render import payload_lines, say, show, show_found, show_json, with_payload
from penstock.errors import InvalidSetting
from penstock.operating.jobs import JobFilter, JobState, cancel_command, cancel_jobs, count_jobs, list_jobs, read_job
from penstock.operating.pausing import note_action
from penstock.settings import Settings

jobs = typer.Typer(no_args_is_help=True, help="List, show or cancel the jobs of a queue that are not done.")

QueueArgument = Annotated[str, typer.Argument(metavar="QUEUE", help="Name of the queue.")]
OfTenant = Annotated[str | None, typer.Option("--tenant", help="Only of this tenant.")]
OfKey = Annotated[str | None, typer.Option("--key", help="Only of this key within a tenant.")]
OfName = Annotated[str | None, typer.Option("--unique", metavar="NAME", help="Only with this unique name.")]
InState = Annotated[
    JobState | None,
    typer.Option("--state", help="Only in this state; a dead one becomes a dead letter within seconds."),
]


@jobs.command("list")
@command()
def list_(  # noqa: PLR0917  options
    settings: Settings,
    queue: QueueArgument,
    tenant: OfTenant = None,
    key: OfKey = None,
    unique: OfName = None,
    state: InState = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of jobs.")] = 50,
    after: Annotated[
        int, typer.Option(min=0, metavar="ID", help="Those behind this one: the last of the page before.")
    ] = 0,
    json: Json = False,
) -> None:
    """List the jobs of a queue that are not done, in the order of their ids, and what each waits for; without their payloads."""
    of = JobFilter(None, tenant, key, unique, state)
    with open_connections(settings, "jobs") as servers:
        found = list_jobs(servers.connection, servers.client, queue, of, after=after, limit=limit, scope=servers.scope)
    if not found and not json:
        say("no jobs")
        return
    show_found(found, "id, tenant, key, unique, action, object, staged at, due, state, why", json=json)
    if len(found) == limit and not json:
        say(f"There may be more: --after {found[-1].id}")


@jobs.command("show")
@command()
def show_(
    settings: Settings,
    queue: QueueArgument,
    id_: Annotated[int, typer.Argument(metavar="ID", min=0)],
    json: Json = False,
) -> None:
    """Show a job that is not done, with its payload."""
    with open_connections(settings, "jobs") as servers:
        job, record = read_job(servers.connection, servers.client, queue, id_, scope=servers.scope)
    if json:
        show(with_payload({"job": job}, record))
        return
    show(
        f"{job.shard} job {job.id} of {job.tenant}" + (f", key {job.key}" if job.key else ""),
        f"{job.action} {job.object}, staged {job.staged_at:%Y-%m-%d %H:%M:%S}"
        + (f", due {job.due:%Y-%m-%d %H:%M:%S}" if job.due else ""),
        f"{job.state}: {job.why}",
        *([f"unique name: {job.unique}"] if job.unique else []),
        *payload_lines(record),
    )


TENANTS_SHOWN = 50
"""Lines of a plan; those with the most jobs."""


@jobs.command("cancel")
@command()
def cancel(  # noqa: PLR0917  options
    settings: Settings,
    queue: QueueArgument,
    ids: Annotated[list[int] | None, typer.Argument(metavar="ID", min=0, help="Ids of the jobs.")] = None,
    tenant: OfTenant = None,
    key: OfKey = None,
    unique: OfName = None,
    state: InState = None,
    all_: Annotated[bool, typer.Option("--all", help="All jobs of the queue.")] = False,
    apply: Apply = False,
    json: Json = False,
) -> None:
    """Cancel jobs: they will have no effect. A worker that has begun to write for one is asked to roll back."""
    of = JobFilter(tuple(ids) if ids else None, tenant, key, unique, state)
    if (of == JobFilter()) is not all_:
        raise InvalidSetting(
            "which? Give ids, --tenant, --key, --unique or --state; or --all alone, for all of the queue"
        )
    with open_connections(settings, "jobs") as servers:
        if not apply:
            counts = count_jobs(servers.connection, servers.client, queue, of, scope=servers.scope)
            show_found(counts if json else counts[:TENANTS_SHOWN], "tenant, state, #jobs", json=json)
            say(f"would cancel {sum(each.jobs for each in counts):,} jobs. {NOTHING_CHANGED}")
            return
        noted = f"Cancel jobs of {queue}", cancel_command(queue, of)
        note_action(servers.connection, whoami(), *noted, scope=servers.scope)
        done = cancel_jobs(servers.connection, servers.client, queue, of, scope=servers.scope)
    if json:
        show_json(done)
        return
    show(f"cancelled {done.cancelled:,} jobs, asked the workers of {done.running:,} more to roll back")
