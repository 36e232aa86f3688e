"""What becomes of a batch that fails.

It is tried again, with growing pauses; then the record that is at fault is found, by halving the batch, or at once if the
handler takes one record a call; alone it is tried again; then it is set aside with its reason, in the transaction that
moves the checkpoint past it, or the shard halts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from penstock.database.connections import Connection
from penstock.database.statements import statements
from penstock.declarations import ConsumerSpec
from penstock.records import Record, ShardName

T = TypeVar("T")

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 5.0
REASON_LENGTH = 500


@dataclass
class HandlerFailed(Exception):
    """A handler raised.

    Attributes:
        error: What it raised.
        culprit: Index of the record at fault, if the handler takes one a call.
    """

    error: Exception
    culprit: int | None = None


def pause_s(attempt: int) -> float:
    """How long to wait after the given attempt (1, 2, 3 …), in seconds."""
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1)))


def divide(records: Sequence[T], culprit: int | None) -> list[Sequence[T]]:
    """The parts to try one by one after a batch has failed as a whole: halves, or all around the record at fault."""
    if culprit is None:
        middle = len(records) // 2
        parts = [records[:middle], records[middle:]]
    else:
        parts = [records[:culprit], records[culprit : culprit + 1], records[culprit + 1 :]]
    return [part for part in parts if part]


def reason_of(error: BaseException) -> str:
    """Why a record was set aside: the class of the error and the first line of its text."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:REASON_LENGTH].replace("\x00", "\\x00")


def set_aside(  # noqa: PLR0913  the parts of a dead letter
    connection: Connection,
    schema: str,
    consumer: ConsumerSpec,
    shard: ShardName,
    records: Sequence[Record],
    *,
    reason: str,
    attempts: int,
    parked: bool,
) -> None:
    """Writes dead letters, in the transaction that moves the checkpoint past them."""
    connection.execute(
        statements("penstock.consuming", schema)["set_aside"],
        {
            "consumer": consumer.name,
            "channel": shard.channel,
            "shard": shard.shard,
            "reason": reason,
            "attempts": attempts,
            "parked": parked,
            "offsets": [record.offset for record in records],
            "ids": [record.id for record in records],
            "keys": [record.key for record in records],
            "actions": [record.action for record in records],
            "objects": [record.object for record in records],
            "data": [record.data_json for record in records],
            "headers": [record.headers_json for record in records],
            "staged": [record.staged_us for record in records],
        },
    )


def parked_keys(
    connection: Connection,
    schema: str,
    consumer: ConsumerSpec,
    shard: ShardName,
    records: Sequence[Record],
) -> set[str]:
    """Keys among ``records`` that have a record set aside."""
    rows = connection.execute(
        statements("penstock.consuming", schema)["parked_keys"],
        {
            "consumer": consumer.name,
            "channel": shard.channel,
            "shard": shard.shard,
            "keys": list({record.key for record in records}),
        },
    ).fetchall()
    return {key for (key,) in rows}
