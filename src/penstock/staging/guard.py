"""The guard: refuses a statement that bypasses the rules of a class, before it is sent.

The hooks see objects.  They do not see ``session.execute(update(Ride))``, ``bulk_insert_mappings``,
or statements on the session's own connection.  The guard checks each statement on the connection of
an attached session after it is compiled and before it is sent.  The unit of work's own statements
pass.  Any other INSERT, UPDATE or DELETE on a table of a class with rules is refused, wherever it
comes from.  Statements given as text are searched for such writes.

Not covered: writes by a function or trigger of the database, by the driver's own cursor, or on a
connection that no attached session uses.  Capture by trigger (``triggers.py``) sees all of them.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Connection, Delete, Engine, Insert, Update, event
from sqlalchemy.engine.default import DefaultExecutionContext
from sqlalchemy.orm import Session, class_mapper
from sqlalchemy.orm.exc import StaleDataError
from sqlalchemy.sql.selectable import TextualSelect

from penstock.declaring.declarations import Change, StagingRule
from penstock.errors import BypassedStaging
from penstock.staging.rules import find_attachments
from penstock.staging.triggers import Schemas

OPTION = "penstock"
STAGED = "staged"
"""``execution_options(penstock="staged")``.

The application has staged the statement's changes itself.
"""


@dataclass
class _Watched:
    """A connection of attached sessions; each has a test whether its unit of work is writing.

    Statements that have ``passed`` in this transaction pass again unchecked: a handler sends one
    for each record.
    """

    sessions: WeakKeyDictionary[Session, Callable[[Session], bool]] = field(
        default_factory=WeakKeyDictionary
    )
    passed: set[str] = field(default_factory=set)


_watched: WeakKeyDictionary[Connection, _Watched] = WeakKeyDictionary()
_engines: WeakSet[Engine] = WeakSet()
_lock = Lock()

MAX_CACHED_CHARACTERS = 2000
"""Longest statement, in characters, whose check is cached.

Longer ones contain values and do not come again.
"""

MAX_PASSED_STATEMENTS = 256
"""Most statements remembered as passed in one transaction."""

_NAME = r'(?:"(?:[^"]|"")+"|\w+)'
_WRITES = re.compile(
    r"\b(?P<verb>insert\s+into|update(?:\s+only)?|delete\s+from(?:\s+only)?|merge\s+into(?:\s+only)?"
    r"|truncate(?:\s+table)?(?:\s+only)?|copy)"
    rf"\s+(?:(?P<schema>{_NAME})\s*\.\s*)?(?P<table>{_NAME})",
    re.IGNORECASE,
)
_CHANGES: dict[str, tuple[Change, ...]] = {
    "insert": ("insert", "update"),  # it may have ON CONFLICT DO UPDATE
    "update": ("update",),
    "delete": ("delete",),
    "merge": ("insert", "update", "delete"),
    "truncate": ("delete",),
    "copy": ("insert",),
}

_Context = DefaultExecutionContext | None

_CONNECTIONS = "penstock.connections"
"""Key in ``Session.info``: the connections of the session's transaction."""


class _Write(NamedTuple):
    """A write in a statement: its name for the error, ``UPDATE (text)``, and its kinds of change.

    The schema is None if the statement does not name one.
    """

    verb: str
    changes: tuple[Change, ...]
    schema: str | None
    table: str


def watch(session: Session, connection: Connection, is_writing: Callable[[Session], bool]) -> None:
    """Checks the connection's statements until ``unwatch``, if rules apply to the session."""
    watched = _watched.setdefault(connection, _Watched())
    watched.sessions[session] = is_writing
    watched.passed.clear()
    session.info.setdefault(_CONNECTIONS, []).append(connection)
    if any(_find_rules(session)):
        listen(session)


def listen(session: Session) -> None:
    """Registers the guard on the engines of the session's transaction, once for each engine.

    Sessions to which no rules apply skip this: SQLAlchemy's statement events alone cost about 4 µs
    a statement.
    """
    for connection in session.info.get(_CONNECTIONS, ()):
        engine = connection.engine
        if engine not in _engines:
            with _lock:
                if engine not in _engines:
                    event.listen(engine, "before_cursor_execute", _check_statement)
                    event.listen(engine, "after_cursor_execute", _check_deleted_rows)
                    _engines.add(engine)


def unwatch(session: Session) -> None:
    """Ends the checks for a session whose transaction is over."""
    for connection in session.info.pop(_CONNECTIONS, ()):
        watched = _watched.get(connection)
        if watched is not None:
            watched.sessions.pop(session, None)
            if not watched.sessions:
                _watched.pop(connection, None)


def _check_statement(
    connection: Connection,
    _cursor: object,
    statement: str,
    _parameters: object,
    context: _Context,
    _many: object,
) -> None:
    """Handles ``before_cursor_execute``: nothing has been sent yet."""
    watched = _watched.get(connection)
    if watched is None or context is None or statement in watched.passed:
        return
    writes = list(_find_writes(context, statement))
    if not writes or context.execution_options.get(OPTION) == STAGED:
        return
    # Only the unit of work compiles its statements into the cache of a mapper.
    is_units = "compiled_cache" in context.execution_options
    schemas = context.execution_options.get("schema_translate_map") or {}
    for session, is_writing in list(watched.sessions.items()):
        if not (is_units and is_writing(session)):
            _refuse_bypass(session, writes, schemas)
    is_short = len(statement) <= MAX_CACHED_CHARACTERS
    if is_short and not is_units and len(watched.passed) < MAX_PASSED_STATEMENTS:
        watched.passed.add(statement)


