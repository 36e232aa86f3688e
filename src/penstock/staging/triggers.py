"""Capture by trigger, for writers that the session's hooks do not see.

SQL, COPY, other languages, cascades.  A rule with ``capture="trigger"`` becomes a function and a
trigger on the class's table, rendered as SQL for a migration.  The hooks and the guard ignore such
a class.  The records have the same shape as those of the hooks: the attributes' names, and the
encoding of ``payload``.

The trigger is AFTER … FOR EACH ROW.  A statement trigger with transition tables is cheaper for bulk
statements, but it cannot pair an old row with its new one, loses the order between the inserts and
updates of one statement, and misses writes to a partition.  This one keeps the order per key,
stages only rows that differ, and covers partitions.  The row's lock is taken before the record's id
is drawn.  ``trigger_tables`` has the triggers themselves.

An update that changes the key of a log's rule is two records, each with its own image: ``delete``
under the old key, and then ``insert`` under the new one, as far as the rule is for these changes;
without ``insert`` the second is an ``update``.

The function follows DDL.  A column that is missing, or that cannot be encoded any more, fails the
writing statement.

The function is SECURITY DEFINER with a fixed ``search_path``: writers need no privilege on
Penstock's schema.  Its owner, the role that runs the migration, needs USAGE on it and INSERT on
``staged_records``.  TRUNCATE has no rows to stage and is refused if the rule stages deletes, unless
its transaction says that no record is wanted: ``ALLOW_TRUNCATE``.

Differences between triggers and hooks:

* A trigger writes a ``real`` with its own digits; asyncpg reads, and the hooks write, those of the
  double next to it.
* A trigger writes a float NaN or infinity as text; the hooks refuse it.  A trigger does not limit
  the payload's size.
* A trigger writes an infinite time as ``"infinity"``, and a year before 1 with ``BC`` behind it;
  Python has neither.
* A key that is NULL, empty or too long fails the writing statement with SQLSTATE 23514.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import Any, cast

from sqlalchemy import Column, Table, types
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import Mapper, class_mapper

from penstock.database.statements import quote, quote_literal
from penstock.declaring.declarations import CHANGES, StagingRule
from penstock.declaring.outcomes import RESERVED
from penstock.declaring.unique import MAX_NAME_BYTES
from penstock.errors import DeclarationError
from penstock.records import MAX_KEY_CHARACTERS
from penstock.staging.payload import MAX_HEADERS_BYTES, headers_text, json_text
from penstock.staging.rules import get_names, is_secret, is_unique, object_name
from penstock.staging.trace_headers import MAX_TRACE_BYTES, TRIGGERS_TRACE
from penstock.staging.trigger_function import (
    CURRENT,
    FIND,
    FUNCTION,
    GONE,
    KEY_CHANGE,
    MEMBER_CHANGE,
    NESTED,
    NEXT_IMAGE,
    OLD_IMAGE,
    OLD_MEMBER,
    TAKEN,
)
from penstock.staging.trigger_tables import render_create, render_drop, trigger_types

QUOTE = "$penstock$"

ALLOW_TRUNCATE = "SET LOCAL penstock.truncate = 'allow'"
"""Has a transaction empty tables without staging their rows, as tests do."""

Schemas = Mapping[str | None, str | None]
"""Schemas in place of those that classes have, as in SQLAlchemy's ``schema_translate_map``."""


@dataclass(frozen=True, slots=True)
class Trigger:
    """A rule's function and triggers."""

    rule: StagingRule
    name: str  # of the function
    function: str  # the same in quotes, after its schema
    schema: str | None  # schema of the table; None if the class leaves it to the search path
    table: str  # name of the table
    expressions: dict[str, str]  # what the function reads, by the name of the column
    condition: str | None  # the rule's, as a query of the row ``penstock_row``
    # further columns that it reads: those in the condition, and the primary key
    others: frozenset[str]
    # labels that the class has, by the name of the column of an enum
    labels: dict[str, frozenset[str]]
    body: str  # the function's body, as Postgres stores it
    # ``pg_trigger.tgtype`` of each trigger, by its name: that on rows is the first
    types: dict[str, int]
    statements: tuple[str, ...]  # SQL that creates them, or replaces them if they exist
    drop: tuple[str, ...]  # SQL that drops them


