"""Declares the workers of queues; a part of ``Pipeline``."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Unpack, overload

from penstock.declarations import Channel, ConsumerSpec, Queue, WorkerSpec
from penstock.handlers import Handler, JobDecorator, WorkerDeclaration, default_name
from penstock.records import Payload


class DeclaresWorkers:
    """What a pipeline has for queues."""

    @abstractmethod
    def _own(self, channel: Channel, who: str) -> None:
        """Refuses a channel that the pipeline does not have."""

    @abstractmethod
    def _add_consumer(self, spec: ConsumerSpec) -> None:
        """Adds a consumer."""

    @overload
    def worker(
        self, *, reads: Queue, payload: type[Payload], **options: Unpack[WorkerDeclaration]
    ) -> JobDecorator[Payload]: ...

    @overload
    def worker(self, *, reads: Queue, **options: Unpack[WorkerDeclaration]) -> JobDecorator: ...

    def worker(
        self, *, reads: Queue, payload: type[Any] | None = None, **options: Unpack[WorkerDeclaration]
    ) -> Callable[[Any], Any]:
        """Declares the decorated function the worker of a queue: see ``WorkerSpec`` for the parts.

            @pipeline.worker(reads=receipts, concurrency=8)
            def send_receipt(session, job): ...

        The session's transaction begins with the handler's first statement, and is committed together with the fact that
        the job is done.  A job whose handler has taken effect once is never handled again.  The worker is called as its
        function is, with ``-`` for ``_``, unless ``name`` says otherwise.

        Raises:
            DeclarationError: The channel is no queue of this pipeline, another worker has the name, or reads the same queue;
                or the handler cannot be called as it would have to be.
        """

        def declare(handler: Handler) -> Handler:
            named: WorkerDeclaration = {**options}
            if "name" not in options:
                named["name"] = default_name(handler)
            spec = WorkerSpec(channel=reads, handler=handler, payload=payload, **named)
            self._own(reads, f"worker {spec.name}")
            self._add_consumer(spec)
            return handler

        return declare
