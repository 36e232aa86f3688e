"""Cancels, retries and moves jobs for operators: planned, then in steps of one transaction each.

Of those that are retried, workers stage dead letters again, and what waits for its time is due now.
"""

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from operator import itemgetter

import structlog

from penstock.channels.commands import RedisClient
from penstock.channels.queue.publishing import make_shard
from penstock.channels.queue.shard import run
from penstock.consuming.letter_retry import DeadLetterRow
from penstock.database.driver_errors import postgres_errors
from penstock.database.registry import RegisteredChannel
from penstock.database.store import Store
from penstock.operating.channels import find_channel
from penstock.operating.jobs.browsing import JobFilter, QueuedJob, find_jobs
from penstock.operating.letters import request_retries

log = structlog.get_logger("penstock.operator")


@dataclass(frozen=True, slots=True)
class JobCount:
    """Jobs of a tenant in the same state."""

    tenant: str
    state: str
    jobs: int


def count_jobs(
    store: Store,
    client: RedisClient | None,
    queue: str,
    job_filter: JobFilter,
    *,
    movable: bool = False,
) -> list[JobCount]:
    """Returns how many jobs a filter takes, or ``move_due`` of those, the most first.

    Raises as ``find_jobs``.
    """
    pages = find_jobs(store, client, queue, job_filter)
    counts = Counter(
        (job.tenant, job.state) for page in pages for job in page if job.is_movable or not movable
    )
    return [JobCount(*group, jobs) for group, jobs in counts.most_common()]


@dataclass(frozen=True, slots=True)
class Cancellation:
    """Numbers of jobs that have no effect now, and of workers that were asked to roll back.

    Workers do so unless they commit at this moment.
    """

    cancelled: int
    running: int


def cancel_jobs(
    store: Store, client: RedisClient | None, queue: str, job_filter: JobFilter
) -> Cancellation:
    """Cancels the jobs that a filter takes.  Raises as ``find_jobs``."""
    cancelled = running = 0
    with postgres_errors(f"cancelling jobs of {queue}"):
        for page in find_jobs(store, client, queue, job_filter):
            ids = [job.id for job in page]
            [(now, asked_workers)] = store.rows("cancel", {"channel": queue, "ids": ids})
            cancelled, running = cancelled + now, running + asked_workers
    log.warning("jobs cancelled", channel=queue, count=cancelled, running=running)
    return Cancellation(cancelled, running)


def move_due(
    store: Store, client: RedisClient, queue: str, job_filter: JobFilter, due: datetime
) -> int:
    """Makes the movable jobs due at another time; returns how many.

    Raises as ``find_jobs``.
    """
    channel, count = find_channel(store, queue), 0
    with postgres_errors(f"moving jobs of {queue}"):
        for page in find_jobs(store, client, queue, job_filter):
            count += move_page(store, client, channel, [job for job in page if job.is_movable], due)
    log.warning("jobs moved", channel=queue, count=count)
    return count


def move_page(
    store: Store,
    client: RedisClient,
    channel: RegisteredChannel,
    page: Sequence[QueuedJob],
    due: datetime,
) -> int:
    """Makes jobs due at another time, unless a worker has begun with them; returns how many."""
    shards = {job.id: job.shard for job in page}
    values = {"channel": channel.name, "due": due, "ids": list(shards)}
    rows = store.rows("move_due", values)
    # The streamer writes them again.  If it does so before they are deleted, it finds them missing,
    # and does so again.
    for shard, pairs in groupby(sorted((shards[id_], id_) for (id_,) in rows), itemgetter(0)):
        queue_shard = make_shard(
            store.scope.namespace, shard, channel.streams or 1, channel.hand or 1
        )
        run(client, queue_shard.delete([str(id_) for _, id_ in pairs]), f"deleting from {shard}")
    return len(rows)


def jobs_command(job_filter: JobFilter, *doing: str) -> str:
    """Returns the command that does something to the jobs that a filter takes.

    ``doing`` is ``"cancel"`` and the queue, for example.
    """
    options = {name: getattr(job_filter, name) for name in ("tenant", "key", "unique", "state")}
    options |= {
        "before": None
        if job_filter.before is None
        else job_filter.before.isoformat(timespec="seconds")
    }
    words = [
        *map(str, job_filter.ids or ()),
        *(word for name, text in options.items() if text for word in (f"--{name}", text)),
    ]
    return shlex.join(["penstock", "jobs", *doing, *(words or ["--all"]), "--apply"])


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
    """Jobs of a tenant in the same state, and what a retry does to each of them.

    They have no tenant if nothing is left of them.
    """

    tenant: str | None
    state: str
    jobs: int
    outcome: str


def retry_jobs(
    store: Store, client: RedisClient, queue: str, job_filter: JobFilter, *, apply: bool = False
) -> list[RetriedJobs]:
    """Returns what a retry does to jobs and dead letters, the most first; does it with ``apply``.

    Raises as ``find_jobs``.
    """
    values = job_filter.parameters(queue)
    channel = find_channel(store, queue)
    counts: Counter[tuple[str | None, str, str]] = Counter()
    with postgres_errors(f"retrying jobs of {queue}"):
        [(now,)] = store.connection.execute("SELECT clock_timestamp()", binary=True).fetchall()
        for page in find_jobs(store, client, queue, job_filter):
            counts.update((job.tenant, job.state, _find_outcome(job)) for job in page)
            due = [job for job in page if _find_outcome(job) == DUE_NOW]
            if apply and due:
                move_page(store, client, channel, due, now)
        rows = (
            store.execute("letters", values, binary=True)
            if job_filter.state in {None, "dead"}
            else ()
        )
        letters = [DeadLetterRow(*row) for row in rows]
        counts.update((letter.key, "dead letter", STAGED_AGAIN) for letter in letters)
        for state, count in store.execute("ended", values, binary=True):
            counts[None, state, _LEFT_ALONE[state]] = count
    if apply:
        request_retries(store, letters)
        retried = sum(
            jobs for (_, _, outcome), jobs in counts.items() if outcome in {STAGED_AGAIN, DUE_NOW}
        )
        log.warning("jobs retried", channel=queue, count=retried)
    return [
        RetriedJobs(tenant, state, jobs, outcome)
        for (tenant, state, outcome), jobs in counts.most_common()
    ]


def _find_outcome(job: QueuedJob) -> str:
    if job.state != "delayed":
        return _LEFT_ALONE[job.state]
    return (
        DUE_NOW if job.is_movable else "nothing: another job could take its unique name meanwhile"
    )
