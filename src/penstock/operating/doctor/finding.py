"""What checks are given, and what they give back."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

from penstock.channels.server import RedisClient
from penstock.database.connections import Connection
from penstock.operating.status import Status, status
from penstock.pipeline import Pipeline
from penstock.records import ShardName

Grade = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found.

    Attributes:
        check: Name of the check.
        grade: ``ok``, ``warning`` or ``error``.
        found: What is so.
        mend: What to type, or to set; empty if all is well.
        unreachable: A server did not answer, so that nothing could be looked at.
    """

    check: str
    grade: Grade
    found: str
    mend: str = ""
    unreachable: bool = False


@dataclass(frozen=True)
class Examined:
    """What is examined.

    Attributes:
        connection: To Postgres, in autocommit mode.
        client: Of Redis.
        pipeline: What is declared; None if it is not known.
        schema: The Penstock schema.
        namespace: First part of the keys.
        shards: Every shard that is known.
        prepare: Whether statements are prepared.
    """

    connection: Connection
    client: RedisClient
    pipeline: Pipeline | None
    schema: str
    namespace: str
    shards: tuple[ShardName, ...] = ()
    prepare: bool = True

    @cached_property
    def status(self) -> Status:
        """How far everything is.

        Raises:
            ServerUnavailable: Postgres or Redis does not answer.
        """
        return status(
            self.connection,
            self.client,
            self.pipeline,
            schema=self.schema,
            namespace=self.namespace,
        )


class Check(Protocol):
    """A function that looks, and changes nothing; its name is what the finding is called if it cannot look."""

    __name__: str

    def __call__(self, examined: Examined, /) -> Iterable[Finding]:
        """What it found; several findings, if there are several things to mend."""


def age(seconds: float) -> str:
    """A duration for people."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"  # noqa: PLR2004  two minutes
