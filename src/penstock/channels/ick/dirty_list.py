"""The six operations of an Ick, for a client and for a pipeline of the application's.

The semantics are those of Redis::Ick, on the same keys: a Ruby process and ours may work on one Ick at once.  What the
plain operations cannot promise (a member that becomes dirty while it is being worked on can be forgotten) is said in
``docs/explanation/icks.md``; ``reservations`` is for consumers that need the promise.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import redis
from redis.client import NEVER_DECODE

from penstock.channels.ick import operations
from penstock.channels.ick.marks import Marks, Member
from penstock.channels.ick.operations import Added, Exchanged, IckStats, Mark, Operation
from penstock.channels.routing import IckKeys, ick_keys
from penstock.channels.scripts import Call, script
from penstock.channels.server import RedisClient, redis_errors, translated
from penstock.errors import InvalidIckCall

T = TypeVar("T")

SLICES_AT_ONCE = 32
"""Most calls that are under way at once: what a call of millions of marks keeps in memory at either end."""


class DirtyList:
    """An Ick: members that are dirty, each since its score; lowest first.

    A call of more than ``operations.SLICE`` marks or members is several script calls, each of them atomic: a script
    call blocks Redis while it runs.  Every call may be repeated when its reply was lost.

    Args:
        client: From ``connect_redis``, or any client of redis-py that does not repeat writes by itself.
        key: Name of the Ick.
        namespace: What Ruby's Redis::Namespace would put before its keys; nothing when empty.

    Raises:
        InvalidIckCall: The key is not text, or the Ick's keys would not share a slot of the Cluster.
    """

    def __init__(self, client: RedisClient, key: str, *, namespace: str = "") -> None:
        self._client = client
        self.keys = checked_keys(client, key, namespace)

    def add(self, marks: Marks) -> Added:
        """Mark members dirty: each keeps the lowest score that it was given.

        Args:
            marks: A mapping of members to scores, or pairs of them, which are taken in their order.

        Raises:
            InvalidIckCall: A score is not a finite number, or a member is neither bytes nor text; nothing was written.
            DamagedIck: The Ick is not whole.
            ServerUnavailable: Redis does not answer; any of the marks may have been added.
            AppendRefused: Redis does not take writes.
        """
        return add_each(self._client, [(self.keys, marks)])[0]

    def reserve(self, size: int = 0, *, backwash: bool = False) -> list[Mark]:
        """The ``size`` lowest members, which are set aside until they are committed.

        Those reserved before come again, up to ``size``; the reserved set is filled up from the dirty one.

        Args:
            size: Most members to give; with 0 nothing is reserved.
            backwash: First put all that is reserved back among the dirty ones.

        Raises:
            InvalidIckCall: The size is no whole number from 0 on.
            DamagedIck: The Ick is not whole.
            ServerUnavailable: Redis does not answer; members may have been reserved, and come again.
            AppendRefused: Redis does not take writes.
        """
        return self.exchange(size, (), backwash=backwash).marks

    def commit(self, members: Iterable[Member]) -> int:
        """Members are done: they leave the reserved set.  Gives the number of those that were in it.

        Raises:
            InvalidIckCall: A member is neither bytes nor text; nothing was committed.
            DamagedIck: The Ick is not whole.
            ServerUnavailable: Redis does not answer; any of the members may have been committed.
            AppendRefused: Redis does not take writes.
        """
        return self.exchange(0, members).committed

    def exchange(self, size: int, done: Iterable[Member], *, backwash: bool = False) -> Exchanged:
        """Commit ``done``, then reserve ``size``: one round trip.

        Raises:
            InvalidIckCall: The size is no whole number from 0 on, or a member is neither bytes nor text.
            DamagedIck: The Ick is not whole.
            ServerUnavailable: Redis does not answer; the exchange may have happened.
            AppendRefused: Redis does not take writes.
        """
        members = operations.members_of(self.keys, done)
        *before, last = operations.slices(members)
        each = [operations.exchange(self.keys, 0, part, backwash=False) for part in before]
        each.append(operations.exchange(self.keys, size, last, backwash=backwash))
        results = run_each(self._client, each, f"exchanging at {self.keys.version}")
        return Exchanged(sum(result.committed for result in results), results[-1].marks)

    def stats(self) -> IckStats | None:
        """Sizes and scores, to the bit; None where there is no Ick.

        Raises:
            DamagedIck: The Ick is not whole.
            ServerUnavailable: Redis does not answer.
        """
        return run_each(
            self._client, [operations.stats(self.keys)], f"looking at {self.keys.version}"
        )[0]

    def delete(self, *, unlink: bool = False) -> int:
        """Delete the Ick and all its members; gives how many of the three keys of Redis::Ick there were.

        Args:
            unlink: Free the memory in a thread of the server's.

        Raises:
            DamagedIck: The Ick is not whole.
            ServerUnavailable: Redis does not answer; it may have been deleted.
            AppendRefused: Redis does not take writes.
        """
        one = [operations.delete(self.keys, unlink=unlink)]
        return run_each(self._client, one, f"deleting {self.keys.version}")[0]


class QueuedDirtyList:
    """The same operations, put into a pipeline of the application's; ``pipeline.execute()`` gives their results.

    Each is one script call however large, and travels with its text: a pipeline cannot load a script that the server
    has lost.  An Ick that is not whole shows as ``redis.ResponseError``; its text begins with ``DAMAGED``.

    Args:
        pipeline: From ``client.pipeline()``, with or without a transaction.
        key: Name of the Ick.
        namespace: What Ruby's Redis::Namespace would put before its keys.

    Raises:
        InvalidIckCall: The key is not text, or the Ick's keys would not share a slot of the Cluster.
    """

    def __init__(self, pipeline: Any, key: str, *, namespace: str = "") -> None:
        self._pipeline = pipeline
        self.keys = checked_keys(pipeline, key, namespace)

    def add(self, marks: Marks) -> None:
        """As ``DirtyList.add``; its result is an ``Added``.

        Raises:
            InvalidIckCall: A score is not a finite number, or a member is neither bytes nor text.
        """
        self._queue(operations.add(self.keys, operations.marks_of(self.keys, marks)))

    def reserve(self, size: int = 0, *, backwash: bool = False) -> None:
        """As ``DirtyList.reserve``; its result is a list of marks.

        Raises:
            InvalidIckCall: The size is no whole number from 0 on.
        """
        operation = operations.exchange(self.keys, size, (), backwash=backwash)
        self._queue(
            Operation(operation.script, operation.call, lambda reply: operation.read(reply).marks)
        )

    def commit(self, members: Iterable[Member]) -> None:
        """As ``DirtyList.commit``; its result is a number.

        Raises:
            InvalidIckCall: A member is neither bytes nor text.
        """
        done = operations.members_of(self.keys, members)
        operation = operations.exchange(self.keys, 0, done, backwash=False)
        self._queue(
            Operation(
                operation.script, operation.call, lambda reply: operation.read(reply).committed
            )
        )

    def exchange(self, size: int, done: Iterable[Member], *, backwash: bool = False) -> None:
        """As ``DirtyList.exchange``; its result is an ``Exchanged``.

        Raises:
            InvalidIckCall: The size is no whole number from 0 on, or a member is neither bytes nor text.
        """
        members = operations.members_of(self.keys, done)
        self._queue(operations.exchange(self.keys, size, members, backwash=backwash))

    def stats(self) -> None:
        """As ``DirtyList.stats``; its result is an ``IckStats``, or None."""
        self._queue(operations.stats(self.keys))

    def delete(self, *, unlink: bool = False) -> None:
        """As ``DirtyList.delete``; its result is a number."""
        self._queue(operations.delete(self.keys, unlink=unlink))

    def _queue(self, operation: Operation[Any]) -> None:
        _have_results_read(self._pipeline)
        call = operation.call
        self._pipeline.execute_command(
            "EVAL",
            script(operation.script).text,
            len(call.keys),
            *call.keys,
            *call.arguments,
            **{NEVER_DECODE: True, _READ: operation.read},
        )


_READ = "penstock_read"
_CALLBACKS = ("response_callbacks", "cluster_response_callbacks")


def _have_results_read(pipeline: Any) -> None:
    """Has this pipeline's replies to our calls, and nobody else's, made into results."""
    for name in _CALLBACKS:
        shared = getattr(pipeline, name, None)
        if shared is not None and shared.get("EVAL") is not _result:
            # Pipelines share the table with their client, which is not ours to change.
            own = type(shared)(shared)
            own["EVAL"] = _result
            setattr(pipeline, name, own)


def _result(reply: Any, **options: Any) -> Any:
    read = options.get(_READ)
    return reply if read is None or isinstance(reply, Exception) else read(reply)


def checked_keys(client: Any, key: str, namespace: str) -> IckKeys:
    """The keys of an Ick, if they can be used on this server.

    Raises:
        InvalidIckCall: The key is not text, or a Cluster would not keep the keys together.
    """
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
    """Marks for each of several Icks in one round trip; safe to repeat.

    Raises:
        InvalidIckCall: A score is not a finite number, or a member is neither bytes nor text; nothing was written.
        DamagedIck: An Ick is not whole; the others have their marks.
        ServerUnavailable: Redis does not answer; any of the marks may have been added.
        AppendRefused: Redis does not take writes.
    """
    owners: list[int] = []
    each: list[Operation[Added]] = []
    names: list[str] = []
    for owner, (keys, marks) in enumerate(icks):
        names.append(keys.version)
        for part in operations.slices(operations.marks_of(keys, marks), 2):
            owners.append(owner)
            each.append(operations.add(keys, part))
    sums = [Added(0, 0)] * len(names)
    for owner, added in zip(
        owners, run_each(client, each, f"adding to {', '.join(names)}"), strict=True
    ):
        sums[owner] = Added(sums[owner].new + added.new, sums[owner].lowered + added.lowered)
    return sums


def run_each(client: RedisClient, each: Sequence[Operation[T]], what: str) -> list[T]:
    """Carries operations of one script out, in order, and gives their results.

    All of them are sent, a bounded number at once, before the first that failed is raised.

    Raises:
        DamagedIck: An Ick is not whole.
        ServerUnavailable: Redis does not answer; any of them may have happened.
        AppendRefused: Redis does not take writes.
    """
    results: list[T] = []
    for at in range(0, len(each), SLICES_AT_ONCE):
        part = each[at : at + SLICES_AT_ONCE]
        calls: list[Call] = [operation.call for operation in part]
        with redis_errors(what):
            replies = script(part[0].script).call_each(client, calls)
        for reply in replies:
            if isinstance(reply, redis.RedisError):
                raise operations.damage(reply) or translated(reply, what) from reply
        results += [operation.read(reply) for operation, reply in zip(part, replies, strict=True)]
    return results
