"""A channel gets another name, while records of both names are under way."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import timedelta
from typing import Any

import psycopg
import pytest
import redis
from redis.connection import AbstractConnection
from sqlalchemy import text
from sqlalchemy.orm import Session

from fixtures.command_line import CommandLine
from fixtures.crashing import killed_at
from fixtures.flow import Loop, retain_now, running, stage_rows
from fixtures.truth import CHANGE, TABLES, await_everything, declare_consumers
from penstock import Ick, Job, Log, Pipeline, Queue, stage
from penstock.channels.queue import FairQueue, TenantLimits
from penstock.channels.server import connect_redis
from penstock.consuming import LogWorker, Worker, make_worker
from penstock.database.connections import Connection, connect_postgres
from penstock.errors import (
    ChannelRetired,
    InvalidName,
    NotReplayable,
    Refused,
    Unknown,
)
from penstock.inline.examiner import InlineExaminer
from penstock.operating.channels import changing, list_channels, rename_channel, retire_channel
from penstock.operating.consumers import retire as retire_consumer
from penstock.operating.replay import ReplayRequest, replay
from penstock.operating.reset import reset_epoch
from penstock.operating.resharding import reshard
from penstock.operating.status import status
from penstock.operating.tracing.reading import StoryReader
from penstock.records import DEFAULT_SCOPE, Record
from penstock.staging import mark_dirty
from penstock.streaming import Streamer, tick
from penstock.testing import drained, eventually
from penstock.verifying import verify

EFFECT = text("INSERT INTO public.effects (what) VALUES (:what)")
KINDS = ("log", "ick", "queue")


def declare(
    kind: str, name: str, shards: int = 2, keep: timedelta = timedelta(hours=1)
) -> Pipeline:
    """A pipeline with one channel of a kind; its consumer writes down what it receives."""
    match kind:
        case "log":
            log = Log(name, shards=shards, keep=keep)
            pipeline = Pipeline([log])

            @pipeline.consumer(reads=log, name="reader")
            def copy(session: Session, records: Sequence[Record]) -> None:
                session.execute(EFFECT, [{"what": record.key} for record in records])

        case "ick":
            ick = Ick(name, shards=2, keep=keep)
            pipeline = Pipeline([ick])

            @pipeline.consumer(reads=ick, name="reader")
            def index(session: Session, members: Sequence[str]) -> None:
                session.execute(EFFECT, [{"what": member} for member in members])

        case _:
            queue = Queue(name, shards=2, keep=keep)
            pipeline = Pipeline([queue])

            @pipeline.worker(reads=queue, name="reader")
            def work(session: Session, job: Job[Any]) -> None:
                session.execute(EFFECT, {"what": job.data})

    return pipeline


def stage_some(url: str, pipeline: Pipeline, prefix: str, count: int = 20) -> set[str]:
    """Stages for the pipeline's channel; returns what its consumer is to receive."""
    [channel] = pipeline.channels.values()
    made = [f"{prefix}{number}" for number in range(1, count + 1)]
    with psycopg.connect(url) as own:
        if isinstance(channel, Log):
            stage_rows(own, channel, count, prefix)
        elif isinstance(channel, Ick):
            mark_dirty(own, channel, made, pipeline=pipeline)
        else:
            for name in made:
                tenant = f"t{name[-1]}"
                stage(
                    own,
                    channel,
                    tenant=tenant,
                    action="a",
                    object="o",
                    data=name,
                    pipeline=pipeline,
                )
    return set(made)


@pytest.fixture
def effects(connection: Connection) -> Callable[[], list[str]]:
    """What the consumer has received, in its order."""
    connection.execute(
        "CREATE TABLE public.effects (effect bigint GENERATED ALWAYS AS IDENTITY, what text)"
    )

    def read() -> list[str]:
        rows = connection.execute("SELECT what FROM public.effects ORDER BY effect")
        return [what for (what,) in rows]

    return read


Rename = Callable[..., Any]


