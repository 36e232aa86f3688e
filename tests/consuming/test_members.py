"""Icks in the pipeline: every member marked in Postgres is processed, despite losses, repeated sends and kills."""

import math
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest
import redis
from sqlalchemy import text
from sqlalchemy.orm import Session
from structlog.testing import capture_logs

from fixtures.constants import SetConstants
from fixtures.crashing import repeated
from fixtures.dirty import check_copy, copy_documents, declare_index, mark_changed
from fixtures.flow import OpenWorker, retain_now
from fixtures.intervals import refresh_now, report_now
from penstock import Cancel, DeadLetter, Ick, Log, Pipeline, Snooze
from penstock.channels.ick.reservations import HolderWatch
from penstock.channels.routing import ick_shard_keys
from penstock.clients import Busy, DirtyList, Reservation, Reservations
from penstock.consuming import WorkerSetup
from penstock.consuming.ick_worker import IckWorker
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.errors import DeclarationError, HistoryDiverged, Refused
from penstock.operating.reset.checkpoint import reset_checkpoint
from penstock.streaming import Streamer
from penstock.testing import eventually

pytestmark = pytest.mark.channels("index")


@pytest.fixture
def index() -> Ick:
    """An Ick of two shards with `keep` zero."""
    return Ick("index", shards=2, keep=timedelta(0))


MakeWorker = Callable[..., IckWorker]


@pytest.fixture
def make_worker(flow: Pipeline, index: Ick, database_url: str, redis_url: str) -> Iterator[MakeWorker]:
    """Creates workers of one consumer, which is declared with the first of them."""
    made: list[IckWorker] = []

    def make(handler: Callable[..., Any] | None = None, **options: Any) -> IckWorker:
        if not flow.consumers:
            flow.consumer(reads=index, name="indexer", **options)(handler or copy_documents)
        spec = flow.get_consumer("indexer")
        made.append(IckWorker(WorkerSetup(flow, spec, database_url, redis_url)))
        return made[-1]

    yield make
    for worker in made:
        worker.close()


def get_ick(client: redis.Redis, shard: int) -> DirtyList:
    return DirtyList(client, f"penstock:{{index/{shard}}}:ick")


def waiting(client: redis.Redis) -> dict[bytes, float]:
    """Members of both shards that are dirty or held, with their scores."""
    found: dict[bytes, float] = {}
    for shard in (0, 1):
        keys = get_ick(client, shard).keys
        for key in (keys.dirty, keys.held):
            marks: Any = client.zrange(key, 0, -1, withscores=True)
            found.update(dict(marks))
    return found


def retain(streamer: Streamer) -> int:
    """Runs rounds with retention until it removes nothing more; returns the number of records removed."""
    return sum(retain_now(streamer) for _ in range(3))


def staged(connection: Connection) -> int:
    [(count,)] = connection.execute("SELECT count(*) FROM penstock.staged_records").fetchall()
    return int(count)


def test_marks_are_coalesced_and_their_members_reach_the_consumer(
    documents: Connection, index: Ick, streamer: Streamer, make_worker: MakeWorker, redis_client: redis.Redis
) -> None:
    """Guarantee 6."""
    for _ in range(5):
        mark_changed(documents, [f"d{n}" for n in range(100)])

    assert streamer.drain() == 500
    assert len(waiting(redis_client)) == 100
    assert make_worker().drain() == 100
    check_copy(documents, redis_client, index)


def test_the_score_is_the_time_at_which_the_first_record_was_staged(
    documents: Connection, streamer: Streamer, redis_client: redis.Redis
) -> None:
    mark_changed(documents, ["a"])
    [(first,)] = documents.execute("SELECT created_at FROM penstock.staged_records").fetchall()
    streamer.drain()

    mark_changed(documents, ["a"])
    streamer.drain()

    assert waiting(redis_client) == {b"a": first.timestamp()}


def test_a_batch_that_is_sent_again_marks_no_processed_member(
    documents: Connection, streamer: Streamer, make_worker: MakeWorker, redis_client: redis.Redis
) -> None:
    """Guarantees 1 and 6: the position is compared, so the second batch marks nothing."""
    mark_changed(documents, ["a", "b", "c"])
    streamer.drain()
    make_worker().drain()

    publisher = streamer.opened().publisher
    resent = publisher.resend(10)

    assert (resent.added, resent.known) == (0, 3)
    assert waiting(redis_client) == {}


