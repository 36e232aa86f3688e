"""The call of a job: a declared worker stages jobs for itself, typed by its payload.

@pipeline.worker(reads=receipts, payload=SendReceipt)
def send_receipt(session, job): ...

send_receipt.stage(session, SendReceipt(ride_id=17), tenant="account-7")
"""

from collections.abc import Awaitable, Callable, Iterable
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar, Unpack, overload

from sqlalchemy.orm import Session

from penstock.declaring.declarations import WorkerSpec
from penstock.declaring.kinds import Queue
from penstock.declaring.outcomes import HandlerOutcome, Job
from penstock.errors import InvalidRecord
from penstock.records import Payload
from penstock.staging.cancelling import CancelledJobs, cancel, cancel_async, retry, retry_async
from penstock.staging.explicit import (
    Staging,
    Target,
    stage,
    stage_async,
    stage_jobs,
    stage_jobs_async,
)
from penstock.staging.messages import MessageOptions
from penstock.staging.payload_models import checked_model
from penstock.staging.rules import Declarations

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

    from penstock.staging.explicit import AsyncTarget

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class DeclaredWorker(Generic[_Arguments, _Result, Payload]):
    """A worker's function, as ``pipeline.worker`` leaves it: called as before, it also stages jobs.

    Attributes:
        name: Name of the worker.
        queue: The queue that it reads.
        handler: The function itself.
    """

    def __init__(self, pipeline: Declarations, spec: WorkerSpec) -> None:
        self.name = spec.name
        self.queue: Queue = spec.channel  # type: ignore[assignment]  # WorkerSpec has checked it
        self.handler = spec.handler
        self._pipeline, self._model = pipeline, spec.payload
        update_wrapper(self, spec.handler, updated=())

    def __reduce__(self) -> str:
        return str(vars(self)["__qualname__"])  # as a function: by its name in its module

    def __call__(self, *arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        """Calls the function, as in a test."""
        result: _Result = self.handler(*arguments, **options)  # type: ignore[assignment]  # what the decorator has checked
        return result

    def stage_many(  # noqa: PLR0913  what jobs have in common
        self,
        target: Target,
        payloads: Iterable[Payload],
        *,
        tenant: object,
        key: object = None,
        headers: dict[str, Any] | None = None,
        group: str | None = None,
        then: tuple[Queue, Staging] | None = None,
        **options: Unpack[MessageOptions],
    ) -> list[int]:
        """Stages jobs of one tenant in one INSERT; returns their ids.

        See ``penstock.stage_many`` for groups.

        Args:
            target: As ``stage``.
            payloads: One for each job.
            tenant: Whose the jobs are.
            key: The key of each job.
            headers: Metadata beside the payloads.
            group: Name of the group that the jobs form.
            then: A job that follows the group: ``job`` of its worker makes it.
            **options: ``due`` or ``delay``, ``deadline``, ``priority``.

        Raises:
            InvalidRecord: As ``stage``, and so are the others; or several jobs have one ``unique``
                name.
        """
        records = self._records(payloads, tenant, key, headers, options)
        return stage_jobs(
            target, records, to=self.queue, group=group, then=then, pipeline=self._pipeline
        )

    async def stage_many_async(  # noqa: PLR0913  as stage_many
        self,
        target: "AsyncTarget",
        payloads: Iterable[Payload],
        *,
        tenant: object,
        key: object = None,
        headers: dict[str, Any] | None = None,
        group: str | None = None,
        then: tuple[Queue, Staging] | None = None,
        **options: Unpack[MessageOptions],
    ) -> list[int]:
        """``stage_many`` for an ``AsyncSession`` or ``AsyncConnection``; raises as it does."""
        records = self._records(payloads, tenant, key, headers, options)
        return await stage_jobs_async(
            target, records, to=self.queue, group=group, then=then, pipeline=self._pipeline
        )

    def job(
        self,
        payload: Payload,
        *,
        tenant: object,
        key: object = None,
        headers: dict[str, Any] | None = None,
        **options: Unpack[MessageOptions],
    ) -> tuple[Queue, Staging]:
        """Makes a job for ``stage_many(…, then=…)``: the queue, and the arguments of ``stage``.

        Raises:
            InvalidRecord: The payload is of another type.
        """
        record: Any = self._record(payload, tenant, key, headers, options)
        return self.queue, record

    def stage(
        self,
        target: Target,
        payload: Payload,
        *,
        tenant: object,
        key: object = None,
        headers: dict[str, Any] | None = None,
        **options: Unpack[MessageOptions],
    ) -> int:
        """Stages a job for this worker, in the transaction of a session or a connection.

        A session is flushed first.  Returns its id, which is the handler's ``job.id``.

        Args:
            target: A session, or a connection of SQLAlchemy, psycopg or Django, in a transaction.
            payload: What the worker gets as ``job.payload``: an instance of its ``payload=``, or
                any JSON value without one.
            tenant: Whose the job is: a str, int or UUID, or a tuple of them; tenants take turns.
            key: Within a tenant, keys take turns.
            headers: Metadata beside the payload; at most 64 KB.
            **options: ``due`` or ``delay``, ``deadline``, ``unique``, ``priority``.

        Raises:
            InvalidRecord: A field is invalid, or the payload is of another type; nothing was
                written.
            NotAttached: The target is to be awaited: ``stage_async``.
            ChannelMismatch: The queue is registered with another kind, or with another number of
                shards.
            ChannelRetired: The queue was retired.
            StagingError: Postgres refused the job, or the connection is in autocommit mode.
        """
        record = self._record(payload, tenant, key, headers, options)
        return stage(target, to=self.queue, pipeline=self._pipeline, **record)

    async def stage_async(
        self,
        target: "AsyncTarget",
        payload: Payload,
        *,
        tenant: object,
        key: object = None,
        headers: dict[str, Any] | None = None,
        **options: Unpack[MessageOptions],
    ) -> int:
        """``stage`` for an ``AsyncSession``, or an ``AsyncConnection`` of SQLAlchemy or psycopg.

        Raises as it does.
        """
        record = self._record(payload, tenant, key, headers, options)
        return await stage_async(target, to=self.queue, pipeline=self._pipeline, **record)

    def cancel(
        self, target: Target, *ids: int, unique: str | None = None, tenant: object = None
    ) -> CancelledJobs:
        """Cancels jobs of its queue: see ``penstock.cancel``.

        Raises:
            InvalidRecord: No job was named.
            NotAttached: The target is to be awaited: ``cancel_async``.
        """
        return cancel(
            target, *ids, of=self.queue, unique=unique, tenant=tenant, pipeline=self._pipeline
        )

    async def cancel_async(
        self, target: "AsyncTarget", *ids: int, unique: str | None = None, tenant: object = None
    ) -> CancelledJobs:
        """``cancel`` for an ``AsyncSession``, or an ``AsyncConnection`` of SQLAlchemy or psycopg.

        Raises:
            InvalidRecord: No job was named.
        """
        return await cancel_async(
            target, *ids, of=self.queue, unique=unique, tenant=tenant, pipeline=self._pipeline
        )

    def retry(self, target: Target, *ids: int) -> tuple[int, ...]:
        """Has dead letters of its queue staged again: see ``penstock.retry``.

        Raises:
            NotAttached: The target is to be awaited: ``retry_async``.
        """
        return retry(target, *ids, of=self.queue, pipeline=self._pipeline)

    async def retry_async(self, target: "AsyncTarget", *ids: int) -> tuple[int, ...]:
        """``retry`` for an ``AsyncSession``, or an ``AsyncConnection`` of SQLAlchemy or psycopg."""
        return await retry_async(target, *ids, of=self.queue, pipeline=self._pipeline)

    def _records(
        self,
        payloads: Iterable[Payload],
        tenant: object,
        key: object,
        headers: object,
        options: MessageOptions,
    ) -> list[Any]:
        records = [self._record(payload, tenant, key, headers, options) for payload in payloads]
        if len(records) > 1 and options.get("unique") is not None:
            raise InvalidRecord(
                "unique",
                "is one name for several jobs, of which only one would be done; stage each job "
                "with a name of its own",
            )
        return records

    def _record(
        self, payload: object, tenant: object, key: object, headers: object, options: MessageOptions
    ) -> dict[str, Any]:
        data = checked_model(payload, self._model)
        object_name = getattr(self._model, "__name__", "job")
        fields = {"action": self.name, "object": object_name, "data": data}
        return {"tenant": tenant, "key": key, "headers": headers, **fields, **options}


class JobDecorator(Protocol[Payload]):
    """Takes ``handler(session, job)`` or ``handler(job)`` of a worker, plain or ``async def``.

    It may return an outcome.
    """

    @overload
    def __call__(
        self, handler: Callable[[Session, Job[Payload]], HandlerOutcome | None], /
    ) -> DeclaredWorker[[Session, Job[Payload]], HandlerOutcome | None, Payload]: ...

    @overload
    def __call__(
        self, handler: Callable[["AsyncSession", Job[Payload]], Awaitable[HandlerOutcome | None]], /
    ) -> DeclaredWorker[
        ["AsyncSession", Job[Payload]], Awaitable[HandlerOutcome | None], Payload
    ]: ...

    @overload
    def __call__(
        self, handler: Callable[[Job[Payload]], HandlerOutcome | None], /
    ) -> DeclaredWorker[[Job[Payload]], HandlerOutcome | None, Payload]: ...

    @overload
    def __call__(
        self, handler: Callable[[Job[Payload]], Awaitable[HandlerOutcome | None]], /
    ) -> DeclaredWorker[[Job[Payload]], Awaitable[HandlerOutcome | None], Payload]: ...
