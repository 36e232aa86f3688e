"""Which rules hold for a session, what they mean for a mapped class, and the rows that a change becomes.

A rule is declared for a class and holds for its mapped subclasses.  ``Plan`` is one rule seen from one mapper: which
attributes it reads (so that they can be loaded together), and how an object becomes a row.

A pipeline is attached to a class of sessions, or to one session.  ``sessionmaker`` and its relatives make sessions of a
class of their own; attaching to one means attaching to that class.  A pipeline counts once for a session, by however
many ways it got there.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from sqlalchemy import Column, Table
from sqlalchemy.orm import Mapper, Session, class_mapper, sessionmaker

from penstock.declarations import Change, Channel, Ick, StagingRule
from penstock.errors import DeclarationError
from penstock.staging.rows import Row, row

Known = Mapping[str, object]
"""Values that the database had, where the object in memory has others."""


Target = type[Session] | Session
"""What SQLAlchemy's session events listen to."""


class Declarations(Protocol):
    """What staging needs to know of a pipeline."""

    @property
    def rules(self) -> Sequence[StagingRule]:
        """The staging rules, in the order of their declaration."""

    @property
    def channels(self) -> Mapping[str, Channel]:
        """The channels by name."""

    @property
    def schema(self) -> str:
        """The Penstock schema, which has passed the rule for names."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A rule, as it holds for one mapper.

    Attributes:
        rule: The rule.
        called: What the records call the object.
        names: Attributes that make the payload; None if a function does.
        reads: Column attributes that the rule may read.
    """

    rule: StagingRule
    called: str
    names: tuple[str, ...] | None
    reads: frozenset[str]

    def row(self, change: Change, target: object, known: Known) -> Row | None:
        """The row that tells of the change; None if the rule's condition is false.

        Raises:
            InvalidRecord: The key or the payload is not acceptable.
        """
        rule = self.rule
        if isinstance(rule.channel, Ick):
            return self.member(change, self._key(target, known))
        if callable(rule.when) and not rule.when(target):
            return None
        data: Any
        if self.names is not None:
            data = {
                name: known[name] if name in known else getattr(target, name) for name in self.names
            }
        else:
            data = _called(rule.data, target)
        return row(rule.channel, self._key(target, known), change, self.called, data)

    def member(self, change: Change, key: object) -> Row | None:
        """The row that makes a member of the rule's Ick dirty; None if there is no member.

        Raises:
            InvalidRecord: The member is not acceptable.
        """
        return None if key is None else row(self.rule.channel, key, change, self.called, {})

    def moving(self, mapper: Mapper[Any]) -> str | None:
        """The column attribute whose change turns a member of the rule's Ick into another; None if none can."""
        key = self.rule.key
        is_column = isinstance(key, str) and key in mapper.column_attrs
        return str(key) if is_column and isinstance(self.rule.channel, Ick) else None

    def _key(self, target: object, known: Known) -> object:
        key = self.rule.key
        return _called(key, target) if callable(key) else _value(target, key, known)


def plans(rules: Iterable[StagingRule], mapper: Mapper[Any]) -> tuple[Plan, ...]:
    """The rules that the session's hooks follow for a mapper, in the order of their declaration."""
    return tuple(
        _plan(rule, mapper)
        for rule in rules
        if rule.capture == "orm" and issubclass(mapper.class_, rule.type)
    )


def column_names(mapper: Mapper[Any], *, deferred: bool = True) -> tuple[str, ...]:
    """The attributes that stand for a column of a table, in the mapper's order; computed ones left out."""
    return tuple(
        attribute.key
        for attribute in mapper.column_attrs
        if isinstance(attribute.columns[0], Column) and (deferred or not attribute.deferred)
    )


def null_names(mapper: Mapper[Any]) -> frozenset[str]:
    """The attributes that are NULL in a new row unless they were set: nothing else gives them a value."""
    return frozenset(
        attribute.key
        for attribute in mapper.column_attrs
        if isinstance(column := attribute.columns[0], Column)
        and column.default is None
        and column.server_default is None
        and not column.primary_key
    )


def check_rule(rule: StagingRule) -> None:
    """Looks for what can be found at the declaration, before any object changes.

    Raises:
        DeclarationError: The class is not mapped, or it has no attribute of a name that the rule gives.
    """
    who = f"staging rule of {rule.type.__name__}"
    if not hasattr(
        rule.type, "__mapper__"
    ):  # inspect() would configure mappers whose partners are still to come
        raise DeclarationError(f"{who}: the class is not mapped; map it before it is declared")
    names = [] if rule.data is None or callable(rule.data) else list(rule.data)
    if not callable(rule.key):
        names.append(rule.key)
    for name in names:
        if not hasattr(rule.type, name):
            raise DeclarationError(f"{who}: {rule.type.__name__} has no attribute {name!r}")


