"""Cancels and retries jobs in the application's transaction.

A job has its effect or is cancelled, never both.

A job's staged row means that it is not done.  A worker deletes it in the transaction of the effect;
a cancel deletes it without one.  If a worker has deleted it and not committed yet, the cancel does
not wait: it asks the worker to roll back.  Two transactions that cancel the same job do wait for
each other, since either may be rolled back.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy.orm import Session, scoped_session

from penstock.database.statements import int_array
from penstock.declaring.kinds import Queue
from penstock.errors import InvalidRecord
from penstock.staging.driver_connections import is_async_driver, read_by_async_psycopg, read_rows
from penstock.staging.explicit import (
    Target,
    find_attachment,
    refuse_async,
    require_pipeline,
    resolve_async,
)
from penstock.staging.payload import key_text
from penstock.staging.rows import Rows, refusals_explained
from penstock.staging.rules import Declarations

if TYPE_CHECKING:
    from penstock.staging.explicit import AsyncTarget


@dataclass(frozen=True, slots=True)
class CancelledJobs:
    """Result of a cancel; jobs that are done or never existed are in neither field.

    Attributes:
        ids: Those that have no effect, once the transaction is committed.
        running: Those whose worker has begun to write.  It rolls back, unless it commits within the
            next second.
    """

    ids: tuple[int, ...]
    running: tuple[int, ...]


_CANCEL = """
    SELECT job, is_running
    FROM {schema}.cancel_jobs(
        CAST({channel} AS text), CAST(CAST({ids} AS text) AS bigint[]), CAST({unique} AS text), CAST({tenant} AS text)
    )
"""  # noqa: E501  SQL
"""All values are sent as text, which every driver can."""

_RETRY = """
    UPDATE {schema}.dead_letters
    SET retry_requested_at = clock_timestamp()
    WHERE channel = CAST({channel} AS text) AND record_id = ANY (CAST(CAST({ids} AS text) AS bigint[]))
    RETURNING record_id
"""  # noqa: E501  SQL


def cancel(
    target: Target,
    *ids: int,
    of: Queue,
    unique: str | None = None,
    tenant: object = None,
    pipeline: Declarations | None = None,
) -> CancelledJobs:
    """Cancels jobs of a queue in the transaction of a session or a connection.

    A session is flushed first.

    Args:
        target: A session with a pipeline attached; or a connection of SQLAlchemy, psycopg or
            Django.
        *ids: The jobs, by ``job.id``.
        of: The queue.
        unique: The unique name of a job, beside those ids.
        tenant: Only jobs of this tenant: for names that are unique within one.
        pipeline: The pipeline, for a connection or a session to which it is not attached.

    Returns:
        The cancelled jobs.

    Raises:
        InvalidRecord: No job was named, or not by a number.
        NotAttached: As ``stage``.
    """
    refuse_async(target, "cancel")
    return _read(
        run_statement(target, of, _CANCEL, _values(of, ids, unique, tenant), pipeline, "cancel")
    )


async def cancel_async(
    target: "AsyncTarget",
    *ids: int,
    of: Queue,
    unique: str | None = None,
    tenant: object = None,
    pipeline: Declarations | None = None,
) -> CancelledJobs:
    """``cancel`` for an ``AsyncSession``, or an ``AsyncConnection`` of SQLAlchemy or psycopg.

    Returns:
        The cancelled jobs.

    Raises:
        InvalidRecord: No job was named, or not by a number.
        NotAttached: As ``stage``.
    """
    values = _values(of, ids, unique, tenant)
    return _read(await run_statement_async(target, of, _CANCEL, values, pipeline, "cancel"))


def retry(
    target: Target, *ids: int, of: Queue, pipeline: Declarations | None = None
) -> tuple[int, ...]:
    """Has a worker stage dead letters of a queue again, each as a new job, after the commit.

    Args:
        target: As ``cancel``, and so is ``pipeline``.
        *ids: The jobs that became dead letters, by ``job.id``.
        of: The queue.
        pipeline: The pipeline.

    Returns:
        Those of the ids that are dead letters.

    Raises:
        InvalidRecord: A job was not named by a number.
        NotAttached: As ``stage``.
    """
    refuse_async(target, "retry")
    values = {"channel": of.name, "ids": _array(ids)}
    return tuple(job for (job,) in run_statement(target, of, _RETRY, values, pipeline, "retry"))


async def retry_async(
    target: "AsyncTarget", *ids: int, of: Queue, pipeline: Declarations | None = None
) -> tuple[int, ...]:
    """``retry`` for an ``AsyncSession``, or an ``AsyncConnection`` of SQLAlchemy or psycopg.

    Raises as it does.
    """
    values = {"channel": of.name, "ids": _array(ids)}
    return tuple(
        job for (job,) in await run_statement_async(target, of, _RETRY, values, pipeline, "retry")
    )


def _array(ids: Iterable[int]) -> str:
    """Encodes the ids as a parameter.  Raises ``InvalidRecord``."""
    try:
        return int_array(map(int, ids))
    except (TypeError, ValueError) as error:
        raise InvalidRecord(
            "ids", f"are {ids!r}; give the number of each job as an argument of its own"
        ) from error


def _values(queue: Queue, ids: Iterable[int], unique: str | None, tenant: object) -> dict[str, Any]:
    id_array = _array(ids)
    if id_array == int_array(()) and unique is None:
        raise InvalidRecord("unique", "is missing, and there are no ids: name the jobs to cancel")
    tenant_text = None if tenant is None else key_text(tenant, "tenant")
    return {"channel": queue.name, "ids": id_array, "unique": unique, "tenant": tenant_text}


def run_statement(
    target: Any,
    queue: Queue,
    statement: str,
    values: dict[str, Any],
    pipeline: Declarations | None,
    caller: str,
) -> Rows:
    """Runs a statement about a queue in the transaction of a session or a connection."""
    if isinstance(target, scoped_session):
        target = target()
    if isinstance(target, Session):
        schema = find_attachment(target, queue, pipeline).pipeline.scope.schema
        target.flush()
    else:
        schema = require_pipeline(queue, pipeline, caller).scope.schema
    with refusals_explained():
        return read_rows(target, schema, statement, values)


async def run_statement_async(
    target: Any,
    queue: Queue,
    statement: str,
    values: dict[str, Any],
    pipeline: Declarations | None,
    caller: str,
) -> Rows:
    """Runs a statement like ``run_statement``, for async targets."""
    if is_async_driver(target):
        declarations = require_pipeline(queue, pipeline, caller)
        with refusals_explained():
            return await read_by_async_psycopg(target, declarations.scope.schema, statement, values)
    rows: Rows = await resolve_async(target, caller).run_sync(
        run_statement, queue, statement, values, pipeline, caller
    )
    return rows


def _read(rows: Rows) -> CancelledJobs:
    by_state = {
        state: tuple(job for job, is_running in rows if is_running is state)
        for state in (False, True)
    }
    return CancelledJobs(ids=by_state[False], running=by_state[True])
