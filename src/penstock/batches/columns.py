"""Consecutive records as columns of text, a line each.

    ids        how far the record's id is beyond consecutive ids: its id, less the first record's,
               less its place
    keys       a JSON string; null for a record that is gone
    actions    a JSON string
    objects    a JSON string
    data       the payload: JSON text, which holds no line break
    headers    the headers, likewise; empty if there are none
    times      microseconds since the first record was staged

A column of equal lines may be written as one line.  Postgres writes the columns (``unpublished``
and ``sequence_committed``), so a worker passes on a batch without a step for each record; numbers
are differences because most of them are then 0.

Columns may be compressed: a choice of the channel, named in every entry.  Measured on payloads of
170 bytes, 500 a batch: zstd takes 0.26 µs a record and leaves 23 %, and reads it back in 0.09 µs;
zlib takes 1.0 µs, leaves 28 %, and reads it back in 0.32 µs.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from operator import add
from typing import Any, Literal, TypeVar, cast

from penstock.errors import CodecMissing
from penstock.parsing import MAX_NUMBER, decode_json
from penstock.records import MAX_KEY_CHARACTERS, MAX_LABEL_CHARACTERS, RecordId

Codec = Literal["none", "zstd"]
"""Compression of the columns of an entry."""

CODECS: tuple[Codec, ...] = ("none", "zstd")

MAX_BYTES = 64 * 1024 * 1024
"""Largest column that is compressed, in bytes.

A frame of a few kilobytes could otherwise say that it holds as much as a process has memory.
"""


class DamagedFrame(ValueError):
    """A frame that was not compressed, or not as a whole."""


def compress(codec: Codec, text: bytes) -> bytes:
    """Compresses a text.  Raises ``CodecMissing``."""
    return (
        text
        if codec == "none"
        else _zstd().ZstdCompressor(level=1, write_checksum=True).compress(text)
    )


def is_installed(codec: Codec) -> bool:
    """True if this process can compress and decompress with the codec."""
    try:
        compress(codec, b"")
    except CodecMissing:
        return False
    return True


def size(codec: Codec, stored: bytes) -> int:
    """Returns the decompressed size, in bytes.

    Raises ``CodecMissing``, or ``DamagedFrame`` if the frame names no size or more than
    ``MAX_BYTES``.
    """
    if codec == "none":
        return len(stored)
    try:
        size_bytes: int = _zstd().frame_content_size(stored)
    except _zstd().ZstdError as error:
        raise DamagedFrame from error
    if not 0 <= size_bytes <= MAX_BYTES:
        raise DamagedFrame
    return size_bytes


def decompress(codec: Codec, stored: bytes) -> bytes:
    """Decompresses a text.  Raises as ``size``."""
    if codec == "none":
        return stored
    size(codec, stored)
    try:
        text: bytes = _zstd().ZstdDecompressor().decompress(stored)
    except _zstd().ZstdError as error:
        raise DamagedFrame from error
    return text


@cache
def _zstd() -> Any:
    """Imports the library.  Raises ``CodecMissing``."""
    try:
        import zstandard  # noqa: PLC0415  only where a channel compresses
    except ImportError as error:
        raise CodecMissing(
            "a channel with compression='zstd' needs the library zstandard. Install it: pip "
            "install 'penstock-outbox[zstd]'"
        ) from error
    return zstandard


_Value = TypeVar("_Value")

COLUMNS = ("ids", "keys", "actions", "objects", "data", "headers", "times")
"""The columns, in the order in which they are written.

Their names differ from the fields of a plain entry, so that no reader takes a batch for a record.
"""


_NUMBER = 20
_MAX_LINES: dict[str, int] = {
    "ids": _NUMBER,
    "keys": 6 * MAX_KEY_CHARACTERS + 2,  # a control character takes six bytes of JSON
    "actions": 6 * MAX_LABEL_CHARACTERS + 2,
    "objects": 6 * MAX_LABEL_CHARACTERS + 2,
    "times": _NUMBER,
}
"""Longest line of a column, in bytes, if limited: damage must not fill the memory of readers.

Records that are older than the limits may be longer, which is noticed only of columns that are
larger than ``_MAX_TOGETHER``.
"""

_MAX_TOGETHER = 1024 * 1024
"""Size up to which the strings of a column are parsed in one call.

