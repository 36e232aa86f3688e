"""``penstock.ick``: a micro-batch is a reservation; no member is forgotten, whatever Spark does with it."""

import json
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import redis
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812  the usual name
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from fixtures.clients import connect_redis
from fixtures.constants import SetConstants
from fixtures.redis_ick import RedisIck
from fixtures.spark import run_to_end
from penstock import Ick
from penstock.channels.ick.reservations import HolderWatch
from penstock.channels.routing import ick_shard_keys
from penstock.clients import Busy, DirtyList, Reservation, Reservations
from penstock.errors import InvalidIckCall, InvalidName, InvalidRecord, InvalidSetting
from penstock.spark.releases import ReadAllAvailable, ReadMaxRows
from penstock.spark.sources.dirty_members import (
    MEMBERS_A_SHARD,
    IckBatchReader,
    IckDataSource,
    IckOptions,
    IckStreamReader,
    MembersPartition,
)
from penstock.spark.sources.reservation_sequence import ReservationSequence
from penstock.testing import eventually

INDEX = Ick("index", shards=2)
SCHEMA = StructType()
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


def make_stream(spark: SparkSession, where: dict[str, str], **options: str) -> DataFrame:
    return spark.readStream.format("penstock.ick").options(**where).options(**options).load()


def test_a_stream_takes_the_oldest_members_first_and_commits_them_when_their_batch_is_done(
    spark: SparkSession, where: dict[str, str], icks: list[DirtyList], tmp_path: Path
) -> None:
    for number, name in enumerate(names(40)):
        mark(icks, [name], 1_700_000_000.5 + number)
        mark(icks, [name], 1_800_000_000)
    icks[0].add([(b"\xff", -1e300)])
    batches: list[list[Row]] = []
    held: list[set[bytes]] = []

    def batch(frame: DataFrame, _: int) -> None:
        batches.append(frame.collect())
        held.append(waiting(icks))

    frame = make_stream(spark, where, maxMembersPerTrigger="20")
    run_to_end(frame.writeStream.foreachBatch(batch), tmp_path)

    assert len(held[0]) == 41  # not before the batch is done
    assert waiting(icks) == set()
    assert max(map(len, batches)) <= 20
    rows = [row for each in batches for row in each]
    for shard in (0, 1):
        scores = [row.score for row in rows if row.shard == shard]
        assert scores == sorted(scores)
    by_member = {bytes(row.bytes): row for row in rows}
    assert len(rows) == len(by_member) == 41
    row = by_member[b"d0"]
    assert (row.channel, row.shard, row.member) == ("index", INDEX.shard_for("d0"), "d0")
    assert (row.score, row.reservation) == (1_700_000_000.5, 1)
    assert row.timestamp.timestamp() == 1_700_000_000.5
    assert (by_member[b"\xff"].member, by_member[b"\xff"].timestamp) == (None, None)


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
    """Guarantee 6: members that became dirty meanwhile wait until the batch is done, and then come again."""
    mark(icks, ["a", "b"], 1)
    seen: list[list[str]] = []
    batch = fail_once(seen, lambda: mark(icks, ["a", "c"], 2))
    writer = make_stream(spark, where).writeStream.foreachBatch(batch)

    with pytest.raises(StreamingQueryException, match="on purpose"):
        run_to_end(writer, tmp_path)
    assert waiting(icks) == {b"a", b"b", b"c"}
    run_to_end(writer, tmp_path)

    assert seen == [["a", "b"], ["a", "b"], ["a", "c"]]
    assert waiting(icks) == set()


ALL = ReadAllAvailable()


MADE: list[IckStreamReader | ReservationSequence] = []
"""What would send heartbeats while other tests run."""


@pytest.fixture(autouse=True)
def _stopped() -> Iterator[None]:
    yield
    while MADE:
        MADE.pop().stop()


def make_reader(where: dict[str, str]) -> IckStreamReader:
    """The reader of a driver."""
    made = IckStreamReader(IckOptions.parse(where))
    MADE.append(made)
    return made


