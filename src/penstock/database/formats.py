"""Settings under which a value has one text, whatever those of the role and the database are.

They hold until the transaction ends, so a pooler in transaction mode may stand between.
"""

from penstock.database.transactions import set_local_in_one

_SETTINGS = {
    "TimeZone": "UTC",
    "DateStyle": "ISO, YMD",
    "IntervalStyle": "iso_8601",
    "extra_float_digits": "1",  # the shortest text that reads back as the same number
    "bytea_output": "hex",
    "lc_monetary": "C",
    "array_nulls": "on",  # otherwise NULL in an array is read as a word
    "xmloption": "content",
}

FIX_FORMATS = set_local_in_one(_SETTINGS)
"""The statement that sets them, for the current transaction."""