def make_name(rule: StagingRule) -> str:
    """Makes the name of the function.

    The same for each version of the rule, and short enough for its triggers' names.
    """
    table: Any = class_mapper(rule.model, configure=False).local_table
    table_name = getattr(table, "name", "")  # a join has none
    identity = "\n".join(
        (getattr(table, "schema", None) or "", table_name, rule.channel.name, object_name(rule))
    )
    digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
    readable = "".join(
        c if c.isascii() and (c.isalnum() or c == "_") else "_" for c in table_name[:30]
    )
    return f"stage_{readable}_{digest}" if readable else f"stage_{digest}"


def make_error(rule: StagingRule, reason: str) -> DeclarationError:
    """Makes the error for a rule that a trigger cannot capture."""
    return DeclarationError(f"staging rule of {rule.model.__name__}, capture by trigger: {reason}")


_PAIRS_A_CALL = 50
"""A Postgres function takes at most 100 arguments, and so does ``jsonb_build_object``."""


_VERSION = "-- penstock capture, version "
"""First line of a function's body, before a digest of the whole function with its SET clauses."""


def make_trigger(rule: StagingRule, schema: str, schemas: Schemas | None = None) -> Trigger:
    """Makes the function and the triggers of a rule; does not configure the mappers.

    Args:
        rule: The rule.
        schema: Penstock's own.
        schemas: The schemas of the tables in place of those that the classes have: SQLAlchemy's
            ``schema_translate_map``.
    """
    mapper = _get_mapper(rule)
    source: Any = mapper.local_table
    table_schema = (schemas or {}).get(source.schema, source.schema)
    table, name = quote(table_schema, source.name), make_name(rule)
    function = quote(schema, name)
    create = _render_function(rule, mapper, schema, function)
    digest = hashlib.sha256(create.encode()).hexdigest()[:16]
    create = create.replace(QUOTE, f"{QUOTE}\n{_VERSION}{digest}", 1)
    columns = _find_columns(rule, mapper)
    payload = set(_list_names(rule, mapper))
    expressions = {
        column.name: _render_json(rule, column, name)
        if name in payload
        else _render_key(rule, [column])
        for name, column in columns.items()
    }
    statements = (
        create,
        f"REVOKE ALL ON FUNCTION {function}() FROM PUBLIC",
        *render_create(name, function, table, rule.on, (source.name, rule.channel.name)),
    )
    drop = render_drop(name, function, table)
    if any(statement.count(QUOTE) > 2 for statement in (*statements, *drop)):  # noqa: PLR2004  before and after a body
        raise make_error(rule, f"a name, a value or the condition contains {QUOTE}")
    return Trigger(
        rule=rule,
        name=name,
        function=function,
        schema=table_schema,
        table=source.name,
        expressions=expressions,
        condition=_render_query(rule, mapper),
        others=frozenset(
            (*_find_words(rule, mapper), *(column.name for column in mapper.primary_key))
        ),
        labels={
            column.name: frozenset(kind.enums)
            for column in columns.values()
            if isinstance(kind := _unwrap_type(column.type), types.Enum)
            and kind.enum_class
            and kind.native_enum
        },
        body=create.split(QUOTE)[1],
        types=trigger_types(name, rule.on),
        statements=statements,
        drop=drop,
    )


def check_columns(rule: StagingRule) -> None:
    """Checks that a trigger can capture a rule's class and columns, as far as known so far."""
    mapper = _get_mapper(rule)
    columns = {
        name: column
        for name, column in _find_columns(rule, mapper).items()
        if not (isinstance(column.type, types.NullType) and column.foreign_keys)  # yet undecided
    }
    for name in columns.keys() & set(_list_names(rule, mapper)):
        _render_json(rule, columns[name], name)
    for names in (get_names(rule.key), get_names(rule.tenant)):
        _render_key(rule, [columns[name] for name in names if name in columns])


def _get_mapper(rule: StagingRule) -> Mapper[Any]:
    """Returns the rule's mapper, if a trigger can capture it."""
    if rule.capture != "trigger":
        raise make_error(rule, 'capture is not "trigger"')
    mapper: Mapper[Any] = class_mapper(rule.model, configure=False)
    if not isinstance(mapper.local_table, Table):
        raise make_error(rule, "the class is not mapped to a table")
    if (
        mapper.inherits is not None
        or mapper.polymorphic_on is not None
        or len(list(mapper.self_and_descendants)) > 1
    ):
        raise make_error(
            rule,
            "the class takes part in inheritance; a trigger sees one table, and cannot tell the "
            "classes apart",
        )
    return mapper


