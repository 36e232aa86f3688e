"""Jobs, as the handler of a worker gets them, and the outcomes that handlers can choose.

    return                  done: what the session has written is committed together with that fact
    Snooze("10m")           another time; the attempt does not count
    Cancel("why")           it need not be done: it is passed without an effect
    DeadLetter("why")       no attempt can succeed
    any other exception     another attempt after a pause; after the last one a dead letter

The three outcomes are raised, or returned.  Whatever the handler has written before is rolled
back.  A batch of several records whose handler raises ``Cancel`` or ``DeadLetter`` is bisected
until the record is found.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Generic

from penstock.declaring.unique import checked_duration
from penstock.errors import InvalidMessage
from penstock.parsing import Duration, find_number, parse_json
from penstock.records import Payload, RecordId, Shard

RESERVED = "penstock"
"""The header that is Penstock's own; handlers do not see it."""

MAX_SNOOZE_S = 10 * 365 * 86_400.0
"""Longest time that a job can be snoozed, in seconds."""

_STAGED_US = re.compile(r'"staged_us": ([0-9]{1,16})\}\}$')
"""Time of staging: the last member of the reserved header, the last header of every message."""

_DUE = re.compile(r'"(due|delay_ms)": ([0-9]{1,16})[,}.]')
"""When a job is due, in the reserved header: milliseconds since 1970, or since its staging."""


class HandlerOutcome(Exception):
    """An outcome other than success.

    Raised, or returned by the handler of one job, record or member.
    """

    reason: str = ""  # why


class Snooze(HandlerOutcome):
    """Retry later, without counting a failed attempt.  A shard of a log or an Ick waits that long.

    Attributes:
        after_s: Seconds until then; None lets the pauses grow, from 50 ms up to ten seconds.
    """

    after_s: float | None = None

    def __init__(self, after: Duration | None = None, reason: str = "") -> None:
        """Says when.

        Args:
            after: Seconds, a ``timedelta``, or a text such as ``30s``, ``10m``, ``2h`` or ``1d``.
            reason: Why, for ``penstock status``.

        Raises:
            InvalidMessage: It is none of these, negative, or more than ten years.
        """
        super().__init__(reason)
        self.reason = str(reason)
        if after is not None:
            self.after_s = checked_duration("after", after, MAX_SNOOZE_S)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.after_s, self.reason)


class Cancel(HandlerOutcome):
    """Skip: the job is finished, or the record or member passed, without an effect."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = str(reason)


class DeadLetter(HandlerOutcome):
    """Dead-letter now: no attempt can succeed."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = str(reason)


def read_identity(id_: str, headers: str) -> tuple[RecordId, int] | None:
    """Returns the record's id and its staging time in microseconds since 1970.

    None without a pipeline.

    Args:
        id_: The message's id.
        headers: Its headers.  They are not parsed: a producer may have put anything in front.
    """
    match, number = _STAGED_US.search(headers), find_number(id_.encode())
    return None if match is None or number is None else (RecordId(number), int(match[1]))


def find_ready_us(staged_us: int, headers: str) -> int:
    """Returns when a job was staged, or is due if that is later: microseconds since 1970.

    Headers are those of its message: see ``read_identity``.
    """
    start = max(0, headers.rfind(f'"{RESERVED}": {{'))
    if (match := _DUE.search(headers, start)) is None:
        return staged_us
    time_us = int(match[2]) * 1000
    return max(staged_us, time_us) if match[1] == "due" else staged_us + time_us


MAX_NOTE_CHARACTERS = 500
"""Longest note of a job's progress; the rest is cut."""


def _never() -> bool:
    return False


def _nowhere(_done: float, _note: str) -> None: ...


