"""The guard: a statement that changes a ruled class without telling is refused before it reaches the server.

The hooks see objects.  They do not see ``session.execute(update(Ride))``, ``bulk_insert_mappings``, nor what goes over
the session's own connection.  The guard looks at every statement on the connection of an attached session, once it is
compiled and before it is sent.  What the unit of work writes itself passes; INSERT, UPDATE and DELETE on a table of a
ruled class do not, wherever they come from; statements in text are searched for the obvious.

What it cannot see: a function or a trigger of the database that writes, the driver's own cursor, a connection that no
attached session uses.  Triggers of ours (``triggers.py``) see them all.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Connection, Delete, Engine, Insert, Update, event
from sqlalchemy.engine.default import DefaultExecutionContext
from sqlalchemy.orm import Session, class_mapper
from sqlalchemy.orm.exc import StaleDataError
from sqlalchemy.sql.selectable import TextualSelect

from penstock.declarations import Change, StagingRule
from penstock.errors import BypassedStaging
from penstock.staging.rules import attachments

OPTION = "penstock"
STAGED = "staged"
"""``execution_options(penstock="staged")``: the application has itself staged what the statement changes."""


@dataclass
class _Watched:
    """A connection with attached sessions.

    Attributes:
        sessions: Those whose transaction it carries, and what tells whether their unit of work writes.
        passed: Statements that were looked at in this transaction, and pass again: a handler sends one for each record.
    """

    sessions: WeakKeyDictionary[Session, Callable[[Session], bool]] = field(
        default_factory=WeakKeyDictionary
    )
    passed: set[str] = field(default_factory=set)


_watched: WeakKeyDictionary[Connection, _Watched] = WeakKeyDictionary()
_engines: WeakSet[Engine] = WeakSet()
_lock = Lock()

LONGEST_REMEMBERED = 2000
"""Characters of a text that is not searched again when it comes again: longer ones carry values, and do not."""

MOST_REMEMBERED = 256
"""Statements that are remembered of a transaction."""

_NAME = r'(?:"(?:[^"]|"")+"|\w+)'
_WRITES = re.compile(
    r"\b(?P<verb>insert\s+into|update(?:\s+only)?|delete\s+from(?:\s+only)?|merge\s+into(?:\s+only)?"
    r"|truncate(?:\s+table)?(?:\s+only)?|copy)"
    rf"\s+(?:(?P<schema>{_NAME})\s*\.\s*)?(?P<table>{_NAME})",
    re.IGNORECASE,
)
_CHANGES: dict[str, tuple[Change, ...]] = {
    "insert": ("insert", "update"),  # it may say ON CONFLICT DO UPDATE
    "update": ("update",),
    "delete": ("delete",),
    "merge": ("insert", "update", "delete"),
    "truncate": ("delete",),
    "copy": ("insert",),
}

_WATCHED = "penstock.watched"
"""Where ``Session.info`` keeps the connections of its transaction."""

Write = tuple[str, tuple[Change, ...], str | None, str]
"""A statement's verb, the changes it makes, and the schema (None: not said) and name of its table."""


def watch(session: Session, connection: Connection, is_writing: Callable[[Session], bool]) -> None:
    """Looks at the connection's statements until ``leave``.

    Args:
        session: An attached session, whose transaction the connection now carries.
        connection: The connection.
        is_writing: Whether the session's unit of work writes right now, with the hooks looking on.
    """
    watched = _watched.setdefault(connection, _Watched())
    watched.sessions[session] = is_writing
    watched.passed.clear()
    session.info.setdefault(_WATCHED, []).append(connection)
    engine = connection.engine
    if engine not in _engines:
        with _lock:
            if engine not in _engines:
                event.listen(engine, "before_cursor_execute", _look)
                event.listen(engine, "after_cursor_execute", _look_back)
                _engines.add(engine)


def leave(session: Session) -> None:
    """The session's transaction is over: what happens on its connections is no longer its business."""
    for connection in session.info.pop(_WATCHED, ()):
        watched = _watched.get(connection)
        if watched is not None:
            watched.sessions.pop(session, None)
            watched.passed.clear()
            if not watched.sessions:
                _watched.pop(connection, None)


def _look(
    connection: Connection,
    _cursor: object,
    statement: str,
    _parameters: object,
    context: DefaultExecutionContext | None,
    _executemany: bool,  # noqa: FBT001  the same
) -> None:
    """``before_cursor_execute``: nothing has been sent yet.  A SELECT leaves at the first question."""
    watched = _watched.get(connection)
    if watched is None or context is None or statement in watched.passed:
        return
    writes = list(_writes(context, statement))
    if not writes or context.execution_options.get(OPTION) == STAGED:
        return
    # The unit of work's statements are compiled into the cache of their mapper; nobody else uses that.
    is_units = "compiled_cache" in context.execution_options
    for session, is_writing in list(watched.sessions.items()):
        if not (is_units and is_writing(session)):
            _refuse_bypass(session, writes)
    is_short = len(statement) <= LONGEST_REMEMBERED
    if is_short and not is_units and len(watched.passed) < MOST_REMEMBERED:
        watched.passed.add(statement)


