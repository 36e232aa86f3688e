"""Checks a staging rule: refuses mistakes, and warns once of changes that its hooks do not see.

    an unattached session      flushes an object of a class with a rule: nothing is staged
    a foreign key              lets Postgres itself delete or update rows of the class
    an association table       holds a many-to-many relationship of the class, outside its own table

The last two are seen when a rule is declared, or as soon as all classes are mapped.  They are
warnings, because an application may not need the records.  ``warnings.filterwarnings`` silences
them, or makes them errors in tests.

Nothing here configures the mappers: classes that they refer to may still be undefined.
"""

import sys
import warnings
from collections.abc import Iterator
from inspect import getattr_static
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Column, ForeignKey, event
from sqlalchemy.orm import Mapper, Session, class_mapper
from sqlalchemy.orm.exc import UnmappedClassError

from penstock.declaring.declarations import StagingRule
from penstock.declaring.kinds import refuse_sources
from penstock.errors import DeclarationError, InvalidRecord, UnstagedChanges
from penstock.staging.messages import refuse_reserved
from penstock.staging.payload import headers_text
from penstock.staging.rules import Declarations, find_attachments, get_names, is_secret, object_name
from penstock.staging.triggers import check_columns, make_error, make_name

_LIBRARIES = ("penstock.", "sqlalchemy.")

_pipelines: WeakSet[Declarations] = WeakSet()
"""Pipelines with rules for the hooks."""

_warned: WeakKeyDictionary[type[Session], WeakSet[type[Any]]] = WeakKeyDictionary()
"""Mapped classes for which sessions of a class have been given the warning."""

_unconfigured: list[tuple[StagingRule, Declarations]] = []
"""Rules whose classes refer to some that are not mapped yet."""


def watch_rule(rule: StagingRule, pipeline: Declarations) -> None:
    """Warns of changes that a new rule does not see."""
    if rule.capture == "orm":
        _pipelines.add(pipeline)
        for foreign_key, clause in _find_cascades(rule):
            _warn(
                f"{rule.model.__name__}.{foreign_key.parent.key} is declared with {clause}: "
                f"Postgres then changes rows of {rule.model.__name__} by itself, and nothing is "
                'staged for them. Let the session do it (relationship(cascade="all, '
                'delete-orphan") without passive_deletes), or declare the rule with '
                'capture="trigger"'
            )
    _unconfigured.append((rule, pipeline))
    _check_configured()


def warn_if_unattached(session: Session, mapper: Mapper[Any]) -> None:
    """Warns if a session writes an object of a class with rules, without their pipelines."""
    if mapper.class_ in _warned.get(type(session), ()):
        return
    attached = [attachment.pipeline for attachment in find_attachments(session)]
    for pipeline in list(_pipelines):
        has_rule = any(
            rule.capture == "orm" and issubclass(mapper.class_, rule.model)
            for rule in pipeline.rules
        )
        if has_rule and not any(pipeline is other for other in attached):
            _warn(
                f"a session writes {mapper.class_.__name__}, for which a staging rule is "
                "declared, and the pipeline is not attached to the session: nothing is staged. "
                "Attach it where sessions are created: pipeline.attach(…) takes a sessionmaker, "
                "the Session class or one session"
            )
            _warned.setdefault(type(session), WeakSet()).add(mapper.class_)
            return


def _find_cascades(rule: StagingRule) -> Iterator[tuple[ForeignKey, str]]:
    """Finds foreign keys by which Postgres changes rows of the class.

    Not those that join tables of one class.
    """
    mapper: Mapper[Any] = class_mapper(rule.model, configure=False)
    table_names = {getattr(table, "fullname", None) for table in mapper.tables}
    for table in mapper.tables:
        for foreign_key in getattr(table, "foreign_keys", ()):
            column: Column[Any] = foreign_key.parent
            target = foreign_key.target_fullname.rpartition(".")[0]
            if column.primary_key and target in table_names:
                continue
            for action, statement in (
                (foreign_key.ondelete, "DELETE"),
                (foreign_key.onupdate, "UPDATE"),
            ):
                effect = (action or "").upper()
                change = "delete" if (effect, statement) == ("CASCADE", "DELETE") else "update"
                if effect in {"CASCADE", "SET NULL", "SET DEFAULT"} and change in rule.on:
                    yield foreign_key, f"ON {statement} {effect}"


