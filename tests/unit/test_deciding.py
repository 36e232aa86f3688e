"""The decisions that need no server."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.channels.log import Batch
from penstock.consuming.checkpoints import compare
from penstock.consuming.failures import divide, pause_s
from penstock.records import Epoch, Offset, Record, RecordId, Shard, ShardName


def record(offset: int) -> Record:
    return Record("c", Shard(0), Offset(offset), RecordId(offset), "k", "a", "o", "{}")


@given(st.sets(st.integers(1, 60)), st.integers(0, 60))
def test_only_what_follows_the_checkpoint_without_a_hole_is_fresh(
    offsets: set[int], checkpoint: int
) -> None:
    delivered = [record(offset) for offset in sorted(offsets)]
    comparison = compare(Offset(checkpoint), delivered)

    fresh = [r.offset for r in comparison.fresh]
    assert fresh == list(range(checkpoint + 1, checkpoint + 1 + len(fresh)))
    assert comparison.skipped == sum(offset <= checkpoint for offset in offsets)
    assert comparison.gap == (len(fresh) + comparison.skipped < len(offsets))
    assert comparison.gap or len(fresh) + comparison.skipped == len(offsets)
    assert checkpoint + 1 + len(fresh) not in offsets


@given(st.integers(2, 100), st.one_of(st.none(), st.integers(0, 99)))
def test_a_divided_batch_keeps_every_record_in_order(size: int, culprit: int | None) -> None:
    records = [record(offset) for offset in range(1, size + 1)]
    at = None if culprit is None or culprit >= size else culprit
    parts = divide(records, at)

    assert [r for part in parts for r in part] == records
    assert all(0 < len(part) < size for part in parts)
    assert at is None or [records[at]] in parts


def test_pauses_grow_to_a_bound() -> None:
    pauses = [pause_s(attempt) for attempt in range(1, 20)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == 5.0


def test_a_batch_knows_its_extent() -> None:
    batch = Batch(ShardName("c", Shard(0)), Epoch(1), Offset(5), begins=False, arguments=["x"] * 21)
    assert (batch.count, batch.last) == (3, 7)
