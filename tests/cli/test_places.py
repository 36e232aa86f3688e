"""A place has one notation, which is accepted wherever a place can be typed."""

import json

import pytest

from fixtures.command_line import CommandLine
from penstock.database.connections import Connection
from penstock.errors import InvalidSetting
from penstock.records import Offset, Place, Shard, ShardName, parse_place, parse_places

PLACE = Place(ShardName("things", Shard(0)), Offset(2))


@pytest.fixture
def failing(penstock: CommandLine, connection: Connection) -> CommandLine:
    """Dead letters at the offsets 1 to 3 of things/0 and at 1 of things/1."""
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "SELECT 'things', i / 4, 'k' || i, 'insert', 'thing', '{\"bad\": true}' FROM generate_series(1, 4) AS i"
    )
    penstock("stream", "--drain")
    penstock("consume", "reader", "--drain")
    return penstock


@pytest.mark.slow
def test_the_place_in_the_log_finds_the_dead_letter(failing: CommandLine) -> None:
    failing("reset", "checkpoint", "reader", "--to", "earliest", "--apply")
    logged = [
        json.loads(line) for line in failing("consume", "reader", "--drain").stderr.splitlines() if line.startswith("{")
    ]
    places = [line["item"] for line in logged if line["event"] == "dead-lettering"]

    assert "things/0 offset 2" in places
    place = places[-1]
    for words in ([place], place.split()):
        assert '"bad": true' in failing("dead-letters", "show", "reader", *words).stdout
        assert f"would drop {place}" in failing("dead-letters", "drop", "reader", *words).stdout


@pytest.mark.slow
def test_every_command_prints_and_takes_the_same_notation(failing: CommandLine) -> None:
    assert "things/0 offset 2  " in failing("tail", "things").stdout
    assert "things/0 offset 2  " in failing("dead-letters", "list").stdout
    tail = failing("tail", "things", "--from", str(PLACE)).stdout
    plan = failing("reset", "checkpoint", "reader", "--to", str(PLACE), "--json")
    several = failing("dead-letters", "drop", "reader", *str(PLACE).split(), *["things/1", "offset", "1"], "--apply")

    assert [line.split("  ")[0] for line in tail.splitlines()] == ["things/0 offset 2", "things/0 offset 3"]
    [move] = json.loads(plan.stdout)
    assert (move["shard"], move["after"], move["again"]) == (0, 2, 1)
    assert several.stdout.count("dropped") == 2
    assert len(json.loads(failing("dead-letters", "list", "--json").stdout)) == 2


HUGE = str(10**23)
WRONG = [
    (("tail", "things", "--from", HUGE), "offsets go to 9223372036854775807"),
    (("tail", "things", "--from", "9" * 5000), "offsets go to 9223372036854775807"),
    (("tail", "things", "--from", f"things/0 offset {HUGE}"), "go to 9223372036854775807"),
    (("tail", "things", "--from", f"things/{HUGE} offset 1"), "go to 9223372036854775807"),
    (("tail", "things", "--count", str(2**63)), f"count is {2**63}; the largest number is"),
    (("reset", "checkpoint", "reader", "--to", HUGE), "offsets go to 9223372036854775807"),
    (("dead-letters", "show", "reader", f"things/0 offset {HUGE}"), "go to 9223372036854775807"),
    (("trace", "9" * 5000), "is not the number of a record; if it is a key, add --key"),
    (("trace", "k\udcff"), "text is not in UTF-8: 'k\\udcff'"),
    (("tail", "th\udcffings"), "channel is not in UTF-8"),
    (("consume", "reader\udcff", "--drain"), "is not in UTF-8"),
    (("consume", "reader", "--drain", "--shards", "9" * 5000), "shards"),
    (("dead-letters", "show", "reader", "things/0/2"), "rides/2 offset 4118"),
    (("dead-letters", "show", "reader", "things/0 offset 9"), "no dead letter at things/0 offset 9"),
    (("dead-letters", "retry", "reader", "0/2"), "rides/2 offset 4118"),
    (("tail", "things", "--from", "others/0 offset 2"), "not in things"),
    (("tail", "things", "--from", "soon"), "rides/2 offset 4118"),
    (("reset", "checkpoint", "reader", "--to", "others/0 offset 2"), "reads things, not others"),
    (("reset", "checkpoint", "reader", "--to", "things/0 offset 2", "--shard", "1"), "not in shard 1"),
]


@pytest.mark.slow
def test_a_place_that_is_none_is_an_error(failing: CommandLine) -> None:
    for command, said in WRONG:
        done = failing(*command)

        assert (done.returncode, said in done.stderr) == (2, True), done


LETTERS = ("0 1 a", "0 2 a parked", "0 3 b superseded", "0 4 a", "0 5 a parked", "0 6 b parked", "1 1 a parked")
"""Shard and offset of a dead letter, its key, and what it is: key ``a`` has gone to another shard."""

