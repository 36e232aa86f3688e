"""The pipeline, where an application declares channels, rules, consumers and reconciliations."""

import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, Unpack, overload

from penstock.declaring.declarations import (
    CHANGES,
    MEMBERS_A_BATCH,
    Capture,
    Change,
    ConsumerSpec,
    Named,
    ReconciliationSpec,
    StagingRule,
    WorkerSpec,
    checked_changes,
    table_named,
)
from penstock.declaring.handlers import (
    Around,
    BatchDecorator,
    ConsumerOptions,
    DataFrameDecorator,
    Handler,
    MemberDecorator,
    MembersDecorator,
    Middleware,
    MiddlewareFunction,
    RecordDecorator,
    WorkerDeclaration,
    default_name,
    surround,
)
from penstock.declaring.kinds import (
    Channel,
    Ick,
    LogChannel,
    Queue,
    check_reconciled,
    refuse_sources,
)
from penstock.declaring.schedules import ScheduleOptions, ScheduleSpec
from penstock.errors import DeclarationError
from penstock.observer import Observer, Observers, TroubleHandler
from penstock.parsing import Duration
from penstock.records import DEFAULT_SCOPE, Payload, Scope, ShardName
from penstock.staging import hooks, rule_checks
from penstock.staging.job_calls import DeclaredWorker, JobDecorator
from penstock.staging.messages import check_scheduled

Canonical = TypeVar("Canonical", bound=Callable[..., object])


