"""Finds the meaning of an exception in a handler's transaction, and its text without a payload."""

import re
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import structlog

from penstock.channels.server import is_unavailable
from penstock.consuming.delivery import (
    AskedToWait,
    Broken,
    Cancelled,
    Conflict,
    Failed,
    Outcome,
    Unavailable,
)
from penstock.database.driver_errors import ErrorKind, classify, driver_error, is_doubtful, sqlstate
from penstock.declaring.outcomes import Cancel, HandlerOutcome, Snooze
from penstock.errors import HandlerCommitted, HandlerNotRun, ServerUnavailable
from penstock.logs import Repeats
from penstock.parsing import InvalidPayload
from penstock.records import Offset, ShardName

MAX_REASON_CHARACTERS = 500
MAX_FRAMES = 12
MAX_CAUSES = 20
WAITING_FOR_SERVER = "waiting for the server: "
"""Begins the note of a shard that a state of the server keeps; ``new_troubles`` looks for it."""

_OURS = re.compile(r"penstock[\\/](?:consuming|declaring|django|engines[\\/]spark)[\\/]")


@dataclass
class NotApplied(Exception):
    """A transaction was rolled back, or was cut at its COMMIT."""

    outcome: Outcome  # what it means for the items
    error: BaseException  # what was raised
    at_commit: bool = False  # the handler had returned, and COMMIT failed
    # where the checkpoints would be if it had been applied
    reached: Mapping[ShardName, Offset] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Returns the class of the error."""
        return type(driver_error(self.error)).__name__

    @property
    def waits_for(self) -> str:
        """Returns text about what is waited for, for ``penstock status``.

        ``WAITING_FOR_SERVER`` begins that about a server.
        """
        is_asked = isinstance(self.outcome, AskedToWait)
        return f"waiting after {self.reason}" if is_asked else f"{WAITING_FOR_SERVER}{self.reason}"

    @property
    def reason(self) -> str:
        """Returns why, for a dead letter: the class of the error and the first line of its text."""
        return reason(self.error, "at COMMIT: " if self.at_commit else "")


class Culprit(Exception):
    """Says which of several items failed, by its index; raised from what it failed with."""

    def __init__(self, index: int) -> None:
        self.index = index


class Repeated(Exception):
    """A job's record was finished before; a handler that catches it does not change that."""


def error_class(error: BaseException | None) -> str | None:
    """Returns the name of the class of a handler's error.

    None if it has succeeded, or has raised an outcome.
    """
    if error is None or isinstance(error, HandlerOutcome | Repeated):
        return None
    return type(driver_error(error)).__name__


def find_outcome(
    error: BaseException, culprit: int | None = None, depth: int = MAX_CAUSES
) -> Outcome:
    """Returns the meaning of an exception for the items.

    The handler, its flush, the advance or COMMIT has raised it.  An exception that was raised from
    another one, or a group of them, means what these mean.
    """
    if isinstance(error, BaseExceptionGroup) and depth:
        members = (find_outcome(member, culprit, depth - 1) for member in error.exceptions)
        return max(members, key=lambda outcome: _GRAVITY.index(type(outcome)))
    outcome = _find_own_outcome(error, culprit)
    if isinstance(outcome, Failed) and not outcome.for_certain and error.__cause__ and depth:
        return find_outcome(error.__cause__, culprit, depth - 1)
    return outcome


_GRAVITY: tuple[type[Outcome], ...] = (
    Cancelled,
    Conflict,
    AskedToWait,
    Unavailable,
    Failed,
    Broken,
)


def _find_own_outcome(error: BaseException, culprit: int | None) -> Outcome:
    match error:
        case Snooze():
            return AskedToWait(error.after_s)
        case Cancel():
            return Cancelled(culprit)
        case HandlerOutcome() | InvalidPayload():
            return Failed(culprit, for_certain=True)
        case HandlerNotRun() | HandlerCommitted():
            return Broken()
        case _ if isinstance(error, ServerUnavailable) or is_unavailable(error):
            return Unavailable()
        case _:
            return _find_outcome_in_postgres(error, culprit)


def _find_outcome_in_postgres(error: BaseException, culprit: int | None) -> Outcome:
    match classify(error):
        case None | ErrorKind.STATEMENT:
            return Failed(culprit)
        case ErrorKind.CONFLICT:
            return Conflict()
        case _:  # SCHEMA: code that was deployed before its migration
            return Unavailable(is_stated=not is_doubtful(error))


def reason(error: BaseException, phase: str = "") -> str:
    """Returns why something failed: the class of the error and the first line of its text.

    It is cut and escaped so that Postgres can store it.
    """
    cause = driver_error(error)
    first = (_text(cause).splitlines() or [""])[0]
    text = f"{phase}{type(cause).__name__}: {first}"[:MAX_REASON_CHARACTERS]
    return text.replace("\x00", "\\x00").encode(errors="backslashreplace").decode()


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as failed:  # noqa: BLE001  an error that cannot say what it is must not hide where it was, nor end the process
        return f"its text could not be made: {type(failed).__name__}"


def frames(error: BaseException) -> list[str]:
    """Returns the frames in which an error was raised, the handler's caller first.

    One is ``shop/events.py:41 in ride_totals``, without values.
    """
    links = list(_chain(error))
    walked = chain.from_iterable(traceback.walk_tb(link.__traceback__) for link in reversed(links))
    texts = [
        f"{_short(frame.f_code.co_filename)}:{line} in {frame.f_code.co_name}"
        for frame, line in walked
        if not _OURS.search(frame.f_code.co_filename)
    ]
    return texts[-MAX_FRAMES:]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields the error and what it was raised from."""
    ids: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in ids:
        ids.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _short(path: str) -> str:
    """Returns the last two parts of a path: enough to find it, and nothing about the machine."""
    return "/".join(Path(path).parts[-2:])


def is_exit(error: BaseException) -> bool:
    """Returns whether the handler wanted the process to end.

    A cancelled task or a panic in a library is a failure like any other.
    """
    if isinstance(error, BaseExceptionGroup):
        return any(is_exit(member) for member in error.exceptions)
    return isinstance(error, SystemExit | KeyboardInterrupt)


log = structlog.get_logger("penstock.consumer")


class FailureLog:
    """The failures of one consumer in this process."""

    def __init__(self, consumer: str) -> None:
        self._consumer, self._repeats = consumer, Repeats()

    def show(self, shard: ShardName, failed: NotApplied) -> None:
        """Logs a failure with where it happened, unless one like it was logged within the hour."""
        if isinstance(failed.outcome, Conflict) or isinstance(failed.error, HandlerOutcome):
            return
        locations = frames(failed.error)
        if self._repeats.is_due((failed.kind, *locations[-1:]), failed.kind):
            log.warning(
                "handler failed",
                consumer=self._consumer,
                shard=str(shard),
                error=failed.kind,
                sqlstate=sqlstate(failed.error),
                at_commit=failed.at_commit,
                traceback=locations,
            )