@pytest.fixture
def rename(database_url: str, redis_client: redis.Redis) -> Iterator[Rename]:
    """Renames ``old`` to ``new``, or others; meanwhile a streamer that does not know of it yet writes by the old name."""
    with connect_postgres(database_url, application="test") as own:

        def carry_out(old: str = "old", new: str = "new", **options: Any) -> Any:
            def write_late(_: float) -> None:
                redis_client.set(f"penstock:{{{old}/1}}:epoch", 1)

            chosen = {"apply": True, "pause": write_late, **options}
            return rename_channel(own, redis_client, old, new, **chosen)

        yield carry_out


def find_keys(client: redis.Redis, channel: str) -> list[bytes]:
    return [*client.scan_iter(match=f"*{{{channel}/*", count=10_000)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_renamed_channel_goes_on_where_it_was_and_takes_records_of_both_names(
    kind: str,
    rename: Rename,
    effects: Callable[[], list[str]],
    connection: Connection,
    database_url: str,
    redis_url: str,
    redis_client: redis.Redis,
) -> None:
    """Guarantee 9: applied, published and not applied, staged and not sequenced, staged by the old name afterwards."""
    old, new = declare(kind, "old"), declare(kind, "new")
    staged = stage_some(database_url, old, "applied")
    drained(old, database_url, redis_url)
    with Streamer(old, database_url, redis_url) as streamer:
        staged |= stage_some(database_url, old, "published")
        streamer.drain()
        staged |= stage_some(database_url, old, "committed")

        plan = rename()

        assert (plan.kind, plan.shards, plan.applied) == (kind, 2, True)
        assert find_keys(redis_client, "old") == []
        staged |= stage_some(database_url, old, "by-the-old-name")
        staged |= stage_some(database_url, new, "by-the-new-name")
        streamer.drain()
    drained(new, database_url, redis_url)

    # An Ick marks all that is kept again, as after a Redis that came back empty.
    found = set(effects()) if kind == "ick" else effects()
    assert sorted(found) == sorted(staged)
    assert find_keys(redis_client, "old") == []
    assert find_keys(redis_client, "new")
    [listed] = list_channels(connection)
    assert (listed.channel, listed.consumers, listed.former_names) == ("new", ("reader",), ("old",))
    examiner = InlineExaminer(connection, redis_url, DEFAULT_SCOPE)
    assert not verify(connection, redis_client, examiner).findings


@pytest.mark.parametrize("kind", KINDS)
def test_a_streamer_that_declares_the_old_name_retains_the_renamed_channel(
    kind: str,
    rename: Rename,
    effects: Callable[[], list[str]],
    connection: Connection,
    database_url: str,
    redis_url: str,
) -> None:
    """Journal, staged records and Redis do not grow until the streamer is deployed."""
    old, new = (declare(kind, name, keep=timedelta(0)) for name in ("old", "new"))
    with Streamer(old, database_url, redis_url) as streamer:
        streamer.drain()
        rename()
        staged = set[str]()
        for prefix in ("a", "b", "c"):
            staged |= stage_some(database_url, old, prefix)
            streamer.drain()
        with closing(make(new, database_url, redis_url)) as worker:
            worker.drain()
        retain_now(streamer)

    assert set(effects()) == staged
    # The newest row of each shard stays.
    journal = "SELECT channel, count(*), count(DISTINCT shard) FROM penstock.journal GROUP BY 1"
    assert connection.execute(journal).fetchall() == [("new", 2, 2)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_renaming_that_was_killed_is_completed_by_the_next(
    kind: str,
    rename: Rename,
    effects: Callable[[], list[str]],
    database_url: str,
    redis_url: str,
    redis_client: redis.Redis,
) -> None:
    """Guarantee 9: the streamer works on in between."""
    old, new = declare(kind, "old"), declare(kind, "new")
    staged = stage_some(database_url, old, "k")
    with Streamer(old, database_url, redis_url) as streamer:
        streamer.drain()
        with killed_at("rename.after_registry"):
            rename()
        staged |= stage_some(database_url, old, "between")
        streamer.drain()
        # One that is started meanwhile does not take what Redis has by the old name for records that Postgres has lost.
        with Streamer(old, database_url, redis_url) as started:
            started.drain()
        plan = rename()

    assert (plan.begun, plan.applied) == (True, True)
    drained(new, database_url, redis_url)
    assert sorted(set(effects()) if kind == "ick" else effects()) == sorted(staged)
    assert find_keys(redis_client, "old") == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("short_intervals")
def test_a_consumer_that_declares_the_old_name_is_refused_and_a_running_one_stops(
    kind: str,
    rename: Rename,
    effects: Callable[[], list[str]],
    database_url: str,
    redis_url: str,
) -> None:
    old = declare(kind, "old")
    staged = stage_some(database_url, old, "k")
    with Streamer(old, database_url, redis_url) as streamer:
        streamer.drain()
        with closing(make(old, database_url, redis_url)) as running:
            running.drain()
            rename()
            stage_some(database_url, old, "later")
            streamer.drain()
            with pytest.raises(ChannelRetired, match="channel old was renamed to new"):
                running.run(lambda: False)

    with (
        closing(make(old, database_url, redis_url)) as worker,
        pytest.raises(ChannelRetired, match="was renamed to new"),
    ):
        worker.open()
    assert sorted(effects()) == sorted(staged)


def make(pipeline: Pipeline, database_url: str, redis_url: str) -> Worker[Any]:
    return make_worker(pipeline, pipeline.get_consumer("reader"), database_url, redis_url)


def test_everything_that_names_the_channel_gets_its_new_name(
    rename: Rename, connection: Connection, database_url: str, redis_url: str
) -> None:
    """Of every table with such a column, so of one that is added later, too."""
    old = declare("queue", "old")
    with Streamer(old, database_url, redis_url) as streamer:
        stage_some(database_url, old, "k")
        streamer.drain()
    connection.execute(
        """
        INSERT INTO penstock.waiting_records (record_id, channel, shard) VALUES (900, 'old', 0);
        INSERT INTO penstock.isolated_records (record_id, xid, channel, shard, reason) VALUES (901, '3', 'old', 0, 'test');
        INSERT INTO penstock.stopped_shards VALUES ('old', 0, 'test');
        INSERT INTO penstock.barriers VALUES ('reader', 'old', 0, 0, 'run', now() - interval '1 minute');
        INSERT INTO penstock.replays (request, channel, target, shards, firsts, lasts, ended_at)
            VALUES ('a', 'old', 'other', '{}', '{}', '{}', now()), ('b', 'other', 'old', '{}', '{}', '{}', now());
        INSERT INTO penstock.former_channels VALUES ('older', 'old');
        INSERT INTO penstock.dead_letters (consumer, channel, shard, "offset", record_id, key, action, object, data, staged_at,
                                           reason, attempts)
            VALUES ('reader', 'old', 0, 1, 1, 'k', 'a', 'o', '{}', now(), 'test', 1);
        """
    )
    columns = connection.execute(
        "SELECT table_name, column_name FROM information_schema.columns "
        "WHERE table_schema = 'penstock' AND column_name IN ('channel', 'target', 'successor') "
        "AND table_name <> 'former_consumers' AND (table_name, column_name) <> ('former_channels', 'channel')"
    ).fetchall()

    def naming(name: str) -> set[tuple[str, str]]:
        count = "SELECT count(*) FROM penstock.{} WHERE {} = %s"
        return {
            (table, column)
            for table, column in columns
            if connection.execute(count.format(table, column).encode(), [name]).fetchone() != (0,)
        }

    assert naming("old") == {*columns}, "a table is to be filled above, or to be renamed"
    rename()
    gone = {("barriers", "channel"), ("stopped_shards", "channel")}
    assert (naming("old"), naming("new")) == (set(), {*columns} - gone)


def test_a_plan_changes_nothing_and_a_renaming_that_failed_half_way_is_finished(
    rename: Rename,
    connection: Connection,
    database_url: str,
    redis_url: str,
    redis_client: redis.Redis,
) -> None:
    old = declare("log", "old")
    with Streamer(old, database_url, redis_url) as streamer:
        stage_some(database_url, old, "k")
        streamer.drain()
        keys = find_keys(redis_client, "old")
        assert not rename(apply=False).applied
        assert [each.channel for each in list_channels(connection)] == ["old"]
        assert find_keys(redis_client, "old") == keys

        def fail(_: float) -> None:
            redis_client.set(keys[0], "written by a streamer that was suspended")
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            rename(pause=fail)
        with pytest.raises(Refused, match="penstock channels rename old new --apply"):
            rename("new", "old")
        again = rename()
        assert (again.begun, again.applied, find_keys(redis_client, "old")) == (True, True, [])

        assert rename("new", "old").records == 20
        streamer.drain()
    assert len(list_channels(connection)) == 1
    assert find_keys(redis_client, "new") == []


def test_a_name_that_is_used_is_refused(
    rename: Rename, connection: Connection, database_url: str, redis_url: str
) -> None:
    both = Pipeline([Log("old", shards=2), Log("new", shards=2), Log("elsewhere@eu", shards=2)])
    stage_rows(connection, both.channels["new"], 3)  # type: ignore[arg-type]  # a log
    with Streamer(both, database_url, redis_url) as streamer:
        streamer.drain()

    with pytest.raises(Refused, match="new has 3 records already"):
        rename()
    with pytest.raises(Refused, match="old has 0 records already"):
        rename("old", "old")
    with pytest.raises(Refused, match="shared with another database"):
        rename("elsewhere@eu", "other")
    with pytest.raises(Unknown, match=r"there are: elsewhere@eu, new, old"):
        rename("odl")
    with pytest.raises(InvalidName):
        rename("old", "n e w")
    connection.execute("INSERT INTO penstock.former_channels VALUES ('gone', NULL), ('was', 'new')")
    with pytest.raises(Refused, match="penstock channels adopt gone --apply"):
        rename("old", "gone")
    with pytest.raises(Refused, match=r"was renamed to new\. Take another one"):
        rename("old", "was")
    with pytest.raises(Unknown, match="it is new now"):
        rename("was", "other")


@pytest.mark.parametrize(
    ("under_way", "found"),
    [
        (
            "INSERT INTO penstock.barriers VALUES ('reader', 'old', 0, 0, 'run', now() + interval '1 minute')",
            "a reconciliation of reader is running",
        ),
        (
            (
                "INSERT INTO penstock.replays (request, channel, target, shards, firsts, lasts) "
                "VALUES ('a', 'other', 'old', '{}', '{}', '{}'); "
                'INSERT INTO penstock.checkpoints (consumer, channel, shard, "offset", epoch) '
                "VALUES ('replay-1', 'other', 0, 0, 1)"
            ),
            "a replay of other to old has not ended.*penstock consumers retire replay-1 --apply",
        ),
        (
            "UPDATE penstock.checkpoints SET reported_by = 'another'",
            "shared with another database, where reader reads it",
        ),
    ],
)
def test_what_would_not_learn_of_the_new_name_has_to_end_before(
    under_way: str,
    found: str,
    rename: Rename,
    connection: Connection,
    database_url: str,
    redis_url: str,
) -> None:
    with Streamer(declare("log", "old"), database_url, redis_url):
        pass
    connection.execute(under_way.encode())
    with pytest.raises(Refused, match=found):
        rename()
    assert [each.channel for each in list_channels(connection)] == ["old"]


def test_a_replay_that_was_cancelled_hinders_no_renaming(
    rename: Rename, connection: Connection, database_url: str, redis_url: str
) -> None:
    both = Pipeline([Log("old", shards=2), Log("copies", shards=2)])
    stage_rows(connection, both.channels["old"], 3)  # type: ignore[arg-type]  # a log
    with Streamer(both, database_url, redis_url) as streamer:
        streamer.drain()

    def refuse_then_cancel(_: int) -> None:
        with pytest.raises(Refused, match="replay-1"):
            rename()
        retire_consumer(connection, "replay-1", apply=True)

    with (
        connect_postgres(database_url, application="test") as own,
        pytest.raises(NotReplayable, match="is cancelled"),
    ):
        replay(own, ReplayRequest("old", "copies"), apply=True, on_batch=refuse_then_cancel)
    assert rename().applied


@pytest.mark.parametrize("change", ["rename", "retire"])
def test_a_handler_that_holds_its_checkpoint_for_long_is_not_waited_for(
    change: str,
    rename: Rename,
    monkeypatch: pytest.MonkeyPatch,
    connection: Connection,
    database_url: str,
    redis_url: str,
    redis_client: redis.Redis,
) -> None:
    monkeypatch.setattr(changing, "LOCK_TIMEOUT_S", 0.2)
    with Streamer(declare("log", "old"), database_url, redis_url):
        pass
    changes: dict[str, Callable[[], Any]] = {
        "rename": rename,
        "retire": lambda: retire_channel(connection, redis_client, "old", apply=True),
    }
    with psycopg.connect(database_url) as handler:
        handler.execute("SELECT FROM penstock.checkpoints FOR UPDATE")
        with pytest.raises(Refused, match="nothing was changed"):
            changes[change]()
    assert [each.channel for each in list_channels(connection)] == ["old"]


def test_the_limits_of_tenants_go_with_a_queue(
    rename: Rename, database_url: str, redis_url: str, redis_client: redis.Redis
) -> None:
    """They are only in Redis.  What somebody has set under the new name meanwhile stays."""
    old = declare("queue", "old")
    stage_some(database_url, old, "k")
    with Streamer(old, database_url, redis_url) as streamer:
        streamer.drain()
        limits = TenantLimits(in_flight=1, is_paused=True)
        for tenant in ("t1", "t2"):
            FairQueue(redis_client, "old", shards=2).limit(tenant, limits)
        FairQueue(redis_client, "old", shards=2).limit_all(TenantLimits(weight=2))

        def limit_by_the_new_name(_: float) -> None:
            assert find_keys(redis_client, "old") == []
            streamer.drain()
            FairQueue(redis_client, "new", shards=2).limit("t2", None)

        rename(pause=limit_by_the_new_name)
        streamer.drain()

    assert find_keys(redis_client, "old") == []
    kept = [redis_client.hgetall(f"penstock:{{new/{shard}}}:q-limits") for shard in (0, 1)]
    assert {tenant for each in kept for tenant in each} == {b"", b"t1"}
    assert all(b"" in each for each in kept)


@pytest.mark.parametrize("server", ["a Cluster", "the owner's user"])
def test_a_queue_is_renamed_whatever_redis_it_is_in(
    server: str,
    request: pytest.FixtureRequest,
    effects: Callable[[], list[str]],
    connection: Connection,
    database_url: str,
    redis_url: str,
) -> None:
    """The shards of the two names are in other slots, and the user may have no more rights than it needs."""
    url = redis_url
    if server == "a Cluster":
        url = request.getfixturevalue("cluster").url
    old, new = declare("queue", "old"), declare("queue", "new")
    staged = stage_some(database_url, old, "k")
    with Streamer(old, database_url, url) as streamer:
        streamer.drain()
        operator = url
        if server != "a Cluster":
            operator = request.getfixturevalue("redis_url_for")("owner")
        with closing(connect_redis(operator)) as client:
            FairQueue(client, "old", shards=2).limit_all(TenantLimits(weight=2))
            rename_channel(connection, client, "old", "new", apply=True, pause=lambda _: None)
            assert client.exists("penstock:{old/0}:q-limits", "penstock:{old/1}:q-limits") == 0
            kept = [client.hgetall(f"penstock:{{new/{shard}}}:q-limits") for shard in (0, 1)]
    assert [[*each] for each in kept] == [[b""], [b""]]
    drained(new, database_url, url)
    assert sorted(effects()) == sorted(staged)


def test_nothing_waits_for_redis_while_ticks_are_held_up(
    rename: Rename,
    monkeypatch: pytest.MonkeyPatch,
    database_url: str,
    redis_url: str,
    redis_client: redis.Redis,
) -> None:
    with Streamer(declare("log", "old"), database_url, redis_url):
        pass
    asked = []
    send: Callable[..., None] = AbstractConnection.send_packed_command

    def watch(self: AbstractConnection, *command: Any, **options: Any) -> None:
        with psycopg.connect(database_url) as other:
            other.execute("LOCK TABLE penstock.ticks IN ROW EXCLUSIVE MODE NOWAIT")
        asked.append(command)
        send(self, *command, **options)

    monkeypatch.setattr(AbstractConnection, "send_packed_command", watch)
    with connect_postgres(database_url, application="test") as own:
        rename()
        retire_channel(own, redis_client, "new", apply=True, pause=lambda _: None)
    assert asked


def test_workers_that_were_deployed_too_early_are_put_right(
    rename: Rename,
    effects: Callable[[], list[str]],
    database_url: str,
    redis_url: str,
) -> None:
    """They register a channel of the new name, which has no records."""
    old, new = declare("log", "old"), declare("log", "new")
    staged = stage_some(database_url, old, "applied")
    drained(old, database_url, redis_url)
    drained(new, database_url, redis_url)
    staged |= stage_some(database_url, old, "waiting")

    rename()
    drained(new, database_url, redis_url)

    assert sorted(effects()) == sorted(staged)


def test_the_old_name_of_a_resharded_channel_is_placed_by_the_key(
    rename: Rename,
    effects: Callable[[], list[str]],
    connection: Connection,
    database_url: str,
    redis_url: str,
    redis_client: redis.Redis,
) -> None:
    old, new = declare("log", "old"), declare("log", "new", shards=3)
    staged = stage_some(database_url, old, "a")
    drained(old, database_url, redis_url)
    reshard(connection, "old", 3, apply=True)
    rename()
    staged |= stage_some(database_url, old, "b")
    drained(new, database_url, redis_url)

    assert sorted(effects()) == sorted(staged)
    shards = connection.execute(
        "SELECT DISTINCT shard FROM penstock.journal WHERE first_offset > 0"
    )
    assert {shard for (shard,) in shards} == {0, 1, 2, 3, 4}
    examiner = InlineExaminer(connection, redis_url, DEFAULT_SCOPE)
    assert not verify(connection, redis_client, examiner).findings


def test_status_and_a_new_epoch_know_the_old_name(
    rename: Rename,
    effects: Callable[[], list[str]],
    connection: Connection,
    database_url: str,
    redis_url: str,
    redis_client: redis.Redis,
) -> None:
    old, new = declare("log", "old"), declare("log", "new")
    with Streamer(old, database_url, redis_url):
        rename()
        staged = stage_some(database_url, old, "k")
        [shown] = status(connection, redis_client, new).channels
        assert (shown.channel, sum(shard.staged for shard in shown.shards)) == ("new", 20)

    with connect_postgres(database_url, application="test") as own:
        reset_epoch(own, redis_client, new, apply=True)
    drained(new, database_url, redis_url)
    assert sorted(effects()) == sorted(staged)

    reader = StoryReader(connection, redis_client, DEFAULT_SCOPE)
    [record] = reader.find_ids("k7", "new", 5)
    story = reader.read(record)
    assert story is not None
    assert (story.channel, story.offset is not None) == ("new", True)


def test_a_sequencer_of_an_older_release_is_refused_after_a_renaming(
    rename: Rename, connection: Connection, database_url: str, redis_url: str
) -> None:
    """It would place records by the old name, where nobody reads them."""
    older = (
        "INSERT INTO penstock.ticks (tick, snapshot, epoch) "
        "SELECT max(tick) + 1, pg_current_snapshot(), 1 FROM penstock.ticks"
    )
    with Streamer(declare("log", "old"), database_url, redis_url):
        connection.execute(older)
        rename()
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="this release does not know"):
        connection.execute(older)
    tick(connection, DEFAULT_SCOPE)


@pytest.fixture
def streamed(database_url: str, redis_url: str) -> None:
    """A streamer has registered the channel ``things``."""
    with Streamer(Pipeline([Log("things", shards=2)]), database_url, redis_url):
        pass


@pytest.mark.usefixtures("streamed")
def test_the_command_shows_a_plan(penstock: CommandLine) -> None:
    plan = penstock("channels", "rename", "things", "rides")
    assert "would rename things to rides, log of 2 shards" in plan.stdout
    assert "--apply" in plan.stderr
    assert penstock("channels", "rename", "things", "things").returncode == 5


@pytest.mark.slow  # it waits until every streamer has read the registry
@pytest.mark.usefixtures("streamed")
def test_the_command_renames(penstock: CommandLine, connection: Connection) -> None:
    assert penstock("channels", "rename", "things", "rides", "--apply").returncode == 0
    assert [each.former_names for each in list_channels(connection)] == [("things",)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_channel_is_renamed_under_load_and_nothing_is_lost_doubled_or_overtaken(
    connection: Connection, database_url: str, redis_url: str, redis_client: redis.Redis
) -> None:
    """Guarantees 2, 6 and 9: producers of both names change the same keys, beside a streamer that declares the old one."""
    connection.execute(TABLES)
    pipelines = {}
    for name in ("before", "things"):
        pipelines[name] = Pipeline([log := Log(name, shards=2, keep=timedelta(hours=1))])
        declare_consumers(pipelines[name], log)
    names = ["before", "before"]

    def produce(number: int) -> Loop:
        statement, dice = CHANGE.replace("'things'", "%(channel)s"), random.Random(number)

        def loop(stop: Callable[[], bool]) -> None:
            with psycopg.connect(database_url, autocommit=True) as own:
                while not stop():
                    keys = sorted({f"k{dice.randrange(40)}" for _ in range(4)})
                    with own.transaction(force_rollback=dice.random() < 0.1):
                        for key in keys:
                            own.execute(statement, {"key": key, "channel": names[number]})

        return loop

    def workers(name: str) -> list[LogWorker]:
        flow = pipelines[name]
        return [LogWorker(flow, each, database_url, redis_url) for each in flow.consumers.values()]

    def stopping(worker: LogWorker) -> Loop:
        def loop(stop: Callable[[], bool]) -> None:
            with (
                closing(worker),
                pytest.raises(ChannelRetired, match="was renamed to"),
            ):
                worker.run(stop)

        return loop

    def applied() -> int:
        [(count,)] = connection.execute("SELECT count(*) FROM public.effects").fetchall()
        return int(count)

    streamer = Streamer(pipelines["before"], database_url, redis_url)
    with running(streamer.run):
        eventually(lambda: bool(list_channels(connection)), "the channel is registered")
        with running(produce(0), produce(1)):
            with running(*map(stopping, workers("before"))):
                eventually(lambda: applied() > 2000, "the old name works", timeout_s=180)
                with connect_postgres(database_url, application="test") as own:
                    rename_channel(own, redis_client, "before", "things", apply=True)
                eventually(lambda: not has_workers(connection), "the old workers stop")
            names[1] = "things"
            before = applied()
            with running(*(worker.run for worker in workers("things"))):
                eventually(lambda: applied() > before + 2000, "the new one does", timeout_s=180)
    with (
        Streamer(pipelines["things"], database_url, redis_url) as following,
        running(following.run, *(worker.run for worker in workers("things"))),
    ):
        await_everything(connection, redis_client, Log("things", shards=2))
    assert find_keys(redis_client, "before") == []


def has_workers(connection: Connection) -> bool:
    """Whether a consumer is connected."""
    [(count,)] = connection.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE '%penstock consumer%'"
    ).fetchall()
    return bool(count)
