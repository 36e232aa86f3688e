"""``penstock.ick``: a micro-batch is a reservation; no member is forgotten, whatever Spark does with it."""

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark import TaskContext
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  the usual name

from fixtures.redis_ick import RedisIck
from penstock import Ick
from penstock.channels.ick import Busy, DirtyList, HolderWatch, Reservation, Reservations
from penstock.channels.routing import ick_shard_keys
from penstock.channels.server import connect_redis
from penstock.spark.sources.ick.reservation_sequence import ReservationSequence

pytestmark = pytest.mark.spark
INDEX = Ick("index", shards=2)
Batch = Callable[[DataFrame, int], None]


@pytest.fixture
def where(redis_url: str) -> dict[str, str]:
    """Options for an Ick of two shards."""
    return {"channel": "index", "shards": "2", "redisUrl": redis_url, "takeoverAfterSeconds": "1"}


@pytest.fixture
def icks(redis_client: redis.Redis) -> list[DirtyList]:
    """The shards of that Ick."""
    return [DirtyList(redis_client, ick_shard_keys("penstock", s).name) for s in INDEX.shard_names]


def mark(icks: list[DirtyList], members: list[str], score: float = 5.0) -> None:
    for member in members:
        icks[INDEX.shard_for(member)].add({member: score})


def waiting(icks: list[DirtyList]) -> set[bytes]:
    """All members of both shards: dirty, reserved or held."""
    return {
        member
        for ick in icks
        for key in (ick.keys.dirty, ick.keys.reserved, ick.keys.held)
        for member in ick._client.zrange(key, 0, -1)
    }


def names(count: int) -> list[str]:
    return [f"d{number}" for number in range(count)]


def members(frame: DataFrame) -> list[str]:
    return sorted(row.member for row in frame.collect())


def run(
    spark: SparkSession, where: dict[str, str], checkpoint: Path, batch: Batch, **options: str
) -> list[Any]:
    """Runs a query over the members that wait now; returns the progress of the micro-batches that had members."""
    query = (
        spark.readStream.format("penstock.ick")
        .options(**where)
        .options(**options)
        .load()
        .writeStream.foreachBatch(batch)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return [each for each in query.recentProgress if each["numInputRows"]]


def test_a_stream_takes_dirty_members_and_commits_them_when_their_batch_is_done(
    spark: SparkSession, where: dict[str, str], icks: list[DirtyList], tmp_path: Path
) -> None:
    for score in (1_700_000_000.5, 1_800_000_000):
        mark(icks, names(40), score)
    icks[0].add([(b"\xff", -1e300)])
    rows: list[Any] = []
    held: list[set[bytes]] = []

    def batch(frame: DataFrame, _: int) -> None:
        rows.extend(frame.collect())
        held.append(waiting(icks))

    progress = run(spark, where, tmp_path, batch)

    assert len(progress) == 1
    assert len(held[0]) == 41  # not before the batch is done
    assert waiting(icks) == set()
    by_member = {bytes(row.bytes): row for row in rows}
    assert len(rows) == len(by_member) == 41
    row = by_member[b"d7"]
    assert (row.channel, row.shard, row.member) == ("index", INDEX.shard_for("d7"), "d7")
    assert (row.score, row.reservation) == (1_700_000_000.5, 1)
    assert row.timestamp.timestamp() == 1_700_000_000.5
    assert (by_member[b"\xff"].member, by_member[b"\xff"].timestamp) == (None, None)


def test_a_micro_batch_is_limited_in_size_and_takes_the_oldest_members(
    spark: SparkSession, where: dict[str, str], icks: list[DirtyList], tmp_path: Path
) -> None:
    for number, name in enumerate(names(40)):
        mark(icks, [name], float(number))
    seen: dict[int, list[float]] = {0: [], 1: []}
    sizes: list[int] = []

    def batch(frame: DataFrame, _: int) -> None:
        rows = frame.collect()
        sizes.append(len(rows))
        for row in rows:
            seen[row.shard].append(row.score)

    run(spark, where, tmp_path, batch, maxMembersPerTrigger="10")

    assert max(sizes) <= 10
    assert len(seen[0]) + len(seen[1]) == 40
    assert all(scores == sorted(scores) for scores in seen.values())


def test_a_member_that_becomes_dirty_while_its_batch_runs_comes_again(
    spark: SparkSession, where: dict[str, str], icks: list[DirtyList], tmp_path: Path
) -> None:
    """Guarantee 6."""
    mark(icks, ["a", "b"], 1)
    seen: list[list[str]] = []

    def batch(frame: DataFrame, _: int) -> None:
        seen.append(members(frame))
        if len(seen) == 1:
            mark(icks, ["a"], 2)

    run(spark, where, tmp_path, batch)
    assert waiting(icks) == {b"a"}
    run(spark, where, tmp_path, batch)

    assert seen == [["a", "b"], ["a"]]
    assert waiting(icks) == set()


def fail_once(seen: list[list[str]], meanwhile: Callable[[], None] = lambda: None) -> Batch:
    """Collects the members of each batch; the first batch fails after it has processed them."""

    def batch(frame: DataFrame, _: int) -> None:
        seen.append(members(frame))
        if len(seen) == 1:
            meanwhile()
            raise ValueError("on purpose")

    return batch


def test_a_failed_batch_is_run_again_with_the_same_members(
    spark: SparkSession, where: dict[str, str], icks: list[DirtyList], tmp_path: Path
) -> None:
    """Guarantee 6: members that became dirty meanwhile wait until the batch is done."""
    mark(icks, ["a", "b"], 1)
    seen: list[list[str]] = []
    batch = fail_once(seen, lambda: mark(icks, ["a", "c"], 2))

    with pytest.raises(StreamingQueryException):
        run(spark, where, tmp_path, batch)
    assert waiting(icks) == {b"a", b"b", b"c"}
    run(spark, where, tmp_path, batch)

    assert seen == [["a", "b"], ["a", "b"], ["a", "c"]]
    assert waiting(icks) == set()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["deleted", "older"])
