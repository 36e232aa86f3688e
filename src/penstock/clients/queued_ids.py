"""Asks a table which ids have queued work."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ARRAY, Connection, Engine, Select, Text, cast, func, literal, select, true
from sqlalchemy.exc import DataError
from sqlalchemy.sql.elements import ColumnElement

from penstock.clients.calls import checked_ms
from penstock.clients.queue_tracker import QueuedIds
from penstock.errors import DeclarationError, ReadOnlyPostgres

TIMEOUT_S = 1.0
"""Longest time of a statement, in seconds, by default."""


def queued_ids_in(engine: Engine, column: Any, where: Any = None, *, timeout_s: float = TIMEOUT_S) -> QueuedIds:
    """The ids in a column of a table with queued work, for a ``QueueTracker``.

    An index on the column serves both questions, however many rows an id has; best is a partial one with the same condition.

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
        raise DeclarationError("queued_ids_in: column belongs to no table; it takes one such as Job.customer_id")
    if engine.dialect.name != "postgresql":
        raise DeclarationError(f"queued_ids_in: the engine is for {engine.dialect.name}; it takes one for Postgres")
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

    def walk(self, after: str | None, most: int) -> list[str]:
        """The ids after one, as text: an index probe for each, so that those with many rows take no longer."""
        start = None if after is None else cast(literal(after, Text), self.column.type)
        first = self._next(start).subquery()
        walk = select(first.c[0].label("id"), literal(1).label("number")).cte(recursive=True)
        step = self._next(walk.c.id).correlate(walk).scalar_subquery()
        more = select(step, walk.c.number + 1).where(walk.c.id.is_not(None), walk.c.number < most)
        ids = walk.union_all(more)
        query = select(cast(ids.c.id, Text)).where(ids.c.id.is_not(None)).order_by(ids.c.number)
        with self._transaction() as connection:
            return list(connection.scalars(query))

    def queued(self, ids: Sequence[str]) -> list[str]:
        """Those of the ids that have queued work."""
        try:
            return self._ask(ids)
        except DataError:  # one of them is no value of the column, and therefore not in it
            return [] if len(ids) == 1 else [found for id_ in ids for found in self.queued([id_])]

    def _ask(self, ids: Sequence[str]) -> list[str]:
        asked = func.unnest(cast(list(ids), ARRAY(Text))).column_valued("asked")
        row = select(literal(1)).select_from(self.column.table)
        is_queued = row.where(self.column == cast(asked, self.column.type), self.where).exists()
        with self._transaction() as connection:
            if connection.scalar(select(func.pg_is_in_recovery())):
                raise ReadOnlyPostgres(
                    "queued_ids_in: the engine is connected to a standby, which may not know of the newest work; "
                    "connect it to the primary"
                )
            return list(connection.scalars(select(asked).where(is_queued)))

    def _next(self, after: ColumnElement[Any] | None) -> Select[Any]:
        """The next id."""
        query = select(self.column).where(self.where, self.column.is_not(None))
        query = query if after is None else query.where(self.column > after)
        return query.order_by(self.column).limit(1)

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        """A new transaction, whatever the engine's isolation: it sees all that was committed before."""
        with self.engine.connect() as plain:
            connection = plain.execution_options(isolation_level="READ COMMITTED")
            with connection.begin():
                timeout = func.set_config("statement_timeout", f"{self.timeout_ms}ms", True)
                connection.execute(select(timeout))
                yield connection
