"""Compression of columns: a choice of the channel, named in every entry.

Measured on payloads of 170 bytes, 500 a batch: zstd takes 0.26 µs a record and leaves 23 %, and reads it back in 0.09 µs;
zlib takes 1.0 µs, leaves 28 %, and reads it back in 0.32 µs.
"""

from collections.abc import Callable
from functools import cache
from typing import Literal

from penstock.errors import CodecMissing

Codec = Literal["none", "zstd"]
"""How the columns of an entry are compressed."""

CODECS: tuple[Codec, ...] = ("none", "zstd")

MAX_BYTES = 64 * 1024 * 1024
"""Largest column that is compressed, in bytes.

A frame of a few kilobytes could otherwise say that it holds as much as a process has memory.
"""


class DamagedFrame(ValueError):
    """What is to be decompressed was not compressed, or not as a whole."""


def compress(codec: Codec, text: bytes) -> bytes:
    """The text as a channel stores it.

    Raises:
        CodecMissing: The library is not installed.
    """
    return text if codec == "none" else _zstd()[0](text)


def is_installed(codec: Codec) -> bool:
    """Whether this process can read and write what is compressed with it."""
    try:
        compress(codec, b"")
    except CodecMissing:
        return False
    return True


def size(codec: Codec, stored: bytes) -> int:
    """Size of the text, in bytes.

    Raises:
        CodecMissing: The library is not installed.
        DamagedFrame: It is damaged, or says more than ``MAX_BYTES``, or nothing.
    """
    return len(stored) if codec == "none" else _zstd()[1](stored)


def decompress(codec: Codec, stored: bytes) -> bytes:
    """The text again.

    Raises:
        CodecMissing: The library is not installed.
        DamagedFrame: As ``size``.
    """
    return stored if codec == "none" else _zstd()[2](stored)


@cache
def _zstd() -> tuple[Callable[[bytes], bytes], Callable[[bytes], int], Callable[[bytes], bytes]]:
    try:
        import zstandard  # noqa: PLC0415  only where a channel compresses
    except ImportError as error:
        raise CodecMissing(
            "a channel with compression='zstd' needs the library zstandard. Install it: pip install 'penstock[zstd]'"
        ) from error

    def compressed(text: bytes) -> bytes:
        return zstandard.ZstdCompressor(level=1, write_checksum=True).compress(text)

    def get_size(stored: bytes) -> int:
        try:
            found: int = zstandard.frame_content_size(stored)
        except zstandard.ZstdError as error:
            raise DamagedFrame from error
        if not 0 <= found <= MAX_BYTES:
            raise DamagedFrame
        return found

    def decompressed(stored: bytes) -> bytes:
        get_size(stored)
        try:
            return zstandard.ZstdDecompressor().decompress(stored)
        except zstandard.ZstdError as error:
            raise DamagedFrame from error

    return compressed, get_size, decompressed
