"""What a halt, an error, ``status``, ``explain`` or ``doctor`` says to type is typed here, literally and in its order.

The consumer that runs all the time, as in production, runs before each command and after it: a second or more for
each test, because every command is a process.
"""

import json
import re
import shlex

import pytest
import redis

from fixtures.command_line import CommandLine
from penstock.channels.routing import log_keys
from penstock.consuming.dead_lettering import how_to_resume
from penstock.database.connections import Connection
from penstock.records import Shard, ShardName

SHOP = """
from pathlib import Path
from sqlalchemy import delete, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from penstock import Log, Pipeline

class Base(DeclarativeBase):
    pass

class Copy(Base):
    __tablename__ = "copies"
    __table_args__ = {"schema": "public"}
    id: Mapped[str] = mapped_column(primary_key=True)
    fare: Mapped[int]

rides = Log("rides", shards=2)
pipeline = Pipeline([rides])

@pipeline.consumer(reads=rides, attempts=1, halt_after=20)
def copies(session, records):
    if Path("broken").exists() or Path("poison").exists() and records[0].key == "ride-0":
        raise KeyError("fare")
    for record in records:
        if record.action == "delete":
            session.execute(delete(Copy).filter_by(id=record.data["id"]))
        else:
            session.merge(Copy(id=record.data["id"], fare=record.data["fare"]))
        session.execute(text("INSERT INTO public.applied VALUES (:id)"), {"id": record.id})
    if Path("commits").exists():
        session.flush()
        session.connection().connection.driver_connection.commit()

@pipeline.reconciliation(of=copies, state="public.copies", key="id")
def canonical(tables):
    return "SELECT id, fare FROM public.rides"
"""
"""With the handler of the README; and how often it has applied each record."""

KEYS = 6

CHANGE = f"""
WITH changed AS (
    INSERT INTO public.rides SELECT 'ride-' || i, %(from)s + i FROM generate_series(0, {KEYS} - 1) AS i
    ON CONFLICT (id) DO UPDATE SET fare = excluded.fare
    RETURNING id, fare
)
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
SELECT 'rides', right(id, 1)::int %% 2, id, 'update', 'ride', jsonb_build_object('id', id, 'fare', fare)
FROM changed ORDER BY id
"""

COMMAND = re.compile(r"penstock ((?:reset|dead-letters(?! list)|consumers|channels)(?: (?:'[^']+'|[^\s,;:.)→']+))+)")
"""A command that changes something, up to the end of its clause."""


class Shop:
    """Rides, and a consumer that copies them."""

    def __init__(self, connection: Connection, penstock: CommandLine) -> None:
        self.connection, self.penstock = connection, penstock
        self.declare()
        connection.execute("CREATE TABLE public.rides (id text PRIMARY KEY, fare int NOT NULL)")
        connection.execute("CREATE TABLE public.copies (id text PRIMARY KEY, fare int NOT NULL)")
        connection.execute("CREATE TABLE public.applied (record_id bigint)")

    def declare(self, *changes: tuple[str, str]) -> None:
        """Writes the application, changed in some places."""
        application = SHOP
        for before, after in changes:
            application = application.replace(before, after)
        (self.penstock.directory / "shop.py").write_text(application)

    def change(self, times: int, first: int) -> None:
        """Changes each ride so often, and publishes the records."""
        for number in range(times):
            self.connection.execute(CHANGE, {"from": first + KEYS * number})
        assert self.penstock("stream", "--drain").returncode == 0

    def deploy(self, *defects: str) -> None:
        """A release with these defects and no other."""
        for name in ("broken", "poison", "commits"):
            (self.penstock.directory / name).unlink(missing_ok=True)
        for name in defects:
            (self.penstock.directory / name).touch()

    def consume(self) -> str:
        """What the consumer says when it has done what it can."""
        return self.penstock("consume", "copies", "--drain").stderr

    def follow(self, said: str) -> list[tuple[str, int]]:
        """Types each command of a text."""
        typed = []
        for command in COMMAND.findall(said):
            self.consume()
            typed.append((command, self.penstock(*shlex.split(command)).returncode))
            self.consume()
        return typed

    def halted(self) -> list[str]:
        """What ``status`` says of halted shards."""
        lines = self.penstock("status").stdout.splitlines()
        return [line for line in lines if line.startswith("halted: ")]

    def stale(self) -> list[tuple[str, int, int]]:
        """Rides that are not as their copies."""
        return self.connection.execute(
            "SELECT id, r.fare, c.fare FROM public.rides r FULL JOIN public.copies c USING (id) "
            "WHERE r.fare IS DISTINCT FROM c.fare"
        ).fetchall()

    def applied(self) -> tuple[object, ...] | None:
        """Records that were applied, and how often."""
        return self.connection.execute("SELECT count(DISTINCT record_id), count(*) FROM public.applied").fetchone()


