"""Loads SQL from the ``.sql`` files that lie beside the code that runs it, as named blocks.

    -- :name oldest_open_transaction
    -- The reason for anything unusual in the statement.
    SELECT …

A name is there once, in all files.  ``{schema}`` is replaced by the quoted name of the Penstock
schema.  Values are always bound.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from penstock.records import ShardName


def quote(*path: str | None) -> str:
    """Returns an identifier in double quotes, after its schema's, if any: ``"shop"."orders"``."""
    *schema, name = path
    escaped = (part.replace('"', '""') for part in (*filter(None, schema), name or ""))
    return ".".join(f'"{part}"' for part in escaped)


def quote_literal(value: str) -> str:
    """Returns a string literal that also works with ``standard_conforming_strings`` off.

    With a backslash in it, it is an escaped one.
    """
    quoted = value.replace("'", "''")
    return f" E'{quoted.replace(chr(92), chr(92) * 2)}'" if "\\" in quoted else f"'{quoted}'"


@cache
def directory(name: str) -> Traversable:
    """Returns the directory ``name``: that of a wheel, or of a checkout."""
    for path in (files("penstock") / f"_{name}", Path(__file__).parents[3] / name):
        if path.is_dir():
            return path
    raise FileNotFoundError(
        f"penstock was installed without its {name} directory; install it from a wheel or a whole "
        "checkout"
    )


_HEADING = re.compile(r"^-- :name (?P<name>\w+)\n", re.MULTILINE)


@cache
def statements(schema: str) -> dict[str, bytes]:
    """Returns all statements by their names, ready for a psycopg cursor.

    The schema's name was validated before.
    """
    texts = [file.read_text(encoding="utf-8") for file in _find_files(files("penstock"))]
    quoted = quote(schema)
    parts = [part for text in texts for part in _HEADING.split(text)[1:]]
    loaded: dict[str, bytes] = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        assert name not in loaded, f"two statements are named {name}"
        loaded[name] = body.strip().rstrip(";").replace("{schema}", quoted).encode()
    return loaded


def _find_files(folder: Traversable) -> Iterator[Traversable]:
    for entry in folder.iterdir():
        if entry.name.endswith(".sql"):
            yield entry
        elif "." not in entry.name and not entry.name.startswith("_") and entry.is_dir():
            yield from _find_files(entry)


def name_shards(shards: Iterable[ShardName]) -> dict[str, list[str] | list[int]]:
    """Returns the parameters ``channels`` and ``shards`` of a statement about several shards."""
    names = list(shards)
    return {
        "channels": [name.channel for name in names],
        "shards": [int(name.shard) for name in names],
    }


def int_array(numbers: Iterable[int]) -> str:
    """Returns an array of numbers as text, which psycopg binds in a fifth of the time of a list."""
    return f"{{{','.join(map(str, numbers))}}}"
