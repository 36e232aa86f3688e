"""Isolates unusable shards, so that the others continue.

Their keys hold something that Penstock did not write, or are compressed by a library that is
missing; their journal is damaged; or a record of theirs is one that Redis does not take.

    unusable    remembered by each streamer, worker and reader, in ``UnusableShards``; tried again
    halted      in a consumer's row, until an operator resumes it: ``consuming/checkpoints.py``
    resting     a worker waits, since another process works on the shard, or an attempt failed
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import TypeVar

from penstock.errors import (
    CodecMissing,
    DamagedIck,
    DamagedJournal,
    ForeignLog,
    ForeignQueue,
    PenstockError,
    QueueDamaged,
    UnpublishableRecord,
)
from penstock.logs import Repeats
from penstock.records import ShardName

RETRY_EVERY_S = 5.0
"""Interval, in seconds, at which an unusable shard is tried again."""

MAX_RETRY_S = 60.0
"""Upper limit to which that interval doubles if the journal is damaged or a record cannot be
published: a check then reads the tables, or sends the record again."""

UNUSABLE = (
    CodecMissing,
    ForeignLog,
    DamagedIck,
    ForeignQueue,
    QueueDamaged,
    DamagedJournal,
    UnpublishableRecord,
)
"""Errors about one shard; every other error concerns a server or all shards."""

ShardError = (
    CodecMissing
    | ForeignLog
    | DamagedIck
    | ForeignQueue
    | QueueDamaged
    | DamagedJournal
    | UnpublishableRecord
)

OnUnusable = Callable[[ShardName, ShardError], None]
"""Called with a shard that cannot be used, and the reason."""

SayUnusable = Callable[[ShardName, PenstockError | None, float], None]
"""Logs that a shard is unusable, why, and after how many seconds it is tried again; None: that it
is usable again."""

_T = TypeVar("_T")


class UnusableShards:
    """Errors of the shards that a streamer, worker or reader leaves out, and their next attempts.

    ``say`` logs them; ``on_new`` is called with each shard that becomes unusable.
    """

    def __init__(
        self,
        say: SayUnusable = lambda _shard, _error, _retry_s: None,
        on_new: Callable[[ShardName, PenstockError], None] = lambda _shard, _error: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._say, self._on_new, self._clock = say, on_new, clock
        self.errors: dict[ShardName, PenstockError] = {}
        self._retry_s: dict[ShardName, float] = {}
        self._retry_at: dict[ShardName, float] = {}
        self._repeats = Repeats(clock)

    def __contains__(self, shard: ShardName) -> bool:
        return shard in self.errors

    def add(self, shard: ShardName, error: PenstockError, retry_s: float | None = None) -> None:
        """Leaves a shard out for ``retry_s``, or as long as the kind of error requires."""
        now, is_new = self._clock(), shard not in self.errors
        if retry_s is None:
            costs_much = not is_new and isinstance(error, (DamagedJournal, UnpublishableRecord))
            retry_s = min(MAX_RETRY_S, 2 * self._retry_s[shard]) if costs_much else RETRY_EVERY_S
        self.errors[shard] = error
        self._retry_s[shard] = retry_s
        self._retry_at[shard] = now + retry_s
        if is_new:
            self._on_new(shard, error)
        if self._repeats.is_due(shard, str(error)):
            self._say(shard, error, retry_s)

    def remove(self, shard: ShardName) -> None:
        """Takes back a shard that was left out: its keys are usable again."""
        if self.errors.pop(shard, None) is not None:
            self._repeats.end(shard)
            self._say(shard, None, 0.0)

    def is_left_out(self, shard: ShardName) -> bool:
        """Returns whether a shard is unusable and not due to be tried."""
        return shard in self.errors and self._clock() < self._retry_at[shard]

    def due(self) -> list[ShardName]:
        """Returns the unusable shards that are due to be tried."""
        return [shard for shard in self.errors if not self.is_left_out(shard)]

    def forget_due(self) -> None:
        """Treats the shards that are due as usable until they fail again."""
        for shard in self.due():
            del self.errors[shard]

    def check_now(self) -> None:
        """Makes all unusable shards due."""
        self._retry_at = dict.fromkeys(self.errors, 0.0)

    def raise_first(self) -> None:
        """Raises the error of the first unusable shard, if there is one."""
        for error in self.errors.values():
            raise error


@contextmanager
def leaving_out(shard: ShardName, on_unusable: OnUnusable | None) -> Iterator[None]:
    """Reports a shard that cannot be used, and suppresses the error.  Raises ``Refused``."""
    try:
        yield
    except UNUSABLE as error:
        if on_unusable is None:
            raise
        on_unusable(shard, error)


def ask_each(
    ask: Callable[[Sequence[ShardName]], Mapping[ShardName, _T]],
    shards: Sequence[ShardName],
    on_unusable: OnUnusable | None,
) -> dict[ShardName, _T]:
    """Returns the result of ``ask(shards)``, without the shards that cannot be used.

    All shards are asked together, as long as none of them fails.  Raises ``Refused``.
    """
    try:
        return dict(ask(shards))
    except UNUSABLE:
        if on_unusable is None:
            raise
    results: dict[ShardName, _T] = {}
    for shard in shards:
        with leaving_out(shard, on_unusable):
            results |= ask([shard])
    return results
