"""The ids that have queued work: none is dropped while it has some, and sampling finds what is not true."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import greenlet  # type: ignore[import-untyped]  # it ships no types
import psycopg
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from sqlalchemy import Engine, create_engine, event, func, insert, select, text, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fixtures.clients import RedisClient, connect_redis
from fixtures.topologies import Cluster
from penstock.clients import AsyncQueueTracker, QueuedIds, QueueTracker, Synced, queued_ids_in
from penstock.errors import AppendRefused, DeclarationError, ForeignStructure, InvalidStructureCall, ReadOnlyPostgres

KEYS = tuple(f"penstock:{{jobs}}:{part}" for part in ("tracked", "tracked-position", "tracked-checks"))


def do_nothing(_: str) -> None:
    """Between two steps."""


class Table:
    """A table of queued work, in this process.  ``at`` is called between the steps of a slice."""

    def __init__(self) -> None:
        self.queued: set[str] = set()
        self.at: Callable[[str], None] = do_nothing
        self.asked: list[Any] = []

    def source(self) -> QueuedIds:
        return QueuedIds(self.walk, self.ask)

    def walk(self, after: str | None, most: int) -> list[str]:
        self.asked.append((after, most))
        self.at("before the walk")
        found = sorted(id_ for id_ in self.queued if id_ > (after or ""))[:most]
        self.at("after the walk")
        return found

    def ask(self, ids: Sequence[str]) -> list[str]:
        self.asked.append(list(ids))
        self.at("before the question")
        found = [id_ for id_ in ids if id_ in self.queued]
        self.at("after the question")
        return found


@pytest.fixture
def table() -> Table:
    return Table()


@pytest.fixture
def tracker(redis_url: str, table: Table) -> Iterator[QueueTracker]:
    made = QueueTracker.connect(redis_url, "jobs", table.source())
    yield made
    made.close()


def test_the_adder_walks_the_table_in_slices_and_begins_again(tracker: QueueTracker, table: Table) -> None:
    table.queued = {f"{n:03}" for n in range(120)}

    added = [tracker.add_slice().added for _ in range(4)]

    assert added == [50, 50, 20, 0]
    assert table.asked == [(None, 50), ("049", 50), ("099", 50), (None, 50)]
    assert tracker.size() == 120


def test_the_walk_goes_on_in_another_process(tracker: QueueTracker, table: Table, redis_url: str) -> None:
    table.queued = {f"{n:03}" for n in range(60)}
    tracker.add_slice()
    other = QueueTracker.connect(redis_url, "jobs", table.source())

    assert other.add_slice().added == 10
    other.close()


def test_two_adders_at_once_skip_nothing(tracker: QueueTracker, table: Table, redis_url: str) -> None:
    table.queued = {f"{n:03}" for n in range(150)}
    other = QueueTracker.connect(redis_url, "jobs", table.source())

    def meanwhile(step: str) -> None:
        if step == "after the walk":
            table.at = do_nothing
            assert other.add_slice() == Synced(added=50)

    table.at = meanwhile

    assert tracker.add_slice() == Synced(gave_up=True)
    assert [tracker.add_slice().added for _ in range(2)] == [50, 50]
    other.close()


def test_the_remover_removes_what_has_no_work(tracker: QueueTracker, table: Table) -> None:
    table.queued = {"ann", "bob"}
    tracker.add(["ann", "bob", "eve", 5, UUID(int=1)])

    removed = sum(tracker.remove_slice(25).removed for _ in range(2))

    assert removed == 3
    assert sorted(tracker.sample(10)) == ["ann", "bob"]
    assert max(len(each) for each in table.asked) <= 5


def test_nothing_to_add_is_added_and_of_nothing_the_table_is_not_asked(tracker: QueueTracker, table: Table) -> None:
    assert tracker.add([]) == 0
    assert tracker.add_slice() == Synced()
    table.asked.clear()
    assert tracker.remove_slice() == Synced()
    assert table.asked == []


def test_slices_are_small(tracker: QueueTracker, table: Table) -> None:
    tracker.add([str(n) for n in range(200)])

    tracker.remove_slice()
    assert len(table.asked[0]) == 5
    calls: list[Callable[[], object]] = [lambda: tracker.add_slice(51), lambda: tracker.remove_slice(26)]
    for call in calls:
        with pytest.raises(InvalidStructureCall, match=r"limit is .*; it takes 1 to"):
            call()


def test_sync_does_both_by_chance(tracker: QueueTracker, table: Table) -> None:
    table.queued = {"ann"}
    tracker.add(["eve"])

    for _ in range(40):
        tracker.sync()
    assert tracker.sample(5) == ["ann"]
    assert tracker.contains("ann")
    assert not tracker.contains("eve")


STEPS = ["before the question", "after the question", "before the second", "after the second"]


@pytest.mark.parametrize("adds", [True, False], ids=["and added", "and not added"])
@pytest.mark.parametrize("step", STEPS)
def test_an_id_that_is_queued_again_meanwhile_is_not_dropped(
    tracker: QueueTracker, table: Table, step: str, *, adds: bool
) -> None:
    """At every step of the remover; without ``add`` too, unless it is queued after the last question: then the adder finds it."""
    tracker.add(["ann"])
    questions = iter(STEPS)

    def queue_again(_: str) -> None:
        if next(questions) == step:
            table.queued.add("ann")
            if adds:
                tracker.add(["ann"])

    table.at = queue_again
    tracker.remove_slice()
    if "ann" not in table.queued:  # the step was not reached: after the slice
        table.queued.add("ann")
        tracker.add(["ann"])

    table.at = do_nothing
    if not adds and step == "after the second":
        tracker.add_slice()
    assert tracker.contains("ann")


def test_an_addition_between_question_and_removal_wins(tracker: QueueTracker, table: Table) -> None:
    """Even if the second question would still not see it: what was added is in the set at every moment."""
    tracker.add(["ann"])

    def add(step: str) -> None:
        if step == "after the question":
            tracker.add(["ann"])

    table.at = add

    assert tracker.remove_slice() == Synced(gave_up=True)
    assert tracker.contains("ann")


def test_two_removers_at_once_remove_nothing_that_was_added_between_them(
    tracker: QueueTracker, table: Table, redis_url: str
) -> None:
    """The second check replaces the first one's token; an addition before it must not be forgotten by that."""
    tracker.add(["ann"])
    other = QueueTracker.connect(redis_url, "jobs", table.source())

    def meanwhile(step: str) -> None:
        if step == "after the question":
            table.at = do_nothing
            table.queued.add("ann")
            tracker.add(["ann"])
            other.remove_slice()

    table.at = meanwhile
    tracker.remove_slice()

    assert tracker.contains("ann")
    other.close()