def _render_function(rule: StagingRule, mapper: Mapper[Any], schema: str, function: str) -> str:
    columns, names = _find_columns(rule, mapper), _list_names(rule, mapper)
    source: Any = mapper.local_table
    traits = rule.channel.traits
    key = _render_key(
        rule, [columns[n] for n in get_names(rule.tenant if traits.has_jobs else rule.key)]
    )
    pairs = [f"{quote_literal(name)}, {_render_json(rule, columns[name], name)}" for name in names]
    objects = [
        f"jsonb_build_object({', '.join(pairs[start : start + _PAIRS_A_CALL])})"
        for start in range(0, len(pairs), _PAIRS_A_CALL)
    ]
    parts = {
        "staged": quote(schema, "staged_records"),
        "channel": quote_literal(rule.channel.name),
        "shards": rule.channel.shards,
        "object": quote_literal(object_name(rule)),
    }
    find_old = _render_find_taken(rule, mapper)
    change = _render_change(rule, mapper, key, find_old)
    find_new = _render_find("current.*", [column.name for column in mapper.primary_key])
    return FUNCTION.format(
        **parts,
        function=function,
        key=key,
        part="tenant" if traits.has_jobs else "key",
        length="octet_length" if traits.has_jobs else "length",
        limit=MAX_NAME_BYTES if traits.has_jobs else MAX_KEY_CHARACTERS,
        unit="bytes" if traits.has_jobs else "characters",
        current=CURRENT.format(find_new=find_new) if traits.keeps_records else "",
        taken=_render_taken(rule, mapper, find_old) if traits.keeps_records and find_old else "",
        nested=NESTED if traits.keeps_records else "",
        gone=GONE if traits.keeps_records else "",
        change=change,
        when=_render_condition(rule, mapper),
        old_member=OLD_MEMBER.format(**parts) if change and not traits.has_payloads else "",
        next_image=_render_next(rule),
        payload=" || ".join(objects) or "'{}'::jsonb",
        headers=_render_headers(rule, source.schema, columns),
    )


def _render_change(rule: StagingRule, mapper: Mapper[Any], key: str, find_old: str) -> str:
    """Renders the comparison of an update's old and new key.

    Empty for jobs, which are no images of a row.
    """
    old_key = key.replace("penstock_row.", "OLD.")
    if "update" not in rule.on or rule.channel.traits.has_jobs:
        return ""
    if not rule.channel.traits.has_payloads:
        return MEMBER_CHANGE.format(old_key=old_key)
    if rule.on == {"update"}:
        return ""
    action = "insert" if "insert" in rule.on else "update"
    on_move = f"{' ' * 20}penstock_action := '{action}';"
    if "delete" in rule.on:
        check = (
            f"{' ' * 20}EXECUTE {find_old} INTO penstock_is_there USING OLD;\n" if find_old else ""
        )
        on_move = OLD_IMAGE.format(taken=check, action=action)
    moves = "penstock_old <> penstock_key"
    if not find_old:
        old_columns, new_columns = (
            ", ".join(f"{row}.{quote(column.name)}" for column in mapper.primary_key)
            for row in ("OLD", "penstock_row")
        )
        moves += f" OR ({old_columns}) <> ({new_columns})"
    return KEY_CHANGE.format(
        old_key=old_key, key=key, moves=moves, limit=MAX_KEY_CHARACTERS, moved=on_move
    )


def _render_taken(rule: StagingRule, mapper: Mapper[Any], find_old: str) -> str:
    """Renders the check that skips the delete of a key that another row has already taken."""
    columns = [_get_column(rule, mapper, name) for name in get_names(rule.key)]
    is_deferred = rule.on >= set(CHANGES) and is_unique(mapper, columns, is_deferrable=True)
    is_possible = "true" if is_deferred else "current_setting('penstock.nested', true) = 'on'"
    return TAKEN.format(is_possible=is_possible, find_old=find_old)


def _render_find_taken(rule: StagingRule, mapper: Mapper[Any]) -> str:
    """Renders the search for a row with the old key, which rows may take over.

    Empty if the key is not unique.
    """
    columns = [_get_column(rule, mapper, name) for name in get_names(rule.key)]
    condition = (
        f" AND ({_render_query(rule, mapper, 'current')})" if isinstance(rule.when, str) else ""
    )
    return (
        _render_find("true", [column.name for column in columns], condition)
        if is_unique(mapper, columns)
        else ""
    )


