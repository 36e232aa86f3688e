"""An application's declarations: channels, staging rules, consumers.

Frozen values; nothing here does I/O.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, cast, get_args

from typing_extensions import override

from penstock.declaring.handlers import (
    Handler,
    Isolation,
    Trace,
    check_handler,
    is_async,
    takes_session,
)
from penstock.declaring.kinds import (
    Channel,
    Seconds,
    check_payload,
    checked_consumer,
    checked_name,
    is_number,
)
from penstock.errors import DeclarationError

Capture = Literal["orm", "trigger"]
"""Who sees the changes of a class: the session's hooks, or triggers of its table."""

Change = Literal["insert", "update", "delete"]
"""A kind of change."""

CHANGES: tuple[Change, ...] = ("insert", "update", "delete")
"""All kinds of change."""

Named = str | Sequence[str] | Callable[[Any], object]
"""An attribute by its name, several, or a function of the object."""

DEAD_LETTERS_IN_A_ROW = 100
"""Failures in a row that mean a bad deploy rather than bad records."""

MIN_IDLE_TIMEOUT_S, MAX_IDLE_TIMEOUT_S = 0.1, 86_400.0
"""Limits of ``ConsumerSpec.idle_timeout``, in seconds."""

MAX_CONCURRENCY = 1000
"""Upper bound of ``WorkerSpec.concurrency``."""

MAX_TOGETHER = 100
"""Upper bound of ``WorkerSpec.together``."""

MIN_LEASE_S, MAX_LEASE_S = 0.05, 86_400.0
"""Limits of a lease of a queue, in seconds."""

MEMBERS_A_BATCH = 500
"""Most members that a consumer of an Ick holds at once, by default.

A script call for so many takes a millisecond or two.
"""


@dataclass(frozen=True)
class StagingRule:
    """A rule: which changes of a class are staged, for which channel, and how.

    Attributes:
        model: The mapped class; subclasses that are mapped are included.
        channel: Where the records go.
        on: The kinds of change that are staged.
        key: Attribute name, several names, or function of the object: records of one key keep their
            order.  Several values make one key, a JSON array: ``[7, "north"]``.  An update that
            changes the key of a log's records is staged as a delete of the old row and an insert of
            the new one.
        data: Names of attributes, or a function of the object that gives the payload; None takes
            **every column** except those marked with ``info={"secret": True}``.
        when: Function of the object; a change of an object for which it is false is not staged.
            With ``capture="trigger"`` a condition in SQL over the columns.
        object: What the records call it; by default the name of the table.
        capture: ``orm``: by the session's hooks.  ``trigger``: by triggers, installed by
            ``penstock init``, that see every writer; the hooks then leave the class alone, and
            ``key`` and ``data`` are names of attributes.
        headers: Metadata beside the payload: a dict for all records of the rule, or a function of
            the object.
        tenant: For a queue, and only there: attribute name, several names, or function of the
            object, that say whose the message is.  ``key`` is optional then: within a tenant, keys
            take turns.
    """

    model: type[Any]
    channel: Channel
    on: frozenset[Change]
    key: Named | None
    data: Sequence[str] | Callable[[Any], Any] | None = None
    when: Callable[[Any], bool] | str | None = None
    object: str | None = None
    capture: Capture = "orm"
    headers: Mapping[str, Any] | Callable[[Any], dict[str, Any] | None] | None = None
    tenant: Named | None = None

    def __post_init__(self) -> None:
        self._check_parts()
        self._check_tenant()
        for part in ("key", "tenant"):
            object.__setattr__(self, part, self._checked_names(part))
        self._check_capture()

    def _error(self, problem: str) -> DeclarationError:
        return DeclarationError(f"staging rule of {self.model.__name__}: {problem}")

    def _check_parts(self) -> None:
        unknown = set(self.on) - set(CHANGES)
        if unknown or not self.on:
            raise self._error(f"on={sorted(self.on)}; it takes any of {', '.join(CHANGES)}")
        if isinstance(self.data, str):
            raise self._error(f"data is one str; it takes a list of names: data=[{self.data!r}]")
        if self.data is not None and not callable(self.data):
            object.__setattr__(self, "data", tuple(self.data))
        if not self.channel.traits.has_payloads and self.data != ():
            raise self._error(
                f"channel {self.channel.name} is an Ick, which keeps members and no payloads: "
                "pipeline.marks_dirty(…) instead of stages(…)"
            )

    def _check_tenant(self) -> None:
        channel, is_queue = self.channel, self.channel.traits.has_jobs
        if is_queue and self.tenant is None:
            raise self._error(
                f"channel {channel.name} is a queue, and each of its messages needs "
                'a tenant: for example tenant="account_id"'
            )
        if not is_queue and self.tenant is not None:
            raise self._error(
                f"tenant is for queues, and channel {channel.name} is a {channel.kind}"
            )
        if not is_queue and self.key is None:
            raise self._error(
                'key is missing; name the attribute whose records keep their order: key="id"'
            )

    def _checked_names(self, part: str) -> Named | None:
        """Returns the names in ``key`` or ``tenant``: one as text, several as a tuple."""
        value: Named | None = getattr(self, part)
        if value is None or callable(value) or isinstance(value, str):
            return value
        names = tuple(value)
        if not names:
            raise self._error(f"{part} is empty; it takes at least one name of an attribute")
        return names if len(names) > 1 else names[0]

    def _check_capture(self) -> None:
        if self.capture not in get_args(Capture):
            raise self._error(f"capture={self.capture!r}; it takes 'orm' or 'trigger'")
        if self.capture == "orm" and isinstance(self.when, str):
            raise self._error(
                "when is SQL text, which only triggers understand; give a function of the object, "
                "or capture='trigger'"
            )
        functions = (self.key, self.tenant, self.data, self.when, self.headers)
        if self.capture == "trigger" and any(map(callable, functions)):
            raise self._error(
                "a trigger cannot call Python; with capture='trigger', key, tenant and data are "
                "names of attributes, when is SQL text and headers is a dict"
            )


