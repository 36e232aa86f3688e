"""What has become of jobs, read by the application through its own session or connection: an end, progress, a result; of a group, how many are left."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy.orm import Session, scoped_session

from penstock.parsing import parse_json
from penstock.records import DEFAULT_SCOPE
from penstock.staging.driver_connections import read_rows
from penstock.staging.explicit import Target, resolve_async
from penstock.staging.rules import Declarations, find_attachments

if TYPE_CHECKING:
    from penstock.staging.explicit import AsyncTarget


@dataclass(frozen=True, slots=True)
class JobReport:
    """What is known of a job.

    Attributes:
        id: Its id, as staging has returned it.
        has_ended: True if no attempt will be made any more: it is done, was cancelled, or is a dead letter.  An id
            that was never staged is not told apart from a job that is done.
        progress: The part that is done, as the handler said last; None if it has said nothing.
        note: The handler's word about it.
        result: What the handler has set; None if it has set nothing, or the job is not done.
        done_at: Time of the result; None if there is none.
    """

    id: int
    has_ended: bool
    progress: float | None
    note: str | None
    result: Any
    done_at: datetime | None


@dataclass(frozen=True, slots=True)
class GroupReport:
    """What is known of a group of jobs.

    Attributes:
        name: As ``stage_many`` was given it.
        ids: Its members.
        remaining: How many have not ended.
        dead: How many are dead letters now; one that is retried is another job, which is no member.
        ended_at: Time at which no member was left, and what follows was staged; None before.
        results: What the handlers of members have set, by their ids, if that was asked for.
    """

    name: str
    ids: tuple[int, ...]
    remaining: int
    dead: int
    ended_at: datetime | None
    results: dict[int, Any]


_JOB = """
    SELECT NOT EXISTS (SELECT FROM {schema}.staged_records r WHERE r.id = w.id), n.progress, n.note,
           CAST(d.result AS text), d.done_at
    FROM (VALUES (CAST({wanted} AS bigint))) AS w (id)
    LEFT JOIN {schema}.job_notes n ON n.record_id = w.id
    LEFT JOIN {schema}.job_results d ON d.record_id = w.id
"""

_GROUP = """
    SELECT CAST(array_to_json(g.members) AS text),
           (SELECT count(*) FROM {schema}.staged_records r WHERE r.id = ANY (g.members)),
           (SELECT count(*)
            FROM (SELECT unnest(g.members)
                  INTERSECT  -- a join, or ANY, would compare each dead letter with each member
                  SELECT l.record_id FROM {schema}.dead_letters l WHERE l.channel = g.channel) d),
           g.ended_at,
           (SELECT CAST(jsonb_object_agg(d.record_id, d.result) AS text)
            FROM {schema}.job_results d
            WHERE CAST(CAST({with_results} AS text) AS boolean) AND d.record_id = ANY (g.members))
    FROM {schema}.job_groups g
    WHERE g.name = CAST({wanted} AS text)
"""


def find_job(target: Target, job_id: int, *, pipeline: Declarations | None = None) -> JobReport:
    """What is known of a job.  Notes and results are kept for the queue's ``keep``.

    Args:
        target: A session, or a connection of SQLAlchemy, psycopg or Django.
        job_id: As ``stage`` of a queue has returned it.
        pipeline: The pipeline, if it is not attached to the session and has another schema than ``penstock``.

    Raises:
        NotAttached: The target is to be awaited: ``find_job_async``.
    """
    rows = read_rows(target, _find_schema(target, pipeline), _JOB, {"wanted": job_id})
    [(has_ended, progress, note, result, done_at)] = rows
    return JobReport(job_id, has_ended, progress, note, result and parse_json(result), done_at)


async def find_job_async(target: "AsyncTarget", job_id: int, *, pipeline: Declarations | None = None) -> JobReport:
    """``find_job`` for an ``AsyncSession``, or an ``AsyncConnection`` of SQLAlchemy; raises as it does."""
    report: JobReport = await _await(target, find_job, job_id, pipeline=pipeline)
    return report


def find_group(
    target: Target, name: str, *, with_results: bool = False, pipeline: Declarations | None = None
) -> GroupReport | None:
    """What is known of a group of jobs; None if there is none of this name, or its queue's ``keep`` has passed since its end.

    Args:
        target: As ``find_job``, and so is ``pipeline``.
        name: As ``stage_many`` was given it; of a job that follows a group, ``job.headers["group"]``.
        with_results: Whether the members' results are read as well.
        pipeline: The pipeline.

    Raises:
        NotAttached: The target is to be awaited: ``find_group_async``.
    """
    values = {"wanted": name, "with_results": "true" if with_results else "false"}
    rows = read_rows(target, _find_schema(target, pipeline), _GROUP, values)
    for ids, remaining, dead, ended_at, results in rows:
        results_by_id = {int(id_): result for id_, result in parse_json(results or "{}").items()}
        return GroupReport(name, tuple(parse_json(ids)), remaining, dead, ended_at, results_by_id)
    return None


async def find_group_async(
    target: "AsyncTarget", name: str, *, with_results: bool = False, pipeline: Declarations | None = None
) -> GroupReport | None:
    """``find_group`` for an ``AsyncSession``, or an ``AsyncConnection`` of SQLAlchemy; raises as it does."""
    report: GroupReport | None = await _await(target, find_group, name, with_results=with_results, pipeline=pipeline)
    return report


async def _await(target: Any, function: Callable[..., Any], *arguments: object, **options: object) -> Any:
    resolved = resolve_async(target, getattr(function, "__name__", ""))
    return await resolved.run_sync(function, *arguments, **options)


def _find_schema(target: Any, pipeline: Declarations | None) -> str:
    if pipeline is not None:
        return pipeline.scope.schema
    session = target() if isinstance(target, scoped_session) else target
    attached = find_attachments(session) if isinstance(session, Session) else ()
    return attached[0].pipeline.scope.schema if attached else DEFAULT_SCOPE.schema
