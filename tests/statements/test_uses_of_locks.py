"""Every use of a lock: what takes it waits for another session, and then goes by what that one has committed."""

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import redis
from alembic.config import Config
from alembic.operations import Operations
from alembic.runtime.environment import EnvironmentContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker
from starlette.testclient import TestClient

from fixtures.clients import RedisClient, connect_redis
from fixtures.locking import HoldingSession, holding
from fixtures.postgres import engine_url
from fixtures.sources import Regions
from penstock import Log, Pipeline
from penstock.channels.routing import log_keys
from penstock.consuming.letter_retry import DeadLetterRow
from penstock.database.connections import Connection, TableConnection, WorkerConnection, connect_postgres
from penstock.database.registry import register_channel, register_consumer
from penstock.database.statements import statements
from penstock.database.store import Store
from penstock.demo import api
from penstock.demo import rides as demo
from penstock.errors import BarrierMissed, Gap, PenstockError, Refused
from penstock.operating import channels, consumers, letters
from penstock.operating.replay import ReplayRequest, replay
from penstock.operating.reset.checkpoint import reset_checkpoint
from penstock.operating.reset.epoch import reset_epoch
from penstock.reconciling.cut import cut
from penstock.reconciling.inline_comparer import InlineComparer
from penstock.reconciling.reconciliation import RemainingKeys, reconcile
from penstock.records import DEFAULT_SCOPE, Offset, Record, Shard, ShardName
from penstock.schema import migrations
from penstock.schema.capture import install_triggers
from penstock.schema.initialise import alembic_config, initialise
from penstock.schema.role_plan import make_roles
from penstock.spark.sources.batch_content import BatchContent
from penstock.spark.sources.exactly_once import DueBatch, claim, create_table
from penstock.spark.sources.source_options import Options
from penstock.spark.sources.stream_position import RegisteredPosition
from penstock.streaming.retention import retain
from penstock.streaming.sequencer import tick, tick_within
from penstock.streaming.troubles import TroubleWatch
from statements.test_statements import SOURCE, constant, numbered
from statements.test_statements_that_lock import (
    ADVISORY_LOCKS,
    LOCKING,
    ROW_LOCKS,
    TABLE_LOCKS,
    find_functions,
    find_named,
    locks_in,
)

LOCK_NAMES = {name for name in (*ROW_LOCKS, *TABLE_LOCKS, *ADVISORY_LOCKS) if name in statements("penstock")}
MENTIONING = re.compile(rf'"({"|".join(LOCK_NAMES)})"|\block_\w+\(')


class Scene:
    """Ten records in each shard of ``things``, two a row of the journal, and a consumer of it that has applied nothing."""

    def __init__(self, connection: Connection, client: RedisClient, urls: tuple[str, str]) -> None:
        self.connection, self.client, self.urls = connection, client, urls
        self.things = Log("things", shards=2, keep=timedelta(0))
        self.flow = Pipeline([self.things, Log("copies", shards=1)])
        self.flow.consumer(reads=self.things, name="reader")(self.handle)

    @staticmethod
    def handle(_session: Session, _records: Sequence[Record]) -> None: ...

    def stage(self) -> None:
        self.connection.execute(
            "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
            "SELECT 'things', i % 2, 'k' || i, 'a', 'o', '{}' FROM generate_series(1, 4) i"
        )

    def begin(self) -> None:
        with self.connect() as connection:
            for channel in self.flow.channels.values():
                register_channel(Store(connection), channel)
            register_consumer(Store(connection), self.flow.get_consumer("reader"))
            for _ in range(5):
                self.stage()
                tick(Store(connection))

    def connect(self) -> WorkerConnection:
        return connect_postgres(self.urls[0], application="test")

    def execute(self, statements: str) -> None:
        self.connection.execute(statements.encode())

    def letters(self) -> list[DeadLetterRow]:
        return letters.of_consumer(Store(self.connection), "reader")

    @contextmanager
    def engine(self) -> Iterator[Engine]:
        engine = create_engine(engine_url(self.urls[0]), connect_args={"options": "-c lock_timeout=5s"})
        try:
            yield engine
        finally:
            engine.dispose()

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return self.connection.execute(query.encode()).fetchall()