@dataclass(frozen=True)
class ConsumerSpec:
    """A named handler that reads a channel.

    Attributes:
        name: Name of the consumer; its checkpoints are kept under it.
        channel: What it reads.
        handler: ``handler(session, records)``, or ``handler(session, record)`` if ``each``;
            ``async def`` handlers get an ``AsyncSession``.  The records are of one shard, or of
            several if these have few: each shard's in its order.  The handler of an Ick gets
            members, each a ``str``, instead of records.
        each: One record a call instead of a batch.
        dataframe: The handler is set-based: ``handler(session, frame)`` gets a Spark DataFrame of
            records.  It runs on the Spark engine only.
        payload: A dataclass, TypedDict, msgspec Struct or Pydantic model that ``record.payload`` is
            to be; a record that does not fit is dead-lettered.  None leaves the payload as parsed
            JSON.
        batch: Most records a transaction; a DataFrame has up to 100,000.
        start: Where a new consumer begins: the ``earliest`` record that is still kept, or after the
            ``latest``.
        attempts: Attempts before a failing batch is bisected, and before a single failing record is
            dead-lettered.  A batch of several shards that fails is first retried shard by shard.
        on_poison: What happens to a record that fails alone: it is dead-lettered (``dead_letter``),
            or the shard stops (``halt``).
        halt_after: After so many dead letters with nothing applied between them, the consumer
            halts: every record failing is a bad deploy, and dead-lettering them all would help
            nobody.
        park_key: With ``dead_letter``: later records of the same key are dead-lettered too, until
            the first one is retried or dropped.  Otherwise they are applied without it, and it is
            retried afterwards only if that is asked for.
        isolation: Isolation level of the transaction.  Under ``READ COMMITTED`` two shards that
            update one row from the value they read lose one of the updates: choose it for handlers
            whose SQL computes the new value itself.
        idle_timeout: Longest time that the handler may go without a statement on its session,
            computing or waiting for a service.  Then Postgres ends the transaction, and other
            processes take the shards over; a batch that fails in this way is bisected like any
            other.  A suspended process keeps its shards for this long.
        trace: With OpenTelemetry, how the spans of its handler belong to the spans that staged the
            records: a span a batch is linked to them (``link``), or each record's span is a child
            of its own (``child``), which takes ``each``.
    """

    name: str
    channel: Channel
    handler: Handler
    each: bool = False
    dataframe: bool = False
    payload: type[Any] | None = None
    batch: int = 1000
    start: Literal["earliest", "latest"] = "earliest"
    attempts: int = 3
    on_poison: Literal["dead_letter", "halt"] = "dead_letter"
    halt_after: int = DEAD_LETTERS_IN_A_ROW
    park_key: bool = False
    isolation: Isolation = "REPEATABLE READ"
    idle_timeout: Seconds = Seconds("60s", MIN_IDLE_TIMEOUT_S, MAX_IDLE_TIMEOUT_S)
    trace: Trace = "link"

    def __post_init__(self) -> None:
        checked_consumer(self.name)
        check_handler(self.name, self.handler, of_jobs=isinstance(self, WorkerSpec))
        self._check_shape()
        if self.payload is not None:
            check_payload(self.whose, self.payload)
        for setting in ("batch", "attempts", "halt_after"):
            if not is_number(getattr(self, setting), 1, inf):
                raise self._error(
                    f"{setting} is {getattr(self, setting)!r}; it takes a whole number, at least 1"
                )
        for setting, choices in (("isolation", get_args(Isolation)), ("trace", get_args(Trace))):
            if (value := getattr(self, setting)) not in choices:
                raise self._error(f"{setting}={value!r}; it takes {', '.join(choices)}")
        if self.trace == "child" and not self.each:
            raise self._error(
                'trace="child" takes each=True: the records of a batch belong to several traces'
            )

    def _error(self, problem: str) -> DeclarationError:
        return DeclarationError(f"consumer {self.name}: {problem}")

    def _check_shape(self) -> None:
        """Checks that the handler's arguments go with the channel and the other settings."""
        if self.channel.traits.has_jobs:
            raise self._error(
                f"channel {self.channel.name} is a Queue, whose jobs go to a worker, one at a "
                "time: pipeline.worker(reads=…)"
            )
        if self.each and self.dataframe:
            raise self._error(
                "each and dataframe exclude each other: a handler gets a record, or a DataFrame"
            )
        if not self.channel.traits.has_payloads and (
            self.dataframe or self.park_key or self.payload
        ):
            raise self._error(
                f"channel {self.channel.name} is an Ick; its members come as a list of str, "
                "without an order between them: dataframe, park_key and payload are for logs"
            )
        if self.dataframe and (self.payload is not None or self.is_async):
            raise self._error(
                "a handler with dataframe=True is a plain function of a DataFrame: payload and "
                "async def are for other handlers"
            )

    @property
    def whose(self) -> str:
        """Its name in errors."""
        return f"{'worker' if isinstance(self, WorkerSpec) else 'consumer'} {self.name}"

    @property
    def is_async(self) -> bool:
        """True if the handler is ``async def``."""
        return is_async(self.handler)

    @property
    def takes_session(self) -> bool:
        """True if the handler is called with a session; a worker's may take the job alone."""
        return not isinstance(self, WorkerSpec) or takes_session(self.handler)