def _check_deleted_rows(
    connection: Connection,
    cursor: Any,
    _statement: str,
    parameters: Any,
    context: _Context,
    many: object,
) -> None:
    """Handles ``after_cursor_execute``.

    Refuses a DELETE by the unit of work that found fewer rows than objects.

    Another transaction has deleted the missing rows and staged that; a second record would be
    wrong.  SQLAlchemy itself raises for an UPDATE that misses rows, and only warns for a DELETE.
    """
    if context is None or not context.isdelete or (watched := _watched.get(connection)) is None:
        return
    expected = len(parameters) if many else 1
    if not 0 <= cursor.rowcount < expected or "compiled_cache" not in context.execution_options:
        return
    for session, is_writing in list(watched.sessions.items()):
        if is_writing(session) and _stages_deletes(session, context):
            raise StaleDataError(
                f"DELETE on table {_get_table(context).name} expected {expected} row(s) and found "
                f"{cursor.rowcount}: another transaction has deleted the missing ones and staged "
                "their records"
            )


def _stages_deletes(session: Session, context: DefaultExecutionContext) -> bool:
    """Returns whether deletes are staged and the mapper expects to find every row."""
    table = _get_table(context)
    return any(
        table in mapper.tables and mapper.confirm_deleted_rows
        for rule in _find_rules(session)
        if "delete" in rule.on
        for mapper in class_mapper(rule.model).self_and_descendants
    )


def _get_table(context: DefaultExecutionContext) -> Any:
    statement: Any = context.invoked_statement
    return statement.table


def _find_writes(context: DefaultExecutionContext, statement: str) -> Iterator[_Write]:
    """Finds the statement's writes, also those inside a CTE."""
    compiled: Any = context.compiled
    if compiled is None or context.isddl:
        if compiled is None:
            yield from _parse(statement)
        return
    if context.isinsert or context.isupdate or context.isdelete:
        yield from _parse_expression(context.invoked_statement)
    for cte in compiled.ctes or ():
        yield from _parse_expression(cte.element)
    if compiled.isplaintext or isinstance(context.invoked_statement, TextualSelect):
        yield from _parse(statement)


def _parse_expression(statement: Any) -> Iterator[_Write]:
    if not isinstance(statement, Insert | Update | Delete):
        return
    verb: str = statement.__visit_name__
    is_plain = isinstance(statement, Insert) and statement._post_values_clause is None  # noqa: SLF001  ON CONFLICT has no public name
    table: Any = statement.table
    while hasattr(table, "element"):  # an alias
        table = table.element
    yield _Write(
        verb.upper(), ("insert",) if is_plain else _CHANGES[verb], table.schema, table.name
    )


def _parse(statement: str) -> Iterable[_Write]:
    return (_search_cached if len(statement) <= MAX_CACHED_CHARACTERS else _search)(statement)


def _search(statement: str) -> list[_Write]:
    writes = []
    for match in _WRITES.finditer(statement):
        verb = match["verb"].split()[0].upper()
        if verb == "COPY" and not re.search(r"\bfrom\b", statement[match.end() :], re.IGNORECASE):
            continue  # COPY … TO reads
        schema = match["schema"]
        names = _unquote(schema) if schema else None, _unquote(match["table"])
        writes.append(_Write(f"{verb} (text)", _CHANGES[verb.lower()], *names))
    return writes


_search_cached = lru_cache(256)(_search)


def _unquote(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name.lower()


def _refuse_bypass(session: Session, writes: Iterable[_Write], schemas: Schemas) -> None:
    """Raises ``BypassedStaging`` for a write that bypasses a rule of the session's pipelines."""
    for rule in _find_rules(session):
        tables = _find_tables(rule)
        tables |= {(schemas.get(schema, schema), name) for schema, name in tables}
        for write in writes:
            if not rule.on.isdisjoint(write.changes) and _is_among(write, tables):
                cls = rule.model.__name__
                raise BypassedStaging(
                    f"{write.verb} on table {write.table} changes {cls} without staging it for "
                    f"channel {rule.channel.name}; nothing was sent to Postgres.\n"
                    f"Change objects of {cls} in the session instead; or stage() the changes "
                    f'yourself and give the statement execution_options({OPTION}="{STAGED}"); or '
                    'declare the rule with capture="trigger", which sees every writer'
                )


def _is_among(write: _Write, tables: Iterable[tuple[str | None, str]]) -> bool:
    """Returns whether a write may be to one of the tables.

    A schema that either side leaves open matches any.
    """
    return any(
        name == write.table and (write.schema is None or schema in (write.schema, None))
        for schema, name in tables
    )


def _find_rules(session: Session) -> Iterator[StagingRule]:
    """Returns the rules that the session's hooks follow."""
    for attachment in find_attachments(session):
        yield from attachment.orm_rules


def _find_tables(rule: StagingRule) -> set[tuple[str | None, str]]:
    """Returns the tables of the rule's class and its subclasses as of now.

    Subclasses may be defined late.
    """
    return {
        (getattr(table, "schema", None), getattr(table, "name", ""))
        for mapper in class_mapper(rule.model).self_and_descendants
        for table in mapper.tables
    }
