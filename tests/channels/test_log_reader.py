"""A log is read by offset, as RCP 11 asks: each row of its table that is not about groups.

Every test runs twice: with packed entries and ``LogReader``, and with plain ones and ``AsyncLogReader``.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any

import pytest

from fixtures.broken_entries import OURS
from fixtures.constants import SetConstants
from fixtures.logs import START_US, FilledLog, MakeReader
from penstock import Log
from penstock.clients import LogReader, LogSlice
from penstock.errors import ForeignLog, InvalidLogCall, InvalidName, LogLost
from penstock.records import Offset, OffsetRange
from penstock.testing import eventually


def offsets(found: Any) -> list[int | None]:
    return [None if record is None else record.offset for record in found]


def test_offsets_begin_at_1_and_go_up_by_1(filled_log: FilledLog, make_reader: MakeReader) -> None:
    filled_log.add(12)

    found = make_reader().read(0, 1, 100)

    assert offsets(found) == list(range(1, 13))
    assert [record.data for record in found] == list(range(1, 13))
    assert found.records.offsets == list(range(1, 13))


@pytest.mark.parametrize(("offset", "count"), [(1, 1), (3, 2), (3, 10), (5, 1), (5, 7), (6, 6), (12, 1), (12, 5)])
def test_a_read_begins_at_its_offset(filled_log: FilledLog, make_reader: MakeReader, offset: int, count: int) -> None:
    """The offset is inclusive, wherever in an entry it is."""
    filled_log.add(12)

    found = make_reader().read(0, offset, count)

    assert offsets(found) == list(range(offset, min(12, offset + count - 1) + 1))
    assert (found.info.first, found.info.number, found.next) == (offset, len(found), offset + len(found))


def test_reading_on_at_next_reads_everything_once(filled_log: FilledLog, make_reader: MakeReader) -> None:
    filled_log.add(57)
    reader, read, at = make_reader(), [], 1
    while found := reader.read(0, at, 10):
        read += offsets(found)
        at = found.next

    assert read == list(range(1, 58))


def test_jumping_back_is_subtraction(filled_log: FilledLog, make_reader: MakeReader) -> None:
    filled_log.add(30)
    reader = make_reader()
    found = reader.read(0, 21, 5)

    assert offsets(reader.read(0, found.next - 10, 10)) == list(range(16, 26))


@pytest.mark.parametrize("offset", [0, -7])
def test_an_offset_below_1_is_1(filled_log: FilledLog, make_reader: MakeReader, offset: int) -> None:
    filled_log.add(4)

    found = make_reader().read(0, offset, 3)

    assert offsets(found) == [1, 2, 3]
    assert found.info.first == 1


def test_evicted_records_are_none_in_their_place_and_count(filled_log: FilledLog, make_reader: MakeReader) -> None:
    filled_log.add(20)
    filled_log.evict_before(11)

    found = make_reader().read(0, 7, 6)

    assert offsets(found) == [None, None, None, None, 11, 12]
    assert list(found.offsets) == [7, 8, 9, 10, 11, 12]
    assert (found.info.available, found.info.first, found.info.number) == (11, 7, 6)
    assert found.evicted == [OffsetRange(filled_log.shard(), Offset(7), Offset(10))]


def test_offsets_do_not_change_on_eviction(filled_log: FilledLog, make_reader: MakeReader) -> None:
    filled_log.add(20)
    reader = make_reader()
    before = reader.read(0, 16, 5)
    filled_log.evict_before(16)

    assert list(reader.read(0, 16, 5)) == list(before)


def test_a_record_that_is_gone_from_the_middle_is_none_too(filled_log: FilledLog, make_reader: MakeReader) -> None:
    filled_log.add(20)
    ids = ["10-0"] if filled_log.entries == "packed" else [f"{n}-0" for n in range(6, 11)]
    filled_log.client.xdel(filled_log.stream(), *ids)

    reader = make_reader()

    assert offsets(reader.read(0, 4, 10)) == [4, 5, *[None] * 5, 11, 12, 13]
    assert offsets(reader.read(0, 7, 2)) == [None, None]
    assert offsets(reader.read_back(0, 12, 8)) == [12, 11, *[None] * 5, 5]
    assert offsets(reader.read_back(0, 9, 2)) == [None, None]


def test_a_log_that_was_evicted_to_its_end_still_knows_it(filled_log: FilledLog, make_reader: MakeReader) -> None:
    filled_log.add(10)
    filled_log.evict_before(11)
    reader = make_reader()

    assert offsets(reader.read(0, 9, 5)) == [None, None]
    assert offsets(reader.read_back(0, None, 3)) == [None, None, None]
    info = reader.info()
    assert (info.available, info.last) == (11, 10)


def test_records_that_are_gone_from_the_end_are_none_too(filled_log: FilledLog, make_reader: MakeReader) -> None:
    filled_log.add(10)
    ids = ["10-0"] if filled_log.entries == "packed" else [f"{n}-0" for n in range(6, 11)]
    filled_log.client.xdel(filled_log.stream(), *ids)

    assert offsets(make_reader().read(0, 4, 100)) == [4, 5, *[None] * 5]
    assert offsets(make_reader().read_back(0, None, 7)) == [*[None] * 5, 5, 4]


def test_info_comes_with_every_read_and_alone(filled_log: FilledLog, make_reader: MakeReader) -> None:
    filled_log.add(20)
    filled_log.evict_before(6)
    reader = make_reader()
    found, alone = reader.read(0, 8, 4), reader.read(0, 8, 0)

    assert (found.info.available, found.info.last, found.info.first, found.info.number) == (6, 20, 8, 4)
    assert list(alone) == []
    assert (alone.info.available, alone.info.last, alone.info.first, alone.info.number) == (6, 20, 8, 0)
    assert reader.info().last == 20


def test_the_info_of_a_log_that_does_not_exist(make_reader: MakeReader) -> None:
    found = make_reader().read(0, 1, 10)

    assert list(found) == []
    assert (found.info.available, found.info.last, found.info.first, found.info.number) == (1, 0, 1, 0)
    assert list(make_reader().read_back(0)) == []


@pytest.mark.parametrize(("offset", "count"), [(None, 3), (12, 12), (12, 50), (11, 4), (5, 2), (6, 1), (1, 1), (99, 2)])
def test_a_read_backwards_begins_at_its_offset_too(
    filled_log: FilledLog, make_reader: MakeReader, offset: int | None, count: int
) -> None:
    filled_log.add(12)

    found = make_reader().read_back(0, offset, count)

    start = min(12, offset or 12)
    assert offsets(found) == list(range(start, max(0, start - count), -1))
    assert list(found.offsets) == offsets(found)
    assert (found.info.first, found.next) == (start, start - len(found))


def test_both_directions_read_the_same(filled_log: FilledLog, make_reader: MakeReader) -> None:
    filled_log.add(43)
    filled_log.evict_before(16)
    reader, read, at = make_reader(), [], None
    while found := reader.read_back(0, at, 4):
        read += list(found)
        at = found.next

    assert read[::-1] == list(reader.read(0, 1, 100))


def test_a_reply_is_bounded_in_bytes_and_reading_goes_on_after_it(
    filled_log: FilledLog, make_reader: MakeReader
) -> None:
    """30 MB of payloads; a reply has 8 MiB, and the entry that reaches them."""
    filled_log.per_entry = 10
    filled_log.add(60, payload="x" * 500_000)
    reader, read, at, largest = make_reader(), [], 1, 0
    while found := reader.read(0, at, 10_000):
        read += offsets(found)
        at, largest = found.next, max(largest, sum(map(len, found.records.data_json)))
    back: list[int | None] = []
    start = None
    while found := reader.read_back(0, start, 10_000):
        back += offsets(found)
        start, largest = found.next, max(largest, sum(map(len, found.records.data_json)))

    assert read == list(range(1, 61))
    assert back == read[::-1]
    assert largest <= 8 * 1024 * 1024 + 10 * 500_010


@pytest.mark.parametrize("last", [0, 3])
def test_a_read_waits_for_an_offset_that_does_not_exist_yet(
    filled_log: FilledLog, make_reader: MakeReader, last: int
) -> None:
    """Without any record there is no log."""
    filled_log.add(last)
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(make_reader().read, 0, last + 1, 10, block_s=30)
        _wait_until_blocked(filled_log)
        filled_log.add(2)

        assert offsets(reading.result(10)) == [last + 1, last + 2]


def test_a_read_waits_for_an_offset_of_the_future_and_skips_those_before(
    filled_log: FilledLog, make_reader: MakeReader
) -> None:
    filled_log.add(3)
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(make_reader().read, 0, 12, 10, block_s=90)
        _wait_until_blocked(filled_log)
        filled_log.add(5)
        _wait_until_blocked(filled_log)
        filled_log.add(5)

        assert offsets(reading.result(60)) == [12, 13]


def test_a_read_blocks_only_if_nothing_is_there(filled_log: FilledLog, make_reader: MakeReader) -> None:
    """Not for its count, nor for records that were evicted, nor backwards, nor for its info alone."""
    filled_log.add(10)
    filled_log.evict_before(11)
    at, reader = monotonic(), make_reader()

    assert len(reader.read(0, 9, 100, block_s=60)) == 2
    assert len(reader.read(0, 99, 0, block_s=60)) == 0
    assert len(reader.read(0, 0, 5, backwards=True, block_s=60)) == 0
    assert monotonic() - at < 50


def test_a_wait_that_is_over_gives_an_empty_slice_with_its_info(filled_log: FilledLog, make_reader: MakeReader) -> None:
    filled_log.add(3)

    found = make_reader().read(0, 6, 10, block_s=0.05)

    assert (list(found), found.info.last, found.next) == ([], 3, 6)


def test_several_shards_are_read_together(filled_log: FilledLog, make_reader: MakeReader) -> None:
    filled_log.add(4, 0)
    filled_log.add(6, 2)

    found = make_reader(shards=3).read_any({0: 3, 1: 1, 2: 5}, 10)

    assert {shard: offsets(each) for shard, each in found.items()} == {0: [3, 4], 2: [5, 6]}
    assert make_reader(shards=3).read_any({}, 10) == {}


@pytest.mark.parametrize("shard", [0, 1, 2])
def test_a_read_of_several_shards_is_woken_by_each_of_them(
    filled_log: FilledLog, make_reader: MakeReader, shard: int
) -> None:
    filled_log.add(4, 0)
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(make_reader(shards=3).read_any, {0: 5, 1: 1, 2: 1}, 10, block_s=90)
        _wait_until_blocked(filled_log)
        filled_log.add(2, shard)

        found = reading.result(60)
    first = 5 if shard == 0 else 1
    assert {number: offsets(each) for number, each in found.items()} == {shard: [first, first + 1]}


def test_no_wake_up_is_lost_between_a_read_and_its_wait(
    filled_log: FilledLog, make_reader: MakeReader, set_constants: SetConstants, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes after the read, and before Redis knows of the wait, ends the wait at once."""
    reader = make_reader(shards=2)
    inner = reader if isinstance(reader, LogReader) else reader._driven
    wait = inner._wait

    def late(*waiting: Any) -> Any:
        filled_log.add(1, 1)
        return wait(*waiting)

    monkeypatch.setattr(inner, "_wait", late)
    set_constants("channels.log.log_reader", MAX_WAIT_S=60)  # nobody polls before
    at = monotonic()

    assert offsets(reader.read_any({0: 1, 1: 1}, 10, block_s=60)[1]) == [1]
    assert monotonic() - at < 50


