"""One bad shard stops only itself: it is named in the log, in ``status`` and by ``doctor``, and the others do not wait."""

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from time import monotonic, sleep

import pytest
import redis
from structlog.testing import capture_logs

from fixtures.constants import SetConstants
from fixtures.flow import Site, drop_limits, running
from fixtures.intervals import refresh_now
from penstock import Ick, Queue
from penstock.channels.isolation import ShardError
from penstock.channels.log.streams import read
from penstock.clients import DirtyList
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.errors import DamagedIck, DamagedJournal, ForeignLog, ForeignQueue
from penstock.operating.doctor.diagnosis import diagnose, worst
from penstock.operating.reset.epoch import reset_epoch
from penstock.operating.status.gathering import status
from penstock.records import Offset, Shard, ShardName
from penstock.streaming import Streamer, tick

pytestmark = [
    pytest.mark.things(entries="plain"),
    pytest.mark.channels("things", Ick("index", shards=2, keep=timedelta(0))),
]

LOG_KEY, EPOCH_KEY = "penstock:{things/0}:log", "penstock:{things/0}:epoch"
INSERT = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
VALUES (%(channel)s, %(shard)s, 'k', 'update', 'thing', %(data)s::jsonb)
"""

Harm = Callable[[Connection, redis.Redis], object]


@pytest.fixture(autouse=True)
def _no_limits(connection: Connection) -> None:
    drop_limits(connection)


@pytest.fixture(autouse=True)
def _small_values(redis_client: redis.Redis) -> Iterator[None]:
    """Redis takes no value of more than 1 MiB: the lowest limit that it can be given."""
    redis_client.config_set("proto-max-bulk-len", 2**20)
    yield
    redis_client.config_set("proto-max-bulk-len", 2**29)


def insert(connection: Connection, shard: int, data: str = "1", channel: str = "things") -> None:
    connection.execute(INSERT, {"channel": channel, "shard": shard, "data": data})


def stage(connection: Connection) -> None:
    """Two records for each shard."""
    for channel in ("things", "index"):
        for shard in (0, 1, 0, 1):
            insert(connection, shard, channel=channel)


def set_type(_: Connection, client: redis.Redis) -> None:
    client.delete(LOG_KEY)
    client.set(LOG_KEY, "somebody's")


def add_entry(_: Connection, client: redis.Redis) -> None:
    client.xadd(LOG_KEY, {"somebody": "else"})  # at the clock's time: far ahead of the journal


def add_next_entry(_: Connection, client: redis.Redis) -> None:
    tail = client.xinfo_stream(LOG_KEY)["last-generated-id"].decode().partition("-")[0]
    client.xadd(LOG_KEY, {"somebody": "else"}, id=f"{int(tail) + 1}-0")


def add_and_remove_entry(_: Connection, client: redis.Redis) -> None:
    client.xdel(LOG_KEY, client.xadd(LOG_KEY, {"somebody": "else"}))


def set_epoch(_: Connection, client: redis.Redis) -> None:
    client.set(EPOCH_KEY, "somebody's")


def set_epoch_to_infinity(_: Connection, client: redis.Redis) -> None:
    client.set(EPOCH_KEY, "inf")


def set_ick_epoch(_: Connection, client: redis.Redis) -> None:
    client.set("penstock:{index/0}:epoch", "nan")


def damage_ick(_: Connection, client: redis.Redis) -> None:
    keys = DirtyList(client, "penstock:{index/0}:ick").keys
    client.delete(keys.dirty)
    client.set(keys.dirty, "somebody's")


def stage_large(connection: Connection, _: redis.Redis) -> None:
    insert(connection, 0, '"' + "x" * 2**21 + '"')


def stage_large_member(connection: Connection, _: redis.Redis) -> None:
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "VALUES ('index', 0, repeat('x', 2097152), 'dirty', 'member', 'null')"
    )


def delete_published_journal(connection: Connection, _: redis.Redis) -> None:
    connection.execute("DELETE FROM penstock.journal WHERE channel = 'things' AND shard = 0")


def delete_hole(connection: Connection, _: redis.Redis) -> None:
    for _number in range(3):
        insert(connection, 0)
        tick(Store(connection))
    connection.execute(
        "DELETE FROM penstock.journal WHERE channel = 'things' AND shard = 0 AND first_offset = "
        "(SELECT max(first_offset) - 1 FROM penstock.journal WHERE channel = 'things' AND shard = 0)"
    )


def delete_record(connection: Connection, _: redis.Redis) -> None:
    insert(connection, 0)
    tick(Store(connection))
    connection.execute("DELETE FROM penstock.staged_records WHERE id = (SELECT max(id) FROM penstock.staged_records)")  # fmt: skip


def spoil_record(connection: Connection, _: redis.Redis) -> None:
    insert(connection, 0)
    tick(Store(connection))
    connection.execute("UPDATE penstock.staged_records SET created_at = 'infinity' WHERE id = (SELECT max(id) FROM penstock.staged_records)")  # fmt: skip


HARMS: list[tuple[Harm, str, str]] = [
    (set_type, "things/0", "the key holds another type"),
    (add_entry, "things/0", "not written by Penstock"),
    (add_next_entry, "things/0", "not written by Penstock"),
    (add_and_remove_entry, "things/0", "has added an entry and removed it|no entry 4-0"),
    (set_epoch, "things/0", "epoch holds no number"),
    (set_epoch_to_infinity, "things/0", "epoch holds no number"),
    (set_ick_epoch, "index/0", "epoch holds no number"),
    (damage_ick, "index/0", "expected zset, found string"),
    (stage_large, "things/0", r"offset 3 \(record 9\): Redis closes the connection"),
    (stage_large_member, "index/0", r"offset 3 \(record 9\): Redis closes the connection"),
    (delete_published_journal, "things/0", "rows of the journal were deleted"),
    (delete_hole, "things/0", "before offset 5"),
    (delete_record, "things/0", "the first is record 9"),
    (spoil_record, "things/0", r"offset 3 \(record 9\): Postgres cannot read it"),
]
by_name = pytest.mark.parametrize(("harm", "shard", "reason"), HARMS, ids=[h[0].__name__ for h in HARMS])  # fmt: skip


@by_name
@pytest.mark.parametrize("restarted", [False, True])
def test_a_bad_shard_is_stopped_and_named_and_the_others_flow(
    site: Site, harm: Harm, shard: str, reason: str, *, restarted: bool
) -> None:
    """Guarantee 30: no round ends with an error, before the fault is known and after."""
    stage(site.connection)
    site.streamer.drain()
    with capture_logs() as logs:
        harm(site.connection, site.client)
        if restarted:
            site.streamer.close()
        for _ in range(3):
            stage(site.connection)
            for _ in range(2):
                site.streamer.round()
            refresh_now(site.streamer)
        site.streamer.round()

    tails = {str(name): tail for name, tail in site.streamer.opened().publisher.tails.log.items()}
    assert {name: tail for name, tail in tails.items() if name != shard} == dict.fromkeys(
        {"things/0", "things/1", "index/0", "index/1"} - {shard}, 8
    )
    [stopped] = [each for each in logs if each["event"] == "shard unusable"]
    assert stopped["shard"] == shard
    assert re.search(reason, stopped["reason"]), stopped["reason"]
    [shown] = status(Store(site.connection), site.client).faults.stopped
    assert str(shown.shard) == shard
    results = diagnose(Store(site.connection), site.client)
    assert worst(results) == "error"
    assert shard in "".join(r.message for r in results if r.check == "stopped shards")


@pytest.mark.parametrize("harm", [set_epoch, damage_ick, set_type, stage_large, spoil_record], ids=lambda h: h.__name__)
def test_a_mended_shard_is_taken_back_and_loses_nothing(site: Site, set_constants: SetConstants, harm: Harm) -> None:
    set_constants("channels.isolation", RETRY_EVERY_S=0.0)
    stage(site.connection)
    site.streamer.drain()
    with capture_logs() as logs:
        harm(site.connection, site.client)
        stage(site.connection)
        for _ in range(3):
            site.streamer.round()
            refresh_now(site.streamer)
        assert len(status(Store(site.connection), site.client).faults.stopped) == 1
        assert [e["event"] for e in logs if "usable" in e["event"]] == [
            "shard unusable"
        ]  # however often it was checked

        site.client.config_set("proto-max-bulk-len", 2**29)
        site.connection.execute("UPDATE penstock.staged_records SET created_at = now() WHERE created_at = 'infinity'")  # fmt: skip
        site.client.delete(EPOCH_KEY, LOG_KEY, DirtyList(site.client, "penstock:{index/0}:ick").keys.dirty)  # fmt: skip
        for _ in range(3):
            refresh_now(site.streamer)
            site.streamer.round()

    assert status(Store(site.connection), site.client).faults.stopped == ()
    assert [e["event"] for e in logs if "usable" in e["event"]] == ["shard unusable", "shard usable again"]
    records = site.log()[site.things.shard_names[0]]
    assert [r.offset for r in records] == list(range(1, len(records) + 1))
    staged = site.connection.execute(
        "SELECT id FROM penstock.staged_records WHERE channel = 'things' AND shard = 0 ORDER BY id"
    ).fetchall()
    assert sorted(r.id for r in records) == [record for (record,) in staged]


def damage_queue(_: Connection, client: redis.Redis) -> None:
    client.delete("penstock:{jobs/0}:q-messages")
    client.set("penstock:{jobs/0}:q-messages", "somebody's")


def delete_middle(connection: Connection, _: redis.Redis) -> None:
    connection.execute(
        "DELETE FROM penstock.journal WHERE channel = 'things' AND shard = 0 AND first_offset = "
        "(SELECT min(first_offset) FROM penstock.journal WHERE channel = 'things' AND shard = 0)"
    )


@pytest.mark.channels("things", Ick("index", shards=2), Queue("jobs"))
@pytest.mark.parametrize(
    ("shard", "harm", "error"),
    [
        ("things/0", set_type, ForeignLog),
        ("things/0", set_epoch, ForeignLog),
        ("index/0", damage_ick, DamagedIck),
        ("jobs/0", damage_queue, ForeignQueue),
        ("things/0", delete_middle, DamagedJournal),
        ("things/0", None, ForeignLog),
    ],
)
def test_a_shard_is_checked_as_a_whole_though_nothing_waits_for_it(
    site: Site, set_constants: SetConstants, shard: str, harm: Harm | None, error: Callable[[str], ShardError]
) -> None:
    """And gets again what was deleted with its keys."""
    set_constants("channels.isolation", RETRY_EVERY_S=0.0)
    for _ in range(2):
        stage(site.connection)
        insert(site.connection, 0, channel="jobs")
        site.streamer.drain()
    channel, _, number = shard.partition("/")
    unusable = site.streamer.opened().publisher.unusable
    unusable.add(ShardName(channel, Shard(int(number))), error("x"))
    if harm is not None:
        harm(site.connection, site.client)
        refresh_now(site.streamer)
        site.streamer.round()
        assert [*map(str, unusable.errors)] == [shard]
    if harm is delete_middle:
        return
    for key in site.client.keys(f"*{{{shard}}}*"):
        site.client.delete(key)
    refresh_now(site.streamer)
    for _ in range(2):
        site.streamer.round()

    assert not unusable.errors
    assert [len(records) for records in site.log().values()] == [4, 4]


@pytest.mark.parametrize("harm", [delete_published_journal, delete_hole, delete_record], ids=lambda h: h.__name__)
def test_a_journal_that_was_damaged_by_hand_continues_after_a_reset(site: Site, harm: Harm) -> None:
    """As the error advises: every record gets an offset again."""
    stage(site.connection)
    site.streamer.drain()
    harm(site.connection, site.client)
    stage(site.connection)
    site.streamer.round()
    site.streamer.close()

    assert reset_epoch(site.connection, site.client, site.flow, apply=True).applied
    site.streamer.drain()

    records = site.log()[site.things.shard_names[0]]
    staged = site.connection.execute(
        "SELECT id FROM penstock.staged_records WHERE channel = 'things' AND shard = 0 ORDER BY id"
    ).fetchall()
    assert [r.offset for r in records] == list(range(1, len(records) + 1))
    assert sorted(r.id for r in records) == [record for (record,) in staged]
    site.streamer.round()
    refresh_now(site.streamer)
    site.streamer.round()
    assert status(Store(site.connection), site.client).faults.stopped == ()
    assert reset_epoch(site.connection, site.client, site.flow).reason is None


def test_every_round_with_a_stopped_shard_is_idle(
    streamer: Streamer, connection: Connection, redis_client: redis.Redis
) -> None:
    """The publisher's target never makes it spin."""
    stage(connection)
    streamer.drain()
    delete_hole(connection, redis_client)
    refresh_now(streamer)
    streamer.round()

    assert all(streamer.round().idle for _ in range(10))


