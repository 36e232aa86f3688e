"""Batches of a publisher, and their outcomes, whatever the kind of channel.

A script compares before it appends, marks or writes, and replies alike for all kinds:
``parse_reply``.
"""

from dataclasses import dataclass, replace
from typing import Any

import redis

from penstock.batches.columns import CODECS, Columns
from penstock.channels.isolation import UNUSABLE, ShardError
from penstock.channels.server import REDIS_ERRORS, REFUSALS, RedisFailure, translate_error
from penstock.errors import AppendRefused, ForeignLog, UnpublishableRecord
from penstock.records import Epoch, Offset, ShardName

_SERVER_REFUSALS = (*REFUSALS, "BUSY", "UNKILLABLE")
"""Words of error replies that are about the server, not the call."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive records of a shard, ready to be appended."""

    shard: ShardName  # where they belong
    epoch: Epoch  # the epoch of the publisher
    first: Offset  # offset of the first record
    # no record before ``first`` exists any more: a log that ends before it may begin here
    begins: bool
    columns: Columns  # the records
    plain: bool = False  # whether each record is to be an entry of its own

    def stored_as(self, entries: str) -> "Batch":
        """Returns the batch as a channel stores it: ``plain``, or how its columns are compressed.

        Raises ``CodecMissing``.
        """
        if entries == "plain":
            return replace(self, plain=True)
        [codec] = (codec for codec in CODECS if codec == entries)
        return replace(self, columns=self.columns.compressed(codec), plain=False)

    def after(self, offset: Offset) -> "Batch":
        """Returns the records after one in the batch, which is not the last."""
        rows = [*self.columns.rows()][offset + 1 - self.first :]
        columns = Columns.pack(rows).compressed(self.columns.codec)
        return replace(self, first=Offset(offset + 1), begins=False, columns=columns)

    @property
    def count(self) -> int:
        """Returns the number of records."""
        return self.columns.count

    @property
    def last(self) -> Offset:
        """Returns the offset of the last record."""
        return Offset(self.first + self.count - 1)


@dataclass(frozen=True, slots=True)
class Appended:
    """The log now ends at ``tail``; ``added`` of the records were new to it."""

    tail: Offset
    added: int


@dataclass(frozen=True, slots=True)
class Behind:
    """The log ends at ``tail``, before the batch: nothing was added."""

    tail: Offset


@dataclass(frozen=True, slots=True)
class FencedOff:
    """A publisher of the newer ``epoch`` has written: nothing was added."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Foreign:
    """Nothing was added: the entry at ``offset`` has another record id, ``id``."""

    offset: Offset
    id: str


@dataclass(frozen=True, slots=True)
class Unusable:
    """Nothing was added: a key holds something foreign, or Redis does not take a record."""

    error: ShardError


Reply = Appended | Behind | FencedOff | Foreign | Unusable
"""Outcome of a batch."""


def parse_reply(answer: Any, activity: str) -> Reply:
    """Returns the outcome in the reply of a script that compares, then appends or marks.

    Raises ``ServerUnavailable`` or ``AppendRefused``.
    """
    if isinstance(answer, REDIS_ERRORS):
        return Unusable(_error_of_one_call(answer, activity))
    match answer:
        case [b"appended", int(tail), int(added)]:
            return Appended(Offset(tail), added)
        case [b"behind", int(tail)]:
            return Behind(Offset(tail))
        case [b"fenced", int(epoch)]:
            return FencedOff(Epoch(epoch))
        case [b"foreign", int(offset), bytes(record_id)]:
            return Foreign(Offset(offset), record_id.decode(errors="replace"))
        case _:
            return Unusable(make_foreign(activity, answer))


def _error_of_one_call(answer: RedisFailure, activity: str) -> ShardError:
    """Returns the error of the shard; raises one that is about the server."""
    error = translate_error(answer, activity)
    if isinstance(error, AppendRefused) and _is_about_one_call(answer):
        return UnpublishableRecord(str(error))
    if isinstance(error, UNUSABLE):
        return error
    raise error from answer


def _is_about_one_call(answer: RedisFailure) -> bool:
    """Returns whether an error reply concerns only the keys or values of this call.

    Other calls may then succeed.  A server that takes no writes, or none of this user, says so with
    a word of its own.  The client has classes for most of these; older servers put the word into
    the text of the script's error.
    """
    if isinstance(answer, redis.exceptions.NoPermissionError):
        return " key" in str(answer)
    return type(answer) in {
        redis.ResponseError,
        redis.exceptions.ClusterCrossSlotError,
    } and not any(f"{word} " in str(answer) for word in _SERVER_REFUSALS)


def make_foreign(activity: str, answer: Any) -> ForeignLog:
    """Returns the error for a key that holds something that Penstock did not write."""
    if not (isinstance(answer, list) and answer[:1] == [b"broken"]):
        return ForeignLog(f"{activity}: the script returned an unknown reply")
    content = bytes(answer[1])
    return ForeignLog(
        f"{activity}: {content.decode(errors='replace')}: not written by Penstock. Find out what "
        "writes to its keys, and delete "
        "them: the streamer replays the shard from the journal"
    )
