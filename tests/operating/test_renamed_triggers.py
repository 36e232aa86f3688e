"""A channel that is captured by trigger gets another name: each change is staged once, whichever release is deployed."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import redis
from sqlalchemy import Engine, text
from sqlalchemy.orm import Mapped, Session, mapped_column

from fixtures.application import Base
from penstock import Log, Pipeline
from penstock.capture import check_triggers, inspect_triggers, install_triggers
from penstock.database.connections import Connection
from penstock.errors import Refused, TriggerMissing
from penstock.operating.channels import rename_channel
from penstock.operating.resharding import reshard
from penstock.records import Record
from penstock.staging.triggers import make_trigger
from penstock.streaming import Streamer
from penstock.testing import drained


class Bale(Base):
    __tablename__ = "bales"

    id: Mapped[int] = mapped_column(primary_key=True)
    weight: Mapped[int | None]


def declare(name: str, shards: int = 2, **options: Any) -> Pipeline:
    """A pipeline that captures bales by trigger, whose consumer writes down what it receives."""
    log = Log(name, shards=shards)
    pipeline = Pipeline([log])
    pipeline.stages(Bale, to=log, key="id", capture="trigger", **options)

    @pipeline.consumer(reads=log, name="reader")
    def copy(session: Session, records: Sequence[Record]) -> None:
        session.execute(
            text("INSERT INTO received VALUES (:key)"), [{"key": record.key} for record in records]
        )

    return pipeline


Write = Callable[[], None]
Rename = Callable[[str, str], None]


@pytest.fixture
def write(application: Engine) -> Write:
    """Inserts the next bale, from a session that no hook sees."""
    with application.begin() as connection:
        connection.execute(text("CREATE TABLE received (key text)"))
    numbers = iter(range(1, 100))

    def insert() -> None:
        with application.begin() as connection:
            connection.execute(text("INSERT INTO bales VALUES (:id)"), {"id": next(numbers)})

    return insert


@pytest.fixture
def rename(connection: Connection, redis_client: redis.Redis) -> Rename:
    def carry_out(old: str, new: str) -> None:
        rename_channel(connection, redis_client, old, new, apply=True, pause=lambda _: None)

    return carry_out


def received(connection: Connection) -> list[str]:
    return [key for (key,) in connection.execute("SELECT key FROM received ORDER BY key")]


def functions(connection: Connection) -> list[str]:
    rows = connection.execute("SELECT proname FROM pg_proc WHERE proname ~ '^stage_' ORDER BY 1")
    return [name for (name,) in rows]


def own_name(pipeline: Pipeline) -> str:
    return make_trigger(pipeline.rules[0], pipeline.scope.schema).name


def test_a_change_is_staged_once_while_its_channel_is_renamed_and_a_release_deployed(
    write: Write, rename: Rename, connection: Connection, database_url: str, redis_url: str
) -> None:
    """Guarantee 9: new workers start before ``init`` and after it, old ones run on, old applications are started again."""
    old, new = declare("rides"), declare("trips")
    install_triggers(database_url, old)
    with Streamer(old, database_url, redis_url) as streamer:
        write()
        streamer.drain()
        rename("rides", "trips")
        write()

        check_triggers(connection, new)
        assert install_triggers(database_url, new) == []
        write()
        check_triggers(connection, old)
        assert install_triggers(database_url, old) == []
        streamer.drain()
        write()
    drained(new, database_url, redis_url)

    assert received(connection) == ["1", "2", "3", "4"]
    assert inspect_triggers(connection, new) == inspect_triggers(connection, old) == []


def test_a_rule_that_changes_with_the_name_replaces_the_trigger_of_the_former_name(
    write: Write, rename: Rename, connection: Connection, database_url: str, redis_url: str
) -> None:
    """Guarantee 9: an old streamer at work goes on."""
    old, new = declare("rides"), declare("trips", data=["id"])
    install_triggers(database_url, old)
    with Streamer(old, database_url, redis_url) as streamer:
        write()
        streamer.drain()
        rename("rides", "trips")
        with pytest.raises(TriggerMissing, match="not that of its rule"):
            check_triggers(connection, new)
        write()

        assert install_triggers(database_url, new) == ["bales"]

        write()
        streamer.drain()
    drained(new, database_url, redis_url)
    assert received(connection) == ["1", "2", "3"]
    assert functions(connection) == [own_name(new)]
    check_triggers(connection, new)


def test_a_trigger_stays_through_several_renamings_and_back_and_other_shards(
    write: Write, rename: Rename, connection: Connection, database_url: str, redis_url: str
) -> None:
    """Guarantee 9."""
    first = declare("rides")
    install_triggers(database_url, first)
    drained(first, database_url, redis_url)
    releases = [("trips", 2), ("journeys", 2), ("rides", 2), ("trips", 2)]
    name = "rides"
    for successor, shards in releases:
        rename(name, successor)
        name = successor
        release = declare(name, shards)
        write()
        assert install_triggers(database_url, release) == []
        drained(release, database_url, redis_url)
    reshard(connection, "trips", 3, apply=True)
    wider = declare("trips", 3)
    check_triggers(connection, wider)
    check_triggers(connection, declare("trips"))
    check_triggers(connection, first)
    write()
    drained(wider, database_url, redis_url)

    assert received(connection) == ["1", "2", "3", "4", "5"]
    assert functions(connection) == [own_name(first)]


@pytest.fixture
def doubled(
    write: Write, rename: Rename, connection: Connection, database_url: str, redis_url: str
) -> Pipeline:
    """A renamed channel's pipeline, after a migration of the application's own that left the trigger of the old name."""
    old, new = declare("rides"), declare("trips")
    install_triggers(database_url, old)
    drained(old, database_url, redis_url)
    rename("rides", "trips")
    for statement in make_trigger(new.rules[0], new.scope.schema).statements:
        connection.execute(statement.encode())
    return new


def test_two_triggers_of_one_rule_are_refused_with_what_drops_the_former(
    doubled: Pipeline, connection: Connection
) -> None:
    """Guarantee 9: each change would be in the log twice."""
    with pytest.raises(TriggerMissing, match="twice"):
        check_triggers(connection, doubled)
    with pytest.raises(TriggerMissing, match="twice"):
        check_triggers(connection, declare("rides"))
    [fault] = inspect_triggers(connection, doubled)

    connection.execute(fault.fix.encode())

    assert inspect_triggers(connection, doubled) == []
    assert functions(connection) == [own_name(doubled)]


def test_init_drops_the_second_trigger_of_a_rule(
    doubled: Pipeline, write: Write, connection: Connection, database_url: str, redis_url: str
) -> None:
    assert install_triggers(database_url, doubled) == ["bales"]

    write()
    drained(doubled, database_url, redis_url)
    assert received(connection) == ["1"]
    assert functions(connection) == [own_name(doubled)]


def test_a_channel_whose_new_name_has_a_trigger_already_is_not_renamed(
    write: Write, rename: Rename, connection: Connection, database_url: str, redis_url: str
) -> None:
    """Guarantee 9: ``init`` of the new release was run too early."""
    old, new = declare("rides"), declare("trips")
    other = declare("trips", object="trips")  # another rule of the same class
    for release in (old, new, other):
        install_triggers(database_url, release)
    drained(old, database_url, redis_url)
    with pytest.raises(Refused, match="stage each change twice") as refused:
        rename("rides", "trips")
    [drop] = re.findall("DROP FUNCTION .* CASCADE", str(refused.value))

    connection.execute(drop.encode())
    rename("rides", "trips")

    assert functions(connection) == sorted([own_name(old), own_name(other)])
    check_triggers(connection, new)


def test_hooks_that_take_over_from_the_trigger_of_a_former_name_are_told_so(
    rename: Rename, write: Write, connection: Connection, database_url: str, redis_url: str
) -> None:
    old = declare("rides")
    install_triggers(database_url, old)
    drained(old, database_url, redis_url)
    rename("rides", "trips")
    log = Log("trips", shards=2)
    by_hooks = Pipeline([log])
    by_hooks.stages(Bale, to=log, key="id")

    [fault] = inspect_triggers(connection, by_hooks)

    assert "stages again what the session's hooks stage" in fault.message


def test_a_role_that_may_not_see_former_names_installs_no_second_trigger(
    rename: Rename, write: Write, connection: Connection, database_url: str, redis_url: str
) -> None:
    """Guarantee 9: it installs the first without that right."""
    old, new = declare("rides"), declare("trips")
    connection.execute("CREATE ROLE owner_of_bales LOGIN")
    try:
        connection.execute("GRANT USAGE, CREATE ON SCHEMA penstock TO owner_of_bales")
        connection.execute("GRANT INSERT ON penstock.staged_records TO owner_of_bales")
        connection.execute("ALTER TABLE bales OWNER TO owner_of_bales")
        connection.execute("GRANT USAGE ON SCHEMA public TO owner_of_bales")
        as_owner = f"{database_url}&options=-crole%3Downer_of_bales"
        assert install_triggers(as_owner, old) == ["bales"]
        drained(old, database_url, redis_url)
        rename("rides", "trips")

        with pytest.raises(TriggerMissing, match="former_channels"):
            install_triggers(as_owner, new)

        assert functions(connection) == [own_name(old)]
    finally:
        connection.execute("DROP OWNED BY owner_of_bales")
        connection.execute("DROP ROLE owner_of_bales")