@pytest.mark.parametrize("step", ["before the question", "after the question", "before the walk"])
def test_a_query_that_fails_leaves_set_and_position_as_they_were(
    tracker: QueueTracker, table: Table, redis_client: RedisClient, step: str
) -> None:
    table.queued = {f"{n:03}" for n in range(60)}
    tracker.add_slice()
    before = [redis_client.smembers(KEYS[0]), redis_client.get(KEYS[1])]

    def fail(at: str) -> None:
        if at == step:
            raise ZeroDivisionError

    table.at = fail
    table.queued.clear()
    with pytest.raises(ZeroDivisionError):
        tracker.remove_slice() if "question" in step else tracker.add_slice()
    assert [redis_client.smembers(KEYS[0]), redis_client.get(KEYS[1])] == before


def test_a_second_question_that_fails_puts_everything_back(tracker: QueueTracker, table: Table) -> None:
    tracker.add(["ann"])
    steps = iter(STEPS)

    def fail(_: str) -> None:
        if next(steps) == "before the second":
            raise ZeroDivisionError

    table.at = fail
    with pytest.raises(ZeroDivisionError):
        tracker.remove_slice()
    assert tracker.contains("ann")


def test_a_refused_command_drops_no_id(tracker: QueueTracker, table: Table, redis_client: RedisClient) -> None:
    path = redis_client.connection_pool.connection_kwargs["path"]
    denials = {*["sadd", "srem", "hdel", "hset", "hget", "srandmember", "set", "get"]}
    refused = set()
    for denied in denials:
        rights = ("reset", "on", "nopass", "~*", "+@all", f"-{denied}")
        redis_client.execute_command("ACL", "SETUSER", "web", *rights)
        limited = QueueTracker.connect(f"unix://{path}?username=web&password=x", "jobs", table.source())
        table.queued = {"ann"}
        for call in (limited.add_slice, partial(limited.add, ["eve"]), limited.remove_slice):
            tracker.add(["ann", "bob"])
            try:
                call()
            except AppendRefused:
                refused.add(denied)
            assert tracker.contains("ann"), denied
        limited.close()
    redis_client.execute_command("ACL", "DELUSER", "web")

    assert refused == denials


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_another_type_is_refused_and_stays(tracker: QueueTracker, redis_client: RedisClient, key: str) -> None:
    redis_client.zadd(key, {"not ours": 1})

    calls: list[Callable[[], object]] = [lambda: tracker.add(["ann"]), tracker.add_slice, tracker.remove_slice]
    for call in calls:
        with pytest.raises(ForeignStructure, match="holds another type"):
            call()
    assert redis_client.dbsize() == 1