@event.listens_for(Mapper, "after_configured")
def _check_configured() -> None:
    """Checks the rules whose classes are completely mapped by now."""
    for pair in list(_unconfigured):
        try:
            is_configured = class_mapper(pair[0].model, configure=False).configured
        except UnmappedClassError:  # unmapped since, as by clear_mappers()
            _unconfigured.remove(pair)
        else:
            if is_configured:
                _unconfigured.remove(pair)
                _warn_of_associations(*pair)


def _warn_of_associations(rule: StagingRule, pipeline: Declarations) -> None:
    staged = {class_mapper(other.model, configure=False).local_table for other in pipeline.rules}
    for relationship in class_mapper(rule.model).relationships:
        table: Any = relationship.secondary
        if table is not None and not relationship.viewonly and table not in staged:
            _warn(
                f"{rule.model.__name__}.{relationship.key} is kept in table {table}: adding to it "
                f"or removing from it changes no row of {rule.model.__name__}, and nothing is "
                f"staged. Map {table} to a class and declare a rule for that, or stage() these "
                "changes"
            )


def _warn(message: str) -> None:
    """Warns, naming the application's line."""
    frame, level = sys._getframe(), 1  # noqa: SLF001  documented, and CPython is required
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UnstagedChanges, stacklevel=level)


def check_rule(rule: StagingRule, pipeline: Declarations) -> None:
    """Finds the mistakes in a rule that show when it is declared, before any object changes."""
    subject = f"staging rule of {rule.model.__name__}"
    refuse_sources(
        rule.channel, subject, "only an application with a source stages into it: Log(…, source=…)"
    )
    # inspect() would configure the mappers now, while classes they refer to may still be undefined.
    if not hasattr(rule.model, "__mapper__"):
        raise DeclarationError(
            f"{subject}: the class is not mapped; map it before declaring the rule"
        )
    names = () if rule.data is None or callable(rule.data) else tuple(rule.data)
    for name in (*names, *get_names(rule.key), *get_names(rule.tenant)):
        if (
            getattr_static(rule.model, name, None) is None
        ):  # a hybrid may have no value on the class
            raise DeclarationError(f"{subject}: {rule.model.__name__} has no attribute {name!r}")
    _check_key(rule, subject)
    _check_headers(rule, subject)
    if rule.capture == "trigger":
        _check_trigger(rule, pipeline)


def _check_key(rule: StagingRule, subject: str) -> None:
    """Refuses a secret as key or tenant: commands and the console show both."""
    columns = class_mapper(rule.model, configure=False).columns
    for name in (*get_names(rule.key), *get_names(rule.tenant)):
        if is_secret(columns.get(name)):
            part = "key" if name in get_names(rule.key) else "tenant"
            raise DeclarationError(
                f"{subject}: its {part} {name} is marked secret, and commands and the console show "
                f"{part}s; choose another column"
            )


def _check_headers(rule: StagingRule, subject: str) -> None:
    if rule.headers is not None and not callable(rule.headers):
        try:
            headers_text(rule.headers)
            if rule.channel.traits.has_jobs:
                refuse_reserved(rule.headers)
        except InvalidRecord as error:
            raise DeclarationError(f"{subject}: {error}") from error


def _check_trigger(rule: StagingRule, pipeline: Declarations) -> None:
    """Refuses a rule that no trigger can capture, or whose trigger would replace another's."""
    check_columns(rule)
    name = make_name(rule)
    for other in pipeline.rules:
        if other.capture == "trigger" and make_name(other) == name:
            raise make_error(
                rule,
                f"another rule stages {object_name(rule)} to channel {rule.channel.name} by "
                "trigger already; declare one rule for both, or give this one an object=… of its "
                "own",
            )