def test_a_query_without_its_checkpoint_directory_forgets_nothing(
    spark: SparkSession, where: dict[str, str], icks: list[DirtyList], tmp_path: Path, way: str
) -> None:
    """Guarantees 4 and 6: Spark's checkpoints decide nothing."""
    checkpoint, copy = tmp_path / "checkpoint", tmp_path / "copy"
    seen: list[list[str]] = []
    mark(icks, ["z"], 1)
    run(spark, where, checkpoint, lambda _frame, _: None)
    shutil.copytree(checkpoint, copy)
    mark(icks, ["a", "b"], 1)
    batch = fail_once(seen, lambda: mark(icks, ["a", "c"], 2))
    with pytest.raises(StreamingQueryException):
        run(spark, where, checkpoint, batch)
    shutil.rmtree(checkpoint)
    if way == "older":
        shutil.copytree(copy, checkpoint)

    run(spark, where, checkpoint, batch)

    assert set(seen[0]) == {"a", "b"}
    assert {member for each in seen[1:] for member in each} == {"a", "b", "c"}
    assert waiting(icks) == set()


@pytest.mark.slow
def test_a_replay_of_a_reservation_that_was_taken_over_commits_nothing(
    spark: SparkSession,
    where: dict[str, str],
    icks: list[DirtyList],
    redis_client: redis.Redis,
    tmp_path: Path,
) -> None:
    """Guarantees 5 and 6: a driver that was presumed dead comes back."""
    mark(icks, ["a", "b", "c", "d"], 1)
    seen: list[list[str]] = []
    others = [Reservations(redis_client, ick.keys.version, holder="other") for ick in icks]
    theirs: list[Reservation] = []

    def taken_over() -> None:
        for other in others:
            busy = other.reserve()
            assert isinstance(busy, Busy)
            answer = other.reserve(in_place_of=busy)
            assert isinstance(answer, Reservation)
            theirs.append(answer)

    batch = fail_once(seen, taken_over)
    with pytest.raises(StreamingQueryException):
        run(spark, where, tmp_path, batch)
    mark(icks, ["a"], 2)
    checker = threading.Event()

    def alive() -> None:
        while not checker.wait(0.2):
            for other, reservation in zip(others, theirs, strict=True):
                other.commit(reservation, ())

    thread = threading.Thread(target=alive)
    thread.start()
    run(spark, where, tmp_path, batch)
    checker.set()
    thread.join()

    # The replay had no members, and committed nothing.
    assert seen == [["a", "b", "c", "d"], []]
    assert [other.read(each) for other, each in zip(others, theirs, strict=True)] == theirs
    assert waiting(icks) == {b"a", b"b", b"c", b"d"}


def test_a_zombie_commits_nothing_of_its_successors(
    spark: SparkSession,
    where: dict[str, str],
    icks: list[DirtyList],
    redis_client: redis.Redis,
    tmp_path: Path,
) -> None:
    """Guarantee 6: the driver slept during its batch; another consumer has processed the members and holds them again."""
    mark(icks, ["a", "b", "c", "d"], 1)
    theirs: list[tuple[Reservations, Reservation]] = []

    def batch(_frame: DataFrame, number: int) -> None:
        if number:
            return
        for ick in icks:
            other = Reservations(redis_client, ick.keys.version, holder="other")
            busy = other.reserve()
            assert isinstance(busy, Busy)
            first = other.reserve(in_place_of=busy)
            assert isinstance(first, Reservation)
            mark(icks, [member.decode() for member in first.members], 2)
            second = other.exchange(first)
            assert isinstance(second, Reservation)
            theirs.append((other, second))

    run(spark, where, tmp_path, batch, takeoverAfterSeconds="30", maxMembersPerTrigger="100")

    for other, reservation in theirs:
        assert other.read(reservation) == reservation
    assert waiting(icks) == {b"a", b"b", b"c", b"d"}


