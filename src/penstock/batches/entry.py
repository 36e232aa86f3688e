"""A batch as an entry of a log's stream.

    id <offset of the last record>-0
    first      offset of the first record
    from       id of the first record, and when it was staged in microseconds since 1970
    to         the same of the last record
    codec      how each of the columns is compressed, or none
    ids keys actions objects data headers times        the columns: see ``columns``

A seek for any offset finds the entry that holds it, because the entry's id is its last offset.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from penstock.batches.columns import CODECS, COLUMNS, Columns, DamagedColumns
from penstock.parsing import parse_number
from penstock.records import BEGINNING, Offset, Record, RecordColumns, RecordId, ShardName

FIELDS: list[bytes] = [b"first", b"from", b"to", b"codec", *(name.encode() for name in COLUMNS)]
"""The names of an entry's fields, in their order."""

MAX_RECORDS = 10_000
"""Most records of an entry, which one call of ``LogWriter.append`` may write.

A streamer writes 1,000.
"""

_COLUMNS_FROM = FIELDS.index(b"codec") + 1


@dataclass(frozen=True)
class Entry:
    """Consecutive records of a shard, from the offset ``first`` on."""

    shard: ShardName
    first: Offset
    columns: Columns

    @classmethod
    def parse(
        cls,
        shard: ShardName,
        last: Offset,
        values: Sequence[bytes],
        *,
        previous: Offset = BEGINNING,
        check: bool = True,
    ) -> "Entry":
        """Parses the entry with the values of ``FIELDS``.

        ``previous`` is the offset before its first record.  Reads all columns, so that damage is
        found here and not in a handler; without ``check``, only opens them.  Raises
        ``DamagedColumns``, also if it begins at ``previous`` or before; or ``CodecMissing``.
        """
        first = cls.parse_first(last, values)
        first_id, first_us = _parse_identity(values[1])
        last_id, last_us = cls.parse_last(values)
        if first <= previous:
            raise DamagedColumns(
                f"it begins at offset {first}, and the one before ends at {previous}"
            )
        codec = next((name for name in CODECS if name.encode() == values[3]), None)
        if codec is None:
            raise DamagedColumns("its codec is unknown to this release")
        boundaries = first_id, first_us, last_id, last_us
        columns = Columns(last - first + 1, *boundaries, values[_COLUMNS_FROM:], codec)
        if not check:
            return cls(shard, first, columns.opened())
        columns.check()
        return cls(shard, first, columns)

    @staticmethod
    def parse_first(last: Offset, values: Sequence[bytes]) -> Offset:
        """Returns the offset of the first record.  Raises ``DamagedColumns``."""
        with suppress(ValueError):
            first = parse_number(values[0])
            if max(0, last - MAX_RECORDS) < first <= last:
                return Offset(first)
        raise DamagedColumns("its first offset cannot be read")

    @staticmethod
    def parse_last(values: Sequence[bytes]) -> tuple[RecordId, int]:
        """Returns id and staging time of the last record; reads no column.

        Raises ``DamagedColumns``.
        """
        return _parse_identity(values[2])

    def __len__(self) -> int:
        return self.columns.count

    @property
    def last(self) -> Offset:
        """Offset of the last record."""
        return Offset(self.first + self.columns.count - 1)

    def values(self) -> list[bytes]:
        """Returns the values of ``FIELDS``."""
        columns = self.columns
        return [
            b"%d" % self.first,
            b"%d %d" % (columns.first_id, columns.first_us),
            b"%d %d" % (columns.last_id, columns.last_us),
            columns.codec.encode(),
            *columns.texts,
        ]

    @property
    def offsets(self) -> Sequence[Offset]:
        """Offsets of its records."""
        return cast("Sequence[Offset]", range(self.first, self.last + 1))

    @cached_property
    def view(self) -> RecordColumns:
        """Values of its records, by column.  Raises ``DamagedColumns``."""
        return RecordColumns(
            self.shard.channel, self.shard.shard, self.offsets, *self.columns.values()
        )

    @property
    def records(self) -> list[Record]:
        """Records of the entry.  Raises ``DamagedColumns``."""
        return [*self.view.records(0, len(self))]


def _parse_identity(text: bytes) -> tuple[RecordId, int]:
    try:
        id_, staged_us = map(parse_number, text.split(b" "))
    except ValueError as error:
        raise DamagedColumns("its field from or to cannot be read") from error
    return RecordId(id_), staged_us
