"""What each command prints, on which stream, and its exit code."""

import json
import re
import signal
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import redis

from fixtures.command_line import PENSTOCK, CommandLine, Started
from fixtures.proxy import Harm, Proxy, behind
from penstock.channels.log.streams import extents
from penstock.cli.app import COMMANDS, WITHOUT_GIL, main
from penstock.database.connections import Connection
from penstock.records import Shard, ShardName
from penstock.testing import eventually

SHARDS = (ShardName("things", Shard(0)), ShardName("things", Shard(1)))


def stage(connection: Connection, count: int = 10, data: str = '{"n": 1}') -> None:
    connection.execute("CREATE TABLE IF NOT EXISTS public.effects (record_id bigint)")
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "SELECT 'things', i %% 2, 'k' || i, 'insert', 'thing', %s::jsonb FROM generate_series(1, %s) AS i",
        (data, count),
    )


def effects(connection: Connection) -> int:
    row = connection.execute("SELECT count(*) FROM public.effects").fetchone()
    assert row is not None
    return int(row[0])


def parsed(done: subprocess.CompletedProcess[str]) -> Any:
    return json.loads(done.stdout)


# from staged to applied


def test_stream_and_consume_process_what_is_staged(penstock: CommandLine, connection: Connection) -> None:
    stage(connection, 10)

    streamed, consumed = penstock("stream", "--drain"), penstock("consume", "reader", "--drain")

    assert (streamed.returncode, consumed.returncode) == (0, 0)
    assert streamed.stdout == consumed.stdout == ""
    assert "10 records published" in streamed.stderr
    assert "10 records applied" in consumed.stderr
    assert effects(connection) == 10


def test_a_consumer_may_be_limited_to_some_of_its_shards(penstock: CommandLine, connection: Connection) -> None:
    stage(connection, 10)
    penstock("stream", "--drain")

    done = penstock("consume", "reader", "--drain", "--shards", "1")

    assert "5 records applied" in done.stderr
    assert penstock("consume", "reader", "--drain", "--shards", "0,2").returncode == 2


PREPARED = b"_pg3_"
"""In the name of each statement that psycopg prepares."""


def has_effects(connection: Connection, count: int) -> bool:
    return effects(connection) == count


WITH_JOBS = """
from penstock import Queue
jobs = pipeline.add_channel(Queue("jobs"))

@pipeline.worker(reads=jobs)
def work(session, job):
    session.execute(text("INSERT INTO public.effects VALUES (:id)"), {"id": int(job.id)})
"""


@pytest.mark.parametrize("command", ["stream --drain", "consume reader --drain", "work --drain", "run --engine inline"])
def test_statements_are_prepared_unless_there_is_a_pooler(
    penstock: CommandLine, started: Started, connection: Connection, postgres_proxy: Proxy, command: str
) -> None:
    """Guarantee 18."""
    with (penstock.directory / "shop.py").open("a") as shop:
        shop.write(WITH_JOBS)
    urls = {"PENSTOCK_DATABASE_URL": behind(postgres_proxy, penstock.environment["PENSTOCK_DATABASE_URL"])}
    counts = []
    for option in ("--no-prepare", "--prepare"):
        stage(connection, 10)
        connection.execute(
            "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
            "SELECT 'jobs', 0, 'tenant', 'insert', 'job', '1' FROM generate_series(1, 10)"
        )
        if "stream" not in command:
            penstock("stream", "--drain")
        postgres_proxy.harm(PREPARED, Harm.LOSE_REQUEST)
        before = effects(connection)
        process = penstock.begin(*command.split(), option, **urls)
        if "run" in command:
            eventually(partial(has_effects, connection, before + 20), "all is applied", timeout_s=90)
            process.terminate()
        penstock.wait(process)
        counts.append(postgres_proxy.harmed)

    assert counts[0] == 0
    assert counts[1] > 0


def test_the_log_is_json_lines_without_a_terminal(penstock: CommandLine, connection: Connection) -> None:
    stage(connection, 1)

    lines = [line for line in penstock("stream", "--drain").stderr.splitlines() if line.startswith("{")]

    assert [json.loads(line)["event"] for line in lines] == ["streaming"]