@dataclass(frozen=True)
class WorkerSpec(ConsumerSpec):
    """A consumer of a queue: ``handler(session, job)`` does a job in the transaction that ends it.

    ``handler(job)`` does it without a transaction: its end is committed afterwards, with others.

    Of ``ConsumerSpec`` it has ``name``, ``channel``, ``handler``, ``payload``, ``on_poison``,
    ``halt_after``, ``isolation``, ``idle_timeout`` and ``trace``.

    Attributes:
        attempts: Attempts at a job before it is dead-lettered; those that were snoozed, and those
            that a server was not there for, do not count.  A process that dies, or a handler that
            hangs, has made an attempt.
        concurrency: Jobs that a process works on at the same time: in as many threads, or, if the
            handler is ``async def``, tasks of one event loop.  Each has a connection to
            Postgres, unless the handler takes no session.
        lease: Time after which another process gets the jobs of one that died.  While a process
            lives it extends them.
        limit: Longest time for one job: after it, others may do the job, and this attempt cannot
            commit.
        backoff: Pause after the first failed attempt; doubled by each further one, up to five
            minutes.
        together: How many short jobs a handler with a session may do in one transaction.  If one
            of them fails, is cancelled or lost, all are rolled back, and the others are done
            again without it.
    """

    each: bool = True
    attempts: int = 5
    concurrency: int = 4
    lease: Seconds = Seconds("30s", MIN_LEASE_S, MAX_LEASE_S)
    limit: Seconds = Seconds("5m", MIN_LEASE_S, MAX_LEASE_S)
    backoff: Seconds = Seconds("1s", 0.0, MAX_LEASE_S)
    together: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, limit in (("concurrency", MAX_CONCURRENCY), ("together", MAX_TOGETHER)):
            if not is_number(value := getattr(self, name), 1, limit):
                raise DeclarationError(f"{self.whose}: {name} is {value!r}; it takes 1 to {limit}")
        if self.together > 1 and not self.takes_session:
            raise DeclarationError(
                f"{self.whose}: together is for handlers that take a session; jobs of a handler "
                "without one are finished together anyway"
            )

    @override
    def _check_shape(self) -> None:
        if not self.channel.traits.has_jobs:
            raise DeclarationError(
                f"worker {self.name}: channel {self.channel.name} is not a Queue; declare a "
                "consumer: pipeline.consumer(reads=…)"
            )


