"""What an application declares: channels, staging rules, consumers.  Frozen values; nothing here does I/O."""

import builtins
import hashlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, cast, get_args

from penstock.errors import DeclarationError, InvalidName
from penstock.handlers import Handler, Isolation, check_handler, check_payload, is_async
from penstock.records import Shard, ShardName

NAME_RULE = re.compile(r"[a-z0-9](?:[a-z0-9_.-]{0,61}[a-z0-9])?")
"""Names of channels and consumers: they become parts of Redis keys, of SQL values, of file names and of command lines."""

MAX_SHARDS = 1024
MAX_PAYLOAD_BYTES = 1024 * 1024
"""Largest payload by default, in bytes of JSON: half of what keeps a batch of 1,000 in a worker's memory."""

LARGEST_MAX_BYTES = 64 * 1024 * 1024
"""What ``max_bytes`` may be, in bytes: Postgres holds four times as much in one jsonb, Redis eight times in one field."""

Capture = Literal["orm", "trigger"]
"""Who sees the changes of a class: the session's hooks, or triggers of its table."""

Change = Literal["insert", "update", "delete"]
CHANGES: tuple[Change, ...] = ("insert", "update", "delete")

DEAD_LETTERS_IN_A_ROW = 100
"""So many failures with nothing applied between them are a bad deploy rather than bad records."""

MIN_IDLE_TIMEOUT_S, MAX_IDLE_TIMEOUT_S = 0.1, 86_400.0
"""Limits of ``ConsumerSpec.idle_timeout_s``, in seconds."""

MEMBERS_A_BATCH = 500
"""Most members that a consumer of an Ick holds at once, by default: a script call for so many takes a millisecond or two."""


def checked_name(name: object, of: str) -> str:
    """The name, if it keeps the rule.

    Raises:
        InvalidName: Empty, too long, or with characters other than ``a-z 0-9 _ . -``.
    """
    if not isinstance(name, str) or not NAME_RULE.fullmatch(name):
        raise InvalidName(
            f"{of} {name!r}: a name has 1 to 63 characters of a-z, 0-9, '_', '.' and '-', "
            "and begins and ends with a letter or a digit"
        )
    return name


def shard_for_key(key: str | bytes, shards: int) -> Shard:
    """The shard of a key: the first four bytes of its SHA-256, as a number, modulo the number of shards.

    A hash that Postgres and every language have, so that triggers and other producers agree with this function.
    """
    given = key.encode() if isinstance(key, str) else key
    return Shard(int.from_bytes(hashlib.sha256(given).digest()[:4]) % shards)


class _Sharded:
    """What all kinds of channel share."""

    name: str
    shards: int
    keep: timedelta

    def _check(self) -> None:
        checked_name(self.name, "channel")
        if not isinstance(cast("object", self.shards), int) or not 1 <= self.shards <= MAX_SHARDS:
            raise DeclarationError(
                f"channel {self.name}: shards is {self.shards!r}; it takes 1 to {MAX_SHARDS}"
            )
        if self.keep < timedelta(0):
            raise DeclarationError(
                f"channel {self.name}: keep is {self.keep}; it takes no negative time"
            )

    def shard_for(self, key: str | bytes) -> Shard:
        """The shard of a key: see ``shard_for_key``."""
        return shard_for_key(key, self.shards)

    @property
    def shard_names(self) -> tuple[ShardName, ...]:
        """All its shards."""
        return tuple(ShardName(self.name, Shard(number)) for number in range(self.shards))


@dataclass(frozen=True)
class Log(_Sharded):
    """A channel that keeps records in order: one Redis stream a shard.

    Attributes:
        name: Name of the channel, 1 to 63 characters of ``a-z 0-9 _ . -``.
        shards: Number of shards, fixed for the channel's life: the key of a record decides its shard.
        keep: How long records stay after every consumer has passed them, for new consumers and for looking back.
        max_bytes: Largest payload that ``stage`` takes, in bytes of JSON; 64 MiB at the most.
    """

    name: str
    shards: int = 4
    keep: timedelta = timedelta(hours=24)
    max_bytes: int = MAX_PAYLOAD_BYTES
    kind: Literal["log"] = field(default="log", init=False)

    def __post_init__(self) -> None:
        self._check()
        if not 1 <= self.max_bytes <= LARGEST_MAX_BYTES:
            raise DeclarationError(
                f"channel {self.name}: max_bytes is {self.max_bytes}; it takes 1 to {LARGEST_MAX_BYTES:,}. "
                "Keep larger payloads elsewhere, and stage where they are"
            )


@dataclass(frozen=True)
class Ick(_Sharded):
    """A channel that keeps what is dirty: each member once, since it first became so; one Ick of Redis::Ick a shard.

    Attributes:
        name: Name of the channel, 1 to 63 characters of ``a-z 0-9 _ . -``.
        shards: Number of shards, fixed for the channel's life: the member decides its shard, and shards are what
            several processes of the consumer share.
        keep: How long staged rows stay after what they say is done, for looking back.
    """

    name: str
    shards: int = 4
    keep: timedelta = timedelta(hours=1)
    kind: Literal["ick"] = field(default="ick", init=False)

    def __post_init__(self) -> None:
        self._check()

    @property
    def max_bytes(self) -> int:
        """Its records have no payload."""
        return MAX_PAYLOAD_BYTES


