"""The queue tracker: a set in Redis of the ids with queued work, kept true by sampling.

The database is the truth.  The adder walks through its table, a slice at a time; the remover
samples the set and asks which ids still have work.  Its answer may be older than an addition, so
that each check has a token, which an addition deletes.
"""

import random
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar
from uuid import UUID

from sqlalchemy import ARRAY, Connection, Engine, Select, Text, cast, func, literal, select, true
from sqlalchemy.exc import DataError
from sqlalchemy.sql.elements import ColumnElement

from penstock.channels.commands import AsyncRedisClient, RedisClient, RedisCommands
from penstock.channels.driving import AsyncClient, BlockingClient, Operations, Steps, both
from penstock.channels.scripts import Argument, as_text
from penstock.channels.server import connect_redis
from penstock.errors import DeclarationError, InvalidStructureCall, PenstockError, ReadOnlyPostgres
from penstock.structures.calls import (
    ask,
    call,
    check_several,
    checked_count,
    checked_keys,
    checked_ms,
    checked_text,
)

C = TypeVar("C", bound=RedisCommands)

Id = str | int | UUID
"""Id of a tenant, a customer or an order with queued work; Redis stores its text."""

MAX_WALK, MAX_SAMPLE = 50, 25
"""Most ids of one slice of the adder, and of the remover."""

WALK = 50
SAMPLE = 5
"""Defaults of these limits."""


@dataclass(frozen=True, slots=True)
class QueuedIds:
    """Functions that ask the primary, in a new transaction, which ids have queued work.

    Attributes:
        walk: Given the last id of the slice before (None at the beginning) and a number: at most so
            many ids with queued work that come after it, in the order of the key.
        queued: Given ids: those of them that have queued work.
    """

    walk: Callable[[str | None, int], Sequence[Id]]
    queued: Callable[[Sequence[str]], Collection[Id]]


@dataclass(frozen=True, slots=True)
class Synced:
    """Result of a slice; true if it changed anything.

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
    """Operations for an application's requests."""

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
        self._keys = checked_keys(
            namespace, name, ("tracked", "tracked-position", "tracked-checks")
        )
        self._tracked, self._position, _ = self._keys

    @both
    def add(self, ids: Iterable[Id]) -> Steps[int]:
        """Adds up to 1,000 ids; returns how many are new.

        Call it after the commit of their work, not before.

        Raises:
            InvalidStructureCall: An id is not valid; nothing was written.
            ServerUnavailable: Redis does not answer; the adder will find the ids.
            AppendRefused: Redis refuses it.
            ForeignStructure: A key holds another type; nothing was written.
        """
        texts = _checked_ids("ids", ids)
        check_several("ids", len(texts))
        return int((yield from self._call("add", texts, "adding to"))[1])

    @both
    def sample(self, count: int = 1) -> Steps[list[str]]:
        """Returns ``count`` different ids at random, or fewer if there are fewer.

        Raises as ``add``.
        """
        checked_count("count", count)
        return [as_text(id_) for id_ in (yield from self._ask("SRANDMEMBER", self._tracked, count))]

    @both
    def contains(self, id_: Id) -> Steps[bool]:
        """Returns whether an id is in the set.  Raises as ``add``."""
        [text] = _checked_ids("id", [id_])
        return bool((yield from self._ask("SISMEMBER", self._tracked, text)))

    @both
    def size(self) -> Steps[int]:
        """Returns the number of ids in the set.  Raises as ``add``."""
        return int((yield from self._ask("SCARD", self._tracked)))

    def _ask(self, *command: Any) -> Steps[Any]:
        return ask(command, f"reading {self.name}")

    def _call(self, script: str, arguments: Sequence[Argument], activity: str) -> Steps[Any]:
        return call(f"tracker/{script}", self._keys, arguments, f"{activity} {self.name}")


class AsyncQueueTracker(_Tracker[AsyncRedisClient], AsyncClient):
    """As ``QueueTracker``, for asyncio: operations for requests.  Slices are for threads."""

    @classmethod
    def connect(cls, url: str, name: str, *, namespace: str = "penstock") -> Self:
        """Returns a tracker as ``QueueTracker.connect``."""
        return cls(cls._connect(url), name, namespace=namespace)