def test_run_processes_everything_until_it_is_stopped(
    penstock: CommandLine, started: Started, connection: Connection
) -> None:
    stage(connection, 10)
    process = started("run", "--engine", "inline")
    eventually(lambda: effects(connection) == 10, "all is applied", timeout_s=90)

    process.send_signal(signal.SIGTERM)

    assert process.wait(90) == 0


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("command", [("stream",), ("consume", "reader"), ("status", "--watch")])
def test_a_signal_ends_a_worker_cleanly(
    started: Started, connection: Connection, which: signal.Signals, command: tuple[str, ...]
) -> None:
    process = started(*command)
    eventually(lambda: is_connected(connection) or is_registered(connection), "it is at work", timeout_s=90)

    process.send_signal(which)

    assert process.wait(90) == 0


def test_a_second_interrupt_ends_a_handler_that_hangs(
    penstock: CommandLine, started: Started, connection: Connection
) -> None:
    """Its transaction is rolled back, and its batch is delivered again."""
    stage(connection, 1, '{"slow": true}')
    penstock("stream", "--drain")
    process = started("consume", "reader")
    eventually(lambda: "idle in transaction" in states(connection), "the handler is at work", timeout_s=90)

    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGINT)

    assert process.wait(90) == 130
    assert effects(connection) == 0


def is_connected(connection: Connection) -> bool:
    return bool(states(connection))


def is_registered(connection: Connection) -> bool:
    return bool(connection.execute("SELECT FROM penstock.checkpoints").fetchall())


def states(connection: Connection) -> list[str]:
    rows = connection.execute(
        "SELECT state FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend' "
        "AND application_name <> 'idle'"  # those that no connection has: fixtures.shared_database
    ).fetchall()
    return [state for (state,) in rows]


# Inspect


def test_status_is_a_table_for_people_and_json_for_programs(penstock: CommandLine, connection: Connection) -> None:
    stage(connection, 10)
    penstock("stream", "--drain")

    table, data = penstock("status"), penstock("status", "--json")

    assert table.returncode == 0
    assert "things" in table.stdout
    assert table.stderr == data.stderr == ""
    assert sum(shard["published"] for shard in parsed(data)["channels"][0]["shards"]) == 10
    assert parsed(data)["consumers"][0]["shards"][0]["lag"] == 5
    assert "reader" in penstock("status", "--by-shard").stdout


def test_status_needs_no_application(penstock: CommandLine) -> None:
    penstock("stream", "--drain")
    del penstock.environment["PENSTOCK_APP"]

    assert parsed(penstock("status", "--json"))["channels"][0]["declared"] is None


def test_tail_prints_records_with_their_payloads(penstock: CommandLine, connection: Connection) -> None:
    stage(connection, 30, '{"big": 123456789012345678901234567890, "exact": 1.10}')
    penstock("stream", "--drain")

    newest = penstock("tail", "things").stdout.splitlines()
    chosen = penstock("tail", "things", "--shard", "1", "--from", "3", "--count", "2", "--json")

    assert len(newest) == 10
    assert newest[0].startswith("things/")
    records = chosen.stdout.splitlines()
    assert [json.loads(line)["offset"] for line in records] == [3, 4]
    # exactly as in Postgres, to the digit
    assert '"big": 123456789012345678901234567890' in records[0]
    assert '"exact": 1.10' in records[0]
    assert penstock("tail", "nothing").returncode == 2


@pytest.mark.parametrize(
    ("options", "offsets"), [("--count 0", [2, 3]), ("--from 3", [3]), ("--from 1 --count 2", [1, 2])]
)
def test_tail_follows_from_where_it_is_told_until_it_is_stopped_or_has_as_many(
    penstock: CommandLine,
    started: Started,
    connection: Connection,
    redis_client: redis.Redis,
    options: str,
    offsets: list[int],
) -> None:
    stage(connection, 1)
    penstock("stream", "--drain")
    process = started("tail", "things", "--follow", "--json", *options.split())
    eventually(lambda: redis_client.info("clients")["blocked_clients"], "it waits for what comes", timeout_s=90)
    for _ in range(2):
        stage(connection, 1)
    penstock("stream", "--drain")

    shown = [json.loads(process.stdout.readline())["offset"] for _ in offsets]
    if "--count 2" not in options:
        process.send_signal(signal.SIGINT)

    assert shown == offsets
    assert process.wait(90) == 0


