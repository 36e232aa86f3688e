"""The rules of a session, their meaning for a mapped class, and the rows of changes.

A rule is declared for a class and applies to its mapped subclasses.  A ``MappedRule`` is one rule
applied to one mapper: the attributes it reads, so that they can be loaded together, and how an
object becomes a row.

A pipeline is attached to a class of sessions or to one session.  ``sessionmaker`` and its relatives
create sessions of a class of their own; attaching to one of them attaches to that class.  Those
that would create sessions of a class that others use as well are given a subclass of it.  A session
counts each pipeline once, however many times it was attached.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from sqlalchemy import Column, Connection, PrimaryKeyConstraint, Table, UniqueConstraint
from sqlalchemy.orm import (
    ColumnProperty,
    Mapper,
    RelationshipDirection,
    Session,
    class_mapper,
    sessionmaker,
)

from penstock.declaring.declarations import CHANGES, Change, Named, StagingRule
from penstock.declaring.kinds import Channel, Queue
from penstock.errors import DeclarationError, InvalidRecord
from penstock.observer import Observers
from penstock.records import Scope
from penstock.staging.messages import make_message
from penstock.staging.payload import key_text
from penstock.staging.payload_models import TypedPayload
from penstock.staging.rows import Row, make_row
from penstock.staging.stored_rows import (
    Converters,
    Derived,
    State,
    Values,
    as_stored,
    find_converters,
    has_row,
    is_identity_changed,
)

Target = type[Session] | Session
"""Target of SQLAlchemy's session events."""


class Declarations(Protocol):
    """The part of a pipeline that staging uses."""

    @property
    def rules(self) -> Sequence[StagingRule]:
        """Staging rules, in the order of their declaration."""

    @property
    def channels(self) -> Mapping[str, Channel]:
        """Channels by name."""

    def find_payload(self, queue: Queue) -> type[Any] | None:
        """Returns the payload model of a queue's worker."""

    @property
    def scope(self) -> Scope:
        """Its schema in Postgres, and its namespace in Redis."""

    @property
    def observers(self) -> Observers:
        """Observers of its events."""


