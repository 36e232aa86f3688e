"""The session's hooks: what a flush changes of ruled classes becomes rows, in one INSERT after the flush's own writes.

    before_flush      a list for this flush; objects to be deleted are loaded while their rows are there
    before_insert     ┐
    before_update     ├ an object of a ruled class, in the order in which the unit of work writes
    before_delete     ┘
    after_flush       what the rules read and the objects lack is loaded, one SELECT a class; then the INSERT

The mapper's events tell what the unit of work writes, and by which connection: orphans, cascades and sharded sessions
included.  They fire for every session; one without a list, because no pipeline is attached, costs a look at a dict.
"""

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

from penstock.declarations import Change
from penstock.staging import guard
from penstock.staging import nudge as nudging
from penstock.staging.rows import Row, insert
from penstock.staging.rules import (
    Attachment,
    Declarations,
    Plan,
    Target,
    add_attachment,
    attachments,
    null_names,
    resolved,
)

State = InstanceState[Any]

_FLUSH = "penstock.flush"
"""Where ``Session.info`` keeps the list of the flush that is going on."""

_OBJECTS_A_SELECT = 5000
"""Postgres' protocol counts parameters in 16 bits, and a key may have several columns."""


@dataclass(eq=False, slots=True)
class Flush:
    """What one flush changes of ruled classes.

    Attributes:
        context: The unit of work.
        attachments: The pipelines of the session.
        changes: Objects in the order in which they are written, what happens to them, and on which connection.
        modified: Those of the updated objects of which a column has changed for certain.
        former: Members that updated objects were before, of rules that mark members dirty.
        doomed: Objects to be deleted, with values that their rows had and the object in memory no longer has.
    """

    context: UOWTransaction
    attachments: list[Attachment]
    changes: dict[State, tuple[Change, Connection]] = field(default_factory=dict)
    modified: set[State] = field(default_factory=set)
    former: dict[State, list[tuple[Plan, object]]] = field(default_factory=dict)
    doomed: dict[State, dict[str, object]] = field(default_factory=dict)

    def reads(self, mapper: Mapper[Any], change: Change | None = None) -> set[str]:
        """The column attributes that rules read of an object of the mapper; empty if no rule is for it."""
        return {
            name
            for attachment in self.attachments
            for plan in attachment.plans(mapper)
            if change is None or change in plan.rule.on
            for name in plan.reads
        }


def attach(pipeline: Declarations, target: object, *, nudge: bool = False) -> None:
    """Stages the ruled changes of sessions.  Rules that are declared later count too; attaching twice is attaching once.

    Args:
        pipeline: Where rules and channels are declared.
        target: A ``Session`` or a class of it, ``sessionmaker``, ``scoped_session``, or one of their async twins.
        nudge: Wake the streamer after a commit that staged something: less latency, for a little work after commits.

    Raises:
        DeclarationError: ``target`` is none of these.
    """
    listening = resolved(target)
    if add_attachment(listening, pipeline, nudge=nudge):
        _listen(listening)
        if isinstance(listening, Session) and listening.in_transaction():
            guard.watch(listening, listening.connection(), _is_writing)


def _listen(target: Target) -> None:
    for name, function in (
        ("before_flush", _before_flush),
        ("after_flush", _after_flush),
        ("after_begin", _after_begin),
        ("after_transaction_end", _after_transaction_end),
        ("after_commit", nudging.after_commit),
    ):
        event.listen(target, name, function)


def _watch(cls: type[Any]) -> None:
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
        session.info.pop(_FLUSH, None)  # of a flush that failed
        guard.leave(session)
        nudging.forget(session)


def _is_writing(session: Session) -> bool:
    """Whether the unit of work writes right now, with the hooks looking on; ``bulk_*`` methods do without them."""
    flush: Flush | None = session.info.get(_FLUSH)
    # A flush that failed has left its list behind, with a transaction that is over, or none.
    transaction = getattr(flush.context, "transaction", None) if flush is not None else None
    return transaction is not None and bool(transaction.is_active)


def _before_flush(session: Session, context: UOWTransaction, _: object) -> None:
    found = attachments(session)
    for attachment in found:
        for rule in attachment.new_rules():
            if rule.capture == "orm":
                _watch(rule.type)
    flush = session.info[_FLUSH] = Flush(context, found)
    doomed: dict[Mapper[Any], list[State]] = {}
    for target in session.deleted:
        state: State = inspect(target)
        doomed.setdefault(state.mapper, []).append(state)
    for mapper, states in doomed.items():
        # A sharded session tells the connection only when it deletes.
        if session.connection_callable is None and flush.reads(mapper):
            _remember(flush, session.connection(bind_arguments={"mapper": mapper}), states)


def _before_insert(_: Mapper[Any], connection: Connection, state: State) -> None:
    flush = _flush_of(state)
    if flush is not None:
        flush.changes.setdefault(state, ("insert", connection))


def _before_update(_: Mapper[Any], connection: Connection, state: State) -> None:
    flush = _flush_of(state)
    if flush is not None:
        flush.changes.setdefault(state, ("update", connection))
        # Asked now and again at the end: a column that was set to an SQL expression has forgotten it by then.
        if _is_modified(state):
            flush.modified.add(state)
        _remember_members(flush, connection, state)


def _remember_members(flush: Flush, connection: Connection, state: State) -> None:
    """The members that the object was, where a column that gives them changes: before the row is written."""
    for attachment in flush.attachments:
        for plan in attachment.plans(state.mapper):
            name = plan.moving(state.mapper)
            if name is None or name not in state.committed_state:
                continue
            old = get_history(state.obj(), name, PassiveFlag.PASSIVE_NO_INITIALIZE).deleted
            if not old:  # it was set without having been loaded
                old = [row[name] for _, row in _loaded(connection, state.mapper, [state], [name])]
            if old and old[0] != state.dict.get(name):
                flush.former.setdefault(state, []).append((plan, old[0]))


