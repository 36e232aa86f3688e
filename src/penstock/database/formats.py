"""Settings under which a value has one text, whatever those of the role and the database are.

They hold until the transaction ends, so a pooler in transaction mode may stand between.
"""

_SETTINGS = {
    "TimeZone": "UTC",
    "DateStyle": "ISO, YMD",
    "IntervalStyle": "iso_8601",
    "extra_float_digits": "1",  # the shortest text that reads back as the same number
    "bytea_output": "hex",
    "lc_monetary": "C",
    "xmloption": "content",
}

FIX_FORMATS = "SELECT " + ", ".join(
    f"pg_catalog.set_config('{name}', '{value}', true)" for name, value in _SETTINGS.items()
)
"""The statement that sets them, for the current transaction."""
