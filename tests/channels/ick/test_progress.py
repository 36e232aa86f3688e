"""The progress of a pipeline's Ick counts a mark as done only when no member that waited then waits still."""

from collections.abc import Iterator, Sequence

import pytest

from fixtures.clients import RedisClient, connect_redis
from penstock.batches.columns import Columns
from penstock.channels.batch_outcomes import Batch, FencedOff, Reply, Unusable
from penstock.channels.ick.marking import MarkProgress, coalesce, update_progress
from penstock.channels.ick.marking import mark as mark_batch
from penstock.channels.routing import ick_shard_keys
from penstock.clients import DirtyList, Reservations
from penstock.records import BEGINNING, Epoch, Offset, Record, RecordId, Shard, ShardName

SHARD = ShardName("index", Shard(0))
NAME = ick_shard_keys("penstock", SHARD).name


@pytest.fixture
def client(redis_url: str) -> Iterator[RedisClient]:
    with connect_redis(redis_url) as opened:
        yield opened


def record(offset: int, member: str, at_us: int) -> Record:
    return Record(
        SHARD.channel, SHARD.shard, Offset(offset), RecordId(offset), member, "dirty", "member", "{}", "", at_us
    )  # fmt: skip


def make_batch(records: Sequence[Record]) -> Batch:
    columns = Columns.pack([(r.id, r.key, r.action, r.object, r.data_json, "", r.staged_us) for r in records])
    return Batch(SHARD, Epoch(1), records[0].offset, False, columns)


def mark(client: RedisClient, *records: Record) -> Reply:
    return mark_batch(client, "penstock", make_batch(records))


def done_up_to(client: RedisClient) -> int:
    """After two calls, since the first may only store a watermark."""
    update_progress(client, "penstock", [SHARD])
    return update_progress(client, "penstock", [SHARD])[SHARD].done_up_to


@pytest.mark.parametrize("waits", ["as dirty", "with a consumer", "under a fencing number"])
@pytest.mark.parametrize("beside_newer", [False, True])
def test_a_member_that_waits_is_not_done_whoever_has_it(client: RedisClient, waits: str, *, beside_newer: bool) -> None:
    mark(client, record(1, "a", 1_000_000))
    update_progress(client, "penstock", [SHARD])
    if waits == "with a consumer":
        DirtyList(client, NAME).reserve(1)
    elif waits == "under a fencing number":
        Reservations(client, NAME, size=1).reserve()
    if beside_newer:
        mark(client, record(2, "b", 2_000_000))

    assert done_up_to(client) == 0


def test_a_member_with_the_score_of_the_watermark_is_not_done(client: RedisClient) -> None:
    """Two records of one instant: the later one's member waits, so the first mark is not all done."""
    mark(client, record(1, "a", 1_000_000), record(2, "b", 1_000_000))
    update_progress(client, "penstock", [SHARD])  # the watermark: offset 2, score 1.0
    DirtyList(client, NAME).reserve(1)
    DirtyList(client, NAME).commit(["a"])

    assert done_up_to(client) == 0


def test_all_marks_are_done_once_every_member_left(client: RedisClient) -> None:
    mark(client, record(1, "a", 1_000_000), record(2, "b", 2_000_000))
    DirtyList(client, NAME).reserve(2)
    DirtyList(client, NAME).commit(["a", "b"])

    assert done_up_to(client) == 2


def test_newer_members_do_not_hold_up_a_watermark(client: RedisClient) -> None:
    mark(client, record(1, "a", 1_000_000))
    update_progress(client, "penstock", [SHARD])
    for offset, (member, newer) in enumerate((("a", "b"), ("b", "c")), 1):
        mark(client, record(offset + 1, newer, 1_000_000 * (offset + 1)))
        DirtyList(client, NAME).reserve(1)
        DirtyList(client, NAME).commit([member])

        assert done_up_to(client) == offset


def test_a_watermark_stays_until_it_is_reached(client: RedisClient) -> None:
    """One that moved on with each new mark would never be."""
    mark(client, record(1, "a", 1_000_000))
    update_progress(client, "penstock", [SHARD])
    mark(client, record(2, "b", 2_000_000))
    update_progress(client, "penstock", [SHARD])
    DirtyList(client, NAME).reserve(1)
    DirtyList(client, NAME).commit(["a"])

    assert done_up_to(client) == 1


@pytest.mark.parametrize("looks_first", [True, False])
@pytest.mark.parametrize("keeps_members", [True, False])
def test_a_watermark_is_not_one_of_the_records_that_are_marked_after_a_loss(
    client: RedisClient, *, looks_first: bool, keeps_members: bool
) -> None:
    """They may be others at the same offsets: after an epoch was reset, too."""
    mark(client, record(1, "a", 1_000_000), record(2, "b", 2_000_000))
    update_progress(client, "penstock", [SHARD])
    if keeps_members:
        client.xadd(ick_shard_keys("penstock", SHARD).log.stream, {"id": "3"})
    else:
        DirtyList(client, NAME).delete()
    if looks_first:
        update_progress(client, "penstock", [SHARD])
    mark(client, record(1, "x", 9_000_000))
    DirtyList(client, NAME).reserve(2)
    DirtyList(client, NAME).commit(["a", "b"])

    assert done_up_to(client) == 0


def test_progress_counts_records_and_the_members_that_became_dirty(client: RedisClient) -> None:
    mark(client, record(1, "a", 1), record(2, "a", 2), record(3, "b", 3))
    mark(client, record(4, "b", 4), record(5, "c", 5))

    [progress] = update_progress(client, "penstock", [SHARD]).values()
    assert progress == MarkProgress(BEGINNING, Offset(5), records=5, dirtied=3)


def test_a_batch_that_is_marked_writes_nothing(client: RedisClient) -> None:
    """A member that is done would become dirty again."""
    mark(client, record(1, "a", 1), record(2, "b", 2))
    before = client.info("persistence")["rdb_changes_since_last_save"]
    mark(client, record(1, "a", 1), record(2, "b", 2))

    assert client.info("persistence")["rdb_changes_since_last_save"] == before


@pytest.mark.parametrize(("epoch", "reply"), [("9" * 10, FencedOff), ("9" * 11, Unusable)])
def test_an_epoch_has_ten_digits_at_most(client: RedisClient, epoch: str, reply: type[Reply]) -> None:
    client.set(ick_shard_keys("penstock", SHARD).log.epoch, epoch)

    assert isinstance(mark(client, record(1, "a", 1)), reply)


@pytest.mark.parametrize("times", [(1_000_000, 2_000_000), (2_000_000, 1_000_000)])
def test_of_several_records_of_a_member_the_earliest_time_counts(times: Sequence[int]) -> None:
    """Staging times need not follow the order of offsets."""
    marks = coalesce(make_batch([record(i, "a", at) for i, at in enumerate(times, 1)]))

    assert marks == ["1.0", b"a"]