@pytest.fixture
def holder(database_url: str) -> Iterator[HoldingSession]:
    with holding(database_url) as made:
        yield made


@pytest.fixture
def scene(connection: Connection, redis_client: redis.Redis, database_url: str, redis_url: str) -> Iterator[Scene]:
    with connect_redis(redis_url) as client:
        made = Scene(connection, client, (database_url, redis_url))
        made.begin()
        yield made


CHANNEL = "SELECT FROM penstock.channels WHERE channel = 'things' FOR KEY SHARE"
CHECKPOINTS = "SELECT FROM penstock.checkpoints WHERE consumer = 'reader' FOR KEY SHARE"
MIGRATIONS = find_named("lock_migrations").decode()
AT_THE_END = 'UPDATE penstock.checkpoints SET "offset" = 10'
RETAIN = "DELETE FROM penstock.journal WHERE first_offset < 5"
"""As retention does once all consumers have passed two rows of the journal."""
REGISTER = """
INSERT INTO penstock.checkpoints (consumer, channel, shard, "offset", epoch)
SELECT 'late', 'things', shard, 0, 1 FROM generate_series(0, 1) shard
"""
LETTER = """
INSERT INTO penstock.dead_letters
    (consumer, channel, shard, "offset", record_id, key, action, object, data, staged_at, reason, attempts, later_offset)
VALUES ('reader', 'things', 0, 1, 1, 'k2', 'a', 'o', '{}', now(), 'why', 1, 0)
"""
TABLES = """
CREATE TABLE public.canon (id int PRIMARY KEY, value int);
CREATE TABLE public.state (id int PRIMARY KEY, value int GENERATED ALWAYS AS IDENTITY);
INSERT INTO public.canon VALUES (1, 10);
INSERT INTO public.state VALUES (1), (4);
"""
RUNS = """
INSERT INTO penstock.reconciliations (name, consumer, intent, engine, remaining)
VALUES ('values', 'reader', 'repair', 'inline', ARRAY['{"id": 1}']), ('values', 'reader', 'repair', 'inline', NULL)
"""


@dataclass(frozen=True)
class Use:
    """A use of a lock: what has to wait, for what, and what has changed when it goes on."""

    hold: str
    act: Callable[[Scene], Any]
    prepare: str | Callable[[Scene], object] = "SELECT"
    meanwhile: str | Callable[[Any], object] = "SELECT"
    check: Callable[[Scene, Any], object] = lambda _scene, result: not isinstance(result, Exception)


def connected(act: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[Scene], Any]:
    """Calls a function with a store."""

    def run(scene: Scene) -> Any:
        with scene.connect() as connection:
            return act(Store(connection), *arguments, **options)

    return run


def register_late(scene: Scene) -> None:
    scene.flow.consumer(reads=scene.things, name="late")(scene.handle)
    connected(register_consumer, scene.flow.get_consumer("late"))(scene)


def remove_and_reshard(session: Any) -> None:
    session.execute(RETAIN)
    channels.reshard(Store(session), "things", 3, apply=True)


def retain_things(scene: Scene) -> int:
    tails = dict.fromkeys(scene.things.shard_names, Offset(10))
    return int(connected(retain, scene.client, scene.things, tails)(scene).records)