def test_no_checkpoint_of_an_ick_is_moved(documents: Connection, streamer: Streamer, make_worker: MakeWorker) -> None:
    """It would show a lag for ever, and no member would be processed again; a halted shard can be resumed."""
    mark_changed(documents, ["a", "b"])
    streamer.drain()
    make_worker().drain()
    documents.execute("UPDATE penstock.checkpoints SET halted = 'by hand' WHERE shard = 1")

    for to in ("earliest", "latest"):
        with pytest.raises(Refused, match="penstock replay LOG --to index"):
            reset_checkpoint(Store(documents), "indexer", to, resume=True, apply=True)

    [move] = reset_checkpoint(Store(documents), "indexer", resume=True, apply=True)
    assert (move.shard, move.again, move.passed_over, move.resumes) == (1, 0, 0, True)


def test_a_member_that_changes_while_it_is_processed_comes_again(
    documents: Connection, index: Ick, streamer: Streamer, make_worker: MakeWorker, redis_client: redis.Redis
) -> None:
    """Guarantee 6."""
    changes = iter(range(3))

    def copy_late(session: Session, members: Sequence[str]) -> None:
        copy_documents(session, members)  # reads now …
        if next(changes, None) is not None:  # … and only then the document changes
            mark_changed(documents, members)
            streamer.drain()

    mark_changed(documents, ["a"])
    streamer.drain()

    assert make_worker(copy_late).drain() == 4
    check_copy(documents, redis_client, index)


def test_a_redis_that_comes_back_empty_is_marked_again_with_what_was_not_processed(
    documents: Connection, index: Ick, streamer: Streamer, make_worker: MakeWorker, redis_client: redis.Redis
) -> None:
    """Guarantees 6 and 9: retention has kept the marks of dirty members, and only those are processed again."""
    worker = make_worker()
    mark_changed(documents, [f"old {n}" for n in range(50)])
    streamer.drain()
    worker.drain()
    mark_changed(documents, [f"new {n}" for n in range(50)])
    streamer.drain()
    retain(streamer)
    assert staged(documents) >= 50

    redis_client.flushall()
    worker.close()
    streamer.close()
    streamer.drain()

    assert {m for m in waiting(redis_client) if m.startswith(b"new")} == {f"new {n}".encode() for n in range(50)}
    worker.drain()
    check_copy(documents, redis_client, index)


def test_a_checkpoint_does_not_go_back_with_a_redis_that_was_restored_to_an_older_state(
    documents: Connection, index: Ick, streamer: Streamer, make_worker: MakeWorker, redis_client: redis.Redis
) -> None:
    """Guarantee 12: retention may have removed what lies between."""
    worker = make_worker()
    mark_changed(documents, [f"d{n}" for n in range(20)])
    streamer.drain()
    worker.drain()
    offsets = 'SELECT "offset" FROM penstock.checkpoints ORDER BY shard'
    before = documents.execute(offsets).fetchall()
    assert sum(offset for (offset,) in before) == 20

    for shard in index.shard_names:
        redis_client.hset(ick_shard_keys("penstock", shard).progress, "passed", 1)
        get_ick(redis_client, shard.shard).add({"waits": 1})
    worker.close()
    worker.open()
    worker._advance_checkpoints()

    assert documents.execute(offsets).fetchall() == before


def test_a_redis_that_loses_only_the_ick_is_marked_again(
    documents: Connection, streamer: Streamer, make_worker: MakeWorker, redis_client: redis.Redis
) -> None:
    """Guarantee 6: the Ick was deleted, so its position no longer counts."""
    make_worker().drain()
    mark_changed(documents, ["a", "b", "c"])
    streamer.drain()
    for shard in (0, 1):
        get_ick(redis_client, shard).delete()
    assert waiting(redis_client) == {}

    retain(streamer)
    refresh_now(streamer)
    streamer.drain()

    assert set(waiting(redis_client)) == {b"a", b"b", b"c"}


def test_a_stream_written_as_a_log_is_no_position_of_an_ick(
    documents: Connection, streamer: Streamer, redis_client: redis.Redis
) -> None:
    """A streamer that does not yet know that the channel is an Ick appends records, and marks none."""
    mark_changed(documents, [f"d{n}" for n in range(20)])
    streamer.open()
    publisher = streamer.opened().publisher
    documents.execute("UPDATE penstock.channels SET kind = 'log'")
    streamer.drain()
    assert waiting(redis_client) == {}

    documents.execute("UPDATE penstock.channels SET kind = 'ick'")
    retain(streamer)
    publisher.refresh()
    streamer.drain()

    assert len(waiting(redis_client)) == 20