@pytest.mark.slow
def test_the_reservation_of_a_long_batch_does_not_become_stale(
    spark: SparkSession,
    where: dict[str, str],
    icks: list[DirtyList],
    redis_client: redis.Redis,
    tmp_path: Path,
) -> None:
    mark(icks, ["a"], 1)
    key = icks[INDEX.shard_for("a")].keys.version
    watch, stale = HolderWatch(2.0), []

    def batch(_frame: DataFrame, _: int) -> None:
        other = Reservations(redis_client, key, holder="other")
        for _ in range(40):
            busy = other.reserve()
            assert isinstance(busy, Busy)
            stale.append(watch.is_stale(busy))
            threading.Event().wait(0.1)

    run(spark, where, tmp_path, batch)

    assert stale == [False] * 40
    assert waiting(icks) == set()


@pytest.mark.slow
def test_a_task_that_runs_again_reads_the_same_members(
    spark: SparkSession, where: dict[str, str], icks: list[DirtyList], tmp_path: Path
) -> None:
    """Guarantee 5."""
    mark(icks, ["a", "b", "c", "d"], 1)
    seen: list[list[str]] = []

    def first_attempt_fails(parts: Any) -> Any:
        yield from parts
        context = TaskContext.get()
        assert context is not None
        if context.attemptNumber() == 0:
            raise ValueError("on purpose")

    def batch(frame: DataFrame, _: int) -> None:
        rows = frame.rdd.mapPartitions(first_attempt_fails).collect()
        seen.append(sorted(row.member for row in rows))

    run(spark, where, tmp_path, batch)

    assert seen == [["a", "b", "c", "d"]]
    assert waiting(icks) == set()


def sequence(redis_url: str) -> ReservationSequence:
    """The reservations of a new driver."""
    made = {int(s.shard): ick_shard_keys("penstock", s).name for s in INDEX.shard_names}
    return ReservationSequence(connect_redis(redis_url), made, takeover_after_s=3600)


def test_a_driver_that_dies_before_spark_has_stored_the_offset_gets_the_reservation_again(
    redis_url: str, icks: list[DirtyList]
) -> None:
    sizes = {0: 10, 1: 10}
    first = sequence(redis_url)
    mark(icks, ["a", "b", "c", "d"], 1)
    start = first.after(first.beginning, sizes)
    mark(icks, ["a", "e", "f", "g"], 2)
    never_stored = first.after(start, sizes)

    again = sequence(redis_url).after(start, sizes)

    assert again == never_stored != start
    assert waiting(icks) == {b"a", b"e", b"f", b"g"}


def test_two_queries_without_checkpoints_never_share_a_reservation(
    redis_url: str, icks: list[DirtyList]
) -> None:
    sizes = {0: 10, 1: 10}
    mark(icks, ["a", "b", "c", "d"], 1)
    one, two = sequence(redis_url), sequence(redis_url)

    given = one.after(one.beginning, sizes)

    assert given != one.beginning
    assert two.after(two.beginning, sizes) == two.beginning
    assert two.busy == {0, 1}


def test_waiting_for_members_writes_nothing(
    redis_url: str, redis_client: redis.Redis, icks: list[DirtyList]
) -> None:
    one = sequence(redis_url)
    mark(icks, ["a", "b", "c", "d"], 1)
    start = one.after(one.beginning, {0: 9, 1: 9})
    one.after(start, {0: 9, 1: 9})
    changes: Any = redis_client.info("persistence")

    for _ in range(5):
        assert one.after(start, {0: 9, 1: 9}) == start

    now: Any = redis_client.info("persistence")
    assert now["rdb_changes_since_last_save"] == changes["rdb_changes_since_last_save"]
    assert waiting(icks) == set()


def test_a_batch_read_reserves_nothing(
    spark: SparkSession, where: dict[str, str], icks: list[DirtyList]
) -> None:
    mark(icks, names(30), 1)
    icks[0].reserve(3)
    frame = spark.read.format("penstock.ick").options(**where).load()

    assert members(frame) == sorted(names(30))
    assert [row.reservation for row in frame.collect()] == [None] * 30
    assert [ick.stats().held.size for ick in icks] == [0, 0]  # type: ignore[union-attr]


