"""Isolates shards that cannot be published, so that the other shards go on.

Their keys hold something that Penstock did not write, or are compressed by a library that is missing; their journal is
damaged; or a record of theirs is one that Redis does not take.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from penstock.errors import (
    CodecMissing,
    DamagedIck,
    DamagedJournal,
    ForeignLog,
    ForeignQueue,
    QueueDamaged,
    UnpublishableRecord,
)
from penstock.records import ShardName

UNUSABLE = (CodecMissing, ForeignLog, DamagedIck, ForeignQueue, QueueDamaged, DamagedJournal, UnpublishableRecord)
"""Errors about one shard; every other error concerns a server or all shards."""

ShardError = CodecMissing | ForeignLog | DamagedIck | ForeignQueue | QueueDamaged | DamagedJournal | UnpublishableRecord

LOG_EVERY_S = 3600.0
"""Shortest interval between two log lines about the same unusable shard, in seconds."""

OnUnusable = Callable[[ShardName, ShardError], None]
"""Called with a shard that cannot be used, and the reason."""

_T = TypeVar("_T")


@contextmanager
def isolated(shard: ShardName, on_unusable: OnUnusable | None) -> Iterator[None]:
    """Reports the shard, and suppresses the error, if it cannot be used.  Raises ``Refused``."""
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
    """The result of ``ask(shards)``, without those shards that cannot be used.

    All shards are asked together, as long as none of them fails.  Raises ``Refused``.
    """
    try:
        return dict(ask(shards))
    except UNUSABLE:
        if on_unusable is None:
            raise
    found: dict[ShardName, _T] = {}
    for shard in shards:
        with isolated(shard, on_unusable):
            found |= ask([shard])
    return found