def test_retention_keeps_unprocessed_marks_and_nothing_else(
    documents: Connection, streamer: Streamer, make_worker: MakeWorker
) -> None:
    """The newest journal row of each shard stays, for its offsets."""
    worker = make_worker()
    for number in range(10):
        mark_changed(documents, [f"d{n}" for n in range(number * 10, number * 10 + 10)])
        streamer.drain()
    assert retain(streamer) == 0

    worker.drain()

    assert retain(streamer) > 60
    assert staged(documents) <= 20


def test_without_a_consumer_retention_goes_by_what_was_processed_not_by_what_was_marked(
    documents: Connection, index: Ick, streamer: Streamer, redis_client: redis.Redis
) -> None:
    """The members may be processed by another program; there is no checkpoint then that would hold anything."""
    for number in range(4):
        mark_changed(documents, [f"{number} {n}" for n in range(10)])
        streamer.drain()
    assert (retain(streamer), staged(documents)) == (0, 40)

    for shard in range(index.shards):
        ick = get_ick(redis_client, shard)
        ick.commit([member for member, _ in ick.reserve(40)])

    assert retain(streamer) > 0


@pytest.mark.slow
def test_retention_makes_progress_under_load_that_never_empties_the_ick(
    documents: Connection, streamer: Streamer, make_worker: MakeWorker, redis_client: redis.Redis
) -> None:
    """Once every waiting member is newer than a mark, all members that waited at that mark have been processed."""
    worker = make_worker(batch=10)
    removed = 0
    for number in range(12):
        mark_changed(documents, [f"d{n}" for n in range(number * 20, number * 20 + 20)])
        streamer.drain()
        worker.round(block_ms=0)
        mark_changed(documents, [f"late {number} {n}" for n in range(10)])
        streamer.drain()
        assert waiting(redis_client)
        report_now(worker)
        worker.round(block_ms=0) if number % 2 else None
        removed += retain(streamer)

    assert removed > 100


def test_the_reservation_of_a_dead_consumer_is_taken_over(
    documents: Connection,
    index: Ick,
    streamer: Streamer,
    make_worker: MakeWorker,
    redis_client: redis.Redis,
    set_constants: SetConstants,
) -> None:
    """Guarantees 4 and 6: its reservation is stale, and it has no transaction open on the shard."""
    set_constants("consuming.ick_worker", TAKEOVER_AFTER_S=0.1)
    mark_changed(documents, ["a", "b", "c", "d"])
    streamer.drain()
    for shard in index.shard_names:
        gone = Reservations(redis_client, ick_shard_keys("penstock", shard).name, holder="gone")
        assert isinstance(gone.reserve(), Reservation)

    assert make_worker().drain() == 4
    check_copy(documents, redis_client, index)


def test_a_consumer_in_a_long_transaction_is_not_taken_over(
    documents: Connection, streamer: Streamer, make_worker: MakeWorker, redis_client: redis.Redis, index: Ick
) -> None:
    """Its transaction holds a lock on the checkpoint's row, which other workers see."""
    answers: list[bool] = []

    def slow(session: Session, members: Sequence[str]) -> None:
        second = make_worker()
        second.open()
        second._holder_watch = dict.fromkeys(index.shard_names, HolderWatch(0.0))
        answers.append(bool(second.round(block_ms=0).applied))
        copy_documents(session, members)

    mark_changed(documents, ["a"])
    streamer.drain()

    assert make_worker(slow).drain() == 1
    assert answers == [False]


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_a_reservation_has_heartbeats_while_a_handler_is_tried_again_until_another_one_has_it(
    documents: Connection,
    index: Ick,
    streamer: Streamer,
    make_worker: MakeWorker,
    redis_client: redis.Redis,
    *,
    is_taken_over: bool,
) -> None:
    """Guarantee 6: what nobody hears of for a while is taken over, and who finds that out leaves the members to the other one."""
    icks = [ick_shard_keys("penstock", shard) for shard in index.shard_names]
    heartbeats: list[int] = []
    others: list[Any] = []

    def busy(session: Session, members: Sequence[str]) -> None:
        heartbeats.append(max(int(redis_client.hget(each.ick.fence, "heartbeats") or 0) for each in icks))
        if len(heartbeats) == 1:
            for each in icks:
                other = Reservations(redis_client, each.name, holder="other")
                if is_taken_over and isinstance(answer := other.reserve(), Busy):
                    others.append((other, other.reserve(in_place_of=answer)))
            raise Snooze(0.01)
        copy_documents(session, members)

    mark_changed(documents, ["a"])
    streamer.drain()
    make_worker(busy).round(block_ms=0)

    assert heartbeats[0] == 0
    assert [each > 0 for each in heartbeats[1:]] == ([] if is_taken_over else [True])
    assert [[member for member, _ in other.read(taken).marks] for other, taken in others] == [[b"a"]] * is_taken_over


