"""``penstock reset epoch`` tells what is in doubt; the commands of the how-to are run in ``tests/documents``."""

import json

import psycopg

from fixtures.command_line import CommandLine
from fixtures.restored import Restored, stage, stream
from penstock import Log, Pipeline


def test_the_command_tells_what_is_in_doubt_and_what_to_do(
    flow: Pipeline, things: Log, redis_url: str, database_url: str, copy_database: Restored, penstock: CommandLine
) -> None:
    """Guarantee 10: loudly, with exit code 5; the way out is what the error names."""
    stage(database_url, things, 10, "kept")
    stream(flow, database_url, redis_url)
    restored = copy_database()
    stage(database_url, things, 10, "lost")
    stream(flow, database_url, redis_url)
    here = {"PENSTOCK_DATABASE_URL": restored}
    with psycopg.connect(restored, autocommit=True) as connection:
        connection.execute("CREATE TABLE public.effects (id bigint)")

    for words in (["stream", "--drain"], ["consume", "reader", "--drain"], ["run", "--engine", "inline"]):
        stopped = penstock(*words, **here)
        assert stopped.returncode == 5
        assert "Postgres has lost commits" in stopped.stderr
        assert "penstock reset epoch" in stopped.stderr
    plan = penstock("reset", "epoch", **here)
    data = json.loads(penstock("reset", "epoch", "--json", **here).stdout)
    done = penstock("reset", "epoch", "--apply", **here)

    assert "offsets in doubt, at which the log has records that Postgres lacks: 10" in plan.stdout
    first = data["in_doubt"][0]
    assert f"things/0: {first['first']} to {first['last']}; the journal ends at {first['journal']}" in plan.stdout
    assert f"penstock tail things --shard 0 --from {first['first']} --json" in plan.stdout
    assert "consumer reader at 0: was restored with its effects; it has applied none of these" in plan.stdout
    assert "since the first one, and read them again" in plan.stdout
    assert f"their entries are kept in {first['kept_as']}" in done.stdout
    assert penstock("stream", "--drain", **here).returncode == 0
    assert penstock("consume", "reader", "--drain", **here).returncode == 0
    assert penstock("verify", **here).returncode == 0


def test_only_the_lost_records_are_written_before_and_after_the_epoch_is_opened(
    flow: Pipeline, things: Log, redis_url: str, database_url: str, copy_database: Restored, penstock: CommandLine
) -> None:
    """Those that were committed before the backup, and published after it, are not lost."""
    stage(database_url, things, 10, "kept")
    stream(flow, database_url, redis_url)
    stage(database_url, things, 15, "still there")
    restored = copy_database()
    stage(database_url, things, 5, "lost")
    stream(flow, database_url, redis_url)
    here = {"PENSTOCK_DATABASE_URL": restored}

    plan = penstock("reset", "epoch", "--lost", "lost.jsonl", **here)
    planned = (penstock.directory / "lost.jsonl").read_text().splitlines()
    penstock("reset", "epoch", "--lost", "opened.jsonl", "--apply", **here)
    opened = (penstock.directory / "opened.jsonl").read_text().splitlines()

    assert "still in this Postgres" in plan.stdout
    assert sorted(json.loads(line)["key"] for line in planned) == [f"lost{number}" for number in range(1, 6)]
    assert opened == planned