def _render_find(selection: str, columns: Sequence[str], condition: str = "") -> str:
    """Renders a statement that reads the current row with the same values in some columns."""
    current_values, key_values = (
        ", ".join(f"{row}.{quote(column)}" for column in columns) for row in ("current", "($1)")
    )
    return FIND.format(
        what=selection,
        where=quote_literal(f" AS current WHERE ({current_values}) = ({key_values}){condition}"),
    )


def _render_next(rule: StagingRule) -> str:
    """Renders the step from the old to the new row of a changed key."""
    if not rule.on >= {"update", "delete"} or not rule.channel.traits.keeps_records:
        return ""
    return NEXT_IMAGE.format(action="insert" if "insert" in rule.on else "update")


def _render_condition(rule: StagingRule, mapper: Mapper[Any]) -> str:
    if not isinstance(rule.when, str):
        return ""
    return (
        f"            IF ({_render_query(rule, mapper)}) IS NOT TRUE THEN\n"
        f"{indent(_render_next(rule), ' ' * 8)}"
        "                RETURN NULL;\n"
        "            END IF;\n"
    )


def _render_query(rule: StagingRule, mapper: Mapper[Any], row: str = "penstock_row") -> str | None:
    """Renders the query of a rule's condition.

    It names its columns: a session goes on to read a dropped column of ``penstock_row.*`` as NULL,
    and so stages nothing.
    """
    columns = ", ".join(f"{row}.{quote(name)}" for name in _find_words(rule, mapper))
    return (
        f"SELECT (\n{rule.when}\n) FROM (SELECT {columns}) AS changed"
        if isinstance(rule.when, str)
        else None
    )


def _find_words(rule: StagingRule, mapper: Mapper[Any]) -> list[str]:
    """Finds the columns of the class that a condition names."""
    columns = cast("Table", mapper.local_table).columns
    pairs = _WORD.findall(rule.when) if isinstance(rule.when, str) else []
    words = {quoted.replace('""', '"') or word.lower() for quoted, word in pairs}
    return [column.name for column in columns if column.name in words]


def _render_headers(
    rule: StagingRule, table_schema: str | None, columns: dict[str, Column[Any]]
) -> str:
    if not rule.channel.traits.has_payloads:
        return "NULL"
    own_headers = headers_text(rule.headers)
    # A schema a tenant: the rule does not say in which of them the table is.
    headers = f"'schema', nullif(TG_TABLE_SCHEMA, {quote_literal(table_schema or 'public')})"
    if len((own_headers or "").encode()) + MAX_TRACE_BYTES <= MAX_HEADERS_BYTES:
        headers = f"{TRIGGERS_TRACE}, {headers}"
    parts = [f"jsonb_strip_nulls(jsonb_build_object({headers}))"]
    if own_headers is not None:
        parts.append(f"{quote_literal(own_headers)}::jsonb")
    if rule.channel.traits.has_jobs and get_names(rule.key):
        key = _render_key(rule, [columns[name] for name in get_names(rule.key)])
        key_header = f"jsonb_strip_nulls(jsonb_build_object('key', {key}))"
        parts.append(f"jsonb_build_object('{RESERVED}', {key_header})")
    return " || ".join(parts) if len(parts) > 1 else f"nullif({parts[0]}, '{{}}')"


def _list_names(rule: StagingRule, mapper: Mapper[Any]) -> tuple[str, ...]:
    """Lists the attributes of the payload."""
    if rule.data is not None:
        return tuple(rule.data)  # type: ignore[arg-type]  # not callable
    columns: dict[str, Any] = dict(mapper.columns)  # some may be expressions
    return tuple(n for n, c in columns.items() if isinstance(c, Column) and not is_secret(c))


def _find_columns(rule: StagingRule, mapper: Mapper[Any]) -> dict[str, Column[Any]]:
    """Finds the columns of the payload and of the key, by the attributes' names."""
    names = dict.fromkeys(
        (*_list_names(rule, mapper), *get_names(rule.key), *get_names(rule.tenant))
    )
    return {name: _get_column(rule, mapper, name) for name in names}


def _get_column(rule: StagingRule, mapper: Mapper[Any], name: str) -> Column[Any]:
    column = mapper.columns.get(name)
    if column is None:
        raise make_error(rule, f"{name} is not a column")
    if not isinstance(column, Column):
        raise make_error(rule, f"{name} is computed by the mapper, not stored")
    return column


