"""``penstock reset epoch`` names the offsets in doubt, who has applied them, and keeps what only the log has of them."""

from typing import Any

import pytest
import redis

from fixtures.clients import connect_redis
from fixtures.restored import Restored, reset, stage, stream
from fixtures.topologies import Cluster
from penstock import Log, Pipeline
from penstock.channels.log.stream_entries import parse_entries
from penstock.channels.log.streams import evict, extents, read
from penstock.channels.routing import log_keys
from penstock.clients import LogGroup
from penstock.database.connections import connect_postgres
from penstock.database.store import Store
from penstock.errors import HistoryDiverged, LogDiverged
from penstock.operating.channels import reshard
from penstock.operating.reset.doubt import ConsumerInDoubt
from penstock.records import BEGINNING, Offset, Shard, ShardName
from penstock.streaming import tick

CHECKPOINTS = """
INSERT INTO penstock.checkpoints (consumer, channel, shard, "offset", epoch)
VALUES ('reader', 'things', 0, %s, 1), ('reader', 'things', 1, 0, 1)
ON CONFLICT (consumer, channel, shard) DO UPDATE SET "offset" = excluded."offset"
"""

PASSED = """
INSERT INTO penstock.checkpoints (consumer, channel, shard, "offset", epoch)
SELECT 'reader', channel, shard, max(last_offset), 1 FROM penstock.journal GROUP BY channel, shard
"""


def tails(client: redis.Redis, things: Log) -> dict[ShardName, int]:
    found = extents(client, "penstock", list(things.shard_names))
    return {shard: extent.tail for shard, extent in found.items()}


def test_the_plan_names_the_offsets_that_postgres_has_lost_and_their_entries_are_kept(
    flow: Pipeline, things: Log, redis_client: redis.Redis, redis_url: str, database_url: str, copy_database: Restored
) -> None:
    """Guarantee 10."""
    stage(database_url, things, 50, "kept")
    stream(flow, database_url, redis_url)
    with connect_postgres(database_url, application="test") as connection:
        connection.execute(CHECKPOINTS, [3])
    kept = tails(redis_client, things)
    restored = copy_database()
    stage(database_url, things, 30, "lost")
    stream(flow, database_url, redis_url)
    lost = tails(redis_client, things)

    plan = reset(restored, redis_client, flow)
    reset(restored, redis_client, flow, apply=True)

    assert {each.shard: (each.first, each.last, each.journal) for each in plan.in_doubt} == {
        str(shard): (kept[shard] + 1, lost[shard], kept[shard]) for shard in things.shard_names
    }
    assert sum(each.count for each in plan.in_doubt) == 30
    assert plan.in_doubt[0].consumers == (ConsumerInDoubt("reader", 3, 0),)
    keys = []
    for each, shard in zip(plan.in_doubt, things.shard_names, strict=True):
        assert each.kept_as is not None
        entries: Any = redis_client.xrange(each.kept_as)
        keys += [record.key for record in parse_entries(shard, entries)]
    assert sorted(keys) == sorted(f"lost{number}" for number in range(1, 31))
    stage(restored, things, 5, "new")
    stream(flow, restored, redis_url)
    log = [
        record.key for shard in things.shard_names for record in read(redis_client, "penstock", shard, BEGINNING, 1000)
    ]
    assert len(log) == 55
    assert not [key for key in log if key.startswith("lost")]


def test_one_lost_record_is_as_bad_as_many(
    redis_client: redis.Redis, redis_url: str, database_url: str, copy_database: Restored
) -> None:
    """Guarantee 10."""
    things = Log("things", shards=1)
    flow = Pipeline([things])
    stage(database_url, things, 10, "kept")
    stream(flow, database_url, redis_url)
    restored = copy_database()
    stage(database_url, things, 1, "lost")
    stream(flow, database_url, redis_url)

    with pytest.raises(HistoryDiverged, match="goes to offset 11, the journal only to 10"):
        stream(flow, restored, redis_url)
    plan = reset(restored, redis_client, flow, apply=True)
    stage(restored, things, 3, "new")
    stream(flow, restored, redis_url)

    assert [each.why for each in plan.deleted] == ["the log is ahead"]
    assert [(each.first, each.last) for each in plan.in_doubt] == [(11, 11)]
    assert redis_client.xlen(str(plan.in_doubt[0].kept_as)) == 1
    log = [r.key for r in read(redis_client, "penstock", things.shard_names[0], BEGINNING, 100)]
    assert log[10:] == ["new1", "new2", "new3"]


