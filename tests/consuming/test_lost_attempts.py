"""What an attempt that failed has left nowhere: neither in the session, nor in its records, nor in the calls after the commit."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from math import inf
from time import monotonic
from typing import Any

import psycopg
import pytest
from asgiref.sync import sync_to_async
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from fixtures.flow import Site
from fixtures.sources import Regions
from penstock import Ick, Job, Log, Queue, Record, Snooze
from penstock.consuming import make_worker
from penstock.crash_points import install_crashpoint
from penstock.database.connections import Connection, connect_postgres
from penstock.database.registry import register_consumer
from penstock.database.store import Store
from penstock.django import DjangoPipeline
from penstock.engines import inline
from penstock.engines.stealing import Chores, Recruiter
from penstock.errors import ServerUnavailable
from penstock.operating.letters import of_consumer, retry
from penstock.streaming import Streamer
from penstock.testing import eventually
from staging.test_connections import make_django

FAILURES = ("raises", "loses", "is put off", "is refused", "loses late", "is cut")
"""An error; a conflict; ``Snooze``; a COMMIT that is refused, or loses a conflict; one before which the connection ends."""

KEYS = [f"k{number}" for number in range(6)]
POISON = "k2"
GOOD = [key for key in KEYS if key != POISON]

TABLES = """
CREATE TABLE public.applied (key text);
CREATE TABLE public.refused (sqlstate text);
CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION USING ERRCODE = NEW.sqlstate; END $$;
CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON public.refused DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION public.refuse();
DO $$ BEGIN CREATE ROLE left_behind SUPERUSER; EXCEPTION WHEN duplicate_object THEN NULL; END $$;
"""

STAGE = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, headers)
SELECT %s, number %% %s, 'k' || number, 'a', 'o', '{"numbers": [1]}', '{"numbers": [1]}' FROM generate_series(0, 5) number
"""

LETTERS = """
INSERT INTO penstock.dead_letters (consumer, channel, shard, "offset", record_id, key, action, object, data, headers, staged_at, reason,
                                   attempts, later_offset)
SELECT 'reader', 'things', 0, n, n, 'k' || n, 'a', 'o', '{"numbers": [1]}', '{"numbers": [1]}', now(), 'why', 1, 0
FROM generate_series(0, 5) n
"""

LEAVE = """
SET shop.account = 'left behind';
SET LOCAL shop.purpose = 'left behind';
SET search_path = left_behind;
SET lock_timeout = '7s';
SET ROLE left_behind;
CREATE TEMPORARY TABLE left_behind (number int);
SELECT pg_advisory_lock(7);
LISTEN left_behind;
"""

FIND = """
SELECT nullif(current_setting('shop.account', true), ''), nullif(current_setting('shop.purpose', true), ''),
       nullif(current_setting('search_path'), '"$user", public'), substring(current_setting('lock_timeout') from '7s'),
       nullif(current_user, session_user), to_regclass('pg_temp.left_behind')::text,
       (SELECT 'a lock' FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'),
       (SELECT min(c) FROM pg_listening_channels() c), (SELECT name FROM pg_prepared_statements WHERE name = 'left_behind'), pg_backend_pid(), pg_current_xact_id()::text
"""


@dataclass
class Numbers:
    """The payload."""

    numbers: list[int]


