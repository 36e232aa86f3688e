"""Replays of a log into another channel: in order, once, whatever interrupts them."""

import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fixtures.command_line import CommandLine
from fixtures.constants import SetConstants
from fixtures.flow import ReadLog, drop_limits, retain_now, stage_rows
from penstock import Ick, Log, Pipeline, Queue
from penstock.database.connections import Connection, connect_postgres
from penstock.database.store import Store
from penstock.errors import DamagedJournal, NotReplayable, PenstockError, Unknown
from penstock.journal.journal_reader import offsets_since
from penstock.operating import replay
from penstock.operating.consumers import retire
from penstock.operating.replay import Replay, ReplayRequest
from penstock.records import Offset, Place, Shard, ShardName, parse_place
from penstock.streaming import Streamer

things = Log("things", shards=2, keep=timedelta(hours=1))
copies = Log("copies", shards=3)
index, jobs = Ick("index", shards=2), Queue("jobs", shards=2)

COPIES = """
SELECT key, shard, action, object, data, headers FROM penstock.staged_records
WHERE channel = %s ORDER BY id
"""

Ask = Callable[..., Replay]


@pytest.fixture
def flow() -> Pipeline:
    return Pipeline([things, copies, index, jobs])


@pytest.fixture(autouse=True)
def small_batches(set_constants: SetConstants) -> None:
    set_constants("operating.replay", BATCH=7)


@pytest.fixture
def ask(connection: Connection, streamer: Streamer, database_url: str) -> Any:
    """Replays things, of which 40 records of four keys are sequenced."""
    for number in range(40):
        connection.execute(
            "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, headers) "
            "VALUES ('things', %s, %s, 'insert', 'thing', jsonb_build_object('number', %s::int), %s)",
            [number % 2, f"k{number % 4}", number, '{"trace": "t"}' if number % 3 else None],
        )
    streamer.drain()

    def run(target: str = "copies", *, channel: str = "things", **options: Any) -> Replay:
        parts = {name: options.pop(name) for name in ("start", "end", "key", "shard") if name in options}
        with connect_postgres(database_url, application="test") as own:
            return replay.replay(Store(own), ReplayRequest(channel, target, **parts), **options)

    return run


def staged(connection: Connection, channel: str = "copies") -> list[tuple[Any, ...]]:
    return connection.execute(COPIES, [channel]).fetchall()


def numbers(connection: Connection, channel: str = "copies") -> list[int]:
    return sorted(data["number"] for _, _, _, _, data, _ in staged(connection, channel))


def test_older_generations_of_shards_come_first(connection: Connection, ask: Ask, streamer: Streamer) -> None:
    connection.execute("UPDATE penstock.channels SET generations = '{3}', first_shard = 2 WHERE channel = 'things'")
    for number in range(40, 60):
        connection.execute(
            "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
            "VALUES ('things', 0, %s, 'insert', 'thing', jsonb_build_object('number', %s::int))",
            [f"k{number % 4}", number],
        )
    streamer.close()
    streamer.drain()

    ask(apply=True)

    origins = [headers["replayed-from"] for *_, headers in staged(connection)]
    assert {(each["shard"], each["offset"], each["id"]) for each in origins} == set(
        connection.execute(
            "SELECT shard, first_offset + n - 1, id FROM penstock.journal, unnest(record_ids) WITH ORDINALITY AS r (id, n) "
            "WHERE channel = 'things'"
        )
    )
    rows = [(key, data["number"]) for key, _, _, _, data, _ in staged(connection)]
    assert numbers(connection) == list(range(60))
    for key in ("k0", "k1", "k2", "k3"):
        in_order = [number for each, number in rows if each == key]
        assert in_order == sorted(in_order)


def test_a_plan_changes_nothing(connection: Connection, ask: Ask) -> None:
    planned = ask()

    assert (planned.replay, planned.records) == (None, 40)
    assert [(each.first, each.last) for each in planned.shards] == [(1, 20), (1, 20)]
    for table in ("replays", "checkpoints"):
        assert connection.execute(f"SELECT * FROM penstock.{table}".encode()).fetchall() == []
    assert staged(connection) == []