def read(reader: IckStreamReader, start: Any, end: Any) -> list[str]:
    """The members of a micro-batch, as its tasks read them."""
    tasks = [pickle.loads(pickle.dumps(task)) for task in reader.partitions(start, end)]
    return sorted(m for task in tasks for b in reader.read(task) for m in b.column("member").to_pylist())


def take_over(client: redis.Redis, icks: list[DirtyList]) -> list[tuple[Reservations, Reservation]]:
    """Another consumer takes over all reservations, which it presumes dead."""
    taken = []
    for ick in icks:
        other = Reservations(client, ick.keys.version, holder="other")
        busy = other.reserve()
        assert isinstance(busy, Busy)
        answer = other.reserve(in_place_of=busy)
        assert isinstance(answer, Reservation)
        taken.append((other, answer))
    return taken


def test_a_member_that_becomes_dirty_while_its_batch_runs_comes_again(
    where: dict[str, str], icks: list[DirtyList]
) -> None:
    """Guarantee 6."""
    mark(icks, ["a", "b"], 1)
    reader = make_reader(where)
    start = reader.initialOffset()
    first = reader.latestOffset(start, ALL)
    mark(icks, ["a"], 2)

    assert read(reader, start, first) == ["a", "b"]
    second = reader.latestOffset(first, ALL)
    assert waiting(icks) == {b"a"}
    assert read(reader, first, second) == ["a"]
    assert reader.latestOffset(second, ALL) == second
    assert waiting(icks) == set()


@pytest.mark.parametrize("way", ["deleted", "older"])
def test_a_query_without_its_checkpoint_directory_forgets_nothing(
    where: dict[str, str], icks: list[DirtyList], way: str
) -> None:
    """Guarantees 4 and 6: Spark's checkpoints decide nothing."""
    first = make_reader(where)
    begin = first.initialOffset()
    mark(icks, ["z"], 1)
    older = first.latestOffset(begin, ALL)
    mark(icks, ["a", "b"], 1)
    at = first.latestOffset(older, ALL)
    assert read(first, older, at) == ["a", "b"]
    mark(icks, ["a", "c"], 2)
    first.stop()  # the driver has died

    again = make_reader(where)
    again.prepareForTriggerAvailableNow()  # which waits until the dead driver's may be taken over
    at = again.initialOffset() if way == "deleted" else older
    seen: list[str] = []
    while (end := again.latestOffset(at, ALL)) != at:
        seen += read(again, at, end)
        at = end

    assert set(seen) == {"a", "b", "c"}
    assert waiting(icks) == set()


def test_a_replay_of_a_reservation_that_was_taken_over_commits_nothing(
    where: dict[str, str], icks: list[DirtyList], redis_client: redis.Redis
) -> None:
    """Guarantees 5 and 6: a driver that was presumed dead comes back."""
    mark(icks, ["a", "b", "c", "d"], 1)
    before = make_reader(where)
    start = before.initialOffset()
    end = before.latestOffset(start, ALL)
    theirs = take_over(redis_client, icks)
    mark(icks, ["a"], 2)

    replaying = make_reader(where)
    assert read(replaying, start, end) == []
    assert replaying.latestOffset(end, ALL) == end

    assert [other.read(each) for other, each in theirs] == [each for _, each in theirs]
    assert waiting(icks) == {b"a", b"b", b"c", b"d"}


def test_a_zombie_commits_nothing_of_its_successors(
    where: dict[str, str], icks: list[DirtyList], redis_client: redis.Redis
) -> None:
    """Guarantee 6: the driver slept during its batch; another consumer has processed the members and holds them again."""
    mark(icks, ["a", "b", "c", "d"], 1)
    reader = make_reader(where | {"takeoverAfterSeconds": "30"})
    end = reader.latestOffset(reader.initialOffset(), ALL)
    theirs = []
    for other, first in take_over(redis_client, icks):
        mark(icks, [member.decode() for member in first.members], 2)
        second = other.exchange(first)
        assert isinstance(second, Reservation)
        theirs.append((other, second))

    assert reader.latestOffset(end, ALL) == end

    for other, reservation in theirs:
        assert other.read(reservation) == reservation
    assert waiting(icks) == {b"a", b"b", b"c", b"d"}


