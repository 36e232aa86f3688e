"""A column of any type of SQLAlchemy is staged at each insert, update and delete, and by trigger as by a session."""

import enum
import ipaddress
import json
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine, text
from sqlalchemy.dialects import postgresql as pg
from sqlalchemy.orm import Session, registry, sessionmaker

from fixtures.application import StagedRecords
from penstock import Log, Pipeline
from penstock.errors import DeclarationError
from penstock.schema.capture import install_triggers


class Mood(enum.Enum):
    good = "good"
    bad = "bad"


class Plain:
    """Makes mapped classes of."""

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value)


class Choice:
    """A value as libraries of types have them: an object with a code."""

    def __init__(self, code: str) -> None:
        self.code = code


class ChoiceType(sa.TypeDecorator[Any]):
    impl = sa.String
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Any) -> Any:  # noqa: ARG002
        return value.code if isinstance(value, Choice) else value

    def process_result_value(self, value: Any, dialect: Any) -> Any:  # noqa: ARG002
        return None if value is None else Choice(value)


class ListType(sa.TypeDecorator[Any]):
    """Objects in a column of JSON."""

    impl = pg.JSONB
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Any) -> Any:  # noqa: ARG002
        return None if value is None else [each.code for each in value]

    def process_result_value(self, value: Any, dialect: Any) -> Any:  # noqa: ARG002
        return None if value is None else [Choice(each) for each in value]