def test_a_log_that_lost_its_newest_records_differs_from_one_that_has_none_yet(
    filled_log: FilledLog, make_reader: MakeReader
) -> None:
    filled_log.add(20)
    reader, other = make_reader(), make_reader()
    assert len(reader.read(0, 1, 20)) == 20
    assert len(other.read(0, 1, 10)) == 10
    filled_log.lose_after(15)

    with pytest.raises(LogLost, match="read offset 20, and now it ends at offset 15") as lost:
        reader.read(0, 21, 10, block_s=30)
    assert (lost.value.shard, lost.value.read, lost.value.tail) == ("rides/0", 20, 15)
    assert list(other.read(0, 31, 10)) == []  # of the future: it knows of nothing that is lost

    reader.forget(0)
    assert offsets(reader.read(0, 14, 10)) == [14, 15]


def test_a_reader_that_waits_notices_that_the_log_lost_its_newest_records(
    filled_log: FilledLog, make_reader: MakeReader, set_constants: SetConstants
) -> None:
    set_constants("channels.log.log_reader", MAX_WAIT_S=0.1)
    filled_log.add(20)
    reader = make_reader()
    reader.read(0, 1, 20)
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(reader.read, 0, 21, 10, block_s=30)
        _wait_until_blocked(filled_log)
        filled_log.lose_after(15)

        with pytest.raises(LogLost):
            reading.result(10)


