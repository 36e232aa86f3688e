"""Input and result of a check."""

from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

from penstock.channels.commands import RedisClient
from penstock.database.store import Store
from penstock.operating.status.gathering import status
from penstock.operating.status.snapshot import Status
from penstock.pipeline import Pipeline
from penstock.records import Scope, ShardName

Grade = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of a check, with what repairs it; ``fix`` is empty if all is well.

    ``unreachable``: a server did not answer, so that nothing could be checked.
    """

    check: str
    grade: Grade
    message: str
    fix: str = ""
    unreachable: bool = False


def error(message: str, fix: str, check: str = "") -> CheckResult:
    """Returns an error: records can be lost, or do not move."""
    return CheckResult(check, "error", message, fix)


def warning(message: str, fix: str, check: str = "") -> CheckResult:
    """Returns a warning: worth knowing, recovers by itself, or is about to become an error."""
    return CheckResult(check, "warning", message, fix)


@dataclass(frozen=True)
class CheckContext:
    """Input of a check."""

    store: Store  # in autocommit mode
    client: RedisClient
    pipeline: Pipeline | None  # None if the declarations are not known
    shards: tuple[ShardName, ...] = ()

    @property
    def scope(self) -> Scope:
        """Returns where the pipeline is."""
        return self.store.scope

    def rows(self, name: str, **values: object) -> list[tuple[Any, ...]]:
        """Returns the rows of a statement of this folder."""
        return self.store.rows(name, values)

    @cached_property
    def status(self) -> Status:
        """Returns the progress of all records."""
        return status(self.store, self.client, self.pipeline)


Results = Generator[CheckResult, None, str | None]
"""What is to be fixed; at the end, what was found if that is nothing."""


class Check(Protocol):
    """A function that only reads; its results have its name, unless they have their own."""

    __name__: str

    def __call__(self, context: CheckContext, /) -> Results:
        """Yields the results."""
