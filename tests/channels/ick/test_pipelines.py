"""Every operation can be queued in an application's Redis pipeline, which returns its result."""

from typing import Any

import pytest
import redis

from penstock.channels.ick.operations import Added, Exchanged
from penstock.clients import DirtyList, QueuedDirtyList
from penstock.errors import InvalidIckCall


@pytest.mark.parametrize("transaction", [False, True])
@pytest.mark.parametrize("options", [{}, {"decode_responses": True}, {"protocol": 3}])
def test_results_are_returned_in_order_among_the_applications_own(
    redis_url: str, options: dict[str, Any], *, transaction: bool
) -> None:
    with redis.Redis.from_url(redis_url, **options) as client:
        pipeline = client.pipeline(transaction=transaction)
        ick = QueuedDirtyList(pipeline, "ride-index")
        ick.stats()
        ick.add({"bar": 2, "foo": 3, "baz": 4.5})
        pipeline.set("mine", "1")
        ick.add({"bar": 1})
        pipeline.eval("return 7", 0)
        ick.reserve(1)
        ick.exchange(2, ["bar"])
        ick.commit(["foo", "nobody"])
        ick.stats()
        ick.delete()
        ick.delete(unlink=True)

        nothing, added, mine, lowered, seven, reserved, exchanged, committed, stats, *deleted = pipeline.execute()

    assert nothing is None
    assert added == Added(3, 0)
    assert mine
    assert lowered == Added(0, 1)
    assert seven == 7
    assert reserved == [(b"bar", 1.0)]
    assert exchanged == Exchanged(1, [(b"foo", 3.0), (b"baz", 4.5)])
    assert committed == 1
    assert (stats.dirty.size, stats.reserved.size) == (0, 1)
    assert deleted == [2, 0]


def test_calls_in_a_pipeline_run_in_the_order_in_which_they_were_queued(redis_client: redis.Redis) -> None:
    pipeline = redis_client.pipeline()
    ick = QueuedDirtyList(pipeline, "ride-index")
    ick.add({"foo": 10, "bar": 5})
    ick.add({"baz": 15, "x": 1})
    ick.reserve(4)

    assert [member for member, _ in pipeline.execute()[2]] == [b"x", b"bar", b"foo", b"baz"]


def test_a_pipeline_works_when_the_server_has_no_script_loaded(redis_client: redis.Redis) -> None:
    pipeline = redis_client.pipeline()
    QueuedDirtyList(pipeline, "ride-index").add({"a": 1})
    redis_client.script_flush()

    assert pipeline.execute() == [Added(1, 0)]


def test_a_pipeline_can_be_used_again_and_its_client_is_not_changed(redis_client: redis.Redis) -> None:
    pipeline = redis_client.pipeline()
    ick = QueuedDirtyList(pipeline, "ride-index")
    for expected in (1, 0):
        ick.add({"a": 1})
        assert pipeline.execute() == [Added(expected, 0)]

    assert redis_client.eval("return {'added', 1, 2}", 0) == [b"added", 1, 2]


def test_a_call_in_a_pipeline_is_one_script_call_whatever_its_size(redis_client: redis.Redis) -> None:
    marks = {str(i): i for i in range(9_000)}
    pipeline = redis_client.pipeline()
    ick = QueuedDirtyList(pipeline, "ride-index")
    ick.add(marks)
    ick.reserve(9_000)
    ick.commit(marks)

    added, reserved, committed = pipeline.execute()
    assert added == Added(9_000, 0)
    assert len(reserved) == committed == 9_000


def test_an_invalid_call_is_refused_when_it_is_queued(redis_client: redis.Redis) -> None:
    pipeline = redis_client.pipeline()
    ick = QueuedDirtyList(pipeline, "ride-index")

    with pytest.raises(InvalidIckCall):
        ick.add({"a": float("nan")})
    with pytest.raises(InvalidIckCall):
        ick.reserve(-1)
    assert pipeline.execute() == []


def test_an_operation_in_a_discarded_transaction_has_no_effect(redis_client: redis.Redis) -> None:
    pipeline: Any = redis_client.pipeline(transaction=True)
    pipeline.watch("other")
    redis_client.set("other", "1")
    pipeline.multi()
    QueuedDirtyList(pipeline, "ride-index").add({"a": 1})

    with pytest.raises(redis.WatchError):
        pipeline.execute()
    assert DirtyList(redis_client, "ride-index").stats() is None
