"""Events of a process that works on a pipeline, and who observes them.

Metrics, probes, an application's own alarms.

    pipeline.observe(function)      function(event) is called for each event, in the thread that it
                                    happens in

Events are of rounds and batches, never of single records.  Without an observer none is made.  An
observer must be quick, and may be called by several threads at once; what it raises is logged, and
nothing else comes of it.
"""

import decimal
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, get_args

log = logging.getLogger("penstock.observer")


@dataclass(frozen=True, slots=True)
class LoopBegan:
    """A streamer or a worker begins, and has not connected yet.

    Attributes:
        worker: Name of the consumer, or ``streamer``.
    """

    worker: str


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """A round of a streamer or of a worker has ended: both servers have answered.

    Attributes:
        worker: As of ``LoopBegan``.
        seconds: Duration of the round; a worker's includes the wait for work.
    """

    worker: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ServerAway:
    """A server does not answer: it is asked again after a pause.

    Attributes:
        worker: As of ``LoopBegan``.
        server: ``postgres`` or ``redis``.
        seconds: The pause.
    """

    worker: str
    server: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Streamed:
    """Work of a streamer.

    Attributes:
        sequenced: Records that got their offset.
        added: Records that were new to their channel in Redis.
        known: Records sent that it already had.
        removed: Staged records that retention removed.
        backlog: Records that are sequenced and not in Redis; None if this was not looked at.
    """

    sequenced: int = 0
    added: int = 0
    known: int = 0
    removed: int = 0
    backlog: int | None = None


@dataclass(frozen=True, slots=True)
class Staged:
    """An application has written records into its transaction, which may yet be rolled back.

    Triggers write without it.

    Attributes:
        channel: Name of the channel.
        records: How many.
    """

    channel: str
    records: int


@dataclass(frozen=True, slots=True)
class HandlerBegan:
    """A handler is called.

    Attributes:
        consumer: Name of the consumer.
        channel: The channel that it reads.
        records: Records, members or jobs that it is given.
    """

    consumer: str
    channel: str
    records: int


@dataclass(frozen=True, slots=True)
class HandlerEnded:
    """A handler has returned or failed; its transaction is not committed yet.

    Attributes:
        consumer: Name of the consumer.
        channel: The channel that it reads.
        records: Records, members or jobs that it was given.
        seconds: How long it took.
        error: Class of the error that it raised; None if it raised none, or an outcome such as
            ``Snooze``.
        trace: Trace id of its span, the last one if each record has one; None if none is recorded.
    """

    consumer: str
    channel: str
    records: int
    seconds: float
    error: str | None
    trace: str | None = None


@dataclass(frozen=True, slots=True)
class Delivery:
    """Records, members or jobs were delivered, and what became of them is committed.

    Attributes:
        consumer: Name of the consumer.
        channel: The channel that it reads.
        counts: How many were ``applied``, ``skipped``, ``dead``, ``backfilled``, ``cancelled``,
            ``snoozed``, ``retried``, ``stale``; those that are 0 are missing.
        latencies_us: Microseconds from staging to the COMMIT of the effect, of each that was
            applied: to the lock of the checkpoint by Postgres' clock, from there by the process'.
            Of a job they begin when it is due, if that is later.
        trace: Trace id of the span that the last of these was handled in; None if none is recorded.
    """

    consumer: str
    channel: str
    counts: Mapping[str, int]
    latencies_us: Sequence[int]
    trace: str | None = None


@dataclass(frozen=True, slots=True)
class ShardHalted:
    """A consumer stops in a shard until an operator lets it go on: see ``penstock status``.

    Attributes:
        consumer: Name of the consumer.
        channel: The channel that it reads.
        shard: Number of the shard.
        error: Class of the last error.
    """

    consumer: str
    channel: str
    shard: int
    error: str


@dataclass(frozen=True, slots=True)
class DeadLettered:
    """A record, a member or a job has become a dead letter: see ``penstock dead-letters``.

    Attributes:
        consumer: Name of the consumer.
        channel: The channel that it reads.
        shard: Number of the shard.
        error: Class of the last error.
    """

    consumer: str
    channel: str
    shard: int
    error: str


