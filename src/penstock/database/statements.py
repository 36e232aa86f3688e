"""Loads SQL from ``statements.sql`` files, which lie beside the code that runs it, as named blocks.

    -- :name oldest_open_transaction
    -- The reason for anything unusual in the statement.
    SELECT …

``{schema}`` is replaced by the quoted name of the Penstock schema.  Values are always bound.
"""

import re
from functools import cache
from importlib.resources import files

from penstock.database.quoting import quote

_HEADING = re.compile(r"^-- :name (?P<name>\w+)\n", re.MULTILINE)


@cache
def statements(package: str, schema: str) -> dict[str, bytes]:
    """The named statements of ``package``, ready for a psycopg cursor.

    Args:
        package: Dotted name of the package that holds ``statements.sql``.
        schema: Name of the Penstock schema, already validated.
    """
    text = (files(package) / "statements.sql").read_text(encoding="utf-8")
    quoted = quote(schema)
    parts = _HEADING.split(text)[1:]
    return {
        name: body.strip().rstrip(";").replace("{schema}", quoted).encode()
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }
