"""Keeps a consumer's checkpoints in a source's shards, in its own database, and their records."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.database.executor import Executor
from penstock.database.store import Store
from penstock.declaring.declarations import ConsumerSpec
from penstock.journal.journal_reader import JournaledRecord
from penstock.records import Epoch, Offset, Record, RecordId, Shard, ShardName


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """A checkpoint, as far as the source is concerned."""

    shard: ShardName  # the shard of the source
    offset: Offset  # everything up to here has been applied
    # Redis' epoch of the shard whose records may be applied; 0 if none was accepted yet
    epoch: Epoch
    record: JournaledRecord | None  # the record at ``offset``; None if it is not known
    halted: str | None = None  # why the shard is halted; None if it is not


class SourcePositions:
    """The positions of one consumer in one source."""

    def __init__(self, consumer: ConsumerSpec) -> None:
        self._channel = consumer.channel.name
        self._source = self._channel.partition("@")[2]
        self._where = {"consumer": consumer.name, "channel": self._channel}

    def all(self, store: Store[Executor]) -> dict[ShardName, SourcePosition]:
        """Returns all of them, those of halted shards too."""
        rows = store.rows("positions", self._where)
        positions = (
            SourcePosition(
                ShardName(self._channel, Shard(shard)),
                Offset(offset),
                Epoch(epoch),
                None if record_id is None else JournaledRecord(RecordId(record_id), staged_us),
                halted,
            )
            for shard, offset, epoch, record_id, staged_us, halted in rows
        )
        return {position.shard: position for position in positions}

    def begin(self, store: Store[Executor], positions: Iterable[SourcePosition]) -> None:
        """Writes the checkpoints of shards in which the consumer has none."""
        new = list(positions)
        values = {
            **self._where,
            "source": self._source,
            "shards": [position.shard.shard for position in new],
            "offsets": [position.offset for position in new],
            "ids": [position.record and position.record.id for position in new],
            "staged": [position.record and position.record.staged_us for position in new],
        }
        store.execute("begin", values)

    def note_records(self, store: Store[Executor], records: Mapping[ShardName, Record]) -> None:
        """Writes which records the checkpoints are at when the transaction is committed."""
        values = {
            **self._where,
            "shards": [shard.shard for shard in records],
            "ids": [record.id for record in records.values()],
            "staged": [record.staged_us for record in records.values()],
        }
        store.execute("note_records", values)

    def accept_epoch(self, store: Store[Executor], shard: ShardName, epoch: Epoch) -> None:
        """Writes that what Redis holds of a shard in this epoch follows the checkpoint."""
        values = {**self._where, "shard": shard.shard, "epoch": epoch}
        store.execute("accept_epoch", values)
