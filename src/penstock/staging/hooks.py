"""The session's hooks: what a flush changes of classes with rules becomes rows, inserted after the flush's own writes.

    before_flush      starts a list for this flush; loads objects to be deleted while their rows exist
    before_insert     ┐
    before_update     ├ note each object of a class with rules, in the order in which the unit of work writes
    before_delete     ┘
    after_flush       loads what the rules read and the objects lack, one SELECT a class; then one INSERT of all rows

The mapper events tell what the unit of work writes and on which connection, and include orphans, cascades and sharded
sessions.  They fire for every session; one without a list, because no rules apply to it, costs a dict look-up.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, event, inspect, select, tuple_
from sqlalchemy.orm import (
    InstanceState,
    LoaderCallableStatus,
    Mapper,
    PassiveFlag,
    Session,
    SessionTransaction,
    UOWTransaction,
)
from sqlalchemy.orm.attributes import get_history, set_committed_value

from penstock.declaring.declarations import Change, StagingRule
from penstock.declaring.kinds import Channel
from penstock.observer import Staged
from penstock.staging import guard, rule_checks
from penstock.staging import nudge as nudging
from penstock.staging.rows import Insert, Row, insert_rows
from penstock.staging.rules import (
    Attachment,
    Declarations,
    MappedRule,
    Target,
    add_attachment,
    find_attachments,
    make_key,
    null_names,
    resolve_target,
)

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


Written = tuple[State, Change, Connection]
"""An object that the flush has written, how, and on which connection."""

_FLUSH = "penstock.flush"
"""Key in ``Session.info``: the ``Flush`` in progress."""


@dataclass(eq=False, slots=True)
class Flush:
    """Changes of one flush to classes with rules."""

    context: UOWTransaction  # the unit of work
    attachments: list[Attachment]  # the session's pipelines that have rules
    # objects in the order in which they are written, with the kind of change and the connection
    changes: dict[State, tuple[Change, Connection]] = field(default_factory=dict)
    modified: set[State] = field(default_factory=set)  # updated objects known to have a changed column
    # for rules that mark members dirty: the members that updated objects had before
    old_members: dict[State, list[tuple[MappedRule, object]]] = field(default_factory=dict)
    # objects to be deleted, with the stored values of attributes that were changed and never written
    deleted: dict[State, dict[str, object]] = field(default_factory=dict)

    def reads(self, mapper: Mapper[Any], change: Change | None = None) -> set[str]:
        """Returns the column attributes that rules read of the mapper's objects; empty if no rule applies."""
        return {
            name
            for attachment in self.attachments
            for mapped in attachment.mapped_rules(mapper)
            if change is None or change in mapped.rule.on
            for name in mapped.reads
        }


def follow(rule: StagingRule, pipeline: Declarations) -> None:
    """Listens to a new rule's class, in every session: one that the pipeline is not attached to gets a warning."""
    if rule.capture == "orm":
        _listen_to_mapper(rule.model)
    rule_checks.watch_rule(rule, pipeline)


def attach(pipeline: Declarations, target: object, *, nudge: bool | None = None) -> None:
    """See ``Pipeline.attach``."""
    resolved = resolve_target(target)
    if add_attachment(resolved, pipeline, nudge=nudge):
        _listen_to_session(resolved)
        if isinstance(resolved, Session) and resolved.in_transaction():
            guard.watch(resolved, resolved.connection(), _is_writing)


def _listen_to_session(target: Target) -> None:
    for name, function in (
        ("before_flush", _before_flush),
        ("after_flush", _after_flush),
        ("after_begin", _after_begin),
        ("after_transaction_end", _after_transaction_end),
        ("after_commit", nudging.after_commit),
    ):
        event.listen(target, name, function)


def _listen_to_mapper(cls: type[Any]) -> None:
    for name, function in (
        ("before_insert", _before_insert),
        ("before_update", _before_update),
        ("before_delete", _before_delete),
    ):
        if not event.contains(cls, name, function):
            event.listen(cls, name, function, raw=True, propagate=True)


def _after_begin(session: Session, _: SessionTransaction, connection: Connection) -> None:
    guard.watch(session, connection, _is_writing)


def _after_transaction_end(session: Session, transaction: SessionTransaction) -> None:
    if transaction.parent is None:
        session.info.pop(_FLUSH, None)  # left by a flush that failed
        guard.unwatch(session)
        nudging.discard(session)