class JsonText(sa.TypeDecorator[Any]):
    """JSON in a column of text."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Any) -> Any:  # noqa: ARG002
        return None if value is None else json.dumps(value)

    def process_result_value(self, value: Any, dialect: Any) -> Any:  # noqa: ARG002
        return None if value is None else json.loads(value)


AT, LATER = datetime(2026, 1, 2, 3, 4, 5, 60000), datetime(2026, 2, 3)  # noqa: DTZ001
ZONED, ZONED_LATER = AT.replace(tzinfo=UTC), LATER.replace(tzinfo=UTC)
HALF, NINE = Decimal("0.50"), Decimal(9)
Span = pg.Range

TYPES: dict[str, tuple[Any, Any, Any]] = {
    "ARRAY": (sa.ARRAY(sa.Integer), [1], [2, None]),
    "BIGINT": (sa.BIGINT(), 2**60, -1),
    "BOOLEAN": (sa.BOOLEAN(), True, False),
    "CHAR": (sa.CHAR(5), "ab", "cd"),
    "DATE": (sa.DATE(), AT.date(), LATER.date()),
    "DECIMAL": (sa.DECIMAL(9, 2), HALF, NINE),
    "DOUBLE": (sa.Double(), 0.1, 1e20),
    "Enum": (sa.Enum("a", "b", name="letters"), "a", "b"),
    "Enum of Python": (sa.Enum(Mood, name="moods"), Mood.good, Mood.bad),
    "FLOAT": (sa.FLOAT(), 0.1, 2.0),
    "Interval": (sa.Interval(), timedelta(days=1, hours=2), timedelta(seconds=-3)),
    "JSON": (sa.JSON(), {"a": 1}, [1, "b"]),
    "NUMERIC": (sa.NUMERIC(), Decimal("1.10"), Decimal("1E+3")),
    "NUMERIC as float": (sa.Numeric(asdecimal=False), 1.5, 2.25),
    "REAL": (sa.REAL(), 0.1, 0.2),
    "SMALLINT": (sa.SMALLINT(), 1, 2),
    "TEXT": (sa.TEXT(), "ä", ""),
    "TIME": (sa.TIME(), time(1, 2, 3), time(4, 5, 6, 700)),
    "TIMESTAMP": (sa.TIMESTAMP(), AT, LATER),
    "TIMESTAMP with time zone": (sa.TIMESTAMP(timezone=True), ZONED, ZONED_LATER),
    "Unicode": (sa.Unicode(), "ä", "ö"),
    "Uuid": (sa.Uuid(), UUID(int=1), UUID(int=2)),
    "Uuid as text": (sa.Uuid(as_uuid=False), str(UUID(int=1)), str(UUID(int=2))),
    "VARCHAR": (sa.VARCHAR(9), "a", "b"),
    "ARRAY of texts": (pg.ARRAY(pg.TEXT), ["a"], [["b"], [None]]),
    "ARRAY of INET": (pg.ARRAY(pg.INET), ["10.0.0.1"], ["10.0.0.2/24", None]),
    "ARRAY of ranges": (pg.ARRAY(pg.INT4RANGE), [Span(1, 2)], [Span(1, 9)]),
    "ARRAY of choices": (pg.ARRAY(ChoiceType), ["a"], ["b", "c"]),
    "BIT": (pg.BIT(4), "0101", "1111"),
    "BIT VARYING": (pg.BIT(9, varying=True), "01", "1"),
    "CIDR": (pg.CIDR(), "10.0.0.0/24", "2001:db8::/32"),
    "DATERANGE": (pg.DATERANGE(), Span(date(2026, 1, 1), date(2026, 2, 1)), Span(date(2026, 1, 1), None)),
    "DATEMULTIRANGE": (pg.DATEMULTIRANGE(), [Span(date(2026, 1, 1), date(2026, 2, 1))], []),
    "DOMAIN": (pg.DOMAIN("positive", pg.INTEGER), 1, 2),
    "ENUM": (pg.ENUM("x", "y", name="signs"), "x", "y"),
    "INET": (pg.INET(), "10.0.0.1", "10.0.0.1/24"),
    "INET of IPv6": (pg.INET(), "::1", "::ffff:10.0.0.1"),
    "INET of an object": (pg.INET(), ipaddress.ip_address("10.0.0.1"), ipaddress.ip_interface("fe80::1/64")),
    "INT4RANGE": (pg.INT4RANGE(), Span(1, 5), Span(None, 7)),
    "INT4MULTIRANGE": (pg.INT4MULTIRANGE(), [Span(1, 5), Span(7, 9)], [Span(1, None)]),
    "INT8RANGE": (pg.INT8RANGE(), Span(1, 2**40), Span(empty=True)),
    "INT8MULTIRANGE": (pg.INT8MULTIRANGE(), [Span(1, 2**40)], [Span(None, None)]),
    "INTERVAL": (pg.INTERVAL(), timedelta(days=1), timedelta(minutes=2)),
    "JSONB": (pg.JSONB(), {"a": [1]}, "text"),
    "JSONPATH": (pg.JSONPATH(), "$.a", "$.b"),
    "MACADDR": (pg.MACADDR(), "08:00:2b:01:02:03", "08:00:2b:01:02:04"),
    "MACADDR8": (pg.MACADDR8(), "08:00:2b:01:02:03:04:05", "08:00:2b:01:02:03:04:06"),
    "MONEY": (pg.MONEY(), "$1.00", "$2,000.00"),
    "NUMRANGE": (pg.NUMRANGE(), Span(HALF, NINE), Span(NINE, None, bounds="()")),
    "NUMMULTIRANGE": (pg.NUMMULTIRANGE(), [Span(HALF, NINE)], [Span(None, HALF)]),
    "OID": (pg.OID(), 1, 2**32 - 1),
    "REGCLASS": (pg.REGCLASS(), "pg_class", "pg_type"),
    "REGCONFIG": (pg.REGCONFIG(), "english", "simple"),
    "TIME with time zone": (pg.TIME(timezone=True), time(1, 2, tzinfo=UTC), time(3, 4, 5, tzinfo=UTC)),
    "TSQUERY": (pg.TSQUERY(), "'a' & 'b'", "'c'"),
    "TSRANGE": (pg.TSRANGE(), Span(AT, LATER), Span(LATER, None, bounds="()")),
    "TSMULTIRANGE": (pg.TSMULTIRANGE(), [Span(AT, LATER)], [Span(None, AT)]),
    "TSTZRANGE": (pg.TSTZRANGE(), Span(ZONED, ZONED_LATER), Span(None, ZONED, bounds="(]")),
    "TSTZMULTIRANGE": (pg.TSTZMULTIRANGE(), [Span(ZONED, ZONED_LATER)], [Span(ZONED, None)]),
    "TSVECTOR": (pg.TSVECTOR(), "'a' 'b'", "'c':1"),
    "a choice": (ChoiceType(), "a", Choice("b")),
    "choices as JSON": (ListType(), [Choice("a")], [Choice("b"), Choice("c")]),
    "JSON as text": (JsonText(), {"a": 1}, [2]),
    "nothing": (pg.INET(), None, None),
}


OWN_ENCODINGS: dict[str, list[Any]] = {
    "JSON as text": [{"a": 1}, [2]],
    "OID": [1, 2**32 - 1],
    "TIME with time zone": ["01:02:00.000000+00:00", "03:04:05.000000+00:00"],
}
"""Where Postgres writes text of its own: an int is a number, a time is ISO 8601, and JSON stays JSON."""


@pytest.fixture(params=TYPES)
def case(request: pytest.FixtureRequest, application: Engine) -> Iterator[tuple[str, Any, Any, Any]]:
    """A mapped class with a column of a type, and two values."""
    kind, first, second = TYPES[request.param]
    mapping = registry()

    @mapping.mapped
    class Thing(Plain):
        __tablename__ = "typed_things"
        id = sa.Column(sa.Integer, primary_key=True)
        value = sa.Column(kind)
        other = sa.Column(sa.Integer)

    mapping.metadata.create_all(application)
    yield request.param, Thing, first, second
    mapping.dispose()


def test_a_column_of_any_type_is_staged_at_each_change_as_postgres_or_a_trigger_writes_it(
    case: tuple[str, Any, Any, Any], application: Engine, database_url: str, staged: StagedRecords
) -> None:
    """Guarantee 41."""
    name, thing, first, second = case
    by_hook, by_trigger = Log("by_hook"), Log("by_trigger")
    hooks, triggers = Pipeline([by_hook]), Pipeline([by_trigger])
    hooks.stages(thing, to=by_hook, key="id")
    has_trigger = can_capture(triggers, thing, by_trigger, database_url)
    sessions = sessionmaker(application)
    hooks.attach(sessions)
    rows: list[Any] = []

    def work(step: Callable[[Session], object]) -> None:
        with sessions.begin() as session:
            step(session)
        with application.connect() as connection:
            connection.execute(text("SET TimeZone = 'UTC'"))
            rows.extend(connection.execute(text("SELECT to_jsonb(value) FROM typed_things")).scalars())

    work(lambda session: session.add(thing(id=1, value=first, other=1)))
    work(lambda session: setattr(session.get(thing, 1), "value", second))
    work(lambda session: setattr(session.get(thing, 1), "other", 2))
    work(lambda session: session.delete(session.get(thing, 1)))

    def read(channel: str) -> list[Any]:
        return [(each.action, each.data) for each in staged() if each.channel == channel]

    staged_values = read("by_hook")
    assert [action for action, _ in staged_values] == ["insert", *["update"] * (1 if second is first else 2), "delete"]
    if has_trigger:
        assert staged_values == read("by_trigger")
    else:
        before, after = OWN_ENCODINGS.get(name) or [*rows[:2], None, None][:2]
        assert [data["value"] for _, data in staged_values] == [before, *[after] * (len(staged_values) - 1)]


def can_capture(pipeline: Pipeline, thing: Any, channel: Log, database_url: str) -> bool:
    """Installs a trigger, unless it could not encode the column's type as the hooks do."""
    try:
        pipeline.stages(thing, to=channel, key="id", capture="trigger")
        install_triggers(database_url, pipeline)
    except DeclarationError:
        return False
    return True


