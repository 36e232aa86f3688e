"""Pinned keys: values and locks that live until their time is over, and are not evicted before.

The deadline is part of the record, so that one key says what holds.  A second key finds records that are over, a third
counts fencing numbers; losing either costs memory or nothing.
"""

from penstock.structures.pinned.aio import AsyncFencedLock, AsyncGrant, AsyncPinnedKeys
from penstock.structures.pinned.keys import PinnedKeys
from penstock.structures.pinned.locks import FencedLock, Grant

__all__ = ["AsyncFencedLock", "AsyncGrant", "AsyncPinnedKeys", "FencedLock", "Grant", "PinnedKeys"]