BAD: list[tuple[str, str, Callable[[QueueTracker], object]]] = [
    ("ids", "is str; it takes a list", lambda t: t.add("ann")),
    ("ids", "are 1,001", lambda t: t.add(range(1001))),
    ("ids", "is empty", lambda t: t.add([""])),
    ("ids", "has float", lambda t: t.add([1.5])),  # type: ignore[list-item]
    ("ids", "has bool", lambda t: t.add([True])),
    ("ids", "has 1,025 bytes", lambda t: t.add(["x" * 1025])),
    ("count", "is 0", lambda t: t.sample(0)),
]


@pytest.mark.parametrize(("field", "problem", "call"), BAD)
def test_a_bad_argument_is_named_with_its_limit(
    tracker: QueueTracker, field: str, problem: str, call: Callable[[QueueTracker], object]
) -> None:
    with pytest.raises(InvalidStructureCall, match=problem) as error:
        call(tracker)
    assert error.value.field == field
    assert tracker.size() == 0


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ([str(n) for n in range(80)], "walk returned 80 ids; it was asked for 50"),
        ([("ann",)], "walk has tuple; an id is str, int or UUID: return the column alone"),
        ("ann", "walk is str; it takes a list of ids"),
        (None, "walk is NoneType"),
        ([None], "walk has NoneType"),
    ],
)
def test_a_query_that_returns_something_else_is_named(redis_url: str, returned: Any, problem: str) -> None:
    source = QueuedIds(lambda *_: returned, lambda *_: returned)
    tracker = QueueTracker.connect(redis_url, "jobs", source)

    with pytest.raises(InvalidStructureCall, match=problem):
        tracker.add_slice()
    assert tracker.size() == 0
    tracker.close()


def test_a_walk_that_does_not_move_on_is_named(redis_url: str) -> None:
    source = QueuedIds(lambda *given: [str(given[0] or "50")], lambda ids: ids)
    tracker = QueueTracker.connect(redis_url, "jobs", source)

    assert tracker.add_slice(1).added == 1
    with pytest.raises(InvalidStructureCall, match="its query takes >, not >="):
        tracker.add_slice(1)
    tracker.close()


class Base(DeclarativeBase):
    pass


class Job(Base):
    __tablename__ = "tracked_jobs"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[int] = mapped_column(index=True)
    order: Mapped[UUID]
    region: Mapped[str | None]
    state: Mapped[str]


@pytest.fixture
def jobs(engine: Engine) -> Engine:
    Base.metadata.create_all(engine)
    rows = [
        {
            "customer": n // 10 - 20,
            "order": UUID(int=n),
            "region": f"r{n % 7} " if n % 3 else None,
            "state": "queued" if n % 20 else "done",
        }
        for n in range(1200)
    ]
    with engine.begin() as connection:
        connection.execute(insert(Job), rows)
    return engine


@pytest.mark.parametrize("column", [Job.customer, Job.order, Job.region], ids=str)
def test_a_column_of_a_table_is_a_source(jobs: Engine, redis_url: str, column: Any) -> None:
    """Of numbers (negative ones too), UUIDs, and text with spaces and NULLs: each in the order of the database."""
    is_queued = Job.state == "queued"
    tracker = QueueTracker.connect(redis_url, "jobs", queued_ids_in(jobs, column, is_queued))
    with jobs.connect() as connection:
        expected = set(connection.scalars(select(column).where(is_queued, column.is_not(None)).distinct()))
    while tracker.add_slice().added:
        pass

    assert tracker.size() == len(expected)
    with jobs.begin() as connection:
        connection.execute(update(Job).where(Job.customer % 2 == 0).values(state="done"))
        left = set(connection.scalars(select(column).where(is_queued, column.is_not(None)).distinct()))
    while tracker.size() > len(left):
        tracker.remove_slice(25)
    assert set(tracker.sample(1000)) == {str(each) for each in left}
    tracker.close()


