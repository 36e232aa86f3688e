"""Jobs are tried again by operators: dead letters are staged again by the workers, and what waits for its time is due now."""

from collections import Counter
from dataclasses import dataclass

import structlog

from penstock.channels.commands import RedisClient
from penstock.consuming.letter_retry import DeadLetterRow
from penstock.database.connections import Connection
from penstock.database.driver_errors import postgres_errors
from penstock.database.statements import statements
from penstock.operating.channels import find_channel
from penstock.operating.jobs.browsing import JobFilter, QueuedJob, find_jobs
from penstock.operating.jobs.cancellation import move_page
from penstock.operating.letters import request_retries
from penstock.records import DEFAULT_SCOPE, Scope

log = structlog.get_logger("penstock.operator")

STAGED_AGAIN = "a worker stages it again, as a new job"
DUE_NOW = "it is due now"

_LEFT_ALONE = {
    "leased": "nothing: a worker has it",
    "waiting": "nothing: it is due already",
    "dead": "nothing: it becomes a dead letter within seconds",
    "cancelled": "nothing: it was cancelled",
    "done": "nothing: it is done, was retried as a new job, or was never there",
}


@dataclass(frozen=True, slots=True)
class RetriedJobs:
    """Jobs of a tenant in the same state, and what a retry does to each of them; without a tenant if nothing is left of them."""

    tenant: str | None
    state: str
    jobs: int
    outcome: str


def retry_jobs(
    connection: Connection,
    client: RedisClient,
    queue: str,
    of: JobFilter,
    *,
    apply: bool = False,
    scope: Scope = DEFAULT_SCOPE,
) -> list[RetriedJobs]:
    """What a retry does to the jobs and the dead letters that a filter takes, the most first; does it with ``apply``.

    Raises as ``find_jobs``.
    """
    sql, values = statements("penstock.operating.jobs", scope.schema), of.parameters(queue)
    channel = find_channel(connection, queue, scope=scope)
    counts: Counter[tuple[str | None, str, str]] = Counter()
    with postgres_errors(f"retrying jobs of {queue}"):
        [(now,)] = connection.execute("SELECT clock_timestamp()", binary=True).fetchall()
        for page in find_jobs(connection, client, queue, of, scope=scope):
            counts.update((job.tenant, job.state, _find_outcome(job)) for job in page)
            due = [job for job in page if _find_outcome(job) == DUE_NOW]
            if apply and due:
                move_page(connection, client, channel, due, now, scope)
        rows = connection.execute(sql["letters"], values, binary=True) if of.state in {None, "dead"} else ()
        letters = [DeadLetterRow(*row) for row in rows]
        counts.update((letter.key, "dead letter", STAGED_AGAIN) for letter in letters)
        for state, count in connection.execute(sql["ended"], values, binary=True):
            counts[None, state, _LEFT_ALONE[state]] = count
    if apply:
        request_retries(connection, letters, scope=scope)
        retried = sum(jobs for (_, _, outcome), jobs in counts.items() if outcome in {STAGED_AGAIN, DUE_NOW})
        log.warning("jobs retried", channel=queue, count=retried)
    return [RetriedJobs(tenant, state, jobs, outcome) for (tenant, state, outcome), jobs in counts.most_common()]


def _find_outcome(job: QueuedJob) -> str:
    if job.state != "delayed":
        return _LEFT_ALONE[job.state]
    return DUE_NOW if job.is_movable else "nothing: another job could take its unique name meanwhile"