class QueueTracker(_Tracker[RedisClient], BlockingClient):
    """A set in Redis of the ids that have queued work, kept true by sampling against the database.

    The application adds an id after it has committed work for it.  Slices of ``sync`` add what was
    missed, and remove what has no work left.  An id that is added is never removed by an answer
    that is older than the addition.
    """

    def __init__(
        self, client: RedisClient, name: str, source: QueuedIds, *, namespace: str = "penstock"
    ) -> None:
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
    def connect(
        cls, url: str, name: str, source: QueuedIds, *, namespace: str = "penstock"
    ) -> Self:
        """Returns a tracker at a URL of Redis: see ``penstock.channels.redis_urls``.

        Raises:
            InvalidSetting: The URL is invalid.
        """
        return cls(connect_redis(url), name, source, namespace=namespace)

    def sync(self) -> Synced:
        """Runs one slice, of the adder or the remover by chance.  A chore for a recruit.

        Raises:
            PenstockError: As ``add_slice`` and ``remove_slice``.
        """
        is_add = random.random() < 0.5  # noqa: S311, PLR2004  no secret; half of the slices
        return self.add_slice() if is_add else self.remove_slice()

    def add_slice(self, limit: int = WALK) -> Synced:
        """Adds the next ids of the table; begins again after the last.

        Args:
            limit: 1 to 50.

        Raises:
            InvalidStructureCall: ``limit`` is out of range, or ``walk`` returned something
                other than it was asked for.
            PenstockError: As ``add``; and what ``walk`` raises: nothing was changed.
        """
        checked_count("limit", limit, MAX_WALK)
        previous = as_text(self._drive(self._ask("GET", self._position)) or "")
        ids = _checked_ids("walk", self._source.walk(previous or None, limit))
        if len(ids) > limit:
            raise InvalidStructureCall("walk", f"returned {len(ids)} ids; it was asked for {limit}")
        if ids and ids[-1] == previous:
            raise InvalidStructureCall(
                "walk", "returned the id that it was to begin after: its query takes >, not >="
            )
        following = ids[-1] if len(ids) == limit else ""
        word, *added = self._drive(self._call("walk", (previous, following, *ids), "walking"))
        return Synced(gave_up=True) if word == b"moved" else Synced(added=int(added[0]))

    def remove_slice(self, limit: int = SAMPLE) -> Synced:
        """Samples ids, and removes those without queued work.

        Args:
            limit: 1 to 25.

        Raises:
            InvalidStructureCall: ``limit`` is out of range, or ``queued`` returned no ids.
            PenstockError: As ``add``; and what ``queued`` raises: the set is as before.
        """
        checked_count("limit", limit, MAX_SAMPLE)
        token = secrets.token_hex(8)  # that no other remover has
        _, *sampled = self._drive(self._call("sample", (token, limit), "sampling"))
        if not sampled:
            return Synced()
        ids = [as_text(text) for text in sampled]
        queued = self._queued(ids)
        still_queued = [id_ for id_ in ids if id_ in queued]
        gone = [id_ for id_ in ids if id_ not in queued]
        _, *texts = self._drive(
            self._call("remove", (token, len(still_queued), *still_queued, *gone), "removing from")
        )
        removed = [as_text(text) for text in texts]
        back = self._put_back(removed)
        return Synced(removed=len(removed) - back, gave_up=len(gone) > 0 and not removed)

    def _put_back(self, removed: Sequence[str]) -> int:
        """Puts back ids that got work between the answer and the removal, if nobody adds them."""
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
    """Returns the ids as text.

    Raises ``InvalidStructureCall`` if they are no collection, or one is no id, empty or too long.
    """
    if isinstance(ids, str | bytes) or not isinstance(ids, Collection):
        raise InvalidStructureCall(field, f"is {type(ids).__name__}; it takes a list of ids")
    return [_checked_id(field, id_) for id_ in ids]


def _checked_id(field: str, id_: object) -> str:
    if isinstance(id_, bool) or not isinstance(id_, str | int | UUID):
        raise InvalidStructureCall(
            field, f"has {type(id_).__name__}; an id is str, int or UUID: return the column alone"
        )
    return checked_text(field, str(id_)).decode()