def test_doubt_begins_where_two_histories_part_and_not_where_the_journal_ends(
    flow: Pipeline, things: Log, redis_client: redis.Redis, redis_url: str, database_url: str, copy_database: Restored
) -> None:
    """Something has sequenced in the restored database: both have records at these offsets, and not the same."""
    first, _ = things.shard_names
    stage(database_url, things, 50, "kept")
    stream(flow, database_url, redis_url)
    kept = tails(redis_client, things)
    restored = copy_database()
    stage(database_url, things, 30, "lost")
    stream(flow, database_url, redis_url)
    stage(restored, things, 40, "other")
    lost = tails(redis_client, things)
    with connect_postgres(restored, application="test") as connection:
        tick(Store(connection))
        connection.execute(CHECKPOINTS, [kept[first] + 4])
        connection.execute(CHECKPOINTS.replace("reader", "beyond"), [lost[first] + 4])

    plan = reset(restored, redis_client, flow)

    assert {each.shard: (each.first, each.last) for each in plan.in_doubt} == {
        str(shard): (kept[shard] + 1, lost[shard]) for shard in things.shard_names
    }
    assert all(each.journal > kept[shard] for each, shard in zip(plan.in_doubt, kept, strict=True))
    assert plan.in_doubt[0].consumers == (
        ConsumerInDoubt("beyond", lost[first] + 4, lost[first] - kept[first]),
        ConsumerInDoubt("reader", kept[first] + 4, 4),
    )
    # The ids of the lost records were given out again.
    assert [each.still_there for each in plan.in_doubt] == [0, 0]


@pytest.mark.parametrize("left", [True, False])
def test_doubt_is_told_of_a_log_whose_older_records_were_evicted(
    flow: Pipeline,
    things: Log,
    redis_client: redis.Redis,
    redis_url: str,
    database_url: str,
    copy_database: Restored,
    left: bool,  # noqa: FBT001
) -> None:
    """No offset is in both the log and the journal; an empty log has nothing to keep."""
    stage(database_url, things, 20, "kept")
    stream(flow, database_url, redis_url)
    kept = tails(redis_client, things)
    restored = copy_database()
    for part in range(2):
        stage(database_url, things, 20, f"lost{part}")
        stream(flow, database_url, redis_url)
    lost = tails(redis_client, things)
    for shard in things.shard_names:
        evict(redis_client, "penstock", shard, Offset(lost[shard] + (not left)))

    plan = reset(restored, redis_client, flow, apply=True)

    assert {each.shard: (each.first, each.last, each.compared) for each in plan.in_doubt} == {
        str(shard): (kept[shard] + 1, lost[shard], 0) for shard in things.shard_names
    }
    assert [each.kept_as is not None for each in plan.in_doubt] == [left, left]


def test_nothing_is_in_doubt_of_a_log_that_agrees(
    flow: Pipeline, things: Log, redis_client: redis.Redis, redis_url: str, database_url: str
) -> None:
    stage(database_url, things, 20, "kept")
    stream(flow, database_url, redis_url)
    redis_client.set(log_keys("penstock", things.shard_names[0]).epoch, 7)

    plan = reset(database_url, redis_client, flow, apply=True)

    assert plan.applied
    assert plan.in_doubt == ()
    assert not redis_client.keys("*before*")


@pytest.mark.parametrize("kept", [True, False])
def test_ids_that_postgres_has_are_not_given_out_again(
    flow: Pipeline, things: Log, redis_client: redis.Redis, redis_url: str, database_url: str, *, kept: bool
) -> None:
    """A copy by logical replication brings rows, and leaves the sequences where they were.  The journal has those that retention has
    removed, too."""
    stage(database_url, things, 20, "kept")
    stream(flow, database_url, redis_url)
    redis_client.flushall()
    redis_client.set(log_keys("penstock", things.shard_names[0]).epoch, 7)
    with connect_postgres(database_url, application="test") as connection:
        connection.execute("ALTER TABLE penstock.staged_records ALTER COLUMN id RESTART WITH 1")
        if not kept:
            connection.execute(PASSED)
            connection.execute("DELETE FROM penstock.staged_records")

    reset(database_url, redis_client, flow, apply=True)

    stage(database_url, things, 5, "new")
    with connect_postgres(database_url, application="test") as connection:
        new = "SELECT min(id) FROM penstock.staged_records WHERE key LIKE 'new%'"
        assert connection.execute(new).fetchone() == (21,)


