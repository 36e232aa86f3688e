"""What has become of jobs, read by the application through its own session or connection: an end, progress, a result."""

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, text
from sqlalchemy.orm import Session, scoped_session

from penstock.database.statements import quote
from penstock.database.tables import staged_records
from penstock.errors import NotAttached
from penstock.parsing import parse_json
from penstock.records import DEFAULT_SCOPE
from penstock.staging.driver_connections import read_directly
from penstock.staging.explicit import Target
from penstock.staging.rows import Rows
from penstock.staging.rules import Declarations, find_attachments

if TYPE_CHECKING:
    from penstock.staging.explicit import AsyncTarget


@dataclass(frozen=True, slots=True)
class JobReport:
    """What is known of a job.

    Attributes:
        id: Its id, as staging has returned it.
        has_ended: True if no attempt will be made any more: it is done, was cancelled, or is a dead letter.
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


_JOB = """
    SELECT NOT EXISTS (SELECT FROM {schema}.staged_records r WHERE r.id = w.id), n.progress, n.note,
           CAST(d.result AS text), d.done_at
    FROM (VALUES (CAST({id} AS bigint))) AS w (id)
    LEFT JOIN {schema}.job_notes n ON n.record_id = w.id
    LEFT JOIN {schema}.job_results d ON d.record_id = w.id
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
    schema = _find_schema(target, pipeline)
    [(has_ended, progress, note, result, done_at)] = _read(
        target, schema, _JOB.format(schema=quote(schema), id=int(job_id))
    )
    return JobReport(job_id, has_ended, progress, note, result and parse_json(result), done_at)


async def find_job_async(target: "AsyncTarget", job_id: int, *, pipeline: Declarations | None = None) -> JobReport:
    """``find_job`` for an ``AsyncSession``, or an ``AsyncConnection`` of SQLAlchemy.

    Raises:
        NotAttached: The target is another one.
    """
    given: Any = target
    own = given() if hasattr(given, "session_factory") else given
    if not hasattr(own, "run_sync"):
        raise NotAttached(f"find_job_async() takes an AsyncSession or an AsyncConnection, not {type(own).__name__}")
    found: JobReport = await own.run_sync(find_job, job_id, pipeline=pipeline)
    return found


def _find_schema(target: Any, pipeline: Declarations | None) -> str:
    if pipeline is not None:
        return pipeline.scope.schema
    session = target() if isinstance(target, scoped_session) else target
    attached = find_attachments(session) if isinstance(session, Session) else ()
    return attached[0].pipeline.scope.schema if attached else DEFAULT_SCOPE.schema


def _read(target: Any, schema: str, sql: str) -> Rows:
    if isinstance(target, Session | scoped_session):
        target = target.connection(bind_arguments={"clause": staged_records(schema)})
    if isinstance(target, Connection):
        return target.execute(text(sql)).all()
    try:
        return read_directly(target, sql)
    except TypeError as error:
        raise NotAttached(f"find_job() {error}") from error
