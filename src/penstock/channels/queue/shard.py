"""One shard of a queue, without any input or output: which scripts to call, and their replies.

Each operation is a generator of steps, so that a reply such as "the queue has grown" is handled in
one place.
"""

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from penstock.channels.commands import RedisClient
from penstock.channels.driving import Steps, drive
from penstock.channels.queue.declared_limits import DeclaredLimits, NewestLimits, encode_limits
from penstock.channels.queue.queue_messages import DeadMessage, Message, NewMessage, Written, new_id
from penstock.channels.queue.stats import parse_stats
from penstock.channels.routing import QueueKeys, choose_hand, queue_keys
from penstock.channels.scripts import Argument, Call, as_text, script
from penstock.channels.server import REDIS_ERRORS, RedisFailure, translate_error
from penstock.declaring.kinds import (
    DEFAULT_HAND,
    MAX_SHARDS,
    MAX_STREAMS,
    checked_name,
    shard_for_key,
)
from penstock.declaring.unique import TenantLimits, mark_key, name_within, unmark_key
from penstock.errors import (
    AppendRefused,
    DeclarationError,
    ForeignLog,
    ForeignQueue,
    InvalidMessage,
    PenstockError,
    QueueDamaged,
    TenantFull,
)
from penstock.records import Shard, ShardName

ITEMS = 100
"""Limit of messages in one call of a script: Redis serves no other client while a script runs."""

BYTES = 1024 * 1024
"""Bytes of payloads after which a call takes no further message."""

T = TypeVar("T")


_MET_GARBAGE = re.compile(
    "Bad data format|Missing bytes|attempt to|bad argument|is not an integer|not a valid float|is "
    "not a float"
)
"""Lua errors for a value that Penstock did not write."""


def run(client: RedisClient, steps: Steps[T], activity: str) -> T:
    """Runs an operation on a client for threads; raises as ``translated``."""
    return drive(client, translated(steps, activity))


def translated(steps: Steps[T], activity: str) -> Steps[T]:
    """Returns an operation of a queue, with the client library's errors as ours.

    ``activity`` is for their texts: ``reading receipts``.  Raises ``ServerUnavailable``,
    ``AppendRefused`` or ``ForeignQueue``.
    """
    try:
        return (yield from steps)
    except REDIS_ERRORS as error:
        raise _translate(error, activity) from error


def _translate(error: RedisFailure, activity: str) -> PenstockError:
    translation = translate_error(error, activity)
    if isinstance(translation, ForeignLog):
        return ForeignQueue(
            f"{activity}: a key of the queue holds another type; `penstock doctor` and "
            "Queue.check() name it. "
            "Rename it, or give the queue another name"
        )
    if isinstance(translation, AppendRefused) and _MET_GARBAGE.search(str(error)):
        return ForeignQueue(
            f"{activity}: a key of the queue holds values that Penstock did not write: "
            f"{translation}. "
            "Find out what writes there, rename the shard's keys, and the streamer writes again "
            "what is missing"
        )
    return translation


@dataclass(frozen=True, slots=True)
class TakenMessages:
    """Messages that a round has leased, and the number of those without a body.

    Bodies of lost messages were deleted.  ``due_s`` are the seconds until something is due; None if
    nothing is.
    """

    messages: list[Message]
    due_s: float | None
    lost: int


@dataclass(frozen=True, slots=True)
class Company:
    """Number of messages that a reader's process has, and whether others may come.

    They would come by other calls.
    """

    messages: int
    may_get_others: bool


@dataclass(frozen=True, slots=True)
class Settlement:
    """The end of a lease."""

    id: str  # the message
    token: str  # the token of its lease
    outcome: str  # ``done``, ``retry``, ``snooze``, ``release`` or ``dead``
    delay_s: float = 0.0  # with ``retry`` and ``snooze``: seconds until it may be handed over again
    seconds: float = 0.0  # how long the work took
    reason: str = ""  # with ``dead``: why


