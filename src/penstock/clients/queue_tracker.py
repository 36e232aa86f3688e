"""The queue tracker: which ids have queued work, as a set in Redis that sampling keeps true.

The database is the truth.  The adder walks through its table, a slice at a time; the remover samples the set and asks which
ids still have work.  Its answer may be older than an addition, so that each check has a token, which an addition deletes.
"""

import random
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar
from uuid import UUID

from redis.client import NEVER_DECODE

from penstock.channels.commands import AsyncRedisClient, RedisClient, RedisCommands
from penstock.channels.driving import AsyncClient, BlockingClient, Operations, Steps, both
from penstock.channels.scripts import Argument, as_text
from penstock.channels.server import REDIS_ERRORS, connect_redis
from penstock.clients.calls import MAX_FIELDS, call, checked_count, checked_keys, checked_text, translate
from penstock.errors import InvalidStructureCall, PenstockError

C = TypeVar("C", bound=RedisCommands)

Id = str | int | UUID
"""Id of a tenant, a customer, an order with queued work; Redis stores its text."""

MAX_WALK, MAX_SAMPLE = 50, 25
"""Most ids of one slice of the adder, and of the remover."""

WALK = 50
SAMPLE = 5
"""The same by default."""


@dataclass(frozen=True, slots=True)
class QueuedIds:
    """Functions that ask the database which ids have queued work: the primary, in a new transaction.

    Attributes:
        walk: Given the last id of the slice before (None at the beginning) and a number: at most so many ids with queued work
            that come after it, in the order of the key.
        queued: Given ids: those of them that have queued work.
    """

    walk: Callable[[str | None, int], Sequence[Id]]
    queued: Callable[[Sequence[str]], Collection[Id]]


