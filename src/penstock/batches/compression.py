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

_LARGEST = 1 << 30
"""Bytes of the largest column: what a text of Postgres holds."""


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


def decompress(codec: Codec, stored: bytes) -> bytes:
    """The text again.

    Raises:
        CodecMissing: The library is not installed.
        DamagedFrame: It is damaged.
    """
    return stored if codec == "none" else _zstd()[1](stored)


@cache
def _zstd() -> tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]:
    try:
        import zstandard  # noqa: PLC0415  only where a channel compresses
    except ImportError as error:
        raise CodecMissing(
            "a channel with compression='zstd' needs the library zstandard. Install it: pip install 'penstock[zstd]'"
        ) from error

    def compressed(text: bytes) -> bytes:
        return zstandard.ZstdCompressor(level=1, write_checksum=True).compress(text)

    def decompressed(stored: bytes) -> bytes:
        try:
            if zstandard.frame_content_size(stored) > _LARGEST:
                raise DamagedFrame
            return zstandard.ZstdDecompressor().decompress(stored, max_output_size=_LARGEST)
        except zstandard.ZstdError as error:
            raise DamagedFrame from error

    return compressed, decompressed
