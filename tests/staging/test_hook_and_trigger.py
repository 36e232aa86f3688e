"""A rule of the session and one of a trigger stage the same: keys, actions and payloads, of rows of every kind."""

from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import CHAR, REAL, Computed, DateTime, Engine, FetchedValue, Numeric, String, Uuid, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from fixtures.application import StagedRecords, template_with
from penstock import Log, Pipeline
from penstock.embedded import EmbeddedPostgres
from penstock.schema.capture import install_triggers


class Base(DeclarativeBase):
    """Tables of these tests alone."""


class Item(Base):
    __tablename__ = "items"

    id: Mapped[int] = mapped_column(primary_key=True)
    code: Mapped[str] = mapped_column(CHAR(5))
    short: Mapped[str | None] = mapped_column(String(5).with_variant(CHAR(5), "postgresql"))
    ident: Mapped[str] = mapped_column(Uuid(as_uuid=False))
    slug: Mapped[str] = mapped_column(default="Slug", server_onupdate=FetchedValue())
    price: Mapped[Decimal] = mapped_column(Numeric(9, 2), default=Decimal("1.005"))
    ratio: Mapped[float] = mapped_column(REAL, default=0.1)
    doubled: Mapped[float] = mapped_column(Computed("ratio * 2", persisted=True))
    at: Mapped[datetime] = mapped_column(DateTime(timezone=True), default=datetime(2026, 1, 1, tzinfo=UTC))
    extra: Mapped[Any] = mapped_column(JSONB, default=lambda: {"b": 1e2, "a": [1, 2]})
    stops: Mapped[int] = mapped_column(server_default=text("1"))
    changes: Mapped[int] = mapped_column(server_default=text("0"), onupdate=text("changes + 1"))


NEW: dict[str, dict[str, Any]] = {
    "id": {"id": 2},
    "code": {"code": "cd"},
    "short": {"short": "cd"},
    "ident": {"ident": "B" * 32},
    "slug": {"slug": "Other"},
    "changes": {"price": Decimal(7)},
}
KEYS: dict[str, tuple[str | list[str], str]] = {
    "the primary key": ("id", "id"),
    "char(5)": ("code", "code"),
    "varchar that is a char(5)": ("short", "short"),
    "a UUID as text": ("ident", "ident"),
    "text that a trigger of the application changes": ("slug", "slug"),
    "a column that every update changes": ("changes", "changes"),
    "two columns": (["code", "ident"], "ident"),
    "three columns": (["id", "short", "slug"], "short"),
}


def create_items(engine: Engine) -> None:
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(
            text(
                "CREATE FUNCTION simplify() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.slug := lower(NEW.slug); RETURN NEW; END'"
            )
        )
        connection.execute(
            text("CREATE TRIGGER simplify BEFORE INSERT OR UPDATE ON items FOR EACH ROW EXECUTE FUNCTION simplify()")
        )


@pytest.fixture(scope="session")
def template(postgres: EmbeddedPostgres, _template: str) -> str:
    return template_with(create_items, postgres, _template, "items")


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize(
    "on", [["insert", "update", "delete"], ["update"], ["insert", "update"], ["update", "delete"], ["insert", "delete"]]
)
def test_hook_and_trigger_stage_the_same(
    kind: str, on: list[Any], engine: Engine, database_url: str, staged: StagedRecords
) -> None:
    """Guarantees 41 and 42: whatever the object remembers; also when its key changes."""
    key, changed = KEYS[kind]
    by_hook, by_trigger = Log("by_hook", shards=4), Log("by_trigger", shards=4)
    hooks, triggers = Pipeline([by_hook]), Pipeline([by_trigger])
    hooks.stages(Item, to=by_hook, key=key, on=on)
    triggers.stages(Item, to=by_trigger, key=key, on=on, capture="trigger")
    install_triggers(database_url, triggers)
    sessions = sessionmaker(engine)
    hooks.attach(sessions)

    change(engine, sessions, lambda session: session.add(Item(id=1, code="ab", short="ab", ident="A" * 32)))
    change(engine, sessions, lambda session: set_values(session, price=Decimal(3)), "stops = 9, code = 'x'")
    change(engine, sessions, lambda session: set_values(session, **NEW[changed]), "stops = 10, short = 'y'")
    change(engine, sessions, lambda session: session.delete(get_item(session)), "ratio = 3")

    def read(channel: str) -> list[tuple[Any, ...]]:
        return [(r.action, r.key, r.shard, r.object, r.data) for r in staged() if r.channel == channel]

    assert read("by_hook") == read("by_trigger")
    assert read("by_hook")


def get_item(session: Session) -> Item:
    return session.query(Item).one()


def set_values(session: Session, **values: Any) -> None:
    item = get_item(session)
    for name, value in values.items():
        setattr(item, name, value)


def change(
    engine: Engine, sessions: sessionmaker[Session], work: Callable[[Session], object], elsewhere: str | None = None
) -> None:
    """Works in a session, after another transaction has written what it does not tell of."""
    with sessions() as session:
        if elsewhere is not None:
            get_item(session)
            with engine.begin() as connection:
                connection.execute(text("SET LOCAL session_replication_role = replica"))
                connection.execute(text(f"UPDATE items SET {elsewhere}"))
        work(session)
        session.commit()