@dataclass(frozen=True, slots=True, eq=False)
class MappedRule:
    """A rule applied to one mapper."""

    rule: StagingRule
    object_name: str  # the object's name in the records
    # attributes that make up the payload; None if a function builds it
    names: tuple[str, ...] | None
    reads: frozenset[str]  # column attributes that the rule may read
    deferred: frozenset[str]  # those it may read if the object has loaded them
    is_computed: bool  # functions or properties read the object
    derived: Derived  # attributes that they may read, and that are made of columns
    follows_key: bool  # an update that changes the key concerns the old key as well
    identity: tuple[str, ...]  # the primary key, by which the unit of work finds the row
    converters: Converters  # of columns whose values may be objects of a library of types
    has_unique_key: bool  # a key is that of one row at most
    has_deferred_key: bool  # and a row may take it before the row that had it is gone
    is_post_updated: bool  # a relationship may write the object's row after its own statement
    typed: TypedPayload | None  # the model that the worker of the rule's queue takes

    def may_move(self, state: State) -> bool:
        """Returns whether an update may change the object's key, and the rule must follow it."""
        key = set(get_names(self.rule.key))
        names = key if self.has_unique_key else key.union(self.identity)
        is_fixed = (
            bool(key) and key.issubset(self.identity) and names.isdisjoint(state.committed_state)
        )
        return self.follows_key and not is_fixed

    def make_rows(
        self,
        connection: Connection,
        change: Change,
        state: State,
        old: Values | None,
        new: Values | None,
    ) -> list[Row]:
        """Returns the rows for a change.

        None if the rule's condition is false, two if the key has changed.

        Args:
            connection: Where the flush has written the object.
            change: What it has done.
            state: The object.
            old: Its row before a delete, or before an update that may change the key.
            new: Its row after an insert or an update.
        """
        parts: list[tuple[Change, Values | None]] = [(change, old if change == "delete" else new)]
        if (
            change == "update"
            and self.follows_key
            and old is not None
            and self._has_moved(state, old, new)
        ):
            has_images = self.rule.channel.traits.has_payloads
            parts = (
                self._replace(connection, state, old, new)
                if has_images
                else [(change, old), (change, new)]
            )
        elif (
            change == "delete"
            and self.has_deferred_key
            and old is not None
            and self.rule.on >= set(CHANGES)
        ):
            parts = [] if self._is_taken(connection, state, old) else parts
        rows = (
            self._make_row(action, state, values) for action, values in parts if values is not None
        )
        return [row for row in rows if row is not None]

    def _replace(
        self, connection: Connection, state: State, old: Values, new: Values | None
    ) -> list[tuple[Change, Values | None]]:
        """Splits an update of the key into a delete and an insert, as the rule stages them.

        If another row has already taken the old key, its record is there: the delete is left out.
        """
        on = self.rule.on
        is_deleted = "delete" in on and not self._is_taken(connection, state, old)
        replaced: list[tuple[Change, Values | None]] = [("delete", old)] if is_deleted else []
        return [*replaced, ("insert" if "insert" in on else "update", new)]

    def _is_taken(self, connection: Connection, state: State, old: Values) -> bool:
        """Returns whether another row already has the old key.

        The unit of work updates before it inserts.
        """
        names = get_names(self.rule.key)
        return self.has_unique_key and has_row(
            connection, state.mapper, {name: old[name] for name in names}
        )

    def _make_row(self, action: Change, state: State, values: Values) -> Row | None:
        rule = self.rule
        with self._object(state, values) as target:
            values = self._convert(values)
            if not rule.channel.traits.has_payloads:
                member = _read_named(rule.key, target, values)
                return (
                    None
                    if _is_null(member)
                    else make_row(rule.channel, member, action, self.object_name, {})
                )
            if callable(rule.when) and not rule.when(target):
                return None
            data: Any
            if self.names is not None:
                data = {name: _read(target, name, values) for name in self.names}
            else:
                data = _call(rule.data, target)
            headers = _call(rule.headers, target) if callable(rule.headers) else rule.headers
            key = _read_named(rule.key, target, values)
            if isinstance(rule.channel, Queue):
                options = {"tenant": _read_named(rule.tenant, target, values)}
                labels = action, self.object_name
                return make_message(
                    rule.channel, *labels, data, headers, options, key=key, typed=self.typed
                )
            return make_row(rule.channel, key, action, self.object_name, data, headers)

    def _has_moved(self, state: State, old: Values, new: Values | None) -> bool:
        """Returns whether an update has changed the key, and there was one before.

        A copy of a log whose key several rows may have tells them apart by the primary key.
        """
        is_apart = self.rule.channel.traits.has_payloads and not self.has_unique_key
        is_renamed = is_apart and is_identity_changed(state)
        keys = []
        for values in (old, new or {}):
            with self._object(state, values) as target:
                keys.append(_read_named(self.rule.key, target, self._convert(values)))
        try:
            return (is_renamed or keys[0] != keys[1]) and bool(key_text(keys[0]))
        except InvalidRecord:  # NULL, empty: nothing was ever staged under it
            return False

    def _convert(self, values: Values) -> Values:
        """Converts the values of the columns that the rule names to their stored form."""
        if not self.converters:
            return values
        return {
            **values,
            **{
                name: convert(values[name])
                for name, convert in self.converters.items()
                if name in values
            },
        }

    def _object(self, state: State, values: Values) -> AbstractContextManager[object]:
        """Gives the rule's functions the object with its row's values."""
        return (
            as_stored(state, values, self.derived) if self.is_computed else nullcontext(state.obj())
        )


def get_names(names: Named | None) -> tuple[str, ...]:
    """Returns the names of attributes; none if it is a function."""
    if names is None or callable(names):
        return ()
    return (names,) if isinstance(names, str) else tuple(names)


def make_key(values: Sequence[object]) -> object:
    """Makes a key out of the values of its attributes.

    The value if there is one, otherwise a tuple.
    """
    return values[0] if len(values) == 1 else tuple(values)


def is_secret(column: object) -> bool:
    """Returns whether a column is marked secret, and left out of payloads that do not name it."""
    return isinstance(column, Column) and bool(column.info.get("secret"))


def column_names(mapper: Mapper[Any]) -> tuple[str, ...]:
    """Returns the attributes that map a column of a table, in the mapper's order.

    Computed ones are left out.
    """
    return tuple(
        attribute.key
        for attribute in mapper.column_attrs
        if isinstance(attribute.columns[0], Column)
    )


