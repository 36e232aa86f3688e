"""The six operations of an Ick, on a client or in an application's Redis pipeline.

Keys and semantics are those of Redis::Ick, so a Ruby process and a Python one may use one Ick at
the same time.  The plain operations can forget a member that becomes dirty while it is being
processed: see ``docs/explanation/icks.md``.  ``reservations`` is for consumers that must not forget
it.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import redis
from redis.client import NEVER_DECODE

from penstock.channels.commands import RedisClient, RedisCommands
from penstock.channels.driving import Blocking, Operations, Queued, Steps, both, drive
from penstock.channels.ick import operations
from penstock.channels.ick.operations import (
    Added,
    Exchanged,
    IckStats,
    Mark,
    Marks,
    Member,
    check_reply,
    encode_marks,
    encode_members,
)
from penstock.channels.routing import IckKeys, ick_keys
from penstock.channels.scripts import Operation, script
from penstock.channels.server import redis_errors
from penstock.errors import InvalidIckCall

C = TypeVar("C", bound=RedisCommands)
T = TypeVar("T")

SLICES_AT_ONCE = 32
"""Most script calls in one round trip: it bounds the memory that a call of millions of marks needs
on either side."""


class _DirtyList(Operations[C]):
    """The operations of an Ick."""

    _slice = operations.SLICE

    def __init__(self, client: C, key: str, *, namespace: str = "") -> None:
        """Sets up; nothing is sent.

        Args:
            client: From ``connect_redis``, or any redis-py client that does not retry writes by
                itself; for ``QueuedDirtyList``, from ``client.pipeline()``, with or without a
                transaction.
            key: Name of the Ick.
            namespace: The prefix that Ruby's Redis::Namespace would put before its keys; none if
                empty.

        Raises:
            InvalidIckCall: The key is not text, or the Ick's keys would not share a Cluster slot.
        """
        self._client = client
        self.keys = checked_keys(client, key, namespace)

    @both
    def add(self, marks: Marks) -> Steps[Added]:
        """Marks members dirty; each keeps the lowest score it was given.

        Args:
            marks: A mapping of members to scores, or pairs of them, which are applied in order.

        Raises:
            InvalidIckCall: A score is not a finite number, or a member is neither bytes nor text;
                nothing was written.
            ServerUnavailable: Redis does not answer; any of the marks may have been added.
        """
        return (yield from _adding([(self.keys, marks)], self._slice))[0]

    @both
    def reserve(self, size: int = 0, *, backwash: bool = False) -> Steps[list[Mark]]:
        """Reserves the ``size`` lowest members and returns them.

        They stay reserved until they are committed. Members reserved earlier are returned again, up
        to ``size``; the reserved set is filled up from the dirty set.

        Args:
            size: Most members to return; with 0 nothing is reserved.
            backwash: First move all reserved members back to the dirty set.

        Raises:
            InvalidIckCall: The size is not a whole number from 0 on.
            ServerUnavailable: Redis does not answer; members may have been reserved, and the next
                call returns them.
        """
        return (yield from self._exchange(size, (), backwash=backwash)).marks

    @both
    def commit(self, members: Iterable[Member]) -> Steps[int]:
        """Removes members that are done from the reserved set; returns how many were in it.

        Raises:
            InvalidIckCall: A member is neither bytes nor text; nothing was committed.
            ServerUnavailable: Redis does not answer; any of the members may have been committed.
        """
        return (yield from self._exchange(0, members)).committed

    @both
    def exchange(
        self, size: int, done: Iterable[Member], *, backwash: bool = False
    ) -> Steps[Exchanged]:
        """Commits ``done``, then reserves ``size``, in one round trip.

        Raises:
            InvalidIckCall: The size is not a whole number from 0 on, or a member is neither bytes
                nor text.
            ServerUnavailable: Redis does not answer; the exchange may have happened.
        """
        return (yield from self._exchange(size, done, backwash=backwash))

    def _exchange(
        self, size: int, members: Iterable[Member], *, backwash: bool = False
    ) -> Steps[Exchanged]:
        *leading, last = operations.slices(encode_members(self.keys.version, members), self._slice)
        requests = [operations.exchange(self.keys, 0, part, backwash=False) for part in leading]
        requests.append(operations.exchange(self.keys, size, last, backwash=backwash))
        results = yield from _running(requests, f"exchanging at {self.keys.version}")
        return Exchanged(sum(result.committed for result in results), results[-1].marks)

    @both
    def stats(self) -> Steps[IckStats | None]:
        """Returns sizes and exact scores; None if there is no Ick.

        Raises:
            ServerUnavailable: Redis does not answer.
        """
        return (
            yield from _running([operations.stats(self.keys)], f"inspecting {self.keys.version}")
        )[0]

    @both
    def delete(self, *, unlink: bool = False) -> Steps[int]:
        """Deletes the Ick and all its members.

        Returns how many of the three keys of Redis::Ick existed.

        Args:
            unlink: Free the memory in a background thread of the server.

        Raises:
            ServerUnavailable: Redis does not answer; it may have been deleted.
        """
        one = [operations.delete(self.keys, unlink=unlink)]
        return (yield from _running(one, f"deleting {self.keys.version}"))[0]


class DirtyList(_DirtyList[RedisClient], Blocking):
    """An Ick: dirty members, each with the score at which it became dirty, lowest first.

    A call with more than 1,000 marks or members becomes several script calls, each of them atomic,
    because Redis is blocked while a script runs.  Every call may be repeated if its reply was lost.

    Every call raises ``DamagedIck`` if the Ick is damaged; each that writes, ``AppendRefused`` if
    Redis does not take writes.
    """


class QueuedDirtyList(_DirtyList[Any], Queued):
    """The same operations, queued in an application's Redis pipeline.

    ``pipeline.execute()`` returns their results.  Each is a single script call of any size and
    carries the script's text, because a pipeline cannot reload a script that the server has lost.
    A damaged Ick raises ``redis.ResponseError``, whose text begins with ``DAMAGED``.
    """

    _slice = sys.maxsize

    def _drive(self, steps: Steps[Any]) -> None:
        request: Any = next(steps)
        [call] = request.calls
        _install_parser(self._client)

        def read(reply: Any) -> Any:
            try:
                steps.send([reply])
            except StopIteration as stop:
                return stop.value

        command = ("EVAL", request.script.text, len(call.keys), *call.keys, *call.arguments)
        self._client.execute_command(*command, **{NEVER_DECODE: True, _READ: read})


_READ = "penstock_read"
_CALLBACKS = ("response_callbacks", "cluster_response_callbacks")


def _install_parser(pipeline: Any) -> None:
    """Makes this pipeline parse the replies to our calls, and no others."""
    for name in _CALLBACKS:
        shared = getattr(pipeline, name, None)
        if shared is not None and shared.get("EVAL") is not _result:
            # A pipeline shares the table with its client, which must not change.
            callbacks = type(shared)(shared)
            callbacks["EVAL"] = _result
            setattr(pipeline, name, callbacks)


def _result(reply: Any, **options: Any) -> Any:
    read = options.get(_READ)
    return reply if read is None or isinstance(reply, Exception) else read(reply)


def checked_keys(client: Any, key: str, namespace: str) -> IckKeys:
    """Returns the keys of an Ick, checked for this server.  Raises ``InvalidIckCall``."""
    if not all(isinstance(name, str) for name in (key, namespace)):
        raise InvalidIckCall(f"the key {key!r} of an Ick is not text")
    keys = ick_keys(key, namespace)
    if isinstance(client, redis.RedisCluster) and not keys.is_one_slot:
        raise InvalidIckCall(
            f"{keys.version}: on a Cluster the keys of this Ick would not be in one slot. "
            "Name it without braces, and without a namespace"
        )
    return keys


def add_each(client: RedisClient, icks: Iterable[tuple[IckKeys, Marks]]) -> list[Added]:
    """Adds marks to several Icks in one round trip; safe to repeat.

    Raises ``InvalidIckCall`` before anything is written; ``DamagedIck`` of one Ick, after the
    others have their marks; ``ServerUnavailable`` or ``AppendRefused``.
    """
    return drive(client, _adding(icks))


def _adding(
    icks: Iterable[tuple[IckKeys, Marks]], size: int = operations.SLICE
) -> Steps[list[Added]]:
    owners: list[int] = []
    additions: list[Operation[Added]] = []
    names: list[str] = []
    for owner, (keys, marks) in enumerate(icks):
        names.append(keys.version)
        for part in operations.slices(encode_marks(keys.version, marks), 2 * size):
            owners.append(owner)
            additions.append(operations.add(keys, part))
    sums = [Added(0, 0)] * len(names)
    results = yield from _running(additions, f"adding to {', '.join(names)}")
    for owner, added in zip(owners, results, strict=True):
        sums[owner] = Added(sums[owner].new + added.new, sums[owner].lowered + added.lowered)
    return sums


def run_each(client: RedisClient, requests: Sequence[Operation[T]], activity: str) -> list[T]:
    """Runs operations of one script in order, ``SLICES_AT_ONCE`` at a time.

    The first error is raised after its round trip.
    """
    return drive(client, _running(requests, activity))


def _running(requests: Sequence[Operation[T]], activity: str) -> Steps[list[T]]:
    results: list[T] = []
    for begin in range(0, len(requests), SLICES_AT_ONCE):
        part = requests[begin : begin + SLICES_AT_ONCE]
        with redis_errors(activity):
            replies = yield from script(part[0].script).steps(
                [operation.call for operation in part]
            )
        for reply in replies:
            check_reply(reply, activity)
        results += [operation.read(reply) for operation, reply in zip(part, replies, strict=True)]
    return results
