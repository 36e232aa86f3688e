"""Jobs are cancelled by operators: planned, and then in steps, each a transaction of its own."""

import shlex
from collections import Counter
from dataclasses import dataclass

import structlog

from penstock.channels.commands import RedisClient
from penstock.database.connections import Connection
from penstock.database.driver_errors import postgres_errors
from penstock.database.statements import statements
from penstock.operating.jobs.browsing import JobFilter, JobState, find_jobs
from penstock.records import DEFAULT_SCOPE, Scope

log = structlog.get_logger("penstock.operator")


@dataclass(frozen=True, slots=True)
class JobCount:
    """Jobs of a tenant in the same state."""

    tenant: str
    state: JobState
    jobs: int


def count_jobs(
    connection: Connection, client: RedisClient | None, queue: str, of: JobFilter, *, scope: Scope = DEFAULT_SCOPE
) -> list[JobCount]:
    """How many jobs a filter takes, the most first.  Raises as ``find_jobs``."""
    pages = find_jobs(connection, client, queue, of, scope=scope)
    counts = Counter((job.tenant, job.state) for page in pages for job in page)
    return [JobCount(*what, jobs) for what, jobs in counts.most_common()]


@dataclass(frozen=True, slots=True)
class Cancellation:
    """How many jobs have no effect now, and how many workers were asked to roll back: they do, unless they commit at this moment."""

    cancelled: int
    running: int


def cancel_jobs(
    connection: Connection, client: RedisClient | None, queue: str, of: JobFilter, *, scope: Scope = DEFAULT_SCOPE
) -> Cancellation:
    """Cancels the jobs that a filter takes, up to the newest of this moment.  Raises as ``find_jobs``."""
    sql = statements("penstock.operating.jobs", scope.schema)
    cancelled = running = 0
    with postgres_errors(f"cancelling jobs of {queue}"):
        [(newest,)] = connection.execute(sql["newest_id"]).fetchall()
        for page in find_jobs(connection, client, queue, of, scope=scope):
            ids = [job.id for job in page if job.id <= newest]
            [(now, asked)] = connection.execute(sql["cancel"], {"channel": queue, "ids": ids}).fetchall()
            cancelled, running = cancelled + now, running + asked
            if len(ids) < len(page):
                break
    log.warning("jobs cancelled", channel=queue, count=cancelled, running=running)
    return Cancellation(cancelled, running)


def cancel_command(queue: str, of: JobFilter) -> str:
    """The command that cancels the jobs that a filter takes."""
    named = {name: getattr(of, name) for name in ("tenant", "key", "unique", "state")}
    words = [*map(str, of.ids or ()), *(word for name, text in named.items() if text for word in (f"--{name}", text))]
    return shlex.join(["penstock", "jobs", "cancel", queue, *(words or ["--all"]), "--apply"])
