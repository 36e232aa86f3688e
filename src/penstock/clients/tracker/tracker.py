"""The queue tracker for threads."""

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from redis.client import NEVER_DECODE

from penstock.channels.scripts import Operation, as_text
from penstock.channels.server import REDIS_ERRORS, RedisClient, connect_redis
from penstock.clients.arguments import MAX_FIELDS, checked_count
from penstock.clients.running import T, run, translate
from penstock.clients.tracker.operations import Id, TrackerOperations, checked_ids, new_token
from penstock.errors import InvalidStructureCall, PenstockError

MAX_WALK, MAX_SAMPLE = 50, 25
"""Most ids of one slice of the adder, and of the remover."""

WALK = 50
"""Most ids of one slice of the adder, by default."""

SAMPLE = 5
"""Most ids of one slice of the remover, by default."""


@dataclass(frozen=True, slots=True)
class QueuedIds:
    """How to ask the database which ids have queued work.  Both functions ask the primary, in a new transaction.

    Attributes:
        walk: Given the last id of the slice before (None at the beginning) and a number: at most so many ids with queued work
            that come after it, in the order of the key.
        queued: Given ids: those of them that have queued work.
    """

    walk: Callable[[str | None, int], Sequence[Id]]
    queued: Callable[[Sequence[str]], Collection[Id]]


@dataclass(frozen=True, slots=True)
class Synced:
    """What a slice has done; true if it has changed anything.

    Attributes:
        added: Ids that are new in the set.
        removed: Ids that left it.
        gave_up: Whether another process was faster, and nothing was changed.
    """

    added: int = 0
    removed: int = 0
    gave_up: bool = False

    def __bool__(self) -> bool:
        return self.added > 0 or self.removed > 0


class QueueTracker:
    """A set in Redis of the ids that have queued work, kept true by sampling against the database.

    The application adds an id after it has committed work for it.  Slices of ``sync`` add what was missed, and remove what
    has no work left.  An id that is added is never removed by an answer that is older than the addition.

    Raises:
        InvalidName: The namespace is not valid.
        InvalidStructureCall: The name is not valid.
    """

    def __init__(self, client: RedisClient, name: str, source: QueuedIds, *, namespace: str = "penstock") -> None:
        """Sets up; nothing is sent.

        Args:
            client: From ``connect_redis``, or any client of redis-py.
            name: Name of the tracker.
            source: Asks the database: ``queued_ids_in`` for a column of a table, or two functions.
            namespace: First part of the keys in Redis.
        """
        self._client, self._source = client, source
        self._operations = TrackerOperations(name, namespace)
        self.name = name

    @classmethod
    def connect(cls, url: str, name: str, source: QueuedIds, *, namespace: str = "penstock") -> Self:
        """A tracker at a URL of Redis: see ``penstock.channels.urls``.

        Raises:
            InvalidSetting: The URL is invalid.
            InvalidStructureCall: The name is not valid.
        """
        return cls(connect_redis(url), name, source, namespace=namespace)

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def add(self, ids: Iterable[Id]) -> int:
        """Adds up to 1,000 ids; returns how many are new.  Call it after the commit of their work, not before.

        Raises:
            InvalidStructureCall: An id is not valid; nothing was written.
            ServerUnavailable: Redis does not answer; the adder will find the ids.
            AppendRefused: Redis refuses it.
            ForeignStructure: A key holds another type; nothing was written.
        """
        return self._run(self._operations.add(ids), "adding to")

    def sample(self, count: int = 1) -> list[str]:
        """So many different ids at random, or fewer if there are fewer.

        Raises:
            As ``add``.
        """
        found = self._ask("SRANDMEMBER", self._operations.tracked, checked_count("count", count, MAX_FIELDS))
        return [as_text(each) for each in found]

    def contains(self, id_: Id) -> bool:
        """Whether an id is in the set.

        Raises:
            As ``add``.
        """
        [text] = checked_ids("id", [id_])
        return bool(self._ask("SISMEMBER", self._operations.tracked, text))

    def size(self) -> int:
        """The number of ids in the set.

        Raises:
            As ``add``.
        """
        return int(self._ask("SCARD", self._operations.tracked))

    def sync(self) -> Synced:
        """One slice, of the adder or of the remover by chance.  A chore for a recruit.

        Raises:
            PenstockError: As ``add_slice`` and ``remove_slice``.
        """
        is_add = random.random() < 0.5  # noqa: S311, PLR2004  no secret; half of the slices
        return self.add_slice() if is_add else self.remove_slice()

    def add_slice(self, most: int = WALK) -> Synced:
        """Adds the next ids of the table; after the last it begins again.

        Args:
            most: 1 to 50.

        Raises:
            InvalidStructureCall: ``most`` is out of range, or ``walk`` returned something else than was asked for.
            PenstockError: As ``add``; and what ``walk`` raises: nothing was changed.
        """
        checked_count("most", most, MAX_WALK)
        before = as_text(self._ask("GET", self._operations.position) or "")
        ids = checked_ids("walk", self._source.walk(before or None, most))
        _check_walk(ids, before, most)
        after = ids[-1] if len(ids) == most else ""
        new = self._run(self._operations.walk(before, after, ids), "walking")
        return Synced(gave_up=True) if new is None else Synced(added=new)

    def remove_slice(self, most: int = SAMPLE) -> Synced:
        """Samples ids, and removes those that have no queued work.

        Args:
            most: 1 to 25.

        Raises:
            InvalidStructureCall: ``most`` is out of range, or ``queued`` returned no ids.
            PenstockError: As ``add``; and what ``queued`` raises: the set is as before.
        """
        checked_count("most", most, MAX_SAMPLE)
        token = new_token()
        ids = self._run(self._operations.sample(token, most), "sampling")
        if not ids:
            return Synced()
        queued = self._queued(ids)
        kept = [id_ for id_ in ids if id_ in queued]
        gone = [id_ for id_ in ids if id_ not in queued]
        removed = self._run(self._operations.remove(token, kept, gone), "removing from")
        back = self._put_back(removed)
        return Synced(removed=len(removed) - back, gave_up=len(gone) > 0 and not removed)

    def _put_back(self, removed: Sequence[str]) -> int:
        """Puts back what was queued between the answer and the removal, by somebody who does not add ids."""
        if not removed:
            return 0
        try:
            queued = self._queued(removed)
        except BaseException:
            with suppress(PenstockError):
                self.add(removed)
            raise
        back = [id_ for id_ in removed if id_ in queued]
        return self.add(back) if back else 0

    def _queued(self, ids: Sequence[str]) -> set[str]:
        return set(checked_ids("queued", self._source.queued(ids)))

    def _ask(self, *command: Any) -> Any:
        try:
            return self._client.execute_command(*command, **{NEVER_DECODE: True})
        except REDIS_ERRORS as error:
            raise translate(error, f"reading {self.name}") from error

    def _run(self, operation: Operation[T], what: str) -> T:
        return run(self._client, operation, f"{what} {self.name}")


def _check_walk(ids: Sequence[str], before: str, most: int) -> None:
    if len(ids) > most:
        raise InvalidStructureCall("walk", f"returned {len(ids)} ids; it was asked for {most}")
    if ids and ids[-1] == before:
        raise InvalidStructureCall("walk", "returned the id that it was to begin after: its query takes >, not >=")