def test_two_workers_share_the_shards(
    documents: Connection, index: Ick, streamer: Streamer, make_worker: MakeWorker, redis_client: redis.Redis
) -> None:
    """Guarantees 5 and 6: each skips a shard that the other works on."""
    applied: list[int] = []

    def share(session: Session, members: Sequence[str]) -> None:
        copy_documents(session, members)
        if not applied:
            applied.append(0)
            applied.append(make_worker().round(block_ms=0).applied)

    mark_changed(documents, [f"d{n}" for n in range(40)])
    streamer.drain()
    first = make_worker(share, batch=100).drain()

    assert applied[1] > 0
    assert first + applied[1] == 40
    check_copy(documents, redis_client, index)


def test_a_poison_member_is_dead_lettered_and_the_others_are_processed(
    documents: Connection, streamer: Streamer, make_worker: MakeWorker, redis_client: redis.Redis
) -> None:
    """Guarantee 21: its dead letter is removed once it has been processed."""
    poison = {"d7"}

    def picky(session: Session, members: list[str]) -> None:
        if poison & set(members):
            raise ValueError("it cannot be indexed")
        copy_documents(session, members)
        members.clear()  # as one that takes them from the list

    mark_changed(documents, [f"d{n}" for n in range(20)])
    streamer.drain()
    worker = make_worker(picky, attempts=1)

    assert worker.drain() == 19
    letters = "SELECT key, reason, attempts FROM penstock.dead_letters"
    assert documents.execute(letters).fetchall() == [("d7", "ValueError: it cannot be indexed", 1)]
    assert waiting(redis_client) == {}

    mark_changed(documents, ["d7"])
    streamer.drain()
    worker.drain()
    assert documents.execute(letters).fetchall() == [("d7", "ValueError: it cannot be indexed", 2)]

    poison.clear()
    mark_changed(documents, ["d7"])
    streamer.drain()
    worker.drain()
    assert documents.execute(letters).fetchall() == []


def test_a_member_is_cancelled_or_dead_lettered_if_the_handler_says_so(
    documents: Connection, streamer: Streamer, make_worker: MakeWorker, redis_client: redis.Redis
) -> None:
    said = {"d7": Cancel("gone"), "d9": DeadLetter("unreadable")}

    def picky(session: Session, members: Sequence[str]) -> None:
        for member in members:
            if member in said:
                raise said[member]
        copy_documents(session, members)

    mark_changed(documents, [f"d{n}" for n in range(20)])
    streamer.drain()
    make_worker(picky, attempts=5).drain()

    assert documents.execute("SELECT key, reason FROM penstock.dead_letters").fetchall() == [
        ("d9", "DeadLetter: unreadable")
    ]
    assert waiting(redis_client) == {}


def test_a_member_that_is_not_text_is_dead_lettered(
    documents: Connection, streamer: Streamer, make_worker: MakeWorker, redis_client: redis.Redis
) -> None:
    """Any other producer may add arbitrary bytes."""
    streamer.open()
    get_ick(redis_client, 0).add({b"\xff\x00": 5, b"good": 6})

    assert make_worker(attempts=1).drain() == 1
    [(key, reason)] = documents.execute("SELECT key, reason FROM penstock.dead_letters").fetchall()
    assert key == "\\xff\\x00"
    assert "UTF-8" in reason


def test_a_shard_halts_on_poison_if_declared_so(
    documents: Connection, streamer: Streamer, make_worker: MakeWorker, redis_client: redis.Redis
) -> None:
    def fails(_session: Session, _members: Sequence[str]) -> None:
        raise ValueError("never")

    mark_changed(documents, ["a"])
    streamer.drain()

    assert make_worker(fails, attempts=1, on_poison="halt").drain() == 0
    [(reason,)] = documents.execute("SELECT halted FROM penstock.checkpoints WHERE halted IS NOT NULL").fetchall()
    assert "'a' failed 1 time: ValueError: never" in reason
    assert set(waiting(redis_client)) == {b"a"}


def test_each_passes_one_member_per_call(documents: Connection, streamer: Streamer, make_worker: MakeWorker) -> None:
    seen: list[str] = []

    def one(_session: Session, member: str) -> None:
        seen.append(member)

    mark_changed(documents, ["a", "b", "c"])
    streamer.drain()
    make_worker(one, each=True).drain()

    assert sorted(seen) == ["a", "b", "c"]