def is_unique(
    mapper: Mapper[Any], columns: Sequence[object], *, is_deferrable: bool = False
) -> bool:
    """Returns whether the columns are unique in the table.

    With ``is_deferrable``, only at the commit.
    """
    table = mapper.local_table
    if not isinstance(table, Table):
        return False
    constraints = [
        c for c in table.constraints if isinstance(c, (PrimaryKeyConstraint, UniqueConstraint))
    ]
    indexes = [
        i for i in table.indexes if i.unique and i.dialect_options["postgresql"]["where"] is None
    ]
    unique = [c for c in constraints if c.deferrable] if is_deferrable else [*constraints, *indexes]
    return bool(columns) and any(set(key.columns) == set(columns) for key in unique)


def object_name(rule: StagingRule) -> str:
    """Returns the name that a rule's records give their object."""
    if rule.object is not None:
        return rule.object
    table = class_mapper(rule.model, configure=False).local_table
    return table.name if isinstance(table, Table) else rule.model.__name__


class Attachment:
    """A pipeline as attached to sessions, with the mapped rules made so far.

    Attributes:
        pipeline: The pipeline.
        nudge: Whether a commit wakes the streamer; None for the first one after a pause.
    """

    def __init__(self, pipeline: Declarations, *, nudge: bool | None) -> None:
        self.pipeline = pipeline
        self.nudge = nudge
        self._declared = 0
        self._orm_rules: tuple[StagingRule, ...] = ()
        self._rules: Sequence[StagingRule] = ()
        self._mapped: WeakKeyDictionary[Mapper[Any], tuple[MappedRule, ...]] = WeakKeyDictionary()

    @property
    def orm_rules(self) -> tuple[StagingRule, ...]:
        """Declared rules that the session's hooks follow."""
        rules = self.pipeline.rules
        if len(rules) != self._declared:  # asked at every flush
            self._orm_rules = tuple(rule for rule in rules if rule.capture == "orm")
            self._declared = len(rules)
        return self._orm_rules

    def refresh(self) -> None:
        """Takes the rules for the hooks that were declared since the last call."""
        rules = self.orm_rules
        if len(rules) > len(self._rules):
            self._rules = rules
            self._mapped = WeakKeyDictionary()

    def mapped_rules(self, mapper: Mapper[Any]) -> tuple[MappedRule, ...]:
        """Returns the mapped rules of a mapper, as of the last refresh, as they were declared."""
        mapped = self._mapped.get(mapper)
        if mapped is None:
            rules = (rule for rule in self._rules if issubclass(mapper.class_, rule.model))
            mapped = self._mapped[mapper] = tuple(
                _map_rule(rule, mapper, self.pipeline) for rule in rules
            )
        return mapped


_attached: WeakKeyDictionary[Target, list[Attachment]] = WeakKeyDictionary()


def add_attachment(target: Target, pipeline: Declarations, *, nudge: bool | None) -> bool:
    """Records that sessions of ``target`` use the pipeline.

    Returns whether this is the target's first pipeline.
    """
    is_new = target not in _attached
    attachments = _attached.setdefault(target, [])
    for attachment in attachments:
        if attachment.pipeline is pipeline:
            attachment.nudge = (
                nudge if attachment.nudge is None else attachment.nudge or bool(nudge)
            )
            return False
    attachments.append(Attachment(pipeline, nudge=nudge))
    return is_new


def find_attachments(session: Session) -> list[Attachment]:
    """Returns the pipelines of a session, each once.

    The session's own attachment wins over that of a class.
    """
    attachments: list[Attachment] = []
    targets: tuple[Any, ...] = (session, *type(session).__mro__)
    for target in targets:
        for attachment in _attached.get(target, ()):
            if all(attachment.pipeline is not other.pipeline for other in attachments):
                attachments.append(attachment)
    return attachments


def resolve_target(target: Any) -> Target:
    """Returns the session class, or the session, behind the target of ``attach``.

    Async types are recognised by their attributes, since importing them needs greenlet.
    """
    if isinstance(target, Session) or (isinstance(target, type) and issubclass(target, Session)):
        return target
    if isinstance(target, sessionmaker):
        return target.class_
    if hasattr(target, "session_factory"):  # scoped_session, async_scoped_session
        factory = target.session_factory
        if isinstance(factory, type):
            factory = target.session_factory = target.registry.createfunc = _own(target, factory)
        return resolve_target(factory)
    if isinstance(target, type) and hasattr(target, "sync_session_class"):  # AsyncSession
        target.sync_session_class = subclass = _own(target, target.sync_session_class)
        return subclass
    if hasattr(target, "sync_session"):  # an AsyncSession
        return resolve_target(target.sync_session)
    if hasattr(target, "class_") and hasattr(
        target.class_, "sync_session_class"
    ):  # async_sessionmaker
        subclass = _own(
            target, target.kw.get("sync_session_class") or target.class_.sync_session_class
        )
        target.configure(sync_session_class=subclass)
        return subclass
    raise DeclarationError(
        f"{type(target).__name__} cannot be attached to; pass a Session, a sessionmaker, a "
        "scoped_session with a sessionmaker, or one of their async equivalents"
    )