@pytest.mark.parametrize("read", [17, 20])
def test_other_records_in_the_place_of_lost_ones_are_noticed(
    filled_log: FilledLog, make_reader: MakeReader, read: int
) -> None:
    """Also once the log is longer again than what was read, and whether that ended an entry or not."""
    filled_log.add(20)
    reader = make_reader()
    reader.read(0, 1, read)
    filled_log.lose_after(15)
    filled_log.add(10, ids_from=5000)

    with pytest.raises(LogLost, match=f"another record is at offset {read}"):
        reader.read(0, read + 1, 10)


@pytest.mark.parametrize("read", [17, 20])
def test_the_same_records_in_other_entries_are_no_loss(
    filled_log: FilledLog, make_reader: MakeReader, read: int
) -> None:
    """A streamer publishes again what Redis lost, in batches of other sizes."""
    filled_log.add(20)
    reader = make_reader()
    reader.read(0, 1, read)
    filled_log.lose_after(15)
    filled_log.per_entry = 7
    filled_log.add(10)

    assert offsets(reader.read(0, read + 1, 100)) == list(range(read + 1, 26))


EPOCH, ENDS = "penstock:{rides/0}:epoch", "penstock:{rides/0}:epoch-ends"


@pytest.mark.parametrize("ends", [{}, {2: 5}, {2: 9, 3: 5}, {1: 0}, {0: 3, 1: 2, 3: 7}])
def test_a_new_epoch_that_has_kept_what_was_read_is_no_loss(
    filled_log: FilledLog, make_reader: MakeReader, ends: dict[int, int]
) -> None:
    """As after a fail-over of Postgres that lost nothing: the records are the same ones."""
    filled_log.add(5)
    reader = make_reader()
    reader.read(0, 1, 10)
    filled_log.epoch = 3
    if ends:
        filled_log.client.hset(ENDS, mapping=ends)
    filled_log.add(5)

    assert reader.offset_at(datetime.now(UTC) - timedelta(days=9999)) == 1
    assert reader.read(0, 6, 10).info.epoch == "3"
    filled_log.epoch = 4
    filled_log.client.hset(ENDS, 4, 10)
    filled_log.add(1)
    assert offsets(reader.read(0, 11, 10)) == [11]