class QueueShard:
    """A shard of a queue; ``streams`` is its least known number of streams."""

    def __init__(self, keys: QueueKeys, number: int, streams: int, hand: int) -> None:
        self.keys = keys
        self.number = number
        self.streams = streams
        self.limits: NewestLimits | None = None
        """What is to hold before anything is written or handed over; None is whatever does."""
        self._declared = streams
        self._hand = hand

    def call(
        self, name: str, arguments: Sequence[Argument], first_keys: Sequence[str] = ()
    ) -> Steps[list[Any]]:
        """Calls a script until its reply answers the call.  Raises ``ForeignQueue``.

        ``first_keys`` are keys that it declares before the queue's own.
        """
        while True:
            keys = [*first_keys, *self.keys.all(self.streams)]
            [reply] = yield from script(name).checked_steps([Call(keys, arguments)])
            match reply[0]:
                case b"streams":
                    self.streams = max(self._declared, int(reply[1]))
                case b"lost":
                    yield from self.rebuild()
                case b"foreign":
                    raise ForeignQueue(
                        f"{as_text(reply[1])} holds another format: this release reads queue.v2"
                    )
                case _:
                    return list(reply)

    def call_limited(
        self, name: str, arguments: Sequence[Argument], first_keys: Sequence[str] = ()
    ) -> Steps[list[Any]]:
        """Calls a script that works under the declared limits only, and declares them first."""
        while True:
            version = "*" if self.limits is None else self.limits.current.version
            reply = yield from self.call(name, (version, *arguments), first_keys)
            if self.limits is None or reply[0] != b"undeclared":
                return reply
            yield from self._renew(self.limits)

    def _renew(self, limits: NewestLimits) -> Steps[None]:
        if (yield from self.declare(limits.renew())):
            limits.report(self.number)

    def rebuild(self) -> Steps[int]:
        """Rebuilds what follows from the bodies of messages; returns how many messages are lost.

        Raises ``ForeignQueue``.
        """
        lost, start = 0, 1
        while True:
            keys = self.keys.all(MAX_STREAMS)
            [reply] = yield from script("queue/rebuild").checked_steps([Call(keys, (start,))])
            if reply[0] == b"foreign":
                raise ForeignQueue(
                    f"{as_text(reply[1])} holds another type or format: rename it, and the queue "
                    "rebuilds what it can"
                )
            if reply[0] != b"rebuilding":
                return lost
            lost, start = lost + int(reply[2]), 0

    def write(self, messages: Sequence[NewMessage]) -> Steps[list[Written]]:
        """Writes messages; repeated, it changes nothing.  Raises ``QueueDamaged``."""
        written: list[Written] = []
        for begin in range(0, len(messages), ITEMS):
            part = messages[begin : begin + ITEMS]
            arguments: list[Argument] = [self._declared]
            for message in part:
                arguments += self._encode(message)
            reply = yield from self.call("queue/write", arguments)
            written += [_written(*pair) for pair in zip(part, reply[1:], strict=True)]
        return written

    def _encode(self, message: NewMessage) -> tuple[Argument, ...]:
        hand = choose_hand(message.tenant, self._declared, self._hand)
        unique = message.unique
        name = unique.name if unique else ""
        if unique and unique.within == "tenant":
            name = name_within(message.tenant, name)
        due = f"+{message.delay_s * 1000:.0f}" if message.delay_s else _milliseconds(message.due)
        return (
            message.id,
            message.tenant,
            mark_key(message.key, message.priority),
            ",".join(map(str, hand)),
            due,
            _milliseconds(message.deadline),
            name,
            unique.held_until if unique else "",
            f"{unique.window_s * 1000:.0f}" if unique else "",
            message.payload,
            message.headers,
        )

    def take(
        self,
        request: str,
        worker: str,
        *,
        lease_s: float,
        count: int,
        preferred: int | None = None,
        company: Company | None = None,
    ) -> Steps[TakenMessages]:
        """Takes messages, each under a lease; a repeated ``request`` returns the same messages.

        With ``company``, a message whose last reader may have died of it is taken alone.
        """
        reply = yield from self.call_limited(
            "queue/take",
            (
                request,
                worker,
                int(lease_s * 1000),
                min(count, ITEMS),
                BYTES,
                -1 if preferred is None else preferred,
                -1 if company is None else company.messages,
                int(company is not None and company.may_get_others),
            ),
        )
        if reply[0] == b"undeclared":  # it is for the pipeline to declare them
            return TakenMessages([], None, 0)
        self.streams = max(self._declared, int(reply[1]))
        wait_ms = int(reply[2])
        messages = [self._message(values) for values in reply[4:]]
        return TakenMessages(messages, None if wait_ms < 0 else wait_ms / 1000, int(reply[3]))

    def _message(self, values: Sequence[Any]) -> Message:
        id_, tenant, key, attempts, since, deadline, payload, headers, *alone = values
        return Message(
            self.number,
            as_text(id_),
            as_text(tenant),
            unmark_key(as_text(key)),
            int(attempts),
            int(since),
            int(deadline),
            payload,
            as_text(headers),
            is_alone=alone == [1],
        )

    def settle(self, settlements: Sequence[Settlement]) -> Steps[list[bool]]:
        """Settles leases; returns False for each stale one."""
        settled: list[bool] = []
        for begin in range(0, len(settlements), ITEMS):
            arguments: list[Argument] = []
            for settlement in settlements[begin : begin + ITEMS]:
                arguments += (
                    settlement.id,
                    settlement.token,
                    settlement.outcome,
                    int(settlement.delay_s * 1000),
                    f"{settlement.seconds:.6f}",
                    settlement.reason,
                )
            reply = yield from self.call("queue/settle", arguments)
            settled += [word == b"ok" for word in reply[1:]]
        return settled

    def extend(self, leases: Sequence[tuple[str, str]], lease_s: float) -> Steps[list[bool]]:
        """Extends leases, given as ids and tokens; returns False for each stale one."""
        extended: list[bool] = []
        for begin in range(0, len(leases), ITEMS):
            flat = [text for lease in leases[begin : begin + ITEMS] for text in lease]
            reply = yield from self.call("queue/extend", (int(lease_s * 1000), *flat))
            extended += [word == b"ok" for word in reply[1:]]
        return extended

    def confirm(self, leases: Sequence[tuple[str, str]]) -> Steps[list[bool]]:
        """Returns for each lease, an id and a token, whether it is still held."""
        flat = [text for lease in leases for text in lease]
        [words] = yield from script("queue/confirm").checked_steps(
            [Call([self.keys.messages], flat)]
        )
        return [word == b"ok" for word in words]

    def delete(self, ids: Sequence[str], tenant: str = "") -> Steps[list[str]]:
        """Deletes messages; returns the state that each was in, or ``unknown``.

        With ``tenant``, deletes only that tenant's.
        """
        deleted: list[str] = []
        for begin in range(0, len(ids), ITEMS):
            reply = yield from self.call("queue/delete", (tenant, *ids[begin : begin + ITEMS]))
            deleted += map(as_text, reply[1:])
        return deleted

    def redrive(self, ids: Sequence[str]) -> Steps[int]:
        """Returns dead letters to the queue; returns how many."""
        redriven = 0
        for begin in range(0, len(ids), ITEMS):
            reply = yield from self.call("queue/redrive", ids[begin : begin + ITEMS])
            redriven += reply[1:].count(b"ok")
        return redriven

    def dead(self, count: int) -> Steps[list[DeadMessage]]:
        """Returns dead letters, oldest first."""
        letters: list[DeadMessage] = []
        for first in range(0, count, ITEMS):
            page_size = min(ITEMS, count - first)
            reply = yield from self.call("queue/browse", (first, page_size))
            letters += [
                DeadMessage(
                    self._message((*values[:5], 0, *values[7:])), int(values[5]), as_text(values[6])
                )
                for values in reply[1:]
            ]
            if len(reply) <= page_size:
                break
        return letters

    def limit(self, tenant: str, limits: TenantLimits | None) -> Steps[None]:
        """Sets a tenant's limits; None removes them.

        The tenant "" stands for all without their own limits.
        """
        yield from self.call("queue/limit", (tenant, encode_limits(limits)))

    def declare(self, limits: DeclaredLimits) -> Steps[bool]:
        """Sets the limits of a declaration, in place of those of an earlier one.

        Returns whether they were not there.
        """
        reply = yield from self.call(
            "queue/declare", (limits.version, limits.within, *limits.items)
        )
        return bool(reply[1])

    def keep_limits(self) -> Steps[None]:
        """Declares the limits that apply, unless they are declared."""
        if self.limits is not None:
            reply = yield from self.call("queue/declare", (self.limits.current.version,))
            if reply[0] == b"unknown":
                yield from self._renew(self.limits)

    def sweep(self, interval_s: float = 0.0) -> Steps[int]:
        """Dead-letters late messages, shrinks the queue if it can, and rebuilds missing parts.

        Does nothing if another sweep was less than ``interval_s`` ago.  Returns how many messages
        have lost their bodies.
        """
        reply = yield from self.call("queue/sweep", (self._declared, int(interval_s * 1000)))
        self.streams = max(self._declared, int(reply[1]))
        return 0 if int(reply[3]) else (yield from self.rebuild())

    def stats(self) -> Steps[dict[str, int]]:
        """Returns all counts of ``stats.lua``, by name.  Raises ``ForeignQueue``."""
        reply = yield from self.call("queue/stats", ("",))
        return parse_stats(reply)

    def explain(self, id_: str) -> Steps[dict[str, str] | None]:
        """Returns the state of a message, and why it waits; None if there is none."""
        reply = yield from self.call("queue/explain", (id_,))
        return read_facts(reply[1])


