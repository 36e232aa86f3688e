"""Runs the named statements of the ``.sql`` files, on one connection, for one pipeline.

    values = {"consumer": "fares", "channel": "rides"}
    store.rows("checkpoints", values, doing="reading checkpoints")

``doing`` says in an error what the statement was for: see ``postgres_errors``.  It is left out in a
block that says it for all of its statements, and between those of a handler, whose transaction
gives their errors a meaning.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic

from psycopg.rows import class_row
from typing_extensions import TypeVar

from penstock.database.connections import Connection
from penstock.database.driver_errors import postgres_errors
from penstock.database.executor import Executor, Row, StatementResult
from penstock.database.statements import statements
from penstock.records import DEFAULT_SCOPE, Scope

Executor_co = TypeVar("Executor_co", bound=Executor, covariant=True, default=Connection)
T = TypeVar("T")
Values = Mapping[str, Any]


class Store(Generic[Executor_co]):
    """A connection, and the pipeline whose tables it reads and writes.

    ``Store`` alone has a connection of ours, ``Store[Executor]`` may have that of a handler.
    """

    __slots__ = ("_sql", "connection", "scope")

    def __init__(self, connection: Executor_co, scope: Scope = DEFAULT_SCOPE) -> None:
        """Sends nothing yet."""
        self.connection, self.scope = connection, scope
        self._sql = statements(scope.schema)

    def __getitem__(self, name: str) -> bytes:
        """Returns the text of a statement, for a message of several."""
        return self._sql[name]

    def execute(
        self, name: str, values: Values | None = None, *, doing: str | None = None, **options: bool
    ) -> StatementResult:
        """Executes a statement.

        A connection of ours takes the option ``binary``, for the format of values.
        """
        return self._read(_result, name, values, doing, options)

    def rows(
        self, name: str, values: Values | None = None, *, doing: str | None = None, **options: bool
    ) -> list[Row]:
        """Returns all rows of a statement; options are those of ``execute``."""
        return self._read(_all_rows, name, values, doing, options)

    def row(
        self, name: str, values: Values | None = None, *, doing: str | None = None, **options: bool
    ) -> Row | None:
        """Returns the first row of a statement; None if there is none."""
        return self._read(_first_row, name, values, doing, options)

    def value(
        self, name: str, values: Values | None = None, *, doing: str | None = None, **options: bool
    ) -> Any:
        """Returns the first value of the first row; None if there is none."""
        row = self._read(_first_row, name, values, doing, options)
        return None if row is None else row[0]

    def _read(
        self,
        read: Callable[[StatementResult], T],
        name: str,
        values: Values | None,
        doing: str | None,
        options: Mapping[str, bool],
    ) -> T:
        if doing is None:
            return read(self.connection.execute(self._sql[name], values, **options))
        with postgres_errors(doing):  # in a pipeline, errors come with the rows
            return read(self.connection.execute(self._sql[name], values, **options))

    def objects(
        self: "Store[Connection]",
        kind: type[T],
        name: str,
        values: Values | None = None,
        *,
        doing: str,
        binary: bool = True,
    ) -> list[T]:
        """Returns the rows as objects of a class whose arguments are the columns."""
        with (
            postgres_errors(doing),
            self.connection.cursor(binary=binary, row_factory=class_row(kind)) as cursor,
        ):
            return cursor.execute(self._sql[name], values).fetchall()

    @contextmanager
    def transaction(
        self: "Store[Connection]", doing: str, *, is_own: bool = True
    ) -> Iterator[None]:
        """Runs the block as one transaction; ``doing`` holds for all its statements.

        See ``postgres_errors``.
        """
        with postgres_errors(doing, is_own=is_own), self.connection.transaction():
            yield


def _result(result: StatementResult) -> StatementResult:
    return result


def _all_rows(result: StatementResult) -> list[Row]:
    return result.fetchall()


def _first_row(result: StatementResult) -> Row | None:
    return result.fetchone()
