"""The session's hooks: a flush's changes of classes with rules become rows, after its own writes.

    before_flush      starts a list for this flush
    before_insert     ┐ note each object of a class with rules, in the order in which the unit of
                      work writes;
    before_update     ├ before a delete, and before an update that may change a key, the rows are
                      read and locked,
    before_delete     ┘ one SELECT a class
    after_flush       reads the rows that were written, one SELECT a class; then one INSERT of all
                      records

The mapper events tell what the unit of work writes and on which connection, and include orphans,
cascades and sharded sessions.  They fire for every session; one without a list, because no rules
apply to it, costs a dict look-up.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, event
from sqlalchemy.orm import Mapper, PassiveFlag, Session, SessionTransaction, UOWTransaction
from sqlalchemy.orm.attributes import get_history

from penstock.declaring.declarations import Change, StagingRule
from penstock.declaring.kinds import Channel
from penstock.errors import StagingError
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
    resolve_target,
)
from penstock.staging.stored_rows import State, Values, keep_loaded, read_rows

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
    # updated objects known to have a changed column
    modified: set[State] = field(default_factory=set)
    # rows before they are deleted, or updated so that their key may change; None if they were not
    # there
    old_values: dict[State, Values | None] = field(default_factory=dict)
    # cache of ``_find_replaced``: the deleted objects by their identities
    deletes: dict[object, State] | None = None
    # cache of ``rules``
    by_kind: dict[tuple[Mapper[Any], Change], list[MappedRule]] = field(default_factory=dict)

    def rules(self, mapper: Mapper[Any], change: Change) -> list[MappedRule]:
        """Returns the rules for a change of the mapper's objects."""
        matching = self.by_kind.get((mapper, change))
        if matching is None:
            mapped = [
                mapped_rule
                for attachment in self.attachments
                for mapped_rule in attachment.mapped_rules(mapper)
            ]
            matching = self.by_kind[mapper, change] = [
                mapped_rule for mapped_rule in mapped if change in mapped_rule.rule.on
            ]
        return matching

    def names(self, states: Sequence[State], *changes: Change) -> set[str]:
        """Returns the attributes that rules read of objects of one class."""
        names: set[str] = set()
        for change in changes:
            for rule in self.rules(states[0].mapper, change):
                names |= rule.reads
                # Deferred columns are left for a function to load, which it cannot when the row is
                # gone.
                is_last = change == "delete"
                names.update(
                    name for name in rule.deferred if is_last or any(name in s.dict for s in states)
                )
        return names

    def needs_old_row(self, state: State) -> bool:
        """Returns whether an update's row must be read and locked first.

        The key may change; or the class has several tables, of which an UPDATE locks only those
        that it changes.
        """
        rules = self.rules(state.mapper, "update")
        is_written = (
            state in self.modified
            or any(rule.is_post_updated for rule in rules)
            or _is_modified(state)
        )
        return (
            bool(rules)
            and is_written
            and (len(state.mapper.tables) > 1 or any(r.may_move(state) for r in rules))
        )


def follow(rule: StagingRule, pipeline: Declarations) -> None:
    """Listens to a new rule's class in every session; warns about sessions without the pipeline."""
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
    """Returns whether the unit of work is writing, with these hooks called.

    ``bulk_*`` methods do not call them.
    """
    flush: Flush | None = session.info.get(_FLUSH)
    # A failed flush leaves its list behind, with a transaction that is over, or with none.
    transaction = getattr(flush.context, "transaction", None) if flush is not None else None
    return transaction is not None and bool(transaction.is_active)


def _before_flush(session: Session, context: UOWTransaction, _: object) -> None:
    attachments = [attachment for attachment in find_attachments(session) if attachment.orm_rules]
    if not attachments:
        return
    for attachment in attachments:
        attachment.refresh()
    guard.listen(session)  # the first rule may be younger than the transaction
    session.info[_FLUSH] = Flush(context, attachments)


def _before_insert(_: Mapper[Any], connection: Connection, state: State) -> None:
    flush = _get_flush(state)
    if flush is not None:
        if (replaced := _find_replaced(flush, state)) is not None:
            _before_delete(replaced.mapper, connection, replaced)
        flush.changes.setdefault(state, ("insert", connection))


def _before_update(_: Mapper[Any], connection: Connection, state: State) -> None:
    flush = _get_flush(state)
    if flush is not None:
        flush.changes.setdefault(state, ("update", connection))
        # Checked here and after the flush: by then, a column set to an SQL expression has lost its
        # history.
        if _is_modified(state):
            flush.modified.add(state)
        if state not in flush.old_values and flush.needs_old_row(state):
            _read_before(flush, connection, state, "update")


def _before_delete(_: Mapper[Any], connection: Connection, state: State) -> None:
    flush = _get_flush(state)
    if flush is not None:
        flush.changes.setdefault(state, ("delete", connection))
        if state not in flush.old_values and flush.rules(state.mapper, "delete"):
            _read_before(flush, connection, state, "delete")