def read_facts(reply: Sequence[Any]) -> dict[str, str] | None:
    """Returns the reply of ``explain.lua`` by name; None for an unknown message."""
    texts = [as_text(text) for text in reply]
    facts = dict(zip(texts[::2], texts[1::2], strict=True))
    return {**facts, "key": unmark_key(facts["key"])} if facts else None


class QueueShape:
    """A queue's division into shards and streams."""

    def __init__(
        self,
        name: str,
        *,
        streams: int = 16,
        hand: int | None = None,
        shards: int = 1,
        namespace: str = "penstock",
    ) -> None:
        """Sets up.  Raises ``DeclarationError``."""
        self.name = checked_name(name, "queue")
        hand = min(DEFAULT_HAND, streams) if hand is None else hand
        for option, number, maximum in (
            ("streams", streams, MAX_STREAMS),
            ("hand", hand, streams),
            ("shards", shards, MAX_SHARDS),
        ):
            if not 1 <= number <= maximum:
                raise DeclarationError(
                    f"queue {name}: {option} is {number}; it takes 1 to {maximum}"
                )
        self.shards = [
            QueueShard(queue_keys(namespace, ShardName(name, Shard(number))), number, streams, hand)
            for number in range(shards)
        ]

    def shard_for(self, tenant: str) -> QueueShard:
        """Returns the shard of a tenant."""
        return self.shards[shard_for_key(tenant, len(self.shards))]

    def write(self, messages: Sequence[NewMessage]) -> Steps[list[Written]]:
        """Writes messages to their shards; results come in the order of the messages.

        Raises as ``translated``.
        """
        results: dict[int, Written] = {}
        for shard, places in self._by_shard(messages):
            part = [messages[place] for place in places]
            written = yield from translated(
                shard.write(part), f"writing queue {self.name}/{shard.number}"
            )
            results.update(zip(places, written, strict=True))
        return [results[place] for place in range(len(messages))]

    def _by_shard(self, messages: Sequence[NewMessage]) -> list[tuple[QueueShard, list[int]]]:
        """Returns the places of the messages of each shard."""
        places: dict[int, list[int]] = {}
        for place, message in enumerate(messages):
            if len(self.shards) > 1 and message.unique and message.unique.within == "queue":
                raise InvalidMessage(
                    "unique",
                    f"is a name across all tenants, and each of the {len(self.shards)} shards of "
                    f"queue {self.name} knows only its own names: give the queue one shard, use "
                    "Unique(…, within='tenant'), or a pipeline",
                )
            places.setdefault(self.shard_for(message.tenant).number, []).append(place)
        return [(self.shards[number], message_places) for number, message_places in places.items()]