@pytest.mark.slow
def test_an_id_with_very_many_rows_takes_no_longer(jobs: Engine, redis_url: str) -> None:
    """The walk probes the index once for each id, and does not group its rows."""
    with jobs.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO tracked_jobs (customer, \"order\", state) SELECT 7, gen_random_uuid(), 'queued' "
                "FROM generate_series(1, 100000)"
            )
        )
    with jobs.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE tracked_jobs"))
    source = queued_ids_in(jobs, Job.customer, Job.state == "queued", timeout_s=0.1)

    assert len(source.walk(None, 50)) == 50
    assert source.queued(["7", "1000000"]) == ["7"]


@pytest.mark.parametrize("isolation", ["AUTOCOMMIT", "READ COMMITTED"])
def test_a_slow_query_ends_after_its_time(jobs: Engine, isolation: str) -> None:
    other = create_engine(jobs.url, isolation_level=isolation)
    source = queued_ids_in(other, Job.customer, func.pg_sleep(5).is_not(None), timeout_s=0.05)
    with pytest.raises(OperationalError, match="statement timeout"):
        source.walk(None, 5)
    other.dispose()


@pytest.mark.parametrize("isolation", ["AUTOCOMMIT", "REPEATABLE READ", "SERIALIZABLE"])
def test_each_question_sees_what_was_committed_before(jobs: Engine, isolation: str) -> None:
    other = create_engine(jobs.url, isolation_level=isolation)
    source = queued_ids_in(other, Job.customer, Job.state == "new")

    assert source.queued(["5"]) == []
    with jobs.begin() as connection:
        connection.execute(insert(Job).values(customer=5, order=uuid4(), state="new"))
    assert source.queued(["5"]) == ["5"]
    assert source.walk(None, 5) == ["5"]
    other.dispose()


def test_an_id_that_is_no_value_of_the_column_has_no_work(jobs: Engine, redis_url: str) -> None:
    """It does not keep the remover from its neighbours."""
    source = queued_ids_in(jobs, Job.customer, Job.state == "queued")
    tracker = QueueTracker.connect(redis_url, "jobs", source)
    tracker.add(["5", "not a number", "99999999999999999999", "6"])

    assert tracker.remove_slice().removed == 2
    assert sorted(tracker.sample(5)) == ["5", "6"]
    tracker.close()


def test_a_column_of_no_table_and_another_database_are_refused(jobs: Engine) -> None:
    with pytest.raises(DeclarationError, match="column belongs to no table"):
        queued_ids_in(jobs, func.lower(Job.region))
    with pytest.raises(DeclarationError, match="the engine is for sqlite"):
        queued_ids_in(create_engine("sqlite://"), Job.region)
    with pytest.raises(InvalidStructureCall, match="timeout_s is 0"):
        queued_ids_in(jobs, Job.region, timeout_s=0)


