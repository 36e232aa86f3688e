"""A log without a pipeline: appended to, evicted from, and kept apart from the logs of streamers.

Every test runs twice: with packed entries and ``LogWriter``, and with plain ones and ``AsyncLogWriter``.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from fixtures.logs import FilledLog, MakeReader, MakeWriter
from fixtures.proxy import APPEND, Harm, Proxy, behind
from penstock.batches.columns import Columns
from penstock.channels.batch_outcomes import Batch, Unusable
from penstock.channels.log.appending import append_together
from penstock.clients import AsyncLogWriter, LogGroup, LogReader, LogWriter, NewRecord
from penstock.errors import (
    AppendRefused,
    ForeignLog,
    InvalidLogCall,
    InvalidMessage,
    InvalidName,
    InvalidRecord,
    LogLost,
    ServerUnavailable,
)
from penstock.records import Epoch, Offset, Shard, ShardName

STREAM = "penstock:{rides/0}:log"


STAR = "\N{BLACK STAR}"
"""Three bytes."""


def data(found: Any) -> list[Any]:
    return [None if record is None else record.data for record in found]


def test_an_append_creates_the_log_and_returns_its_range_of_offsets(
    make_writer: MakeWriter, make_reader: MakeReader
) -> None:
    writer = make_writer()

    one, three = writer.append(["a"]), writer.append(["b", "c", "d"])

    assert (one.first, one.last) == (1, 1)
    assert (three.first, three.last, len(three)) == (2, 4, 3)
    assert data(make_reader().read()) == ["a", "b", "c", "d"]


def test_a_record_is_read_as_it_was_written(make_writer: MakeWriter, make_reader: MakeReader) -> None:
    given = NewRecord({"a": [1, None, "ä\n"]}, "7", "update", "ride", {"trace": "x"})
    make_writer().append([given, NewRecord(2)])

    record, plain = make_reader().read()

    assert (record.data, record.key, record.action, record.object, record.headers) == (
        {"a": [1, None, "ä\n"]},
        "7",
        "update",
        "ride",
        {"trace": "x"},
    )
    assert (record.id, record.offset) == (1, 1)
    assert (plain.data, plain.key, plain.action, plain.object, plain.id) == (2, "", "append", "entry", 2)


def test_records_have_the_time_of_the_server(
    make_writer: MakeWriter, make_reader: MakeReader, redis_client: redis.Redis
) -> None:
    before = redis_client.time()
    make_writer().append([1])
    make_writer().append([2])
    after = redis_client.time()

    first, second = make_reader().read()

    times = [before[0] * 1_000_000 + before[1], first.staged_us, second.staged_us]
    assert sorted(times) == times
    assert second.staged_us <= after[0] * 1_000_000 + after[1]
    assert make_reader().offset_at(second.staged_at, slack_s=0) == 2


@pytest.mark.parametrize("keep", [0, 1, 3, 7, 12, 100])
def test_at_least_so_many_are_kept(make_writer: MakeWriter, make_reader: MakeReader, keep: int) -> None:
    """Whole entries are evicted, of five records here; plain entries are exact."""
    writer = make_writer()
    for _ in range(3):
        writer.append([1, 2, 3, 4, 5])

    appended = writer.append([6, 7, 8, 9, 10], keep_at_least=keep)

    info = make_reader().info()
    left = info.last - info.available + 1
    assert (appended.first, appended.last, info.last) == (16, 20, 20)
    most = -(-keep // 5) * 5 if isinstance(writer, LogWriter) else keep
    assert left == min(20, most)


def test_an_append_that_the_server_refuses_in_the_middle_has_not_happened(
    make_writer: MakeWriter, make_reader: MakeReader, redis_client: redis.Redis, redis_url: str
) -> None:
    """And its offsets are given to the next one: what the writer has sent is no longer known by its token."""
    make_writer().append([1, 2])
    redis_client.acl_setuser("limited", enabled=True, nopass=True, keys=["*"], categories=["+@all"], commands=["-xadd"])
    joint = "&" if "?" in redis_url else "?"
    limited = make_writer(f"{redis_url}{joint}username=limited&password=any")
    try:
        with pytest.raises(AppendRefused, match="xadd"):
            limited.append([3], keep_at_least=0)
        assert data(make_reader().read()) == [1, 2]
        assert redis_client.zcard("penstock:{rides/0}:writes") == 1
        redis_client.acl_setuser("limited", enabled=True, categories=["+@all"])
        assert limited.append([3]).first == 3
    finally:
        redis_client.acl_deluser("limited")


@pytest.mark.parametrize(("upto", "packed", "plain"), [(0, 1, 1), (3, 1, 4), (5, 6, 6), (99, 11, 11)])
def test_records_up_to_an_offset_are_evicted(
    make_writer: MakeWriter, make_reader: MakeReader, upto: int, packed: int, plain: int
) -> None:
    writer = make_writer()
    writer.append([1, 2, 3, 4, 5])
    writer.append([6, 7, 8, 9, 10])

    evicted = writer.evict(upto=upto)

    available = packed if isinstance(writer, LogWriter) else plain
    assert (evicted.available, evicted.last) == (available, 10)
    assert make_reader().info().available == available
    assert writer.append([11]).first == 11


@pytest.mark.parametrize(("keep", "packed", "plain"), [(0, 11, 11), (3, 6, 8), (5, 6, 6), (99, 1, 1)])
def test_all_but_so_many_are_evicted(make_writer: MakeWriter, keep: int, packed: int, plain: int) -> None:
    writer = make_writer()
    writer.append([1, 2, 3, 4, 5])
    writer.append([6, 7, 8, 9, 10])

    evicted = writer.evict(keep=keep)

    assert evicted.available == (packed if isinstance(writer, LogWriter) else plain)


def test_what_is_older_is_evicted(make_writer: MakeWriter, make_reader: MakeReader, filled_log: FilledLog) -> None:
    """In steps of a hundred entries, and nothing that is young enough."""
    filled_log.per_entry = 1
    filled_log.add(250, staged_us=lambda offset: offset)
    filled_log.client.set("penstock:{rides/0}:epoch", "writer 1")
    writer = make_writer()
    young = writer.append(["young"])

    assert writer.evict(older_than_s=86_400).available == young.first
    assert writer.evict(older_than_s=86_400).available == young.first
    assert data(make_reader().read(0, 251)) == ["young"]
    assert writer.evict(older_than_s=0).available in (251, 252)


def test_nothing_is_evicted_from_a_log_that_does_not_exist(make_writer: MakeWriter) -> None:
    evicted = make_writer().evict(keep=0)

    assert (evicted.available, evicted.last, evicted.is_complete) == (1, 0, True)


def test_a_call_that_is_repeated_with_its_token_appends_nothing(
    make_writer: MakeWriter, make_reader: MakeReader
) -> None:
    first = make_writer().append(["a", "b"], token="order-17")
    make_writer().append(["c"])

    again = make_writer().append(["a", "b"], token="order-17")

    assert again == first
    assert data(make_reader().read()) == ["a", "b", "c"]


def test_the_last_1000_tokens_of_a_shard_are_known(make_writer: MakeWriter, redis_client: redis.Redis) -> None:
    writer = make_writer()
    for number in range(1003):
        writer.append([number], token=str(number), keep_at_least=5)

    assert redis_client.zcard("penstock:{rides/0}:writes") == 1000
    assert writer.append([3], token="3").first == 4
    assert writer.append([2], token="2").first == 1004  # long ago


def test_a_lost_reply_doubles_nothing(
    make_writer: MakeWriter, make_reader: MakeReader, redis_proxy: Proxy, redis_url: str
) -> None:
    writer = make_writer(url=behind(redis_proxy, redis_url))
    writer.append(["a"])
    redis_proxy.harm(APPEND, Harm.LOSE_REPLY)
    appended = writer.append(["b"])
    redis_proxy.harm(APPEND, Harm.LOSE_REQUEST)
    writer.append(["c"])

    assert (appended.first, appended.last) == (2, 2)
    assert redis_proxy.harmed == 2
    assert data(make_reader().read()) == ["a", "b", "c"]


def test_an_application_repeats_what_failed_with_its_token(
    make_writer: MakeWriter, make_reader: MakeReader, redis_proxy: Proxy, redis_url: str
) -> None:
    writer = make_writer(url=behind(redis_proxy, redis_url))
    writer.append(["a"])
    redis_proxy.refuse()
    with pytest.raises(ServerUnavailable):
        writer.append(["b"], token="b")
    redis_proxy.heal()

    writer.append(["b"], token="b")
    assert data(make_reader().read()) == ["a", "b"]


def test_writers_at_the_same_time_share_the_offsets(
    make_writer: MakeWriter, make_reader: MakeReader, redis_url: str
) -> None:
    def write(name: str) -> list[tuple[int, int]]:
        with LogWriter.connect(redis_url, "rides") as writer:
            made = [writer.append([f"{name}{n}", name]) for n in range(30)]
        return [(each.first, each.last) for each in made]

    with ThreadPoolExecutor(4) as pool:
        found = sorted(each for ranges in pool.map(write, "abcd") for each in ranges)

    assert found == [(n, n + 1) for n in range(1, 240, 2)]
    read = data(make_reader().read(0, 1, 1000))
    assert [each for each in read if str(each)[0] == "c" and each != "c"] == [f"c{n}" for n in range(30)]


def test_a_call_is_whole_or_not_at_all(
    make_writer: MakeWriter, make_reader: MakeReader, redis_client: redis.Redis
) -> None:
    writer = make_writer()
    writer.append(["a"])
    used = int(redis_client.info("memory")["used_memory"])
    redis_client.config_set("maxmemory", max(1, used - 1))
    try:
        with pytest.raises(AppendRefused, match="maxmemory"):
            writer.append(["b", "c"], token="b")
    finally:
        redis_client.config_set("maxmemory", 0)

    assert data(make_reader().read()) == ["a"]
    assert writer.append(["b", "c"], token="b").first == 2


def test_a_writer_refuses_the_log_of_a_streamer(make_writer: MakeWriter, filled_log: FilledLog) -> None:
    filled_log.add(3)
    writer = make_writer()
    calls: list[Callable[[], Any]] = [lambda: writer.append([1]), lambda: writer.evict(keep=0)]
    for call in calls:
        with pytest.raises(ForeignLog, match="belongs to a pipeline"):
            call()
    filled_log.client.delete("penstock:{rides/0}:epoch")
    for call in calls:
        with pytest.raises(ForeignLog, match="no epoch"):
            call()

    assert filled_log.client.xlen(STREAM) == (1 if filled_log.entries == "packed" else 3)
    assert not filled_log.client.exists("penstock:{rides/0}:writes")


def test_a_streamer_refuses_the_log_of_a_writer(
    make_writer: MakeWriter, make_reader: MakeReader, redis_client: redis.Redis
) -> None:
    """What a streamer sends first, and what it sends where its own tail would be."""
    make_writer().append(["a", "b"])
    for first in (1, 3):
        columns = Columns.pack([(5, "k", "insert", "thing", "1", "", 5)])
        batch = Batch(ShardName("rides", Shard(0)), Epoch(9), Offset(first), begins=True, columns=columns)
        [(_, reply)] = append_together(redis_client, "penstock", [batch])

        assert isinstance(reply, Unusable)
        assert isinstance(reply.error, ForeignLog)
    assert data(make_reader().read()) == ["a", "b"]


def test_a_log_that_was_deleted_and_written_anew_is_another_log(
    make_writer: MakeWriter, make_reader: MakeReader, redis_client: redis.Redis
) -> None:
    make_writer().append(["a", "b"], token="a")
    reader = make_reader()
    reader.read()
    redis_client.delete(STREAM, "penstock:{rides/0}:epoch")
    make_writer().append(["x", "y", "z"])

    with pytest.raises(LogLost, match="epoch"):
        reader.read(0, 3)
    assert make_writer().append(["a", "b"], token="a").first == 4


def test_a_failover_that_lost_what_was_read_is_noticed_after_new_records_too(
    make_writer: MakeWriter, make_reader: MakeReader, redis_client: redis.Redis
) -> None:
    writer, reader = make_writer(), make_reader()
    writer.append(["a"])
    writer.append(["b"])
    reader.read()
    kept: Any = redis_client.xrange(STREAM, "-", "1-0")
    redis_client.delete(STREAM, "penstock:{rides/0}:writes")
    for entry_id, fields in kept:
        redis_client.xadd(STREAM, fields, id=entry_id)
    writer.append(["x"])
    writer.append(["y"])

    with pytest.raises(LogLost, match="another record is at offset 2"):
        reader.read(0, 3)


def test_shards_are_chosen_by_number_or_by_key(make_writer: MakeWriter, make_reader: MakeReader) -> None:
    writer = make_writer(shards=4)
    shard = writer.shard_for("customer-7")
    writer.append(["a"], shard=shard)
    writer.append(["b"], shard=(shard + 1) % 4)
    reader = make_reader(shards=4)

    assert data(reader.read(shard)) == ["a"]
    assert data(reader.read((shard + 1) % 4)) == ["b"]


def test_a_group_divides_the_log_of_a_writer(make_writer: MakeWriter, redis_url: str) -> None:
    writer = make_writer()
    writer.append([1, 2, 3, 4])
    with LogGroup.connect(redis_url, "rides", "mailers") as group:
        assert [record.data for record in group.read(3)] == [1, 2, 3]
        writer.append([5])
        assert [record.data for record in group.read(10)] == [4, 5]


def test_compressed_entries_are_read(redis_url: str, make_reader: MakeReader) -> None:
    with LogWriter.connect(redis_url, "rides", compression="zstd") as writer:
        writer.append(["x" * 1000, "y"])

    assert data(make_reader().read()) == ["x" * 1000, "y"]


@pytest.mark.slow
def test_what_cannot_be_written_is_refused_before_anything_is_sent(
    make_writer: MakeWriter, redis_client: redis.Redis
) -> None:
    writer = make_writer()
    calls: list[tuple[Callable[[], Any], type[Exception]]] = [
        (lambda: writer.append([]), InvalidLogCall),
        (lambda: writer.append([1] * 10_001), InvalidLogCall),
        (lambda: writer.append(["x" * 1_000_000] * 34), InvalidLogCall),
        (lambda: writer.append([STAR * 300_000] * 38), InvalidLogCall),
        (lambda: writer.append([NewRecord(1, key=STAR * 1000, object=STAR * 255)] * 10_000), InvalidLogCall),
        (lambda: writer.append([1], shard=1), InvalidLogCall),
        (lambda: writer.append([1], keep_at_least=-1), InvalidLogCall),
        (lambda: writer.append([1], token=""), InvalidMessage),
        (lambda: writer.append([float("nan")]), InvalidRecord),
        (lambda: writer.append([b"bytes"]), InvalidRecord),
        (lambda: writer.append([NewRecord(1, key="a\0")]), InvalidRecord),
        (lambda: writer.append([NewRecord(1, action="")]), InvalidRecord),
        (writer.evict, InvalidLogCall),
        (lambda: writer.evict(upto=1, keep=1), InvalidLogCall),
        (lambda: writer.evict(upto=-1), InvalidLogCall),
        (lambda: writer.evict(older_than_s=-1), InvalidLogCall),
        (lambda: writer.evict(older_than_s="1"), InvalidLogCall),
        (lambda: make_writer(shards=0), InvalidLogCall),
        (lambda: make_writer(entries="other"), InvalidLogCall),
        (lambda: make_writer(namespace="No"), InvalidName),
    ]
    for call, error in calls:
        with pytest.raises(error):
            call()
    assert redis_client.dbsize() == 0


def test_both_kinds_of_writer_have_the_same_methods() -> None:
    def methods(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")} - {"close", "aclose"}

    assert methods(LogWriter) == methods(AsyncLogWriter)


@pytest.mark.slow
def test_a_read_decompresses_no_more_than_64_mib_and_goes_on_after_it(redis_url: str) -> None:
    with LogWriter.connect(redis_url, "rides", compression="zstd") as writer:
        for _ in range(5):
            writer.append([f"{n}" + "x" * 1_000_000 for n in range(20)])
    with LogReader.connect(redis_url, "rides") as reader:
        page = reader.read(count=1000)
        rest = reader.read(offset=page.next, count=1000)
        back = reader.read_back(count=1000)

    assert [len(each) for each in (page, rest, back)] == [80, 20, 80]
    assert (page.info.first, rest.info.first, back.info.first, back.next) == (1, 81, 100, 20)
    assert None not in {*page, *rest, *back}
