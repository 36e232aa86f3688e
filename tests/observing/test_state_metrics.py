"""The exporter shows the pipeline's state, survives restarts and servers that are away, and costs the same for any number of scrapes."""

import re
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from fixtures.command_line import CommandLine
from fixtures.constants import SetConstants
from fixtures.proxy import Proxy, behind
from fixtures.roles import UrlFor
from penstock import Ick, Log, Pipeline, Queue
from penstock.channels.ick.shard_states import IckStatus
from penstock.channels.queue.inspection import QueueStatus
from penstock.channels.queue.stats import Dwell, QueueStats
from penstock.consuming import make_worker
from penstock.database.connections import Connection
from penstock.database.registry import Pause, register_consumer
from penstock.database.store import Store
from penstock.database.transactions import Timeouts
from penstock.observing.state_metrics import MAX_NAMES, MAX_SHARDS, METRICS, OTHER, Series, StateCollector, measure
from penstock.operating.pausing import pause
from penstock.operating.status.snapshot import (
    ChannelStatus,
    ConsumerShard,
    ConsumerStatus,
    OpenTransaction,
    RegisteredSchedule,
    ShardStatus,
    Status,
)
from penstock.reconciling.reconciliation import LastRun
from penstock.records import Shard, ShardName
from penstock.streaming import Streamer
from penstock.streaming.faults import Faults, IsolatedRecords, StoppedShard

HOSTILE = 'x"}\n\\ 1'
THINGS, INDEX, JOBS = Log("things", shards=2, keep=timedelta(hours=1), redis_memory="64MB"), Ick("index"), Queue("jobs")

PROMTOOL = shutil.which("promtool")

