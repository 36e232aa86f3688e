"""Isolates shards whose keys hold something that Penstock did not write, so that the other shards go on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from penstock.errors import DamagedIck, ForeignLog
from penstock.records import ShardName

UNUSABLE = (ForeignLog, DamagedIck)
"""Errors about the keys of one shard; every other error concerns a server or all shards."""

ShardError = ForeignLog | DamagedIck

OnUnusable = Callable[[ShardName, ShardError], None]
"""Called with a shard that cannot be used, and the reason."""

_T = TypeVar("_T")


@contextmanager
def isolated(shard: ShardName, on_unusable: OnUnusable | None) -> Iterator[None]:
    """Reports the shard, and suppresses the error, if its keys cannot be used.

    Raises:
        ForeignLog: The same, if there is no ``on_unusable``.
        DamagedIck: The same, if there is no ``on_unusable``.
    """
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

    All shards are asked together, as long as none of them fails.

    Raises:
        ForeignLog: A shard cannot be used, and there is no ``on_unusable``.
        DamagedIck: A shard cannot be used, and there is no ``on_unusable``.
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