def object_name(rule: StagingRule) -> str:
    """What the records of a rule call their object."""
    if rule.object is not None:
        return rule.object
    table = class_mapper(rule.type).local_table
    return table.name if isinstance(table, Table) else rule.type.__name__


class Attachment:
    """A pipeline and what it means for the mappers seen so far.

    Attributes:
        pipeline: The pipeline.
        nudge: Whether a commit wakes the streamer.
    """

    def __init__(self, pipeline: Declarations, *, nudge: bool) -> None:
        self.pipeline = pipeline
        self.nudge = nudge
        self._rules: Sequence[StagingRule] = ()
        self._plans: WeakKeyDictionary[Mapper[Any], tuple[Plan, ...]] = WeakKeyDictionary()

    def new_rules(self) -> Sequence[StagingRule]:
        """The rules that were declared since the last time."""
        rules = tuple(self.pipeline.rules)
        known, self._rules = self._rules, rules
        if len(rules) == len(known):
            return ()
        self._plans = WeakKeyDictionary()
        return rules[len(known) :]

    def plans(self, mapper: Mapper[Any]) -> tuple[Plan, ...]:
        """The rules as they hold for a mapper."""
        found = self._plans.get(mapper)
        if found is None:
            found = self._plans[mapper] = plans(self._rules, mapper)
        return found


_attached: WeakKeyDictionary[Target, list[Attachment]] = WeakKeyDictionary()


def add_attachment(target: Target, pipeline: Declarations, *, nudge: bool) -> bool:
    """Remembers that sessions of ``target`` belong to the pipeline; says whether the target is new to us."""
    is_new = target not in _attached
    known = _attached.setdefault(target, [])
    for attachment in known:
        if attachment.pipeline is pipeline:
            attachment.nudge = attachment.nudge or nudge
            return False
    known.append(Attachment(pipeline, nudge=nudge))
    return is_new


def attachments(session: Session) -> list[Attachment]:
    """The pipelines of a session, each once; what was said nearest to it holds."""
    found: list[Attachment] = []
    targets: tuple[Any, ...] = (session, *type(session).__mro__)
    for target in targets:
        for attachment in _attached.get(target, ()):
            if all(attachment.pipeline is not other.pipeline for other in found):
                found.append(attachment)
    return found


def resolved(target: Any) -> Target:
    """The class, or the session, that stands behind what an application calls its session.

    The async twins are known by what they have, since importing them needs greenlet.

    Raises:
        DeclarationError: It is nothing that makes sessions.
    """
    if isinstance(target, Session) or (isinstance(target, type) and issubclass(target, Session)):
        return target
    if isinstance(target, sessionmaker):
        return target.class_
    if hasattr(target, "session_factory"):  # scoped_session, async_scoped_session
        return resolved(target.session_factory)
    if isinstance(target, type) and hasattr(target, "sync_session_class"):  # AsyncSession
        own = _own_class(target.sync_session_class)
        target.sync_session_class = own
        return own
    if hasattr(target, "sync_session"):  # an AsyncSession
        return resolved(target.sync_session)
    if hasattr(target, "class_") and hasattr(
        target.class_, "sync_session_class"
    ):  # async_sessionmaker
        own = _own_class(target.kw.get("sync_session_class") or target.class_.sync_session_class)
        target.configure(sync_session_class=own)
        return own
    raise DeclarationError(
        f"a pipeline cannot be attached to {type(target).__name__}; it takes a Session, a sessionmaker, a "
        "scoped_session with a sessionmaker, or their async twins"
    )


def _own_class(inside: type[Session]) -> type[Session]:
    """The class of the sessions inside of async ones; not ``Session`` itself, which everyone shares."""
    return type("Session", (Session,), {}) if inside is Session else inside


def _plan(rule: StagingRule, mapper: Mapper[Any]) -> Plan:
    columns = column_names(mapper)
    if callable(rule.data):
        names = None
    elif rule.data is None:
        names = columns
    else:
        names = tuple(rule.data)
    named = {*(names or ()), *(() if callable(rule.key) else (rule.key,))}
    reads = named & set(columns)
    if len(reads) < len(named) or callable(rule.data) or callable(rule.key) or callable(rule.when):
        # A function or a property reads what it likes; deferred columns it has to load by itself.
        reads |= set(column_names(mapper, deferred=False))
    return Plan(rule, object_name(rule), names, frozenset(reads))


def _value(target: object, name: str, known: Known) -> object:
    return known[name] if name in known else getattr(target, name)


def _called(function: object, target: object) -> Any:
    call: Callable[[object], Any] = function  # type: ignore[assignment]  # the caller has looked
    return call(target)