class Pipeline:
    """Declares what an application stages, for which channels, and who consumes it.

        rides = Log("rides", shards=4)
        pipeline = Pipeline(channels=[rides])
        pipeline.stages(Ride, to=rides, key="id")
        pipeline.attach(Session)

        @pipeline.consumer(reads=rides)
        def ride_totals(session, records): ...

    Applications import it to stage, workers to stream and to consume (``--app module:pipeline``).

    Attributes:
        scope: The schema of its tables in Postgres, and the namespace of its keys in Redis.
        observers: See ``observe``.
        trouble_handlers: See ``on_trouble``.
        default_capture: How rules that do not say it capture changes.
    """

    default_capture: ClassVar[Capture] = "orm"

    def __init__(
        self,
        channels: Iterable[Channel] = (),
        *,
        schema: str = DEFAULT_SCOPE.schema,
        namespace: str = DEFAULT_SCOPE.namespace,
    ) -> None:
        """Declares a pipeline.

        Args:
            channels: The channels that its rules and consumers may use.
            schema: The Postgres schema that holds Penstock's tables.
            namespace: First part of every Redis key, so that pipelines can share a Redis.

        Raises:
            InvalidName: ``schema`` or ``namespace`` breaks the rule for names.
            DeclarationError: Two channels have one name.
        """
        self.scope = Scope(schema, namespace)
        self._channels: dict[str, Channel] = {}
        self._rules: list[StagingRule] = []
        self._consumers: dict[str, ConsumerSpec] = {}
        self._reconciliations: dict[str, ReconciliationSpec] = {}
        self._schedules: dict[str, ScheduleSpec] = {}
        self._around: list[Around] = []
        self.observers = Observers()
        self.trouble_handlers: list[TroubleHandler] = []
        for channel in channels:
            self.add_channel(channel)

    def add_channel(self, channel: Channel) -> Channel:
        """Adds a channel and returns it; adding an equal channel again changes nothing.

        Raises:
            DeclarationError: A different channel has this name.
        """
        if self._channels.setdefault(channel.name, channel) != channel:
            raise DeclarationError(
                f"channel {channel.name} is declared twice with different settings; names are "
                "unique in a pipeline"
            )
        return channel

    @property
    def channels(self) -> dict[str, Channel]:
        """Channels by name, without the logs that are read from other sources."""
        return {n: c for n, c in self._channels.items() if not c.sources}

    @property
    def shard_names(self) -> tuple[ShardName, ...]:
        """Names of all shards of all channels."""
        return tuple(s for channel in self._channels.values() for s in channel.shard_names)

    @property
    def rules(self) -> tuple[StagingRule, ...]:
        """Staging rules, in the order of their declaration."""
        return tuple(self._rules)

    @property
    def consumers(self) -> dict[str, ConsumerSpec]:
        """Consumers by name."""
        return dict(self._consumers)

    @property
    def reconciliations(self) -> dict[str, ReconciliationSpec]:
        """Reconciliations by name."""
        return dict(self._reconciliations)

    def get_consumer(self, name: str) -> ConsumerSpec:
        """Returns the consumer with this name.

        Raises:
            DeclarationError: The pipeline has no such consumer.
        """
        if name not in self._consumers:
            raise DeclarationError(
                f"no consumer {name!r}; the pipeline has {_listed(self._consumers)}"
            )
        spec = self._consumers[name]
        return replace(spec, handler=surround(spec.handler, self._around)) if self._around else spec

    def find_payload(self, queue: Queue) -> type[Any] | None:
        """Returns the payload model of a queue's worker; None if it takes any payload."""
        return next(
            (spec.payload for spec in self._consumers.values() if spec.channel == queue), None
        )

    def get_reconciliation(self, name: str) -> ReconciliationSpec:
        """Returns the reconciliation with this name.

        Raises:
            DeclarationError: The pipeline has no such reconciliation.
        """
        if name not in self._reconciliations:
            raise DeclarationError(
                f"no reconciliation {name!r}; the pipeline has {_listed(self._reconciliations)}"
            )
        return self._reconciliations[name]

    def stages(  # noqa: PLR0913  a rule has this many parts; all but two have defaults
        self,
        model: type[Any],
        *,
        to: Channel,
        on: Change | Collection[Change] = CHANGES,
        key: Named | None = None,
        data: Sequence[str] | Callable[[Any], Any] | None = None,
        when: Callable[[Any], bool] | str | None = None,
        object: str | None = None,  # noqa: A002  the word of the rule
        capture: Capture | None = None,
        headers: Mapping[str, Any] | Callable[[Any], dict[str, Any] | None] | None = None,
        tenant: Named | None = None,
    ) -> StagingRule:
        """Declares that changes of a mapped class are staged: see ``StagingRule`` for the parts.

        Without ``data``, the payload has every column of the class that is not marked secret.

        Raises:
            DeclarationError: The channel is not of this pipeline, the class is not mapped, it lacks
                an attribute of the rule, or a part of the rule does not go with another.
        """
        self._own(to, f"staging rule of {model.__name__}")
        mapped, capture = self.find_mapped(model), capture or self.default_capture
        if mapped is not model and capture == "orm":
            raise DeclarationError(
                f'staging rule of {model.__name__}: capture="orm" is for sessions of SQLAlchemy; '
                "leave it out"
            )
        rule = StagingRule(
            mapped,
            to,
            checked_changes(on),
            key,
            data,
            when,
            object,
            capture,
            headers,
            tenant=tenant,
        )
        rule_checks.check_rule(rule, self)
        self._rules.append(rule)
        hooks.follow(rule, self)
        return rule

    def find_mapped(self, model: type[Any]) -> type[Any]:
        """Returns the SQLAlchemy class for the class of a rule.

        Itself, unless the pipeline takes another ORM's models.
        """
        return model

    def marks_dirty(
        self,
        model: type[Any],
        *,
        to: Ick,
        key: Named,
        on: Change | Collection[Change] = CHANGES,
        capture: Capture | None = None,
    ) -> StagingRule:
        """Declares that changes to a mapped class mark members of an Ick dirty.

        There is no ``when``: an object that stops meeting a condition would have to be marked too.
        The consumer of the Ick decides what belongs in the copy.

        Args:
            model: The mapped class.
            to: The Ick.
            key: Attribute name, several names, or function of the object, that give the member:
                often ``id``.  If an update changes it, the old member is marked too.  None marks
                nothing.
            on: The kinds of change that mark.  A delete marks as well, since the copy must lose the
                object.
            capture: How changes are captured: ``orm`` or ``trigger``.

        Raises:
            DeclarationError: The channel is not an Ick of this pipeline, the class is not mapped,
                it lacks an attribute of the rule, or a part of the rule does not go with another.
        """
        if not isinstance(to, Ick):
            raise DeclarationError(
                f"marks_dirty of {model.__name__}: channel {getattr(to, 'name', to)!r} is not an "
                "Ick; declare it as Ick(…), or stage records with pipeline.stages(…)"
            )
        return self.stages(model, to=to, on=on, key=key, data=(), capture=capture)

    @overload
    def consumer(
        self, *, reads: LogChannel, dataframe: Literal[True], **options: Unpack[ConsumerOptions]
    ) -> DataFrameDecorator: ...

    @overload
    def consumer(
        self,
        *,
        reads: LogChannel,
        each: Literal[True],
        payload: type[Payload],
        **options: Unpack[ConsumerOptions],
    ) -> RecordDecorator[Payload]: ...

    @overload
    def consumer(
        self,
        *,
        reads: LogChannel,
        each: Literal[False] = False,
        payload: type[Payload],
        **options: Unpack[ConsumerOptions],
    ) -> BatchDecorator[Payload]: ...

    @overload
    def consumer(
        self, *, reads: LogChannel[Payload], each: Literal[True], **options: Unpack[ConsumerOptions]
    ) -> RecordDecorator[Payload]: ...

    @overload
    def consumer(
        self,
        *,
        reads: LogChannel[Payload],
        each: Literal[False] = False,
        **options: Unpack[ConsumerOptions],
    ) -> BatchDecorator[Payload]: ...

    @overload
    def consumer(
        self, *, reads: Ick, each: Literal[True], **options: Unpack[ConsumerOptions]
    ) -> MemberDecorator: ...

    @overload
    def consumer(
        self, *, reads: Ick, each: Literal[False] = False, **options: Unpack[ConsumerOptions]
    ) -> MembersDecorator: ...

    def consumer(
        self,
        *,
        reads: Channel,
        each: bool = False,
        dataframe: bool = False,
        payload: type[Any] | None = None,
        **options: Unpack[ConsumerOptions],
    ) -> Callable[[Any], Any]:
        """Declares the decorated function a consumer: see ``ConsumerSpec`` for the parts.

        The consumer is named as its function, unless ``name`` says otherwise.  ``batch`` is
        1000 records by default, or 500 members of an Ick.

        Raises:
            DeclarationError: The channel is not of this pipeline, another consumer has the name, or
                reads the same Ick; or the handler cannot be called as it would have to be.
        """
        if isinstance(reads, LogChannel) and not dataframe:
            payload = payload or reads.payload
        if isinstance(reads, Ick):
            options.setdefault("batch", MEMBERS_A_BATCH)

        def declare(handler: Handler) -> Handler:
            handler = handler.handler if isinstance(handler, DeclaredWorker) else handler
            spec_options: ConsumerOptions = (
                options if "name" in options else {**options, "name": default_name(handler)}
            )
            spec = ConsumerSpec(
                channel=reads,
                handler=handler,
                each=each,
                dataframe=dataframe,
                payload=payload,
                **spec_options,
            )
            self._add_consumer(spec)
            return handler

        return declare

    @overload
    def worker(
        self, *, reads: Queue, payload: type[Payload], **options: Unpack[WorkerDeclaration]
    ) -> JobDecorator[Payload]: ...

    @overload
    def worker(
        self, *, reads: Queue, every: Duration | None = None, **options: Unpack[WorkerDeclaration]
    ) -> JobDecorator: ...

    def worker(
        self,
        *,
        reads: Queue,
        payload: type[Any] | None = None,
        every: Duration | None = None,
        **options: Unpack[WorkerDeclaration],
    ) -> Callable[[Any], Any]:
        """Declares the decorated function the worker of a queue: see ``WorkerSpec`` for the parts.

            @pipeline.worker(reads=receipts, concurrency=8)
            def send_receipt(session, job): ...

        A handler that writes nothing to Postgres takes the job alone, ``def send_receipt(job)``.
        Otherwise, its session's transaction begins with its first statement, and commits together
        with the end of the job.  The worker is named as its function unless ``name`` is given.
        With ``every=``, it also gets a job without a payload at each of these times, of a schedule
        with its name: see ``every``, which has more options.

        Raises:
            DeclarationError: The channel is no queue of this pipeline, another worker has the name,
                or reads the same queue; or the handler cannot be called as it would have to be.
        """

        def declare(handler: Handler) -> DeclaredWorker[Any, Any, Any]:
            handler = handler.handler if isinstance(handler, DeclaredWorker) else handler
            spec_options: WorkerDeclaration = (
                options if "name" in options else {**options, "name": default_name(handler)}
            )
            spec = WorkerSpec(channel=reads, handler=handler, payload=payload, **spec_options)
            self._add_consumer(spec)
            if every is not None:
                self.every(every, to=reads, name=spec.name)
            return DeclaredWorker(self, spec)

        return declare

    def every(
        self,
        every: str | timedelta | float,
        *,
        to: Queue,
        name: str,
        data: Any = None,
        **options: Unpack[ScheduleOptions],
    ) -> ScheduleSpec:
        """Declares a schedule: one job is staged for each of its times, however many streamers run.

            pipeline.every("17 3 * * *", to=receipts, name="nightly", timezone="Europe/Berlin")

        The worker's job has the action ``scheduled``, the schedule's name as its object, and the
        time that it stands for as ``job.headers["slot"]``.

        Args:
            every: A cron expression of five fields; or an interval: seconds, a ``timedelta``, or a
                text such as ``"10m"``.
            to: The queue that its jobs go to.
            name: Its name, unique in the schema.  One that keeps its name goes on where it was
                after a deploy.
            data: The payload of each job.
            **options: ``timezone`` of a cron expression, ``catch_up`` (``skip``, ``one`` or
                ``all``), and of its jobs the ``tenant``, by default the schedule's name, ``key``,
                ``unique``, ``priority``, and the time until the ``deadline``.

        Raises:
            DeclarationError: A value is invalid, the queue is not this pipeline's, or the name is
                taken.
        """
        spec = ScheduleSpec(name, to, every, data=data, **options)
        self._own(to, f"schedule {name}")
        check_scheduled(spec, self.find_payload(to))
        if self._schedules.setdefault(name, spec) is not spec:
            raise DeclarationError(
                f"schedule {name} is declared twice; names are unique in a pipeline"
            )
        return spec

    @property
    def schedules(self) -> dict[str, ScheduleSpec]:
        """Schedules by name."""
        return dict(self._schedules)

    def around(
        self, middleware: MiddlewareFunction, *, asynchronous: Middleware | None = None
    ) -> MiddlewareFunction:
        """Has a function called around every handler of consumers and workers.

        For tenancy, logging context, feature flags.  It calls ``call(session, items)`` once, in the
        handler's transaction and context, and returns what that returns; ``items`` is what the
        handler gets: records, a record, members, a job or a DataFrame.  The first one declared is
        the outermost.

        Args:
            middleware: A plain function; an ``async def`` handler's gets the plain session.  Or
                ``async def``, if all handlers are.
            asynchronous: One that is ``async def``, to be called instead around handlers that are.

        Raises:
            DeclarationError: It cannot be called with three arguments, or contains ``yield``; or it
                is ``async def``, and a handler is not.
        """
        around = Around(middleware, asynchronous)
        for spec in self._consumers.values():
            around.check(spec.whose, spec.handler)
        self._around.append(around)
        return middleware

    def _add_consumer(self, spec: ConsumerSpec) -> None:
        self._own(spec.channel, spec.whose)
        if spec.name in self._consumers:
            raise DeclarationError(
                f"consumer {spec.name} is declared twice; names are unique in a pipeline"
            )
        if spec.dataframe:
            refuse_sources(
                spec.channel, f"consumer {spec.name}", "no handler takes it as a DataFrame"
            )
        if not spec.channel.traits.keeps_records:
            for other in self._consumers.values():
                if other.channel == spec.channel:
                    raise DeclarationError(
                        f"consumer {spec.name}: {other.name} already reads {spec.channel.name}, "
                        f"and what it has processed leaves the {spec.channel.kind}; declare "
                        f"another {spec.channel.kind}, and stage or mark to both"
                    )
        for around in self._around:
            around.check(spec.whose, spec.handler)
        for schedule in self._schedules.values():
            if schedule.queue == spec.channel:
                check_scheduled(schedule, spec.payload)
        self._consumers[spec.name] = spec

    def reconciliation(
        self,
        *,
        of: Callable[..., object] | str,
        state: Any,
        key: str | Sequence[str] = (),
        columns: Sequence[str] | None = None,
        tolerance: Mapping[str, float] | None = None,
        name: str | None = None,
    ) -> Callable[[Canonical], Canonical]:
        """Declares that the decorated function defines what a consumer should hold.

        See ``ReconciliationSpec``.

        Args:
            of: The consumer: its handler, or its name.
            state: The table that it keeps: a mapped class, a ``Table``, or a name.
            key: The columns that name a row; none, if the state is one row.
            columns: The columns that are compared; by default all that the canonical rows have.
            tolerance: By how much columns of numbers may differ.
            name: What commands call it; by default the consumer's name.

        Raises:
            DeclarationError: There is no such consumer, the table cannot be understood, or the name
                is taken.
        """

        def declare(canonical: Canonical) -> Canonical:
            consumer = self._find_consumer(of)
            check_reconciled(consumer.channel, f"reconciliation of {consumer.name}")
            spec_name = consumer.name if name is None else name
            keys = (key,) if isinstance(key, str) else tuple(key)
            values = None if columns is None else tuple(columns), dict(tolerance or {})
            spec = ReconciliationSpec(
                spec_name, consumer, *table_named(state), keys, *values, canonical
            )
            if spec.name in self._reconciliations:
                raise DeclarationError(
                    f"reconciliation {spec.name} is declared twice; give one of them another name"
                )
            self._reconciliations[spec.name] = spec
            return canonical

        return declare

    def _find_consumer(self, handler: Callable[..., object] | str) -> ConsumerSpec:
        """Finds a consumer by its name or its handler."""
        if isinstance(handler, str):
            return self.get_consumer(handler)
        handler = handler.handler if isinstance(handler, DeclaredWorker) else handler
        for consumer in self._consumers.values():
            if consumer.handler == handler:
                return consumer
        raise DeclarationError(
            f"{getattr(handler, '__name__', handler)!r} is not a consumer of this pipeline; it "
            f"has {_listed(self._consumers)}"
        )

    def _own(self, channel: Channel, subject: str) -> None:
        """Raises ``DeclarationError`` for a channel of another pipeline."""
        if self._channels.get(channel.name) != channel:
            raise DeclarationError(
                f"{subject}: channel {channel.name} does not belong to this pipeline; "
                "add it with Pipeline(channels=[…]) or pipeline.add_channel(…) first"
            )

    def observe(self, observer: Observer) -> Observer:
        """Has a function called with each event of this process.

        Of streamers, workers and their handlers.

        Also a decorator.  The events are in ``penstock.observer``: of rounds and batches, not of
        records.

        Args:
            observer: Called in the thread of each event.  It must be quick; what it raises is
                logged.
        """
        self.observers.add(observer)
        return observer

    def on_trouble(self, handler: TroubleHandler) -> TroubleHandler:
        """Has a function called when an operator is needed.

        After a halt, dead letters, a stopped shard, a new epoch.

        Also a decorator.  A streamer calls it, within seconds, in a thread of its own: after what
        happened is committed, at least once across restarts, and of dead letters once for all that
        are new.  What it raises is logged by its class, and it is called again later; while it does
        not return, nothing else is reported, and records move as ever.

        Args:
            handler: Called with a ``penstock.observer.TroubleReport``.
        """
        self.trouble_handlers.append(handler)
        return handler

    def attach(self, target: Any, *, nudge: bool | None = None) -> None:
        """Attaches the pipeline to sessions.

        Their changes are staged by its rules, and they can call ``stage``.

        A pipeline needs no rules to be attached.  Rules declared later apply too.  Attaching twice
        has no further effect.

        Args:
            target: A ``Session``, a subclass of it, a ``sessionmaker``, a ``scoped_session``, or an
                async equivalent.
            nudge: Wake the streamer after a commit that staged records, instead of waiting for its
                next poll, up to 25 ms: a short transaction more.  By default after the first commit
                in 50 ms, so a busy process pays nothing; True after each, False never.

        Raises:
            DeclarationError: ``target`` is of another type.
        """
        hooks.attach(self, target, nudge=nudge)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def get_scope(pipeline: Pipeline | None) -> Scope:
    """Returns the scope of a pipeline; the default without one."""
    return DEFAULT_SCOPE if pipeline is None else pipeline.scope


def load_pipeline(app: str) -> Pipeline:
    """Imports ``module:attribute``, searching the working directory too, and returns the pipeline.

    Raises:
        DeclarationError: The path is malformed, its module cannot be imported, or it names no
            pipeline.
    """
    name, separator, attribute = app.partition(":")
    if not (name and separator and attribute):
        raise DeclarationError(f"--app {app}: give module:attribute, such as shop.events:pipeline")
    if (directory := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, directory)
    try:
        module = importlib.import_module(name)
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise DeclarationError(
            f"--app {app}: importing {name} from {directory} failed: {type(error).__name__}: "
            f"{first}"
        ) from error
    target: Any = module
    for part in attribute.split("."):
        target = getattr(target, part, None)
    if not isinstance(target, Pipeline):
        has = sorted(name for name, value in vars(module).items() if isinstance(value, Pipeline))
        raise DeclarationError(
            f"--app {app}: {attribute} of {name} is "
            f"{'missing' if target is None else f'a {type(target).__name__}'}, not a Pipeline; "
            f"the module has {', '.join(has) or 'none'}"
        )
    return target
