"""Every command that a page shows is run, in the order of the page, and prints what the page says that it prints.

Each test gives what its page supposes, and then follows it.  Of the lines that a page shows below a command, those without
``…`` are compared: numbers, times and spaces may differ, words may not.
"""

import json
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine

from documents.conftest import ELSEWHERE, Follower, Shop, elsewhere
from fixtures.command_line import CommandLine
from fixtures.documents import DOCS, ROOT, Declared, blocks, commands, run_blocks
from fixtures.restored import Restored
from fixtures.roles import WITH_ROLES
from fixtures.sources import MakeDatabase
from penstock import Log, stage
from penstock.channels.acl import COMMANDS as USERS
from penstock.cli.app import load_commands
from penstock.database.connections import Connection
from penstock.schema.roles import ROLE_NAMES
from penstock.testing import eventually

PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")])
INLINE = re.compile(r"`(penstock [a-z][^`]*)`")
COMMANDS = load_commands()
PLACEHOLDER = re.compile(r"[A-Z|]+|…|\d+|.* offset \d+")
ELSEWHERE_DECLARED = {"revenue", "eu", "rides@eu", "spark:archive", "replay-3"}
"""Names of other pages' applications, of a query, and of a replay."""


def test_readme(penstock: CommandLine, connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its application is a file, which a worker and the application itself import as it is."""
    (penstock.directory / "shop.py").write_text("\n".join(blocks(ROOT / "README.md", "python")))
    url = penstock.directory / ".penstock/postgres/url"
    url.parent.mkdir(parents=True)
    url.write_text(penstock.environment["PENSTOCK_DATABASE_URL"])
    monkeypatch.chdir(penstock.directory)

    def is_total(expected: int) -> bool:
        return connection.execute("SELECT fare FROM totals").fetchall() == [(expected,)]

    shown = [each.line for each in commands(ROOT / "README.md") if each.line.startswith(("penstock", "python"))]
    assert [line.split()[1] for line in shown] == ["run", "shop.py", "status", "console"]
    worker = penstock.begin(*shlex.split(shown[0])[1:])
    for sold in (1, 2):
        subprocess.run([sys.executable, "shop.py"], check=True)
        eventually(partial(is_total, 1200 * sold), "the total is applied")
    assert penstock(*shlex.split(shown[2])[1:]).returncode == 0
    worker.terminate()
    penstock.wait(worker)


def test_icks(shop: Shop) -> None:
    shop.follow("docs/explanation/icks.md")


def test_bound_the_memory_of_redis(shop: Shop) -> None:
    shop.register(shop.events.rides, "old-totals")
    shop.follow("docs/how-to/bound-the-memory-of-redis.md")


def test_change_channels(shop: Shop) -> None:
    shop.book(5)
    shop.drain()
    shop.register(Log("old-rides"))

    shop.follow("docs/how-to/change-channels.md")


def test_do_the_jobs_of_a_queue(shop: Shop) -> None:
    shop.follow("docs/how-to/do-the-jobs-of-a-queue.md")


def test_keep_a_contract(shop: Shop) -> None:
    shop.follow("docs/how-to/keep-a-contract.md")


def test_find_a_record(shop: Shop) -> None:
    changed: Any = {"action": "update", "object": "rides", "data": {"id": 17, "fare": 1}}
    with shop.sessions.begin() as session:
        stage(session, to=shop.events.rides, key="ride-17", **changed)
    shop.drain("ride_totals")
    shop.execute("CREATE ROLE app SUPERUSER LOGIN")
    url = shop.engine.url.set(username="app")
    application = create_engine(url, connect_args={"application_name": "shop"})
    with shop.sessions(bind=application) as session:
        stage(session, to=shop.events.rides, key="ride-18", **changed)
        shop.follow("docs/how-to/find-a-record.md", exits={"penstock explain": 1})
    application.dispose()
    shop.execute("DROP ROLE app")


def test_follow_a_trace(shop: Shop) -> None:
    headers = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    with shop.sessions.begin() as session:
        stage(
            session,
            to=shop.events.rides,
            key="ride-17",
            action="insert",
            object="rides",
            data={"id": 17, "fare": 1},
            headers=headers,
        )
    shop.follow("docs/how-to/follow-a-trace.md")


def test_watch_with_prometheus(shop: Shop) -> None:
    shop.book(5)
    shop.drain()
    shop.follow("docs/how-to/watch-with-prometheus.md")


def test_pause_a_consumer(shop: Shop) -> None:
    shop.book(5)
    shop.drain()
    shop.follow("docs/how-to/pause-a-consumer.md")


def test_watch_it_from_outside(shop: Shop) -> None:
    shop.follow("docs/how-to/watch-it-from-outside.md", replaced={"9310": "0"})


def test_prove_that_nothing_is_lost(shop: Shop) -> None:
    shop.book(5)
    shop.drain()
    shop.follow("docs/how-to/prove-that-nothing-is-lost.md")


def test_reconcile_every_night(shop: Shop) -> None:
    shop.book(20)
    shop.drain()

    def drift() -> None:
        shop.execute("UPDATE ride_copies SET fare = fare + 1 WHERE ride_id IN (9, 10)")
        shop.execute("DELETE FROM ride_copies WHERE ride_id = 11")

    def begin_anew() -> None:
        shop.penstock("consumers", "retire", "ride_copies", "--apply")
        shop.execute("TRUNCATE ride_copies")

    shop.follow(
        "docs/how-to/reconcile-every-night.md",
        before={"penstock reconcile": drift, "penstock consume ride_copies": begin_anew},
        exits={
            "penstock reconcile --app shop.events:pipeline": 4,
            "penstock reconcile --app shop.events:pipeline --apply": 0,
        },
        replaced={"/var/lib/shop": str(shop.penstock.directory)},
    )


def test_replay(shop: Shop) -> None:
    shop.book(20)
    shop.drain()
    now = datetime.now(UTC)
    shop.follow(
        "docs/how-to/replay.md",
        replaced={
            "2026-11-23T14:05+01:00": (now - timedelta(hours=1)).isoformat(),
            "2026-11-23T08:00+01:00": (now - timedelta(hours=3)).isoformat(),
        },
    )


def test_reshard(shop: Shop) -> None:
    shop.book(5)
    shop.drain()
    shop.follow("docs/how-to/reshard.md")


def test_run_on_several_machines(shop: Shop) -> None:
    shop.follow("docs/how-to/run-on-several-machines.md")


def test_stage_your_changes(shop: Shop) -> None:
    shop.follow("docs/how-to/stage-your-changes.md")


def test_write_a_handler(follower: Follower, engine: Engine, redis_url: str) -> None:
    """The page's own handlers; what fails at first is a constraint on the table of receipts."""
    page = DOCS / "how-to" / "write-a-handler.md"
    (follower.penstock.directory / "shop").mkdir()
    (follower.penstock.directory / "shop" / "events.py").write_text("\n".join(blocks(page, "python")))
    names = run_blocks(blocks(page, "python"), {})
    everything = names["Base"].metadata.create_all
    declared = (names["pipeline"], everything, engine, follower.database_url, redis_url)
    shop = Declared(*declared, frozenset(names["pipeline"].consumers) - {"receipts"})
    follower.execute("ALTER TABLE receipts ADD CONSTRAINT wrong CHECK (cents > 100)")
    with shop.sessions.begin() as session:
        session.add_all(names["Order"](customer="ann", cents=n) for n in range(1, 9))
    shop.drain(allow_dead_letters=True)
    [(shard, offset), (_, another)] = shop.rows(
        'SELECT shard, "offset" FROM penstock.dead_letters WHERE shard = '
        "(SELECT shard FROM penstock.dead_letters GROUP BY 1 HAVING count(*) > 1 LIMIT 1) LIMIT 2"
    )

    follower.follow(
        "docs/how-to/write-a-handler.md",
        before={
            "penstock dead-letters retry": lambda: follower.execute("ALTER TABLE receipts DROP CONSTRAINT wrong"),
            "penstock reset": lambda: follower.execute(
                "UPDATE penstock.checkpoints SET halted = 'a bad deploy' WHERE consumer = 'receipts'"
            ),
        },
        replaced={
            "orders/2 offset 4118": f"orders/{shard} offset {offset}",
            "orders/2 offset 4119": f"orders/{shard} offset {another}",
        },
    )

    assert shop.rows("SELECT count(*) FROM receipts") == [(7,)]
    assert shop.rows("SELECT count(*) FROM penstock.dead_letters") == [(0,)]
    assert shop.rows("SELECT count(*) FROM penstock.checkpoints WHERE halted IS NOT NULL") == [(0,)]


def test_restore_postgres(shop: Shop, copy_database: Restored) -> None:
    shop.book(20)
    shop.drain()
    shop.book(20)  # committed before the backup, published after it
    shop.engine.dispose()
    restored = copy_database()
    shop.book(20)
    shop.drain()
    shop.penstock.environment["PENSTOCK_DATABASE_URL"] = restored
    shop.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        """SELECT 'rides', i % 4, i::text, 'insert', 'rides', '{"id": 99, "fare": 1}' FROM generate_series(1, 8) AS i"""
    )

    plan = json.loads(shop.penstock("reset", "epoch", "--json").stdout)
    [first] = [each["first"] for each in plan["in_doubt"] if each["shard"] == "rides/0"]

    shop.follow("docs/how-to/restore-postgres.md", replaced={"577": str(first)})

    lines = (shop.penstock.directory / "lost.jsonl").read_text().splitlines()
    lost = [json.loads(line)["data"]["id"] for line in lines]
    assert lost
    assert min(lost) > 20
    with psycopg.connect(restored) as connection:
        totals = connection.execute("SELECT id FROM ride_totals ORDER BY 1").fetchall()
    assert totals == [*((n,) for n in range(1, 41)), (99,)]