@pytest.mark.slow
def test_the_reservation_of_a_long_batch_does_not_become_stale(
    where: dict[str, str], icks: list[DirtyList], redis_client: redis.Redis
) -> None:
    """It lasts longer than the watch waits for a heartbeat."""
    mark(icks, ["a"], 1)
    reader = make_reader(where)
    at = reader.latestOffset(reader.initialOffset(), ALL)
    key = icks[INDEX.shard_for("a")].keys.version
    other, watch = Reservations(redis_client, key, holder="other"), HolderWatch(2.0)
    stale, waited = [], threading.Event()

    for _ in range(25):
        busy = other.reserve()
        assert isinstance(busy, Busy)
        stale.append(watch.is_stale(busy))
        waited.wait(0.1)

    assert stale == [False] * 25
    reader.latestOffset(at, ALL)
    assert waiting(icks) == set()


def test_a_task_that_runs_again_reads_the_same_members(where: dict[str, str], icks: list[DirtyList]) -> None:
    """Guarantee 5: it carries them, whatever befalls the Ick meanwhile."""
    mark(icks, ["a", "b", "c", "d"], 1)
    reader = make_reader(where)
    start = reader.initialOffset()
    tasks = reader.partitions(start, end := reader.latestOffset(start, ALL))
    first = [list(reader.read(task)) for task in tasks]
    mark(icks, ["a", "e"], 2)
    reader.latestOffset(end, ALL)

    assert [list(reader.read(task)) for task in tasks] == first
    assert sum(batch.num_rows for batches in first for batch in batches) == 4


def sequence(redis_url: str) -> ReservationSequence:
    """The reservations of a new driver."""
    made = {int(s.shard): ick_shard_keys("penstock", s).name for s in INDEX.shard_names}
    sequence = ReservationSequence(connect_redis(redis_url), made, takeover_after_s=3600)
    MADE.append(sequence)
    return sequence


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


def test_two_queries_without_checkpoints_never_share_a_reservation(redis_url: str, icks: list[DirtyList]) -> None:
    sizes = {0: 10, 1: 10}
    mark(icks, ["a", "b", "c", "d"], 1)
    one, two = sequence(redis_url), sequence(redis_url)

    given = one.after(one.beginning, sizes)

    assert given != one.beginning
    assert two.after(two.beginning, sizes) == two.beginning
    assert two.busy == {0, 1}


def test_waiting_for_members_writes_nothing(redis_url: str, redis_client: redis.Redis, icks: list[DirtyList]) -> None:
    """It asks for the sizes alone, and sends no heartbeat."""
    before = {*threading.enumerate()}
    one = sequence(redis_url)
    mark(icks, ["a", "b", "c", "d"], 1)
    start = one.after(one.beginning, {0: 9, 1: 9})
    one.after(start, {0: 9, 1: 9})
    eventually(lambda: {*threading.enumerate()} <= before, "no heartbeat is sent")
    changes: Any = redis_client.info("persistence")
    redis_client.config_resetstat()

    for _ in range(5):
        assert one.after(start, {0: 9, 1: 9}) == start

    now: Any = redis_client.info("persistence")
    assert now["rdb_changes_since_last_save"] == changes["rdb_changes_since_last_save"]
    commands: Any = redis_client.info("commandstats")
    assert {name for name in commands if "eval" in name} == set()
    assert waiting(icks) == set()


def test_a_batch_read_reserves_nothing(spark: SparkSession, where: dict[str, str], icks: list[DirtyList]) -> None:
    mark(icks, names(30), 1)
    icks[0].reserve(3)
    rows = spark.read.format("penstock.ick").options(**where).load().collect()

    assert sorted(row.member for row in rows) == sorted(names(30))
    assert {row.reservation for row in rows} == {None}
    assert [ick.stats().held.size for ick in icks] == [0, 0]  # type: ignore[union-attr]


