"""Batches of consecutive records, in columns: as Postgres writes them, a log keeps them, and a consumer reads them."""

from penstock.batches.columns import CODECS, COLUMNS, MAX_BYTES, Codec, Columns, DamagedColumns, compress
from penstock.batches.entry import FIELDS, MAX_RECORDS, Entry
from penstock.batches.record_batch import Records, as_records, join_records

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
    "as_records",
    "compress",
    "join_records",
]