@pytest.mark.parametrize(
    ("kind", "value", "key"),
    [(pg.INET, "::ffff:10.0.0.1", "::ffff:10.0.0.1"), (pg.CIDR, "10.0.0.0/8", "10.0.0.0/8"), (ChoiceType, "a", "a")],
)
def test_a_key_is_written_as_its_column_holds_it(
    kind: Any, value: str, key: str, application: Engine, staged: StagedRecords
) -> None:
    """Guarantee 41: and an update that does not change it is one."""
    mapping = registry()

    @mapping.mapped
    class Keyed(Plain):
        __tablename__ = "keyed_things"
        id = sa.Column(sa.Integer, primary_key=True)
        value = sa.Column(kind)
        other = sa.Column(sa.Integer)

    mapping.metadata.create_all(application)
    pipeline = Pipeline([log := Log("keyed")])
    pipeline.stages(Keyed, to=log, key="value")
    pipeline.attach(sessions := sessionmaker(application))
    with sessions.begin() as session:
        session.add(Keyed(id=1, value=value, other=1))
    with sessions.begin() as session:
        setattr(session.get(Keyed, 1), "other", 2)  # noqa: B010  the class is made here
    mapping.dispose()

    assert [(each.action, each.key) for each in staged()] == [("insert", key), ("update", key)]