@pytest.mark.parametrize("ends", [{2: 4}, {2: 9, 3: 0}, {1: 9, 2: 3, 3: 8}])
def test_a_new_epoch_that_has_not_is_noticed_once_something_was_read(
    filled_log: FilledLog, make_reader: MakeReader, ends: dict[int, int]
) -> None:
    reader, fresh = make_reader(), make_reader()
    assert list(fresh.read(0, 1, 10)) == []
    filled_log.add(5)
    reader.read(0, 1, 10)
    filled_log.epoch = 3
    filled_log.client.hset(ENDS, mapping=ends)
    filled_log.add(5)

    with pytest.raises(LogLost, match=r"epoch '1'.*epoch '3'"):
        reader.read(0, 6, 10)
    with pytest.raises(LogLost):
        reader.offset_at(datetime.now(UTC))
    assert len(fresh.read(0, 1, 10)) == 10
    assert len(fresh.read(0, 1, 10)) == 10


@pytest.mark.parametrize("epoch", ["1", "writer 0123456789abcdef", None])
def test_an_epoch_before_or_of_a_writer_is_another_log(
    filled_log: FilledLog, make_reader: MakeReader, epoch: str | None
) -> None:
    filled_log.epoch = 2
    filled_log.add(5)
    reader = make_reader()
    reader.read(0, 1, 10)
    filled_log.client.delete(EPOCH)
    if epoch is not None:
        filled_log.client.set(EPOCH, epoch)

    with pytest.raises(LogLost, match="epoch '2'"):
        reader.read(0, 6, 10)