def _look_back(
    connection: Connection,
    cursor: Any,
    _statement: str,
    parameters: Any,
    context: DefaultExecutionContext | None,
    executemany: bool,  # noqa: FBT001  SQLAlchemy's event has it
) -> None:
    """``after_cursor_execute``: a DELETE by the unit of work that found no row tells of nothing.

    SQLAlchemy raises for an UPDATE and only warns for a DELETE; the record would tell of it a second time.
    """
    if context is None or not context.isdelete or (watched := _watched.get(connection)) is None:
        return
    expected = len(parameters) if executemany else 1
    if not 0 <= cursor.rowcount < expected or "compiled_cache" not in context.execution_options:
        return
    for session, is_writing in list(watched.sessions.items()):
        if is_writing(session) and _is_told(session, context):
            raise StaleDataError(
                f"DELETE on table {_table(context).name} expected {expected} row(s) and found {cursor.rowcount}: "
                "another transaction has deleted them, and has told of it"
            )


def _is_told(session: Session, context: DefaultExecutionContext) -> bool:
    """Whether deletes from the statement's table are staged, and not all of them left to the database's cascades."""
    table = _table(context)
    return any(
        table in mapper.tables and mapper.confirm_deleted_rows
        for rule in _rules(session)
        if "delete" in rule.on
        for mapper in class_mapper(rule.type).self_and_descendants
    )


def _table(context: DefaultExecutionContext) -> Any:
    statement: Any = context.invoked_statement
    return statement.table


def _writes(context: DefaultExecutionContext, statement: str) -> Iterator[Write]:
    """What the statement writes to, also inside of a CTE."""
    compiled: Any = context.compiled
    if compiled is None or context.isddl:
        if compiled is None:
            yield from _writes_of_text(statement)
        return
    if context.isinsert or context.isupdate or context.isdelete:
        yield from _writes_of(context.invoked_statement)
    for cte in compiled.ctes or ():
        yield from _writes_of(cte.element)
    if compiled.isplaintext or isinstance(context.invoked_statement, TextualSelect):
        yield from _writes_of_text(statement)


def _writes_of(statement: Any) -> Iterator[Write]:
    changes: tuple[Change, ...]
    if isinstance(statement, Insert):
        is_upsert = statement._post_values_clause is not None  # noqa: SLF001  ON CONFLICT has no public name
        verb, changes = "INSERT", ("insert", "update") if is_upsert else ("insert",)
    elif isinstance(statement, Update):
        verb, changes = "UPDATE", ("update",)
    elif isinstance(statement, Delete):
        verb, changes = "DELETE", ("delete",)
    else:
        return
    table: Any = statement.table
    while hasattr(table, "element"):  # an alias
        table = table.element
    yield verb, changes, table.schema, table.name


def _writes_of_text(statement: str) -> Iterable[Write]:
    short = len(statement) <= LONGEST_REMEMBERED
    return _writes_remembered(statement) if short else _writes_in(statement)


@lru_cache(256)
def _writes_remembered(statement: str) -> tuple[Write, ...]:
    return tuple(_writes_in(statement))


def _writes_in(statement: str) -> Iterator[Write]:
    for found in _WRITES.finditer(statement):
        verb = found["verb"].split()[0].upper()
        if verb == "COPY" and not re.search(r"\bfrom\b", statement[found.end() :], re.IGNORECASE):
            continue  # COPY … TO reads
        schema = found["schema"]
        yield (
            f"{verb} (text)",
            _CHANGES[verb.lower()],
            _plain(schema) if schema else None,
            _plain(found["table"]),
        )


def _plain(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name.lower()


def _refuse_bypass(session: Session, writes: Iterable[Write]) -> None:
    """Raises for a write that a rule of the session's pipelines should have told of."""
    for rule in _rules(session):
        tables = _tables(rule)
        for verb, changes, schema, name in writes:
            for table in tables:
                if (
                    table[1] == name
                    and (schema is None or table[0] in (schema, None))
                    and not rule.on.isdisjoint(changes)
                ):
                    cls = rule.type.__name__
                    raise BypassedStaging(
                        f"{verb} on table {name} changes {cls} without staging it for channel "
                        f"{rule.channel.name}; nothing was sent to Postgres.\n"
                        f"Change objects of {cls} in the session instead; or stage() what changes yourself and give "
                        f'the statement execution_options({OPTION}="{STAGED}"); or declare the rule with '
                        'capture="trigger", which sees every writer'
                    )


def _rules(session: Session) -> Iterator[StagingRule]:
    """What the unit of work tells of."""
    for attachment in attachments(session):
        for rule in attachment.pipeline.rules:
            if rule.capture == "orm":
                yield rule


def _tables(rule: StagingRule) -> set[tuple[str | None, str]]:
    """The tables that hold objects of the rule's class and its subclasses: looked up now, since subclasses come late."""
    return {
        (getattr(table, "schema", None), getattr(table, "name", ""))
        for mapper in class_mapper(rule.type).self_and_descendants
        for table in mapper.tables
    }