def _before_delete(_: Mapper[Any], connection: Connection, state: State) -> None:
    flush = _flush_of(state)
    if flush is not None:
        flush.changes.setdefault(state, ("delete", connection))
        if state not in flush.doomed and flush.reads(state.mapper):
            _remember(flush, connection, [state])


def _flush_of(state: State) -> Flush | None:
    session = state.session
    return session.info.get(_FLUSH) if session is not None else None


def _after_flush(session: Session, context: UOWTransaction) -> None:
    flush: Flush | None = session.info.pop(_FLUSH, None)
    if flush is None or flush.context is not context:
        return  # a second listener of the same session: the first has done it
    _add_replaced(flush, session)
    told = [
        (state, change, connection)
        for state, (change, connection) in flush.changes.items()
        if change != "update" or state in flush.modified or _is_modified(state)
    ]
    _complete(flush, told)
    for attachment in flush.attachments:
        rows: dict[Connection, list[Row]] = {}
        for state, change, connection in told:
            for plan in attachment.plans(state.mapper):
                if change in plan.rule.on:
                    former = (
                        plan.member(change, key)
                        for other, key in flush.former.get(state, ())
                        if other is plan
                    )
                    row = plan.row(change, state.obj(), flush.doomed.get(state, {}))
                    found = [each for each in (*former, row) if each is not None]
                    if found:
                        rows.setdefault(connection, []).extend(found)
        for connection, together in rows.items():
            insert(connection, attachment.pipeline.schema, together)
            if attachment.nudge:
                nudging.remember(session, connection, attachment.pipeline.schema)


def _add_replaced(flush: Flush, session: Session) -> None:
    """An object deleted and another of its identity added is one UPDATE, and two changes: told in this order."""
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
    """Whether a column of the object has another value than the row: what the unit of work asks before an UPDATE."""
    columns = state.mapper.column_attrs
    target = state.obj()
    for name in list(state.committed_state):
        if name in columns:
            history = get_history(target, name, PassiveFlag.PASSIVE_NO_INITIALIZE)
            if history.added or history.deleted:
                return True
    return False


def _complete(flush: Flush, told: Iterable[tuple[State, Change, Connection]]) -> None:
    """Loads what rules will read and objects lack: expired, deferred, or made by the server; one SELECT a class."""
    incomplete: dict[tuple[Mapper[Any], Connection], tuple[list[State], set[str]]] = {}
    reads: dict[tuple[Mapper[Any], Change], tuple[set[str], frozenset[str]]] = {}
    for state, change, connection in told:
        if change == "delete":
            continue
        kind = (state.mapper, change)
        if kind not in reads:
            reads[kind] = (
                flush.reads(*kind),
                null_names(state.mapper) if change == "insert" else frozenset(),
            )
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
        for state, values in _loaded(connection, mapper, states, names):
            _fill(flush, state, values)


def _remember(flush: Flush, connection: Connection, states: Sequence[State]) -> None:
    """Before the rows go: loads what objects to be deleted lack, and what was overwritten in memory and never written."""
    mapper = states[0].mapper
    reads = flush.reads(mapper, "delete")
    incomplete: list[State] = []
    names: set[str] = set()
    for state in states:
        known = flush.doomed[state] = {
            name: value for name, value in state.committed_state.items() if name in reads
        }
        unknown = {name for name, value in known.items() if value is LoaderCallableStatus.NO_VALUE}
        unknown |= reads - state.dict.keys() - known.keys()
        if unknown:
            incomplete.append(state)
            names |= unknown
    for state, values in _loaded(connection, mapper, incomplete, names):
        known = flush.doomed[state]
        known.update({name: values[name] for name in known if name in values})
        _fill(flush, state, values)


def _loaded(
    connection: Connection, mapper: Mapper[Any], states: Sequence[State], names: Collection[str]
) -> Iterable[tuple[State, dict[str, object]]]:
    """The named columns of the objects' rows, by Core: the session's identity map is in the middle of a flush."""
    columns = [mapper.column_attrs[name].columns[0] for name in names]
    identity = mapper.primary_key
    for start in range(0, len(states), _OBJECTS_A_SELECT):
        by_identity = {
            _identity(state): state for state in states[start : start + _OBJECTS_A_SELECT]
        }
        which = (
            identity[0].in_([key for (key,) in by_identity])
            if len(identity) == 1
            else tuple_(*identity).in_(by_identity)
        )
        query = select(*identity, *columns).select_from(mapper.persist_selectable).where(which)
        for row in connection.execute(query):
            state = by_identity.get(tuple(row[: len(identity)]))
            if (
                state is not None
            ):  # else the object holds its key in another type, and loads by itself
                yield state, dict(zip(names, row[len(identity) :], strict=True))


def _identity(state: State) -> tuple[Any, ...]:
    """The primary key as it stands in the database now: that of a deleted object, or the new one after the flush."""
    mapper = state.mapper
    names = [mapper.get_property_by_column(column).key for column in mapper.primary_key]
    old = state.key[1] if state.key is not None else ()
    return tuple(
        old[number] if name not in state.dict else state.dict[name]
        for number, name in enumerate(names)
    )


def _fill(flush: Flush, state: State, values: dict[str, object]) -> None:
    """Puts loaded values into the object, as the unit of work does with what the server made."""
    target = state.obj()
    lacking = [
        name for name in values if name not in state.dict and name not in state.committed_state
    ]
    for name in lacking:
        set_committed_value(target, name, values[name])
    if lacking:  # mutable types turn what was loaded into what notices changes
        state.manager.dispatch.refresh_flush(state, flush.context, lacking)
