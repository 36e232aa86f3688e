"""The shards that a streamer leaves out: see ``channels.isolation``."""

from time import monotonic

import structlog

from penstock.channels.isolation import ShardError
from penstock.database.errors import describe
from penstock.errors import DamagedJournal, UnpublishableRecord
from penstock.records import ShardName

log = structlog.get_logger("penstock.streamer")

RETRY_EVERY_S = 5.0
"""Interval between two checks of an unusable shard, in seconds."""

LONGEST_RETRY_S = 60.0
"""The interval doubles up to this if the journal is damaged or a record cannot be published: a check then reads the tables,
or sends the record again."""

LOG_EVERY_S = 60.0
"""Shortest interval between two log lines about the same unusable shard, in seconds."""


class UnusableShards:
    """Unusable shards, the reason for each, and when to check and to log them again."""

    def __init__(self) -> None:
        self._errors: dict[ShardName, ShardError] = {}
        self._retry_at: dict[ShardName, float] = {}
        self._retry_s: dict[ShardName, float] = {}
        self._log_at: dict[ShardName, float] = {}

    def __contains__(self, shard: ShardName) -> bool:
        return shard in self._errors

    def __getitem__(self, shard: ShardName) -> ShardError:
        return self._errors[shard]

    @property
    def errors(self) -> dict[ShardName, ShardError]:
        """Why each of them is unusable."""
        return dict(self._errors)

    @property
    def first_error(self) -> ShardError | None:
        """Why the first of them is unusable; None if there is none."""
        return next(iter(self._errors.values()), None)

    def add(self, shard: ShardName, error: ShardError) -> None:
        """Leaves a shard out until its next check."""
        now = monotonic()
        retry_s = RETRY_EVERY_S
        if shard in self._errors and isinstance(error, (DamagedJournal, UnpublishableRecord)):
            retry_s = min(LONGEST_RETRY_S, 2 * self._retry_s[shard])
        self._errors[shard], self._retry_s[shard] = error, retry_s
        self._retry_at[shard] = now + retry_s
        if now >= self._log_at.get(shard, 0.0):
            self._log_at[shard] = now + LOG_EVERY_S
            log.error("shard unusable", shard=str(shard), reason=describe(error), retry_s=retry_s)

    def remove(self, shard: ShardName) -> None:
        """Takes a shard back: its keys are all right again."""
        del self._errors[shard], self._retry_s[shard]
        log.info("shard usable again", shard=str(shard))

    def due(self) -> list[ShardName]:
        """The shards to check now."""
        now = monotonic()
        return [shard for shard in self._errors if now >= self._retry_at[shard]]

    def check_now(self) -> None:
        """Makes all of them due."""
        self._retry_at = dict.fromkeys(self._errors, 0.0)