Channel = Log | Ick
"""Any kind of channel."""


@dataclass(frozen=True)
class StagingRule:
    """Which changes of which class are staged for which channel, and how.

    Attributes:
        type: The mapped class; subclasses that are mapped are included.
        channel: Where the records go.
        on: The kinds of change that are staged.
        key: Attribute name, several names, or function of the object: records of one key keep their order.  Several
            values make one key, a JSON array: ``[7, "north"]``.
        data: Names of attributes, or a function of the object that gives the payload; None takes **every column** except
            those marked with ``info={"secret": True}``.
        when: Function of the object; a change of an object for which it is false is not staged.  With
            ``capture="trigger"`` a condition in SQL over the columns.
        object: What the records call it; by default the name of the table.
        capture: ``orm``: by the session's hooks.  ``trigger``: by triggers, installed by ``penstock init``, that see
            every writer; the hooks then leave the class alone, and ``key`` and ``data`` are names of attributes.
        headers: Metadata beside the payload: a dict for all records of the rule, or a function of the object.
    """

    type: builtins.type[Any]
    channel: Channel
    on: frozenset[Change]
    key: str | Sequence[str] | Callable[[Any], object]
    data: Sequence[str] | Callable[[Any], Any] | None = None
    when: Callable[[Any], bool] | str | None = None
    object: str | None = None
    capture: Capture = "orm"
    headers: Mapping[str, Any] | Callable[[Any], dict[str, Any] | None] | None = None

    def __post_init__(self) -> None:
        self._check_parts()
        self._check_capture()

    def _check_parts(self) -> None:
        name = self.type.__name__
        unknown = set(self.on) - set(CHANGES)
        if unknown or not self.on:
            raise DeclarationError(
                f"staging rule of {name}: on={sorted(self.on)}; it takes any of {', '.join(CHANGES)}"
            )
        if isinstance(self.data, str):
            raise DeclarationError(
                f"staging rule of {name}: data is one str; it takes a list of names: data=[{self.data!r}]"
            )
        if self.data is not None and not callable(self.data):
            object.__setattr__(self, "data", tuple(self.data))
        if not callable(self.key) and not isinstance(self.key, str):
            names = tuple(self.key)
            if not names:
                raise DeclarationError(
                    f"staging rule of {name}: key is empty; it takes at least one name of an attribute"
                )
            object.__setattr__(self, "key", names if len(names) > 1 else names[0])
        if isinstance(self.channel, Ick) and self.data != ():
            raise DeclarationError(
                f"staging rule of {name}: channel {self.channel.name} is an Ick, which keeps members and no payloads: "
                "pipeline.marks_dirty(…) instead of stages(…)"
            )

    def _check_capture(self) -> None:
        name = self.type.__name__
        if self.capture not in get_args(Capture):
            raise DeclarationError(
                f"staging rule of {name}: capture={self.capture!r}; it takes 'orm' or 'trigger'"
            )
        if self.capture == "orm" and isinstance(self.when, str):
            raise DeclarationError(
                f"staging rule of {name}: when is SQL text, which only triggers understand; "
                "give a function of the object, or capture='trigger'"
            )
        if self.capture == "trigger" and (
            callable(self.key)
            or callable(self.data)
            or callable(self.when)
            or callable(self.headers)
        ):
            raise DeclarationError(
                f"staging rule of {name}: a trigger cannot call Python; with capture='trigger', key and data are "
                "names of attributes, when is SQL text and headers is a dict"
            )


