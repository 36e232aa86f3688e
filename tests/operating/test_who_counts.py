"""Who counts in which figure: one pipeline with one of everybody, and all that is shown of it.

A condition that is dropped in a query, or a case that is forgotten in a sum, changes a figure here.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any

import pytest
import redis
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from fixtures.command_line import CommandLine
from fixtures.crowd import UNIT_S, pipeline
from penstock.cli.app import load_commands
from penstock.console import Visitor, make_console
from penstock.console.access import RIGHTS
from penstock.console.pages import PAGES, find_troubles
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.observing.state_metrics import METRICS, StateCollector
from penstock.operating import letters
from penstock.operating.doctor.diagnosis import diagnose
from penstock.operating.doctor.pipeline_checks import judge_status
from penstock.operating.status.gathering import status
from penstock.streaming.faults import Faults, IsolatedRecords

pytestmark = pytest.mark.usefixtures("crowd")

STATUS = """
channel kind shards keep staged sequenced published in the log memory
calm ick 1 1000 d 0 0 0 - -
grown log 4 1000 d 0 7 7 7 -
idle queue 1 1000 d 0 0 0 - -
index ick 2 1000 d 0 5 5 - -
jobs queue 1 1000 d 0 15 14 - -
lost unknown 1 - 0 6 - - -
never log 1 - 0 0 0 0 -
old log 1 1000 d 0 2 - - -
orders log 3 1000 d 5 22 20 16 … kB of 6 MB
ick dirty held reserved oldest coalesced held by
calm 0 0 0 - - -
index 2 2 1 7 d 1.0 : 1 ann-…
queue waiting leased delayed in postgres dead oldest dwell p99 done reclaimed
idle 0 0 0 0 0 - … s 0 0
jobs 5 2 0 5 1 … s … s 3 0
consumer reads halted passed lag behind evicted applied skipped dead letters
abroad orders 0 13 9 10 d 3 0 0 0
done orders 0 22 0 … s 0 21 0 1
grower grown 0 2 5 28 h 0 2 0 0
halfway* grown 0 1 6 28 h 0 0 0 0
halted orders 2 17 5 9 d 0 17 0 5
late orders 0 10 12 10 d 2 8 8 3
partly orders 0 17 5 8 d 0 17 0 0
paused orders 1 18 4 10 d 0 18 0 0
reader* rides@eu 0 3 6 … s 0 3 0 1
replay-7 orders 0 20 2 8 d 0 20 0 0
search index 0 2 3 7 d 0 2 0 1
stranger* old 0 1 1 25 h 0 1 0 0
waits orders 0 21 1 9 d 0 21 0 0
work jobs 0 0 11 … s 0 0 0 0
* not declared by the pipeline that --app names
reconciliation ago last run compared differed repaired outcome
copies 30 d repair 91 23 4 repaired
totals 20 d compare - - 0 running
schedule channel every timezone last next
ended jobs 0 3 1 * * UTC … -
monthly jobs 0 3 1 * * UTC … …
nightly jobs 0 3 * * * UTC - …
halted: halted orders/1: ValueError: a bad one
halted: halted orders/2: LookupError: another
halted: paused orders/0: ValueError: before the pause
paused: channel index is paused since … UTC by bob: a rebuild; to resume: penstock channels resume index
paused: consumer abroad is paused since … UTC by bob: nobody; to resume: penstock consumers resume abroad
paused: consumer orders is paused since … UTC by bob: a name of a channel; to resume: penstock consumers resume orders
paused: consumer paused is paused since … UTC by ann: a deploy; to resume: penstock consumers resume paused
waiting: grower grown/3: waiting for grown/1, of an earlier generation, not wholly applied yet
waiting: waits orders/2: waiting after Snooze: the service is away
late: nightly has been due for … h: no streamer runs that declares it as it is registered
damaged: old/0: inspecting old/0: the key holds another type, not a stream; something else uses Penstock's names in this Redis. Rename the key, or give the pipeline another namespace
unread: grown/3: 4 records; consumer halfway has no checkpoint in it
unread: orders/2: 5 records; consumer partly has no checkpoint in it
isolated: record 61 of orders/0: no time
unknown: lost/0: 6 records from record 45 on, of no registered channel
stopped: orders/2: it holds a foreign entry
"""

CONSUMERS = """
consumer reads shards passed lag dead letters moved at
abroad orders 3 13 9 0 …
done orders 3 22 0 1 …
grower grown 4 2 5 0 …
halfway grown 2 1 2 0 …
halted orders 3 17 5 5 …
late orders 3 10 12 3 …
partly orders 2 17 0 0 …
paused orders 3 18 4 0 …
reader rides@eu 1 3 - 1 …
replay-7 orders 3 20 2 0 …
search index 2 2 3 1 …
stranger old 1 1 1 0 …
waits orders 3 21 1 0 …
work jobs 1 0 15 0 …
"""

METRICS_OF_CONSUMERS = """
                  applied skipped checkpoint lag seconds evicted letters paused halted waiting