def test_privileges(shop: Shop) -> None:
    """Its statements as well.  Roles are global to the server: they are dropped before."""
    if str(shop.client.info("server")["redis_version"]).startswith("6."):
        pytest.skip("the page's rules need Redis 7: it says what to write for Redis 6.2")
    logins = ["shop_web", "shop_streamer", "shop_totals", "grafana", "support", "deploy", "shop_migrations"]
    shop.execute(f"DROP DATABASE IF EXISTS {WITH_ROLES}")
    shop.execute(*(f"DROP ROLE IF EXISTS penstock_{role}" for role in ROLE_NAMES))
    shop.execute(*(f"CREATE ROLE {login} LOGIN" for login in logins))
    shop.execute("CREATE TABLE totals (id serial, cents bigint)")
    try:

        def lack_one() -> None:
            shop.execute(*blocks(DOCS / "how-to" / "privileges.md", "sql"))
            shop.execute("REVOKE DELETE ON penstock.journal FROM penstock_streamer")
            url = shop.database_url.replace("postgres@", "shop_streamer@")
            shop.penstock.environment["PENSTOCK_DATABASE_URL"] = url

        shop.follow("docs/how-to/privileges.md", before={"penstock stream": lack_one}, exits={"penstock stream": 2})
    finally:
        url = shop.database_url.replace("shop_streamer@", "postgres@")
        shop.penstock.environment["PENSTOCK_DATABASE_URL"] = url
        for login in logins:
            shop.execute(f"DROP OWNED BY {login}", f"DROP ROLE {login}")
        for user in ("admin", *USERS):
            shop.client.execute_command("ACL", "DELUSER", f"penstock_{user}")