def test_marks_that_postgres_has_lost_stop_streamer_and_consumer(
    documents: Connection, streamer: Streamer, make_worker: MakeWorker
) -> None:
    """Guarantees 6 and 10."""
    mark_changed(documents, [f"d{n}" for n in range(20)])
    streamer.drain()
    streamer.close()
    documents.execute("DELETE FROM penstock.journal")
    documents.execute("DELETE FROM penstock.staged_records")

    with pytest.raises(HistoryDiverged):
        streamer.open()
    with pytest.raises(HistoryDiverged):
        make_worker().open()


def test_a_member_processed_but_not_committed_is_processed_again(
    documents: Connection, index: Ick, streamer: Streamer, make_worker: MakeWorker, redis_client: redis.Redis
) -> None:
    worker = make_worker()
    mark_changed(documents, ["a"])
    streamer.drain()

    with repeated("members.after_delivery"):
        worker.round(block_ms=0)
    assert set(waiting(redis_client)) == {b"a"}
    worker.drain()

    check_copy(documents, redis_client, index)


def test_a_round_ends_as_soon_as_members_are_done(
    documents: Connection, streamer: Streamer, make_worker: MakeWorker
) -> None:
    """It waits for the first only."""
    mark_changed(documents, ["a"])
    streamer.drain()
    began = monotonic()

    assert make_worker(copy_documents).round(block_ms=100_000).applied == 1
    assert monotonic() - began < 60


def test_after_a_drain_the_checkpoints_are_where_the_members_are_done(
    documents: Connection, streamer: Streamer, make_worker: MakeWorker
) -> None:
    """However long ago the worker looked at the progress."""
    mark_changed(documents, ["a", "b"])
    streamer.drain()
    worker = make_worker(copy_documents)
    worker.open()
    worker._progress_at = math.inf
    worker.drain()

    assert documents.execute('SELECT sum("offset") FROM penstock.checkpoints').fetchone() == (2,)


def test_a_handler_that_commits_halts_its_shard(
    documents: Connection, streamer: Streamer, make_worker: MakeWorker, redis_client: redis.Redis
) -> None:
    def commits(session: Session, _members: Sequence[str]) -> None:
        session.connection().execute(text("COMMIT"))

    mark_changed(documents, ["a"])
    streamer.drain()

    halted: dict[Any, str] = {}
    with capture_logs() as logs:
        make_worker(commits).drain(lambda consumed: halted.update(consumed.halted))

    [(shard, reason)] = halted.items()
    assert "the handler committed the transaction" in reason
    assert reason.endswith(", then: penstock reset checkpoint indexer --resume --apply")
    said = [each for each in logs if each["event"] == "shard halted"]
    assert [each["shard"] for each in said] == [str(shard)]
    assert set(waiting(redis_client)) == {b"a"}


def test_an_ick_has_one_consumer_and_a_log_is_no_ick(flow: Pipeline, index: Ick, open_worker: OpenWorker) -> None:
    declare_index(flow, index)

    with pytest.raises(DeclarationError, match="indexer already reads index"):
        flow.consumer(reads=index, name="second")(copy_documents)
    with pytest.raises(DeclarationError, match="dataframe, park_key and payload"):
        flow.consumer(reads=index, name="second", dataframe=True)(copy_documents)  # type: ignore[call-overload]
    with pytest.raises(DeclarationError, match="needs no reconciliation"):
        flow.reconciliation(of="indexer", state="public.copies", key="key")(lambda tables: tables)
    with pytest.raises(DeclarationError, match="make_worker"):
        open_worker("indexer")
    with pytest.raises(DeclarationError, match="is not an Ick"):
        flow.marks_dirty(Pipeline, to=Log("things"), key="id")  # type: ignore[arg-type]


def test_a_worker_that_loses_its_connection_continues_its_reservation(
    documents: Connection, index: Ick, streamer: Streamer, make_worker: MakeWorker, redis_client: redis.Redis
) -> None:
    """Nothing has to become stale first: the holder is the same."""
    worker = make_worker()
    worker.open()
    mark_changed(documents, ["a", "b", "c"])
    streamer.drain()
    for shard in index.shard_names:
        assert isinstance(worker._icks[shard].reserve(), Reservation)

    worker.close()
    worker.open()
    worker._holder_watch = {}  # would be consulted if the reservation were busy

    assert worker.drain() == 3
    eventually(lambda: not waiting(redis_client), "all is done")
    check_copy(documents, redis_client, index)