def test_doctor_exits_with_1_for_an_error_and_3_without_a_server(penstock: CommandLine, connection: Connection) -> None:
    penstock("stream", "--drain")

    done = penstock("doctor", "--json")
    away = penstock("doctor", PENSTOCK_DATABASE_URL="postgresql://nobody@127.0.0.1:1/none")

    assert done.returncode == 1  # the tests' server runs with fsync off
    assert [f["check"] for f in parsed(done) if f["grade"] == "error"] == ["durability"]
    assert away.returncode == 3
    assert "→" in away.stdout


def test_a_closed_output_pipe_is_no_error(penstock: CommandLine, connection: Connection) -> None:
    stage(connection, 2000, json.dumps({"pad": "x" * 200}))
    penstock("stream", "--drain")
    process = penstock.start_installed("tail", "things", "--from", "1")  # Python ends, too
    assert process.stdout is not None
    assert process.stderr is not None

    process.stdout.readline()
    process.stdout.close()

    assert process.wait(90) == 0
    assert process.stderr.read() == ""
    process.stderr.close()


def test_a_channel_is_listed_with_how_long_and_how_its_records_are_kept(penstock: CommandLine) -> None:
    penstock("stream", "--drain")
    text = (penstock.directory / "shop.py").read_text()
    assert 'Log("things", shards=2' in text
    assert listed(penstock) == ["things", "log", "2", "24 h", "packed"]

    again = text.replace('"things", shards=2', '"things", shards=2, compression="zstd"')
    (penstock.directory / "shop.py").write_text(again)
    penstock("stream", "--drain")

    assert listed(penstock) == ["things", "log", "2", "24 h", "packed, zstd"]


def listed(penstock: CommandLine) -> list[str]:
    """The first columns of the only channel."""
    row = penstock("channels", "list").stdout.splitlines()[1]
    return re.split(r"\s{2,}", row.strip())[:5]


# Repair


def test_dead_letters_are_listed_shown_retried_and_dropped(penstock: CommandLine, connection: Connection) -> None:
    stage(connection, 2, '{"bad": true}')
    penstock("stream", "--drain")
    penstock("consume", "reader", "--drain")

    places = [
        f"{x['channel']}/{x['shard']} offset {x['offset']}" for x in parsed(penstock("dead-letters", "list", "--json"))
    ]
    assert sorted(places) == ["things/0 offset 1", "things/1 offset 1"]
    assert '"bad": true' in penstock("dead-letters", "show", "reader", places[0]).stdout
    assert penstock("dead-letters", "retry", "reader", "--all").returncode == 1
    assert penstock("dead-letters", "retry", "reader").returncode == 2
    plan = penstock("dead-letters", "drop", "reader", places[0])
    assert "would drop" in plan.stdout
    assert "--apply" in plan.stderr
    assert len(parsed(penstock("dead-letters", "list", "--json"))) == 2
    (penstock.directory / "shop.py").write_text(
        (penstock.directory / "shop.py").read_text().replace('raise ValueError("bad")', "pass")
    )
    assert penstock("dead-letters", "drop", "reader", places[0], "--apply").returncode == 0
    again = penstock("dead-letters", "retry", "reader", "--all", "--json")
    assert [each["outcome"] for each in parsed(again)] == ["applied"]
    assert effects(connection) == 1


def test_a_consumer_is_retired_only_with_apply(penstock: CommandLine, connection: Connection) -> None:
    penstock("stream", "--drain")

    plan = penstock("consumers", "retire", "reader")
    before = parsed(penstock("consumers", "list", "--json"))
    penstock("consumers", "retire", "reader", "--apply")

    assert plan.returncode == 0
    assert [each["consumer"] for each in before] == ["reader"]
    assert parsed(penstock("consumers", "list", "--json")) == []