def test_copies_are_records_of_the_target_that_tell_their_origin(
    connection: Connection, ask: Ask, streamer: Streamer, logged: ReadLog
) -> None:
    done = ask(apply=True)
    streamer.drain()

    found = logged(copies)
    records = [record for shard in found.values() for record in shard]
    assert (done.staged, done.records, len(records)) == (40, 0, 40)
    for shard, kept in found.items():
        assert {copies.shard_for(record.key) for record in kept} <= {shard.shard}
    for key in ("k0", "k1", "k2", "k3"):
        in_order = [record.data["number"] for record in records if record.key == key]
        assert in_order == sorted(in_order)
    record = next(each for each in records if each.data["number"] == 7)
    origin = record.headers["replayed-from"]
    assert record.headers["trace"] == "t"
    assert (origin["channel"], origin["shard"], origin["offset"]) == ("things", 1, 4)
    assert {"id", "staged_us", "replay"} < origin.keys()
    assert connection.execute("SELECT * FROM penstock.checkpoints").fetchall() == []


def test_a_replay_that_was_interrupted_goes_on_and_doubles_nothing(connection: Connection, ask: Ask) -> None:
    def stop(_: int) -> None:
        raise InterruptedError

    for _ in range(3):
        with pytest.raises(InterruptedError):
            ask(apply=True, on_batch=stop)
    stage_rows(connection, things, 5, "later")
    planned = ask()
    done = ask(apply=True)

    assert (planned.replay, planned.staged, planned.records) == (1, 20, 20)
    assert (done.replay, done.staged) == (1, 40)
    assert numbers(connection) == list(range(40))