def _is_writing(session: Session) -> bool:
    """Returns whether the unit of work is writing, with these hooks called; ``bulk_*`` methods do not call them."""
    flush: Flush | None = session.info.get(_FLUSH)
    # A failed flush leaves its list behind, with a transaction that is over, or with none.
    transaction = getattr(flush.context, "transaction", None) if flush is not None else None
    return transaction is not None and bool(transaction.is_active)


def _before_flush(session: Session, context: UOWTransaction, _: object) -> None:
    found = [attachment for attachment in find_attachments(session) if attachment.orm_rules]
    if not found:
        return
    for attachment in found:
        attachment.refresh()
    guard.listen(session)  # the first rule may be younger than the transaction
    flush = session.info[_FLUSH] = Flush(context, found)
    deleted: dict[Mapper[Any], list[State]] = {}
    for target in session.deleted:
        state: State = inspect(target)
        deleted.setdefault(state.mapper, []).append(state)
    for mapper, states in deleted.items():
        # A sharded session knows the connection only when it deletes.
        if session.connection_callable is None and flush.reads(mapper):
            _load_before_delete(flush, session.connection(bind_arguments={"mapper": mapper}), states)


def _before_insert(_: Mapper[Any], connection: Connection, state: State) -> None:
    flush = _get_flush(state)
    if flush is not None:
        flush.changes.setdefault(state, ("insert", connection))


def _before_update(_: Mapper[Any], connection: Connection, state: State) -> None:
    flush = _get_flush(state)
    if flush is not None:
        flush.changes.setdefault(state, ("update", connection))
        # Checked here and after the flush: by then, a column set to an SQL expression has lost its history.
        if _is_modified(state):
            flush.modified.add(state)
        _note_old_members(flush, connection, state)


def _note_old_members(flush: Flush, connection: Connection, state: State) -> None:
    """Notes, before the row is written, the members it had, where a column that holds the member changes."""
    for attachment in flush.attachments:
        for mapped in attachment.mapped_rules(state.mapper):
            names = mapped.member_columns(state.mapper)
            if state.committed_state.keys().isdisjoint(names):
                continue
            old = read_stored(connection, state, names)
            if old is not None and old != [state.dict.get(name) for name in names]:
                flush.old_members.setdefault(state, []).append((mapped, make_key(old)))


def _before_delete(_: Mapper[Any], connection: Connection, state: State) -> None:
    flush = _get_flush(state)
    if flush is not None:
        flush.changes.setdefault(state, ("delete", connection))
        if state not in flush.deleted and flush.reads(state.mapper):
            _load_before_delete(flush, connection, [state])


def _get_flush(state: State) -> Flush | None:
    session = state.session
    if session is None:
        return None
    flush: Flush | None = session.info.get(_FLUSH)
    if flush is None:
        rule_checks.warn_if_unattached(session, state.mapper)
    return flush


def _after_flush(session: Session, context: UOWTransaction) -> None:
    flush: Flush | None = session.info.pop(_FLUSH, None)
    if flush is None or flush.context is not context:
        return  # the session has this listener twice, and the first call has done the work
    _add_replaced(flush, session)
    written = [
        (state, change, connection)
        for state, (change, connection) in flush.changes.items()
        if change != "update" or state in flush.modified or _is_modified(state)
    ]
    _load_missing(flush, written)
    for mapper in {state.mapper for state, _, _ in written}:
        if not any(attachment.mapped_rules(mapper) for attachment in flush.attachments):
            rule_checks.warn_if_unattached(session, mapper)
    for attachment in flush.attachments:
        schema = attachment.pipeline.scope.schema
        for connection, made in _make_rows(flush, attachment, written).items():
            counts = Counter(channel for channel, _ in made)
            insert_rows(connection, Insert(schema, [row for _, row in made], counts))
            for channel, records in counts.items():
                attachment.pipeline.observers(Staged(channel.name, records))
            nudging.note_staged(session, connection, schema, nudge=attachment.nudge)


