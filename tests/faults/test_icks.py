"""Members become dirty continuously while consumers are killed and replies are lost: none is forgotten."""

import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Self, cast

import pytest
import redis
from sqlalchemy import bindparam, text
from sqlalchemy.dialects.postgresql import ARRAY, TEXT
from sqlalchemy.orm import Session

from fixtures.crashing import INDEX
from fixtures.dirty import DOCUMENTS, check_copy, declare_index, mark_changed
from fixtures.flow import Site, running
from fixtures.proxy import COMMIT, Harm, Proxy, behind
from fixtures.running_pipeline import Processes
from penstock import Pipeline
from penstock.channels.ick.shard_states import inspect_shards
from penstock.channels.log.streams import extents
from penstock.channels.routing import ick_shard_keys
from penstock.consuming import WorkerSetup
from penstock.consuming.ick_worker import IckWorker
from penstock.database.connections import Connection, connect_postgres
from penstock.database.store import Store
from penstock.journal.journal_reader import journal_tails
from penstock.records import ShardName
from penstock.streaming import Streamer
from penstock.testing import eventually

SECONDS = 30.0
"""At least this long, and until there were as many harms, kills and changes as below: a slow machine needs longer."""

HARMS, KILLS, CHANGES = 20, 10, 1000
DOCUMENTS_COUNT = 3000

APPLICATION = """
from datetime import timedelta
from faults.test_icks import copy_as_it_was
from penstock import Ick, Pipeline

index = Ick("index", shards=2, keep=timedelta(seconds=1))
pipeline = Pipeline([index])
pipeline.consumer(reads=index, name="indexer", batch=7)(copy_as_it_was)
"""

_READ = text("SELECT key, version FROM public.documents WHERE key = ANY (:keys)").bindparams(
    bindparam("keys", type_=ARRAY(TEXT))
)
_FORGET = text("DELETE FROM public.copies WHERE key = ANY (:keys)").bindparams(bindparam("keys", type_=ARRAY(TEXT)))
_WRITE = text("INSERT INTO public.copies VALUES (:key, :version)")


def copy_as_it_was(session: Session, members: Sequence[str]) -> None:
    """Reads the documents, waits, and writes what it has read: members that change meanwhile have to come again."""
    rows = session.execute(_READ, {"keys": list(members)}).all()
    threading.Event().wait(random.random() * 0.05)
    session.execute(_FORGET, {"keys": list(members)})
    if rows:
        session.execute(_WRITE, [{"key": key, "version": version} for key, version in rows])


class Changes:
    """Documents that change and are deleted while the context lasts; each change marks in its own transaction.

    Some of them are those that a consumer is processing at that moment, and do not change again soon.
    """

    def __init__(self, database_url: str, client: redis.Redis) -> None:
        self._url, self._client, self._done = database_url, client, threading.Event()
        self._thread = threading.Thread(target=self._change)
        self.made = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _worked_on(self, shard: ShardName) -> list[str]:
        held = ick_shard_keys("penstock", shard).ick.held
        return [member.decode() for member in cast("list[bytes]", self._client.zrange(held, 0, -1))]

    def _change(self) -> None:
        dice = random.Random(5)
        with connect_postgres(self._url, application="producer") as connection:
            while not self._done.wait(0.005):
                keys = {f"d{dice.randrange(DOCUMENTS_COUNT)}" for _ in range(2)}
                keys |= set(self._worked_on(INDEX.shard_names[dice.randrange(2)])[:2])
                with connection.transaction(force_rollback=dice.random() < 0.1) as transaction:
                    mark_changed(connection, sorted(keys))
                    if dice.random() < 0.2:
                        connection.execute("DELETE FROM public.documents WHERE key = %s", [min(keys)])
                if not transaction.force_rollback:
                    self.made += len(keys)


@pytest.fixture
def indexers(tmp_path: Path, database_url: str, redis_url: str, redis_proxy: Proxy) -> Iterator[Processes]:
    """Processes of an application with an Ick, whose Redis is behind the proxy."""
    processes = Processes(tmp_path, database_url, behind(redis_proxy, redis_url))
    (tmp_path / "shop.py").write_text(APPLICATION)
    yield processes
    processes.end()