@dataclass
class Attempts:
    """A handler that leaves all it can behind, and whose attempt fails at the first call for some items; for one, always."""

    db: Any
    url: str
    found: list[Any] = field(default_factory=list)  # what calls have found of others, which is nothing
    failed: list[str] = field(default_factory=list)  # how
    committed: list[str] = field(default_factory=list)  # keys whose call after the commit has come
    calls: set[tuple[str, ...]] = field(default_factory=set)  # by the keys of their items
    poison: str | None = POISON

    def __post_init__(self) -> None:
        self._failures = cycle(FAILURES)
        self._pid = self._to_cut = 0
        self._spoilt = ""  # the transaction that has left something

    def plain(self, session: Session, items: Any) -> None:
        self._attempt(session, items, self.db.transaction.on_commit)

    async def asynchronous(self, session: AsyncSession, items: Any) -> None:
        later: list[Callable[[], None]] = []
        try:
            await session.run_sync(self._attempt, items, later.append)
        finally:
            for function in later:
                await sync_to_async(self.db.transaction.on_commit)(function)

    def _attempt(self, session: Session, items: Any, on_commit: Callable[[Callable[[], None]], Any]) -> None:
        several = [items] if isinstance(items, str | Record | Job) else [*items]
        keys = tuple(each if isinstance(each, str) else getattr(each, "tenant", "") or each.key for each in several)
        self._inspect(session, several)
        for key in keys:
            session.execute(text("INSERT INTO public.applied VALUES (:key)"), {"key": key})
            on_commit(partial(self.committed.append, key))
        if isinstance(items, list):
            items.clear()
        if keys not in self.calls or self.poison in keys:
            self._fail(session, "raises" if keys in self.calls else next(self._failures), keys)

    def _inspect(self, session: Session, several: Sequence[Any]) -> None:
        """Notes what is left of other transactions, and of other calls for these items."""
        *found, self._pid, transaction = session.execute(text(FIND)).one()
        if transaction != self._spoilt:
            self.found += [each for each in (*found, *session, session.info.get("left")) if each is not None]
        for each in several:
            if not isinstance(each, str):
                numbers = (each.data["numbers"], each.headers["numbers"], each.payload.numbers)
                self.found += [value for value in numbers if value != [1]]
                self.found += [*{*each.data, *each.headers} - {"numbers"}]
                self.found += [each.result] if isinstance(each, Job) and each.result is not None else []
                for value in numbers:
                    value.append(2)
                each.data["more"] = each.headers["more"] = "more"
                if isinstance(each, Job):
                    each.set_result("a result")

    def _fail(self, session: Session, how: str, keys: tuple[str, ...]) -> None:
        self.calls.add(keys)
        self.failed.append(how)
        session.info["left"] = "behind"
        self._spoil(session)
        if "loses" not in how and "put off" not in how:  # for which the connection is kept, with what is prepared on it
            session.execute(text("PREPARE left_behind AS SELECT 1"))
        match how:
            case "loses":
                raise psycopg.errors.SerializationFailure
            case "is put off":
                raise Snooze(0.001)
            case "is refused" | "loses late":
                sqlstate = {"is refused": "23503", "loses late": "40001"}[how]
                session.execute(text("INSERT INTO public.refused VALUES (:sqlstate)"), {"sqlstate": sqlstate})
            case "is cut":
                self._to_cut = self._pid
            case _:
                raise ValueError(how)

    def _spoil(self, session: Session) -> None:
        transaction = session.execute(text("SELECT pg_current_xact_id()::text")).scalar_one()
        if transaction != self._spoilt:
            self._spoilt = transaction
            for statement in filter(str.strip, LEAVE.split(";")):
                session.execute(text(statement))

    def strike(self, point: str) -> None:
        """Ends the connection right before its COMMIT."""
        if point.endswith(".before_commit") and self._to_cut:
            pid, self._to_cut = self._to_cut, 0
            with psycopg.connect(self.url, autocommit=True) as connection:
                connection.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])


@pytest.fixture
def attempts(database_url: str, connection: Connection) -> Iterator[Attempts]:
    connection.execute(TABLES)
    made = Attempts(make_django(database_url), database_url)
    install_crashpoint(made.strike)
    yield made
    install_crashpoint(None)
    made.db.connections.close_all()


CHANNELS: dict[str, Callable[..., Any]] = {"log": Log, "ick": Ick, "queue": Queue}


def declare(attempts: Attempts, kind: str, face: str, each: str, shards: int = 1) -> DjangoPipeline:
    channel: Any = CHANNELS[kind]("things", shards=shards)
    flow = DjangoPipeline([channel])
    options: dict[str, Any] = {"reads": channel, "name": "reader"} | ({} if kind == "ick" else {"payload": Numbers})
    handler: Any = attempts.plain if face == "def" else attempts.asynchronous
    if kind == "queue":
        flow.worker(**options, attempts=3, backoff=0, concurrency=1)(handler)
    else:
        flow.consumer(**options | {"attempts": 2, "each": each == "each"})(handler)
    return flow


def read_keys(connection: Connection, table: str) -> list[str]:
    return [key for (key,) in connection.execute(f"SELECT key FROM {table} ORDER BY key".encode())]


def is_done(connection: Connection) -> bool:
    return len(read_keys(connection, "public.applied")) >= len(GOOD) and bool(
        read_keys(connection, "penstock.dead_letters")
    )