def _render_key(rule: StagingRule, columns: Sequence[Column[Any]]) -> str:
    """Renders the key as ``payload.key_text`` writes it.

    One column as text, several as a JSON array.
    """
    for column in columns:
        kind = _unwrap_type(column.type)
        is_text = isinstance(kind, types.String) and not isinstance(kind, types.Enum)
        if not (is_text or isinstance(kind, (types.Integer, types.Uuid))):
            raise make_error(
                rule, f"its key is of type {column.type!r}; it takes text, integer or uuid"
            )
    values = [f"penstock_row.{quote(column.name)}" for column in columns]
    if len(values) == 1:
        # a cast to text would take the blanks of a char(n) away
        return f"to_jsonb({values[0]}) #>> '{{}}'"
    listed = ", ".join(values)
    return f"(CASE WHEN num_nulls({listed}) = 0 THEN jsonb_build_array({listed})::text END)"


def _render_json(rule: StagingRule, column: Column[Any], name: str) -> str:
    """Renders the expression that encodes a column as the hooks encode its value."""
    value = f"penstock_row.{quote(column.name)}"
    kind = _unwrap_type(column.type)
    written = _render_expression(kind, value)
    if written is None:
        raise make_error(
            rule,
            f"{name} is of type {column.type!r}, which a trigger cannot encode as the hooks do: "
            "leave it out by listing the other attributes in data",
        )
    return written


def _render_expression(kind: types.TypeEngine[Any], value: str) -> str | None:  # noqa: PLR0911  one case a type
    if isinstance(kind, types.Enum):
        return _render_enum(kind, value)
    if isinstance(kind, types.DateTime):
        zone, offset = (
            ("::timestamptz AT TIME ZONE 'UTC'", '"+00:00"')
            if kind.timezone
            else ("::timestamp", "")
        )
        return _render_timestamp(f"{value}{zone}", f'YYYY-MM-DD"T"HH24:MI:SS.US{offset}')
    if isinstance(kind, types.Time):
        return None if kind.timezone else f"to_char({value}::time, 'HH24:MI:SS.US')"
    if isinstance(kind, (types.Numeric, types.Float)):
        # a real has fewer digits
        return f"{value}::text" if kind.asdecimal else f"{value}::text::float8"
    if isinstance(kind, (types.Uuid, postgresql.INTERVAL)):
        return f"{value}::text"
    if isinstance(kind, types.JSON):
        return f"{value}::jsonb"
    if isinstance(kind, types.ARRAY):
        inner = _unwrap_type(kind.item_type)
        return (
            value
            if isinstance(inner, _SAME_IN_BOTH) and not isinstance(inner, types.Enum)
            else None
        )
    return value if isinstance(kind, _SAME_IN_BOTH) else None


def _render_timestamp(value: str, form: str) -> str:
    """Renders a timestamp; infinity is a word, years before 1 end with ``BC``, as in Postgres."""
    era = f"CASE WHEN {value} < timestamp '0001-01-01' THEN ' BC' ELSE '' END"
    return f"coalesce(to_char({value}, '{form}' || {era}), ({value})::text)"


_WORD = re.compile(r'"((?:[^"]|"")+)"|([^\W\d]\w*)')

_CONVERSIONS = ("process_bind_param", "process_result_value", "bind_processor", "result_processor")
"""Methods that a ``TypeDecorator`` overrides to convert values."""

_SAME_IN_BOTH = (types.String, types.Integer, types.Boolean, types.Date)
"""Types that ``to_jsonb`` encodes as ``json.dumps`` does."""


def _render_enum(kind: types.Enum, value: str) -> str:
    """Maps labels to values: Postgres stores the label, usually the member's name.

    The record holds the value.  A label that the class lacks stays as it is.
    """
    if kind.enum_class is None:
        return value if kind.native_enum is False else f"{value}::text"
    members = list(kind.enum_class)
    cases = " ".join(
        f"WHEN {quote_literal(label)} THEN "
        f"{quote_literal(json_text(member, 'data', 1024 * 1024))}::jsonb"
        for label, member in zip(kind.enums, members, strict=True)
    )
    return f"(CASE {value}::text {cases} ELSE to_jsonb({value}::text) END)"


def _unwrap_type(kind: types.TypeEngine[Any]) -> types.TypeEngine[Any]:
    """Returns the type inside a ``TypeDecorator`` that converts no values, else the type."""
    if isinstance(kind, types.Interval):
        return postgresql.INTERVAL()
    if isinstance(kind, types.TypeDecorator):
        base: type[types.TypeDecorator[Any]] = types.TypeDecorator
        if all(getattr(type(kind), name) is getattr(base, name) for name in _CONVERSIONS):
            return kind.impl_instance
    return kind