def worker_name(name: str) -> str:
    """Returns a unique name for a worker, whatever the host or pod is called."""
    return f"{name or socket.gethostname()}-{new_id()[-12:]}"


def _milliseconds(moment: datetime | None) -> str:
    # before 1970 it has passed as well
    return "" if moment is None else f"{max(1.0, moment.timestamp() * 1000):.0f}"


def _written(message: NewMessage, reply: bytes) -> Written:
    word, *details = as_text(reply).split(" ", 1)
    match word:
        case "written":
            return Written(message.id)
        case "known":
            return Written(message.id, is_new=False)
        case "taken":
            error = InvalidMessage("id", f"is {message.id!r}, the id of another tenant's message")
            return Written(message.id, is_new=False, refused=error)
        case "duplicate" | "windowed":
            return Written(message.id, is_new=False, duplicate_of=details[0])
        case "full":
            has, limit = map(int, details[0].split(" "))
            full = TenantFull(
                f"tenant {message.tenant!r} has {has:,} bytes in the queue, and its limit is "
                f"{limit:,}; wait until some messages are done, or raise its limit"
            )
            return Written(message.id, is_new=False, refused=full)
        case _:
            raise QueueDamaged(
                "no stream of the queue can be written: all their keys hold other types; rename "
                "the keys"
            )
