"""The keys of an Ick share a slot if its name has no braces; otherwise a Cluster client refuses the name."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis.crc import key_slot

from fixtures.topologies import Cluster
from penstock.channels.routing import ick_keys, ick_shard_keys
from penstock.clients import DirtyList, QueuedDirtyList, Reservation, Reservations, repair
from penstock.errors import InvalidIckCall
from penstock.records import Shard, ShardName

PLAIN = ["a", "abc", "ride-index", "penstock:ride-index/3", "a b", "a:b", "é", "[abc]", "(abc)", "<abc>"]
TAGGED = ["", "{}abc", "abc{}", "{a}bc", "a{b}c", "ab{c}", "{abc}", "{a}{b}", "a{b", "a}b", "}a{", "{{a}}", "a{}b{c}"]  # fmt: skip
ON_A_CLUSTER = {"{a}bc", "a{b}c", "ab{c}", "{abc}", "{a}{b}", "{{a}}"}


def enterprise_slot(key: str) -> int:
    """Redis Enterprise hashes what is in the last braces, Redis Cluster what is in the first."""
    match = re.fullmatch(r".*\{(.*)\}.*", key, re.DOTALL)
    return key_slot((match[1] if match else key).encode())


def make_keys(key: str, namespace: str = "") -> tuple[str, ...]:
    keys = ick_keys(key, namespace)
    return keys.version, keys.dirty, keys.reserved, keys.fence, keys.held


def agree(key: str) -> bool:
    """Returns whether both kinds of cluster keep the three original keys together."""
    three = make_keys(key)[:3]
    return len({key_slot(k.encode()) for k in three}) == 1 and len({*map(enterprise_slot, three)}) == 1


def test_a_plain_name_keeps_all_keys_in_one_slot_on_every_cluster() -> None:
    """With a prefix in the name or without."""
    for key in PLAIN:
        for name in (key, f"shop:{key}", f"a:b:{key}", f":{key}"):
            assert ick_keys(name).is_one_slot, name
            assert agree(name), name


def test_a_name_with_braces_is_not_kept_in_one_slot_by_every_kind_of_cluster() -> None:
    """Wherever they are, also in a prefix of a plain name."""
    names = ["{}abc", "{a}bc", "a{b}c", "ab{c}", "abc{}"]
    names += [prefix + name for prefix in ("{}:", "f{o}o:", "{foo}:") for name in names]
    names += [prefix + name for prefix in ("{}:", "f{o}o:") for name in PLAIN]

    assert [name for name in names if agree(name)] == []


def test_logs_fit_every_kind_of_cluster_and_icks_of_a_pipeline_need_redis_clusters_hashing() -> None:
    """As the page on Icks says: only the last of nested braces counts for Redis Enterprise's standard policy."""
    keys = ick_shard_keys("penstock", ShardName("ride-index", Shard(2)))
    ick = make_keys(keys.name)

    for slot in (lambda key: key_slot(key.encode()), enterprise_slot):
        assert slot(keys.log.stream) == slot(keys.log.epoch)
    assert keys.ick.is_one_slot
    assert {key_slot(key.encode()) for key in ick} == {key_slot(keys.log.stream.encode())}
    assert not agree(keys.name)


def test_the_check_agrees_with_a_cluster_about_braces() -> None:
    assert {key for key in TAGGED if ick_keys(key).is_one_slot} == ON_A_CLUSTER


def test_a_namespace_precedes_each_key_as_in_ruby() -> None:
    assert make_keys("ride-index", "shop") == (
        "shop:ride-index",
        "shop:ride-index/ick/{ride-index}/pset",
        "shop:ride-index/ick/{ride-index}/cset",
        "shop:ride-index/ick/{ride-index}/fence",
        "shop:ride-index/ick/{ride-index}/held",
    )


def test_on_one_server_every_name_works(redis_client: redis.Redis) -> None:
    for key in [*PLAIN, *TAGGED]:
        ick = DirtyList(redis_client, key, namespace="shop")
        ick.add({"a": 1})

        assert ick.reserve(1) == [(b"a", 1.0)], key
        assert redis_client.get(f"shop:{key}") == b"ick.v1"
        assert DirtyList(redis_client, key).stats() is None


@pytest.fixture
def client(cluster: Cluster) -> Iterator[redis.RedisCluster]:
    with redis.RedisCluster.from_url(cluster.nodes[0].url) as client:
        yield client


def test_every_operation_works_on_a_cluster(client: Any) -> None:
    ick = DirtyList(client, "ride-index")
    ick.add({"a": 1, "b": 2})
    assert ick.exchange(1, []).marks == [(b"a", 1.0)]
    stats = ick.stats()
    assert stats is not None
    assert stats.total.size == 2

    fenced = Reservations(client, "ride-index", size=2)
    first = fenced.reserve()
    assert isinstance(first, Reservation)
    assert first.members == [b"a", b"b"]
    fenced.commit(first, ["a"])
    fenced.exchange(first)

    client.delete(ick.keys.version)
    ick_of_foreigners = client.zadd(ick.keys.dirty, {"x": 1})
    assert ick_of_foreigners == 1
    assert len(repair(client, "ride-index")) == 1
    client.script_flush()
    assert ick.delete() == 2


def test_a_cluster_pipeline_returns_results(client: Any) -> None:
    pipeline = client.pipeline()
    queued = QueuedDirtyList(pipeline, "other-index")
    queued.add({"a": 1, "b": 2})
    queued.reserve(1)
    queued.commit(["a"])
    queued.delete()

    added, reserved, committed, deleted = pipeline.execute()
    assert added.new == 2
    assert reserved == [(b"a", 1.0)]
    assert committed == 1
    assert deleted == 2


def test_a_name_whose_keys_fall_in_several_slots_is_refused_on_a_cluster(client: Any) -> None:
    for key in set(TAGGED) - ON_A_CLUSTER:
        with pytest.raises(InvalidIckCall, match="would not be in one slot"):
            DirtyList(client, key)
        with pytest.raises(InvalidIckCall, match="would not be in one slot"):
            QueuedDirtyList(client.pipeline(), key)
    with pytest.raises(InvalidIckCall, match="would not be in one slot"):
        QueuedDirtyList(client.pipeline(), "ride-index", namespace="shop")
