"""A consumer of several sources that is behind what Redis holds reads a source's journal in bulk, and what it holds is confirmed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import redis
from sqlalchemy import text
from sqlalchemy.orm import Session

from fixtures.clients import connect_redis
from fixtures.sources import Backup, Regions, Source, keys
from penstock import Log, Pipeline
from penstock.batches.columns import Columns
from penstock.channels.batch_outcomes import Appended, Batch
from penstock.channels.log.appending import append_together
from penstock.channels.log.follower import Follower
from penstock.channels.log.streams import evict, extents
from penstock.channels.routing import log_keys
from penstock.consuming.delivery import Consumed
from penstock.consuming.log.journal_follower import EvictedRecords, JournalFollower
from penstock.database.connections import connect_postgres
from penstock.embedded import EmbeddedPostgres
from penstock.operating.reset.epoch import reset_epoch
from penstock.records import Epoch, Offset, Record, Shard, ShardName

BATCH = 50


@pytest.fixture
def behind(regions: Regions) -> Regions:
    """Their consumer is registered, and gets small batches."""
    things = Log("things", sources=["eu", "us"])
    pipeline = Pipeline([things])

    @pipeline.consumer(reads=things, name="totals", batch=BATCH)
    def totals(session: Session, records: Sequence[Record]) -> None:
        values = [{"source": record.source, "key": record.key} for record in records]
        session.execute(text("INSERT INTO public.effects VALUES (:source, :key)"), values)

    for source in (regions.eu, regions.us):
        source.stream()
    made = replace(regions, pipeline=pipeline)
    made.drain()
    return made


def stage(source: Source, prefix: str, *counts: int) -> list[str]:
    """Stages and publishes so many, one after the other; returns the keys."""
    made: list[str] = []
    for number, count in enumerate(counts):
        source.stage(count, f"{prefix}{number} ")
        source.stream()
        made += keys(f"{prefix}{number} ", count)
    return sorted(made)


def evict_all(client: redis.Redis, source: Source) -> int:
    """Evicts all entries but the newest; returns the number of records."""
    shards = source.channel.shard_names
    for shard, each in extents(client, "penstock", shards).items():
        evict(client, "penstock", shard, Offset(each.tail))
    return sum(each.first - 1 for each in extents(client, "penstock", shards).values())


@pytest.mark.slow
def test_a_consumer_far_behind_a_source_seldom_asks_redis(behind: Regions, redis_client: redis.Redis) -> None:
    """Guarantees 12 and 25: lost 0, doubled 0."""
    staged = stage(behind.eu, "k", *[300] * 8)
    evicted = evict_all(redis_client, behind.eu)
    redis_client.config_resetstat()
    rounds: list[tuple[int, int]] = []

    def count(consumed: Consumed) -> None:
        rounds.append((consumed.applied, consumed.backfilled))

    with behind.worker() as worker:
        assert worker.drain(count) == 2400
    assert behind.effects("eu") == staged
    assert sum(backfilled for _, backfilled in rounds) == evicted > 2000
    # A batch of each shard in a round, so that none waits for the others; those from the journal did not ask Redis for records.
    assert max(applied for applied, _ in rounds) == 2 * BATCH
    assert redis_client.info("commandstats")["cmdstat_xread"]["calls"] < 20


@pytest.mark.slow
def test_what_is_held_of_a_journal_is_not_applied_after_its_source_was_restored(
    behind: Regions, postgres: EmbeddedPostgres, redis_client: redis.Redis
) -> None:
    """Guarantee 8: it was read from a history that is gone."""
    kept = stage(behind.eu, "kept", 100, 100, 100)
    backup = Backup.of(behind.eu, postgres)
    stage(behind.eu, "lost", 200, 200)
    evict_all(redis_client, behind.eu)
    with behind.worker() as worker:
        worker.round()
        applied = set(behind.effects("eu"))
        assert 0 < len(applied) <= 2 * BATCH
        assert applied < set(kept)

        backup.restore()
        with connect_postgres(behind.eu.url, application="test") as connection:
            reset_epoch(connection, redis_client, behind.eu.pipeline, apply=True)
        after = stage(behind.eu, "after", 200)
        evict_all(redis_client, behind.eu)
        while len(behind.effects("eu")) < len(kept) + len(after):
            worker.round()

    assert behind.effects("eu") == sorted(kept + after)


def test_what_was_read_ahead_of_a_shard_is_read_again_after_it_was_held_back(
    redis_client: redis.Redis, redis_url: str
) -> None:
    """It may be of a stream that is gone; whatever the other shards have got."""
    going, held = (ShardName("things", Shard(number)) for number in range(2))
    seen: list[dict[ShardName, list[str]]] = []

    def write(shard: ShardName, key: str) -> None:
        columns = Columns.pack([(n, key, "insert", "thing", "1", "", 1) for n in (1, 2)])
        batch = Batch(shard, Epoch(1), Offset(1), True, columns)
        assert append_together(redis_client, "penstock", [batch])[0][1] == Appended(Offset(2), 2)

    def confirm(found: Mapping[ShardName, Sequence[Record]]) -> dict[ShardName, Sequence[Record]]:
        seen.append({shard: [record.key for record in found[shard]] for shard in found})
        return {going: found[going]}

    for shard in (going, held):
        write(shard, "old")
    with connect_redis(redis_url) as client:
        follower = JournalFollower(
            lambda: Follower(client, "penstock", count=1), EvictedRecords(lambda *_: (), batch=1), confirm
        )
        for key in ("old", "new"):
            if key == "new":
                redis_client.delete(log_keys("penstock", held).stream)
                write(held, key)
            assert {*follower.wait(dict.fromkeys((going, held), Offset(0)), 100)} == {going}
        follower.close()

    assert [each[held] for each in seen] == [["old"], ["new"]]
