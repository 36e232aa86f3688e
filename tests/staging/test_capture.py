"""Declared triggers are installed, and no worker starts while one is missing or is not that of its rule."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import redis
from sqlalchemy import Engine, ForeignKey, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship
from structlog.testing import capture_logs

from fixtures.application import Base, StagedRecords
from fixtures.constants import SetConstants
from penstock import Ick, Log, Pipeline
from penstock.consuming import make_worker
from penstock.database.connections import Connection
from penstock.database.registry import register_channel
from penstock.database.store import Store
from penstock.errors import DeclarationError, ServerUnavailable, TriggerMissing
from penstock.operating.channels import reshard
from penstock.records import Epoch
from penstock.schema.capture import check_triggers, find_unreadable, inspect_triggers, install_triggers, make_triggers
from penstock.streaming import Publisher, Streamer
from penstock.streaming.retention import StreamerUpkeep


class Parcel(Base):
    __tablename__ = "parcels"

    id: Mapped[int] = mapped_column(primary_key=True)
    depot: Mapped[str | None]
    weight: Mapped[int | None]


class Crate(Base):
    __tablename__ = "crates"
    __table_args__ = {"schema": "archive"}  # noqa: RUF012  SQLAlchemy's way

    id: Mapped[int] = mapped_column(primary_key=True)


def declare(rides: Log, **options: object) -> Pipeline:
    """A pipeline that captures parcels by trigger, with a consumer."""
    pipeline = Pipeline([rides])
    pipeline.stages(Parcel, **{"to": rides, "key": "id", "capture": "trigger", **options})  # type: ignore[arg-type]
    pipeline.consumer(reads=rides, name="reader")(lambda _session, _records: None)
    return pipeline


def insert(application: Engine, number: int) -> None:
    with application.begin() as connection:
        connection.execute(text("INSERT INTO parcels (id) VALUES (:id)"), {"id": number})


def test_installing_makes_the_declared_triggers_capture(
    rides: Log, application: Engine, database_url: str, staged: StagedRecords
) -> None:
    """Guarantee 7."""
    pipeline = declare(rides)
    pipeline.stages(Crate, to=rides, key="id", capture="trigger")

    assert install_triggers(application, pipeline) == ["parcels", "crates"]
    assert install_triggers(database_url, pipeline) == []
    insert(application, 1)

    assert [record.data for record in staged()] == [{"id": 1, "depot": None, "weight": None}]


def test_no_worker_starts_without_its_trigger(
    rides: Log, application: Engine, database_url: str, redis_url: str
) -> None:
    """Guarantee 7: it would run, and lose every change in silence."""
    pipeline = declare(rides)
    consumer = pipeline.get_consumer("reader")
    for worker in (
        Streamer(pipeline, database_url, redis_url),
        make_worker(pipeline, consumer, database_url, redis_url),
    ):
        with pytest.raises(TriggerMissing, match=r"Parcel .* has no trigger .*: penstock init"):
            worker.open()
        worker.close()
    install_triggers(database_url, pipeline)
    with Streamer(pipeline, database_url, redis_url) as streamer:
        assert streamer.drain() == 0
    with make_worker(pipeline, consumer, database_url, redis_url) as reader:
        assert reader.drain() == 0


def test_a_worker_that_reconnects_accepts_the_trigger_of_a_later_release(
    rides: Log, application: Engine, database_url: str, redis_url: str
) -> None:
    """While a deployment goes on, old workers run on: nothing is lost, and the new ones check."""
    old, new = declare(rides), declare(rides, data=["id"])
    install_triggers(database_url, old)
    with (
        Streamer(old, database_url, redis_url) as streamer,
        make_worker(old, old.get_consumer("reader"), database_url, redis_url) as reader,
    ):
        install_triggers(database_url, new)
        for worker in (streamer, reader):
            worker.close()
            worker.open()


def test_uncaptured_changes_are_logged_once_within_a_minute(
    rides: Log, application: Engine, database_url: str, connection: Connection, redis_client: redis.Redis
) -> None:
    """Guarantee 42: DDL does not wait for a restart."""
    pipeline, now = declare(rides), 1000.0
    install_triggers(database_url, pipeline)
    publisher = Publisher(Store(connection), redis_client, epoch=Epoch(1))
    upkeep = StreamerUpkeep(pipeline, clock=lambda: now)

    def look(after_s: float, *, sequences: bool = True) -> list[str]:
        nonlocal now
        now += after_s
        with capture_logs() as logs:
            upkeep.note_faults(Store(connection), publisher, sequences=sequences)
        return [line["reason"] for line in logs if line["event"] == "changes not captured"]

    for _ in range(2):
        connection.execute("ALTER TABLE parcels DISABLE TRIGGER USER")
        assert look(59.9) == look(0.1, sequences=False) == []
        [reason] = look(0)
        assert "is disabled" in reason
        assert look(60) == []
        connection.execute("ALTER TABLE parcels ENABLE TRIGGER USER")
        assert look(60) == []
    connection.execute("ALTER TABLE parcels SET UNLOGGED")
    assert look(60) == [], "its changes are captured; doctor warns"


CHANGES = {
    "other data": {"data": ["id"]},
    "other changes": {"on": ["insert"]},
    "another condition": {"when": "weight > 3"},
    "another key": {"key": "depot"},
    "a composite key": {"key": ["depot", "id"]},
    "headers": {"headers": {"version": 2}},
}


@pytest.mark.parametrize("options", CHANGES.values(), ids=CHANGES.keys())
def test_a_trigger_older_than_its_rule_is_refused_and_replaced(
    options: dict[str, object], rides: Log, application: Engine, database_url: str, connection: Connection
) -> None:
    install_triggers(database_url, declare(rides))
    changed = declare(rides, **options)
    with pytest.raises(TriggerMissing, match="not that of its rule"):
        check_triggers(connection, changed)

    assert install_triggers(database_url, changed) == ["parcels"]

    assert inspect_triggers(connection, changed) == []


REPLACE = 'CREATE OR REPLACE TRIGGER "!{{name}}" AFTER {} ON parcels FOR EACH ROW EXECUTE FUNCTION penstock.{{name}}()'


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ('ALTER TABLE parcels DISABLE TRIGGER "!{name}"', "disabled"),
        ('ALTER TABLE parcels ENABLE REPLICA TRIGGER "!{name}"', "disabled"),
        ("ALTER TABLE parcels DISABLE TRIGGER {name}_truncate", "disabled"),
        ('DROP TRIGGER "!{name}" ON parcels', "has no trigger"),
        ("DROP TRIGGER {name}_truncate ON parcels", "has no trigger"),
        ("DROP FUNCTION penstock.{name}() CASCADE", "has no trigger"),
        (REPLACE.format("INSERT OR UPDATE OF depot OR DELETE"), "disabled or limited"),
        (REPLACE.format("INSERT OR UPDATE"), "not that of its rule"),
        (
            "CREATE OR REPLACE FUNCTION penstock.{name}() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
            "not that of its rule",
        ),
        ("ALTER TABLE parcels RENAME TO boxes; CREATE TABLE parcels (LIKE boxes)", "has no trigger"),
    ],
)
def test_a_trigger_that_was_changed_by_hand_is_found_and_repaired(
    damage: str, reason: str, rides: Log, application: Engine, database_url: str, connection: Connection
) -> None:
    pipeline = declare(rides)
    install_triggers(database_url, pipeline)
    [(name,)] = connection.execute(
        "SELECT proname FROM pg_proc WHERE proname LIKE 'stage\\_%' AND prorettype = 'trigger'::regtype"
    ).fetchall()
    connection.execute(damage.format(name=name).encode())
    with pytest.raises(TriggerMissing, match=reason):
        check_triggers(connection, pipeline)

    assert install_triggers(database_url, pipeline) == ["parcels"]

    check_triggers(connection, pipeline)


def test_a_rule_that_no_longer_stages_deletes_allows_truncate(
    rides: Log, application: Engine, database_url: str, connection: Connection
) -> None:
    install_triggers(database_url, declare(rides))
    narrower = declare(rides, on=["insert", "update"])
    install_triggers(database_url, narrower)

    connection.execute("TRUNCATE parcels")

    assert inspect_triggers(connection, narrower) == []


def test_a_trigger_without_a_rule_is_reported_and_keeps_no_worker_from_starting(
    rides: Log, application: Engine, database_url: str, connection: Connection
) -> None:
    """It may be that of another pipeline in the same schema."""
    install_triggers(database_url, declare(rides))
    other = Pipeline([rides])
    [message] = [fault.message for fault in inspect_triggers(connection, other)]
    check_triggers(connection, other)
    assert "belongs to no rule" in message

    by_hooks = declare(rides, capture="orm")
    [fault] = inspect_triggers(connection, by_hooks)
    assert "stages again what the session's hooks stage" in fault.message
    connection.execute(fault.fix.encode())
    assert inspect_triggers(connection, by_hooks) == []


def test_what_cannot_be_installed_is_named_and_all_else_is_installed(
    rides: Log, application: Engine, database_url: str, connection: Connection
) -> None:
    """A function that reads a column that the table lacks would fail every write of the application."""
    pipeline = declare(rides)
    pipeline.stages(Crate, to=rides, key="id", capture="trigger")
    connection.execute("ALTER TABLE parcels RENAME weight TO grams")
    with pytest.raises(TriggerMissing, match=r"Parcel: table .* has no column weight"):
        install_triggers(database_url, pipeline)
    insert(application, 1)

    connection.execute("DROP TABLE parcels")
    with pytest.raises(TriggerMissing, match=r'"parcels" does not exist.*then: penstock init'):
        install_triggers(database_url, pipeline)
    [fault] = inspect_triggers(connection, pipeline)
    assert "Parcel" in fault.message


def test_a_renamed_column_that_fails_every_write_is_found_without_the_pipeline_too(
    rides: Log, application: Engine, database_url: str, connection: Connection
) -> None:
    install_triggers(database_url, declare(rides))
    assert [*find_unreadable(Store(connection))] == []

    connection.execute("ALTER TABLE parcels RENAME weight TO grams")
    with pytest.raises(DBAPIError, match=r"(?s)are not those that the staging rule reads.*then: penstock init"):
        insert(application, 1)

    [fault] = find_unreadable(Store(connection))
    assert "has no column weight, which its trigger reads: writes fail" in fault.message
    assert "penstock init" in fault.fix


@pytest.mark.parametrize("when", ["mass > 1", "weight > 1 AND", "depot", "my_function(depot)"])
def test_a_condition_that_would_fail_every_write_is_refused(
    when: str, rides: Log, application: Engine, database_url: str, connection: Connection
) -> None:
    """The trigger calls functions of ``pg_catalog`` only, unless the condition names their schema."""
    connection.execute("CREATE FUNCTION my_function(text) RETURNS boolean RETURN true")
    with pytest.raises(TriggerMissing, match="Parcel"):
        install_triggers(database_url, declare(rides, when=when))

    insert(application, 1)


def test_a_role_that_does_not_own_the_table_gets_one_line(
    rides: Log, application: Engine, database_url: str, connection: Connection
) -> None:
    connection.execute("CREATE ROLE stranger LOGIN")
    connection.execute("GRANT USAGE, CREATE ON SCHEMA penstock TO stranger")
    try:
        with pytest.raises(TriggerMissing, match="permission denied for table parcels"):
            install_triggers(f"{database_url}&options=-crole%3Dstranger", declare(rides))
    finally:
        connection.execute("DROP OWNED BY stranger")
        connection.execute("DROP ROLE stranger")


def test_a_table_in_use_is_not_queued_for_long(
    rides: Log, application: Engine, database_url: str, connection: Connection, set_constants: SetConstants
) -> None:
    """While a CREATE TRIGGER waits for a long transaction, every writer would wait behind it."""
    set_constants("schema.capture", LOCK_TIMEOUT_S=0.1)
    with connection.transaction():
        connection.execute("INSERT INTO parcels (id) VALUES (1)")
        with pytest.raises(ServerUnavailable, match=r"trigger of parcels.*LockNotAvailable"):
            install_triggers(database_url, declare(rides))


def test_two_processes_may_install_at_once(
    rides: Log, application: Engine, database_url: str, connection: Connection
) -> None:
    pipelines = [declare(rides, headers={"version": number % 2}) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda each: install_triggers(database_url, each), pipelines))


def test_text_that_ends_the_functions_body_is_refused(rides: Log, database_url: str) -> None:
    """Guarantee 31."""
    pipeline = declare(rides, headers={"x": "$penstock$; DROP TABLE parcels; --"})
    with pytest.raises(DeclarationError, match=r"contains \$penstock\$"):
        install_triggers(database_url, pipeline)


def test_a_table_whose_name_ends_the_functions_body_is_refused(rides: Log) -> None:
    """Guarantee 31."""

    class Own(DeclarativeBase):
        pass

    class Odd(Own):
        __tablename__ = "odd$penstock$"
        id: Mapped[int] = mapped_column(primary_key=True)

    pipeline = Pipeline([rides])
    pipeline.stages(Odd, to=rides, key="id", capture="trigger")

    with pytest.raises(DeclarationError, match=r"contains \$penstock\$"):
        make_triggers(pipeline)


class Apart(DeclarativeBase):
    """A registry whose classes refer to one that is never defined."""


class Early(Apart):
    __tablename__ = "early"

    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    late_id: Mapped[int] = mapped_column(ForeignKey("late.id"))
    late: Mapped["Late"] = relationship()  # type: ignore[name-defined]  # noqa: F821


def test_a_rule_is_checked_before_the_mappers_can_be_configured(rides: Log) -> None:
    pipeline = Pipeline([rides])
    pipeline.stages(Early, to=rides, key="id", capture="trigger")
    with pytest.raises(DeclarationError, match="another rule stages early to channel rides"):
        pipeline.stages(Early, to=rides, key="id", capture="trigger")
    pipeline.stages(Early, to=rides, key="id", capture="trigger", object="other")
    with pytest.raises(DeclarationError, match="late is not a column"):
        pipeline.stages(Early, to=rides, key="id", data=["late"], capture="trigger", object="third")


def test_a_subclass_defined_after_the_rule_is_refused_when_it_is_installed(rides: Log, database_url: str) -> None:
    class Own(DeclarativeBase):
        pass

    class Animal(Own):
        __tablename__ = "early_animals"
        id: Mapped[int] = mapped_column(primary_key=True)

    index = Ick("index")
    pipeline = Pipeline([rides, index])
    pipeline.marks_dirty(Animal, to=index, key="id", capture="trigger")

    class Cat(Animal):
        pass

    with pytest.raises(DeclarationError, match="inheritance"):
        install_triggers(database_url, pipeline)


def test_a_trigger_stays_while_the_number_of_shards_is_changed(
    rides: Log, application: Engine, database_url: str, connection: Connection
) -> None:
    """It stages another shard than is declared, which no longer matters then."""
    pipeline, wider = declare(rides), declare(replace(rides, shards=6))
    install_triggers(database_url, pipeline)
    register_channel(Store(connection, pipeline.scope), rides)
    with pytest.raises(TriggerMissing, match="not that of its rule"):
        check_triggers(connection, wider)

    reshard(Store(connection), "rides", 6, apply=True)

    check_triggers(connection, wider)
    check_triggers(connection, pipeline)
