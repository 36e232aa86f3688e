"""The values that objects have in their rows, read with Core: the session's identity map is in the middle of a flush."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, select, tuple_
from sqlalchemy.orm import InstanceState, Mapper, PassiveFlag
from sqlalchemy.orm.attributes import get_history

State = InstanceState[Any]

_OBJECTS_A_SELECT = 5000
"""Postgres' protocol counts parameters in 16 bits, and a key may have several columns."""


def read_stored(connection: Connection, state: State, names: Sequence[str]) -> list[object] | None:
    """Reads the values that columns of an object have in its row; None if the row is gone."""
    known = dict(state.dict)
    for name in names:
        if name in state.committed_state:
            history = get_history(state.obj(), name, PassiveFlag.PASSIVE_NO_INITIALIZE)
            known.pop(name, None)
            for value in history.deleted or history.unchanged:
                known[name] = value
    if not known.keys() >= set(names):  # not loaded, or set without having been loaded
        for _, values in load_rows(connection, state.mapper, [state], names):
            return [values[name] for name in names]
        return None
    return [known[name] for name in names]


def load_rows(
    connection: Connection, mapper: Mapper[Any], states: Sequence[State], names: Collection[str]
) -> Iterable[tuple[State, dict[str, object]]]:
    """Loads the named columns of the objects' rows."""
    columns = [mapper.column_attrs[name].columns[0] for name in names]
    identity = mapper.primary_key
    for start in range(0, len(states), _OBJECTS_A_SELECT):
        by_identity = {_get_identity(state): state for state in states[start : start + _OBJECTS_A_SELECT]}
        which = (
            identity[0].in_([key for (key,) in by_identity])
            if len(identity) == 1
            else tuple_(*identity).in_(by_identity)
        )
        query = select(*identity, *columns).select_from(mapper.persist_selectable).where(which)
        for row in connection.execute(query):
            state = by_identity.get(tuple(row[: len(identity)]))
            # None: the object holds its key in another type, and loads the values when they are read.
            if state is not None:
                yield state, dict(zip(names, row[len(identity) :], strict=True))


def _get_identity(state: State) -> tuple[Any, ...]:
    """Returns the primary key in the database: that of a deleted object, or the new one after the flush."""
    mapper = state.mapper
    names = [mapper.get_property_by_column(column).key for column in mapper.primary_key]
    old = state.key[1] if state.key is not None else ()
    return tuple(old[number] if name not in state.dict else state.dict[name] for number, name in enumerate(names))