@pytest.mark.storm
@pytest.mark.timeout(300)
def test_two_consumers_that_are_killed_and_lose_replies_forget_no_member(
    indexers: Processes, connection: Connection, database_url: str, redis_proxy: Proxy, redis_client: redis.Redis
) -> None:
    """Guarantees 4 and 6: the copy ends equal to the table."""
    connection.execute(DOCUMENTS)
    roles = [("stream",), ("consume", "indexer"), ("consume", "indexer")]
    dice, alive = random.Random(3), [indexers(*role) for role in roles]
    kills = 0
    with Changes(database_url, redis_client) as changes:
        eventually(lambda: copies(connection) > 0, "members are processed", timeout_s=180)
        end = monotonic() + SECONDS
        while monotonic() < end or redis_proxy.harmed <= HARMS or kills <= KILLS or changes.made <= CHANGES:
            # One after the other, and no kill before a call has come through: processes that start slowly get to work.
            harmed = redis_proxy.harmed
            redis_proxy.harm(b"EVALSHA", dice.choice(list(Harm)), skip=dice.randrange(10))
            eventually(lambda: redis_proxy.harmed > harmed, "a call is harmed", timeout_s=180)  # noqa: B023  called at once
            threading.Event().wait(dice.random() * 0.2)
            if dice.random() < 0.3:
                victim = dice.randrange(len(roles))
                alive[victim].kill()
                alive[victim].wait()
                alive[victim] = indexers(*roles[victim])
                kills += 1
    redis_proxy.heal()

    eventually(lambda: all_is_done(connection, redis_client), "all is done", timeout_s=180)
    check_copy(connection, redis_client, INDEX)


def copies(connection: Connection) -> int:
    [(count,)] = connection.execute("SELECT count(*) FROM public.copies").fetchall()
    return int(count)


def all_is_done(connection: Connection, client: redis.Redis) -> bool:
    """Returns whether every staged record is marked in the Ick, and no member waits there."""
    states = inspect_shards(client, "penstock", INDEX.shard_names, 0.0).values()
    [(last,)] = connection.execute("SELECT max(id) FROM penstock.staged_records").fetchall()
    [(sequenced,)] = connection.execute("SELECT max(id) FROM penstock.journal j, unnest(j.record_ids) id").fetchall()
    found = extents(client, "penstock", INDEX.shard_names)
    return (
        (last is None or last == sequenced)
        and all(found[shard].tail == last for shard, last in journal_tails(Store(connection)).items())
        and all(not state.members for state in states)
    )


@pytest.mark.slow
@pytest.mark.parametrize("harm", Harm)
def test_a_cut_at_any_commit_does_not_end_the_consumer_of_an_ick(site: Site, postgres_proxy: Proxy, harm: Harm) -> None:
    """Guarantee 16: at the first COMMIT of its run, at the second, and so on: effects, and what follows them."""
    site.connection.execute(DOCUMENTS)
    pipeline = Pipeline([INDEX])
    declare_index(pipeline, INDEX)
    streamer = Streamer(pipeline, site.database_url, site.redis_url)
    worker = IckWorker(
        WorkerSetup(
            pipeline,
            pipeline.get_consumer("indexer"),
            behind(postgres_proxy, site.database_url),
            site.redis_url,
            block_ms=50,
        )
    )
    copied = "SELECT count(*) FROM (TABLE public.documents EXCEPT TABLE public.copies) AS different"
    progress = "SELECT sum(\"offset\") FROM penstock.checkpoints WHERE consumer = 'indexer'"
    with running(worker.run):
        for number in range(4):
            postgres_proxy.harm(COMMIT, harm, skip=number % 3)
            with site.connection.transaction():
                mark_changed(site.connection, ["a", "b", "c"])
            streamer.drain()
            arrived = lambda: site.connection.execute(copied).fetchone() == (0,)  # noqa: E731
            eventually(arrived, "the copies follow", timeout_s=60)
            expected = ((number + 1) * 3,)
            followed = lambda e=expected: site.connection.execute(progress).fetchone() == e  # noqa: E731
            eventually(followed, "the checkpoints follow", timeout_s=60)
            postgres_proxy.heal()

    streamer.close()
    assert postgres_proxy.harmed > 2
    check_copy(site.connection, site.client, INDEX)