def test_a_checkpoint_is_reset_only_with_apply(penstock: CommandLine, connection: Connection) -> None:
    stage(connection, 10)
    penstock("stream", "--drain")
    penstock("consume", "reader", "--drain")

    plan = penstock("reset", "checkpoint", "reader", "--to", "earliest", "--json")
    assert sum(move["again"] for move in parsed(plan)) == 10
    assert "0 records applied" in penstock("consume", "reader", "--drain").stderr
    done = penstock("reset", "checkpoint", "reader", "--to", "earliest", "--apply")
    assert "checkpoint moved" in done.stderr  # the audit entry
    assert "10 records applied" in penstock("consume", "reader", "--drain").stderr


def test_a_diverged_history_ends_the_streamer_with_5_until_a_new_epoch_is_opened(
    penstock: CommandLine, connection: Connection, redis_client: redis.Redis
) -> None:
    stage(connection, 10)
    penstock("stream", "--drain")
    connection.execute("DELETE FROM penstock.journal")
    connection.execute("DELETE FROM penstock.staged_records WHERE id > 6")

    stopped = penstock("stream", "--drain")
    plan = penstock("reset", "epoch")
    still = penstock("stream")
    done = penstock("reset", "epoch", "--apply", "--json")
    after = penstock("stream", "--drain")

    assert stopped.returncode == still.returncode == 5
    assert stopped.stderr.splitlines()[-2].startswith("error: things/0: the log goes to offset 5")
    assert stopped.stderr.splitlines()[-1] == "docs: errors#historydiverged"
    assert "to open: epoch 2" in plan.stdout
    assert "--apply" in plan.stderr
    assert parsed(done)["applied"] is True
    assert after.returncode == 0
    kept = extents(redis_client, "penstock", SHARDS).values()
    assert [(each.first, each.tail) for each in kept] == [(1, 3), (1, 3)]
    assert "nothing to do" in penstock("reset", "epoch").stdout


def test_a_consumer_with_a_halted_shard_exits_with_an_error(penstock: CommandLine, connection: Connection) -> None:
    stage(connection, 2, '{"bad": true}')
    (penstock.directory / "shop.py").write_text(
        (penstock.directory / "shop.py").read_text().replace("attempts=1", "attempts=1, on_poison='halt'")
    )
    penstock("stream", "--drain")

    done = penstock("consume", "reader", "--drain")

    assert done.returncode == 1
    assert "docs: errors#halted" in done.stderr


# wrong use


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("consume", "writer", "--drain"), "no consumer 'writer'; the pipeline has reader"),
        (("stream", "--app", "shop"), "module:attribute"),
        (("stream", "--app", "shop:nothing"), "is a int, not a Pipeline; the module has pipeline"),
        (("stream", "--app", "shop:gone"), "is missing"),
        (("stream", "--app", "nowhere:pipeline"), "No module named 'nowhere'"),
        (("stream", "--idle", "0"), "--idle': it has to be more than 0 s"),
        (("stream", "--share", "3/2"), "such as 1/2 or 2/2"),
        (("stream", "--share", "1/2", "--drain"), "--drain publishes everything"),
        (("run", "--share", "half"), "such as 1/2 or 2/2"),
        (("run", "--share", "1/2", "--engine", "spark"), "leave out the share"),
        (("reset", "checkpoint", "reader"), "reset to what?"),
        (("frobnicate",), "No such command"),
    ],
)
def test_wrong_use_exits_with_2_and_names_the_right_use(
    bare: CommandLine, arguments: tuple[str, ...], says: str
) -> None:
    """Before anything is connected to."""
    bare.environment |= {
        "PENSTOCK_DATABASE_URL": "postgresql://127.0.0.1:1/none",
        "PENSTOCK_REDIS_URL": "redis://127.0.0.1:1/0",
        "PENSTOCK_APP": "shop:pipeline",
    }
    done = bare(*arguments)

    assert done.returncode == 2
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_without_an_application_the_error_shows_how_to_name_one(penstock: CommandLine) -> None:
    del penstock.environment["PENSTOCK_APP"]

    done = penstock("stream")

    assert done.returncode == 2
    assert "--app module:attribute" in done.stderr