def test_a_reader_that_resumes_notices_a_loss_too(filled_log: FilledLog, make_reader: MakeReader) -> None:
    filled_log.add(15)
    reader = make_reader()
    reader.resume(0, 21)

    with pytest.raises(LogLost):
        reader.read(0, 21, 10)
    reader.resume(0, 16)
    assert offsets(reader.read(0, 16, 10)) == []
    filled_log.add(1)
    assert offsets(reader.read(0, 16, 10)) == [16]


def test_what_was_staged_since_a_time_is_found(filled_log: FilledLog, make_reader: MakeReader) -> None:
    filled_log.add(100)
    filled_log.evict_before(21)
    reader = make_reader()

    def find(seconds: float, slack_s: float = 0.0) -> int:
        at = datetime.fromtimestamp(START_US / 1_000_000 + seconds, UTC)
        return int(reader.offset_at(at, slack_s=slack_s))

    assert [find(each) for each in (33, 33.5, 60, 100)] == [33, 34, 60, 100]
    assert find(5) == 21  # the first that is available
    assert find(101) == 101  # one that does not exist yet
    assert find(60, slack_s=10) == 50


def test_a_time_in_an_empty_log_is_its_next_offset(filled_log: FilledLog, make_reader: MakeReader) -> None:
    assert make_reader().offset_at(datetime.now(UTC)) == 1
    filled_log.add(10)
    filled_log.evict_before(11)
    assert make_reader().offset_at(datetime.now(UTC)) == 11


def test_records_of_long_transactions_hide_nothing_that_was_staged_later(
    filled_log: FilledLog, make_reader: MakeReader
) -> None:
    """Every third entry holds records that were staged up to 50 s before their neighbours."""

    def staged_us(offset: int) -> int:
        delay = 50 if offset // 5 % 3 == 0 else 0
        return START_US + max(0, offset - delay) * 1_000_000

    filled_log.add(300, staged_us=staged_us)
    reader = make_reader()
    for seconds in range(0, 320, 7):
        at = datetime.fromtimestamp(START_US / 1_000_000, UTC) + timedelta(seconds=seconds)
        found = reader.offset_at(at, slack_s=50)
        later = [n for n in range(1, 301) if staged_us(n) >= START_US + seconds * 1_000_000]

        assert found <= min(later, default=301)
        assert found >= min(seconds, 301) - 60