@dataclass(frozen=True, slots=True)
class ShardStopped:
    """The streamer leaves a shard out, and checks it again every few seconds; the others go on.

    Attributes:
        channel: The channel.
        shard: Number of the shard.
        error: Class of the error.
    """

    channel: str
    shard: int
    error: str


@dataclass(frozen=True, slots=True)
class EpochChanged:
    """The streamer goes on in a new epoch.

    An operator has opened it, or the streamer itself after a switch-over.

    Attributes:
        epoch: Its number.
    """

    epoch: int


Trouble = ShardHalted | DeadLettered | ShardStopped | EpochChanged
"""Events that somebody may want to be woken by."""

Event = (
    Staged
    | LoopBegan
    | RoundEnded
    | ServerAway
    | Streamed
    | HandlerBegan
    | HandlerEnded
    | Delivery
    | Trouble
)

Observer = Callable[[Event], object]
"""Called with each event."""

_KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}


def to_wire(event: Event) -> list[Any]:
    """Converts an event to values of JSON."""
    return [type(event).__name__, *(getattr(event, name) for name in event.__match_args__)]


def from_wire(values: Sequence[Any]) -> Event:
    """Rebuilds the event of another process."""
    kind, *fields = values
    return _KINDS[kind](*fields)


@dataclass(frozen=True, slots=True)
class TroubleReport:
    """Something that needs a person, in a pipeline, whichever process it happened in.

    See ``Pipeline.on_trouble``.

    Attributes:
        kind: ``halted``: a consumer applies nothing more of a shard.  ``dead-lettered``: it has new
            dead letters.  ``stopped``: the streamer leaves a shard out.  ``waiting``: for a minute
            a consumer has waited in a shard for what Postgres lacks or cannot do, such as a right,
            a table, or a lock.  ``epoch``: an operator has opened a new one, or a streamer after a
            switch-over.
        text: A sentence, without anything of a record.
        fix: The command that shows more, or repairs it.
        consumer: The consumer; None of ``stopped`` and ``epoch``.
        channel: The channel; None of ``epoch``.
        shard: The shard; None of ``dead-lettered`` and ``epoch``.
        count: New dead letters, or the number of the epoch; 1 otherwise.
    """

    kind: str
    text: str
    fix: str
    consumer: str | None
    channel: str | None
    shard: int | None
    count: int


TroubleHandler = Callable[[TroubleReport], object]
"""Called with each trouble."""


def _find_decimal_variable() -> ContextVar[decimal.Context]:
    """Returns the context variable of the module ``decimal``."""
    context = Context()
    context.run(decimal.getcontext)
    [variable] = context
    return variable


_DECIMAL = _find_decimal_variable()


def fresh_context() -> Context:
    """Copies the context for one call of an application's function.

    The call leaves nothing behind for the next.  A copy shares its values, and the context of
    ``decimal`` is one that is changed in place.
    """
    context = copy_context()
    if (shared := _DECIMAL.get(None)) is not None:
        context.run(decimal.setcontext, shared.copy())
    return context


class Observers:
    """The observers of a pipeline; false while there are none, so that no event need be made."""

    def __init__(self) -> None:
        self._observers: tuple[Observer, ...] = ()
        self._failed: set[tuple[Observer, type[Exception]]] = set()

    def __bool__(self) -> bool:
        return bool(self._observers)

    def __call__(self, event: Event) -> None:
        """Calls each observer; logs errors once a class, without texts that may quote payloads."""
        for observer in self._observers:
            try:
                fresh_context().run(observer, event)
            except Exception as error:  # noqa: BLE001  metrics must not stop the work
                if (kind := (observer, type(error))) not in self._failed:
                    self._failed.add(kind)
                    log.warning(
                        "observer failed at %s: %s", type(event).__name__, type(error).__name__
                    )

    def add(self, observer: Observer) -> None:
        """Adds an observer, behind the others."""
        self._observers = (*self._observers, observer)

    @contextmanager
    def joined_by(self, observer: Observer) -> Iterator[None]:
        """Adds an observer while the block runs."""
        self.add(observer)
        try:
            yield
        finally:
            self._observers = tuple(other for other in self._observers if other != observer)
