"""A shard whose keys hold foreign data is skipped, and the others flow."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import redis
from structlog.testing import capture_logs

from fixtures.constants import SetConstants
from fixtures.flow import ReadLog, Site, entry_of_a_record, retain_now, stage_rows
from penstock import Ick, Log
from penstock.clients import DirtyList, repair
from penstock.database.connections import Connection
from penstock.errors import DamagedIck, Fenced, ForeignLog, HistoryDiverged, PenstockError
from penstock.records import Offset
from penstock.streaming import RoundResult, Streamer

pytestmark = [
    pytest.mark.things(entries="plain"),
    pytest.mark.channels("things", Ick("index", shards=2, keep=timedelta(0))),
]

MARK = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
SELECT 'index', i %% 2, %s || i, 'dirty', 'member', 'null' FROM generate_series(1, %s) AS i
"""
LOG_KEY, ICK_KEY = "penstock:{things/0}:log", "penstock:{index/0}:ick"

Harm = Callable[[redis.Redis], object]


@pytest.fixture
def _retry_at_once(set_constants: SetConstants) -> None:
    set_constants("channels.isolation", RETRY_EVERY_S=0.0)
    set_constants("streaming.streamer", REFRESH_EVERY_S=0.0)


def damage_ick(client: redis.Redis) -> None:
    client.set(DirtyList(client, ICK_KEY).keys.dirty, "somebody's")


def damage_ick_position(client: redis.Redis) -> None:
    client.set("penstock:{index/0}:log", "somebody's")


def damage_log(client: redis.Redis) -> None:
    client.set(LOG_KEY, "somebody's")


def damage_epoch(client: redis.Redis) -> None:
    client.lpush("penstock:{things/0}:epoch", "somebody's")


def append_to_log(client: redis.Redis) -> None:
    client.xadd(LOG_KEY, {"somebody": "else"}, id="1-5")


def stage(connection: Connection, things: Log, count: int = 20, prefix: str = "k") -> None:
    """Stages the same number of records for each channel."""
    stage_rows(connection, things, count, prefix)
    connection.execute(MARK, [prefix, count])


def rounds(streamer: Streamer, count: int = 5) -> list[RoundResult]:
    return [streamer.round() for _ in range(count)]


def waiting(client: redis.Redis, shard: int) -> int:
    return client.zcard(DirtyList(client, f"penstock:{{index/{shard}}}:ick").keys.dirty)


def about(logs: list[Any], event: str) -> list[str]:
    return [entry["shard"] for entry in logs if entry["event"] == event]


HARMS = {damage_ick: "index/0", damage_ick_position: "index/0", damage_log: "things/0", damage_epoch: "things/0"}
WHEN = ("before the start", "under way", "after records")


@pytest.mark.parametrize(
    ("harm", "shard", "when", "many"),
    [(h, HARMS[h], when, (20, 3000)[(i + j) % 2]) for i, h in enumerate(HARMS) for j, when in enumerate(WHEN)],
)
def test_one_unusable_shard_is_named_and_the_others_flow(
    site: Site, harm: Harm, shard: str, many: int, when: str
) -> None:
    """Guarantee 30."""
    if when != "before the start":
        site.streamer.drain()
    if when == "after records":
        stage(site.connection, site.things, prefix="before")
        site.streamer.drain()
        site.client.delete(*site.client.keys(f"*{{{shard}}}*"))
    harm(site.client)
    stage(site.connection, site.things, many)

    with capture_logs() as logs:
        done = rounds(site.streamer)

    tails = {str(name): tail for name, tail in site.streamer.opened().publisher.tails.log.items()}
    ends = site.connection.execute("SELECT channel, shard, max(last_offset) FROM penstock.journal GROUP BY 1, 2")  # fmt: skip
    expected = {f"{channel}/{number}": end for channel, number, end in ends}
    assert len(expected) == 4
    assert {name for name, end in expected.items() if tails.get(name) != end} == {shard}
    assert about(logs, "shard unusable") == [shard]
    assert done[-1].idle


def test_a_foreign_entry_stops_only_its_shard(
    streamer: Streamer, connection: Connection, redis_client: redis.Redis, things: Log
) -> None:
    """Guarantee 30."""
    append_to_log(redis_client)
    stage(connection, things)

    with pytest.raises(ForeignLog, match="entry 1-5 was not written by Penstock"):
        streamer.drain()
    assert (waiting(redis_client, 0), waiting(redis_client, 1)) == (10, 10)