def test_evicted_records_can_be_fetched_elsewhere(filled_log: FilledLog, make_reader: MakeReader) -> None:
    filled_log.add(20)
    kept = {record.offset: record for record in make_reader().read(0, 1, 20)}
    filled_log.evict_before(11)
    asked: list[OffsetRange] = []

    def fetch(found: LogSlice) -> LogSlice:
        asked.extend(found.evicted)
        wanted = [n for each in found.evicted for n in range(each.first, each.last + 1) if n != 8]
        return found.filled([kept[Offset(n)] for n in wanted])

    async def fetch_async(found: LogSlice) -> LogSlice:
        return fetch(found)

    is_async = not isinstance(make_reader(), LogReader)
    reader = make_reader(older=fetch_async if is_async else fetch)

    assert offsets(reader.read(0, 7, 6)) == [7, None, 9, 10, 11, 12]
    assert offsets(reader.read_back(0, 11, 3)) == [11, 10, 9]
    assert [(each.first, each.last) for each in asked] == [(7, 10), (9, 10)]
    assert (reader.read(0, 7, 6).from_journal, reader.read(0, 11, 2).from_journal) == (3, 0)

    assert offsets(reader.read(0, 7, 6, source="redis")) == [None] * 4 + [11, 12]
    asked.clear()
    found = reader.read(0, 7, 6, source="journal")
    assert offsets(found) == [7, None, 9, 10, 11, 12]
    assert found.from_journal == 5
    assert [(each.first, each.last) for each in asked] == [(7, 12)]


def test_a_channel_of_a_pipeline_names_its_log(filled_log: FilledLog, redis_url: str) -> None:
    filled_log.add(3, 1)
    with LogReader.connect(redis_url, Log("rides", shards=2)) as reader:
        assert offsets(reader.read(1)) == [1, 2, 3]
        with pytest.raises(InvalidLogCall, match="0 to 1"):
            reader.read(2)
    filled_log.add(2, 7)
    with LogReader.connect(redis_url, Log("rides", shards=2), shards=8) as reader:
        assert offsets(reader.read_any(dict.fromkeys(range(8), 1))[7]) == [1, 2]


def test_a_read_of_no_shards_is_over_at_once(make_reader: MakeReader) -> None:
    started = monotonic()
    assert make_reader().read_any({}, block_s=60) == {}
    assert monotonic() - started < 30


def test_arguments_that_cannot_be_are_refused(make_reader: MakeReader) -> None:
    reader = make_reader(shards=2)
    now = datetime.now(UTC)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: reader.read(2), "shard"),
        (lambda: reader.read(-1), "shard"),
        (lambda: reader.read(source="disk"), "source"),
        (lambda: reader.read(source="journal"), "source"),
        (lambda: reader.read(0, 1, -1), "count"),
        (lambda: reader.read(0, 1, 10_001), "count"),
        (lambda: reader.read(0, 1.5), "offset"),
        (lambda: reader.read(0, 1 << 60), "offset"),
        (lambda: reader.offset_at(now.replace(tzinfo=None)), "at"),
        (lambda: reader.offset_at(now, slack_s=-1), "slack_s"),
        (lambda: reader.offset_at(now, slack_s="60"), "slack_s"),
        (lambda: reader.read(True), "shard"),
        (lambda: make_reader(shards=0), "shards"),
    ]
    for call, field in calls:
        with pytest.raises(InvalidLogCall) as refused:
            call()
        assert refused.value.field == field
    with pytest.raises(InvalidName):
        make_reader(namespace="No")


def test_a_key_that_holds_something_else_is_named(filled_log: FilledLog, make_reader: MakeReader) -> None:
    filled_log.client.set(filled_log.stream(), "x")
    with pytest.raises(ForeignLog, match="another type"):
        make_reader().read(0)
    filled_log.client.delete(filled_log.stream())
    filled_log.client.xadd(filled_log.stream(), {"a": "b"})
    with pytest.raises(ForeignLog, match="not written by Penstock"):
        make_reader().read(0)
    filled_log.client.delete(filled_log.stream())
    for offset, fields in enumerate((OURS, {"a": "b"}, OURS), 1):
        filled_log.client.xadd(filled_log.stream(), fields, id=f"{offset}-0")
    with pytest.raises(ForeignLog, match="entry 2-0"):
        make_reader().offset_at(datetime.now(UTC))


def _wait_until_blocked(log: FilledLog) -> None:
    def is_blocked() -> bool:
        return bool(int(log.client.info("clients")["blocked_clients"]))

    eventually(is_blocked, "the reader waits in Redis")
