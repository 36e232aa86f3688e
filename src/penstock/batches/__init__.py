"""Batches of consecutive records, in columns: as Postgres writes them, a log keeps them, and a consumer reads them."""

from penstock.batches.columns import COLUMNS, Columns, DamagedColumns
from penstock.batches.compression import CODECS, MAX_BYTES, Codec, compress
from penstock.batches.entries import FIELDS, MAX_RECORDS, Entry
from penstock.batches.records import Records

__all__ = [
    "CODECS",
    "COLUMNS",
    "FIELDS",
    "MAX_BYTES",
    "MAX_RECORDS",
    "Codec",
    "Columns",
    "DamagedColumns",
    "Entry",
    "Records",
    "compress",
]
