"""Reads the rows of mapped objects in the transaction.

A record holds the row's values, not the object's.  What an object holds may be older than its row,
and what was written may be stored otherwise: by another transaction, a trigger, a default, a type
that pads or converts.  ``read_rows`` reads the rows of many objects by one statement of constant
text, with one array for each column of the primary key.  It uses SQLAlchemy's Core: nothing is
flushed, no object is refreshed, and no event of the session fires.

A library's type may load an object that JSON lacks: ``ChoiceType`` loads objects and stores codes.
What the type gives the driver for the object is what the row holds, and so what the record tells:
see ``find_converters``.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import (
    ARRAY,
    Connection,
    FromClause,
    Join,
    Select,
    String,
    bindparam,
    cast,
    func,
    literal_column,
    select,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql.ranges import AbstractMultiRange
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import InstanceState, Mapper, UOWTransaction
from sqlalchemy.orm.attributes import set_committed_value
from sqlalchemy.sql import and_
from sqlalchemy.types import TypeDecorator, TypeEngine, UserDefinedType

from penstock.declaring.declarations import Change
from penstock.errors import StagingError
from penstock.staging.payload import encode_ranges, is_writable
from penstock.staging.rows import get_sqlstate

State = InstanceState[Any]

Values = Mapping[str, object]
"""A row's values by the names of the attributes."""

Derived = Sequence[tuple[str, frozenset[str]]]
"""Attributes that are made of columns, with the attributes of these.

Composites, and objects behind foreign keys.
"""

Convert = Callable[[Any], object]
Converters = Mapping[str, Convert]
"""Write objects that JSON lacks as their column's type sends them to Postgres.

By the attributes' names.
"""

_DIALECT = postgresql.dialect()  # type: ignore[no-untyped-call]  # SQLAlchemy's

_ABSENT = object()

_KEYS = "penstock_keys"

_SETTINGS = {"datestyle": "ISO", "intervalstyle": "postgres", "extra_float_digits": "1"}
_GET_SETTINGS = select(*(func.pg_catalog.current_setting(name).label(name) for name in _SETTINGS))
_SET_SETTINGS = select(
    *(func.pg_catalog.set_config(name, bindparam(name, type_=String), True) for name in _SETTINGS)
)

_LACKS_PRIVILEGE = "42501"

_Kind = tuple[tuple[str, ...], Change | None, bool]
"""Attributes, lock, and whether it is for one row."""

_statements: WeakKeyDictionary[Mapper[Any], dict[_Kind, Select[Any]]] = WeakKeyDictionary()


def read_rows(
    connection: Connection,
    states: Sequence[State],
    names: Collection[str],
    *,
    lock: Change | None = None,
    is_written: bool = True,
) -> dict[State, Values]:
    """Reads columns of the rows of objects of one class; an object without a row is left out.

    Args:
        connection: Where the unit of work writes them.
        states: The objects.
        names: Attributes that are columns or expressions.
        lock: Locks the rows as a statement of this kind would, in the order of their keys.
        is_written: Whether the flush has written the objects; their identities are those of before
            otherwise.
    """
    if not states:
        return {}
    listed = tuple(sorted(names))
    is_single = len(states) == 1
    statement = _find_statement(states[0].mapper, listed, lock, is_single=is_single)
    columns = zip(*_get_identities(states, is_written=is_written), strict=True)
    keys = {
        f"key_{n}": column[0] if is_single else list(column) for n, column in enumerate(columns)
    }
    failure: Exception
    try:
        rows = _fetch(connection, statement, keys)
        return {
            states[number - 1]: dict(zip(listed, values, strict=True))
            for number, _, *values in rows
        }
    except DBAPIError as error:
        error.hide_parameters = True
        failure = _make_refusal(states[0].mapper, error, lock)
    # Raised here, outside ``except``, so that the error with the parameters is not its context.
    raise failure


