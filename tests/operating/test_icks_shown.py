"""``status`` and ``doctor`` report the true state of an Ick, and change nothing."""

from datetime import timedelta

import pytest
import redis

from fixtures.constants import SetConstants
from fixtures.dirty import mark_changed
from fixtures.inspecting import Diagnose, ReadStatus
from fixtures.intervals import refresh_now
from fixtures.redis import everything
from penstock import Ick, Log, Pipeline
from penstock.channels.ick.shard_states import IckStatus, oldest
from penstock.channels.routing import IckShardKeys, ick_shard_keys
from penstock.clients import DirtyList, Reservation, Reservations
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.errors import Unknown
from penstock.operating.pausing import pause
from penstock.operating.reset.checkpoint import reset_ick
from penstock.operating.status.snapshot import Status
from penstock.records import Shard, ShardName
from penstock.streaming import Streamer

pytestmark = pytest.mark.channels("index")


@pytest.fixture
def index() -> Ick:
    """An Ick of two shards."""
    return Ick("index", shards=2, keep=timedelta(hours=1))


def get_keys(shard: int) -> IckShardKeys:
    return ick_shard_keys("penstock", ShardName("index", Shard(shard)))


def icks(found: Status) -> list[IckStatus]:
    return [shard.ick for shard in found.channels[0].shards if shard.ick is not None]


@pytest.fixture
def marked(documents: Connection, streamer: Streamer) -> None:
    mark_changed(documents, ["a", "b", "c", "d"])
    streamer.drain()


def test_status_shows_sizes_age_coalescing_and_the_holder(
    documents: Connection, redis_client: redis.Redis, streamer: Streamer, read_status: ReadStatus
) -> None:
    for _ in range(5):
        mark_changed(documents, [f"d{n}" for n in range(20)])
    documents.execute("UPDATE penstock.staged_records SET created_at = created_at - interval '1 hour' WHERE shard = 1")
    streamer.drain()
    holder = Reservations(redis_client, get_keys(0).name, holder="me", size=3)
    assert isinstance(holder.reserve(), Reservation)
    DirtyList(redis_client, get_keys(1).name).reserve(2)

    first, second = icks(read_status())

    assert (first.held, first.reserved, first.holder, first.reservation) == (3, 0, holder.holder, 1)
    assert (second.held, second.reserved, second.holder, second.reservation) == (0, 2, None, 0)
    assert first.members + second.members == 20
    assert first.records + second.records == 100
    assert (first.coalescing_ratio, second.coalescing_ratio) == (5.0, 5.0)
    assert first.oldest_s is not None
    assert second.oldest_s is not None
    assert 0 <= first.oldest_s < 60
    assert second.oldest_s > 3599


@pytest.mark.usefixtures("marked")
def test_an_ick_is_not_taken_for_a_log_of_one_entry(read_status: ReadStatus) -> None:
    shards = read_status().channels[0].shards

    assert [(shard.first, shard.entries) for shard in shards] == [(None, None)] * 2
    assert sum(shard.published or 0 for shard in shards) == 4


def test_an_ick_that_was_never_marked_is_empty(read_status: ReadStatus) -> None:
    for ick in icks(read_status()):
        assert (ick.members, ick.oldest_s, ick.coalescing_ratio, ick.holder) == (0, None, None, None)


def test_an_infinite_score_has_no_age(redis_client: redis.Redis, read_status: ReadStatus) -> None:
    """Redis::Ick accepts infinite scores."""
    redis_client.set(get_keys(0).ick.version, "ick.v1")
    redis_client.zadd(get_keys(0).ick.dirty, {"a": float("-inf")})

    assert icks(read_status())[0].oldest_s is None


@pytest.mark.usefixtures("marked")
def test_inspecting_writes_nothing(redis_client: redis.Redis, diagnosed: Diagnose, read_status: ReadStatus) -> None:
    before = everything(redis_client)

    read_status()
    diagnosed()
    oldest(redis_client, "penstock", [ShardName("index", Shard(0))], 10)

    assert everything(redis_client) == before


@pytest.mark.usefixtures("marked")
def test_a_damaged_ick_is_reported_and_the_others_are_shown(redis_client: redis.Redis, read_status: ReadStatus) -> None:
    redis_client.set(get_keys(0).ick.dirty, "somebody's")

    found = read_status()
    first, second = icks(found)

    assert found.redis is None
    assert first.damage is not None
    assert "expected zset, found string" in first.damage
    assert (second.damage, second.members > 0) == (None, True)


