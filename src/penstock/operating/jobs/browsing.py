"""Reads jobs that are not done, in pages: from Postgres, and from Redis what each waits for."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import chain, islice
from typing import Any, Literal, TypeVar, get_args

from penstock.channels.commands import RedisClient
from penstock.channels.queue.inspection import explain_messages
from penstock.database.statements import quote
from penstock.database.store import Store
from penstock.declaring.outcomes import RESERVED
from penstock.declaring.unique import name_as_staged
from penstock.errors import InvalidName, ServerUnavailable, Unknown
from penstock.operating.channels import find_channel
from penstock.parsing import find_number
from penstock.records import (
    BEGINNING,
    Record,
    RecordId,
    Scope,
    Shard,
    ShardName,
    parse_moment,
    to_time,
)
from penstock.streaming.queues import NEAR, make_queued

T = TypeVar("T")

JobState = Literal["waiting", "leased", "delayed", "dead"]
"""``dead``: its deadline has passed, and a worker is about to make it a dead letter."""

PAGE = 500
"""Jobs that are read at once."""

NOT_IN_REDIS = "the streamer has not written it to Redis"


@dataclass(frozen=True, slots=True)
class JobFilter:
    """A choice of jobs; None leaves an attribute open.

    Attributes:
        ids: Ids of the jobs.
        tenant: Only jobs of this tenant.
        key: Only jobs of this key.
        unique: Only the job with this unique name.
        state: Only jobs in this state. `dead` finds few jobs: dead jobs soon become dead letters.
        before: Only jobs that were staged before this time: ISO 8601, or 2h for two hours ago.
        up_to: Only jobs up to this id: none that is staged later.
    """

    ids: Sequence[int] | None = None
    tenant: str | None = None
    key: str | None = None
    unique: str | None = None
    state: JobState | None = None
    before: datetime | None = None
    up_to: int | None = None

    def parameters(self, queue: str) -> dict[str, Any]:
        """Returns a statement's parameters: all but the state, of which Postgres does not know."""
        ids = None if self.ids is None else list(self.ids)
        names = {"tenant": self.tenant, "key": self.key, "unique": self.unique}
        limits = {"before": self.before, "up_to": self.up_to}
        return {"channel": queue, "ids": ids, **names, **limits, "reserved": RESERVED}