Damaged ones take twenty times their size.
"""

_STRING_OR_NULL = {str, type(None)}


class DamagedColumns(ValueError):
    """The columns do not hold what they should; the text never quotes them."""


@dataclass(frozen=True)
class Columns:
    """The columns of a batch, with id and time of its first and last record."""

    count: int  # number of records
    first_id: RecordId  # id of the first record
    first_us: int  # when it was staged, in microseconds since 1970
    last_id: RecordId  # id of the last record
    last_us: int  # when that was staged
    texts: Sequence[bytes]  # the columns, in the order of ``COLUMNS``, as they are stored
    codec: Codec = "none"  # how each of them is compressed

    @classmethod
    def pack(cls, rows: Sequence[Sequence[Any]]) -> "Columns":
        """Packs rows of id, key, action, object, data, headers and time into columns.

        At least one row.
        """
        return cls.of_values([*zip(*rows, strict=True)])

    @classmethod
    def of_values(cls, columns: Sequence[Sequence[Any]]) -> "Columns":
        """Columns of ids, keys, actions, objects, data, headers and times, of at least one record.

        For writers that have the values; the statements of the streamer write the same.
        """
        ids, keys, actions, objects, data, headers, times = columns
        first_id, first_us = ids[0], times[0]
        texts = [
            _write([id_ - first_id - place for place, id_ in enumerate(ids)]),
            _write(keys),
            _write(actions),
            _write(objects),
            _join(data),
            _join(headers),
            _write([staged_us - first_us for staged_us in times]),
        ]
        return cls.of_lines(len(ids), first_id, first_us, [text.encode() for text in texts])

    @classmethod
    def of_lines(
        cls, count: int, first_id: RecordId, first_us: int, lines: Sequence[bytes]
    ) -> "Columns":
        """Columns of a line for each record, as Postgres writes them; equal lines become one."""
        id_, *_, ts = lines
        last_id = first_id + count - 1 + int(id_[id_.rfind(b"\n") + 1 :])
        last_us = first_us + int(ts[ts.rfind(b"\n") + 1 :])
        texts = [_fold(text, count) for text in lines]
        return cls(count, first_id, first_us, RecordId(last_id), last_us, texts)

    def compressed(self, codec: Codec) -> "Columns":
        """Returns the columns compressed, unless one exceeds the limit of ``decompress``.

        Raises ``CodecMissing``.
        """
        if codec == self.codec or (codec != "none" and max(map(len, self.texts)) > MAX_BYTES):
            return self
        texts = [compress(codec, self._text(column)) for column in range(len(COLUMNS))]
        return replace(self, texts=texts, codec=codec)

    @cached_property
    def ids(self) -> list[RecordId]:
        """Ids of the records."""
        beyond = self._numbers(0)
        consecutive = range(self.first_id, self.first_id + self.count)
        return cast(
            "list[RecordId]", [*(map(add, consecutive, beyond) if any(beyond) else consecutive)]
        )

    @cached_property
    def keys(self) -> list[str]:
        """Keys of the records; None for a record that is gone."""
        return self._strings(1)

    @cached_property
    def actions(self) -> list[str]:
        """Action of each record."""
        return self._strings(2)

    @cached_property
    def objects(self) -> list[str]:
        """Object of each record."""
        return self._strings(3)

    @cached_property
    def data_json(self) -> list[str]:
        """Payloads as JSON text."""
        return self._lines(4)

    @cached_property
    def headers_json(self) -> list[str]:
        """Headers as JSON text; empty where there are none."""
        return self._lines(5)

    @cached_property
    def staged_us(self) -> list[int]:
        """Time of each record's staging, in microseconds since 1970."""
        first = self.first_us
        return [first + delta for delta in self._numbers(6)]

    def values(
        self,
    ) -> tuple[list[RecordId], list[str], list[str], list[str], list[str], list[str], list[int]]:
        """Returns the values of the records, in the order of ``COLUMNS``."""
        return (
            self.ids,
            self.keys,
            self.actions,
            self.objects,
            self.data_json,
            self.headers_json,
            self.staged_us,
        )

    def rows(self) -> Iterable[tuple[RecordId, str, str, str, str, str, int]]:
        """Returns the values, record by record."""
        return zip(*self.values(), strict=True)

    def opened(self) -> "Columns":
        """Returns the columns decompressed; checks only their sizes.

        Raises ``DamagedColumns`` or ``CodecMissing``.
        """
        self._check_sizes()
        return self.compressed("none")

    def _check_sizes(self) -> None:
        for column, name in enumerate(COLUMNS):
            if name in _MAX_LINES and self._size(column) > max(
                self.count * (_MAX_LINES[name] + 1), _MAX_TOGETHER
            ):
                raise _damaged(column)

    def check(self) -> None:
        """Reads all columns, and compares them with id and time of the first and the last record.

        Raises ``DamagedColumns``, also if they are another batch's.
        """
        self._check_sizes()
        self.values()
        ids, times = self.ids, self.staged_us
        boundaries = ids[0], times[0], ids[-1], times[-1]
        if boundaries != (self.first_id, self.first_us, self.last_id, self.last_us):
            raise DamagedColumns("its columns hold other records than its header names")
        if any(
            not all(column) and None in column for column in (self.keys, self.actions, self.objects)
        ):
            raise DamagedColumns("one of its records is gone")
        if not (
            0 <= min(ids) <= max(ids) <= MAX_NUMBER
            and -MAX_NUMBER <= min(times) <= max(times) <= MAX_NUMBER
        ):
            raise DamagedColumns("one of its numbers is too large")

    @cached_property
    def unfolded_size(self) -> int:
        """Returns the bytes of all records' lines, in columns that are not compressed."""
        return sum(len(text) * (1 if b"\n" in text else self.count) for text in self.texts)

    def _size(self, column: int) -> int:
        try:
            return size(self.codec, self.texts[column])
        except DamagedFrame as error:
            raise _damaged(column) from error

    def _text(self, column: int) -> bytes:
        try:
            text = decompress(self.codec, self.texts[column])
        except DamagedFrame as error:
            raise _damaged(column) from error
        if text.count(b"\n") + 1 not in {1, self.count}:  # before anything is made of each line
            raise _damaged(column)
        return text

    def _numbers(self, column: int) -> list[int]:
        text = self._text(column)
        if text.translate(None, b"-0123456789\n"):
            raise _damaged(column)  # what Python takes as well: 1_0, +1
        try:
            numbers = _parse_lines(text.decode())
        except ValueError:  # 007 is a number, and no JSON
            try:
                numbers = [*map(int, text.split(b"\n"))]
            except ValueError as error:
                raise _damaged(column) from error
        return self._whole(column, numbers)

    def _strings(self, column: int) -> list[str]:
        text = self._text(column)
        try:
            strings = _parse_strings(text.decode())
            if not {*map(type, strings)} <= _STRING_OR_NULL:
                raise _damaged(column)
            # No text of Postgres has a NUL, or half of a surrogate pair, which cannot be encoded.
            if b"\\u" in text and b"\0" in "".join(filter(None, strings)).encode():
                raise _damaged(column)
        except ValueError as error:  # neither JSON nor UTF-8
            raise _damaged(column) from error
        return self._whole(column, strings)

    def _lines(self, column: int) -> list[str]:
        try:
            return self._whole(column, self._text(column).decode().split("\n"))
        except UnicodeDecodeError as error:
            raise _damaged(column) from error

    def _whole(self, column: int, values: list[_Value]) -> list[_Value]:
        if len(values) == self.count:
            return values
        if len(values) == 1:
            return values * self.count
        raise _damaged(column)