def _read_before(flush: Flush, connection: Connection, state: State, change: Change) -> None:
    """Reads and locks the row of an object, and of all objects of its class changed alike."""
    states = [state]
    session = state.session
    if (
        session is not None and session.connection_callable is None
    ):  # a sharded one knows each object's connection late
        states += [
            other
            for other, (is_delete, is_listed) in flush.context.states.items()
            if other.mapper is state.mapper
            and other is not state
            and other not in flush.old_values
            and other.key is not None
            and not is_listed
            and is_delete == (change == "delete")
            and (is_delete or flush.needs_old_row(other))
        ]
    names = flush.names(states, change)
    rows = read_rows(connection, states, names, lock=change, is_written=False)
    if change == "delete" and len(rows) < len(states):
        # Gone, or hidden by a policy for UPDATE, which a lock has to satisfy as well.
        rows |= read_rows(
            connection, [other for other in states if other not in rows], names, is_written=False
        )
    for changed in states:
        flush.old_values[changed] = rows.get(changed)
        if change == "delete" and changed in rows:
            keep_loaded(flush.context, changed, rows[changed])


def _find_replaced(flush: Flush, state: State) -> State | None:
    """Returns the object whose delete the unit of work merges with this insert into an UPDATE.

    It has the same identity.  They are staged as a delete and an insert, in this order.
    """
    if flush.deletes is None:
        deleted = (other for other, (is_delete, _) in flush.context.states.items() if is_delete)
        flush.deletes = {other.key: other for other in deleted if other.key is not None}
    return (
        flush.deletes.get(state.mapper.identity_key_from_instance(state.obj()))
        if flush.deletes
        else None
    )


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
    written = [
        (state, change, connection)
        for state, (change, connection) in flush.changes.items()
        if change != "update" or state in flush.modified or _is_modified(state)
    ]
    new_values = _read_after(flush, written)
    for mapper in {state.mapper for state, _, _ in written}:
        if not any(attachment.mapped_rules(mapper) for attachment in flush.attachments):
            rule_checks.warn_if_unattached(session, mapper)
    for attachment in flush.attachments:
        schema = attachment.pipeline.scope.schema
        for connection, rows in _make_rows(flush, attachment, written, new_values).items():
            counts = Counter(channel for channel, _ in rows)
            insert_rows(connection, Insert(schema, [row for _, row in rows], counts))
            for channel, records in counts.items():
                attachment.pipeline.observers(Staged(channel.name, records))
            nudging.note_staged(session, connection, schema, nudge=attachment.nudge)


def _make_rows(
    flush: Flush,
    attachment: Attachment,
    written: Iterable[Written],
    new_values: Mapping[State, Values],
) -> dict[Connection, list[tuple[Channel, Row]]]:
    """Makes the rows of one pipeline, in the order in which the objects were written."""
    rows: dict[Connection, list[tuple[Channel, Row]]] = {}
    for state, change, connection in written:
        for mapped in attachment.mapped_rules(state.mapper):
            if change in mapped.rule.on:
                new_rows = mapped.make_rows(
                    connection, change, state, flush.old_values.get(state), new_values.get(state)
                )
                if new_rows:
                    rows.setdefault(connection, []).extend(
                        (mapped.rule.channel, row) for row in new_rows
                    )
    return rows


def _is_modified(state: State) -> bool:
    """Returns whether a column differs from the row.

    The test that the unit of work makes before an UPDATE.
    """
    columns = state.mapper.column_attrs
    target = state.obj()
    for name in list(state.committed_state):
        if name in columns:
            history = get_history(target, name, PassiveFlag.PASSIVE_NO_INITIALIZE)
            if history.added or history.deleted:
                return True
    return False


def _read_after(flush: Flush, written: Iterable[Written]) -> dict[State, Values]:
    """Reads the rows that the flush has inserted and updated, one SELECT a class."""
    groups: dict[tuple[Mapper[Any], Connection], list[State]] = {}
    for state, change, connection in written:
        if change != "delete" and flush.rules(state.mapper, change):
            groups.setdefault((state.mapper, connection), []).append(state)
    new_values: dict[State, Values] = {}
    for (mapper, connection), states in groups.items():
        rows = read_rows(connection, states, flush.names(states, "insert", "update"))
        if len(rows) < len(states):
            raise StagingError(
                f"{len(states) - len(rows)} of {len(states)} rows of {mapper.class_.__name__} "
                "cannot be read for the records of this flush: a policy hides them from the role, "
                "or a trigger has deleted them or changed "
                'their primary key. Declare the rule with capture="trigger"'
            )
        for state, values in rows.items():
            keep_loaded(flush.context, state, values)
        new_values |= rows
    return new_values