def check(connection: Connection, attempts: Attempts, applied: Sequence[str] = GOOD) -> None:
    assert read_keys(connection, "public.applied") == applied
    assert read_keys(connection, "penstock.dead_letters") == ([] if POISON in applied else [POISON])
    assert sorted(attempts.committed) == applied, "after the commit, and only then"
    assert attempts.found == []
    assert {*attempts.failed} == {*FAILURES}


HANDLERS = [
    ("log", "def", "batch"),
    ("log", "def", "each"),
    ("log", "async def", "batch"),
    ("log", "async def", "each"),
    ("ick", "def", "batch"),
    ("ick", "async def", "each"),
    ("queue", "def", "each"),
    ("queue", "async def", "each"),
]


@pytest.mark.parametrize(
    ("kind", "face", "each", "engine"),
    [(*each, "none") for each in HANDLERS]
    + [(*each, engine) for each in HANDLERS[::3] for engine in ("inline", "stealing")],
)
@pytest.mark.usefixtures("short_pauses")
def test_nothing_of_a_lost_attempt_is_left(
    site: Site, kind: str, face: str, each: str, engine: str, attempts: Attempts, recruiter: Recruiter
) -> None:
    """Guarantees 5, 17 and 21: of an error, a conflict, a COMMIT that fails, half of a batch, or a record that is found."""
    flow = declare(attempts, kind, face, each)
    site.connection.execute(STAGE, ["things", 1])
    with Streamer(flow, site.database_url, site.redis_url) as streamer:
        streamer.drain()

    if engine == "none":
        with make_worker(flow, flow.get_consumer("reader"), site.database_url, site.redis_url) as worker:
            worker.drain()
    elif engine == "inline":
        end = monotonic() + 30
        stop = lambda: is_done(site.connection) or monotonic() > end  # noqa: E731
        inline.run(flow, site.database_url, site.redis_url, stop=stop, streamer=False)
    else:
        recruiter.install(Chores(flow, site.database_url, site.redis_url).consume("reader"), "consume", 1.0)
        eventually(
            lambda: (recruiter.enlist(), is_done(site.connection) and len(attempts.committed) >= len(GOOD))[1],
            "all is done",
        )

    check(site.connection, attempts)


@pytest.mark.usefixtures("short_pauses")
def test_nothing_of_a_lost_attempt_is_left_in_a_consumer_of_several_sources(
    regions: Regions, attempts: Attempts, connection: Connection
) -> None:
    things = Log("things", sources=["eu", "us"])
    flow = DjangoPipeline([things])
    flow.consumer(reads=things, name="totals", attempts=2, payload=Numbers)(attempts.plain)
    for source in (regions.eu, regions.us):
        source.stream()
    with psycopg.connect(regions.eu.url, autocommit=True) as other:
        other.execute(STAGE, ["things@eu", 2])
    regions.eu.stream()

    replace(regions, pipeline=flow).drain()

    check(connection, attempts)


@pytest.mark.parametrize("face", ["def", "async def"])
@pytest.mark.usefixtures("short_pauses")
def test_nothing_of_a_lost_attempt_at_several_shards_is_left(
    site: Site, face: str, attempts: Attempts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow the machine is, they are applied together, once it is known how long a record takes."""
    monkeypatch.setattr("penstock.consuming.log.log_worker.TOGETHER_S", inf)
    flow = declare(attempts, "log", face, "batch", shards=6)
    with (
        Streamer(flow, site.database_url, site.redis_url) as streamer,
        make_worker(flow, flow.get_consumer("reader"), site.database_url, site.redis_url) as worker,
    ):
        site.connection.execute(f"{STAGE} LIMIT 1", ["things", 6])
        streamer.drain()
        worker.drain()
        site.connection.execute(STAGE, ["things", 6])
        streamer.drain()
        worker.drain()

    assert tuple(KEYS) in attempts.calls
    check(site.connection, attempts, sorted(["k0", *GOOD]))


@pytest.mark.parametrize("face", ["def", "async def"])
@pytest.mark.usefixtures("short_pauses")
def test_nothing_of_a_lost_retry_of_a_dead_letter_is_left(
    face: str, attempts: Attempts, connection: Connection, database_url: str
) -> None:
    flow = declare(attempts, "log", face, "batch")
    attempts.poison = None
    with connect_postgres(database_url, application="test") as own:
        register_consumer(Store(own), flow.get_consumer("reader"))
    connection.execute(LETTERS)

    for _ in FAILURES:
        with suppress(ServerUnavailable):
            retry(flow, of_consumer(Store(connection), "reader"), database_url)

    check(connection, attempts, KEYS)