def has_row(connection: Connection, mapper: Mapper[Any], values: Values) -> bool:
    """Returns whether a row has exactly these values.

    Postgres may call others equal, such as ``Ab`` and ``AB``.
    """
    columns = [mapper.column_attrs[name].columns[0] for name in values]
    query = select(*columns).where(
        *(column == value for column, value in zip(columns, values.values(), strict=True))
    )
    return tuple(values.values()) in map(tuple, connection.execute(query))


def _fetch(connection: Connection, statement: Select[Any], keys: dict[str, Any]) -> Sequence[Any]:
    """Fetches the rows, whatever the settings.

    A role's or a database's may shorten floats or change the style of times.
    """
    if _has_readable_times(connection):
        rows = connection.execute(statement, keys).all()
        if not rows or int(rows[0].float_digits) > 0:
            return rows
    settings = connection.execute(_GET_SETTINGS).one()._asdict()
    connection.execute(_SET_SETTINGS, _SETTINGS)
    rows = connection.execute(statement, keys).all()
    # after an error the transaction, or its savepoint, takes them back
    connection.execute(_SET_SETTINGS, settings)
    return rows


def _has_readable_times(connection: Connection) -> bool:
    """Returns whether the driver reads the current style of times.

    Psycopg reads few, others set their own.
    """
    driver: Any = connection.connection.driver_connection
    if type(driver).__module__.partition(".")[0] != "psycopg":
        return True
    date_style, interval_style = map(driver.info.parameter_status, ("DateStyle", "IntervalStyle"))
    return str(date_style).startswith("ISO") and interval_style in {"postgres", None}


def keep_loaded(context: UOWTransaction, state: State, values: Values) -> None:
    """Sets values that the object lacks, as the unit of work does with values of the server."""
    lacking = [
        name for name in values if name not in state.dict and name not in state.committed_state
    ]
    for name in lacking:
        set_committed_value(state.obj(), name, values[name])
    if lacking:  # types such as MutableDict wrap the loaded value, to notice later changes
        state.manager.dispatch.refresh_flush(state, context, lacking)


@contextmanager
def as_stored(state: State, values: Values, derived: Derived) -> Iterator[object]:
    """Gives the object the row's values while the block runs.

    Restores its own, with the program's changes.
    """
    memory = state.dict
    outdated = {
        name: _ABSENT
        for name, columns in derived
        if any(memory.get(column, _ABSENT) != values[column] for column in columns & values.keys())
    }
    original = {name: memory.get(name, _ABSENT) for name in (*values, *outdated)}
    try:
        _set(memory, {**values, **outdated})
        yield state.obj()
    finally:
        _set(memory, original)


def _set(memory: dict[str, Any], values: Values) -> None:
    for name, value in values.items():
        if value is _ABSENT:
            memory.pop(name, None)  # loaded, or composed, when it is read
        else:
            memory[name] = value


def _find_statement(
    mapper: Mapper[Any], names: tuple[str, ...], lock: Change | None, *, is_single: bool
) -> Select[Any]:
    statements = _statements.setdefault(mapper, {})
    kind = names, lock, is_single
    if kind not in statements:
        statements[kind] = _make_statement(mapper, names, lock, is_single=is_single)
    return statements[kind]


def _make_statement(
    mapper: Mapper[Any], names: tuple[str, ...], lock: Change | None, *, is_single: bool
) -> Select[Any]:
    identity, table = mapper.primary_key, mapper.persist_selectable
    digits = func.pg_catalog.current_setting("extra_float_digits").label("float_digits")
    read = [
        digits,
        *(mapper.column_attrs[name].columns[0].label(f"value_{n}") for n, name in enumerate(names)),
    ]
    if is_single:  # costs half
        matches = [
            column == bindparam(f"key_{n}", type_=column.type) for n, column in enumerate(identity)
        ]
        statement = select(literal_column("1"), *read).select_from(table).where(*matches)
    else:
        arrays = [postgresql.ARRAY(_uncollated(column.type)) for column in identity]
        # The CAST is for drivers that send a list without its type.
        lists = [cast(bindparam(f"key_{n}", type_=kind), kind) for n, kind in enumerate(arrays)]
        columns = [f"key_{n}" for n in range(len(arrays))]
        keys = (
            func.unnest(*lists)
            .table_valued(*columns, with_ordinality="number")
            .render_derived(_KEYS)
        )
        matches = [column == keys.c[name] for column, name in zip(identity, columns, strict=True)]
        statement = select(keys.c.number, *read).select_from(keys.join(table, and_(*matches)))
    if lock is not None:
        tables = _find_lockable(table)
        statement = statement.order_by(*identity)
        if tables:
            statement = statement.with_for_update(key_share=lock == "update", of=tables)
    return statement


