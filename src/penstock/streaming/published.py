"""Results of the publisher: what a round has done, and why a batch was refused."""

from dataclasses import dataclass

from penstock.channels.ick import MarkBatch
from penstock.channels.log import Batch, Foreign
from penstock.errors import HistoryDiverged
from penstock.records import ShardName


@dataclass(frozen=True, slots=True)
class Published:
    """Result of one round of the publisher.

    Attributes:
        added: Records that were new to the log.
        known: Records that the log already had: sent again, or sent before by another publisher.
        healed: Shards whose log had less than expected, and are being replayed.
    """

    added: int = 0
    known: int = 0
    healed: tuple[ShardName, ...] = ()


NOTHING = Published()


def refusal(batch: Batch | MarkBatch, reply: Foreign) -> HistoryDiverged:
    """The error of a log, or of a position, that holds another record than the journal."""
    return HistoryDiverged(
        f"{batch.shard} offset {reply.offset}: the log holds record {reply.id}, the journal has another there. Either "
        "Postgres has lost commits that were published, or two databases write to one namespace. "
        "See docs: errors#historydiverged; then: penstock reset epoch"
    )