def test_a_database_url_without_a_redis_url_is_refused(bare: CommandLine) -> None:
    done = bare("status", "--database-url", "postgresql://h/d")

    assert done.returncode == 2
    assert "--redis-url is missing" in done.stderr


def test_an_unreachable_server_exits_with_3(penstock: CommandLine) -> None:
    postgres = penstock("stream", "--drain", PENSTOCK_DATABASE_URL="postgresql://127.0.0.1:1/d")
    valkey = penstock("status", PENSTOCK_REDIS_URL="redis://127.0.0.1:1/0")

    assert (postgres.returncode, valkey.returncode) == (3, 3)
    assert "epoch 1" in valkey.stdout  # what Postgres has is still shown


def test_an_unexpected_error_shows_its_class_and_with_debug_its_traceback(penstock: CommandLine) -> None:
    (penstock.directory / "shop.py").write_text(
        (penstock.directory / "shop.py").read_text()
        + "\nclass Odd(Pipeline):\n    @property\n    def scope(self): raise RuntimeError('payload')\n"
        "    @scope.setter\n    def scope(self, value): pass\n"
        "odd = Odd([])\n"
    )

    short = penstock("stream", "--app", "shop:odd")
    long = penstock("stream", "--app", "shop:odd", "--log-level", "debug")

    assert short.returncode == long.returncode == 1
    assert "error: RuntimeError, which Penstock did not expect" in short.stderr
    assert "shop.py" not in short.stderr
    assert "shop.py" in long.stderr


def test_init_creates_the_missing_tables_that_stream_reports(penstock: CommandLine, postgres: Any) -> None:
    url = postgres.create_database("fresh")
    try:
        missing = penstock("stream", "--drain", PENSTOCK_DATABASE_URL=url)
        made = penstock("init", PENSTOCK_DATABASE_URL=url)
        again = penstock("init", PENSTOCK_DATABASE_URL=url)
        streamed = penstock("stream", "--drain", PENSTOCK_DATABASE_URL=url)
    finally:
        postgres.drop_database("fresh")

    assert missing.returncode == 2
    assert "penstock init" in missing.stderr
    assert (made.returncode, again.returncode, streamed.returncode) == (0, 0, 0)
    assert "already" in again.stderr


def test_init_prints_sql_for_any_schema(bare: CommandLine) -> None:
    done = bare("init", "--sql", "--schema", "elsewhere")

    assert done.returncode == 0
    assert "CREATE TABLE elsewhere.staged_records" in done.stdout.replace('"', "")
    assert bare("init", "--sql", "--schema", 'x"; DROP').returncode == 2


def test_the_version_is_shown() -> None:
    done = subprocess.run([PENSTOCK, "--version"], capture_output=True, text=True, check=True)

    assert done.stdout.startswith("penstock ")


def test_a_python_without_its_gil_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a Python is not here: what it answers is."""
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    monkeypatch.setattr(sys, "argv", ["penstock", "--version"])
    with pytest.raises(SystemExit) as ended:
        main()

    assert (ended.value.code, capsys.readouterr()) == (2, ("", f"{WITHOUT_GIL}\n"))


def test_help_shows_every_command_with_its_own_description() -> None:
    for entry in COMMANDS:
        command = entry.load()
        assert (entry.name, " ".join(command.help.split())) == (entry.name, entry.help)


def test_help_imports_nothing_heavy(bare: CommandLine) -> None:
    """Users wait for it, and ask for it often."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys, penstock.cli.app; print(*sorted(n for n in sys.modules if '.' not in n))"],
        capture_output=True,
        text=True,
        check=True,
    )

    heavy = {"pydantic", "psycopg", "redis", "pyspark", "alembic", "structlog", "rich"}
    assert sorted(heavy & set(done.stdout.split())) == []