def test_an_ick_outside_a_pipeline_is_read_by_its_key(redis_url: str, redis_client: redis.Redis) -> None:
    """Such an Ick is marked by a Ruby process, for example."""
    ruby = RedisIck(redis_client, "ride_index")
    ruby.add({"a": 1, "b": 2})
    reader = make_reader({"key": "ride_index", "redisUrl": redis_url})
    start = reader.initialOffset()

    end = reader.latestOffset(start, ALL)

    assert (read(reader, start, end), [*end]) == (["a", "b"], ["0"])
    assert reader.latestOffset(end, ALL) == end
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
def test_invalid_options_are_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises((InvalidSetting, InvalidName), match=said):
        IckDataSource(options).reader(SCHEMA)


def read_all(where: dict[str, str]) -> list[tuple[int, str | None, bytes, float, Any, int | None]]:
    """The rows of a batch, in the order of its tasks."""
    reader = IckBatchReader(IckOptions.parse(where))
    tables = [batch.to_pylist() for task in reader.partitions() for batch in reader.read(task)]
    return [tuple(row.values())[1:] for rows in tables for row in rows]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 6, 7])
def test_a_batch_has_every_member_that_waits_in_whatever_state_once(
    where: dict[str, str], icks: list[DirtyList], set_constants: SetConstants, count: int
) -> None:
    """Three at a time; those held and reserved among them."""
    set_constants("spark.sources.dirty_members", MEMBERS_A_READ=3)
    icks[0].add({f"held{n}": 1.5 + n for n in range(count)})
    Reservations(icks[0]._client, icks[0].keys.version, holder="other", size=count or 1).reserve()
    icks[0].add({f"dirty{n}": 5 for n in range(count)})
    icks[1].add({f"reserved{n}": 7 for n in range(count)})
    icks[1].reserve(count or 1)
    icks[1].add([(b"\xff", 1e300)])

    found = read_all(where)

    names = {f"{state}{n}" for state in ("held", "dirty", "reserved") for n in range(count)}
    assert sorted(str(member) for _, member, *_ in found) == sorted({*names, "None"})
    assert {shard for shard, member, *_ in found if str(member).startswith(("held", "dirty"))} <= {0}
    times = {score: at and at.timestamp() for *_, score, at, _ in found}
    assert times[1e300] is None
    assert all(at == score for score, at in times.items() if score != 1e300)
    assert {reservation for *_, reservation in found} == {None}


@pytest.mark.parametrize(
    ("most", "sizes"), [("1", [1, 1]), ("2", [1, 1]), ("3", [2, 2]), ("20", [6, 4]), (None, [6, 4])]
)
def test_a_micro_batch_has_so_many_members_of_each_shard(
    where: dict[str, str], icks: list[DirtyList], most: str | None, sizes: list[int]
) -> None:
    for shard, count in enumerate((6, 4)):
        icks[shard].add({f"{shard}-{n}": n for n in range(count)})
    reader = make_reader(where if most is None else {**where, "maxMembersPerTrigger": most})
    start = reader.initialOffset()
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(int(most or 2 * MEMBERS_A_SHARD))

    end = reader.latestOffset(start, limit)
    tasks = reader.partitions(start, end)

    assert [(task.shard, [m for m, _ in task.marks]) for task in tasks if isinstance(task, MembersPartition)] == [
        (shard, [f"{shard}-{n}".encode() for n in range(size)]) for shard, size in enumerate(sizes)
    ]
    reader.latestOffset(end, ALL)


