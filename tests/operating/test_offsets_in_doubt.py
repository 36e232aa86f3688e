"""``penstock reset epoch`` names the offsets in doubt, who has applied them, and keeps what only the log has of them."""

from typing import Any

import pytest
from redis import Redis

from fixtures.clients import connect_redis
from fixtures.restored import Restored, Scene, reset, stage, stream
from fixtures.topologies import Cluster
from penstock import Ick, Log, Pipeline
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


def test_the_plan_names_the_offsets_that_postgres_has_lost_and_their_entries_are_kept(
    database_url: str, copy_database: Restored, scene: Scene
) -> None:
    """Guarantee 10."""
    scene.publish(database_url, 50, "kept")
    with connect_postgres(database_url, application="test") as connection:
        connection.execute(CHECKPOINTS, [3])
    kept = scene.tails()
    restored = copy_database()
    scene.publish(database_url, 30, "lost")
    lost = scene.tails()

    plan = scene.reset(restored)
    scene.reset(restored, apply=True)

    assert {each.shard: (each.first, each.last, each.journal) for each in plan.in_doubt} == {
        str(shard): (kept[shard] + 1, lost[shard], kept[shard]) for shard in scene.things.shard_names
    }
    assert sum(each.count for each in plan.in_doubt) == 30
    assert plan.in_doubt[0].consumers == (ConsumerInDoubt("reader", 3, 0),)
    keys = []
    for each, shard in zip(plan.in_doubt, scene.things.shard_names, strict=True):
        assert each.kept_as is not None
        entries: Any = scene.client.xrange(each.kept_as)
        keys += [record.key for record in parse_entries(shard, entries)]
    assert sorted(keys) == sorted(f"lost{number}" for number in range(1, 31))
    scene.publish(restored, 5, "new")
    log = scene.keys()
    assert len(log) == 55
    assert not [key for key in log if key.startswith("lost")]


@pytest.mark.things(shards=1)
def test_one_lost_record_is_as_bad_as_many(database_url: str, copy_database: Restored, scene: Scene) -> None:
    """Guarantee 10."""
    scene.publish(database_url, 10, "kept")
    restored = copy_database()
    scene.publish(database_url, 1, "lost")

    with pytest.raises(HistoryDiverged, match="goes to offset 11, the journal only to 10"):
        scene.stream(restored)
    plan = scene.reset(restored, apply=True)
    scene.publish(restored, 3, "new")

    assert [each.why for each in plan.deleted] == ["the log is ahead"]
    assert [(each.first, each.last) for each in plan.in_doubt] == [(11, 11)]
    assert scene.client.xlen(str(plan.in_doubt[0].kept_as)) == 1
    log = scene.keys()
    assert log[10:] == ["new1", "new2", "new3"]


def test_doubt_begins_where_two_histories_part_and_not_where_the_journal_ends(
    database_url: str, copy_database: Restored, scene: Scene
) -> None:
    """Something has sequenced in the restored database: both have records at these offsets, and not the same."""
    first, _ = scene.things.shard_names
    scene.publish(database_url, 50, "kept")
    kept = scene.tails()
    restored = copy_database()
    scene.publish(database_url, 30, "lost")
    scene.stage(restored, 40, "other")
    lost = scene.tails()
    with connect_postgres(restored, application="test") as connection:
        tick(Store(connection))
        connection.execute(CHECKPOINTS, [kept[first] + 4])
        connection.execute(CHECKPOINTS.replace("reader", "beyond"), [lost[first] + 4])

    plan = scene.reset(restored)

    assert {each.shard: (each.first, each.last) for each in plan.in_doubt} == {
        str(shard): (kept[shard] + 1, lost[shard]) for shard in scene.things.shard_names
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
    database_url: str, copy_database: Restored, scene: Scene, *, left: bool
) -> None:
    """No offset is in both the log and the journal; an empty log has nothing to keep."""
    scene.publish(database_url, 20, "kept")
    kept = scene.tails()
    restored = copy_database()
    for part in range(2):
        scene.publish(database_url, 20, f"lost{part}")
    lost = scene.tails()
    for shard in scene.things.shard_names:
        evict(scene.client, "penstock", shard, Offset(lost[shard] + (not left)))

    plan = scene.reset(restored, apply=True)

    assert {each.shard: (each.first, each.last, each.compared) for each in plan.in_doubt} == {
        str(shard): (kept[shard] + 1, lost[shard], 0) for shard in scene.things.shard_names
    }
    assert [each.kept_as is not None for each in plan.in_doubt] == [left, left]


def test_the_position_of_an_ick_is_in_doubt_and_not_kept(
    database_url: str, copy_database: Restored, redis_client: Redis, redis_url: str
) -> None:
    index = Ick("index", shards=1)
    scene = Scene(Pipeline([index]), index, redis_client, redis_url)  # type: ignore[arg-type]  # of any kind
    scene.publish(database_url, 2, "kept")
    restored = copy_database()
    scene.publish(database_url, 3, "lost")

    assert [(each.first, each.last, each.kept_as) for each in scene.reset(restored).in_doubt] == [(3, 5, None)]


