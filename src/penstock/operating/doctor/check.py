"""The input and the result of a check."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, Self

from penstock.channels.commands import RedisClient
from penstock.database.connections import Connection
from penstock.database.statements import statements
from penstock.operating.status import Status, status
from penstock.pipeline import Pipeline
from penstock.records import Scope, ShardName

Grade = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of a check.

    Attributes:
        grade: ``ok``, ``warning`` or ``error``.
        fix: Command or setting that repairs it; empty if all is well.
        unreachable: True if a server did not answer, so that nothing could be checked.
    """

    check: str
    grade: Grade
    message: str
    fix: str = ""
    unreachable: bool = False

    @classmethod
    def ok(cls, check: str, message: str) -> Self:
        """All is well."""
        return cls(check, "ok", message)

    @classmethod
    def warning(cls, check: str, message: str, fix: str) -> Self:
        """Worth knowing, recovers by itself, or is about to become an error."""
        return cls(check, "warning", message, fix)

    @classmethod
    def error(cls, check: str, message: str, fix: str) -> Self:
        """Records can be lost, or do not move."""
        return cls(check, "error", message, fix)


@dataclass(frozen=True)
class CheckContext:
    """Input of a check.

    Attributes:
        connection: To Postgres, in autocommit mode.
        pipeline: None if the declarations are not known.
    """

    connection: Connection
    client: RedisClient
    pipeline: Pipeline | None
    scope: Scope
    shards: tuple[ShardName, ...] = ()

    def rows(self, name: str, **values: object) -> list[tuple[Any, ...]]:
        """The rows of a statement of this folder."""
        return self.connection.execute(statements(__package__, self.scope.schema)[name], values).fetchall()

    @cached_property
    def status(self) -> Status:
        """Progress of all records."""
        return status(self.connection, self.client, self.pipeline, scope=self.scope)


class Check(Protocol):
    """A function that reads and changes nothing; its name identifies it if it fails."""

    __name__: str

    def __call__(self, context: CheckContext, /) -> Iterable[CheckResult]:
        """The results; several if there are several things to fix."""


def format_age(seconds: float) -> str:
    """A duration for people."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"  # noqa: PLR2004  two minutes