TIMEOUT_S = 1.0
"""Default limit of a statement, in seconds."""


def queued_ids_in(
    engine: Engine, column: Any, where: Any = None, *, timeout_s: float = TIMEOUT_S
) -> QueuedIds:
    """Returns the ids with queued work in a column of a table, for a ``QueueTracker``.

    An index on the column serves both questions, however many rows an id has; best is a partial one
    with the same condition.

    Args:
        engine: Connects to the primary.
        column: The id: ``Job.customer_id``.
        where: Which rows are queued work: ``Job.state == "queued"``; None is all of them.
        timeout_s: Longest time of a statement, in seconds.

    Raises:
        DeclarationError: The column is none of a table, or the engine is not Postgres'.
        InvalidStructureCall: ``timeout_s`` is out of range.
    """
    if getattr(column, "table", None) is None:
        raise DeclarationError(
            "queued_ids_in: column belongs to no table; it takes one such as Job.customer_id"
        )
    if engine.dialect.name != "postgresql":
        raise DeclarationError(
            f"queued_ids_in: the engine is for {engine.dialect.name}; it takes one for Postgres"
        )
    timeout_ms = checked_ms("timeout_s", timeout_s)
    queued = _Queued(engine, column, true() if where is None else where, timeout_ms)
    return QueuedIds(queued.walk, queued.queued)


@dataclass(frozen=True, slots=True)
class _Queued:
    """Queued work in a table."""

    engine: Engine
    column: ColumnElement[Any]
    where: ColumnElement[bool]
    timeout_ms: int

    def walk(self, previous: str | None, limit: int) -> list[str]:
        """Returns the ids after one, as text.

        Each takes an index probe, so ids with many rows take no longer.
        """
        start = None if previous is None else cast(literal(previous, Text), self.column.type)
        first = self._next(start).subquery()
        walk = select(first.c[0].label("id"), literal(1).label("number")).cte(recursive=True)
        step = self._next(walk.c.id).correlate(walk).scalar_subquery()
        steps = select(step, walk.c.number + 1).where(walk.c.id.is_not(None), walk.c.number < limit)
        ids = walk.union_all(steps)
        query = select(cast(ids.c.id, Text)).where(ids.c.id.is_not(None)).order_by(ids.c.number)
        with self._transaction() as connection:
            return list(connection.scalars(query))

    def queued(self, ids: Sequence[str]) -> list[str]:
        """Returns those of the ids that have queued work."""
        try:
            return self._ask(ids)
        except DataError:  # one of them is no value of the column, and therefore not in it
            return (
                []
                if len(ids) == 1
                else [queued_id for id_ in ids for queued_id in self.queued([id_])]
            )

    def _ask(self, ids: Sequence[str]) -> list[str]:
        candidate = func.unnest(cast(list(ids), ARRAY(Text))).column_valued("asked")
        row = select(literal(1)).select_from(self.column.table)
        is_queued = row.where(self.column == cast(candidate, self.column.type), self.where).exists()
        with self._transaction() as connection:
            if connection.scalar(select(func.pg_is_in_recovery())):
                raise ReadOnlyPostgres(
                    "queued_ids_in: the engine is connected to a standby, which may not know of "
                    "the newest work; "
                    "connect it to the primary"
                )
            return list(connection.scalars(select(candidate).where(is_queued)))

    def _next(self, previous: ColumnElement[Any] | None) -> Select[Any]:
        """Returns the query for the next id."""
        query = select(self.column).where(self.where, self.column.is_not(None))
        query = query if previous is None else query.where(self.column > previous)
        return query.order_by(self.column).limit(1)

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        """Runs the block in a new transaction, whatever the engine's isolation.

        It sees all earlier commits.
        """
        with self.engine.connect() as plain:
            connection = plain.execution_options(isolation_level="READ COMMITTED")
            with connection.begin():
                timeout = func.set_config("statement_timeout", f"{self.timeout_ms}ms", True)
                connection.execute(select(timeout))
                yield connection