@pytest.mark.parametrize(("harm", "error"), [(damage_ick, DamagedIck), (damage_log, ForeignLog)], ids=["ick", "log"])
def test_a_drain_drains_the_other_shards_then_ends_with_the_error(
    site: Site, harm: Harm, error: type[PenstockError]
) -> None:
    harm(site.client)
    stage(site.connection, site.things, 2000)
    published = 0

    def count(done: RoundResult) -> None:
        nonlocal published
        published += done.added

    with pytest.raises(error):
        site.streamer.drain(count)

    [(elsewhere,)] = site.connection.execute(
        "SELECT count(*) FROM penstock.staged_records WHERE (channel, shard) <> (%s, 0)",
        ["index" if error is DamagedIck else "things"],
    ).fetchall()
    assert published == elsewhere


@pytest.mark.usefixtures("_retry_at_once")
def test_a_repaired_shard_catches_up(
    streamer: Streamer, connection: Connection, redis_client: redis.Redis, things: Log, logged: ReadLog
) -> None:
    damage_ick(redis_client)
    damage_log(redis_client)
    stage(connection, things)
    rounds(streamer)
    repair(redis_client, ICK_KEY)
    redis_client.delete(LOG_KEY)

    with capture_logs() as logs:
        rounds(streamer)

    assert sorted(about(logs, "shard usable again")) == ["index/0", "things/0"]
    assert sum(map(len, logged(things).values())) == 20
    assert (waiting(redis_client, 0), waiting(redis_client, 1)) == (10, 10)
    assert streamer.drain() == 0


@pytest.mark.usefixtures("_retry_at_once")
@pytest.mark.parametrize(("log_every_s", "lines"), [(60.0, 1), (0.0, 11)])
def test_an_unusable_shard_is_logged_once_and_then_at_intervals(
    site: Site, set_constants: SetConstants, log_every_s: float, lines: int
) -> None:
    set_constants("logs", LOG_EVERY_S=log_every_s)
    damage_ick(site.client)
    stage(site.connection, site.things)

    with capture_logs() as logs:
        rounds(site.streamer, 10)
        site.streamer.close()
        rounds(site.streamer, 1)

    assert about(logs, "shard unusable") == ["index/0"] * lines


def test_retention_keeps_what_a_damaged_ick_may_need_again(
    streamer: Streamer, connection: Connection, redis_client: redis.Redis, things: Log
) -> None:
    """Guarantee 6: records of the other shards are removed as usual."""
    for number in range(3):
        stage(connection, things, prefix=f"{number} ")
        streamer.drain()
    for shard in (0, 1):
        ick = DirtyList(redis_client, f"penstock:{{index/{shard}}}:ick")
        ick.commit([member for member, _ in ick.reserve(100)])
    damage_ick(redis_client)
    retain_now(streamer)

    left = connection.execute(
        "SELECT shard, count(*) FROM penstock.staged_records WHERE channel = 'index' GROUP BY shard ORDER BY shard"
    ).fetchall()
    assert left == [(0, 30), (1, 10)]


def test_a_newer_epoch_in_one_shard_stops_all(
    streamer: Streamer, connection: Connection, redis_client: redis.Redis, things: Log
) -> None:
    """Guarantee 3: also when another shard is unusable."""
    streamer.open()
    damage_ick(redis_client)
    redis_client.set("penstock:{things/0}:epoch", "2")
    stage(connection, things)

    with pytest.raises(Fenced, match="things/0"):
        streamer.run(lambda: False)


@pytest.mark.usefixtures("_retry_at_once")
def test_a_repaired_log_that_is_ahead_of_the_journal_stops_all(
    streamer: Streamer, connection: Connection, redis_client: redis.Redis, things: Log
) -> None:
    """Guarantee 10: Postgres has lost commits; the shard could not be compared while it was unusable."""
    damage_log(redis_client)
    stage(connection, things)
    rounds(streamer)
    redis_client.delete(LOG_KEY)
    ahead = Offset(1000)
    redis_client.xadd(LOG_KEY, entry_of_a_record(5), id=f"{ahead}-0")

    with pytest.raises(HistoryDiverged, match="the log goes to offset 1000"):
        streamer.run(lambda: False)