def parse_filter(fields: Mapping[str, str]) -> JobFilter:
    """Returns the filter that the fields of a form name; ``id`` has ids with commas between.

    Raises ``InvalidName`` or ``InvalidSetting``.
    """
    texts = {
        name: fields.get(name) or None
        for name in ("tenant", "key", "unique", "state", "before", "up_to", "id")
    }
    numbers = [find_number(word.encode()) for word in (texts["id"] or "").split(",") if word]
    up_to = None if texts["up_to"] is None else find_number(texts["up_to"].encode())
    if None in numbers or (texts["up_to"] is not None and up_to is None):
        raise InvalidName("id: give the numbers of jobs, comma-separated")
    state = next((name for name in get_args(JobState) if name == texts["state"]), None)
    if state != texts["state"]:
        raise InvalidName(f"state {texts['state']!r}: give one of {', '.join(get_args(JobState))}")
    moment = None if texts["before"] is None else parse_moment(texts["before"])
    staged_before = datetime.now(UTC) - moment if isinstance(moment, timedelta) else moment
    ids = [number for number in numbers if number is not None] or None
    return JobFilter(
        ids, texts["tenant"], texts["key"], texts["unique"], state, staged_before, up_to
    )


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job that is not done."""

    id: RecordId  # the job: ``job.id`` in its handler
    shard: ShardName
    tenant: str
    key: str  # its key within the tenant; empty if it has none
    unique: str  # its unique name; empty if it has none
    action: str
    object: str
    staged_at: datetime | None
    due: datetime | None  # when it may be handed over; None if that was said by nobody
    state: JobState | Literal["unknown"]  # ``unknown`` if Redis was not asked, and has it
    why: str  # what it waits for, as a sentence

    @property
    def is_movable(self) -> bool:
        """Returns whether it may be due at another time.

        It is not at work, and has no unique name, which it would give up meanwhile.
        """
        return self.state in {"waiting", "delayed"} and not self.unique


def read_without_redis(
    client: RedisClient, read: Callable[[RedisClient | None], T]
) -> tuple[T, str | None]:
    """Returns what is read, without Redis if it does not answer, and then its error.

    Raises as ``read``.
    """
    try:
        return read(client), None
    except ServerUnavailable as error:  # Postgres' is raised again
        return read(None), str(error)


def list_jobs(
    store: Store,
    client: RedisClient | None,
    channel: str,
    job_filter: JobFilter = JobFilter(),
    *,
    after_id: int = 0,
    limit: int = 50,
) -> list[QueuedJob]:
    """Returns a page of jobs by id; ``after_id`` is the last id of the previous page.

    Without a client, their states are as far as Postgres knows, which is none for those in Redis.

    Raises ``Unknown``, ``ServerUnavailable`` or ``ForeignQueue``.
    """
    pages = find_jobs(store, client, channel, job_filter, after_id=after_id, size=min(limit, PAGE))
    return list(islice(chain.from_iterable(pages), limit))


def find_jobs(
    store: Store,
    client: RedisClient | None,
    channel: str,
    job_filter: JobFilter,
    *,
    after_id: int = 0,
    size: int = PAGE,
) -> Iterator[list[QueuedJob]]:
    """Yields pages of the jobs that a filter takes, by id, up to the newest now.

    Raises as ``list_jobs``.
    """
    check_queue(store, channel)
    doing = f"reading the jobs of {channel}"
    values = {**job_filter.parameters(channel), "newest": store.value("newest_id", doing=doing)}
    reads_headers = bool(job_filter.key or job_filter.unique) or _may_read_headers(store)
    while True:
        rows = store.rows(
            "jobs" if reads_headers else "jobs_without_headers",
            {**values, "after": after_id, "limit": size},
            doing=doing,
        )
        jobs = [_make_job(channel, *row) for row in rows]
        jobs = _add_states(client, jobs, store.scope)
        yield [job for job in jobs if job_filter.state in {None, job.state}]
        if len(rows) < size:
            return
        after_id = rows[-1][0]


def _may_read_headers(store: Store) -> bool:
    """Returns whether the role reads payloads.

    Otherwise it sees no keys, unique names and times that are in Postgres alone.
    """
    tables = {"staged": "staged_records", "letters": "dead_letters"}
    quoted = {name: quote(store.scope.schema, table) for name, table in tables.items()}
    return bool(store.value("may_read_headers", quoted, doing="reading a role's rights"))


def check_queue(store: Store, channel: str) -> None:
    """Raises ``Unknown`` unless it is a registered queue."""
    if not (registered := find_channel(store, channel)).traits.has_jobs:
        raise Unknown(
            f"{channel} is of kind {registered.kind}: it has records, not jobs; "
            f"penstock tail {channel}"
        )


def _make_job(channel: str, *row: Any) -> QueuedJob:
    *message, shard, is_refused, now = row
    queued = make_queued(BEGINNING, message)
    staged_at = to_time(queued.staged_us / 1_000_000)
    due = None if queued.due_ms is None else to_time(queued.due_ms / 1000)
    is_delayed = due is not None and due > now
    why = NOT_IN_REDIS
    if is_refused:
        why = "its tenant has no room in Redis"
    elif due is not None and due - now > NEAR:
        why = "it is given to Redis an hour before it is due"
    name = ShardName(channel, Shard(shard))
    facts = (
        queued.id,
        name,
        queued.tenant,
        queued.key,
        name_as_staged(queued.unique[0]),
        row[2],
        row[3],
        staged_at,
        due,
    )
    return QueuedJob(*facts, "delayed" if is_delayed else "waiting", why)


def _add_states(client: RedisClient | None, jobs: list[QueuedJob], scope: Scope) -> list[QueuedJob]:
    """Returns the jobs with what Redis says of them, as far as it has them and is asked."""
    if client is None or not jobs:
        return [
            replace(
                job,
                state="delayed" if job.state == "delayed" else "unknown",
                why="Redis was not asked",
            )
            if job.why == NOT_IN_REDIS
            else job
            for job in jobs
        ]
    explained = explain_messages(
        client, scope.namespace, ((job.shard, str(job.id)) for job in jobs)
    )

    def add(job: QueuedJob) -> QueuedJob:
        message = explained[str(job.id)]
        if message is None or message.state not in get_args(JobState):
            return job
        return replace(job, state=message.state, why=message.text)  # type: ignore[arg-type]  # it was looked up

    return [add(job) for job in jobs]


@dataclass(frozen=True, slots=True)
class ReportedJob:
    """A job with its payload; both are None once it has ended.

    It has what its handler has reported, and its result as JSON.
    """

    job: QueuedJob | None
    record: Record | None
    progress: float | None
    note: str | None
    result_json: str | None
    done_at: datetime | None


def read_job(store: Store, client: RedisClient | None, channel: str, id_: int) -> ReportedJob:
    """Returns a job that is not done, or one that is and has left progress or a result.

    Raises ``Unknown``, ``ServerUnavailable`` or ``ForeignQueue``.
    """
    jobs = list_jobs(store, client, channel, JobFilter((id_,)))
    values = {"channel": channel, "id": id_}
    [(progress, note, result, done_at, data, *fields)] = store.rows(
        "payload", values, doing="reading a job"
    )
    reported = progress, note, result, done_at
    if not jobs or data is None:
        if progress is None and result is None:
            raise Unknown(
                f"{channel} has no job {id_}: it is done, was cancelled, or is a dead letter; "
                f"penstock trace {id_} says which"
            )
        return ReportedJob(None, None, *reported)
    [job] = jobs
    facts = job.id, job.tenant, job.action, job.object, data, *fields
    return ReportedJob(job, Record(channel, job.shard.shard, BEGINNING, *facts), *reported)


def find_group_name(store: Store, channel: str, id_: int) -> str | None:
    """Returns the name of the group that a job was staged in; None without a group."""
    values = {"channel": channel, "id": id_}
    names = store.rows("group_of", values, doing="reading the group of a job")
    return names[0][0] if names else None