@dataclass(frozen=True)
class ReconciliationSpec:
    """The canonical state of a consumer, and the table that it keeps.

    Attributes:
        name: What commands call it; the consumer's name by default.
        consumer: Whose state it is.
        schema: Schema of the state's table; None takes the search path.
        table: The state's table.
        key: Columns that name a row of it; none, if the state is one row.
        columns: Columns that are compared; None compares all that the canonical rows have.
        tolerance: For columns of numbers: by how much they may differ.  Nothing is tolerated that
            is not named.
        canonical: ``canonical(tables)`` gives the rows that the state should hold, out of the
            application's tables: a query as text or as SQLAlchemy's ``select``, or what ``tables``
            gives: on Spark, a DataFrame.
    """

    name: str
    consumer: ConsumerSpec
    schema: str | None
    table: str
    key: tuple[str, ...]
    columns: tuple[str, ...] | None
    tolerance: Mapping[str, float]
    canonical: Callable[[Any], Any]

    def __post_init__(self) -> None:
        checked_name(self.name, "reconciliation")
        for column in {*self.key, *(self.columns or ()), *self.tolerance}:
            if not isinstance(cast("object", column), str) or not column or "\0" in column:
                raise DeclarationError(
                    f"reconciliation {self.name}: {column!r} is not the name of a column"
                )
        twice = set(self.key) & {*(self.columns or ()), *self.tolerance}
        if twice:
            raise DeclarationError(
                f"reconciliation {self.name}: column {min(twice)} is in key: it cannot be compared"
            )
        negative = [column for column, limit in self.tolerance.items() if not limit >= 0]
        if negative:
            raise DeclarationError(
                f"reconciliation {self.name}: tolerance of {negative[0]} is "
                f"{self.tolerance[negative[0]]}; it takes 0 or more"
            )

    @property
    def state(self) -> str:
        """Qualified name of the state's table, for messages."""
        return self.table if self.schema is None else f"{self.schema}.{self.table}"


def table_named(state: Any) -> tuple[str | None, str]:
    """Returns schema and name of a table given as text, mapped class, or ``Table``."""
    table = getattr(state, "__table__", state)
    if isinstance(table, str):
        schema, _, name = table.rpartition(".")
        if name:
            return schema or None, name
    elif isinstance(getattr(table, "name", None), str):
        return table.schema, table.name
    raise DeclarationError(
        f"state {state!r} is not a table: give a mapped class, a Table, or a name such as "
        "'public.totals'"
    )


def checked_changes(on: Change | Collection[Change]) -> frozenset[Change]:
    """Returns the kinds of change as a set; ``on`` may be a single one."""
    return frozenset([on] if isinstance(on, str) else on)
