"""Names and text inside of SQL.  Needs no driver: an application that only stages has none of ours."""


def quote(*path: str | None) -> str:
    """An identifier in double quotes, after that of its schema, if there is one: ``"shop"."orders"``."""
    *schema, name = path
    return ".".join(_in_quotes(part) for part in (*filter(None, schema), name or ""))


def _in_quotes(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def quote_literal(value: str) -> str:
    """A string literal that also works with ``standard_conforming_strings`` off."""
    quoted = value.replace("'", "''")
    return f" E'{quoted.replace(chr(92), chr(92) * 2)}'" if "\\" in quoted else f"'{quoted}'"