def test_read_several_sources(follower: Follower, make_database: MakeDatabase) -> None:
    shop, revenue = blocks(DOCS / "how-to" / "read-several-sources.md", "python")
    (follower.penstock.directory / "revenue.py").write_text(revenue)
    sources = {region: make_database() for region in ("eu", "us")}
    for region, url in sources.items():
        (follower.penstock.directory / "shop.py").write_text(shop)
        own = {"PENSTOCK_DATABASE_URL": url, "PENSTOCK_APP": "shop:pipeline", "REGION": region}
        assert follower.penstock("stream", "--drain", **own).returncode == 0
        follower.penstock.environment[f"PENSTOCK_SOURCES__{region.upper()}"] = url

    follower.follow("docs/how-to/read-several-sources.md")


def test_errors(shop: Shop) -> None:
    shop.book(20)
    shop.drain()
    shop.follow(
        "docs/reference/errors.md",
        replaced={
            "NAME": "ride_totals",
            "CHANNEL": "receipts",
            "OFFSET": "1",
            "--shard N": "--shard 1",
            "orders/2 offset 4118": "rides/1 offset 1",
        },
        # It has no source, and nothing is dead-lettered.
        exits={"penstock reset source": 2, "penstock dead-letters drop": 2},
    )


def test_every_page_with_commands_is_followed() -> None:
    followed = set(re.findall(r'follow\(\s*"([^"]+)"', Path(__file__).read_text()))
    shown = {
        str(page.relative_to(ROOT))
        for page in PAGES
        if any(elsewhere(page, command) is None for command in commands(page))
    }

    assert shown == followed
    assert [where for where in ELSEWHERE.values() if not (ROOT / where).exists()] == []


def test_commands_that_a_text_names_exist(shop: Shop) -> None:
    """With their options, consumers and channels; those of blocks are run."""
    pipeline = shop.events.pipeline
    declared = {*pipeline.consumers, *pipeline.channels, *ELSEWHERE_DECLARED}
    wrong = [
        f"{page.name}: {line}: {found}"
        for page in PAGES
        for line in INLINE.findall(page.read_text())
        if (found := find_wrong(line, declared))
    ]
    assert wrong == []
    assert find_wrong("penstock consume rides_totals --drain", declared) == "rides_totals"
    assert find_wrong("penstock consume ride_totals --drains", declared) == "--drains"
    assert find_wrong("penstock channels remove rides", declared) == "remove"


def find_wrong(line: str, declared: set[str]) -> str | None:
    """What of a command line the program or the application does not know."""
    words = shlex.split(line.replace("…", ""))[1:]
    found: Any = None
    commands_: Any = COMMANDS
    while commands_ and words:
        if (name := words.pop(0)) not in commands_:
            return name
        found, commands_ = commands_[name], getattr(commands_[name], "commands", {})
    if commands_ or "--help" in words:
        return None
    options = {option for each in found.params for option in (*each.opts, *each.secondary_opts)}
    unknown = {word.partition("=")[0] for word in words if word.startswith("-")} - options
    if unknown:
        return min(unknown)
    given = found.make_context("", words, resilient_parsing=True).params
    names = [given.get(name) for name in ("name", "names", "consumer", "channel")]
    flat = [each for name in names for each in (name if isinstance(name, tuple | list) else [name])]
    return next((n for n in flat if n and n not in declared and not PLACEHOLDER.fullmatch(n)), None)