def test_retention_does_not_wait_in_shards_that_are_not_replayed(connection: Connection, ask: Ask) -> None:
    def stop(_: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        ask(apply=True, shard=1, on_batch=stop)

    offsets = connection.execute('SELECT "offset" FROM penstock.checkpoints ORDER BY shard')
    assert offsets.fetchall() == [(20,), (7,)]


def test_two_processes_carry_out_one_replay(connection: Connection, ask: Ask) -> None:
    failed: list[Exception] = []

    def run() -> None:
        try:
            ask(apply=True)
        except PenstockError as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert all("already been carried out" in str(error) for error in failed)
    assert numbers(connection) == list(range(40))
    assert connection.execute("SELECT count(*) FROM penstock.replays").fetchone() == (1,)


def test_what_was_carried_out_is_repeated_only_on_demand(connection: Connection, ask: Ask) -> None:
    ask(apply=True)
    with pytest.raises(NotReplayable, match="--again"):
        ask(apply=True)
    assert len(staged(connection)) == 40

    again = ask(apply=True, again=True)

    assert (again.replay, again.staged) == (2, 40)
    assert len(staged(connection)) == 80


@pytest.mark.parametrize(
    ("part", "other"),
    [
        ({"shard": 0}, {"shard": 1}),
        ({"key": "k0"}, {"key": "k1"}),
        ({"start": Offset(1)}, {"start": Offset(2)}),
        ({"end": Offset(5)}, {"end": Offset(6)}),
        ({"end": Offset(5), "shard": 0}, {"end": Offset(5)}),
    ],
    ids=str,
)
def test_a_replay_of_another_part_is_another(part: dict[str, Any], other: dict[str, Any], ask: Ask) -> None:
    assert [ask(apply=True, **each).replay for each in (part, other)] == [1, 2]


def test_streaming_does_not_wait_while_records_are_counted(
    connection: Connection, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a key, all of the range is read."""
    locked = "SELECT FROM penstock.channels WHERE channel = 'things' FOR UPDATE NOWAIT"
    count, counts = replay._ReplayRun.count, 0

    def watch(*arguments: Any) -> Any:
        nonlocal counts
        counts += 1
        connection.execute(locked)
        return count(*arguments)

    monkeypatch.setattr(replay._ReplayRun, "count", watch)
    assert ask(apply=True, key="k1").staged == 10
    assert counts


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"key": "k1"}, range(1, 40, 4)),
        ({"shard": 1}, range(1, 40, 2)),
        ({"start": Offset(19)}, range(36, 40)),
        ({"start": Offset(19), "key": "k0"}, [36]),
        ({"end": Offset(2)}, range(4)),
        ({"start": Place(ShardName("things", Shard(0)), Offset(20))}, [38]),
        ({"start": timedelta(minutes=30)}, range(30, 40)),
        ({"start": timedelta(minutes=30), "end": timedelta(minutes=10), "key": "k3"}, [31, 35]),
    ],
)
def test_a_part_is_chosen_by_place_time_and_key(
    connection: Connection, ask: Ask, options: dict[str, Any], expected: Any
) -> None:
    """Record n is of the time 60 - n minutes ago, but for every half a minute."""
    connection.execute(
        "UPDATE penstock.staged_records SET created_at = now() - (CASE WHEN (data->>'number')::int < 30 THEN interval '1h' "
        "WHEN (data->>'number')::int < 36 THEN interval '20min' ELSE interval '5min' END)"
    )

    planned = ask(**options)
    ask(apply=True, **options)

    assert planned.records == len(list(expected))
    assert numbers(connection) == list(expected)


def test_a_time_includes_the_first_record_and_excludes_the_last(connection: Connection, ask: Ask) -> None:
    start, end = (
        at
        for (at,) in connection.execute(
            "SELECT created_at FROM penstock.staged_records WHERE data->>'number' IN ('20', '30') ORDER BY 1"
        )
    )

    late = "UPDATE penstock.staged_records SET created_at = %s - interval '1 s' WHERE data->>'number' = '25'"
    connection.execute(late, [start])  # its transaction was the last to commit

    planned = ask(start=start, end=end)
    ask(apply=True, start=start, end=end)

    assert (planned.records, [each.first for each in planned.shards]) == (9, [11, 11])
    assert numbers(connection) == [*range(20, 25), *range(26, 30)]


def test_what_retention_removes_while_a_replay_is_planned_is_not_part_of_it(
    connection: Connection, ask: Ask, streamer: Streamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage_rows(connection, things, 10, "later")
    streamer.drain()
    find = offsets_since

    def remove_then(*arguments: Any) -> Any:
        found = find(*arguments)
        connection.execute("DELETE FROM penstock.journal WHERE first_offset = 1")
        return found

    monkeypatch.setattr(replay, "offsets_since", remove_then)
    assert [each.first for each in ask(start=timedelta(days=1)).shards] == [21, 21]


def test_an_ick_gets_members_and_a_queue_gets_tenants(connection: Connection, ask: Ask) -> None:
    """What Penstock has written into the headers is the original's alone."""
    own = '{"penstock": {"delay_ms": 7200000}}'
    connection.execute("UPDATE penstock.staged_records SET headers = %s", [own])
    ask("index", apply=True, key="k2")
    ask("jobs", apply=True, key="k2")

    members, messages = staged(connection, "index"), staged(connection, "jobs")
    assert {row[:5] for row in map(_hashable, members)} == {("k2", index.shard_for("k2"), "dirty", "member", "{}")}
    assert len(messages) == 10
    assert {row[:2] for row in messages} == {("k2", jobs.shard_for("k2"))}
    assert all("penstock" not in row[5] for row in messages)


def _hashable(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(json.dumps(each) if isinstance(each, dict) else each for each in row)


@pytest.mark.parametrize(
    ("channel", "target", "error", "text"),
    [
        ("index", "copies", NotReplayable, "only a log is replayed"),
        ("jobs", "copies", NotReplayable, "only a log is replayed"),
        ("things", "things", NotReplayable, "into itself"),
        ("things", "typo", Unknown, "there are: copies, index, jobs, things"),
        ("typo", "copies", Unknown, "there are"),
    ],
)
def test_channels_that_do_not_fit_are_refused(
    ask: Ask, channel: str, target: str, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        ask(target, channel=channel, apply=True)


@pytest.mark.parametrize("options", [{"start": "copies/0 offset 1"}, {"end": "things/0 offset 1", "shard": 1}])
def test_a_place_outside_of_what_is_replayed_is_refused(ask: Ask, options: dict[str, Any]) -> None:
    places = {name: parse_place(value) if isinstance(value, str) else value for name, value in options.items()}
    with pytest.raises(Unknown, match="is not in things, or not in the shard"):
        ask(apply=True, **places)


def test_retention_waits_for_a_replay_and_removed_records_are_refused(
    connection: Connection, ask: Ask, streamer: Streamer
) -> None:
    def stop(_: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        ask(apply=True, on_batch=stop)
    stage_rows(connection, things, 10, "later")
    streamer.drain()
    connection.execute("UPDATE penstock.journal SET created_at = now() - interval '2h'")
    kept = retain_now(streamer)
    done = ask(apply=True)
    removed = retain_now(streamer)

    assert (kept, removed, done.staged) == (0, 40, 40)
    with pytest.raises(NotReplayable, match="retention has removed"):
        ask(start=Offset(20))
    assert [each.first for each in ask(start=Offset(21)).shards] == [21, 21]


def test_a_replay_whose_checkpoints_were_retired_is_over(connection: Connection, ask: Ask) -> None:
    def cancel(_: int) -> None:
        retire(Store(connection), "replay-1", apply=True)

    with pytest.raises(NotReplayable, match="is cancelled"):
        ask(apply=True, on_batch=cancel)

    assert len(staged(connection)) == 7
    assert ask().replay is None


def test_records_that_were_deleted_by_hand_stop_it(connection: Connection, ask: Ask) -> None:
    connection.execute("DELETE FROM penstock.staged_records WHERE data->>'number' = '20'")

    with pytest.raises(DamagedJournal, match="things/0 offset 8"):
        ask(apply=True)

    assert len(staged(connection)) == 7


@pytest.mark.parametrize("key", ["long" * 100, "ü" * 130])
def test_a_key_that_no_tenant_can_have_stops_it(key: str, connection: Connection, ask: Ask, streamer: Streamer) -> None:
    drop_limits(connection)
    stage_rows(connection, things, 1, key)
    streamer.drain()

    with pytest.raises(NotReplayable, match="256 bytes"):
        ask("jobs", apply=True, start=datetime.now(UTC) - timedelta(days=1), key=f"{key}1")

    assert staged(connection, "jobs") == []


def test_the_command_shows_a_plan_and_carries_it_out(penstock: CommandLine, connection: Connection) -> None:
    penstock.directory.joinpath("shop.py").write_text(
        "from penstock import Log, Pipeline\npipeline = Pipeline([Log('things', shards=2), Log('copies')])\n"
    )
    stage_rows(connection, things, 3)
    penstock("stream", "--drain")
    words = ("replay", "things", "--to", "copies", "--from", "2h")

    plan, done, twice = penstock(*words), penstock(*words, "--apply"), penstock(*words, "--apply")
    as_json, after = penstock(*words, "--json"), penstock(*words)

    assert (plan.returncode, done.returncode, twice.returncode) == (0, 0, 5)
    assert "3 records would be copied into copies" in plan.stdout
    assert "--apply" in plan.stderr
    assert "3 copies staged" in done.stdout
    assert "has already been carried out" not in done.stdout
    assert "--apply" not in done.stderr
    assert "--again" in twice.stderr
    assert "replay 1 into copies has already been carried out: 3 copies staged" in after.stdout
    assert "Nothing was changed" in after.stderr
    assert "--again --apply" in after.stderr
    assert json.loads(as_json.stdout)["staged"] == 3
    assert len(staged(connection)) == 3