def begin_replay(scene: Scene) -> None:
    def interrupt(_: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        connected(replay, ReplayRequest("things", "copies"), apply=True, on_batch=interrupt)(scene)


def retire_things(scene: Scene) -> Any:
    act = connected(channels.retire_channel, scene.client, "things", apply=True, pause=lambda _: None)
    return act(scene)


def lose_epoch(scene: Scene) -> None:
    for shard in scene.things.shard_names:
        scene.client.set(log_keys("penstock", shard).epoch, 2)


def cut_offsets(scene: Scene) -> list[int]:
    with cut(scene.connect, DEFAULT_SCOPE) as at:
        return [*at.offsets.values()]


def declare_state(scene: Scene) -> Any:
    if "values" not in scene.flow.reconciliations:
        reader = scene.flow.get_consumer("reader").handler
        scene.flow.reconciliation(of=reader, state="public.state", key="id", name="values")(
            lambda _: "SELECT * FROM public.canon"
        )
    return scene.flow.get_reconciliation("values")


def reconciling(intent: Any) -> Callable[[Scene], Any]:
    def run(scene: Scene) -> Any:
        return reconcile(
            scene.connect, DEFAULT_SCOPE, declare_state(scene), InlineComparer(scene.urls[0]), intent=intent
        )

    return run


def prepare_state(scene: Scene) -> None:
    scene.execute(TABLES)
    scene.execute(AT_THE_END)


def take_over(scene: Scene) -> Any:
    return RemainingKeys(scene.connect, DEFAULT_SCOPE, 2).take_over(declare_state(scene), "inline")


def follow_position(scene: Scene) -> None:
    options = {"channel": "things", "databaseUrl": scene.urls[0], "shards": "2", "consumer": "archive"}
    position = RegisteredPosition(Options.parse("penstock.log", options, streaming=True))
    position.follow({ShardName("things", Shard(0)): Offset(0)})


def claiming(batch: int) -> Callable[[Scene], Any]:
    due = DueBatch("once", "fares", "q", batch, BatchContent(f"{batch}"))

    def run(scene: Scene) -> bool:
        with connect_postgres(scene.urls[0], application="test", kind=TableConnection) as connection:
            create_table(connection, "batches")
            return claim(connection, "batches", due)

    return run


class Base(DeclarativeBase):
    pass


class Parcel(Base):
    __tablename__ = "parcels"

    id: Mapped[int] = mapped_column(primary_key=True)
    depot: Mapped[str]


PARCELS = "CREATE TABLE parcels (id int, depot text); INSERT INTO parcels VALUES (3, 'n'), (2, 'n'), (1, 'n')"
"""Without an index that has them in an order."""


def install_trigger(scene: Scene) -> None:
    scene.flow.stages(Parcel, to=scene.things, key="id", capture="trigger")
    install_triggers(scene.urls[0], scene.flow)


def change_parcels(count: int, *, delete: bool) -> Callable[[Scene], None]:
    """By a session with hooks, which reads what it is about to change."""

    def run(scene: Scene) -> None:
        scene.flow.stages(Parcel, to=scene.things, key="depot", capture="orm")
        with scene.engine() as engine:
            maker = sessionmaker(engine)
            scene.flow.attach(maker)
            with maker.begin() as session:
                for parcel in [session.get_one(Parcel, number) for number in range(1, count + 1)]:
                    if delete:
                        session.delete(parcel)
                    parcel.depot = "s"

    return run


def upgrade_beside_others(scene: Scene) -> None:
    """As a migration of an application's own Alembic does."""
    with alembic_config("penstock") as config, scene.engine() as engine, engine.begin() as connection:
        environment = EnvironmentContext(Config(), ScriptDirectory.from_config(config))
        with environment:
            environment.configure(connection=connection)
            with Operations.context(environment.get_context()):
                migrations.upgrade("penstock_0001")


def prepare_ride(scene: Scene) -> None:
    scene.execute(f"CREATE SCHEMA {demo.SCHEMA}")
    with scene.engine() as engine:
        demo.Base.metadata.create_all(engine)
    scene.execute(f"INSERT INTO {demo.SCHEMA}.rides VALUES (1, 5, 'booked')")


def correct_ride(scene: Scene) -> object:
    with scene.engine() as engine:
        return TestClient(api.application(engine)).patch("/rides/1", json={"distance": 2}).status_code


def read_offsets(consumer: str) -> Callable[[Scene, Any], list[tuple[Any, ...]]]:
    query = f"SELECT shard, \"offset\" FROM penstock.checkpoints WHERE consumer = '{consumer}' ORDER BY 1"
    return lambda scene, _: scene.rows(query)


HOLDING_STATE = "SELECT FROM public.state WHERE id = {} FOR KEY SHARE"

USES: dict[str, list[Use]] = {
    "database/registry.py:register_consumer lock_channel": [
        Use(
            CHANNEL,
            register_late,
            meanwhile=remove_and_reshard,
            check=lambda scene, _: read_offsets("late")(scene, _) == [(0, 4), (1, 4), (2, 0), (3, 0), (4, 0)],
        )
    ],
    "streaming/retention.py:_remove_passed lock_channel": [
        Use(CHANNEL, retain_things, AT_THE_END, REGISTER, lambda _, removed: removed == 0)
    ],
    "spark/sources/stream_position.py:RegisteredPosition._register lock_channel": [
        Use(CHANNEL, follow_position, check=lambda scene, _: read_offsets("spark:archive")(scene, _) == [(0, 0)])
    ],
    "operating/replay.py:_ReplayRun.begin lock_channel": [
        Use(
            CHANNEL,
            connected(replay, ReplayRequest("things", "copies"), apply=True),
            meanwhile=RETAIN,
            check=lambda scene, _: scene.rows("SELECT firsts FROM penstock.replays") == [([5, 5],)],
        )
    ],
    "operating/replay.py:_ReplayRun._stage_batch lock_progress": [
        Use(
            "SELECT FROM penstock.checkpoints WHERE consumer = 'replay-1' AND shard = 1 FOR KEY SHARE",
            connected(replay, ReplayRequest("things", "copies"), apply=True),
            begin_replay,
            AT_THE_END,
            lambda scene, _: (
                scene.rows("SELECT count(*) FROM penstock.staged_records WHERE channel = 'copies'") == [(10,)]
            ),
        )
    ],
    "operating/consumers.py:lock_consumer lock_channel": [
        Use(
            CHANNEL,
            connected(reset_checkpoint, "reader", "earliest", apply=True),
            meanwhile=RETAIN,
            check=lambda _, moves: [each.after for each in moves] == [4, 4],
        )
    ],
    "operating/consumers.py:lock_consumer lock_checkpoints": [
        Use(CHECKPOINTS, connected(consumers.retire, "reader", apply=True))
    ],
    "operating/reset/checkpoint.py:reset_checkpoint lock_consumer": [
        Use(
            CHECKPOINTS,
            connected(reset_checkpoint, "reader", "earliest", apply=True),
            meanwhile=AT_THE_END,
            check=lambda _, moves: [each.before for each in moves] == [10, 10],
        )
    ],
    "operating/consumers.py:retire lock_consumer": [Use(CHANNEL, connected(consumers.retire, "reader", apply=True))],
    "operating/consumers.py:rename lock_consumer": [
        Use(lock, connected(consumers.rename, "reader", "late", apply=True)) for lock in (CHANNEL, CHECKPOINTS)
    ],
    "operating/consumers.py:rename lock_checkpoints": [
        Use(
            "SELECT FROM penstock.checkpoints WHERE consumer = 'late' FOR KEY SHARE",
            connected(consumers.rename, "reader", "late", apply=True),
            REGISTER,
            "UPDATE penstock.checkpoints SET applied = 1 WHERE consumer = 'late'",
            lambda _, error: isinstance(error, Refused),
        )
    ],
    "operating/channels.py:reshard lock_channel": [
        Use(
            CHANNEL,
            connected(channels.reshard, "things", 3, apply=True),
            meanwhile=REGISTER,
            check=lambda scene, _: len(read_offsets("late")(scene, _)) == 5,
        )
    ],
    "operating/channels.py:changing lock_registry": [
        Use(
            "LOCK TABLE penstock.channels IN ROW EXCLUSIVE MODE",
            retire_things,
            AT_THE_END,
            REGISTER,
            lambda _, error: isinstance(error, Refused),
        )
    ],
    "operating/channels.py:changing lock_channel": [
        Use(CHANNEL, retire_things, AT_THE_END, RETAIN, lambda _, plan: plan.records == 12)
    ],
    "operating/channels.py:changing lock_ticks": [
        Use(
            "LOCK TABLE penstock.ticks IN ROW EXCLUSIVE MODE",
            retire_things,
            AT_THE_END,
            "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) VALUES ('things', 0, 'k', 'a', 'o', '{}')",
            lambda _, error: isinstance(error, Refused),
        )
    ],
    "operating/letters.py:drop lock_shard": [
        Use(
            CHECKPOINTS,
            lambda scene: connected(letters.drop, scene.letters())(scene),
            LETTER,
            check=lambda _, n: n == 1,
        )
    ],
    "consuming/letter_retry.py:LetterTrial._plan lock_dead_letter": [
        Use(
            "SELECT FROM penstock.dead_letters FOR KEY SHARE",
            lambda scene: [each.outcome for each in letters.retry(scene.flow, scene.letters(), scene.urls[0])],
            LETTER,
            "DELETE FROM penstock.dead_letters",
            lambda _, outcomes: outcomes == ["gone"],
        )
    ],
    "operating/reset/epoch.py:_Opening._lock lock_pipeline": [
        Use(
            "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) VALUES ('things', 0, 'k', 'a', 'o', '{}')",
            lambda scene: connected(lambda store: reset_epoch(store.connection, scene.client, scene.flow, apply=True))(
                scene
            ),
            lose_epoch,
            check=lambda _, plan: plan.unsequenced == {"things/0": 1},
        )
    ],
    "reconciling/cut.py:cut hold_sequencers": [
        Use(
            "LOCK TABLE penstock.ticks IN ROW EXCLUSIVE MODE",
            cut_offsets,
            Scene.stage,
            lambda session: tick_within(Store(session)),
            lambda _, offsets: offsets == [12, 12],
        )
    ],
    "reconciling/reconciliation.py:RemainingKeys.take_over take_over_remaining": [
        Use(
            "SELECT FROM penstock.reconciliations FOR KEY SHARE",
            take_over,
            RUNS,
            "UPDATE penstock.reconciliations SET remaining = NULL",
            lambda _, found: found is None,
        )
    ],
    "reconciling/state_repair.py:replace_state lock_channel": [
        Use(
            CHANNEL,
            reconciling("replace"),
            prepare_state,
            "DELETE FROM penstock.journal WHERE shard = 0;"
            "INSERT INTO penstock.journal (channel, shard, first_offset, last_offset, record_ids, epoch) VALUES ('things', 0, 12, 12, '{1}', 1)",
            lambda _, error: isinstance(error, Gap),
        )
    ],
    "reconciling/state_repair.py:replace_state lock_positions": [
        Use(CHECKPOINTS, reconciling("replace"), prepare_state, check=lambda _, done: done.repaired == 1)
    ],
    "reconciling/state_repair.py:repair_rows lock_positions": [
        Use(
            CHECKPOINTS,
            reconciling("repair"),
            prepare_state,
            'UPDATE penstock.checkpoints SET "offset" = 9',
            lambda _, error: isinstance(error, BarrierMissed),
        )
    ],
    "reconciling/state_repair.py:_State.lock_positions lock_positions": [],  # tried with the two above
    "reconciling/state_table.py:StateTable.find_surplus": [
        Use(HOLDING_STATE.format(4), reconciling("repair"), prepare_state, check=lambda _, done: done.repaired == 2),
        Use(HOLDING_STATE.format(4), reconciling("replace"), prepare_state, check=lambda _, done: done.repaired == 1),
    ],
    "reconciling/state_table.py:StateTable._move": [Use(HOLDING_STATE.format(1), reconciling("repair"), prepare_state)],
    "schema/initialise.py:lock_migrations lock_migrations": [],  # tried with the next one
    "schema/initialise.py:_migrate lock_migrations": [
        Use(MIGRATIONS, lambda scene: initialise(scene.urls[0]), check=lambda _, before: before == "penstock_0001")
    ],
    "schema/migrations.py:_read_revision lock_migrations": [Use(MIGRATIONS, upgrade_beside_others)],
    "schema/role_plan.py:make_roles lock_migrations": [
        Use(MIGRATIONS, connected(lambda store: make_roles(store.connection, "penstock", "penstock")))
    ],
    "schema/capture.py:_install lock_migrations": [Use(MIGRATIONS, install_trigger, PARCELS)],
    "spark/sources/exactly_once.py:claim": [
        Use("SELECT FROM batches FOR KEY SHARE", claiming(1), claiming(0), check=lambda _, is_due: is_due)
    ],
    "staging/stored_rows.py:_make_statement": [
        Use(f"SELECT FROM parcels WHERE id = {count} FOR {mode}", change_parcels(count, delete=delete), PARCELS)
        for delete, mode in ((True, "KEY SHARE"), (False, "SHARE"))
        for count in (1, 2)
    ],
    "demo/api.py:_ride": [
        # What is staged afterwards has no table here.
        Use(f"SELECT FROM {demo.SCHEMA}.rides FOR KEY SHARE", correct_ride, prepare_ride, check=lambda *_: True)
    ],
}
"""Each by its function and the lock that it names, if that has a name."""

ELSEWHERE = {
    "consuming/several/source_link.py:SourceLink._register lock_channel",
    "operating/reset/source_history.py:reset_source lock_checkpoints",
    "streaming/troubles.py:TroubleWatch.look lock_troubles",
}
"""Tried by tests of their own, below."""

SKIPPING = {
    "consuming/checkpoints.py:Checkpoints.lock take_checkpoints",
    "consuming/checkpoints.py:Checkpoints.halt_failing halt_failing",
    "consuming/letter_retry.py:RequestedRetries._take take_requested_retries",
    "streaming/scheduler.py:Scheduler._stage take_schedule",
    "streaming/scheduler.py:JobGroups._end end_groups",
}
"""Statements that do more than to lock, and wait for nobody."""


def find_uses() -> Iterator[str]:
    functions = [
        (f"{path.relative_to(SOURCE).as_posix()}:{name}", function)
        for path in SOURCE.rglob("*.py")
        if MENTIONING.search(text := path.read_text()) or LOCKING.search(text)
        for name, function in find_functions(path)
    ]
    helpers = {name for place, _ in functions if (name := re.split("[.:]", place)[-1]).startswith("lock_")} - {
        "lock_name"
    }
    for place, function in functions:
        for node in ast.walk(function):
            names: list[str] = []
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                names = [called] if called in helpers else [constant(each) for each in node.args]
            elif isinstance(node, ast.Subscript):
                names = [constant(node.slice)]
            yield from (f"{place} {name}" for name in names if name in LOCK_NAMES | helpers)
        if locks_in(function):
            yield place


def test_every_use_of_a_lock_is_listed() -> None:
    assert {*find_uses()} == {*USES, *ELSEWHERE, *SKIPPING}


def is_lock(statement: str, name: str) -> bool:
    """True if a session waits in the lock itself, and not in what follows it."""
    if name in LOCK_NAMES:
        text = numbered(find_named(name).decode())
        return statement.split() == text[:1000].split() or statement[:500] == text[:500]
    return LOCKING.search(statement) is not None


@pytest.mark.parametrize(
    ("place", "use"), [pytest.param(place, use, id=place) for place, uses in USES.items() for use in uses]
)
def test_what_uses_a_lock_waits_for_it_and_goes_by_what_it_finds_then(
    place: str, use: Use, scene: Scene, holder: HoldingSession
) -> None:
    """Guarantees 4 and 9: retention removes nothing that somebody begins with, and no tick adds to what was removed."""
    if callable(use.prepare):
        use.prepare(scene)
    else:
        scene.execute(use.prepare)
    holder.session.execute(use.hold.encode())

    def change(_: int, statement: str) -> None:
        assert is_lock(statement, place.rpartition(" ")[2]), statement
        if callable(use.meanwhile):
            use.meanwhile(holder.session)
        else:
            holder.session.execute(use.meanwhile.encode())

    def act() -> Any:
        try:
            return use.act(scene)
        except PenstockError as error:
            return error

    result = holder.hold_up(act, change)

    assert use.check(scene, result), result


def test_what_a_flush_deletes_is_locked_in_the_order_of_its_keys(scene: Scene, holder: HoldingSession) -> None:
    scene.execute(PARCELS)
    holder.session.execute("SELECT FROM parcels WHERE id = 2 FOR KEY SHARE")
    free: list[Any] = []

    holder.hold_up(
        lambda: change_parcels(3, delete=True)(scene),
        lambda *_: free.extend(scene.rows("SELECT id FROM parcels FOR KEY SHARE SKIP LOCKED")),
    )

    assert free == [(3,), (2,)]


def test_an_update_of_a_key_waits_for_nobody_who_only_refers_to_the_row(scene: Scene, holder: HoldingSession) -> None:
    """As a foreign key does."""
    scene.execute(PARCELS)
    holder.session.execute("SELECT FROM parcels FOR KEY SHARE")

    change_parcels(3, delete=False)(scene)

    assert scene.rows("SELECT DISTINCT depot FROM parcels") == [("s",)]


def test_one_process_at_a_time_reports_troubles(scene: Scene, holder: HoldingSession) -> None:
    reports: list[Any] = []
    scene.execute("UPDATE penstock.checkpoints SET halted = 'why'")
    watch = TroubleWatch([reports.append], scene.urls[0], DEFAULT_SCOPE)
    holder.session.execute(find_named("lock_troubles"))

    assert (watch.look(), reports) == (0, [])
    holder.session.rollback()
    assert watch.look() > 0
    assert len(reports) == 2


def test_a_consumer_of_several_sources_waits_for_a_change_of_a_sources_shards(regions: Regions) -> None:
    """It would not follow it, and retention would not wait for it in the new ones."""
    regions.eu.stream()
    regions.us.stream()
    channel = regions.eu.channel.name
    with holding(regions.eu.url) as holder:
        holder.session.execute("SELECT FROM penstock.channels FOR KEY SHARE")

        def register() -> Any:
            try:
                regions.drain()
            except PenstockError as error:
                return error

        found = holder.hold_up(register, lambda *_: channels.reshard(Store(holder.session), channel, 3, apply=True))

    assert "the number of shards of things@eu was changed" in str(found)
    assert regions.eu.rows("SELECT FROM penstock.checkpoints") == []


def test_a_source_is_accepted_once_the_workers_of_its_consumer_have_ended(regions: Regions) -> None:
    regions.eu.stage(4, "k")
    for source in (regions.eu, regions.us):
        source.stream()
    regions.drain()
    with holding(regions.database_url) as holder:
        holder.session.execute("SELECT FROM penstock.checkpoints FOR KEY SHARE")
        accepted = holder.hold_up(
            lambda: regions.accept("eu", apply=True),
            lambda *_: holder.session.execute('UPDATE penstock.checkpoints SET "offset" = 0'),
        )

    assert {each.before for each in accepted} == {0}
