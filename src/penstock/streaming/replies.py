"""What a publisher learns from Redis' replies: new tails, and which shards it may not send to any further."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import assert_never

from penstock.channels.ick import MarkBatch
from penstock.channels.log import Appended, Batch, Behind, FencedOff, Foreign, Reply, Unusable
from penstock.errors import Fenced, HistoryDiverged, UnpublishableRecord
from penstock.records import ShardName
from penstock.streaming.tails import Tails


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


class Replies:
    """The replies of a round, as far as they have to be acted upon after it."""

    def __init__(self, ends: Tails) -> None:
        self._ends = ends
        self._foreign: dict[ShardName, HistoryDiverged] = {}
        self._refused: set[ShardName] = set()

    def may_send(self, shard: ShardName) -> bool:
        """Whether nothing of the shard has failed."""
        return not (shard in self._ends.unusable or shard in self._foreign or shard in self._refused)

    def take_foreign(self) -> Mapping[ShardName, HistoryDiverged]:
        """The shards whose log holds other records than the journal; forgets them."""
        foreign, self._foreign = self._foreign, {}
        return foreign

    def take_refused(self) -> set[ShardName]:
        """The shards with a record that Redis does not take; forgets them."""
        refused, self._refused = self._refused, set()
        return refused

    def add(self, done: Published, batch: Batch | MarkBatch, reply: Reply) -> Published:
        """Notes a reply; returns what has been done, with it.

        Raises:
            Fenced: A newer epoch has taken over.
        """
        match reply:
            case Appended(tail, added):
                self._ends.move(batch.shard, tail, by_another=added < batch.count)
                known = done.known + batch.count - added
                return replace(done, added=done.added + added, known=known)
            case Behind(tail):
                # An Ick that is ahead was marked by another publisher, in batches that began elsewhere.
                is_ahead = tail >= batch.first
                self._ends.move(batch.shard, tail, by_another=is_ahead)
                if is_ahead or batch.shard in done.healed:
                    return done
                return replace(done, healed=(*done.healed, batch.shard))
            case Unusable(UnpublishableRecord()):
                self._refused.add(batch.shard)
            case Unusable(error):
                self._ends.unusable.add(batch.shard, error)
            case Foreign():
                self._foreign.setdefault(batch.shard, refusal(batch, reply))
            case FencedOff(epoch):
                raise Fenced(
                    f"{batch.shard}: the log is in epoch {epoch}, this streamer in {batch.epoch}, which Postgres has left. "
                    "Start it again"
                )
            case _:
                assert_never(reply)
        return done