@pytest.fixture
def shop(connection: Connection, penstock: CommandLine) -> Shop:
    return Shop(connection, penstock)


@pytest.mark.slow
def test_after_the_brake_every_key_ends_with_its_newest_record(shop: Shop) -> None:
    """Guarantee 21: 20 dead letters over three keys, and newer records of each behind the halt."""
    shop.deploy("broken")
    shop.change(8, first=0)
    shop.consume()
    said = shop.halted()
    shop.change(3, first=1000)
    shop.deploy()

    assert shop.follow(said[0]) == [
        ("dead-letters retry copies --all", 0),
        ("reset checkpoint copies --resume --apply", 0),
    ]
    assert (shop.stale(), shop.applied()) == ([], (11 * KEYS, 11 * KEYS))
    assert shop.halted() == []


@pytest.mark.slow
def test_the_other_order_refuses_what_came_too_late(shop: Shop) -> None:
    """Guarantee 21: as when a release that works was started before anybody looked."""
    shop.deploy("broken")
    shop.change(8, first=0)
    shop.consume()
    shop.change(3, first=1000)
    shop.deploy()
    shop.penstock("reset", "checkpoint", "copies", "--resume", "--apply")
    shop.consume()

    done = shop.penstock("dead-letters", "retry", "copies", "--all")

    assert done.returncode == 1
    assert "superseded" in done.stdout
    assert shop.stale() == []
    dropped, applied = COMMAND.findall(done.stderr)
    assert shop.follow(f"penstock {dropped}") == [("dead-letters drop copies --superseded --apply", 0)]
    assert (applied, shop.stale()) == ("dead-letters retry copies --superseded", [])
    assert json.loads(shop.penstock("dead-letters", "list", "--json").stdout) == []


@pytest.mark.slow
def test_whoever_names_a_halted_consumer_says_the_same(shop: Shop) -> None:
    """The command that drains it, ``doctor``, ``explain`` and ``reconcile``; without dead letters there is nothing to retry."""
    shop.deploy("broken")
    shop.change(8, first=0)

    def said() -> list[list[str]]:
        texts = [shop.consume()]
        for command in ("doctor", f"explain {8 * KEYS}", "reconcile copies"):
            done = shop.penstock(*command.split())
            texts.append(done.stdout + done.stderr)
        return [sorted({*COMMAND.findall(text)}) for text in texts]

    resume = "reset checkpoint copies --resume --apply"
    assert said() == [["dead-letters retry copies --all", resume]] * 4
    shop.connection.execute("DELETE FROM penstock.dead_letters")
    shop.connection.execute("UPDATE penstock.checkpoints SET halted = 'because'")
    assert said() == [[resume]] * 4


@pytest.mark.slow
def test_a_superseded_dead_letter_is_explained(shop: Shop) -> None:
    shop.deploy("poison")
    shop.change(1, first=0)
    shop.consume()
    shop.deploy()
    shop.change(1, first=100)
    shop.consume()

    said = shop.penstock("explain", "1").stdout
    dropped, applied = COMMAND.findall(said)
    assert shop.follow(f"penstock {applied}") == [("dead-letters retry copies 'rides/0 offset 1' --superseded", 0)]
    assert dropped == "dead-letters drop copies 'rides/0 offset 1' --apply"
    assert (len(shop.stale()), shop.applied()) == (1, (2 * KEYS, 2 * KEYS))


@pytest.mark.slow
def test_after_a_commit_in_a_handler_nothing_is_applied_twice(shop: Shop) -> None:
    """Guarantee 4: each shard goes on behind what has taken effect."""
    shop.deploy("commits")
    shop.change(2, first=0)
    elsewhere = shop.consume()
    said = shop.halted()
    for command in ("doctor", "explain 1", "reconcile copies"):
        done = shop.penstock(*command.split())
        elsewhere += done.stdout + done.stderr
    shop.change(1, first=100)
    shop.deploy()

    # To resume it where it is would apply all of it twice.
    assert "type the command that penstock status shows" in elsewhere
    assert {*COMMAND.findall(elsewhere)} <= {*COMMAND.findall("; ".join(said))}

    assert [shop.follow(each) for each in said] == [
        [(f"reset checkpoint copies --to 'rides/{shard} offset 6' --resume --apply", 0)] for shard in (0, 1)
    ]
    assert (shop.stale(), shop.applied()) == ([], (3 * KEYS, 3 * KEYS))