_own_classes: WeakKeyDictionary[Any, type[Any]] = WeakKeyDictionary()
"""The classes made for what was attached to."""


def _own(target: Any, shared: Any) -> type[Any]:
    """Returns the session class of this target alone: a subclass of ``shared``, made once."""
    if not isinstance(shared, type):
        raise DeclarationError(
            f"sync_session_class is {shared!r}, which is not a class: give a subclass of Session"
        )
    if _own_classes.get(target) is not shared:
        _own_classes[target] = type(shared.__name__, (shared,), {})
    return _own_classes[target]


def _map_rule(rule: StagingRule, mapper: Mapper[Any], pipeline: Declarations) -> MappedRule:
    model = pipeline.find_payload(rule.channel) if isinstance(rule.channel, Queue) else None
    columns, traits = column_names(mapper), rule.channel.traits
    if callable(rule.data):
        names = None
    elif rule.data is None:
        names = tuple(n for n in columns if not is_secret(mapper.column_attrs[n].columns[0]))
    else:
        names = tuple(rule.data)
    key = get_names(rule.key)
    needed = {*(names or ()), *key, *get_names(rule.tenant)}
    readable = {
        attribute.key: attribute for attribute in mapper.column_attrs if not _is_queried(attribute)
    }
    reads = frozenset(needed & readable.keys())
    functions = (rule.data, rule.key, rule.tenant, rule.when, rule.headers)
    is_computed = len(reads) < len(needed) or any(map(callable, functions))
    deferred: frozenset[str] = frozenset()
    if (
        is_computed
    ):  # a function or a property may read any attribute; deferred columns are left for it to load
        deferred = (
            frozenset(name for name, attribute in readable.items() if attribute.deferred) - reads
        )
        reads = frozenset(readable) - deferred
    is_columns = bool(key) and readable.keys() >= set(key)
    key_columns = [readable[name].columns[0] for name in key] if is_columns else []
    return MappedRule(
        rule,
        object_name(rule),
        names,
        reads,
        deferred,
        is_computed,
        derived=_find_derived(mapper),
        # Jobs of a queue are work to be done, and no images of a row.
        follows_key=not traits.has_payloads or (traits.keeps_records and rule.on != {"update"}),
        identity=tuple(mapper.get_property_by_column(column).key for column in mapper.primary_key),
        converters=find_converters(
            {name: readable[name].columns[0].type for name in needed & readable.keys()}
        ),
        has_unique_key=is_unique(mapper, key_columns),
        has_deferred_key=is_unique(mapper, key_columns, is_deferrable=True),
        is_post_updated=any(
            column.table in mapper.tables
            for other in mapper.registry.mappers
            for relationship in other.relationships
            if relationship.post_update
            for _, column in relationship.synchronize_pairs
        ),
        typed=None if model is None else TypedPayload(model),
    )


def _is_queried(attribute: ColumnProperty[Any]) -> bool:
    """Returns whether the attribute is a ``query_expression``, which only a query fills."""
    return ("query_expression", True) in attribute.strategy_key


def _find_derived(mapper: Mapper[Any]) -> Derived:
    composites = [
        (composite.key, frozenset(part.key for part in composite.props))
        for composite in mapper.composites
    ]
    references = [
        (
            relationship.key,
            frozenset(
                a.key
                for a in mapper.column_attrs
                if not relationship.local_columns.isdisjoint(a.columns)
            ),
        )
        for relationship in mapper.relationships
        if relationship.direction is RelationshipDirection.MANYTOONE
    ]
    return composites + references


def _is_null(key: object) -> bool:
    return key is None or (isinstance(key, tuple) and None in key)


def _read_named(names: Named | None, target: object, values: Values) -> object:
    if names is None or callable(names):
        return names and _call(names, target)
    return make_key([_read(target, name, values) for name in get_names(names)])


def _read(target: object, name: str, values: Values) -> object:
    return values[name] if name in values else getattr(target, name)


def _call(function: object, target: object) -> Any:
    call: Callable[[object], Any] = function  # type: ignore[assignment]  # the caller has checked
    return call(target)