CHOSEN: dict[str, str] = {
    "things/0 offset 4": "0/4",
    "things/0 offset 4 --parked": "0/4 0/5 1/1",
    "things/0 offset 1 things/0 offset 4 --parked": "0/1 0/2 0/4 0/5 1/1",
    "things/0 offset 4 things/0 offset 1 --parked": "0/1 0/2 0/4 0/5 1/1",
    "things/0 offset 2 things/0 offset 3 --parked": "0/2 0/3 0/5 0/6 1/1",
    "things/1 offset 1 --parked": "1/1",
    "--parked": "0/2 0/5 0/6 1/1",
    "--superseded": "0/3",
    "things/0 offset 1 --superseded": "0/1",
    "--parked --superseded": "0/2 0/3 0/5 0/6 1/1",
    "--all --key b": "0/3 0/6",
    "--parked --key b": "0/6",
}


def test_letters_are_chosen_by_place_with_those_parked_behind_the_first_of_their_key(
    penstock: CommandLine, connection: Connection
) -> None:
    for text in LETTERS:
        shard, offset, key, *of = text.split()
        connection.execute(
            'INSERT INTO penstock.dead_letters (consumer, channel, shard, "offset", record_id, key, action, object, data, staged_at, '
            "reason, attempts, parked, later_shard, later_offset) "
            "VALUES ('reader', 'things', %s, %s, 1, %s, 'a', 'o', '1', now(), 'test', 1, %s, %s, %s)",
            (shard, offset, key, "parked" in of, *((0, 9) if "superseded" in of else (None, 0))),
        )
    chosen = {}
    for words in CHOSEN:
        plan = json.loads(penstock("dead-letters", "retry", "reader", *words.split(), "--plan", "--json").stdout)
        chosen[words] = " ".join(f"{each['shard']}/{each['offset']}" for each in plan)
    assert chosen == CHOSEN


def test_dead_letters_of_an_unknown_consumer_are_an_error(penstock: CommandLine) -> None:
    penstock("stream", "--drain")
    for command in ("list", "show", "drop", "retry"):
        place = () if command == "list" else ("things/0 offset 2",)

        done = penstock("dead-letters", command, "NOPE", *place)

        assert done.returncode == 2
        assert "NOPE" in done.stderr
        assert "reader" in done.stderr


def test_a_declared_consumer_without_dead_letters_is_no_error(penstock: CommandLine) -> None:
    done = penstock("dead-letters", "list", "reader")

    assert done.returncode == 0
    assert "no dead letters" in done.stderr


def test_a_place_is_parsed_as_it_is_written() -> None:
    other = Place(ShardName("a.b-c", Shard(11)), Offset(1))

    assert parse_place(str(PLACE)) == PLACE
    assert parse_places(f"{PLACE}, {other} (record 17)") == [PLACE, other]
    for text in ("", "things/0", "things/0 offset", f"{PLACE} and more", f"{PLACE} {PLACE}"):
        with pytest.raises(InvalidSetting):
            parse_place(text)


@pytest.mark.slow
def test_a_shard_that_postgres_has_forgotten_can_be_read(failing: CommandLine, connection: Connection) -> None:
    """As ``penstock reset epoch`` advises: Postgres was restored to before the number of shards was changed."""
    failing("channels", "reshard", "things", "--shards", "3", "--apply")
    shop = failing.directory / "shop.py"
    shop.write_text(shop.read_text().replace("shards=2", "shards=3"))
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "SELECT 'things', 2, 'late' || i, 'insert', 'thing', '{}' FROM generate_series(1, 20) AS i"
    )
    failing("stream", "--drain")
    shop.write_text(shop.read_text().replace("shards=3", "shards=2"))
    connection.execute(
        "WITH gone AS (DELETE FROM penstock.journal WHERE shard > 1 RETURNING record_ids), "
        "read AS (DELETE FROM penstock.checkpoints WHERE shard > 1) "
        "DELETE FROM penstock.staged_records r USING gone WHERE r.id = ANY (gone.record_ids)"
    )
    connection.execute("UPDATE penstock.channels SET generations = '{}', first_shard = 0")

    read = failing("tail", "things", "--shard", "3", "--from", "1", "--json")
    newest = failing("tail", "things", "--shard", "3", "--json")

    keys = [json.loads(line)["key"] for line in read.stdout.splitlines()]
    assert keys, read.stderr
    assert all(key.startswith("late") for key in keys)
    assert set(newest.stdout.splitlines()) <= set(read.stdout.splitlines())
    unknown = failing("tail", "things", "--shard", "17", "--from", "1")
    assert unknown.returncode == 2
    assert "channel things has no shard 17" in unknown.stderr