def _find_lockable(source: FromClause) -> list[FromClause]:
    """Finds the tables whose rows Postgres locks.

    Not those on the side of an outer join that may have none.
    """
    if not isinstance(source, Join):
        return [source]
    lockable = [] if source.full else _find_lockable(source.left)
    return lockable if source.isouter or source.full else [*lockable, *_find_lockable(source.right)]


def _uncollated(kind: TypeEngine[Any]) -> TypeEngine[Any]:
    """Removes the collation of a type, which a CAST does not take."""
    return (
        kind.adapt(type(kind), collation=None)
        if isinstance(kind, String) and kind.collation
        else kind
    )


def _get_identities(states: Sequence[State], *, is_written: bool) -> list[tuple[Any, ...]]:
    """Returns the primary keys before the flush, or with ``is_written`` after it."""
    mapper = states[0].mapper
    old = [state.key[1] if state.key is not None else () for state in states]
    if not is_written:
        return old
    names = [mapper.get_property_by_column(column).key for column in mapper.primary_key]
    return [
        tuple(state.dict[name] if name in state.dict else key[n] for n, name in enumerate(names))
        for state, key in zip(states, old, strict=True)
    ]


def is_identity_changed(state: State) -> bool:
    """Returns whether the flush has changed the primary key."""
    return state.key is not None and _get_identities([state], is_written=True) != [state.key[1]]


def _make_refusal(mapper: Mapper[Any], error: DBAPIError, lock: Change | None) -> Exception:
    if get_sqlstate(error.orig) != _LACKS_PRIVILEGE:
        return error
    tables = ", ".join(str(getattr(table, "fullname", table)) for table in mapper.tables)
    rights = "SELECT, UPDATE" if lock else "SELECT"
    return StagingError(
        f"the role may not read{' and lock' if lock else ''} the rows of {mapper.class_.__name__} "
        f"that it changes, which their records need: GRANT {rights} ON {tables} TO it, "
        'or declare the rule with capture="trigger"'
    )


def find_converters(types: Mapping[str, TypeEngine[Any]]) -> Converters:
    """Finds the converters of columns whose types may load objects, by attribute name."""
    converters = {name: _find_converter(kind) for name, kind in types.items()}
    return {name: convert for name, convert in converters.items() if convert is not None}


def _find_converter(kind: TypeEngine[Any]) -> Convert | None:
    if isinstance(kind, AbstractMultiRange):
        return lambda value: None if value is None else encode_ranges(value)
    if isinstance(kind, ARRAY):
        item = _find_converter(kind.item_type)
        return item and _make_for_array(item)
    if isinstance(kind, TypeDecorator):
        if type(kind).process_bind_param is TypeDecorator.process_bind_param:
            return _find_converter(kind.impl_instance)
        decorator = kind
        return _make_for_objects(lambda value: decorator.process_bind_param(value, _DIALECT))
    send = kind.bind_processor(_DIALECT) if isinstance(kind, UserDefinedType) else None
    return send and _make_for_objects(send)


def _make_for_objects(send: Convert) -> Convert:
    return lambda value: value if is_writable(value) else send(value)


def _make_for_array(item: Convert) -> Convert:
    def convert(value: Any) -> object:
        return (
            [convert(element) for element in value]
            if isinstance(value, (list, tuple))
            else item(value)
        )

    return convert