def _parse_strings(text: str) -> list[Any]:
    """Returns the value of each line; in a short column it need not be a string."""
    if len(text) <= _MAX_TOGETHER:
        return _parse_lines(text)
    if any(line[:1] != '"' and line != "null" for line in text.split("\n")):
        raise ValueError("no string")
    return [*map(decode_json, text.split("\n"))]


def _parse_lines(text: str) -> list[Any]:
    """Returns the value of each line, in one call."""
    values: list[Any] = decode_json(f"[{text}]".replace("\n", ","))
    return values


def _damaged(column: int) -> DamagedColumns:
    return DamagedColumns(f"its column {COLUMNS[column]} cannot be read")


_encode = json.JSONEncoder(ensure_ascii=False, separators=("\n", ":")).encode


def _write(values: Sequence[int | str | None]) -> str:
    """Returns one line of JSON for each value; JSON escapes line breaks."""
    return _encode(values)[1:-1]


def _join(texts: Sequence[str]) -> str:
    """Returns one line for each JSON text.

    Line breaks, which are white space there, become spaces.
    """
    lines = "\n".join(texts)
    if lines.count("\n") < len(texts):
        return lines
    return "\n".join(text.replace("\n", " ") for text in texts)


def _fold(lines: bytes, count: int) -> bytes:
    """Returns the first line if all are equal; otherwise all of them."""
    line = lines[: lines.find(b"\n")] if count > 1 else lines
    may_be_equal = len(lines) == (len(line) + 1) * count - 1
    return line if may_be_equal and lines == b"\n".join([line] * count) else lines
