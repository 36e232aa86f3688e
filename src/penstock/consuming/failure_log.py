"""Logs failures of handlers, each kind once for each place in the code; never their texts, which may hold a payload."""

import structlog

from penstock.consuming.delivery import AskedToWait, Conflict
from penstock.consuming.failures import NotApplied, frames
from penstock.database.errors import driver_error, sqlstate
from penstock.records import ShardName

log = structlog.get_logger("penstock.consumer")


class FailureLog:
    """The failures of one consumer in this process."""

    def __init__(self, consumer: str) -> None:
        self._consumer = consumer
        self._shown: set[tuple[str, ...]] = set()

    def show(self, shard: ShardName, failed: NotApplied) -> None:
        """Logs a failure with where it happened, unless one like it was shown."""
        if isinstance(failed.outcome, Conflict | AskedToWait):
            return
        where = frames(failed.error)
        kind = type(driver_error(failed.error)).__name__
        if (signature := (kind, *where[-1:])) not in self._shown:
            self._shown.add(signature)
            log.warning(
                "handler failed",
                consumer=self._consumer,
                shard=str(shard),
                error=kind,
                sqlstate=sqlstate(failed.error),
                at_commit=failed.at_commit,
                traceback=where,
            )