@dataclass(frozen=True)
class ConsumerSpec:
    """A named handler that reads a channel.

    Attributes:
        name: Name of the consumer; its checkpoints are kept under it.
        channel: What it reads.
        handler: ``handler(session, records)``, or ``handler(session, record)`` if ``each``; ``async def`` handlers get an
            ``AsyncSession``.  The records are of one shard, or of several if these have few: each shard's in its order.
            The handler of an Ick gets members, each a ``str``, instead of records.
        each: One record a call instead of a batch.
        dataframe: The handler is set-based: ``handler(session, frame)`` gets a Spark DataFrame of records.  It runs on the
            Spark engine only; a batch that fails is retried as it is, until its handler is fixed.
        payload: A dataclass, TypedDict, msgspec Struct or Pydantic model that ``record.payload`` is to be; a record that
            does not fit is dead-lettered.  None leaves the payload as parsed JSON.
        batch: Most records a transaction.
        start: Where a new consumer begins: the ``earliest`` record that is still kept, or after the ``latest``.
        attempts: Attempts before a failing batch is bisected, and before a single failing record is dead-lettered.
            A batch of several shards that fails is first retried shard by shard.
        on_poison: What happens to a record that fails alone: it is dead-lettered (``dead_letter``), or the shard stops
            (``halt``).
        halt_after: After so many dead letters with nothing applied between them, the consumer halts: every record
            failing is a bad deploy, and dead-lettering them all would help nobody.
        park_key: With ``dead_letter``: later records of the same key are dead-lettered too, so that their order holds.
        isolation: Isolation level of the transaction.  Under ``READ COMMITTED`` two shards that update one row from the
            value they read lose one of the updates: choose it for handlers whose SQL computes the new value itself.
        idle_timeout_s: Longest time, in seconds, that the handler may go without a statement on its session, computing or
            waiting for a service.  Then Postgres ends the transaction, and other processes take the shards over; a batch
            that fails in this way is bisected like any other.  A suspended process keeps its shards for this long.
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
    idle_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        checked_name(self.name, "consumer")
        check_handler(self.name, self.handler)
        self._check_shape()
        if self.payload is not None:
            check_payload(self.name, self.payload)
        for setting in ("batch", "attempts", "halt_after"):
            if getattr(self, setting) < 1:
                raise DeclarationError(
                    f"consumer {self.name}: {setting} is {getattr(self, setting)}; it takes at least 1"
                )
        if not MIN_IDLE_TIMEOUT_S <= self.idle_timeout_s <= MAX_IDLE_TIMEOUT_S:
            raise DeclarationError(
                f"consumer {self.name}: idle_timeout_s is {self.idle_timeout_s}; it takes {MIN_IDLE_TIMEOUT_S:g} to "
                f"{MAX_IDLE_TIMEOUT_S:g} seconds"
            )
        if self.isolation not in get_args(Isolation):
            raise DeclarationError(
                f"consumer {self.name}: isolation={self.isolation!r}; it takes {', '.join(get_args(Isolation))}"
            )

    def _check_shape(self) -> None:
        """What a handler gets must go together with the channel and the other settings."""
        if self.each and self.dataframe:
            raise DeclarationError(
                f"consumer {self.name}: each and dataframe exclude each other: a handler gets a record, or a DataFrame"
            )
        if isinstance(self.channel, Ick) and (self.dataframe or self.park_key or self.payload):
            raise DeclarationError(
                f"consumer {self.name}: channel {self.channel.name} is an Ick; its members come as a list of str, without "
                "an order between them: dataframe, park_key and payload are for logs"
            )
        if self.dataframe and (self.payload is not None or self.is_async):
            raise DeclarationError(
                f"consumer {self.name}: a handler with dataframe=True is a plain function of a DataFrame: "
                "payload and async def are for the others"
            )

    @property
    def is_async(self) -> bool:
        """Whether the handler is ``async def``."""
        return is_async(self.handler)


@dataclass(frozen=True)
class ReconciliationSpec:
    """What a consumer should hold, and where it holds it.

    Attributes:
        name: What commands call it; the consumer's name by default.
        consumer: Whose state it is.
        schema: Schema of the state's table; None takes the search path.
        table: The state's table.
        key: Columns that name a row of it; none, if the state is one row.
        columns: Columns that are compared; None compares all that the canonical rows have.
        tolerance: For columns of numbers: by how much they may differ.  Nothing is tolerated that is not named.
        canonical: ``canonical(tables)`` gives the rows that the state should hold, out of the application's tables:
            a query as text or as SQLAlchemy's ``select``, or what ``tables`` gives: on Spark, a DataFrame.
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
                    f"reconciliation {self.name}: {column!r} is no name of a column"
                )
        twice = set(self.key) & {*(self.columns or ()), *self.tolerance}
        if twice:
            raise DeclarationError(
                f"reconciliation {self.name}: column {min(twice)} is in key, and cannot be compared as well"
            )
        negative = [column for column, by in self.tolerance.items() if not by >= 0]
        if negative:
            raise DeclarationError(
                f"reconciliation {self.name}: tolerance of {negative[0]} is {self.tolerance[negative[0]]}; it takes 0 or more"
            )

    @property
    def state(self) -> str:
        """The state's table, for people."""
        return self.table if self.schema is None else f"{self.schema}.{self.table}"


def table_named(state: Any) -> tuple[str | None, str]:
    """Schema and name of a table that was given as text, as a mapped class, or as SQLAlchemy's ``Table``.

    Raises:
        DeclarationError: It is none of these.
    """
    table = getattr(state, "__table__", state)
    if isinstance(table, str):
        schema, _, name = table.rpartition(".")
        if name:
            return schema or None, name
    elif isinstance(getattr(table, "name", None), str):
        return table.schema, table.name
    raise DeclarationError(
        f"state {state!r} is no table: give a mapped class, a Table, or a name such as 'public.totals'"
    )


def checked_changes(on: Change | Collection[Change]) -> frozenset[Change]:
    """The kinds of change as a set; one word may stand alone."""
    return frozenset([on] if isinstance(on, str) else on)