def _make_rows(
    flush: Flush, attachment: Attachment, written: Iterable[Written]
) -> dict[Connection, list[tuple[Channel, Row]]]:
    """Makes the rows of one pipeline, in the order in which the objects were written."""
    rows: dict[Connection, list[tuple[Channel, Row]]] = {}
    for state, change, connection in written:
        for mapped in attachment.mapped_rules(state.mapper):
            if change not in mapped.rule.on:
                continue
            old_marks = (
                mapped.make_mark(change, member)
                for other, member in flush.old_members.get(state, ())
                if other is mapped
            )
            row = mapped.make_row(change, state.obj(), flush.deleted.get(state, {}))
            channel = mapped.rule.channel
            made = [(channel, each) for each in (*old_marks, row) if each is not None]
            if made:
                rows.setdefault(connection, []).extend(made)
    return rows


def _add_replaced(flush: Flush, session: Session) -> None:
    """Adds the deletes that the unit of work has merged into an UPDATE.

    It does so when an object is deleted and another one with the same identity is added.  They are staged as a delete
    and an insert, in this order.
    """
    replaced: dict[object, State] = {}
    for target in session.deleted:
        state: State = inspect(target)
        if state not in flush.changes and flush.reads(state.mapper):
            replaced[state.key] = state
    if not replaced:
        return
    ordered: dict[State, tuple[Change, Connection]] = {}
    for state, (change, connection) in flush.changes.items():
        old = None
        if change == "insert":
            old = replaced.get(state.mapper.identity_key_from_instance(state.obj()))
        if old is not None:
            ordered[old] = ("delete", connection)
        ordered[state] = (change, connection)
    flush.changes = ordered


def _is_modified(state: State) -> bool:
    """Returns whether a column differs from the row: the test that the unit of work makes before an UPDATE."""
    columns = state.mapper.column_attrs
    target = state.obj()
    for name in list(state.committed_state):
        if name in columns:
            history = get_history(target, name, PassiveFlag.PASSIVE_NO_INITIALIZE)
            if history.added or history.deleted:
                return True
    return False


def _load_missing(flush: Flush, written: Iterable[Written]) -> None:
    """Loads attributes that rules read and objects lack: expired, deferred, or set by the server; one SELECT a class."""
    incomplete: dict[tuple[Mapper[Any], Connection], tuple[list[State], set[str]]] = {}
    reads: dict[tuple[Mapper[Any], Change], tuple[set[str], frozenset[str]]] = {}
    for state, change, connection in written:
        if change == "delete":
            continue
        kind = (state.mapper, change)
        if kind not in reads:
            reads[kind] = (flush.reads(*kind), null_names(state.mapper) if change == "insert" else frozenset())
        wanted, nulls = reads[kind]
        lacking = wanted - state.dict.keys()
        for name in lacking & nulls:  # the unit of work has written NULL
            set_committed_value(state.obj(), name, None)
        lacking -= nulls
        if lacking:
            states, names = incomplete.setdefault((state.mapper, connection), ([], set()))
            states.append(state)
            names |= lacking
    for (mapper, connection), (states, names) in incomplete.items():
        for state, values in load_rows(connection, mapper, states, names):
            _set_loaded(flush, state, values)


def _load_before_delete(flush: Flush, connection: Connection, states: Sequence[State]) -> None:
    """Loads, while the rows exist, what objects to be deleted lack, or hold with a change that was never written."""
    mapper = states[0].mapper
    reads = flush.reads(mapper, "delete")
    incomplete: list[State] = []
    names: set[str] = set()
    for state in states:
        known = flush.deleted[state] = {name: value for name, value in state.committed_state.items() if name in reads}
        unknown = {name for name, value in known.items() if value is LoaderCallableStatus.NO_VALUE}
        unknown |= reads - state.dict.keys() - known.keys()
        if unknown:
            incomplete.append(state)
            names |= unknown
    for state, values in load_rows(connection, mapper, incomplete, names):
        known = flush.deleted[state]
        known.update({name: values[name] for name in known if name in values})
        _set_loaded(flush, state, values)


def _set_loaded(flush: Flush, state: State, values: dict[str, object]) -> None:
    """Sets loaded values on the object, as the unit of work does with values that the server has set."""
    target = state.obj()
    lacking = [name for name in values if name not in state.dict and name not in state.committed_state]
    for name in lacking:
        set_committed_value(target, name, values[name])
    if lacking:  # types such as MutableDict wrap the loaded value, to notice later changes
        state.manager.dispatch.refresh_flush(state, flush.context, lacking)