def test_nothing_is_in_doubt_of_a_log_that_agrees(database_url: str, scene: Scene) -> None:
    scene.publish(database_url, 20, "kept")
    scene.client.set(log_keys("penstock", scene.things.shard_names[0]).epoch, 7)

    plan = scene.reset(database_url, apply=True)

    assert plan.applied
    assert plan.in_doubt == ()
    assert not scene.client.keys("*before*")


@pytest.mark.parametrize("kept", [True, False])
def test_ids_that_postgres_has_are_not_given_out_again(database_url: str, scene: Scene, *, kept: bool) -> None:
    """A copy by logical replication brings rows, and leaves the sequences where they were.  The journal has those that retention has
    removed, too."""
    scene.publish(database_url, 20, "kept")
    scene.client.flushall()
    scene.client.set(log_keys("penstock", scene.things.shard_names[0]).epoch, 7)
    with connect_postgres(database_url, application="test") as connection:
        connection.execute("ALTER TABLE penstock.staged_records ALTER COLUMN id RESTART WITH 1")
        if not kept:
            connection.execute(PASSED)
            connection.execute("DELETE FROM penstock.staged_records")

    scene.reset(database_url, apply=True)

    scene.stage(database_url, 5, "new")
    with connect_postgres(database_url, application="test") as connection:
        new = "SELECT min(id) FROM penstock.staged_records WHERE key LIKE 'new%'"
        assert connection.execute(new).fetchone() == (21,)


def test_shards_that_postgres_has_forgotten_are_in_doubt(
    database_url: str, copy_database: Restored, scene: Scene
) -> None:
    """Restored to before the number of shards was changed: the old shards agree, and later new ones would get these numbers."""
    scene.publish(database_url, 20, "kept")
    restored = copy_database()
    change_shards(database_url)
    scene.publish(database_url, 30, "lost")

    with pytest.raises(HistoryDiverged, match="things/2: the log goes to offset"):
        scene.stream(restored)
    plan = scene.reset(restored, apply=True)
    change_shards(restored)
    scene.publish(restored, 30, "new")

    assert {each.shard for each in plan.in_doubt} == {"things/2", "things/3", "things/4"}
    assert sum(each.count for each in plan.in_doubt) == 30
    keys = [
        record.key
        for shard in range(5)
        for record in read(scene.client, "penstock", ShardName("things", Shard(shard)), BEGINNING, 1000)
    ]
    assert len(keys) == 50
    assert not [key for key in keys if key.startswith("lost")]


def test_the_plan_names_the_shards_of_now_for_records_without_an_offset(database_url: str, scene: Scene) -> None:
    """The application staged them into those from before the number of shards was changed."""
    scene.publish(database_url, 20, "kept")
    change_shards(database_url)
    scene.stage(database_url, 30, "waiting")
    scene.client.set(log_keys("penstock", scene.things.shard_names[0]).epoch, 7)

    plan = scene.reset(database_url, apply=True)

    with connect_postgres(database_url, application="test") as connection:
        given = connection.execute(
            "SELECT channel || '/' || shard, sum(last_offset - first_offset + 1)::int FROM penstock.journal WHERE shard > 1 GROUP BY 1"
        ).fetchall()
    assert sum(count for _, count in given) == 30
    assert plan.unsequenced == dict(given)


def change_shards(url: str) -> None:
    with connect_postgres(url, application="test") as connection:
        assert reshard(Store(connection), "things", 3, apply=True).applied


@pytest.mark.things(shards=1)
def test_a_group_of_readers_goes_back_to_the_first_offset_in_doubt(
    redis_url: str, database_url: str, copy_database: Restored, scene: Scene
) -> None:
    """Also to one before the end of the journal: what is there now are other records."""
    scene.publish(database_url, 10, "kept")
    restored = copy_database()
    scene.publish(database_url, 10, "lost")
    scene.stage(restored, 5, "new")
    with connect_postgres(restored, application="test") as connection:
        tick(Store(connection))
    with LogGroup.connect(redis_url, "things", "mailers", shards=1) as group:
        assert len(group.read(100)) == 20

        scene.reset(restored, apply=True)
        scene.stream(restored)

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
    database_url: str, copy_database: Restored, scene: Scene
) -> None:
    """Transaction ids mean the same there, so what was not sequenced yet is found by the next tick."""
    scene.publish(database_url, 20, "streamed ")
    scene.stage(database_url, 10, "waiting ")
    copied = copy_database()
    scene.publish(copied, 5, "new ")

    keys = scene.keys()
    assert sorted(key.split()[0] for key in keys) == ["new"] * 5 + ["streamed"] * 20 + ["waiting"] * 10
    scene.stage(database_url, 40, "other ")
    with pytest.raises(HistoryDiverged):
        scene.stream(database_url)