# The latency of the other shards, with a fault and without, in one run.

SECONDS = 7.0
LEAST = 400
"""Samples: the streamer tries an unusable shard again now and then, which is to be less than one in a hundred of them, also on
a busy machine."""
PAUSE_S = 0.005
BETWEEN_STREAMERS = (delete_hole, delete_record, spoil_record)
"""A streamer at work would have published these records before they are harmed."""


def measure_p99(connection: Connection, client: redis.Redis) -> float:
    """The 99th percentile from COMMIT to the log in things/1, in milliseconds, while both shards get records."""
    other = ShardName("things", Shard(1))
    after = streamer_tail(connection, other)
    took: list[float] = []
    end = monotonic() + SECONDS
    while monotonic() < end or len(took) < LEAST:
        for shard in (0, 1):
            insert(connection, shard, channel="index")
            insert(connection, shard)
        began = monotonic()
        after = Offset(after + 1)
        while not read(client, "penstock", other, Offset(after - 1), 1):
            assert monotonic() < began + 5, "a record of a healthy shard did not arrive"
            sleep(0.0002)
        took.append((monotonic() - began) * 1000)
        sleep(PAUSE_S)
    return sorted(took)[int(len(took) * 0.99)]


def streamer_tail(connection: Connection, shard: ShardName) -> Offset:
    row = connection.execute(
        "SELECT max(last_offset) FROM penstock.journal WHERE channel = %s AND shard = %s", [shard.channel, shard.shard]
    ).fetchone()
    assert row is not None
    return Offset(row[0])


@pytest.mark.storm  # it asserts a ratio of durations
@pytest.mark.timeout(240)
@by_name
def test_a_bad_shard_does_not_slow_the_others(
    site: Site, harm: Harm, shard: str, reason: str, record_property: Callable[[str, object], None]
) -> None:
    """The latency p99 of another shard is at most twice that of the calm before; the fault comes in the middle."""
    hurt = 0.0
    stage(site.connection)
    with running(site.streamer.run):
        stage(site.connection)
        sleep(1)
        calm = measure_p99(site.connection, site.client)
        if harm not in BETWEEN_STREAMERS:
            harm(site.connection, site.client)
            hurt = measure_p99(site.connection, site.client)
    if harm in BETWEEN_STREAMERS:
        harm(site.connection, site.client)
        with running(site.streamer.run):
            sleep(1)
            hurt = measure_p99(site.connection, site.client)

    record_property("p99 ratio", hurt / calm)
    assert [str(each.shard) for each in status(Store(site.connection), site.client).faults.stopped] == [shard]
    assert hurt <= 2 * calm, f"calm {calm:.1f} ms, with the fault {hurt:.1f} ms"