@pytest.mark.parametrize("limit", [ALL, ReadMaxRows(2), ReadMaxRows(3)])
def test_a_query_of_what_is_there_ends_after_as_many_members_as_there_were(
    where: dict[str, str], icks: list[DirtyList], limit: Any
) -> None:
    """Those that become dirty again meanwhile would never end."""
    for shard, count in enumerate((3, 5)):
        icks[shard].add({f"{shard}-{n}": n for n in range(count)})
    reader = make_reader(where)
    reader.prepareForTriggerAvailableNow()
    at, seen = reader.initialOffset(), list[str]()
    for _ in range(20):
        for shard in (0, 1):
            icks[shard].add({f"{shard}-0": 9, f"{shard}-new": 9})
        end = reader.latestOffset(at, limit)
        if end == at:
            break
        seen += read(reader, at, end)
        at = end

    assert [sum(name.startswith(f"{shard}-") for name in seen) for shard in (0, 1)] == [3, 5]
    assert {f"{shard}-{n}" for shard, count in enumerate((3, 5)) for n in range(count)} - {"0-0", "1-0"} <= {*seen}


def test_a_shard_is_not_waited_for_once_its_other_holder_has_finished(
    redis_url: str, redis_client: redis.Redis, icks: list[DirtyList]
) -> None:
    one, sizes = sequence(redis_url), {0: 9, 1: 9}
    icks[0].add({"a": 1})
    other = Reservations(redis_client, icks[0].keys.version, holder="other", size=1)
    theirs = other.reserve()
    assert isinstance(theirs, Reservation)
    assert one.after(one.beginning, sizes) == one.beginning
    assert one.busy == {0}
    other.release(theirs, ["a"])

    assert one.after_waiting(one.beginning, sizes) == one.beginning, "at once: nothing waits any more"
    assert one.busy == set()


def list_heartbeats(client: redis.Redis, icks: list[DirtyList]) -> list[int]:
    found = [Reservations(client, ick.keys.version, holder="other").reserve() for ick in icks]
    return [each.heartbeats for each in found if isinstance(each, Busy)]


def test_the_end_of_a_query_ends_its_heartbeats_and_another_one_goes_on(
    where: dict[str, str], icks: list[DirtyList], redis_client: redis.Redis
) -> None:
    """Spark calls ``stop``, and keeps the process for a minute: its thread ends."""
    mark(icks, ["a", "b", "c", "d"], 1)
    before = {*threading.enumerate()}
    reader = make_reader(where)
    at = reader.latestOffset(reader.initialOffset(), ALL)
    begun = list_heartbeats(redis_client, icks)
    eventually(lambda: min(list_heartbeats(redis_client, icks)) > min(begun), "heartbeats are sent")
    reader.stop()
    eventually(lambda: {*threading.enumerate()} <= before, "its thread has ended")
    last = list_heartbeats(redis_client, icks)

    again = make_reader(where)
    assert list_heartbeats(redis_client, icks) == last
    assert read(again, again.initialOffset(), at) == ["a", "b", "c", "d"]
    eventually(lambda: min(list_heartbeats(redis_client, icks)) > min(last), "the next one sends them")


def test_a_shard_without_a_limit_is_left_alone(redis_url: str, icks: list[DirtyList]) -> None:
    one = sequence(redis_url)
    for ick in icks:
        ick.add({"a": 1})

    end = one.after(one.beginning, {1: 9})

    assert [end[shard] == one.beginning[shard] for shard in (0, 1)] == [True, False]
    one.after(end, {})


def test_offsets_are_json_that_spark_can_compare(redis_url: str, icks: list[DirtyList]) -> None:
    one = sequence(redis_url)
    mark(icks, ["a", "b", "c", "d"], 1)

    assert json.loads(json.dumps(one.after(one.beginning, {0: 9, 1: 9}))).keys() == {"0", "1"}


def marked(icks: list[DirtyList]) -> dict[bytes, float]:
    return {m: s for ick in icks for m, s in ick._client.zrange(ick.keys.dirty, 0, -1, withscores=True)}


def write(where: dict[str, str], **columns: pa.Array) -> None:
    """Marks rows as a task does."""
    table = pa.table(columns)
    writer: Any = IckDataSource(where).writer(from_arrow_schema(table.schema), overwrite=False)
    writer.write(iter(table.to_batches()))