def test_shards_that_postgres_has_forgotten_are_in_doubt(
    flow: Pipeline, things: Log, redis_client: redis.Redis, redis_url: str, database_url: str, copy_database: Restored
) -> None:
    """Restored to before the number of shards was changed: the old shards agree, and later new ones would get these numbers."""
    stage(database_url, things, 20, "kept")
    stream(flow, database_url, redis_url)
    restored = copy_database()
    change_shards(database_url)
    stage(database_url, things, 30, "lost")
    stream(flow, database_url, redis_url)

    with pytest.raises(HistoryDiverged, match="things/2: the log goes to offset"):
        stream(flow, restored, redis_url)
    plan = reset(restored, redis_client, flow, apply=True)
    change_shards(restored)
    stage(restored, things, 30, "new")
    stream(flow, restored, redis_url)

    assert {each.shard for each in plan.in_doubt} == {"things/2", "things/3", "things/4"}
    assert sum(each.count for each in plan.in_doubt) == 30
    keys = [
        record.key
        for shard in range(5)
        for record in read(redis_client, "penstock", ShardName("things", Shard(shard)), BEGINNING, 1000)
    ]
    assert len(keys) == 50
    assert not [key for key in keys if key.startswith("lost")]


def test_the_plan_names_the_shards_of_now_for_records_without_an_offset(
    flow: Pipeline, things: Log, redis_client: redis.Redis, redis_url: str, database_url: str
) -> None:
    """The application staged them into those from before the number of shards was changed."""
    stage(database_url, things, 20, "kept")
    stream(flow, database_url, redis_url)
    change_shards(database_url)
    stage(database_url, things, 30, "waiting")
    redis_client.set(log_keys("penstock", things.shard_names[0]).epoch, 7)

    plan = reset(database_url, redis_client, flow, apply=True)

    with connect_postgres(database_url, application="test") as connection:
        given = connection.execute(
            "SELECT channel || '/' || shard, sum(last_offset - first_offset + 1)::int FROM penstock.journal WHERE shard > 1 GROUP BY 1"
        ).fetchall()
    assert sum(count for _, count in given) == 30
    assert plan.unsequenced == dict(given)


def change_shards(url: str) -> None:
    with connect_postgres(url, application="test") as connection:
        assert reshard(Store(connection), "things", 3, apply=True).applied


def test_a_group_of_readers_goes_back_to_the_first_offset_in_doubt(
    redis_client: redis.Redis, redis_url: str, database_url: str, copy_database: Restored
) -> None:
    """Also to one before the end of the journal: what is there now are other records."""
    things = Log("things", shards=1)
    flow = Pipeline([things])
    stage(database_url, things, 10, "kept")
    stream(flow, database_url, redis_url)
    restored = copy_database()
    stage(database_url, things, 10, "lost")
    stream(flow, database_url, redis_url)
    stage(restored, things, 5, "new")
    with connect_postgres(restored, application="test") as connection:
        tick(Store(connection))
    with LogGroup.connect(redis_url, "things", "mailers", shards=1) as group:
        assert len(group.read(100)) == 20

        reset(restored, redis_client, flow, apply=True)
        stream(flow, restored, redis_url)

        with pytest.raises(LogDiverged, match="other records from 11 on"):
            group.read(100)
        assert [record.key for record in group.read(100)] == [f"new{n}" for n in range(1, 6)]


@pytest.mark.slow
def test_entries_in_doubt_are_kept_on_a_cluster(
    flow: Pipeline, things: Log, cluster: Cluster, database_url: str, copy_database: Restored
) -> None:
    stage(database_url, things, 20, "kept")
    stream(flow, database_url, cluster.url)
    restored = copy_database()
    stage(database_url, things, 20, "lost")
    stream(flow, database_url, cluster.url)
    with connect_redis(cluster.url) as client:
        plan = reset(restored, client, flow, apply=True)

        assert [client.xlen(each.kept_as) for each in plan.in_doubt] == [1, 1]
        stream(flow, restored, cluster.url)
        assert sum(each.tail for each in extents(client, "penstock", things.shard_names).values()) == 20


def test_a_copy_in_the_same_cluster_goes_on_and_the_other_one_stops_once_it_publishes(
    flow: Pipeline, things: Log, redis_client: redis.Redis, redis_url: str, database_url: str, copy_database: Restored
) -> None:
    """Transaction ids mean the same there, so what was not sequenced yet is found by the next tick."""
    stage(database_url, things, 20, "streamed ")
    stream(flow, database_url, redis_url)
    stage(database_url, things, 10, "waiting ")
    copied = copy_database()
    stage(copied, things, 5, "new ")
    stream(flow, copied, redis_url)

    keys = [
        record.key for shard in things.shard_names for record in read(redis_client, "penstock", shard, BEGINNING, 1000)
    ]
    assert sorted(key.split()[0] for key in keys) == ["new"] * 5 + ["streamed"] * 20 + ["waiting"] * 10
    stage(database_url, things, 40, "other ")
    with pytest.raises(HistoryDiverged):
        stream(flow, database_url, redis_url)
