"""Jobs are cancelled or retried by operators, or are to be due at another time: planned, and then in steps, each a transaction of its own.

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
from penstock.operating.jobs.browsing import JobFilter, JobState, QueuedJob, find_jobs
from penstock.operating.letters import request_retries

log = structlog.get_logger("penstock.operator")


@dataclass(frozen=True, slots=True)
class JobCount:
    """Jobs of a tenant in the same state."""

    tenant: str
    state: JobState
    jobs: int


def count_jobs(
    store: Store, client: RedisClient | None, queue: str, of: JobFilter, *, movable: bool = False
) -> list[JobCount]:
    """How many jobs a filter takes, or ``move_due`` of those, the most first.  Raises as ``find_jobs``."""
    pages = find_jobs(store, client, queue, of)
    counts = Counter((job.tenant, job.state) for page in pages for job in page if job.is_movable or not movable)
    return [JobCount(*what, jobs) for what, jobs in counts.most_common()]


@dataclass(frozen=True, slots=True)
class Cancellation:
    """How many jobs have no effect now, and how many workers were asked to roll back: they do, unless they commit at this moment."""

    cancelled: int
    running: int


def cancel_jobs(store: Store, client: RedisClient | None, queue: str, of: JobFilter) -> Cancellation:
    """Cancels the jobs that a filter takes.  Raises as ``find_jobs``."""
    cancelled = running = 0
    with postgres_errors(f"cancelling jobs of {queue}"):
        for page in find_jobs(store, client, queue, of):
            ids = [job.id for job in page]
            [(now, asked)] = store.rows("cancel", {"channel": queue, "ids": ids})
            cancelled, running = cancelled + now, running + asked
    log.warning("jobs cancelled", channel=queue, count=cancelled, running=running)
    return Cancellation(cancelled, running)


def move_due(store: Store, client: RedisClient, queue: str, of: JobFilter, due: datetime) -> int:
    """Has the jobs that are movable be due at another time; returns how many.  Raises as ``find_jobs``."""
    channel, moved = find_channel(store, queue), 0
    with postgres_errors(f"moving jobs of {queue}"):
        for page in find_jobs(store, client, queue, of):
            moved += move_page(store, client, channel, [job for job in page if job.is_movable], due)
    log.warning("jobs moved", channel=queue, count=moved)
    return moved


def move_page(
    store: Store, client: RedisClient, channel: RegisteredChannel, page: Sequence[QueuedJob], due: datetime
) -> int:
    """Has some jobs be due at another time, but for those that a worker has begun with meanwhile; returns how many."""
    shards = {job.id: job.shard for job in page}
    values = {"channel": channel.name, "due": due, "ids": list(shards)}
    rows = store.rows("move_due", values)
    # The streamer writes them again.  If it does so before they are deleted, it finds them missing, and does so again.
    for shard, some in groupby(sorted((shards[id_], id_) for (id_,) in rows), itemgetter(0)):
        made = make_shard(store.scope.namespace, shard, channel.streams or 1, channel.hand or 1)
        run(client, made.delete([str(id_) for _, id_ in some]), f"deleting from {shard}")
    return len(rows)


def jobs_command(of: JobFilter, *doing: str) -> str:
    """The command that does something to the jobs that a filter takes: ``"cancel"`` and the queue, for example."""
    options = {name: getattr(of, name) for name in ("tenant", "key", "unique", "state")}
    options |= {"before": None if of.before is None else of.before.isoformat(timespec="seconds")}
    words = [*map(str, of.ids or ()), *(word for name, text in options.items() if text for word in (f"--{name}", text))]
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
    """Jobs of a tenant in the same state, and what a retry does to each of them; without a tenant if nothing is left of them."""

    tenant: str | None
    state: str
    jobs: int
    outcome: str


def retry_jobs(
    store: Store, client: RedisClient, queue: str, of: JobFilter, *, apply: bool = False
) -> list[RetriedJobs]:
    """What a retry does to the jobs and the dead letters that a filter takes, the most first; does it with ``apply``.

    Raises as ``find_jobs``.
    """
    values = of.parameters(queue)
    channel = find_channel(store, queue)
    counts: Counter[tuple[str | None, str, str]] = Counter()
    with postgres_errors(f"retrying jobs of {queue}"):
        [(now,)] = store.connection.execute("SELECT clock_timestamp()", binary=True).fetchall()
        for page in find_jobs(store, client, queue, of):
            counts.update((job.tenant, job.state, _find_outcome(job)) for job in page)
            due = [job for job in page if _find_outcome(job) == DUE_NOW]
            if apply and due:
                move_page(store, client, channel, due, now)
        rows = store.execute("letters", values, binary=True) if of.state in {None, "dead"} else ()
        letters = [DeadLetterRow(*row) for row in rows]
        counts.update((letter.key, "dead letter", STAGED_AGAIN) for letter in letters)
        for state, count in store.execute("ended", values, binary=True):
            counts[None, state, _LEFT_ALONE[state]] = count
    if apply:
        request_retries(store, letters)
        retried = sum(jobs for (_, _, outcome), jobs in counts.items() if outcome in {STAGED_AGAIN, DUE_NOW})
        log.warning("jobs retried", channel=queue, count=retried)
    return [RetriedJobs(tenant, state, jobs, outcome) for (tenant, state, outcome), jobs in counts.most_common()]


def _find_outcome(job: QueuedJob) -> str:
    if job.state != "delayed":
        return _LEFT_ALONE[job.state]
    return DUE_NOW if job.is_movable else "nothing: another job could take its unique name meanwhile"