def test_an_ick_outside_a_pipeline_is_read_by_its_key(
    spark: SparkSession, redis_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    """Such an Ick is marked by a Ruby process, for example."""
    ruby = RedisIck(redis_client, "ride-index")
    ruby.add({"a": 1, "b": 2})
    seen: list[list[str]] = []

    run(
        spark,
        {"key": "ride-index", "redisUrl": redis_url},
        tmp_path,
        lambda frame, _: seen.append(members(frame)),
    )

    assert seen == [["a", "b"]]
    assert ruby.sizes() == (0, 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "give option channel"),
        ({"channel": "a", "key": "b"}, "give option channel"),
        ({"key": "b", "shards": "2"}, "a key is one Ick"),
        ({"channel": "a", "startingOffsets": "earliest"}, "no option 'startingoffsets'"),
        ({"channel": "a", "maxMembersPerTrigger": "many"}, "maxMembersPerTrigger"),
        ({"channel": "A b"}, "a name has 1 to 63 characters"),
    ],
)
def test_invalid_options_are_refused(
    spark: SparkSession, options: dict[str, str], said: str
) -> None:
    with pytest.raises(Exception, match=said):
        spark.read.format("penstock.ick").options(**options).load().collect()


def test_offsets_are_json_that_spark_can_compare(redis_url: str, icks: list[DirtyList]) -> None:
    one = sequence(redis_url)
    mark(icks, ["a", "b", "c", "d"], 1)

    assert json.loads(json.dumps(one.after(one.beginning, {0: 9, 1: 9}))).keys() == {"0", "1"}


def marked(icks: list[DirtyList]) -> dict[bytes, float]:
    return {
        m: s for ick in icks for m, s in ick._client.zrange(ick.keys.dirty, 0, -1, withscores=True)
    }


def write(frame: DataFrame, where: dict[str, str]) -> None:
    frame.write.format("penstock.ick").options(**where).mode("append").save()


def test_a_batch_marks_its_members_each_in_its_shard_with_the_lowest_score(
    spark: SparkSession, where: dict[str, str], icks: list[DirtyList]
) -> None:
    frame = spark.range(100).select(
        F.concat(F.lit("d"), F.col("id") % 10).alias("member"), F.col("id").alias("score")
    )

    write(frame, where)
    write(frame, where)

    assert marked(icks) == {f"d{n}".encode(): float(n) for n in range(10)}
    for shard, ick in enumerate(icks):
        found: Any = ick._client.zrange(ick.keys.dirty, 0, -1)
        assert {INDEX.shard_for(member) for member in found} <= {shard}


def test_members_without_a_score_are_dirty_as_of_redis_current_time(
    spark: SparkSession, where: dict[str, str], icks: list[DirtyList], redis_client: redis.Redis
) -> None:
    before: Any = redis_client.time()
    write(spark.createDataFrame([(b"\xff",), (b"a",)], "member binary"), where)
    after: Any = redis_client.time()

    found = marked(icks)
    assert set(found) == {b"\xff", b"a"}
    for score in found.values():
        assert before[0] <= score <= after[0] + 1


def test_a_time_is_a_score(
    spark: SparkSession, where: dict[str, str], icks: list[DirtyList]
) -> None:
    write(
        spark.range(1).selectExpr("'a' member", "timestamp_micros(1700000000500000) score"), where
    )

    assert marked(icks) == {b"a": 1_700_000_000.5}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("CAST(NULL AS string) member", "member"),
        ("'a' member, double('NaN') score", "finite number"),
        ("'a' name", "no column 'member'"),
    ],
)
def test_rows_that_are_not_marks_are_refused_and_nothing_is_written(
    spark: SparkSession, where: dict[str, str], redis_client: redis.Redis, rows: str, said: str
) -> None:
    with pytest.raises(Exception, match=said):
        write(spark.range(1).selectExpr(*rows.split(", ")), where)

    assert redis_client.dbsize() == 0


def test_an_ick_is_never_overwritten(spark: SparkSession, where: dict[str, str]) -> None:
    frame = spark.range(1).selectExpr("'a' member")

    with pytest.raises(Exception, match="never overwritten"):
        frame.write.format("penstock.ick").options(**where).mode("overwrite").save()


@pytest.mark.slow
def test_a_stream_of_one_ick_is_marked_in_another(
    spark: SparkSession,
    where: dict[str, str],
    icks: list[DirtyList],
    redis_client: redis.Redis,
    tmp_path: Path,
) -> None:
    mark(icks, names(20), 3)
    icks[0].add([(b"\xff", 4)])
    query = (
        spark.readStream.format("penstock.ick")
        .options(**where)
        .load()
        .writeStream.format("penstock.ick")
        .option("redisUrl", where["redisUrl"])
        .option("key", "mirror")
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()

    found = DirtyList(redis_client, "mirror").reserve(100)
    assert {member for member, _ in found} == {name.encode() for name in names(20)} | {b"\xff"}
    assert waiting(icks) == set()