@dataclass(frozen=True, slots=True)
class Synced:
    """Result of a slice; true if it has changed anything.

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


class _Tracker(Operations[C]):
    """Operations that an application calls in a request."""

    def __init__(self, client: C, name: str, *, namespace: str = "penstock") -> None:
        """Sets up; nothing is sent.

        Args:
            client: A client of ``redis.asyncio``.
            name: Name of the tracker.
            namespace: First part of the keys in Redis.

        Raises:
            InvalidName: The namespace is not valid.
            InvalidStructureCall: The name is not valid.
        """
        self._client, self.name = client, name
        self._keys = checked_keys(namespace, name, ("tracked", "tracked-position", "tracked-checks"))
        self._tracked, self._position, _ = self._keys

    @both
    def add(self, ids: Iterable[Id]) -> Steps[int]:
        """Adds up to 1,000 ids; returns how many are new.  Call it after the commit of their work, not before.

        Raises:
            InvalidStructureCall: An id is not valid; nothing was written.
            ServerUnavailable: Redis does not answer; the adder will find the ids.
            AppendRefused: Redis refuses it.
            ForeignStructure: A key holds another type; nothing was written.
        """
        texts = _checked_ids("ids", ids)
        if len(texts) > MAX_FIELDS:
            raise InvalidStructureCall("ids", f"are {len(texts):,}; one call takes {MAX_FIELDS:,}: make several")
        return int((yield from self._call("add", texts, "adding to"))[1])

    @both
    def sample(self, count: int = 1) -> Steps[list[str]]:
        """Different ids at random: ``count``, or fewer if there are fewer.  Raises as ``add``."""
        checked_count("count", count, MAX_FIELDS)
        return [as_text(each) for each in (yield from self._ask("SRANDMEMBER", self._tracked, count))]

    @both
    def contains(self, id_: Id) -> Steps[bool]:
        """True if an id is in the set.  Raises as ``add``."""
        [text] = _checked_ids("id", [id_])
        return bool((yield from self._ask("SISMEMBER", self._tracked, text)))

    @both
    def size(self) -> Steps[int]:
        """The number of ids in the set.  Raises as ``add``."""
        return int((yield from self._ask("SCARD", self._tracked)))

    def _ask(self, *command: Any) -> Steps[Any]:
        try:
            return (yield lambda client: client.execute_command(*command, **{NEVER_DECODE: True}))
        except REDIS_ERRORS as error:
            raise translate(error, f"reading {self.name}") from error

    def _call(self, script: str, arguments: Sequence[Argument], what: str) -> Steps[Any]:
        return call(f"tracker/{script}", self._keys, arguments, f"{what} {self.name}")


class AsyncQueueTracker(_Tracker[AsyncRedisClient], AsyncClient):
    """As ``QueueTracker``, for asyncio: what an application calls in a request.  Slices are for threads."""

    @classmethod
    def connect(cls, url: str, name: str, *, namespace: str = "penstock") -> Self:
        """As ``QueueTracker.connect``."""
        return cls(cls._connect(url), name, namespace=namespace)


class QueueTracker(_Tracker[RedisClient], BlockingClient):
    """A set in Redis of the ids that have queued work, kept true by sampling against the database.

    The application adds an id after it has committed work for it.  Slices of ``sync`` add what was missed, and remove what
    has no work left.  An id that is added is never removed by an answer that is older than the addition.
    """

    def __init__(self, client: RedisClient, name: str, source: QueuedIds, *, namespace: str = "penstock") -> None:
        """Sets up; nothing is sent.

        Args:
            client: From ``connect_redis``, or any client of redis-py.
            name: Name of the tracker.
            source: Asks the database: ``queued_ids_in`` for a column of a table, or two functions.
            namespace: First part of the keys in Redis.

        Raises:
            InvalidName: The namespace is not valid.
            InvalidStructureCall: The name is not valid.
        """
        super().__init__(client, name, namespace=namespace)
        self._source = source

    @classmethod
    def connect(cls, url: str, name: str, source: QueuedIds, *, namespace: str = "penstock") -> Self:
        """A tracker at a URL of Redis: see ``penstock.channels.redis_urls``.

        Raises:
            InvalidSetting: The URL is invalid.
        """
        return cls(connect_redis(url), name, source, namespace=namespace)

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
        before = as_text(self._drive(self._ask("GET", self._position)) or "")
        ids = _checked_ids("walk", self._source.walk(before or None, most))
        if len(ids) > most:
            raise InvalidStructureCall("walk", f"returned {len(ids)} ids; it was asked for {most}")
        if ids and ids[-1] == before:
            raise InvalidStructureCall("walk", "returned the id that it was to begin after: its query takes >, not >=")
        after = ids[-1] if len(ids) == most else ""
        word, *added = self._drive(self._call("walk", (before, after, *ids), "walking"))
        return Synced(gave_up=True) if word == b"moved" else Synced(added=int(added[0]))

    def remove_slice(self, most: int = SAMPLE) -> Synced:
        """Samples ids, and removes those that have no queued work.

        Args:
            most: 1 to 25.

        Raises:
            InvalidStructureCall: ``most`` is out of range, or ``queued`` returned no ids.
            PenstockError: As ``add``; and what ``queued`` raises: the set is as before.
        """
        checked_count("most", most, MAX_SAMPLE)
        token = secrets.token_hex(8)  # that no other remover has
        _, *sampled = self._drive(self._call("sample", (token, most), "sampling"))
        if not sampled:
            return Synced()
        ids = [as_text(each) for each in sampled]
        queued = self._queued(ids)
        kept = [id_ for id_ in ids if id_ in queued]
        gone = [id_ for id_ in ids if id_ not in queued]
        _, *texts = self._drive(self._call("remove", (token, len(kept), *kept, *gone), "removing from"))
        removed = [as_text(each) for each in texts]
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
        return set(_checked_ids("queued", self._source.queued(ids)))


def _checked_ids(field: str, ids: Iterable[Id]) -> list[str]:
    """The ids as text; raises ``InvalidStructureCall`` if it is no collection, or one is no id, empty or too long."""
    if isinstance(ids, str | bytes) or not isinstance(ids, Collection):
        raise InvalidStructureCall(field, f"is {type(ids).__name__}; it takes a list of ids")
    return [_checked_id(field, each) for each in ids]


def _checked_id(field: str, each: object) -> str:
    if isinstance(each, bool) or not isinstance(each, str | int | UUID):
        raise InvalidStructureCall(
            field, f"has {type(each).__name__}; an id is str, int or UUID: return the column alone"
        )
    return checked_text(field, str(each)).decode()
