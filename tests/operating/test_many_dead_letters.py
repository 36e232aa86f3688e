"""Many dead letters are listed in pages, counted by reason and chosen by filters, without reading all of them."""

from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime, timedelta

import pytest

from fixtures.command_line import CommandLine
from penstock.consuming.letter_retry import DeadLetterRow
from penstock.database.connections import Connection, connect_postgres
from penstock.database.statements import statements
from penstock.database.store import Store
from penstock.errors import Unknown
from penstock.operating.letters import LetterFilter, find, group, newest, of_consumer
from penstock.records import parse_place

LETTERS = 10_000

# Ten fail at the same moment, so that the time alone does not order them.
FILL = f"""
INSERT INTO penstock.dead_letters
       (consumer, channel, shard, "offset", record_id, key, action, object, data, staged_at, reason, attempts, failed_at)
SELECT CASE WHEN i % 100 = 0 THEN 'rare' ELSE 'ride_totals' END, 'rides', i % 4, i, i, 'k' || i % 1000, 'a', 'o', '1', now(),
       CASE WHEN i % 3 = 0 THEN 'KeyError: fare of ' || i ELSE 'ValueError: ' || i END, 3,
       timestamptz '2026-11-20 00:00Z' + (i / 10) * interval '1 second'
FROM generate_series(1, {LETTERS}) AS i;
ANALYZE penstock.dead_letters
"""


@pytest.fixture
def reading(connection: Connection, database_url: str) -> Iterator[Connection]:
    connection.execute(FILL)
    with connect_postgres(database_url, application="test") as opened:
        yield opened


def test_pages_have_each_letter_once_and_the_newest_first(reading: Connection) -> None:
    found: list[DeadLetterRow] = []
    while page := newest(Store(reading), LetterFilter("ride_totals"), after=found[-1] if found else None, limit=999):
        found += page

    assert len({each.place for each in found}) == len(found) == LETTERS * 99 // 100
    assert [each.failed_at for each in found] == sorted((each.failed_at for each in found), reverse=True)


def test_a_page_is_read_by_the_index_wherever_it_begins(reading: Connection) -> None:
    sql = statements("penstock")["dead_letters"]
    [last] = newest(Store(reading), limit=5_000)[-1:]
    values = {
        **asdict(LetterFilter()),
        "limit": 100,
        "after_time": last.failed_at,
        "after_consumer": last.consumer,
        "after_channel": last.channel,
        "after_shard": last.shard,
        "after_offset": last.offset,
    }

    plan = "\n".join(line for (line,) in reading.execute(b"EXPLAIN " + sql, values))

    assert "dead_letters_failed" in plan
    assert "Sort" not in plan


def test_filters_are_the_same_for_a_list_a_count_and_a_choice(reading: Connection) -> None:
    since = datetime(2026, 11, 20, 0, 5, tzinfo=UTC)
    chosen = LetterFilter("rare", "rides", error="KeyError", since=since, until=since + timedelta(minutes=1))

    listed = newest(Store(reading), chosen, limit=LETTERS)
    counted = group(Store(reading), chosen)

    expected = [i for i in range(3000, 3600) if i % 300 == 0]
    assert sorted(each.offset for each in listed) == expected
    assert [(each.error, each.letters) for each in counted] == [("KeyError", len(expected))]
    assert sorted(each.offset for each in of_consumer(Store(reading), "rare", chosen)) == expected
    assert {each.key for each in newest(Store(reading), LetterFilter(key="k7"), limit=LETTERS)} == {"k7"}


def test_a_letter_is_found_by_its_place(reading: Connection) -> None:
    assert find(Store(reading), "rare", parse_place("rides/0 offset 100")).record_id == 100
    with pytest.raises(Unknown, match="no dead letter at rides/0 offset 99"):
        find(Store(reading), "rare", parse_place("rides/0 offset 99"))


@pytest.mark.usefixtures("reading")
def test_the_commands_plan_by_the_same_filters(penstock: CommandLine, connection: Connection) -> None:
    connection.execute("INSERT INTO penstock.checkpoints VALUES ('rare', 'rides', 0, 10000, 1)")

    counted = penstock("dead-letters", "list", "--by-reason", "--since", "2026-11-20T00:00")
    listed = penstock("dead-letters", "list", "rare", "--error", "KeyError", "--limit", "2")
    more = penstock(
        "dead-letters", "list", "rare", "--error", "KeyError", "--limit", "2", "--after", "rides/0 offset 9600"
    )
    plan = penstock("dead-letters", "drop", "rare", "--all", "--error", "KeyError", "--until", "2026-11-20T00:05")
    done = penstock(
        "dead-letters", "drop", "rare", "--all", "--error", "KeyError", "--until", "2026-11-20T00:05", "--apply"
    )

    retried = penstock("dead-letters", "retry", "reader", "--all", "--plan")

    assert (retried.returncode, retried.stdout.split()[:2]) == (0, ["place", "key"])
    assert [line.split()[:4] for line in counted.stdout.splitlines()[1:3]] == [
        ["ride_totals", "rides", "ValueError", "6,600"],
        ["ride_totals", "rides", "KeyError", "3,300"],
    ]
    assert "rides/0 offset 9900" in listed.stdout
    assert "--after 'rides/0 offset 9600'" in listed.stderr
    assert "rides/0 offset 9300" in more.stdout
    assert "rides/0 offset 9600" not in more.stdout
    places = [f"rides/0 offset {i}" for i in range(300, 3000, 300)]
    assert [line.partition("would drop ")[2].partition("  ")[0] for line in plan.stdout.splitlines()] == places
    assert done.returncode == 0
    assert len(of_consumer(Store(connection), "rare")) == LETTERS // 100 - len(places)