@pytest.mark.slow
def test_after_a_commit_in_a_retry_nothing_is_applied_twice(shop: Shop) -> None:
    """Guarantee 4."""
    shop.deploy("poison")
    shop.change(1, first=0)
    shop.consume()
    shop.deploy("commits")
    said = shop.penstock("dead-letters", "retry", "copies", "--all").stderr
    shop.deploy()

    assert shop.follow(said) == [("dead-letters drop copies 'rides/0 offset 1' --apply", 0)]
    assert (shop.stale(), shop.applied()) == ([], (KEYS, KEYS))


@pytest.mark.slow
def test_behind_a_gap_the_consumer_goes_on_with_what_there_is(shop: Shop, redis_client: redis.Redis) -> None:
    """Guarantee 12: records that were removed before it had passed them are passed over by name, and no other."""
    shop.change(1, first=0)
    shop.consume()
    shop.change(2, first=100)
    shop.change(2, first=200)
    shop.change(1, first=300)
    shop.connection.execute("DELETE FROM penstock.journal WHERE shard = 0 AND first_offset BETWEEN 4 AND 9")
    redis_client.xtrim(log_keys("penstock", ShardName("rides", Shard(0))).stream, minid="16-0", approximate=False)
    shop.consume()

    [said] = shop.halted()
    assert shop.follow(said) == [("reset checkpoint copies --to 'rides/0 offset 9' --resume --apply", 0)]
    assert (shop.stale(), shop.applied()) == ([], (6 * KEYS - 6, 6 * KEYS - 6))


@pytest.mark.slow
def test_a_repair_that_dead_letters_prevent(shop: Shop) -> None:
    """Guarantee 28: what can be retried is applied, and the repair makes up for the rest."""
    shop.deploy("poison")
    shop.change(1, first=0)
    shop.consume()
    said = shop.penstock("reconcile", "copies", "--apply").stderr

    assert shop.follow(said) == [("dead-letters retry copies --all", 1), ("dead-letters drop copies --all --apply", 0)]
    assert shop.penstock("reconcile", "copies", "--apply").returncode == 0
    assert shop.stale() == []


@pytest.mark.slow
def test_what_is_parked_in_another_shard_is_retried_with_the_first_of_its_key(shop: Shop) -> None:
    """Guarantee 6: the number of shards was changed between the two."""
    shop.declare(("attempts=1", "attempts=1, park_key=True"))
    shop.deploy("poison")
    shop.change(1, first=0)
    shop.consume()
    reshard = shop.penstock("channels", "reshard", "rides", "--shards", "3", "--apply")
    assert reshard.returncode == 0, reshard.stderr
    shop.declare(("attempts=1", "attempts=1, park_key=True"), ("shards=2", "shards=3"))
    shop.change(1, first=100)
    shop.consume()
    shop.deploy()

    said = shop.penstock("explain", str(KEYS + 1)).stdout
    assert shop.follow(said) == [("dead-letters retry copies 'rides/0 offset 1' --parked", 0)]
    assert (shop.stale(), shop.applied()) == ([], (2 * KEYS, 2 * KEYS))


RESUME = "penstock reset checkpoint reader --resume --apply"
ACCEPT = "penstock reset source reader eu"


@pytest.mark.parametrize(
    ("channel", "reason", "has_letters", "commands"),
    [
        ("things", None, False, f"then: {RESUME}"),
        ("things", None, True, f"then, in this order: penstock dead-letters retry reader --all, and {RESUME}"),
        ("things@eu", "ValueError", False, f"then: {RESUME}"),
        ("things@eu", f"it was restored. Accept it: {ACCEPT} --apply", True, f"then: {ACCEPT}"),
        ("things", f"it was restored. Accept it: {ACCEPT} --apply", False, f"then: {RESUME}"),
        ("things", "pass it: --to 'things/0 offset 5'", True, "then type the command that penstock status shows"),
        (
            "things@eu",
            f"{ACCEPT} --to 'things@eu/0 offset 5'",
            True,
            "then type the command that penstock status shows",
        ),
        ("things", "pass it: --to 'things/1 offset 5'", False, f"then: {RESUME}"),
    ],
)
def test_a_halted_shard_names_the_commands_that_resume_it(
    channel: str, reason: str | None, commands: str, *, has_letters: bool
) -> None:
    assert how_to_resume("reader", ShardName(channel, Shard(0)), reason, has_letters) == commands