def test_the_doctor_finds_damage_and_its_fix_restores_every_member(
    documents: Connection, redis_client: redis.Redis, flow: Pipeline, streamer: Streamer, diagnosed: Diagnose
) -> None:
    """Guarantee 6: every member that was not processed is marked again."""
    mark_changed(documents, [f"d{n}" for n in range(20)])
    streamer.drain()
    waiting = oldest(redis_client, "penstock", flow.shard_names, 100)
    assert [each.facts["score"] for each in waiting] == sorted(each.facts["score"] for each in waiting)
    assert oldest(redis_client, "penstock", flow.shard_names, 5) == waiting[:5]
    members = {each.key for each in waiting}
    keys = get_keys(0)
    redis_client.set(keys.ick.dirty, "somebody's")

    [finding] = [f for f in diagnosed("icks") if f.grade != "ok"]
    [planned] = reset_ick(documents, redis_client, "index", flow)
    before = everything(redis_client)
    [done] = reset_ick(documents, redis_client, "index", flow, apply=True)
    refresh_now(streamer)
    streamer.drain()

    assert (finding.grade, finding.fix) == ("error", "penstock reset ick index --apply")
    assert (planned.key, planned.found, planned.marked_again) == (keys.ick.dirty, "string", True)
    assert before[keys.ick.dirty.encode()] == redis_client.dump(str(done.moved_to))
    found = {each.key for each in oldest(redis_client, "penstock", flow.shard_names, 100)}
    assert len(members) == 20
    assert found == members
    assert diagnosed("icks")[0].grade == "ok"


@pytest.mark.usefixtures("marked")
def test_the_doctor_names_a_key_that_will_expire(redis_client: redis.Redis, diagnosed: Diagnose) -> None:
    for key in (get_keys(0).ick.dirty, get_keys(1).progress):
        redis_client.expire(key, 1000)

    findings = diagnosed("keys", "error")

    assert {f.fix for f in findings} == {f"PERSIST {get_keys(0).ick.dirty}", f"PERSIST {get_keys(1).progress}"}


@pytest.mark.usefixtures("marked")
def test_the_doctor_reports_members_that_no_consumer_processes(
    redis_client: redis.Redis, set_constants: SetConstants, diagnosed: Diagnose
) -> None:
    set_constants("operating.doctor.redis_checks", SLOW_S=0.0)
    [idle] = diagnosed("icks")
    holder = Reservations(redis_client, get_keys(0).name, holder="me", size=3)
    holder.reserve()
    [held] = diagnosed("icks")

    assert (idle.grade, held.grade) == ("warning", "warning")
    assert "4 members waiting" in idle.message
    assert "nobody holds a reservation" in idle.message
    assert f"held by {holder.holder}" in held.message


@pytest.mark.parametrize(
    ("halted", "is_paused", "remedy"),
    [
        ([], False, "in more processes"),
        ([False], False, "in more processes"),
        ([True], False, "resume the halted shards of r0"),
        ([False], True, "penstock consumers resume r0"),
        ([True], True, "penstock consumers resume r0"),
        ([True, False], False, "in more processes"),
        ([True, True], False, "resume the halted shards of r0; resume the halted shards of r1"),
    ],
)
def test_more_processes_are_advised_only_if_a_reader_neither_is_halted_nor_paused(
    documents: Connection,
    streamer: Streamer,
    set_constants: SetConstants,
    halted: list[bool],
    remedy: str,
    diagnosed: Diagnose,
    *,
    is_paused: bool,
) -> None:
    set_constants("operating.doctor.redis_checks", SLOW_S=0.0)
    mark_changed(documents, ["a"])
    streamer.drain()
    for number, is_halted in enumerate(halted):
        documents.execute(
            'INSERT INTO penstock.checkpoints (consumer, channel, shard, "offset", epoch, halted) '
            "SELECT %s, 'index', shard, 0, 1, %s FROM generate_series(0, 1) AS shard",
            [f"r{number}", "because" if is_halted else None],
        )
    if is_paused:
        pause(Store(documents), "consumer", "r0", reason="a test", by="a test")

    [waiting] = diagnosed("icks")

    assert remedy in (waiting.fix or "")


def test_only_an_ick_can_be_repaired(connection: Connection, redis_client: redis.Redis, things: Log) -> None:
    with pytest.raises(Unknown, match="things is not an Ick"):
        reset_ick(connection, redis_client, "things", Pipeline([things]))
    with pytest.raises(Unknown, match="no channel 'nothing' is registered; there are: "):
        reset_ick(connection, redis_client, "nothing")


@pytest.mark.usefixtures("marked")
def test_an_intact_ick_is_not_changed(documents: Connection, redis_client: redis.Redis, flow: Pipeline) -> None:
    before = everything(redis_client)

    assert reset_ick(documents, redis_client, "index", flow, apply=True) == ()
    assert everything(redis_client) == before
