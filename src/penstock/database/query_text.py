"""Queries of the application as text without parameters, read as a table: ``(SELECT …) AS q``.

COPY, a Spark task and a temporary table take text alone.  The driver writes the values of
SQLAlchemy's query into it, as it would bind them in the application's session: its literals have
every type, and no character of a value needs a meaning.
"""

import re
from typing import Any

import psycopg
from psycopg import sql
from sqlalchemy import BigInteger, SelectBase, TextClause
from sqlalchemy.dialects.postgresql.psycopg import PGCompiler_psycopg, PGDialect_psycopg
from sqlalchemy.exc import CompileError, InvalidRequestError
from sqlalchemy.types import TypeDecorator
from typing_extensions import override

from penstock.errors import InvalidSetting
from penstock.parsing import parse_json

Query = str | SelectBase | TextClause
"""A query of the application: text, ``select``, ``union_all``, ``text``."""

_TOKEN = re.compile(
    r"""
      (?P<blank>   \s+ | --[^\n]* )
    | (?P<comment> /\* )
    | (?P<end>     ; )
    | [eE]'(?:[^'\\] | \\. | '')*'
    | '(?:[^'] | '')*'
    | "(?:[^"] | "")*"
    | \$(?P<tag> (?:[^\W\d]\w*)? )\$ .*? \$(?P=tag)\$
    | [\w$]+
    | .
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMENT_MARK = re.compile(r"/\*|\*/")


class _LiteralCompiler(PGCompiler_psycopg):
    """Writes bound values with the driver's literals.

    A cast gives the type, as in the driver's own statements.
    """

    @override
    def render_literal_value(self, value: Any, type_: Any) -> str:
        implemented = type_.dialect_impl(self.dialect)
        process = implemented.bind_processor(self.dialect)
        bound = process(value) if process else value
        literal = sql.Literal(bound).as_string(None)
        plain = implemented.impl_instance if isinstance(implemented, TypeDecorator) else implemented
        if isinstance(bound, float):  # otherwise it is a numeric
            return f"{literal}::float8"
        if isinstance(bound, int):
            # It has the type that holds it: a cast to the column's would fail for a greater one.
            return f"({literal})::bigint" if isinstance(plain, BigInteger) else literal
        if not plain.render_bind_cast:
            return literal
        return str(self.render_bind_cast(type_, plain, literal))  # type: ignore[no-untyped-call]  # untyped in SQLAlchemy


class _LiteralDialect(PGDialect_psycopg):
    """Uses named parameters, so that a percent sign has no meaning."""

    statement_compiler = _LiteralCompiler

    def __init__(self) -> None:
        super().__init__(paramstyle="named", use_native_hstore=False)  # type: ignore[no-untyped-call]  # as above


def query_text(query: Query) -> str:
    """Returns a query as text, without the semicolons and comments at its end.

    Raises:
        InvalidSetting: The query is empty, several statements, or has a value that cannot be
            written.
    """
    if isinstance(query, str):
        return _strip(query)
    try:
        query.compile(
            dialect=_LiteralDialect()
        ).construct_params()  # otherwise one without a value is NULL
        compiled = query.compile(dialect=_LiteralDialect(), compile_kwargs={"literal_binds": True})
    except (CompileError, InvalidRequestError, psycopg.ProgrammingError) as error:
        [reason, *_] = str(error).splitlines()
        raise InvalidSetting(
            f"a query cannot be written as text: {reason}. Give its values types, or give it as "
            "text"
        ) from error
    return _strip(str(compiled))


def subquery(query: str) -> str:
    """Returns a query of the application as the table ``q``.

    The query may end with a semicolon or a comment.
    """
    return f"({_strip(query)}\n) AS q"


def condition(text: str) -> str:
    """Returns A condition of the application in brackets; it may end as a query may."""
    return f"(\n{_strip(text, 'condition')}\n)"


def split_names(text: str, separator: str = ",") -> list[str]:
    """Splits names at a separator, or parses a JSON list of names, which may contain anything.

    Raises ``ValueError``.
    """
    if not text.lstrip().startswith("["):
        return [name.strip() for name in text.split(separator) if name.strip()]
    names = parse_json(text)
    if not all(isinstance(name, str) for name in names):
        raise ValueError(text)
    return [*names]


def _strip(text: str, noun: str = "query") -> str:
    place, end, is_ended = 0, 0, False
    while place < len(text):
        token = _TOKEN.match(text, place)
        assert token is not None
        place = token.end()
        if token["comment"]:
            place = _end_of_comment(text, place)
        elif token["end"]:
            is_ended = True
        elif not token["blank"]:
            if is_ended:
                raise InvalidSetting(
                    f"a {noun} is one statement; a semicolon stands before the end of this one"
                )
            end = place
    if not end:
        raise InvalidSetting(f"a {noun} is empty")
    return text[:end]


def _end_of_comment(text: str, place: int) -> int:
    """Returns the place after a comment that may hold others."""
    depth = 1
    for mark in _COMMENT_MARK.finditer(text, place):
        depth += 1 if mark[0] == "/*" else -1
        if not depth:
            return mark.end()
    return len(text)