def test_a_standby_is_not_asked(jobs: Engine, redis_url: str) -> None:
    """It may not know of the newest work: what it does not know of would be removed."""
    source = queued_ids_in(jobs, Job.customer)
    tracker = QueueTracker.connect(redis_url, "jobs", source)
    tracker.add(["999"])

    @event.listens_for(jobs, "before_cursor_execute", retval=True)
    def as_a_standby(_conn: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> Any:
        return statement.replace("pg_is_in_recovery()", "NOT pg_is_in_recovery()"), parameters

    with pytest.raises(ReadOnlyPostgres, match="connect it to the primary"):
        tracker.remove_slice()
    assert tracker.contains("999")
    tracker.close()


def test_queries_of_your_own_with_psycopg(jobs: Engine, database_url: str, redis_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:

        def walk(after: str | None, most: int) -> list[int]:
            rows = connection.execute(
                "SELECT DISTINCT customer FROM tracked_jobs WHERE customer > %s ORDER BY 1 LIMIT %s",
                (-1000 if after is None else int(after), most),
            )
            return [customer for (customer,) in rows]

        def queued(ids: Sequence[str]) -> list[int]:
            rows = connection.execute(
                "SELECT DISTINCT customer FROM tracked_jobs WHERE customer = ANY(%s::int[])", (list(ids),)
            )
            return [customer for (customer,) in rows]

        tracker = QueueTracker.connect(redis_url, "jobs", QueuedIds(walk, queued))
        while tracker.add_slice().added:
            pass
        tracker.add([5000])
        assert tracker.size() == 121
        while tracker.size() > 120:
            tracker.remove_slice()
        assert not tracker.contains(5000)
        tracker.close()


def test_the_asyncio_twin_adds_and_asks(redis_url: str, tracker: QueueTracker) -> None:
    async def use() -> None:
        own = AsyncQueueTracker.connect(redis_url, "jobs")
        assert await own.add(["ann", 5]) == 2
        assert await own.contains(5)
        assert sorted(await own.sample(5)) == ["5", "ann"]
        assert await own.size() == 2
        await own.aclose()

    asyncio.run(use())
    assert tracker.contains("ann")


def test_on_a_cluster_the_keys_share_a_slot(cluster: Cluster, table: Table) -> None:
    client = connect_redis(cluster.url)
    table.queued = {"ann"}
    tracker = QueueTracker(client, "jobs", table.source())
    assert tracker.add_slice().added == 1
    tracker.add(["eve"])
    assert tracker.remove_slice().removed == 1
    assert tracker.sample(5) == ["ann"]
    client.close()


IDS = [f"id-{n}" for n in range(6)]


def suspend(step: str) -> None:
    """Stops a slice until the machine goes on with it."""
    greenlet.getcurrent().parent.switch(step)


class Tracking(RuleBasedStateMachine):
    """An application that queues and finishes work, and adds ids or not, between the steps of three slices at a time.

    Slices run in greenlets, which stop wherever they ask the database.
    """

    redis_url: str

    @initialize()
    def begin(self) -> None:
        self.table = Table()
        self.table.at = suspend
        self.tracker = QueueTracker.connect(self.redis_url, "jobs", self.table.source())
        self.tracker._client.execute_command("FLUSHALL")
        self.running: list[Any] = []
        self.killed: list[Any] = []
        self.added: set[str] = set()

    def teardown(self) -> None:
        for one in (*self.running, *self.killed):
            one.throw(greenlet.GreenletExit)
        self.tracker.close()

    @rule(id_=st.sampled_from(IDS))
    def queue_and_add(self, id_: str) -> None:
        self.table.queued.add(id_)
        self.tracker.add([id_])
        self.added.add(id_)

    @rule(id_=st.sampled_from(IDS))
    def queue(self, id_: str) -> None:
        """An application that forgets to add it, or dies before."""
        self.table.queued.add(id_)

    @rule(id_=st.sampled_from(IDS))
    def finish(self, id_: str) -> None:
        self.table.queued.discard(id_)
        self.added.discard(id_)

    # Which ids the server samples is left to it, and how far a slice gets follows from that: so that Hypothesis can repeat what it
    # draws, no rule has a precondition.
    @rule(is_add=st.booleans(), most=st.integers(1, 4))
    def begin_slice(self, most: int, *, is_add: bool) -> None:
        if len(self.running) == 3:
            return
        one = greenlet.greenlet(self.tracker.add_slice if is_add else self.tracker.remove_slice)
        one.switch(most)
        if not one.dead:
            self.running.append(one)

    @rule(which=st.integers(0, 5))
    def go_on(self, which: int) -> None:
        if self.running:
            one = self.running[which % len(self.running)]
            one.switch()
            self.running = [each for each in self.running if not each.dead]

    @rule(which=st.integers(0, 5))
    def die(self, which: int) -> None:
        """A slice is never heard of again."""
        if self.running:
            self.killed.append(self.running.pop(which % len(self.running)))

    @invariant()
    def what_was_added_and_has_work_is_there(self) -> None:
        if hasattr(self, "added"):
            assert {id_ for id_ in self.added if not self.tracker.contains(id_)} == set()

    @rule()
    def sampling_makes_it_true(self) -> None:
        if self.running:
            return
        self.table.at = do_nothing
        for _ in range(2 + len(IDS) // 4):
            self.tracker.add_slice(4)
        for _ in range(40):
            self.tracker.remove_slice(25)
        assert set(self.tracker.sample(100)) == self.table.queued
        self.table.at = suspend
        self.added = set(self.table.queued)


@pytest.mark.slow
def test_no_id_with_work_is_dropped_however_slices_interleave(redis_client: RedisClient, redis_url: str) -> None:
    Tracking.redis_url = redis_url
    run_state_machine_as_test(Tracking, settings=settings(max_examples=25, stateful_step_count=50))
