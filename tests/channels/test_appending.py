"""The append script compares whole records with the last offset ever given, not with what happens to be left."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import redis

from fixtures.clients import connect_redis
from penstock.batches.columns import Columns
from penstock.channels.batch_outcomes import Appended, Batch, FencedOff, Reply, Unusable
from penstock.channels.log.appending import append_together
from penstock.channels.log.streams import read
from penstock.channels.routing import log_keys
from penstock.records import BEGINNING, Epoch, Offset, Shard, ShardName

SHARD = ShardName("things", Shard(0))
STREAM = log_keys("penstock", SHARD).stream

Append = Callable[[Batch], Reply]


def entry_ids(client: redis.Redis) -> list[Any]:
    return [entry for entry, _ in client.xrange(STREAM) or []]


def batch(first: int, *records: tuple[int, int], plain: bool = True) -> Batch:
    """Records as (id, staging time)."""
    rows = [(id_, f"k{id_}", "insert", "thing", "{}", "", at) for id_, at in records]
    return Batch(SHARD, Epoch(1), Offset(first), begins=False, columns=Columns.pack(rows), plain=plain)


@pytest.fixture
def append(redis_url: str) -> Iterator[Append]:
    with connect_redis(redis_url) as client:

        def append_batch(one: Batch) -> Reply:
            [(_, reply)] = append_together(client, "penstock", [one])
            return reply

        yield append_batch


def test_a_log_evicted_to_its_end_still_knows_its_last_offset(append: Append, redis_client: redis.Redis) -> None:
    append(batch(1, (11, 1), (12, 2), (13, 3)))
    redis_client.xtrim(STREAM, maxlen=0, approximate=False)

    assert append(batch(1, (11, 1), (12, 2), (13, 3))) == Appended(Offset(3), 0)
    assert append(batch(3, (13, 3), (14, 4))) == Appended(Offset(4), 1)
    assert entry_ids(redis_client) == [b"4-0"]


@pytest.mark.parametrize("evicted", [1, 2])
def test_a_batch_that_begins_with_what_was_evicted_is_sent_from_where_the_log_ends(
    append: Append, redis_client: redis.Redis, evicted: int
) -> None:
    """One entry would hold it whole, and the evicted records would be back."""
    rows = (11, 1), (12, 2), (13, 3)
    append(batch(1, *rows[:evicted], plain=False))
    redis_client.xtrim(STREAM, maxlen=0, approximate=False)

    assert append(batch(1, *rows, plain=False)) == Appended(Offset(3), 3 - evicted)
    assert read(redis_client, "penstock", SHARD, BEGINNING, 10).offsets == [*range(evicted + 1, 4)]


def test_a_log_whose_last_entry_was_deleted_by_hand_takes_nothing_more(
    append: Append, redis_client: redis.Redis
) -> None:
    """An eviction removes the first entries: a log that lacks only its last one was changed by something else."""
    append(batch(1, (11, 1), (12, 2)))
    redis_client.xdel(STREAM, "2-0")

    assert isinstance(append(batch(2, (12, 2), (13, 3))), Unusable)
    assert entry_ids(redis_client) == [b"1-0"]


def entry(**names: str) -> Any:
    """The fields of an entry that Penstock has written, some of them by another name."""
    fields = ("id", "key", "action", "object", "data", "headers", "ts")
    return {names.get(name, name): "1" for name in fields}


@pytest.mark.parametrize(
    "found",
    [entry(id="ident"), entry(ts="time"), {**entry(), "more": "1"}, {"id": "1", "ts": "1"}],
    ids=["no id", "no time", "a field more", "too few"],
)
def test_nothing_is_appended_after_an_entry_of_another_form(
    append: Append, redis_client: redis.Redis, found: Any
) -> None:
    """Its fields could be taken for an id and a time that agree by chance."""
    redis_client.xadd(STREAM, found, "1-0")

    assert isinstance(append(batch(1, (1, 1), (12, 2))), Unusable)
    assert entry_ids(redis_client) == [b"1-0"]


def test_an_offset_that_only_an_entry_of_another_id_has_is_missing(append: Append, redis_client: redis.Redis) -> None:
    redis_client.xadd(STREAM, entry(), "2-5")
    append(batch(3, (13, 3)))
    redis_client.xadd(STREAM, entry(), "3-0")

    assert isinstance(append(batch(2, (1, 1))), Unusable)


def test_a_batch_that_the_log_has_writes_nothing(append: Append, redis_client: redis.Redis) -> None:
    """Publishers repeat batches; replicas and the append-only file are not to hear of it."""
    append(batch(1, (11, 1), (12, 2)))
    before = writes(redis_client)

    assert append(batch(1, (11, 1), (12, 2))) == Appended(Offset(2), 0)
    assert writes(redis_client) == before


def writes(client: redis.Redis) -> int:
    return int(cast("Any", client.info("persistence"))["rdb_changes_since_last_save"])


@pytest.mark.parametrize(("epoch", "reply"), [("9" * 10, FencedOff), ("9" * 11, Unusable)])
def test_an_epoch_has_ten_digits_at_most(
    append: Append, redis_client: redis.Redis, epoch: str, reply: type[Reply]
) -> None:
    """As readers of it expect."""
    redis_client.set(log_keys("penstock", SHARD).epoch, epoch)

    assert isinstance(append(batch(1, (11, 1))), reply)
