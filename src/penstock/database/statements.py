"""SQL lives in ``.sql`` files beside the step that uses it, as named blocks.

    -- :name oldest_open_transaction
    -- Why this statement is as it is.
    SELECT …

``{schema}`` is filled in with the quoted name of the Penstock schema; values are bound, never written in.
"""

import re
from functools import cache
from importlib.resources import files

DEFAULT_SCHEMA = "penstock"
"""Name of the schema that holds Penstock's tables, unless the pipeline names another."""

_HEADING = re.compile(r"^-- :name (?P<name>\w+)\n", re.MULTILINE)


@cache
def statements(package: str, schema: str = DEFAULT_SCHEMA) -> dict[str, bytes]:
    """The named statements of ``package``, ready for a psycopg cursor.

    Args:
        package: Dotted name of the package that holds ``statements.sql``.
        schema: Name of the Penstock schema; it has passed the rule for names.
    """
    text = (files(package) / "statements.sql").read_text(encoding="utf-8")
    quoted = '"' + schema.replace('"', '""') + '"'
    parts = _HEADING.split(text)[1:]
    return {
        name: body.strip().rstrip(";").replace("{schema}", quoted).encode()
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }
