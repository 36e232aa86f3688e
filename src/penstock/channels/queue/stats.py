"""Numbers of a queue: messages by state, and their dwell times."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.channels.scripts import as_text
from penstock.display import format_count, format_seconds
from penstock.errors import ForeignQueue


@dataclass(frozen=True, slots=True)
class Dwell:
    """Dwell time before hand-over, in the last five to ten minutes; accurate to a factor of two."""

    count: int
    median_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class QueueStats:
    """The contents of a queue; each shard's numbers are of one moment.

    Attributes:
        waiting: Messages that may be handed over.
        leased: Messages that readers work on.
        delayed: Messages that are not due yet.
        dead: Dead letters.
        oldest_s: Age of the oldest message that waits, is leased or waits for its next attempt, in
            seconds from its first writing, or from when it was due: attempts do not make it
            younger.  None if there is none.
        longest_wait_s: Likewise, of those that wait to be handed over.
        quiet: Dwell time of tenants that held a small part of the queue.
        noisy: Dwell time of tenants that held more than a tenth of it, and at least 30 messages.
        ready_tenants: Tenants with messages that may be handed over.
        over_tenants: Tenants above their elastic limit.
        blocked_tenants: Tenants that wait for a limit.
        streams: Streams of the largest shard.
        damaged: Streams whose keys hold other types.
        written: Messages written in the queue's life; as are ``done``, ``died``, ``reclaimed``
            (leases that ended by themselves) and ``lost`` (their bodies were deleted by hand).
        done: See ``written``.
        died: See ``written``.
        reclaimed: See ``written``.
        lost: See ``written``.
    """

    waiting: int
    leased: int
    delayed: int
    dead: int
    oldest_s: float | None
    longest_wait_s: float | None
    quiet: Dwell
    noisy: Dwell
    ready_tenants: int
    over_tenants: int
    blocked_tenants: int
    streams: int
    damaged: int
    written: int
    done: int
    died: int
    reclaimed: int
    lost: int

    @property
    def length(self) -> int:
        """Returns the number of unfinished messages: waiting, leased and delayed."""
        return self.waiting + self.leased + self.delayed


@dataclass(frozen=True, slots=True)
class Explanation:
    """State of a message, and the reason why it waits.

    Attributes:
        id: The message.
        state: ``waiting``, ``leased``, ``delayed``, ``dead`` or ``finished``.
        facts: What else there is to say, by name; times in seconds.
        text: A sentence.
    """

    id: str
    state: str
    facts: Mapping[str, str]
    text: str


_TIMES = ("age", "lease", "due", "blocked_for")

READER = re.compile(
    r"(?P<consumer>[^@]+)(@(?P<process>[^/]+)(/(?P<slots>[0-9]{1,6}))?)?-[0-9a-f]{12}"
)
"""Name of a reader: see ``worker_name``, and ``QueueWorker`` for its process and slots.  The token
of a lease has two numbers more, each behind a slash."""


def explanation(id_: str, reply: Mapping[str, str]) -> Explanation:
    """Returns the reply of ``explain.lua``, for people."""
    facts = {
        name: f"{float(value) / 1000:g}" if name in _TIMES else value.removesuffix(".000")
        for name, value in reply.items()
    }
    return Explanation(id_, facts["state"], facts, _sentence(facts))


def _parse_holder(token: str) -> str:
    """Returns the reader that has a lease: the consumer, and its process if the name has it."""
    match = READER.fullmatch(token.rsplit("/", 2)[0])
    if match is None:
        return token
    return "@".join(part for part in match.group("consumer", "process") if part)


def _sentence(facts: Mapping[str, str]) -> str:
    holder = _parse_holder(facts.get("holder", ""))
    match facts["state"]:
        case "waiting":
            return f"waits: {_reason(facts)}"
        case "leased" if (lease_s := float(facts["lease"])) <= 0:
            return (
                f"was leased by {holder}, attempt {facts['attempts']}, until "
                f"{format_seconds(abs(lease_s))} ago: the next reader that asks gets it"
            )
        case "leased":
            return (
                f"is leased for another {format_seconds(float(facts['lease']))} by {holder}, "
                f"attempt {facts['attempts']}"
            )
        case "delayed":
            return (
                f"is due in {facts['due']} s, after "
                f"{format_count(int(facts['attempts']), 'attempt')}"
            )
        case "dead":
            return (
                f"is a dead letter after {format_count(int(facts['attempts']), 'attempt')}: "
                f"{facts['reason']}"
            )
        case _:
            return "is done"


def _reason(facts: Mapping[str, str]) -> str:
    if facts["paused"] == "1":
        return "its tenant is paused"
    if "key_is" in facts:
        return _reason_of_key(facts)
    ahead = f"{format_count(int(facts['ahead']), 'message')} of its tenant ahead"
    match facts["tenant_is"]:
        case "blocked" if "blocked_for" in facts:
            return f"its tenant is at a limit for {facts['blocked_for']} s; {ahead}"
        case "blocked":
            return f"its tenant is at a limit until one of its messages is settled; {ahead}"
        case "over":
            return f"its tenant is above its elastic limit, and others are ready; {ahead}"
        case _:
            return f"{ahead}, and {format_count(int(facts['turn']), 'tenant')}"


def _reason_of_key(facts: Mapping[str, str]) -> str:
    ahead = f"{format_count(int(facts['ahead']), 'message')} of its tenant and key ahead"
    match facts["key_is"]:
        case "paused":
            return f"its key is paused; {ahead}"
        case "limited" if "blocked_for" in facts:
            return f"its key is at its limit for {facts['blocked_for']} s; {ahead}"
        case "limited":
            return f"its key is at its limit until one of its messages is settled; {ahead}"
        case _:
            return f"another message of its key goes first; {ahead}"


def parse_stats(reply: Sequence[Any]) -> dict[str, int]:
    """Returns the numbers of ``stats.lua``, by name.  Raises ``ForeignQueue``."""
    try:
        return {as_text(k): int(v) for k, v in zip(reply[1::2], reply[2::2], strict=True)}
    except ValueError as error:
        raise ForeignQueue(
            "a score of the queue is not a time: Penstock did not write it"
        ) from error


def sum_stats(shards: Sequence[Mapping[str, int]]) -> QueueStats:
    """Returns the numbers of all shards together."""

    def total(name: str) -> int:
        return sum(shard[name] for shard in shards)

    def longest(name: str) -> float | None:
        return max((shard[name] / 1000 for shard in shards if shard[name] >= 0), default=None)

    same = (
        "waiting",
        "leased",
        "delayed",
        "dead",
        "damaged",
        "written",
        "done",
        "died",
        "reclaimed",
        "lost",
    )
    return QueueStats(
        oldest_s=longest("oldest"),
        longest_wait_s=longest("longest_wait"),
        quiet=_dwell(shards, "quiet"),
        noisy=_dwell(shards, "noisy"),
        ready_tenants=total("ready"),
        over_tenants=total("over"),
        blocked_tenants=total("blocked"),
        streams=max(shard["streams"] for shard in shards),
        **{name: total(name) for name in same},
    )


def _dwell(shards: Sequence[Mapping[str, int]], kind: str) -> Dwell:
    """Returns the dwell time from counts by powers of two of a millisecond."""
    counts: dict[int, int] = {}
    for shard in shards:
        for name, number in shard.items():
            if name.startswith(f"{kind} "):
                bucket = int(name.split(" ")[1])
                counts[bucket] = counts.get(bucket, 0) + number
    total = sum(counts.values())

    def quantile(part: float) -> float:
        counted = 0
        for bucket in sorted(counts):
            counted += counts[bucket]
            if counted >= part * total:
                return float(2.0**bucket) / 1000
        return 0.0

    return Dwell(total, quantile(0.5), quantile(0.99))
