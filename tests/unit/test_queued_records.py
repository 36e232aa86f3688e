"""A staged row as a message: which of them wait in Postgres, and what becomes of a header that a producer has filled by SQL."""

import json
from math import inf, nan
from typing import Any

import pytest

from penstock.batches.columns import Columns
from penstock.channels.batch_outcomes import Batch
from penstock.channels.queue.publishing import QueuedRecord
from penstock.records import BEGINNING, Epoch, Offset, Shard, ShardName
from penstock.streaming.queues import make_queue_batch, make_queued

STAGED_MS = 1_800_000_000_000
STAGED_US = STAGED_MS * 1000 + 999
HOUR_MS = 3_600_000
LIMIT = 1 << 52


def queued(own: Any, **row: Any) -> QueuedRecord:
    values = {"id": 7, "tenant": "t", "action": "a", "object": "o", "data": "1", "headers": {"penstock": own}} | row
    headers = values["headers"] if isinstance(values["headers"], str) else json.dumps(values["headers"])
    return make_queued(BEGINNING, [*list(values.values())[:5], headers, STAGED_US])


TIMES: list[tuple[Any, int | None]] = [
    *((0, None), (-1, None), (1, 1), (1.9, 1), (LIMIT - 1, LIMIT - 1), (LIMIT, None), (inf, None), (nan, None)),
    *((True, None), ("5", None), (None, None), ([5], None), (10**40, None)),
]


@pytest.mark.parametrize(("given", "ms"), TIMES)
def test_a_time_is_a_number_of_milliseconds_that_lua_counts_exactly(given: Any, ms: int | None) -> None:
    assert queued({"due": given}).due_ms == ms
    assert queued({"deadline": given}).deadline_ms == ms
    assert queued({"delay_ms": given}).due_ms == (None if ms is None else STAGED_MS + ms)
    assert queued({"due": 9, "delay_ms": given}).due_ms == 9


NAMES: list[tuple[Any, tuple[str, str, str]]] = [
    ({"name": "n"}, ("n", "running", "")),
    ({"name": "n", "until": "running"}, ("n", "running", "")),
    ({"name": "n", "until": "queued"}, ("n", "queued", "")),
    ({"name": "n", "until": "window", "for_s": 1.5}, ("n", "window", "1500")),
    ({"name": "n", "until": "window", "for_s": 0.001}, ("n", "window", "1")),
    ({"name": "n", "until": "window", "for_s": LIMIT // 1000}, ("n", "window", str(LIMIT // 1000 * 1000))),
    ({"name": "n", "until": "queued", "for_s": 1.5}, ("n", "queued", "")),
    *(({"name": "n", "until": "window", "for_s": for_s}, ("n", "running", "")) for for_s in (0, -1, "5", None, nan, LIMIT / 1000)),
    ({"name": "n", "within": "tenant"}, ("t\0n", "running", "")),
    ({"name": "n", "within": "queue"}, ("n", "running", "")),
    *((other, ("", "", "")) for other in ({"name": ""}, {"name": 7}, {}, "n", None, ["n"])),
]  # fmt: skip


@pytest.mark.parametrize(("given", "unique"), NAMES)
def test_a_unique_name_is_held_as_its_header_says_and_until_it_is_done_otherwise(given: Any, unique: Any) -> None:
    assert queued({"unique": given}).unique == unique


HEADERS = ["", "{}", "null", "[1]", '"penstock"', '{"penstock": 7}', '{"penstock": {"due": 5}}', '{"a": 1e400}']


@pytest.mark.parametrize("headers", HEADERS)
def test_the_reserved_header_comes_last_and_repeats_the_columns(headers: str) -> None:
    record = queued(None, headers=headers)

    assert record.headers.endswith(f'"action": "a", "object": "o", "staged_us": {STAGED_US}}}}}')
    assert json.loads(record.headers)["penstock"]["object"] == "o"
    assert record.due_ms == (5 if "due" in headers else None)
    assert record.headers.startswith('{"a": 1e400, ') == ("1e400" in headers)


def test_what_a_producer_says_of_action_object_and_time_does_not_count() -> None:
    record = queued({"action": "x", "object": "x", "staged_us": 1, "key": "k\1", "priority": "high"}, tenant="t\1")

    assert json.loads(record.headers)["penstock"] == {
        "key": "k\1", "priority": "high", "action": "a", "object": "o", "staged_us": STAGED_US,
    }  # fmt: skip
    assert (record.tenant, record.key, record.priority) == ("t�", "k�", "high")
    assert (record.id, record.payload, record.staged_us) == (7, "1", STAGED_US)


WAITS: list[tuple[dict[str, int], int | None]] = [
    ({}, None),
    ({"due": STAGED_MS + HOUR_MS}, None),
    ({"due": STAGED_MS + HOUR_MS + 1}, STAGED_MS + HOUR_MS + 1),
    ({"delay_ms": HOUR_MS}, None),
    ({"delay_ms": HOUR_MS + 1}, STAGED_MS + HOUR_MS + 1),
    ({"deadline": STAGED_MS + 9 * HOUR_MS}, None),
    ({"due": STAGED_MS + 9 * HOUR_MS, "deadline": STAGED_MS + HOUR_MS}, None),
    ({"due": STAGED_MS + 9 * HOUR_MS, "deadline": STAGED_MS + HOUR_MS + 1}, STAGED_MS + HOUR_MS + 1),
    ({"due": STAGED_MS + 2 * HOUR_MS, "deadline": STAGED_MS + 9 * HOUR_MS}, STAGED_MS + 2 * HOUR_MS),
]


def test_only_messages_due_within_the_hour_go_to_redis() -> None:
    rows = [
        (100 + number, "t", "a", "o", "1", json.dumps({"penstock": own}), STAGED_US)
        for number, (own, _) in enumerate(WAITS)
    ]
    done = (99, None, None, None, "null", "", STAGED_US)
    shard = ShardName("jobs", Shard(3))
    made, far = make_queue_batch(Batch(shard, Epoch(5), Offset(41), True, Columns.pack([done, *rows])))

    assert far == [(100 + number, at) for number, (_, at) in enumerate(WAITS) if at is not None]
    near = [(100 + number, 42 + number) for number, (_, at) in enumerate(WAITS) if at is None]
    assert [(each.id, each.offset) for each in made.messages] == near
    assert made.places == [(99, 0), *((row[0], STAGED_US) for row in rows)]
    assert (made.shard, made.epoch, made.first, made.last, made.begins) == (shard, 5, 41, 41 + len(WAITS), True)
