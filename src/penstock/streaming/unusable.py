"""The shards that a streamer leaves out because their keys hold something that Penstock did not write."""

from time import monotonic

import structlog

from penstock.channels.isolation import ShardError
from penstock.database.errors import describe
from penstock.records import ShardName

log = structlog.get_logger("penstock.streamer")

RETRY_EVERY_S = 5.0
"""Interval between two checks of an unusable shard, in seconds."""

LOG_EVERY_S = 60.0
"""Shortest interval between two log lines about the same unusable shard, in seconds."""


class UnusableShards:
    """Unusable shards, the reason for each, and when to check and to log them again."""

    def __init__(self) -> None:
        self._errors: dict[ShardName, ShardError] = {}
        self._retry_at: dict[ShardName, float] = {}
        self._log_at: dict[ShardName, float] = {}

    def __contains__(self, shard: ShardName) -> bool:
        return shard in self._errors

    @property
    def first_error(self) -> ShardError | None:
        """Why the first of them is unusable; None if there is none."""
        return next(iter(self._errors.values()), None)

    def add(self, shard: ShardName, error: ShardError) -> None:
        """Leaves a shard out until its next check."""
        now = monotonic()
        self._errors[shard] = error
        self._retry_at[shard] = now + RETRY_EVERY_S
        if now >= self._log_at.get(shard, 0.0):
            self._log_at[shard] = now + LOG_EVERY_S
            log.error(
                "shard unusable",
                shard=str(shard),
                reason=describe(error),
                retry_s=RETRY_EVERY_S,
            )

    def remove(self, shard: ShardName) -> None:
        """Takes a shard back: its keys are all right again."""
        del self._errors[shard]
        log.info("shard usable again", shard=str(shard))

    def due(self) -> list[ShardName]:
        """The shards to check now."""
        now = monotonic()
        return [shard for shard in self._errors if now >= self._retry_at[shard]]

    def check_now(self) -> None:
        """Makes all of them due."""
        self._retry_at = dict.fromkeys(self._errors, 0.0)
