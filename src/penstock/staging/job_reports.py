"""Reads the state of jobs through the application's own session or connection.

End, progress, result, and group.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy.orm import Session, scoped_session

from penstock.parsing import parse_json
from penstock.records import DEFAULT_SCOPE
from penstock.staging.driver_connections import read_rows
from penstock.staging.explicit import Target, resolve_async
from penstock.staging.rows import Rows, refusals_explained
from penstock.staging.rules import Declarations, find_attachments

if TYPE_CHECKING:
    from penstock.staging.explicit import AsyncTarget


@dataclass(frozen=True, slots=True)
class JobReport:
    """State of a job, as ``find_job`` reads it.

    Attributes:
        id: Its id, as staging has returned it.
        has_ended: True if no attempt will be made any more: it is done, was cancelled, or is a dead
            letter.  An id that was never staged looks like a job that is done.
        progress: Completed part, 0 to 1, as the handler reported it last; None without a report.
        note: The handler's text beside it.
        result: What the handler has set; None if it has set nothing or the job is not done.
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
    """State of a group of jobs, as ``find_group`` reads it.

    Attributes:
        name: The ``group`` of ``stage_many``.
        ids: Its members.
        remaining: How many have not ended.
        dead: How many are dead letters now; one that is retried is another job, which is no member.
        ended_at: When the last member ended and the following job was staged; None before.
        results: Results that handlers have set, by job id; empty without ``with_results``.
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
    """Reads the state of a job.  Notes and results are kept for the queue's ``keep``.

    Args:
        target: A session, or a connection of SQLAlchemy, psycopg or Django.
        job_id: The id that ``stage`` of a queue returned.
        pipeline: The pipeline, if it is not attached to the session and has another schema than
            ``penstock``.

    Raises:
        NotAttached: The target is async: ``find_job_async``.
    """
    rows = _read(target, pipeline, _JOB, {"wanted": job_id})
    [(has_ended, progress, note, result, done_at)] = rows
    return JobReport(job_id, has_ended, progress, note, result and parse_json(result), done_at)


async def find_job_async(
    target: "AsyncTarget", job_id: int, *, pipeline: Declarations | None = None
) -> JobReport:
    """``find_job`` for an ``AsyncSession``, or an ``AsyncConnection`` of SQLAlchemy.

    Raises as it does.
    """
    report: JobReport = await _await(target, find_job, job_id, pipeline=pipeline)
    return report


def find_group(
    target: Target, name: str, *, with_results: bool = False, pipeline: Declarations | None = None
) -> GroupReport | None:
    """Reads the state of a group of jobs.

    None if it does not exist, or ended longer ago than the queue's ``keep``.

    Args:
        target: As ``find_job``, and so is ``pipeline``.
        name: The ``group`` of ``stage_many``; the following job has it in ``job.headers["group"]``.
        with_results: Also reads the members' results.
        pipeline: The pipeline.

    Raises:
        NotAttached: The target is async: ``find_group_async``.
    """
    values = {"wanted": name, "with_results": "true" if with_results else "false"}
    rows = _read(target, pipeline, _GROUP, values)
    for ids, remaining, dead, ended_at, results in rows:
        results_by_id = {int(id_): result for id_, result in parse_json(results or "{}").items()}
        return GroupReport(name, tuple(parse_json(ids)), remaining, dead, ended_at, results_by_id)
    return None


async def find_group_async(
    target: "AsyncTarget",
    name: str,
    *,
    with_results: bool = False,
    pipeline: Declarations | None = None,
) -> GroupReport | None:
    """``find_group`` for an ``AsyncSession``, or an ``AsyncConnection`` of SQLAlchemy.

    Raises as it does.
    """
    report: GroupReport | None = await _await(
        target, find_group, name, with_results=with_results, pipeline=pipeline
    )
    return report


def _read(
    target: Target, pipeline: Declarations | None, query: str, values: dict[str, Any]
) -> Rows:
    with refusals_explained():
        return read_rows(target, _find_schema(target, pipeline), query, values)


async def _await(
    target: Any, function: Callable[..., Any], *arguments: object, **options: object
) -> Any:
    resolved = resolve_async(target, getattr(function, "__name__", ""))
    return await resolved.run_sync(function, *arguments, **options)


def _find_schema(target: Any, pipeline: Declarations | None) -> str:
    if pipeline is not None:
        return pipeline.scope.schema
    session = target() if isinstance(target, scoped_session) else target
    attached = find_attachments(session) if isinstance(session, Session) else ()
    return attached[0].pipeline.scope.schema if attached else DEFAULT_SCOPE.schema
