"""Pauses: nothing is applied of a consumer, or of a channel, until an operator resumes it.

A pause is one row, which every transaction reads that locks a checkpoint: it holds in all processes from its commit on, for
consumers and shards that are added later, too.  What was being applied goes on to its end.  Producers and the streamer do not
read it, and retention waits for the consumer's checkpoints as ever.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from penstock.database.executor import Executor
from penstock.database.statements import statements
from penstock.records import Scope

PauseKind = Literal["consumer", "channel"]
"""``channel``: all of its consumers."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause.

    Attributes:
        kind: What is paused: a consumer in all that it reads, or all consumers of a channel.
        name: Its name.
        reason: Why, as the operator said it.
        paused_by: Who paused it.
        paused_at: Since when.
    """

    kind: PauseKind
    name: str
    reason: str
    paused_by: str
    paused_at: datetime

    def __str__(self) -> str:
        since = f"{self.paused_at:%Y-%m-%d %H:%M:%S %Z}"
        return f"{self.kind} {self.name} is paused since {since} by {self.paused_by}: {self.reason}"

    @property
    def how_to_resume(self) -> str:
        """The command that ends it."""
        return f"penstock {self.kind}s resume {self.name}"

    def holds(self, consumer: str, channel: str) -> bool:
        """True if it holds for a consumer of a channel."""
        return self.name == (consumer if self.kind == "consumer" else channel)


def read_pauses(executor: Executor, scope: Scope) -> tuple[Pause, ...]:
    """All pauses: channels first."""
    rows = executor.execute(statements("penstock.database", scope.schema)["pauses"]).fetchall()
    return tuple(Pause(*row) for row in rows)


def find_pause(executor: Executor, scope: Scope, consumer: str, channel: str) -> Pause | None:
    """The pause of a consumer of a channel; None if nothing holds it."""
    return next((pause for pause in read_pauses(executor, scope) if pause.holds(consumer, channel)), None)