def test_a_batch_marks_its_members_each_in_its_shard_with_the_lowest_score(
    spark: SparkSession, where: dict[str, str], icks: list[DirtyList]
) -> None:
    frame = spark.range(100).select(F.concat(F.lit("d"), F.col("id") % 10).alias("member"), F.col("id").alias("score"))

    frame.write.format("penstock.ick").options(**where).mode("append").save()
    write(where, member=pa.array(["d3"]), score=pa.array([50]))

    assert marked(icks) == {f"d{n}".encode(): float(n) for n in range(10)}
    for shard, ick in enumerate(icks):
        found: Any = ick._client.zrange(ick.keys.dirty, 0, -1)
        assert {INDEX.shard_for(member) for member in found} <= {shard}


def test_members_without_a_score_are_dirty_as_of_redis_current_time(
    where: dict[str, str], icks: list[DirtyList], redis_client: redis.Redis
) -> None:
    before: Any = redis_client.time()
    write(where, member=pa.array([b"\xff", b"a"]))
    after: Any = redis_client.time()

    found = marked(icks)
    assert set(found) == {b"\xff", b"a"}
    for score in found.values():
        assert before[0] <= score <= after[0] + 1


def test_each_row_is_marked_by_its_member_or_its_bytes_with_its_own_score(
    where: dict[str, str], icks: list[DirtyList], redis_client: redis.Redis
) -> None:
    columns = {
        "member": pa.array(["a", None, "c", "c"], pa.string()),
        "bytes": pa.array([b"x", b"\xff", None, None], pa.binary()),
        "score": pa.array([7.5, 8, None, 3], pa.float64()),
    }
    before: Any = redis_client.time()
    write(where, **columns)
    found = marked(icks)

    assert found == {b"a": 7.5, b"\xff": 8, b"c": 3}
    write(where, member=pa.array(["d", "e"]), score=pa.array([None, 1_700_000_000_250_000], pa.timestamp("us")))
    found = marked(icks)
    assert found[b"e"] == 1_700_000_000.25
    assert found[b"d"] >= before[0]


def test_a_time_is_a_score(where: dict[str, str], icks: list[DirtyList]) -> None:
    times = pa.array([1_700_000_000_500_000], pa.timestamp("us", tz="UTC"))
    write(where, member=pa.array(["a"]), score=times)

    assert marked(icks) == {b"a": 1_700_000_000.5}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"member": [None]}, "member"),
        ({"member": ["a"], "score": [float("nan")]}, "finite number"),
        ({"name": ["a"]}, "no column 'member'"),
    ],
)
def test_rows_that_are_not_marks_are_refused_and_nothing_is_written(
    where: dict[str, str], redis_client: redis.Redis, rows: dict[str, list[Any]], said: str
) -> None:
    types = {"member": pa.string(), "name": pa.string(), "score": pa.float64()}
    columns = {name: pa.array(values, types[name]) for name, values in rows.items()}
    with pytest.raises((InvalidRecord, InvalidIckCall, InvalidSetting), match=said):
        write(where, **columns)

    assert redis_client.dbsize() == 0


def test_an_ick_is_never_overwritten(where: dict[str, str]) -> None:
    with pytest.raises(InvalidSetting, match="never overwritten"):
        IckDataSource(where).writer(StructType().add("member", "string"), overwrite=True)


def test_a_stream_of_one_ick_is_marked_in_another(
    spark: SparkSession, where: dict[str, str], icks: list[DirtyList], redis_client: redis.Redis, tmp_path: Path
) -> None:
    mark(icks, names(20), 3)
    icks[0].add([(b"\xff", 4)])
    to_mirror = make_stream(spark, where).writeStream.format("penstock.ick")
    run_to_end(to_mirror.option("redisUrl", where["redisUrl"]).option("key", "mirror"), tmp_path)

    found = DirtyList(redis_client, "mirror").reserve(100)
    assert {member for member, _ in found} == {name.encode() for name in names(20)} | {b"\xff"}
    assert waiting(icks) == set()