abroad   orders         0       0         13   9      89       3       0      0   none    none
done     orders        21       0         22   0       0       0       1      0   none    none
grower   grown          2       0          2   5      10       0       0      0   none       3
halfway  grown          0       0          1   6      10       0       0      0   none    none
halted   orders        17       0         17   5      77       0       5      0    1,2    none
late     orders         8       8         10  12      88       2       3      0   none    none
partly   orders        17       0         17   5      70       0       0      0   none    none
paused   orders        18       0         18   4      84       0       0      1      0    none
reader   rides@eu       3       0          3   6       0       0       1      0   none    none
replay-7 orders        20       0         20   2      67       0       0      0   none    none
search   index          2       0          2   3      60       0       1      1   none    none
stranger old            1       0          1   1       9       0       0      0   none    none
waits    orders        21       0         21   1      81       0       0      0   none       2
work     jobs           0       0          0  11       0       0       0      0   none    none
"""

METRICS_OF_CHANNELS = """
       staged staged_s sequenced published unpublished unread records entries     limit stopped damaged
calm        0        0         0         0           0      -       -       -         -    none    none
grown       0        0         7         7           0      4       7       7         -    none    none
idle        0        0         0         0           0      -       -       -         -    none    none
index       0        0         5         5           0      -       -       -         -    none    none
jobs        0        0        15        14           1      -       -       -         -    none    none
_other      0        0         6         -           -      6       -       -         -    none    none
never       0        0         0         0           0      -       0       0         -    none    none
old         0        0         2         -           -      -       -       -         -    none       0
orders      5        8        22        20           2      5      16      16   6291456       2    none
"""

COLUMNS = {
    "applied": "consumer_applied_records_total",
    "skipped": "consumer_skipped_records_total",
    "checkpoint": "consumer_checkpoint_offset",
    "lag": "consumer_lag_records",
    "seconds": "consumer_lag_seconds",
    "evicted": "consumer_evicted_records",
    "letters": "consumer_dead_letters",
    "paused": "consumer_paused",
    "halted": "consumer_halted",
    "waiting": "consumer_waiting",
    "staged": "staged_records",
    "staged_s": "staged_oldest_age_seconds",
    "sequenced": "sequenced_records_total",
    "published": "published_records_total",
    "unpublished": "unpublished_records",
    "unread": "unread_records",
    "records": "log_records",
    "entries": "log_entries",
    "limit": "log_memory_limit_bytes",
    "stopped": "shard_stopped",
    "damaged": "shard_damaged",
}

OTHER_METRICS = """
up postgres 1
up redis 1
epoch 1
isolated_records 1
queue_messages jobs waiting 5
queue_messages jobs leased 2
queue_messages jobs delayed 0
queue_messages jobs dead 1
queue_messages jobs in_postgres 5
queue_oldest_age_seconds jobs 0
queue_longest_wait_seconds jobs 0
queue_tenants jobs ready 1
queue_tenants jobs over 0
queue_tenants jobs blocked 0
queue_written_messages_total jobs 11
queue_done_messages_total jobs 3
queue_dead_lettered_messages_total jobs 1
queue_reclaimed_messages_total jobs 0
queue_lost_messages_total jobs 0
ick_members index dirty 2
ick_members index reserved 1
ick_members index held 2
ick_oldest_age_seconds index 60
ick_records_total index 5
ick_dirtied_total index 5
reconciliation_last_outcome late repaired copies 1
reconciliation_last_outcome done running totals 1
reconciliation_differences late copies 23
reconciliation_repaired_rows late copies 4
reconciliation_repaired_rows done totals 0
schedule_late_seconds ended 0
schedule_late_seconds monthly 0
schedule_late_seconds nightly 5
schedule_ahead_seconds ended 0
schedule_ahead_seconds monthly 0
schedule_ahead_seconds nightly 0
"""

EMPTY = {"jobs": "idle", "index": "calm"}
"""The queue and the Ick that have the same metrics, all of them 0."""

LANES = """
abroad reported orders behind 9 10 d - 0
done orders up to date 0 - - 1
grower grown waiting 5 28 h - 0
halfway grown behind 6 28 h - 0
halted orders halted 5 9 d - 5
late orders behind 12 10 d - 3
partly orders behind 5 8 d - 0
paused orders paused 4 10 d - 0
reader rides@eu behind 6 … s - 1
replay-7 replay orders behind 2 8 d - 0
search index paused 3 7 d - 1
stranger old behind 1 25 h - 0
waits orders waiting 1 9 d - 0
work jobs behind 11 … s - 0
"""

CHANNELS = """
calm ick 1 0 0 0 0 members -
grown log 4 0 7 7 7 records -
idle queue 1 0 0 0 0 waiting -
index ick 2 0 5 5 5 members -
jobs queue 1 0 15 14 5 waiting -
lost not declared unknown 1 0 6 - - -
never log 1 0 0 0 0 records -
old not declared log 1 0 2 - - -
orders log 3 5 22 20 16 records … kB of 6 MB
"""

STEPS = (
    "Staged 5 wait for an offset, the oldest for 22 h",
    "Sequenced - 57 in all, 3 not published",
    "Published - 46 in Redis\u2019 logs, Icks and queues, without 2 shards that cannot be read",
    "Applied - 147 passed by 14 consumers, 70 to go",
)

VARYING = {
    "build_info",
    "last_tick_age_seconds",
    "log_memory_bytes",
    "oldest_transaction_age_seconds",
    "queue_dwell_seconds",
    "reconciliation_last_run_timestamp_seconds",
    "sample_duration_seconds",
    "sample_timestamp_seconds",
}

BY_SHARD = [name for name in COLUMNS.values() if not re.search("paused|halted|waiting|stopped|damaged|unread", name)]
"""Metrics that have a series a shard if that is asked for: all of a label together are the sum, or the greatest."""

TROUBLES = """
error record 61 of 'orders/0' gets no offset: no time; 1 in all
error orders/2 is not published: it holds a foreign entry
error orders: 5 committed records waiting for the sequencer, the oldest for … h: no streamer and no recruit has ticked since they were committed; the last tick with records was … s ago
error halted is halted in orders/1: ValueError: a bad one
error halted is halted in orders/2: LookupError: another
error paused is halted in orders/0: ValueError: before the pause
error lost/0: 6 records; no channel is registered or declared with this shard, so no consumer reads them
error grown/3: 4 records; consumer halfway has no checkpoint in it
error orders/2: 5 records; consumer partly has no checkpoint in it
error old/0: inspecting old/0: the key holds another type, not a stream; something else uses Penstock's names in this Redis. Rename the key, or give the pipeline another namespace
warning channel index is paused since … UTC by bob: a rebuild
warning consumer abroad is paused since … UTC by bob: nobody
warning consumer orders is paused since … UTC by bob: a name of a channel
warning consumer paused is paused since … UTC by ann: a deploy
warning abroad is 9 records and 10 d behind
warning abroad is 3 records behind the first entry of orders in Redis: it reads them from Postgres until it has caught up
warning done has 1 dead letter
warning grower is 5 records and … h behind
warning halfway is registered, but the pipeline does not declare it: everything after its checkpoints is kept
warning halfway is 6 records and … h behind
warning halted has 5 dead letters
warning late has 3 dead letters
warning late is 12 records and 10 d behind
warning late is 2 records behind the first entry of orders in Redis: it reads them from Postgres until it has caught up
warning partly is 5 records and 8 d behind
warning reader is registered, but the pipeline does not declare it: everything after its checkpoints is kept
warning reader has 1 dead letter
warning replay-7 is 2 records and 8 d behind
warning search has 1 dead letter
warning stranger is registered, but the pipeline does not declare it: everything after its checkpoints is kept
warning stranger is 1 record and … h behind
warning waits is 1 record and 9 d behind
warning nightly has been due for … h: no streamer runs that declares it as it is registered
"""

SHARDS_OF_ORDERS = """
0 2 10 10 5 6 abroad 1 late 2 paused 6 waits 9 and 4 more
1 3 7 7 1 7 halted 3 abroad 7 done 7 late 7 and 4 more
2 0 5 3 1 3 partly 0 late 1 replay-7 3 halted 4 and 4 more
"""

CHECKPOINTS_OF_LATE = """
orders/0 2 8 10 d 1 3 2 2 … UTC
orders/1 7 0 - 6 5 2 0 … UTC
orders/2 1 4 8 d 1 0 0 0 … UTC
"""

CHANNELS_LISTED = """
channel kind shards keep entries records consumers remarks
calm ick 1 1000 d 0
grown log 2 1000 d plain 7 grower, halfway
idle queue 1 1000 d 0
index ick 2 1000 d 5 search
jobs queue 1 1000 d 15 work
old log 1 1000 d packed 2 stranger not declared
orders log 3 1000 d plain 22 abroad, done, halted, late, partly, paused, replay-7, waits
"""

TENANTS = """
tenant waiting in flight state shard
a 5 2 ready jobs/0
"""

LETTERS = """
consumer channel error letters first at last at
halted orders ValueError 5 … …
gone orders ValueError 4 … …
late old ValueError 3 … …
late orders ValueError 3 … …
done orders ValueError 1 … …
reader rides@eu ValueError 1 … …
search index ValueError 1 … …
"""

DOCTOR = """
error channels: 6 records (the first is 45) for 'lost/0', whose channel is not registered, or lacks the shard: they are not published
warning channels: never is declared and was never streamed
warning channels: old is registered, but the pipeline does not declare it: its records are kept forever
warning icks: index: 5 members waiting, the oldest for 7 d; held by ann-…
warning queues: jobs: 1 dead letter
warning schedules: nightly has been due for … h: no streamer runs that declares it as it is registered
"""
"""Beside the troubles of a status, and what is said of the servers."""

SHARDS_OF_JOBS = """
0 0 15 14 5 2 0 5 … s work 0
"""

SCHEDULES_OF_JOBS = """
ended jobs 0 3 1 * * UTC … UTC - ended
monthly jobs 0 3 1 * * UTC … UTC … UTC ok
nightly jobs 0 3 * * * UTC - … UTC warning nightly has been due for … h: no streamer runs that declares it as it is registered
"""

CHECKPOINTS_OF_HALTED = """
orders/0 10 0 - 10 0 0 0 … UTC
orders/1 3 4 9 d 3 0 0 0 … UTC halted ValueError: a bad one
orders/2 4 1 8 d 4 0 0 0 … UTC halted LookupError: another
"""

RUNS = """
copies late … UTC repair repaired 91 23 4 30 d -
totals done … UTC compare running - - 0 - -
"""

COUNTING = {
    *("status", "metrics", "doctor", "consumers list", "channels list", "channels tenants", "dead-letters list")
}
"""The commands whose figures are above."""

NOT_COUNTING = {
    *("demo", "init", "run", "stream", "consume", "work", "asyncapi", "console", "probe", "verify", "reconcile"),
    *("replay", "tail", "trace", "explain"),
    *("dead-letters show", "jobs show", "jobs list", "queues limits"),  # show each by itself
    *("dead-letters drop", "dead-letters retry", "jobs cancel", "jobs move-due", "jobs retry", "queues limit"),
    *(f"consumers {verb}" for verb in ("pause", "rename", "resume", "retire")),
    *(f"channels {verb}" for verb in ("adopt", "pause", "reshard", "resume", "retire")),
    *(f"schedules {verb}" for verb in ("pause", "resume", "run")),
    *(f"reset {what}" for what in ("checkpoint", "epoch", "ick", "source")),
}

PAGES_THAT_COUNT = {
    *("/", "/channels", "/channels/{name}", "/channels/{name}/tenants", "/consumers", "/consumers/{name}"),
    *("/dead-letters", "/reconciliations", "/doctor"),
}
PAGES_THAT_DO_NOT = {
    *("/channels/{name}/contents", "/channels/{name}/limits", "/actions", "/find"),
    *("/jobs", "/jobs/{queue}/{id:int}", "/schedules", "/icks", "/workers", "/charts"),  # of one queue, or lists
    "/dead-letters/{consumer}/{channel}/{shard:int}/{offset:int}",
}

DAY = datetime(2026, 1, 1, tzinfo=UTC)
FILTERS: dict[str, list[tuple[Any, int]]] = {
    "consumer": [("late", 6), ("halted", 5), ("lat", 0)],
    "channel": [("orders", 13), ("old", 3), ("rides@eu", 1), ("order", 0)],
    "key": [("k", 14), ("l", 4), ("K", 0)],
    "error": [("ValueError", 15), ("LookupError", 3), ("ValueErr", 0)],
    "since": [(DAY, 18), (DAY + timedelta(days=3), 6), (DAY + timedelta(days=3, seconds=1), 3), (DAY + timedelta(days=9), 0)],
    "until": [(DAY, 0), (DAY + timedelta(days=3), 12), (DAY + timedelta(days=3, seconds=1), 15), (DAY + timedelta(days=9), 18)],
    "retriable": [(True, 13), (False, 18)],
}  # fmt: skip
"""Of 18 dead letters, each of which has failed as many days later as its offset."""

Samples = dict[tuple[str, ...], float]


def normal(text: str) -> list[str]:
    """Lines without what differs from run to run: times of day, seconds, and how wide a column is."""
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "…", text)
    text = re.sub(r"(?<=ann-)\w{16}", "…", text)
    text = re.sub(r"\d[\d.]* (kB|s)\b", r"… \1", re.sub(r"\d[\d.]* h\b", "… h", text))
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def scrape(database_url: str, redis_url: str, *, by_shard: bool) -> Samples:
    """The samples by name and values of the labels, in the order of the labels' names."""
    collector, registry = StateCollector(pipeline, database_url, redis_url, by_shard=by_shard), CollectorRegistry()
    registry.register(collector)
    try:
        text = generate_latest(registry).decode()
    finally:
        collector.close()
    return {
        (s.name.removeprefix("penstock_"), *(v for k, v in sorted(s.labels.items()) if k != "schema" and v)): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def expected_metrics() -> Iterator[tuple[tuple[str, ...], float]]:
    for table, labels in ((METRICS_OF_CONSUMERS, 2), (METRICS_OF_CHANNELS, 1)):
        head, *rows = table.strip("\n").splitlines()
        for row in rows:
            names = row.split()[:labels][::-1]
            for column, value in zip(head.split(), row.split()[labels:], strict=True):
                if column in {"halted", "waiting", "stopped", "damaged"} and value != "-":
                    # 1 for each shard, or 0 without one.
                    for shard in ([] if value == "none" else [each] for each in value.split(",")):
                        yield (COLUMNS[column], *names, *shard), float(value != "none")
                elif value != "-":
                    yield (COLUMNS[column], *names), float(value)
    for line in OTHER_METRICS.strip().splitlines():
        metric, *values, figure = line.split()
        yield (metric, *values), float(figure)
        if values and values[0] in EMPTY:
            yield (metric, EMPTY[values[0]], *values[1:]), 0.0


def test_the_metrics_count_everybody_once(database_url: str, redis_url: str, connection: Connection) -> None:
    summed, split = (scrape(database_url, redis_url, by_shard=by_shard) for by_shard in (False, True))

    shown = {key: value // UNIT_S if key[0].endswith("_seconds") else value for key, value in summed.items()}
    assert {key: value for key, value in shown.items() if key[0] not in VARYING} == dict(expected_metrics())
    days = {
        key[2]: (summed["sample_timestamp_seconds",] - value) // 86_400
        for key, value in summed.items()
        if key[0] == "reconciliation_last_run_timestamp_seconds"
    }
    assert days == {"copies": 30, "totals": 20}
    [(now_s,)] = connection.execute("SELECT extract(epoch FROM clock_timestamp())::float8").fetchall()
    assert abs(now_s - summed["sample_timestamp_seconds",]) < UNIT_S
    assert summed["oldest_transaction_age_seconds",] > 0
    for name in BY_SHARD:
        combine = max if name.endswith("_seconds") else sum
        parts: dict[tuple[str, ...], list[float]] = defaultdict(list)
        for key, value in split.items():
            if key[0] == name:
                parts[key[:-1]].append(value)
        found = {key: round(combine(values), -2) for key, values in parts.items()}
        assert found == {key: round(value, -2) for key, value in summed.items() if key[0] == name}


def strip_tags(markup: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", markup)).split())


def rows(page: str, beginning: str) -> list[str]:
    """The rows of the first table behind a text."""
    body = page.partition(beginning)[2].partition("<tbody>")[2].partition("</tbody>")[0]
    return normal("\n".join(map(strip_tags, re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL))))


def test_what_is_wrong_makes_the_status_unsound_each_by_itself(
    connection: Connection, redis_client: redis.Redis
) -> None:
    found = status(Store(connection), redis_client, pipeline)
    none = Faults(IsolatedRecords(), (), ())
    sound = replace(found, faults=none, channels=(), consumers=())
    parts = {
        "isolated": replace(sound, faults=replace(none, isolated=found.faults.isolated)),
        "unknown": replace(sound, faults=replace(none, unknown=found.faults.unknown)),
        "stopped": replace(sound, faults=replace(none, stopped=found.faults.stopped)),
        "damaged": replace(sound, channels=tuple(each for each in found.channels if each.channel == "old")),
        "unread": replace(sound, channels=tuple(each for each in found.channels if each.channel == "lost")),
        "redis": replace(sound, redis="it does not answer"),
        **{
            name: replace(sound, consumers=tuple(each for each in found.consumers if each.consumer == name))
            for name in ("done", "late", "halted", "waits", "partly", "grower")
        },
    }

    assert sound.sound
    assert {name for name, part in parts.items() if part.sound} == {"done", "late", "waits", "grower"}
    troubles = "\n".join(f"{each.grade} {each.message}" for each in find_troubles(found))
    assert normal(troubles) == normal(TROUBLES)
    with_letters = {each.consumer for each in found.consumers if found.has_letters(each.consumer)}
    assert with_letters == {"done", "late", "halted", "reader"}, "not those of an Ick"


def test_the_console_counts_everybody_once(database_url: str, redis_url: str) -> None:
    console = make_console(pipeline, database_url, redis_url, access=lambda _: Visitor("ann", RIGHTS))
    client = TestClient(console, base_url="http://console")
    try:
        paths = ("/", "/consumers", "/channels", "/channels/orders", "/channels/index", "/consumers/late")
        overview, consumers, channels, orders, index, late = (client.get(path).text for path in paths)
        more = ("/channels/jobs", "/channels/jobs/tenants", "/consumers/halted", "/dead-letters", "/reconciliations")
        jobs, tenants, halted, dead, runs = (client.get(path).text for path in more)
    finally:
        console.close()

    assert rows(overview, "<h2>Consumers</h2>") == rows(consumers, "<h1>") == normal(LANES)
    assert rows(overview, "<h2>Channels</h2>") == rows(channels, "<h1>") == normal(CHANNELS)
    steps = re.findall(r'<div class="step">(.*?)</div>', overview)
    assert tuple(map(strip_tags, steps)) == STEPS
    troubles = re.findall(r'<li class="\w+">(.*?)</p>', overview, re.DOTALL)
    assert normal("\n".join(map(strip_tags, troubles))) == normal(TROUBLES)[:12]
    assert ("is paused since" in index, "is paused since" in orders) == (True, False)
    assert rows(orders, "<h2>Shards</h2>") == normal(SHARDS_OF_ORDERS)
    assert rows(late, "<h2>Checkpoints</h2>") == normal(CHECKPOINTS_OF_LATE)
    assert rows(orders, "<h2>Readers</h2>") == [each for each in normal(LANES) if " orders " in each]
    assert rows(jobs, "<h2>Readers</h2>") == [each for each in normal(LANES) if " jobs " in each]
    assert rows(jobs, "<h2>Schedules</h2>") == normal(SCHEDULES_OF_JOBS)
    assert rows(jobs, "<h2>Shards</h2>") == normal(SHARDS_OF_JOBS)
    assert rows(tenants, "<h1>") == ["a ready 5 2 0"]
    assert rows(halted, "<h2>Checkpoints</h2>") == normal(CHECKPOINTS_OF_HALTED)
    letters_by_reason = [line.split() for line in LETTERS.strip().splitlines()[1:]]
    assert rows(dead, "<h2>By reason</h2>") == [
        f"{error} {consumer} {channel} {count} … UTC … UTC" for consumer, channel, error, count, *_ in letters_by_reason
    ]
    assert len(rows(dead, "<h2>Newest first</h2>")) == 18
    assert rows(runs, "<h1>") == normal(RUNS)


@pytest.fixture
def shown(penstock: CommandLine) -> CommandLine:
    """The command, with this pipeline."""
    (penstock.directory / "shop.py").write_text("from fixtures.crowd import pipeline")
    penstock.environment["COLUMNS"] = "300"
    return penstock


def test_the_commands_count_everybody_once(shown: CommandLine) -> None:
    head, *lines = normal(shown("status").stdout)

    assert lines == normal(STATUS)
    assert re.match(
        r"epoch 1 · tick 3, .* ago · oldest transaction .* \(process \d+, shop, idle in transaction\)$", head
    )
    for words, listed in (
        ("consumers list", CONSUMERS),
        ("channels list", CHANNELS_LISTED),
        ("channels tenants jobs", TENANTS),
        ("dead-letters list --by-reason", LETTERS),
    ):
        assert normal(shown(*words.split()).stdout) == normal(listed), words


def test_the_doctor_counts_what_a_status_alone_does_not_show(connection: Connection, redis_client: redis.Redis) -> None:
    found = diagnose(Store(connection), redis_client, pipeline)

    wrong = [each for each in found if each.grade != "ok" and each.check in {"channels", "icks", "queues", "schedules"}]
    lines = "\n".join(sorted(f"{each.grade} {each.check}: {each.message}" for each in wrong))
    assert normal(lines) == normal(DOCTOR)
    troubles = {each.message for each in judge_status(status(Store(connection), redis_client, pipeline))}
    assert len(troubles & {each.message for each in found}) > len(troubles) - 3, "but for those whose age differs"


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_takes_the_same_letters_wherever_they_are_listed_or_counted(name: str, connection: Connection) -> None:
    connection.execute(
        """UPDATE penstock.dead_letters SET failed_at = timestamptz '2026-01-01Z' + "offset" * interval '1 day'"""
    )
    connection.execute("UPDATE penstock.dead_letters SET key = 'l' WHERE consumer = 'gone'")
    connection.execute("UPDATE penstock.dead_letters SET reason = 'LookupError: ValueError' WHERE channel = 'old'")
    connection.execute("UPDATE penstock.dead_letters SET later_shard = 0, later_offset = 9 WHERE consumer = 'halted'")
    for value, count in FILTERS[name]:
        of = letters.LetterFilter(**{name: value})
        listed = letters.newest(Store(connection), of, limit=99)
        assert len(listed) == count, value
        assert sum(each.letters for each in letters.group(Store(connection), of)) == count, value
        for consumer in ("late", "halted", "gone"):
            mine = {each.place for each in listed if each.consumer == consumer}
            if name != "consumer":
                assert {each.place for each in letters.of_consumer(Store(connection), consumer, of)} == mine


def test_every_figure_command_page_and_filter_is_listed() -> None:
    commands = {
        f"{name} {verb}".strip()
        for name, each in load_commands().items()
        for verb in getattr(each, "commands", None) or [""]
    }
    others = {line.split()[0] for line in OTHER_METRICS.strip().splitlines()}

    assert commands == COUNTING | NOT_COUNTING
    assert PAGES.keys() == PAGES_THAT_COUNT | PAGES_THAT_DO_NOT
    assert {name.removeprefix("penstock_") for name in METRICS} == {*COLUMNS.values()} | others | VARYING
    assert [each.name for each in fields(letters.LetterFilter)] == [*FILTERS]