@dataclass(frozen=True)
class Job(Generic[Payload]):
    """A job, as the handler of a worker gets it.

    Attributes:
        channel: Name of the queue.
        shard: Number of the shard.
        id: Number of the staged record: unique in the pipeline's life, the same in each attempt.
        tenant: Whose it is.
        key: Its key within the tenant; empty if it has none.
        attempts: How many times it was handed over, this time included; snoozed attempts do not
            count.
        data_json: The payload as JSON text, as it came out of Postgres.
        headers_json: The headers as JSON text, Penstock's own among them; empty if there are none.
        since_ms: When it was written to the queue, or was due if that was later: milliseconds since
            1970 (UTC).
        deadline_ms: From when on it is dead-lettered instead of handed over, likewise; 0 if it has
            no deadline.
        staged_us: When it was staged, by Postgres' clock: microseconds since 1970.  Together with
            ``id`` it identifies the record even if Postgres was restored to older data and has
            given the number out again; 0 if it is not known.
    """

    channel: str
    shard: Shard
    id: RecordId
    tenant: str
    key: str
    attempts: int
    data_json: str = field(repr=False)
    headers_json: str = field(default="", repr=False)
    since_ms: int = 0
    deadline_ms: int = 0
    staged_us: int = 0
    _check_stale: Callable[[], bool] = field(default=_never, repr=False, compare=False)
    _report: Callable[[float, str], None] = field(default=_nowhere, repr=False, compare=False)
    _check_cancelled: Callable[[], bool] = field(default=_never, repr=False, compare=False)

    @cached_property
    def data(self) -> Any:
        """Payload, parsed on first use. Raises ``ValueError`` if it cannot be read."""
        return parse_json(self.data_json)

    @cached_property
    def headers(self) -> dict[str, Any]:
        """Headers, parsed on first use; empty if there are none."""
        return {name: value for name, value in self._all_headers().items() if name != RESERVED}

    def _all_headers(self) -> dict[str, Any]:
        parsed = parse_json(self.headers_json) if self.headers_json else None
        return parsed if isinstance(parsed, dict) else {}

    @cached_property
    def _own(self) -> dict[str, Any]:
        """Penstock's own header."""
        header = self._all_headers().get(RESERVED)
        return header if isinstance(header, dict) else {}

    @property
    def action(self) -> str:
        """Kind of change: ``insert``, ``update``, ``delete`` or the application's own word."""
        return str(self._own.get("action", ""))

    @property
    def object(self) -> str:
        """Name of the changed object."""
        return str(self._own.get("object", ""))

    @cached_property
    def payload(self) -> Payload:
        """Payload in the type of ``payload=…``, validated before the handler is called.

        Without it, ``data``.
        """
        payload: Payload = self.data
        return payload

    @property
    def is_stale(self) -> bool:
        """True if the job was cancelled, or its lease was found to have ended.

        Nothing of this attempt will be committed.  A handler that takes long can ask now and then,
        and return.
        """
        return self._check_stale() or self.is_cancelled

    @property
    def is_cancelled(self) -> bool:
        """True if the job was found to be cancelled.

        Nobody will do it, and what was begun outside Postgres may be taken back.  Noticed within a
        second.
        """
        return self._check_cancelled()

    @cached_property
    def result(self) -> Any:
        """Result last set by ``set_result``; None if there is none."""
        return None

    def set_result(self, result: Any) -> None:
        """Sets the result that ``find_job`` returns.

        It is written in the handler's transaction, after its return.

        Args:
            result: Any valid payload, up to 64 KB of JSON.
        """
        self.__dict__["result"] = result

    def report_progress(self, fraction: float, note: str = "") -> None:
        """Reports the progress of the job, for ``find_job`` and ``penstock trace``.

        The call only keeps it: a thread of the worker writes the newest report of each job twice a
        second, even if the attempt fails later.

        Args:
            fraction: Completed part of the job, 0 to 1.
            note: A short text, up to 500 characters.

        Raises:
            InvalidMessage: ``fraction`` is out of range.
        """
        if not 0 <= fraction <= 1:
            raise InvalidMessage("fraction", f"is {fraction!r}; it takes 0 to 1")
        text = (
            str(note)[:MAX_NOTE_CHARACTERS]
            .replace("\0", "\ufffd")
            .encode(errors="replace")
            .decode()
        )
        self._report(float(fraction), text)

    @property
    def staged_at(self) -> datetime:
        """Time of staging, by Postgres' clock."""
        seconds = self.staged_us / 1_000_000 or self.since_ms / 1000
        return datetime.fromtimestamp(seconds, UTC)

    @property
    def deadline(self) -> datetime | None:
        """Time from which the job is dead-lettered instead of handed over.

        None without a deadline.
        """
        return datetime.fromtimestamp(self.deadline_ms / 1000, UTC) if self.deadline_ms else None

    @property
    def place(self) -> str:
        """Place of the job, for messages: ``receipts/0 record 4118``."""
        return f"{self.channel}/{self.shard} record {self.id}"

    def __repr__(self) -> str:
        return f"<Job {self.place} tenant={self.tenant!r} attempts={self.attempts}>"
