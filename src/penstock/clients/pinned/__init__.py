"""Pinned keys: values and locks that live until their time is over, and are not evicted before.

The deadline is part of the record, so that one key says what holds.  A second key finds records that are over, a third
counts fencing numbers; losing either costs memory or nothing.
"""

from penstock.clients.pinned.aio import AsyncFencedLock, AsyncGrant, AsyncPinnedKeys
from penstock.clients.pinned.keys import PinnedKeys
from penstock.clients.pinned.locks import FencedLock, Grant

__all__ = ["AsyncFencedLock", "AsyncGrant", "AsyncPinnedKeys", "FencedLock", "Grant", "PinnedKeys"]
