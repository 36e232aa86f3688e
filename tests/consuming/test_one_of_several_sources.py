"""One consumer reads the logs of several databases, and its own database has its effects and its checkpoints."""

import json
import math
import re
import shlex
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session, sessionmaker
from structlog.testing import capture_logs

from fixtures.application import Ride
from fixtures.clocks import Clock
from fixtures.command_line import CommandLine, load_settings
from fixtures.constants import SetConstants
from fixtures.crash_points import at_crash_points
from fixtures.damaged_entries import damage_entry
from fixtures.flow import retain_now, running
from fixtures.intervals import take_for_fast
from fixtures.postgres import engine_url
from fixtures.sources import Backup, MakeDatabase, Regions, Source, declare_totals, keys
from penstock import Ick, Log, Pipeline, stage
from penstock.channels.log.streams import read
from penstock.channels.routing import log_keys
from penstock.consuming import WorkerSetup, make_worker
from penstock.consuming.journals import Limit
from penstock.consuming.several.source_link import SourceLink
from penstock.database.connections import connect_postgres
from penstock.database.store import Store
from penstock.database.transactions import WORKER_SILENCE_S
from penstock.embedded import EmbeddedPostgres
from penstock.engines.stealing import Chores
from penstock.errors import (
    ConsumerRenamed,
    DeclarationError,
    HistoryDiverged,
    InvalidName,
    InvalidRecord,
    InvalidSetting,
    PrivilegeMissing,
    Refused,
    ServerUnavailable,
    Unknown,
)
from penstock.journal.journal_reader import JournaledRecord
from penstock.operating.channels import reshard
from penstock.operating.consumers import list_consumers, rename, retire
from penstock.operating.doctor.diagnosis import diagnose
from penstock.operating.letters import of_consumer, retry
from penstock.operating.reset.checkpoint import reset_checkpoint
from penstock.operating.reset.epoch import reset_epoch
from penstock.operating.reset.source_history import AcceptedShard, reset_source
from penstock.operating.status.gathering import status
from penstock.records import Offset, Place, Record, RecordId, Shard, ShardName
from penstock.schema.role_plan import make_roles
from penstock.streaming import Streamer
from penstock.testing import drained, eventually

CONSUMER = """
from penstock import Log, Pipeline

things = Log("things", sources=["eu", "us"])
pipeline = Pipeline([things])
pipeline.consumer(reads=things, name="totals")(lambda session, records: None)
"""
EFFECT = text("INSERT INTO public.effects VALUES (:source, :key)")
AWAY = "postgresql://postgres@127.0.0.1:1/none"
NOWHERE = ShardName("things@eu", Shard(9))
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "read-several-sources.md"


def test_a_consumer_reads_all_shards_of_all_sources(regions: Regions) -> None:
    """Guarantee 5, with one checkpoint a shard of each source, in the consumer's own database."""
    for source in (regions.eu, regions.us):
        source.stage(20, f"{source.name} ")
        source.stream()
    worker = regions.worker()
    with worker:
        assert worker.drain() == 40
    regions.eu.stage(5, "later ")
    regions.eu.stream()

    assert regions.drain() == 5
    assert regions.effects("eu") == sorted(keys("eu ", 20) + keys("later ", 5))
    assert regions.effects("us") == keys("us ", 20)
    assert regions.rows("SELECT channel, count(*), sum(applied) FROM penstock.checkpoints GROUP BY 1 ORDER BY 1") == [
        ("things@eu", 2, 25),
        ("things@us", 3, 20),
    ]


def test_a_source_keeps_what_a_consumer_elsewhere_has_not_reported(regions: Regions) -> None:
    """Guarantee 4, across databases."""
    regions.us.stream()
    regions.eu.stage(20, "k")
    regions.eu.stream()
    worker = regions.worker()
    worker.open()
    with regions.eu.streamer() as streamer:
        assert retain_now(streamer) == 0
        worker.drain()
        worker.close()
        removed = retain_now(streamer)

    # The newest journal row of each shard stays, with its records.
    [(left,)] = regions.eu.rows("SELECT count(*) FROM penstock.staged_records")
    assert removed + int(str(left)) == 20
    reported = 'SELECT sum("offset"), count(reported_by) FROM penstock.checkpoints'
    assert regions.eu.rows(reported) == [(20, 2)]