STAGE = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, headers)
VALUES (%s, 0, %s, %s, 'thing', '1', %s)
"""

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def flow() -> Pipeline:
    made = Pipeline([THINGS, INDEX, JOBS, Log("spare")])

    @made.consumer(reads=THINGS, name="applies")
    def _(_session: Any, _records: Any) -> None: ...

    @made.consumer(reads=THINGS, name="halts", attempts=1, on_poison="halt")
    def _(_session: Any, _records: Any) -> None:
        raise LookupError(HOSTILE)

    @made.worker(reads=JOBS, name="work")
    def _(_session: Any, _job: Any) -> None: ...

    return made


@pytest.fixture
def scene(flow: Pipeline, connection: Connection, streamer: Streamer, database_url: str, redis_url: str) -> None:
    """Three records in the log, one staged, a member that waits, and two jobs that are done."""
    for name in flow.consumers:
        register_consumer(Store(connection, flow.scope), flow.get_consumer(name))
    for number in range(3):
        connection.execute(STAGE, ("things", f"{HOSTILE}{number}", "insert", None))
    connection.execute(STAGE, ("index", HOSTILE, "dirty", None))
    for _ in range(2):
        connection.execute(STAGE, ("jobs", "k", "message", '{"tenant": "a"}'))
    streamer.drain()
    for name in flow.consumers:
        worker = make_worker(flow, flow.get_consumer(name), database_url, redis_url)
        worker.drain()
        worker.close()
    connection.execute(STAGE, ("things", "later", "insert", None))


Scrape = Callable[[], Samples]


def parse(text: str) -> Samples:
    return {
        (sample.name, frozenset((k, v) for k, v in sample.labels.items() if k != "schema")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(*urls: str, flow: Pipeline | None = None, **options: Any) -> Samples:
    """One scrape of a new exporter."""
    collector = StateCollector(flow, *urls, **options)
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        return parse(generate_latest(registry).decode())
    finally:
        collector.close()


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return f"penstock_{name}", frozenset(labels.items())


@pytest.mark.usefixtures("scene")
def test_what_has_happened_is_in_the_metrics(
    flow: Pipeline, database_url_for: UrlFor, redis_url: str, connection: Connection
) -> None:
    """Read with the login that reads no payloads."""
    pause(Store(connection), "channel", "things", reason="a deploy", by="ann")

    found = scrape(database_url_for("a_monitor"), redis_url, flow=flow)

    reads = {"consumer": "applies", "channel": "things"}
    expected = {
        key("up", server="postgres"): 1,
        key("up", server="redis"): 1,
        key("staged_records", channel="things"): 1,
        key("sequenced_records_total", channel="things"): 3,
        key("log_records", channel="things"): 3,
        key("log_memory_limit_bytes", channel="things"): 64 * 1024 * 1024,
        key("consumer_applied_records_total", **reads): 3,
        key("consumer_lag_records", **reads): 0,
        key("consumer_paused", **reads): 1,
        key("consumer_halted", **reads, shard=""): 0,
        key("consumer_halted", consumer="halts", channel="things", shard="0"): 1,
        key("consumer_lag_records", consumer="halts", channel="things"): 3,
        key("queue_messages", channel="jobs", state="waiting"): 0,
        key("queue_written_messages_total", channel="jobs"): 2,
        key("queue_done_messages_total", channel="jobs"): 2,
        key("ick_members", channel="index", state="dirty"): 1,
        key("ick_records_total", channel="index"): 1,
    }
    assert {each: found.get(each) for each in expected} == expected
    assert found[key("log_memory_bytes", channel="things")] > 0
    assert not any(HOSTILE in value for _, labels in found for _, value in labels)


@pytest.mark.usefixtures("scene")
def test_a_series_a_shard_is_made_only_when_asked_for(flow: Pipeline, database_url: str, redis_url: str) -> None:
    summed = scrape(database_url, redis_url, flow=flow)
    split = scrape(database_url, redis_url, flow=flow, by_shard=True)

    assert summed[key("sequenced_records_total", channel="things")] == 3
    assert split[key("sequenced_records_total", channel="things", shard="0")] == 3
    assert split[key("sequenced_records_total", channel="things", shard="1")] == 0


def test_a_server_that_is_away_is_a_zero(database_url: str, redis_url: str) -> None:
    no_postgres, no_redis = "postgresql://nobody@127.0.0.1:1/none", "redis://127.0.0.1:1/0"
    without_redis, without_postgres = scrape(database_url, no_redis), scrape(no_postgres, redis_url)

    assert {scrape(no_postgres, no_redis)[key("up", server=each)] for each in ("postgres", "redis")} == {0}
    assert without_redis[key("up", server="postgres")] == 1
    assert without_redis[key("up", server="redis")] == 0
    assert key("epoch") in without_redis
    assert without_postgres[key("up", server="postgres")] == 0
    assert without_postgres[key("up", server="redis")] == 1
    assert key("epoch") not in without_postgres


@pytest.mark.usefixtures("scene")
def test_a_redis_that_takes_no_writes_is_a_zero(database_url: str, redis_url: str, redis_client: Any) -> None:
    redis_client.config_set("min-replicas-to-write", 1)
    try:
        refusing = scrape(database_url, redis_url)
    finally:
        redis_client.config_set("min-replicas-to-write", 0)

    assert [refusing[key("up", server=each)] for each in ("postgres", "redis")] == [1, 0]


def read_up(collector: StateCollector) -> tuple[float, float, bool]:
    """Whether Postgres and Redis are up, and whether the status is shown."""
    found = {(each.name, each.labels.get("server")): each.value for f in collector.collect() for each in f.samples}
    return (
        found["penstock_up", "postgres"],
        found["penstock_up", "redis"],
        ("penstock_epoch", None) in found and ("penstock_sample_duration_seconds", None) in found,
    )


def test_one_reading_serves_all_scrapes_of_two_seconds_and_a_slow_one_those_of_a_minute(
    database_url: str, redis_url: str, streamer: Streamer, postgres_proxy: Proxy, set_constants: SetConstants
) -> None:
    """A scrape does not wait for a server that says nothing."""
    now = [1000.0]
    streamer.drain()
    set_constants(
        "observing.state_metrics",
        TIMEOUTS=Timeouts(connect_s=600, reply_s=600, statement_s=600, lock_s=600),
        ANSWER_S=600.0,
    )
    collector = StateCollector(None, behind(postgres_proxy, database_url), redis_url, clock=lambda: now[0])
    shown: dict[float, tuple[int, tuple[float, float, bool]]] = {}
    for now[0] in (1000, 1000, 1001.9, 1002, 1003.9):
        shown[now[0]] = (collector.readings, read_up(collector))
    postgres_proxy.hold_back()
    set_constants("observing.state_metrics", ANSWER_S=0.05)
    for now[0] in (1004, 1061.9, 1062):
        shown[now[0]] = (collector.readings, read_up(collector))
    collector.close()  # not under the reading that still waits
    postgres_proxy.heal()
    set_constants("observing.state_metrics", ANSWER_S=600.0)
    shown[0] = (0, read_up(collector))

    up, down = (1, 1, True), (0, 0, False)
    assert shown == {
        1000: (1, up), 1001.9: (1, up), 1002: (1, up), 1003.9: (2, up), 1004: (2, up), 1061.9: (2, up), 1062: (2, down), 0: (0, up)
    }  # fmt: skip
    assert collector.readings == 3, "the one that was waited for"
    collector.close()


@pytest.mark.usefixtures("streamer")
def test_an_exporter_opens_its_connections_again_after_an_error_and_logs_each_outage_once(
    database_url: str, redis_url: str, streamer: Streamer, postgres_proxy: Proxy, redis_proxy: Proxy
) -> None:
    streamer.drain()
    times = count(0, 10)
    collector = StateCollector(
        None, behind(postgres_proxy, database_url), behind(redis_proxy, redis_url), clock=lambda: float(next(times))
    )
    found = [read_up(collector)]
    with capture_logs() as logs:
        for proxy, readings in ((postgres_proxy, 2), (redis_proxy, 1), (postgres_proxy, 1)):
            proxy.refuse()
            found += [read_up(collector) for _ in range(readings)]
            proxy.heal()
            found.append(read_up(collector))
    collector.close()

    up, down = (1, 1, True), (0, 1, False)
    assert found == [up, down, down, up, (1, 0, True), up, down, up]
    assert [line["event"] for line in logs] == ["metrics not read"] * 2


@pytest.mark.parametrize(("most", "others"), [(3, [1]), (4, [])])
@pytest.mark.usefixtures("scene")
def test_names_beyond_the_most_are_logged_once(
    most: int, others: list[int], flow: Pipeline, database_url: str, redis_url: str, set_constants: SetConstants
) -> None:
    set_constants("observing.state_metrics", MAX_NAMES=most, CACHED_S=0.0)
    collector = StateCollector(flow, database_url, redis_url)
    with capture_logs() as logs:
        for _ in range(2):
            assert read_up(collector) == (1, 1, True)
    collector.close()
    assert [line["count"] for line in logs] == others


def test_every_metric_of_the_table_can_be_exported_and_has_a_proper_name() -> None:
    for metric in METRICS.values():
        assert re.fullmatch(r"penstock_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.help.endswith(".")
        assert not {"tenant", "key", "reason", "namespace", "pid"} & {*metric.labels}


def make_consumer(name: str, count: int) -> ConsumerStatus:
    shards = (ConsumerShard(i, 1, 2, 3.0 + i, 1, 0, 0, 0, "it failed", None, None, unread=False) for i in range(count))
    return ConsumerStatus(name, "things", None, tuple(shards))


def measured(found: Status, name: str, *, by_shard: bool = False) -> dict[tuple[str, ...], float]:
    measure(found, series := Series(found.schema, by_shard=by_shard))
    return series.values[f"penstock_{name}"]


NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)

QUEUE = QueueStatus(
    waiting=11, leased=12, delayed=13, dead=14, oldest_s=15,
    stats=QueueStats(0, 0, 0, 0, None, 16, Dwell(1, 17, 18), Dwell(1, 19, 20), 21, 22, 23, 0, 0, 24, 25, 26, 27, 28),
)  # fmt: skip
SHARD = ShardStatus(
    0, staged=2, staged_s=3, sequenced=40, published=33, first=5, records=6, entries=7, memory=8, redis_memory=9,
    ick=IckStatus(31, 32, 33, 34, 35, 36), queue=QUEUE, in_postgres=10, damage=None, unknown=False,
)  # fmt: skip
CHANNEL = ChannelStatus("things", "log", None, None, None, (SHARD, replace(SHARD, shard=1)))
STATUS = Status(
    "penstock",
    5,
    0,
    4,
    None,
    Faults(IsolatedRecords(), (), ()),
    (CHANNEL,),
    (),
    (),
    OpenTransaction(1, "a", "idle", 53),
)

Values = dict[str, dict[tuple[str, ...], float]]


def of(*labels: str, **values: float) -> Values:
    return {name: {labels: value} for name, value in values.items()}


VALUES: Values = {
    **of(epoch=5, last_tick_age_seconds=4, oldest_transaction_age_seconds=53, isolated_records=6),
    **of("things", staged_records=2, staged_oldest_age_seconds=3, sequenced_records_total=40, published_records_total=33),
    **of("things", unpublished_records=7, unread_records=42, log_records=6, log_entries=7, log_memory_bytes=8, log_memory_limit_bytes=9),
    **of("things", "", shard_stopped=0, shard_damaged=0),
    **of("reads", "things", consumer_applied_records_total=44, consumer_skipped_records_total=45, consumer_checkpoint_offset=41),
    **of("reads", "things", consumer_lag_records=42, consumer_lag_seconds=43, consumer_evicted_records=48, consumer_dead_letters=47),
    **of("reads", "things", consumer_paused=1),
    **of("reads", "things", "", consumer_halted=0, consumer_waiting=0),
    "queue_messages": {("things", "waiting"): 11, ("things", "leased"): 12, ("things", "delayed"): 13, ("things", "dead"): 14, ("things", "in_postgres"): 10},
    "queue_tenants": {("things", "ready"): 21, ("things", "over"): 22, ("things", "blocked"): 23},
    "queue_dwell_seconds": {("things", "quiet", "50"): 17, ("things", "quiet", "99"): 18, ("things", "noisy", "50"): 19, ("things", "noisy", "99"): 20},
    **of("things", queue_oldest_age_seconds=15, queue_longest_wait_seconds=16, queue_written_messages_total=24, queue_done_messages_total=25),
    **of("things", queue_dead_lettered_messages_total=26, queue_reclaimed_messages_total=27, queue_lost_messages_total=28),
    "ick_members": {("things", "dirty"): 31, ("things", "reserved"): 32, ("things", "held"): 33},
    **of("things", ick_oldest_age_seconds=34, ick_records_total=35, ick_dirtied_total=36),
    **of("totals", "reads", reconciliation_last_run_timestamp_seconds=NOW.timestamp(), reconciliation_differences=51, reconciliation_repaired_rows=52),
    **of("totals", "reads", "repaired", reconciliation_last_outcome=1),
    **of("s", schedule_late_seconds=54, schedule_ahead_seconds=55),
}  # fmt: skip

UNKNOWN: Values = {
    **of(oldest_transaction_age_seconds=0),
    **of("things", queue_oldest_age_seconds=0, queue_longest_wait_seconds=0, ick_oldest_age_seconds=0),
    **of("reads", "things", consumer_paused=0),
    **{name: {} for name in ("published_records_total", "unpublished_records", "log_memory_bytes", "reconciliation_differences")},
}  # fmt: skip
"""What differs where there is none of it, or where Redis does not answer."""


def test_every_value_of_a_status_is_in_its_metric() -> None:
    """An alert ends by a zero; what nobody knows is not shown as one."""
    reads = ConsumerShard(0, 41, 42, 43, 44, 45, 46, 47, None, None, None, unread=True, evicted=48)
    full = replace(
        STATUS,
        faults=replace(STATUS.faults, isolated=IsolatedRecords(6)),
        channels=(replace(CHANNEL, shards=(SHARD,)),),
        consumers=(ConsumerStatus("reads", "things", None, (reads,)),),
        reconciliations=(LastRun("totals", "reads", "repair", "repaired", NOW, 1, 1, 1, 51, 52, 1, 0),),
        pauses=(Pause("channel", "things", "", "", NOW), Pause("consumer", "others", "", "", NOW)),
        schedules=(RegisteredSchedule("s", "things", "1h", "UTC", None, None, 54, None, None, "", 55),),
    )
    stats = QUEUE.stats and replace(QUEUE.stats, longest_wait_s=None)
    queue, ick = replace(QUEUE, oldest_s=None, stats=stats), SHARD.ick and replace(SHARD.ick, oldest_s=None)
    shard = replace(SHARD, published=None, memory=None, queue=queue, ick=ick)
    idle = replace(
        full,
        oldest_transaction=None,
        channels=(replace(CHANNEL, shards=(shard,)),),
        reconciliations=(replace(full.reconciliations[0], differences=None),),
        pauses=full.pauses[1:],
    )

    shown = [{name: measured(each, name) for name in VALUES} for each in (full, idle)]
    assert shown == [VALUES, VALUES | UNKNOWN]
    rest = {"up", "build_info", "sample_duration_seconds", "sample_timestamp_seconds"}
    assert {f"penstock_{name}" for name in VALUES.keys() | rest} == METRICS.keys()
    ahead = replace(full, channels=(replace(CHANNEL, shards=(replace(SHARD, published=41),)),))
    assert measured(ahead, "unpublished_records") == {("things",): 0}, "of a Postgres that was restored"


def test_a_shard_is_flagged_in_its_own_channel_and_consumer_alone() -> None:
    """Another one has a shard of the same number."""
    healthy, hurt = SHARD, replace(CHANNEL.shards[1], damage="it is another's")
    [reads] = make_consumer("reads", 1).shards
    wide = replace(
        STATUS,
        channels=(
            replace(CHANNEL, channel="a", shards=(healthy, hurt)),
            replace(CHANNEL, channel="b", shards=(replace(hurt, shard=0), replace(healthy, shard=1))),
        ),
        consumers=(
            ConsumerStatus("halts", "a", None, (reads, replace(reads, shard=1, halted=None))),
            ConsumerStatus("waits", "a", None, (replace(reads, halted=None), replace(reads, shard=1, halted=None, waiting="x"))),
        ),
        faults=replace(STATUS.faults, stopped=(StoppedShard(ShardName("b", Shard(1)), "it is damaged", 1.0),)),
    )  # fmt: skip

    assert measured(wide, "shard_stopped") == {("a", ""): 0, ("b", "1"): 1}
    assert measured(wide, "shard_damaged") == {("a", "1"): 1, ("b", "0"): 1}
    assert measured(wide, "consumer_halted") == {("halts", "a", "0"): 1, ("waits", "a", ""): 0}
    assert measured(wide, "consumer_waiting") == {("halts", "a", ""): 0, ("waits", "a", "1"): 1}


@pytest.mark.parametrize("count", [MAX_NAMES - 1, MAX_NAMES, MAX_NAMES + 1, MAX_NAMES + 7])
def test_names_beyond_the_most_share_one_and_nothing_of_them_is_lost(count: int) -> None:
    more = (replace(SHARD, sequenced=0), replace(CHANNEL.shards[1], staged=0, sequenced=3, unknown=True))
    schedule = RegisteredSchedule("s", "jobs", "1h", "UTC", None, None, 5.0, None, None, "")
    wide = replace(
        STATUS,
        consumers=tuple(make_consumer(f"c{number}", 2) for number in range(count)),
        channels=tuple(replace(CHANNEL, channel=f"c{number}", shards=more) for number in range(count)),
        schedules=tuple(replace(schedule, name=f"s{number}", late_s=number) for number in range(count)),
    )
    beyond = max(0, count - MAX_NAMES)

    for name, own, others, of_others in (
        ("consumer_lag_records", ("c0", "things"), (OTHER, OTHER), 4 * beyond),
        ("consumer_lag_seconds", ("c0", "things"), (OTHER, OTHER), 4.0),
        ("sequenced_records_total", ("c0",), (OTHER,), 3 * beyond),
        ("unread_records", ("c0",), (OTHER,), 3 * beyond),
        ("schedule_late_seconds", ("s0",), (OTHER,), count - 1),
    ):
        values = measured(wide, name)
        assert len(values) == min(count, MAX_NAMES) + (1 if beyond else 0)
        assert own in values
        assert values.get(others) == (of_others if beyond else None)


def test_channels_that_nobody_declares_take_no_name_of_those_that_are() -> None:
    made_up = (replace(CHANNEL, channel=f"a{number}", kind="unknown") for number in range(MAX_NAMES + 7))
    wide = replace(STATUS, channels=(*made_up, CHANNEL))

    assert measured(wide, "sequenced_records_total").keys() == {(OTHER,), ("things",)}


@pytest.mark.parametrize("count", [1, MAX_SHARDS - 1, MAX_SHARDS, MAX_SHARDS + 1, 1024])
def test_shards_beyond_the_most_have_no_series_of_their_own(count: int) -> None:
    shards = tuple(replace(SHARD, shard=number, sequenced=2, damage="it is another's") for number in range(count))
    wide = replace(STATUS, consumers=(make_consumer("c", count),), channels=(replace(CHANNEL, shards=shards),))
    for name, label in (("consumer_lag_records", ("c", "things")), ("sequenced_records_total", ("things",))):
        split = {(*label, str(number)): 2 for number in range(count)} if count <= MAX_SHARDS else {label: 2 * count}
        assert measured(wide, name, by_shard=True) == split
        assert measured(wide, name) == {label: 2 * count}
    for name, label in (("consumer_halted", ("c", "things")), ("shard_damaged", ("things",))):
        flags = {(*label, str(number)): 1 for number in range(min(count, MAX_SHARDS))}
        assert measured(wide, name) == measured(wide, name, by_shard=True) == flags


SUMMED = {
    *(
        "isolated_records",
        "staged_records",
        "sequenced_records_total",
        "published_records_total",
        "unpublished_records",
    ),
    *("unread_records", "log_records", "log_entries", "log_memory_bytes", "log_memory_limit_bytes"),
    *("consumer_applied_records_total", "consumer_skipped_records_total", "consumer_checkpoint_offset"),
    *("consumer_lag_records", "consumer_evicted_records", "consumer_dead_letters", "queue_messages", "queue_tenants"),
    *(f"queue_{name}_messages_total" for name in ("written", "done", "dead_lettered", "reclaimed", "lost")),
    *("ick_members", "ick_records_total", "ick_dirtied_total"),
}
"""What shards add up; of all else they show the greatest."""


@pytest.mark.parametrize("name", METRICS)
def test_values_of_the_same_labels_are_added_or_the_greatest_of_them_is_shown(name: str) -> None:
    series, bare = Series("penstock", by_shard=False), name.removeprefix("penstock_")
    for value in (3.0, 5.0, None, 4.0):
        series.add(bare, value, "a")
    series.add(bare, 1.0, "b")

    assert series.values[name] == {("a",): 12.0 if bare in SUMMED else 5.0, ("b",): 1.0}


@pytest.fixture
def exporter(penstock: CommandLine) -> Iterator[Any]:
    started = penstock.start("metrics", "--listen", "127.0.0.1:0")
    yield started
    started.end()


@pytest.mark.usefixtures("scene")
def test_the_command_prints_or_serves_them(penstock: CommandLine, exporter: Any) -> None:
    printed = penstock("metrics")
    port = re.findall(r"port (\d+)", exporter.stderr.readline())[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        served = parse(answer.read().decode())

    assert printed.returncode == 0
    if PROMTOOL is not None:
        checked = subprocess.run(
            [PROMTOOL, "check", "metrics"], input=printed.stdout, capture_output=True, text=True, check=False
        )
        assert (checked.returncode, checked.stderr) == (0, "")
    assert parse(printed.stdout)[key("sequenced_records_total", channel="things")] == 3
    assert served[key("consumer_applied_records_total", consumer="applies", channel="things")] == 3
    taken = penstock("metrics", "--listen", port)
    assert (taken.returncode, "in use" in taken.stderr) == (2, True)