def test_a_consumer_reports_to_each_source_every_second(regions: Regions, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, reported, report = Clock(), list[tuple[float, str]](), SourceLink.report

    def note(link: SourceLink, *arguments: Any) -> dict[ShardName, str]:
        reported.append((clock.now, link.source))
        return report(link, *arguments)

    monkeypatch.setattr("penstock.consuming.several.source_journal.monotonic", clock)
    monkeypatch.setattr(SourceLink, "report", note)
    for source in (regions.eu, regions.us):
        source.stream()
    with regions.worker() as worker:
        for clock.now in (1000.0, 1000.9, 1001.0, 1001.9, 1002.5):
            worker.round()

    assert reported == [(at, source) for at in (1000.0, 1001.0, 1002.5) for source in ("eu", "us")]


def test_records_in_redis_are_applied_while_their_source_is_away(regions: Regions, redis_client: redis.Redis) -> None:
    """If they are of the epoch that was accepted: of no other one, and of none."""
    shards = regions.eu.channel.shard_names

    def apply_of_epoch(epoch: int | None) -> list[str]:
        for key in (log_keys("penstock", shard).epoch for shard in shards):
            redis_client.set(key, epoch) if epoch is not None else redis_client.delete(key)
        # Nobody knows whether this is all.
        with regions.worker({**regions.urls, "eu": AWAY}) as worker, pytest.raises(ServerUnavailable, match="eu"):
            worker.drain()
        return regions.effects("eu")

    for source in (regions.eu, regions.us):
        source.stream()
    regions.drain()
    regions.eu.stage(5, "before ")
    regions.eu.stream()
    assert [apply_of_epoch(epoch) for epoch in (None, 1)] == [[], []], "none is accepted yet"
    regions.drain()
    regions.eu.stage(5, "after ")
    regions.eu.stream()

    before = keys("before ", 5)
    after = sorted(before + keys("after ", 5))
    with capture_logs() as logs:
        assert [apply_of_epoch(epoch) for epoch in (None, 2, 1)] == [before, before, after]
    assert any("refused" in line["reason"] for line in logs if line["event"] == "source unavailable")


def test_a_shard_whose_records_redis_has_lost_waits_for_its_source_alone(
    regions: Regions, redis_client: redis.Redis
) -> None:
    for source in (regions.eu, regions.us):
        source.stage(5, "before ")
        source.stream()
    regions.drain()
    for source in (regions.eu, regions.us):
        source.stage(6, "lost ")
        source.stream()
    for shard in regions.eu.channel.shard_names:
        redis_client.xtrim(log_keys("penstock", shard).stream, maxlen=0)
    regions.eu.stage(6, "after ")
    regions.eu.stream()
    worker = regions.worker({**regions.urls, "eu": AWAY})
    with worker, running(worker.run):
        eventually(lambda: len(regions.effects("us")) == 11, "the other source goes on")
        waiting = "SELECT count(*) FROM penstock.checkpoints WHERE waiting LIKE '%source eu is away%'"
        eventually(lambda: regions.rows(waiting) == [(2,)], "status tells what is waited for")
    assert regions.effects("eu") == keys("before ", 5)

    regions.drain()
    assert regions.effects("eu") == sorted(keys("before ", 5) + keys("lost ", 6) + keys("after ", 6))


def test_a_new_consumer_waits_for_the_source_where_it_has_to_register(regions: Regions) -> None:
    worker = regions.worker({**regions.urls, "eu": AWAY})

    with pytest.raises(ServerUnavailable), worker:
        pass
    with pytest.raises(ServerUnavailable, match="its streamer has not run"):
        regions.drain()


def test_two_databases_cannot_share_the_name_of_a_consumer_at_a_source(
    regions: Regions, make_database: MakeDatabase
) -> None:
    """Retention would wait for one of them alone."""
    regions.eu.stream()
    regions.us.stream()
    regions.drain()

    elsewhere = replace(regions, database_url=make_database())
    with pytest.raises(DeclarationError, match="belongs to another database"):
        elsewhere.drain()
    assert elsewhere.renamed("sums").drain() == 0


def test_a_source_is_not_the_consumers_own_database(regions: Regions) -> None:
    regions.eu.stream()

    with pytest.raises(DeclarationError, match="own database"):
        replace(regions, database_url=regions.eu.url).drain()


def back_up_applied(regions: Regions, postgres: EmbeddedPostgres) -> Backup:
    """A copy of a source, all of whose twenty records, ``kept 1`` and so on, have been applied."""
    regions.us.stream()
    regions.eu.stage(20, "kept ")
    regions.eu.stream()
    regions.drain()
    return Backup.of(regions.eu, postgres)


def test_a_restored_source_stops_its_own_shards_and_the_way_out_is_exact(
    regions: Regions, postgres: EmbeddedPostgres, redis_client: redis.Redis
) -> None:
    """Guarantee 8: the other source goes on, and no record at a lost offset is taken for one that was applied."""
    backup = back_up_applied(regions, postgres)
    regions.eu.stage(30, "lost ")
    regions.eu.stream()
    regions.drain()
    backup.restore()
    regions.eu.stage(80, "after ")
    regions.us.stage(10, "us ")
    regions.us.stream()

    with pytest.raises(HistoryDiverged):
        regions.eu.stream()
    regions.drain()
    halted = regions.rows("SELECT channel, halted FROM penstock.checkpoints WHERE halted IS NOT NULL")
    assert [channel for channel, _ in halted] == ["things@eu", "things@eu"]
    assert all("penstock reset source totals eu" in str(reason) for _, reason in halted)
    assert regions.effects("us") == keys("us ", 10)
    with pytest.raises(Refused, match="penstock reset epoch"):
        regions.accept("eu")

    with connect_postgres(regions.eu.url, application="test") as connection:
        reset_epoch(connection, redis_client, regions.eu.pipeline, apply=True)
    regions.eu.stream()
    regions.drain()
    assert regions.effects("eu") == sorted(keys("kept ", 20) + keys("lost ", 30))
    plan = regions.accept("eu")
    assert regions.accept("eu") == plan
    assert sum(each.after for each in plan) == 20
    assert sum(each.in_doubt for each in plan) == 30
    assert sum(each.again for each in plan) == 30
    regions.accept("eu", apply=True)
    regions.drain()

    assert regions.effects("eu") == sorted(keys("kept ", 20) + keys("lost ", 30) + keys("after ", 80))
    assert all(each.in_doubt == 0 for each in regions.accept("eu"))


def test_records_that_a_restored_source_still_has_are_counted(
    regions: Regions, postgres: EmbeddedPostgres, redis_client: redis.Redis
) -> None:
    """Committed before the backup, and published after it: they get other offsets, and take effect a second time."""
    regions.us.stream()
    regions.eu.stage(20, "kept ")
    regions.eu.stream()
    regions.drain()
    regions.eu.stage(12, "still there ")
    backup = Backup.of(regions.eu, postgres)
    regions.eu.stage(30, "lost ")
    regions.eu.stream()
    regions.drain()
    backup.restore()
    with connect_postgres(regions.eu.url, application="test") as connection:
        epoch = reset_epoch(connection, redis_client, regions.eu.pipeline, apply=True)
    backup = Backup.of(regions.eu, postgres)
    regions.eu.stage(20, "never applied ")
    regions.eu.stream()
    backup.restore()
    with connect_postgres(regions.eu.url, application="test") as connection:
        reset_epoch(
            connection, redis_client, regions.eu.pipeline, apply=True
        )  # entries of the first are the applied ones
    plan = regions.accept("eu")
    for each in plan[:1]:
        redis_client.delete(*(f"penstock:{{{each.shard}}}:log-before-{number}" for number in (2, 3)))
    partly = regions.accept("eu", apply=True)
    regions.eu.stream()
    regions.drain()

    assert sum(each.still_there for each in epoch.in_doubt) == 12
    assert sum(each.in_doubt for each in plan) == sum(each.known for each in plan) == 42
    assert sum(each.still_there for each in plan) == 12
    assert [(each.known, each.still_there) for each in partly[:1]] == [(0, 0)]
    assert partly[1:] == plan[1:]
    again = keys("still there ", 12)
    assert regions.effects("eu") == sorted(keys("kept ", 20) + keys("lost ", 30) + again + again)


def test_what_a_source_staged_at_lost_offsets_is_not_skipped_by_a_consumer_that_slept(
    regions: Regions, postgres: EmbeddedPostgres, redis_client: redis.Redis
) -> None:
    """Restored, reset and streaming beyond the consumer's checkpoints before it looks again, at the log or at the source."""
    backup = back_up_applied(regions, postgres)
    regions.eu.stage(30, "lost ")
    regions.eu.stream()
    worker = regions.worker()
    with worker:
        worker.drain()
        backup.restore()
        with connect_postgres(regions.eu.url, application="test") as connection:
            reset_epoch(connection, redis_client, regions.eu.pipeline, apply=True)
        regions.eu.stage(100, "after ")
        regions.eu.stream()
        worker.round()
        worker.drain()

    assert regions.effects("eu") == sorted(keys("kept ", 20) + keys("lost ", 30))
    assert len(regions.rows("SELECT FROM penstock.checkpoints WHERE halted IS NOT NULL")) == 2


def test_a_source_restored_with_an_emptied_redis_is_noticed_by_the_record_at_the_checkpoint(
    regions: Regions, postgres: EmbeddedPostgres, redis_client: redis.Redis
) -> None:
    """No epoch was opened, since nothing in Redis disagreed."""
    backup = back_up_applied(regions, postgres)
    regions.eu.stage(30, "lost ")
    regions.eu.stream()
    regions.drain()
    backup.restore()
    redis_client.flushall()
    regions.eu.stage(100, "after ")
    regions.eu.stream()
    regions.drain()

    assert len(regions.rows("SELECT FROM penstock.checkpoints WHERE halted IS NOT NULL")) == 2
    assert regions.effects("eu") == sorted(keys("kept ", 20) + keys("lost ", 30))


@pytest.mark.parametrize(
    ("is_applied", "said"),
    [
        (True, "is applied, and the journal of source eu ends at"),
        (False, "the log has records that the source has lost"),
    ],
)
def test_one_lost_record_halts_its_shard_applied_or_not(
    regions: Regions,
    postgres: EmbeddedPostgres,
    redis_client: redis.Redis,
    is_applied: bool,  # noqa: FBT001
    said: str,
) -> None:
    """Applied, it is known to the checkpoint alone: what is staged next would get its offset, and be skipped."""
    backup = back_up_applied(regions, postgres)
    regions.eu.stage(1, "lost ")
    regions.eu.stream()
    if is_applied:
        assert regions.drain() == 1
        redis_client.flushall()
    backup.restore()
    regions.drain()

    [(halted,)] = regions.rows("SELECT halted FROM penstock.checkpoints WHERE halted IS NOT NULL")
    assert said in str(halted)
    assert regions.effects("eu") == keys("kept ", 20) + (["lost 1"] if is_applied else [])
    ahead = (
        "SELECT FROM penstock.checkpoints c, penstock.journal_bounds(c.channel, c.shard) AS b "
        'WHERE c."offset" > b.last_offset'
    )
    assert regions.eu.rows(ahead) == [], "retention would remove what is staged there next"


def make_link(source: Source) -> SourceLink:
    """As the consumer has it."""
    own = Log("things", sources=[source.name]).of_source(source.name)
    consumer = replace(declare_totals("totals").get_consumer("totals"), channel=own)
    return SourceLink(source.url, WorkerSetup(declare_totals("totals"), consumer, source.url))


def test_records_of_a_log_are_compared_with_the_journal_of_their_source(
    regions: Regions, redis_client: redis.Redis
) -> None:
    """By id and time: whatever was restored, between the comparison of all shards and a delivery."""
    regions.eu.stage(20, "k")
    regions.eu.stream()
    with closing(make_link(regions.eu)) as link:
        first, *_ = link.register("another", {}).values()
        at, last = read(redis_client, "penstock", first.shard, Offset(0), 2)
        position = replace(first, offset=at.offset, record=JournaledRecord(RecordId(at.id), at.staged_us))
        most, end = Limit(10, 10_000), Offset(last.offset + 1)

        assert link.confirm(position, last)
        assert link.backfill(position, end, most) == [last]
        for change in ({"id": RecordId(last.id + 1)}, {"staged_us": last.staged_us + 1}):
            assert not link.confirm(position, Record(**{**vars(last), **change}))
        for known in (
            JournaledRecord(RecordId(at.id + 1), at.staged_us),
            JournaledRecord(RecordId(at.id), at.staged_us + 1),
        ):
            lost = replace(position, record=known)
            with pytest.raises(HistoryDiverged):
                link.confirm(lost, last)
            with pytest.raises(HistoryDiverged):
                link.backfill(lost, end, most)


def test_a_source_that_is_away_is_left_alone_for_ten_times_as_long_as_it_took_to_learn_that(
    regions: Regions, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, takes_s = Clock(), iter([0.0, 0.05, 3.0, 0.2])

    def connect(*_: object, silence_s: float, **__: object) -> None:
        assert silence_s == WORKER_SILENCE_S
        clock.now += next(takes_s)
        raise ServerUnavailable("nobody answers")

    monkeypatch.setattr("penstock.consuming.several.source_link.monotonic", clock)
    monkeypatch.setattr("penstock.consuming.several.source_link.connect_postgres", connect)
    link = make_link(regions.eu)
    for pause_s in (1.0, 1.0, 30.0, 2.0):
        with pytest.raises(ServerUnavailable, match="nobody answers"):
            link.register("another", {})
        clock.now += pause_s - 0.01
        with pytest.raises(ServerUnavailable, match="source eu is away"):
            link.register("another", {})
        clock.now += 0.02


def test_a_report_moves_no_checkpoint_back_or_past_a_new_epoch(
    regions: Regions, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process reports, or an operator resets the epoch, between the comparison and the report."""
    regions.eu.stage(60, "k")
    regions.eu.stream()
    before = 'SELECT "offset" FROM penstock.checkpoints WHERE shard = 0'
    with closing(make_link(regions.eu)) as link:
        registered = link.register("another", {})
        begun = link.register("another", registered)
        position = replace(min(begun.values(), key=lambda each: each.shard), offset=Offset(9))

        def report(meanwhile: str) -> list[tuple[object, ...]]:
            def change(*_: object) -> dict[ShardName, str]:
                regions.eu.rows(f"UPDATE penstock.checkpoints SET {meanwhile} RETURNING 1")
                return {}

            monkeypatch.setattr(link, "_compare_tails", change)
            assert link.report(redis_client, {position.shard: position}) == {}
            return regions.eu.rows(before)

        assert report("reported_by = 'a third one'") == [(0,)]
        regions.eu.rows("UPDATE penstock.checkpoints SET reported_by = 'another' RETURNING 1")
        assert report("epoch = epoch + 1") == [(0,)]
        assert report('"offset" = 10') == [(10,)]
        regions.eu.rows('UPDATE penstock.checkpoints SET "offset" = 0 RETURNING 1')
        assert report("epoch = epoch") == [(9,)]


def test_a_consumer_is_registered_no_further_than_the_journal_of_a_source(
    regions: Regions, redis_client: redis.Redis
) -> None:
    """Of a restored source, retention would remove what it has not got yet.  That a consumer was retired there is logged once."""
    regions.eu.stage(20, "k")
    regions.eu.stream()
    with closing(make_link(regions.eu)) as link, capture_logs() as logs:
        begun = link.register("another", {})
        ahead = {shard: replace(each, offset=Offset(1_000)) for shard, each in begun.items()}
        for _ in range(2):
            regions.eu.rows("DELETE FROM penstock.checkpoints RETURNING 1")
            assert link.report(redis_client, begun) == link.report(redis_client, begun) == {}
            assert sum(each.offset for each in link.register("another", ahead).values()) == 20
    assert [line["event"] for line in logs if line["log_level"] == "error"] == ["consumer retired at source"] * 2


def test_checkpoints_in_a_source_are_left_alone_by_commands_for_the_own_log(
    regions: Regions, redis_client: redis.Redis
) -> None:
    regions.eu.stage(20, "k")
    regions.eu.stream()
    regions.us.stream()
    regions.drain()
    regions.eu.stage(5, "later ")
    regions.eu.stream()
    where = 'SELECT channel, shard, "offset", epoch FROM penstock.checkpoints ORDER BY 1, 2'
    before, passed_over = regions.rows(where), list[AcceptedShard]()
    with (
        connect_postgres(regions.database_url, application="test") as own,
        connect_postgres(regions.eu.url, application="test") as source,
    ):
        own.execute("UPDATE penstock.epochs SET system_identifier = '1'")
        assert reset_epoch(own, redis_client, regions.pipeline, apply=True).applied
        for connection, said in ((own, "penstock reset source totals eu compares"), (source, "in another database")):
            with pytest.raises(Refused, match=said):
                reset_checkpoint(Store(connection), "totals", "earliest")
        with pytest.raises(Unknown, match="totals reads no source asia; it reads things@"):
            reset_source(Store(own), Store(source), redis_client, "totals", "asia")
        with pytest.raises(Unknown, match="no consumer 'total' is registered"):
            reset_source(Store(own), Store(source), redis_client, "total", "eu")
        ends = source.execute("SELECT shard, max(last_offset) FROM penstock.journal GROUP BY 1").fetchall()
        places = [Place(ShardName("things@eu", Shard(shard)), Offset(last)) for shard, last in ends]
        for to in places:
            passed_over += reset_source(Store(own), Store(source), redis_client, "totals", "eu", to=to)
        with pytest.raises(Unknown, match="totals has no checkpoint in things@eu/9"):
            reset_source(Store(own), Store(source), redis_client, "totals", "eu", to=Place(NOWHERE, Offset(1)))
        own.execute("UPDATE penstock.checkpoints SET halted = 'by hand'")
        assert len(reset_checkpoint(Store(own), "totals", resume=True, apply=True)) == 5
        found = status(Store(own), redis_client, regions.pipeline)

    assert regions.rows(where) == before
    there = regions.eu.rows(where)
    with (
        connect_postgres(regions.database_url, application="test") as own,
        connect_postgres(regions.eu.url, application="test") as source,
    ):
        own.execute("UPDATE penstock.checkpoints SET waiting = 'by hand'")
        reset_source(Store(own), Store(source), redis_client, "totals", "eu", to=places[0], apply=True)
        assert own.execute("SELECT count(*) FROM penstock.checkpoints WHERE waiting IS NULL").fetchall() == [(1,)]
    assert regions.eu.rows(where) == there, "what is passed over is kept until the checkpoint is reported"
    assert sum(each.passed_over for each in passed_over) == 5
    lags = {each.channel: sum(shard.lag for shard in each.shards) for each in found.consumers}
    assert lags == {"things@eu": 5, "things@us": 0}
    assert found.sound


JOURNALED = """
SELECT shard, first_offset + n.position - 1, n.id
FROM penstock.journal, unnest(record_ids) WITH ORDINALITY AS n (id, position)
"""


def test_a_dead_letter_of_a_source_is_written_and_passed(regions: Regions, redis_client: redis.Redis) -> None:
    """After each commit the checkpoint says which record it is at, also before a gap in the log."""

    @regions.pipeline.consumer(reads=Log("things", sources=["eu", "us"]), attempts=1)
    def picky(session: Session, records: Sequence[Record]) -> None:
        if any(record.key == "k3" for record in records):
            raise ValueError

    noted: set[tuple[object, ...]] = set()

    def look(point: str) -> None:
        if point == "consumer.after_commit":
            noted.update(
                regions.rows(
                    'SELECT shard, "offset", record_id FROM penstock.checkpoints '
                    "WHERE channel = 'things@eu' AND \"offset\" > 0"
                )
            )

    regions.us.stream()
    regions.eu.stream()
    spec = regions.pipeline.get_consumer("picky")
    with make_worker(regions.pipeline, spec, regions.database_url, regions.redis_url, sources=regions.urls) as worker:
        assert worker.drain() == 0
        for prefix in ("k", "between ", "last "):
            regions.eu.stage(20, prefix)
            regions.eu.stream()
        for shard in regions.eu.channel.shard_names:
            entries: Any = redis_client.xrange(log_keys("penstock", shard).stream)
            redis_client.xdel(log_keys("penstock", shard).stream, entries[1][0])
        with at_crash_points(look):
            assert worker.drain() == 59
            assert worker.drain() == 0

    assert regions.rows("SELECT channel, key FROM penstock.dead_letters") == [("things@eu", "k3")]
    assert regions.rows("SELECT FROM penstock.checkpoints WHERE halted IS NOT NULL") == []
    assert noted <= {*regions.eu.rows(JOURNALED)}
    assert len(noted) > 6


@pytest.mark.parametrize("field", [b"data", b"headers"])
def test_a_damaged_payload_is_dead_lettered_as_the_journal_of_its_source_has_it(
    regions: Regions, redis_client: redis.Redis, field: bytes
) -> None:
    @regions.pipeline.consumer(reads=Log("things", sources=["eu", "us"]), attempts=1)
    def picky(session: Session, records: Sequence[Record]) -> None:
        raise ValueError([record.data for record in records])

    spec = regions.pipeline.get_consumer("picky")
    regions.us.stream()
    regions.eu.stream()
    with make_worker(regions.pipeline, spec, regions.database_url, regions.redis_url, sources=regions.urls) as worker:
        worker.drain()
        regions.eu.stage(3, "k")
        regions.eu.stream()
        for shard in regions.eu.channel.shard_names:
            if redis_client.exists(stream := log_keys("penstock", shard).stream):
                damage_entry(
                    redis_client,
                    stream,
                    -1,
                    lambda fields, _: fields.update({field: fields[b"data"].replace(b"{", b"[")}),
                )
        worker.drain()

    staged = regions.eu.rows("SELECT key, data, headers FROM penstock.staged_records ORDER BY key")
    assert regions.rows("SELECT key, data, headers FROM penstock.dead_letters ORDER BY key") == staged
    assert len(staged) == 3


def test_a_checkpoint_keeps_its_record_when_shards_are_applied_together(
    regions: Regions, set_constants: SetConstants
) -> None:
    set_constants("consuming.log.log_worker", TOGETHER_S=math.inf)
    passed: list[str] = []
    for source in (regions.us, regions.eu):
        source.stream()
    with regions.worker() as worker:
        assert worker.drain() == 0
        take_for_fast(worker.runners["totals@eu"])
        regions.eu.stage(20, "k")
        regions.eu.stream()
        with at_crash_points(passed.append):
            assert worker.drain() == 20

    assert "together.after_commit" in passed
    noted = regions.rows("SELECT shard, \"offset\", record_id FROM penstock.checkpoints WHERE channel = 'things@eu'")
    assert len(noted) == 2
    assert {*noted} <= {*regions.eu.rows(JOURNALED)}


def test_the_rights_of_a_consumer_suffice_at_a_source(regions: Regions, redis_client: redis.Redis) -> None:
    regions.us.stream()
    regions.eu.stream()
    with connect_postgres(regions.eu.url, application="test") as administrator:
        make_roles(administrator, "penstock", "penstock")
        administrator.execute(b"DROP ROLE IF EXISTS a_reader_elsewhere")
        administrator.execute(b"CREATE ROLE a_reader_elsewhere LOGIN")
        url = regions.eu.url.replace("postgres@", "a_reader_elsewhere@")
        with pytest.raises(PrivilegeMissing, match="GRANT penstock_consumer TO"):
            regions.drain({**regions.urls, "eu": url})
        administrator.execute(b"GRANT penstock_consumer TO a_reader_elsewhere")
        regions.eu.stage(5, "after ")
        regions.eu.stream()
        for shard in regions.eu.channel.shard_names:
            redis_client.xtrim(log_keys("penstock", shard).stream, maxlen=0)

        assert regions.drain({**regions.urls, "eu": url}) == 5
        own_url = regions.database_url.replace("postgres@", "a_reader_elsewhere@")
        with connect_postgres(regions.database_url, application="test") as own:
            make_roles(own, "penstock", "penstock")
        with (
            connect_postgres(own_url, application="test") as own,
            connect_postgres(url, application="test") as at_source,
        ):
            accepted = reset_source(Store(own), Store(at_source), redis_client, "totals", "eu", apply=True)
        administrator.execute(b"DROP ROLE a_reader_elsewhere")
    assert sum(each.in_doubt for each in accepted) == 0
    reported = 'SELECT sum("offset") FROM penstock.checkpoints'
    assert regions.eu.rows(reported) == [(5,)]


def test_a_right_that_goes_missing_at_a_source_is_waited_for_there_alone(
    regions: Regions, redis_client: redis.Redis
) -> None:
    """Guarantee 48."""
    for source in (regions.eu, regions.us):
        source.stage(5, "before ")
        source.stream()
    with connect_postgres(regions.eu.url, application="test") as administrator:
        make_roles(administrator, "penstock", "penstock")
        administrator.execute(b"DROP ROLE IF EXISTS a_waiting_reader")
        administrator.execute(b"CREATE ROLE a_waiting_reader LOGIN IN ROLE penstock_consumer")
        url = regions.eu.url.replace("postgres@", "a_waiting_reader@")
        worker = regions.worker({**regions.urls, "eu": url})
        with capture_logs() as logs, worker, running(worker.run):
            eventually(lambda: len(regions.effects("eu")) == len(regions.effects("us")) == 5, "it has worked")
            administrator.execute(b"REVOKE SELECT ON penstock.journal FROM penstock_consumer")
            for source in (regions.eu, regions.us):
                source.stage(6, "after ")
                source.stream()
            for shard in regions.eu.channel.shard_names:
                redis_client.xtrim(log_keys("penstock", shard).stream, maxlen=0)
            eventually(lambda: len(regions.effects("us")) == 11, "the other source goes on")
            fields = {"event": "source unavailable", "source": "eu"}
            eventually(lambda: any(fields.items() <= line.items() for line in logs), "the log tells which")
            administrator.execute(b"GRANT SELECT ON penstock.journal TO penstock_consumer")
            eventually(lambda: len(regions.effects("eu")) == 11, "it goes on")
        administrator.execute(b"DROP ROLE a_waiting_reader")
    assert regions.rows("SELECT record_id FROM penstock.dead_letters") == []


def test_doctor_and_the_list_of_consumers_know_checkpoints_in_sources(
    regions: Regions, redis_client: redis.Redis
) -> None:
    for source in (regions.eu, regions.us):
        source.stage(5, "k")
        source.stream()
    regions.drain()
    with connect_postgres(regions.database_url, application="test") as own:
        found = diagnose(Store(own), redis_client, regions.pipeline)
        listed = list_consumers(Store(own))
    with connect_postgres(regions.eu.url, application="test") as elsewhere:
        at_source = list_consumers(Store(elsewhere))

    errors = {each.check for each in found if each.grade == "error"}
    assert errors <= {"durability"}  # of the server for tests
    assert [(each.channel, each.lag) for each in listed] == [("things@eu", None), ("things@us", None)]
    assert [(each.channel, each.passed, each.lag) for each in at_source] == [("things@eu", 5, 0)]


def test_the_page_works(regions: Regions, monkeypatch: pytest.MonkeyPatch, make_database: MakeDatabase) -> None:
    shop, revenue = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    sources: dict[str, str] = {}
    names: dict[str, Any]
    for region in ("eu", "us"):
        names = {}
        monkeypatch.setenv("REGION", region)
        exec(shop, names)
        sources[region] = make_database()
        engine = create_engine(engine_url(sources[region]))
        names["Base"].metadata.create_all(engine)
        sessions = sessionmaker(engine)
        names["pipeline"].attach(sessions)
        with sessions.begin() as session:
            session.add_all(names["Order"](cents=100 if region == "eu" else 200) for _ in range(5))
        with sessions.begin() as session:
            session.get_one(names["Order"], 1).cents = 7
            session.delete(session.get_one(names["Order"], 2))
        engine.dispose()
        drained(names["pipeline"], sources[region], regions.redis_url)
    names = {}
    exec(revenue, names)
    engine = create_engine(engine_url(regions.database_url))
    names["Base"].metadata.create_all(engine)
    engine.dispose()

    applied = drained(names["pipeline"], regions.database_url, regions.redis_url, sources=sources)

    assert applied == {"revenue": 14}
    assert regions.rows("SELECT * FROM revenue ORDER BY 1") == [("eu", 500), ("us", 1000)]


def test_a_promoted_source_that_lost_nothing_goes_on_by_itself(regions: Regions, redis_client: redis.Redis) -> None:
    regions.us.stream()
    regions.eu.stage(20, "before ")
    regions.eu.stream()
    regions.drain()
    with connect_postgres(regions.eu.url, application="test") as connection:
        connection.execute("UPDATE penstock.epochs SET timeline = timeline + 7")
    regions.eu.stage(20, "after ")
    regions.eu.stream()

    assert redis_client.get(log_keys("penstock", regions.eu.channel.shard_names[0]).epoch) == b"2"
    assert regions.drain() == 20
    epochs = "SELECT DISTINCT epoch FROM penstock.checkpoints WHERE source = 'eu'"
    assert regions.rows(epochs) == [(2,)]


def test_urls_of_sources_come_from_the_environment_and_are_never_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.penstock.sources]\neu = "postgresql://file"\n')
    monkeypatch.setenv("PENSTOCK_SOURCES__US", "postgresql://secret")
    settings = load_settings(directory=tmp_path)
    given = load_settings("--sources", "eu=postgresql://a?b=c", directory=tmp_path)

    assert settings.source_urls == {"eu": "postgresql://file", "us": "postgresql://secret"}
    assert given.source_urls["eu"] == "postgresql://a?b=c"
    assert "secret" not in repr(settings)


def test_a_command_accepts_a_restored_source(
    regions: Regions, postgres: EmbeddedPostgres, redis_client: redis.Redis, penstock: CommandLine
) -> None:
    regions.us.stream()
    regions.eu.stage(20, "kept ")
    regions.eu.stream()
    regions.drain()
    regions.eu.stage(3, "still there ")
    backup = Backup.of(regions.eu, postgres)
    regions.eu.stage(10, "lost ")
    regions.eu.stream()
    regions.drain()
    backup.restore()
    epoch = penstock("reset", "epoch", "--apply", PENSTOCK_DATABASE_URL=regions.eu.url)
    command = ["reset", "source", "totals", "eu", "--json"]

    urls = {"PENSTOCK_SOURCES": json.dumps(regions.urls)}
    unknown = penstock(*command[:3], "asia")
    (penstock.directory / "shop.py").write_text(CONSUMER)
    halted = penstock("consume", "totals", "--drain", **urls)
    advice = penstock("doctor", **urls)
    plan = penstock(*command, **urls)
    done = penstock(*command[:-1], "--apply", **urls)
    again = penstock(*command, **urls)

    # What ends it, wherever it is said, is what the reason in `status` names.
    assert halted.returncode == 1
    for said in (halted.stderr, advice.stdout):
        assert "ix the cause, then: penstock reset source totals eu" in said
        assert "--resume" not in said
    # Its effects are elsewhere, and were not restored.
    assert epoch.stdout.count("may have applied all of these: penstock reset source totals eu") == 2
    assert "restored with it" not in epoch.stdout
    assert (unknown.returncode, "PENSTOCK_SOURCES__ASIA" in unknown.stderr) == (2, True)
    assert sum(each["in_doubt"] for each in json.loads(plan.stdout)) == 13
    assert "3 of the records in doubt are still at the source" in done.stderr
    assert "10 others are lost there" in done.stderr
    assert "of these records are still in this Postgres" in epoch.stdout
    assert sum(each["in_doubt"] for each in json.loads(again.stdout)) == 0


def test_what_does_not_go_with_several_sources_is_refused(regions: Regions) -> None:
    things = Log("things", sources=["eu", "us"])
    pipeline = Pipeline([things])
    pipeline.consumer(reads=things, name="totals")(lambda _session, _records: None)
    spec = pipeline.get_consumer("totals")

    def canonical(_: object) -> str:
        return ""

    with pytest.raises(DeclarationError, match="no handler takes it as a DataFrame"):
        pipeline.consumer(reads=things, name="frames", dataframe=True)(lambda _s, _f: None)
    with pytest.raises(DeclarationError, match="no cut spans several databases"):
        pipeline.reconciliation(of="totals", state="totals")(canonical)
    with pytest.raises(DeclarationError, match="only an application with a source stages into it"):
        pipeline.stages(Ride, to=things, key="id")
    with pytest.raises(DeclarationError, match="it needs their databases"):
        Chores(pipeline, regions.database_url, regions.redis_url).all()
    with pytest.raises(InvalidSetting, match="PENSTOCK_SOURCES__US"):
        make_worker(pipeline, spec, regions.database_url, regions.redis_url, sources={"eu": regions.eu.url})
    with pytest.raises(DeclarationError, match="leave out the shards"):
        make_worker(pipeline, spec, regions.database_url, regions.redis_url, sources=regions.urls, shards=[0])
    with Session() as session:
        pipeline.attach(session)
        with pytest.raises(InvalidRecord, match=r"source=…"):
            stage(session, to=things, key="k", action="a", object="o", data={})


@pytest.mark.parametrize("source", ["", "EU", "eu-1", "a__b", "_a", "ä", "e" * 80])
def test_names_of_sources_have_a_rule(source: str) -> None:
    with pytest.raises(InvalidName):
        Log("things", source=source)
    with pytest.raises(InvalidName):
        Log("things", sources=[source])


def test_a_source_is_a_part_of_its_logs_name() -> None:
    log = Log("things", shards=3, source="eu")

    assert (log.name, log.source) == ("things@eu", "eu")
    assert replace(log, shards=5).name == "things@eu"
    assert Log("things@eu", shards=3) == log
    assert Log("things", sources=["eu", "us"]).of_source("eu", 3) == log
    with pytest.raises(InvalidName):
        Ick("things@eu")
    for wrong in (
        {"name": "things@eu", "source": "us"},
        {"name": "things", "source": "eu", "sources": ["us"]},
        {"name": "things", "sources": ["eu", "eu"]},
        {"name": "things", "sources": "eu"},
    ):
        with pytest.raises(DeclarationError):
            Log(**wrong)


def test_the_shards_of_a_source_do_not_change_under_a_consumer_elsewhere(
    regions: Regions, redis_client: redis.Redis
) -> None:
    """The order of a key would be lost: the consumer does not know when it has passed the earlier shards."""
    regions.us.stream()
    regions.eu.stream()
    with connect_postgres(regions.us.url, application="test") as connection:
        assert reshard(Store(connection), "things@us", 5, apply=True).applied
    with pytest.raises(DeclarationError, match="number of shards of things@us was changed"):
        regions.drain()
    with connect_postgres(regions.eu.url, application="test") as connection, pytest.raises(Refused, match="totals"):
        reshard(Store(connection), "things@eu", 5, apply=True)
    regions.us.rows("UPDATE penstock.channels SET generations = '{}' RETURNING 1")
    regions.drain()
    regions.us.rows("UPDATE penstock.channels SET generations = '{3}' RETURNING 1")
    with pytest.raises(DeclarationError, match="number of shards of things@us was changed"):
        regions.drain()


def test_keys_are_parked_in_the_shards_of_a_source(regions: Regions) -> None:
    """Guarantee 21: the consumer's own database has the dead letters, and does not register the logs of sources."""
    applied: list[str] = []

    def check(_: Session, record: Record) -> None:
        if record.key == "k1":
            raise ValueError
        applied.append(f"{record.source} {record.key}")

    things = Log("things", sources=["eu", "us"])
    pipeline = Pipeline([things])
    pipeline.consumer(reads=things, name="totals", each=True, attempts=1, park_key=True)(check)
    parking = replace(regions, pipeline=pipeline)
    for _ in range(2):
        for source in (regions.eu, regions.us):
            source.stage(3, "k")
            source.stream()
        parking.drain()

    letters = "SELECT channel, key, parked FROM penstock.dead_letters ORDER BY channel, parked"
    assert regions.rows(letters) == [
        ("things@eu", "k1", False),
        ("things@eu", "k1", True),
        ("things@us", "k1", False),
        ("things@us", "k1", True),
    ]
    assert sorted(applied) == sorted(["eu k2", "eu k3", "us k2", "us k3"] * 2)


def test_a_dead_letter_of_a_source_is_superseded_without_asking_the_source(regions: Regions) -> None:
    """Guarantee 21: the consumer's own database knows, also while the source is away."""
    refused = {"k1"}

    def check(_: Session, record: Record) -> None:
        if record.key in refused:
            raise ValueError

    things = Log("things", sources=["eu", "us"])
    pipeline = Pipeline([things])
    pipeline.consumer(reads=things, name="totals", each=True, attempts=1)(check)
    parting = replace(regions, pipeline=pipeline)
    for source in (regions.eu, regions.us):
        source.stage(3, "k")
        source.stream()
    parting.drain()
    refused.clear()
    regions.eu.stage(3, "k")
    regions.eu.stream()
    parting.drain()

    with connect_postgres(regions.database_url, application="test") as own:
        letters = of_consumer(Store(own), "totals")
    done = retry(pipeline, letters, regions.database_url)
    assert [(each.letter.channel, each.outcome) for each in done] == [
        ("things@eu", "superseded"),
        ("things@us", "applied"),
    ]


def test_after_a_commit_in_a_handler_a_source_goes_on_behind_it(regions: Regions, penstock: CommandLine) -> None:
    """Guarantee 4: its checkpoint moves forward only to a record that the source's journal has."""
    commits = [True]

    def commit(session: Session, records: Sequence[Record]) -> None:
        for record in records:
            session.execute(EFFECT, {"source": record.source, "key": record.key})
        if commits[0]:
            session.execute(text("COMMIT"))

    things = Log("things", sources=["eu", "us"])
    pipeline = Pipeline([things])
    pipeline.consumer(reads=things, name="totals")(commit)
    committing = replace(regions, pipeline=pipeline)
    regions.us.stream()
    regions.eu.stage(20, "k")
    regions.eu.stream()
    committing.drain()
    commits[0] = False
    for name, url in regions.urls.items():
        penstock.environment[f"PENSTOCK_SOURCES__{name.upper()}"] = url
    reasons = [str(why) for (why,) in regions.rows("SELECT halted FROM penstock.checkpoints WHERE halted <> ''")]
    said = [why.rpartition(", then: penstock ")[2] for why in reasons]
    beyond = penstock(*shlex.split(re.sub(r"offset \d+", "offset 99", said[0])))

    assert (beyond.returncode, len(said)) == (5, 2)
    assert [penstock(*shlex.split(command)).returncode for command in said] == [0, 0]
    assert committing.drain() == 0
    assert regions.effects("eu") == keys("k", 20)
    regions.eu.stage(5, "later ")
    regions.eu.stream()
    assert committing.drain() == 5
    assert regions.effects("eu") == sorted(keys("k", 20) + keys("later ", 5))


def test_a_streamer_registers_nothing_for_a_consumer_of_several_sources(regions: Regions) -> None:
    """Its log is not in this database; one of its name may be in Redis, and belong to another."""
    elsewhere = Source("things", regions.eu.url, regions.redis_url, Log("things", shards=1))
    elsewhere.stage(1, "k")
    elsewhere.stream()
    own = Log("own", shards=1)
    things = Log("things", sources=["eu", "us"])
    pipeline = Pipeline([own, things])
    pipeline.consumer(reads=things, name="totals")(_do_nothing)
    pipeline.consumer(reads=own, name="reader")(_do_nothing)
    with Streamer(pipeline, regions.database_url, regions.redis_url) as streamer:
        streamer.drain()

    assert regions.rows("SELECT channel FROM penstock.channels") == [("own",)]
    checkpoints = "SELECT consumer, channel FROM penstock.checkpoints"
    assert regions.rows(checkpoints) == [("reader", "own")]


def _do_nothing(_: Session, records: Sequence[Record]) -> None:
    """For a test that applies nothing."""


def test_a_consumer_of_several_sources_is_renamed_where_its_checkpoints_are(
    regions: Regions, penstock: CommandLine, redis_url: str
) -> None:
    """Guarantee 9: and each source waits for it all the time, under one of the names."""
    for source in (regions.eu, regions.us):
        source.stage(20, f"{source.name} ")
        source.stream()
    regions.drain()
    old = regions.worker()
    old.open()
    with connect_postgres(regions.eu.url, application="test") as elsewhere:
        with pytest.raises(Refused, match="consumer of another database"):
            rename(Store(elsewhere), "totals", "sums", apply=True)
        with pytest.raises(Unknown):
            rename(Store(elsewhere), "sums", "more", apply=True)

    plan = penstock("consumers", "rename", "totals", "sums")
    done = penstock("consumers", "rename", "totals", "sums", "--apply")

    assert (plan.returncode, done.returncode) == (0, 0)
    assert "renamed totals to sums: 2 checkpoints on things@eu, 20 records passed" in done.stdout
    assert "penstock consumers retire totals --apply" in " ".join(done.stderr.split())
    regions.eu.stage(10, "later ")
    regions.eu.stream()
    with closing(old), pytest.raises(ConsumerRenamed, match="renamed to sums"):
        old.drain()
    with pytest.raises(ConsumerRenamed, match="renamed to sums"):
        regions.worker().open()

    following = regions.renamed("sums")
    assert following.drain() == 10
    for source in (regions.eu, regions.us):
        with connect_postgres(source.url, application="test") as elsewhere:
            assert {each.consumer for each in list_consumers(Store(elsewhere))} == {"sums", "totals"}
            retire(Store(elsewhere), "totals", apply=True)
        source.stage(5, "last ")
        source.stream()
    assert following.drain() == 10
    assert regions.effects("eu") == sorted(keys("eu ", 20) + keys("later ", 10) + keys("last ", 5))
    assert regions.effects("us") == sorted(keys("us ", 20) + keys("last ", 5))
