"""``status``, ``doctor``, ``verify``, ``tail`` and ``reset epoch`` know queues, and the first four change nothing."""

import json
import math
from datetime import timedelta
from typing import Any

import pytest
import redis

from fixtures.command_line import CommandLine
from fixtures.constants import SetConstants
from fixtures.inspecting import Diagnose
from fixtures.redis import everything
from penstock import Log, Pipeline, Queue
from penstock.channels.queue.inspection import CheckedShard, oldest_messages
from penstock.clients import FairQueue
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.declaring.unique import TenantLimits
from penstock.errors import ForeignQueue
from penstock.operating.doctor.check import CheckResult
from penstock.operating.doctor.redis_checks import check_clocks
from penstock.operating.jobs.queue_limits import LimitChange, describe_limits
from penstock.operating.reset.epoch import reset_epoch
from penstock.operating.status.gathering import status
from penstock.operating.status.snapshot import ShardStatus
from penstock.records import Shard, ShardName
from penstock.streaming import Streamer
from penstock.verifying.verification import InlineExaminer, verify

pytestmark = pytest.mark.channels(Queue("jobs", keep=timedelta(0)), Log("things", shards=1))

STAGE = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, headers)
SELECT 'jobs', 0, %s, 'send', 'receipt', jsonb_build_object('number', i), %s::jsonb
FROM generate_series(1, %s) AS i
"""


def stage(connection: Connection, count: int, tenant: str = "a", headers: str | None = None) -> None:
    connection.execute(STAGE, (tenant, headers, count))


def finish(connection: Connection, ids: list[str]) -> None:
    connection.execute("SELECT penstock.finish_records('jobs', %s)", ([int(i) for i in ids],))


def shown(connection: Connection, client: Any, flow: Pipeline) -> ShardStatus:
    [jobs] = [c for c in status(Store(connection), client, flow).channels if c.channel == "jobs"]
    assert jobs.kind == "queue"
    return jobs.shards[0]


def of(findings: list[CheckResult], check: str) -> list[CheckResult]:
    return [finding for finding in findings if finding.check == check]


def test_status_shows_what_waits_and_where(
    connection: Connection, redis_client: redis.Redis, flow: Pipeline, streamer: Streamer, queue: FairQueue
) -> None:
    queue.limit("full", TenantLimits(bytes=5))
    stage(connection, 5)
    stage(connection, 2, "full")
    stage(connection, 1, headers='{"penstock": {"delay_ms": 60000}}')
    stage(connection, 1, headers='{"penstock": {"delay_ms": 7200000}}')
    streamer.drain()
    with queue.reader() as reader:
        leases = reader.read(3)
        leases[0].dead("broken")
        before = everything(redis_client)

        found = shown(connection, redis_client, flow)

        assert found.queue is not None
        assert (found.queue.waiting, found.queue.leased, found.queue.delayed) == (2, 2, 1)
        assert (found.queue.dead, found.in_postgres, found.published) == (1, 3, 9)
        assert found.queue.oldest_s is not None
        assert (found.entries, found.first, found.damage) == (None, None, None)
        assert everything(redis_client) == before


def test_a_queue_that_was_never_written_is_empty(
    connection: Connection, redis_client: redis.Redis, flow: Pipeline
) -> None:
    found = shown(connection, redis_client, flow)

    assert found.queue is not None
    assert (found.queue.waiting, found.queue.oldest_s, found.damage) == (0, None, None)
    assert redis_client.keys() == []


def test_a_foreign_key_is_damage_and_doctor_names_it(
    diagnosed: Diagnose, connection: Connection, redis_client: redis.Redis, flow: Pipeline, streamer: Streamer
) -> None:
    stage(connection, 1)
    streamer.drain()
    redis_client.delete("penstock:{jobs/0}:q-ages")
    redis_client.set("penstock:{jobs/0}:q-ages", "somebody's")

    assert "another type" in (shown(connection, redis_client, flow).damage or "")
    [found] = diagnosed("queues")
    assert found.grade == "error"
    assert "penstock:{jobs/0}:q-ages holds a string" in found.message


def test_a_score_that_is_no_time_is_named(
    connection: Connection, redis_client: redis.Redis, flow: Pipeline, streamer: Streamer
) -> None:
    """Guarantee 30."""
    stage(connection, 1)
    stage(connection, 1, headers='{"penstock": {"delay_ms": 60000}}')
    streamer.drain()
    [jobs] = flow.channels["jobs"].shard_names
    for name in ("q-ages", "q-delayed"):
        key = f"penstock:{{jobs/0}}:{name}"
        ids: Any = redis_client.zrange(key, 0, -1)
        redis_client.zadd(key, dict.fromkeys(ids, math.inf))

    assert "is not a time" in (shown(connection, redis_client, flow).damage or "")
    with pytest.raises(ForeignQueue, match="is not a time"):
        FairQueue(redis_client, "jobs").stats()
    with pytest.raises(ForeignQueue, match=r"jobs/0: .*is not a time"):
        oldest_messages(redis_client, "penstock", [jobs], 1)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        *(("q-waiting", "streams"), ("q-parked", "parked"), ("q-messages", "messages")),
        *(("q-ages", "ages"), ("q-ready", "tenants"), ("q-lanes", "keys"), ("s", "streams")),
    ],
)
def test_doctor_finds_parts_of_a_queue_that_do_not_agree_and_names_the_repair(
    name: str, part: str, connection: Connection, redis_client: redis.Redis, diagnosed: Diagnose, streamer: Streamer
) -> None:
    stage(connection, 1)
    stage(connection, 1, headers='{"penstock": {"key": "k"}}')
    stage(connection, 1, headers='{"penstock": {"delay_ms": 60000}}')
    streamer.drain()
    for key in redis_client.keys(f"penstock:{{jobs/0}}:{name}*"):
        redis_client.delete(key)
    before = everything(redis_client)

    [found] = diagnosed("queues")
    assert found.grade == "warning"
    assert part in found.message.partition("do not agree: ")[2].split(", ")
    assert "penstock stream" in found.fix
    assert everything(redis_client) == before

    streamer.drain()
    [found] = diagnosed("queues")
    assert found.grade == "ok"


def test_doctor_is_content_with_a_queue_that_is_worked_on(
    connection: Connection, diagnosed: Diagnose, streamer: Streamer, queue: FairQueue, set_constants: SetConstants
) -> None:
    stage(connection, 3)
    streamer.drain()
    finish(connection, [lease.message.id for lease in queue.reader().read(1)])

    findings = diagnosed()
    assert [f for f in findings if f.grade == "error" and f.check != "durability"] == []
    [found] = of(findings, "queues")
    assert found.message.startswith("1 undamaged; 3 messages not done")

    set_constants("operating.doctor.redis_checks", SLOW_S=-1.0)
    [found] = diagnosed("queues")
    assert found.grade == "warning"
    assert "3 messages waiting or worked on" in found.message
    assert "run more workers" in (found.fix or "")
    connection.execute(
        'INSERT INTO penstock.checkpoints (consumer, channel, shard, "offset", epoch, halted) '
        "VALUES ('worker', 'jobs', 0, 0, 1, 'because')"
    )
    [found] = diagnosed("queues")
    assert found.fix == "resume the halted shards of worker"


def test_doctor_names_a_queues_clock_that_is_far_ahead_and_the_command_that_sets_it_back(
    connection: Connection, redis_client: redis.Redis, diagnosed: Diagnose, streamer: Streamer
) -> None:
    stage(connection, 1)
    streamer.drain()
    redis_client.hincrbyfloat("penstock:{jobs/0}:q-meta", "clock", 3_600_000)

    found, *_ = diagnosed("queues")
    assert found.grade == "warning"
    assert "jobs/0: its clock is 60 min ahead of that of Redis" in found.message

    command = found.fix.rpartition(":")[0].split()
    assert command[:2] == ["redis-cli", "HINCRBY"]
    redis_client.hincrby(command[2], command[3], int(command[4]))
    streamer.drain()
    [found] = diagnosed("queues")
    assert found.grade == "ok"


def test_doctor_names_servers_of_which_the_clocks_are_apart() -> None:
    shard = ShardName("jobs", Shard(0))
    right = CheckedShard(server_s=1000.0)

    assert list(check_clocks("penstock", {shard: right}, 1003.0)) == []
    for postgres_s, expected in ((700.0, "5 min ahead of"), (1010.0, "10 s behind")):
        [found] = check_clocks("penstock", {shard: right}, postgres_s)
        assert f"jobs/0: the clock of Redis is {expected} that of Postgres" in found.message


def test_doctor_tells_of_dead_letters(
    connection: Connection, diagnosed: Diagnose, streamer: Streamer, queue: FairQueue
) -> None:
    stage(connection, 1)
    streamer.drain()
    queue.reader().read()[0].dead("broken")

    [found] = diagnosed("queues")
    assert "1 dead letter" in found.message


def test_verify_finds_a_queue_in_order_while_its_records_go(
    connection: Connection, redis_client: redis.Redis, redis_url: str, streamer: Streamer, queue: FairQueue
) -> None:
    stage(connection, 10)
    streamer.drain()
    finish(connection, [lease.message.id for lease in queue.reader().read(4)])
    examiner = InlineExaminer(Store(connection), redis_url)

    done = verify(Store(connection), redis_client, examiner)

    assert not done.findings
    connection.execute("UPDATE penstock.journal SET record_ids = record_ids[2:] || record_ids[1:1]")
    assert verify(Store(connection), redis_client, examiner).findings


def test_tail_prints_what_is_not_done_and_why(connection: Connection, penstock: CommandLine) -> None:
    (penstock.directory / "shop.py").write_text(
        'from penstock import Pipeline, Queue\n\npipeline = Pipeline([Queue("jobs")])\n'
    )
    stage(connection, 2, "account-7")
    assert penstock("stream", "--drain").returncode == 0

    done = penstock("tail", "jobs", "--json")
    first, second = map(json.loads, done.stdout.splitlines())
    assert (first["tenant"], first["state"]) == ("account-7", "waiting")
    assert second["why"] == "waits: 1 message of its tenant ahead, and 0 tenants"
    assert "account-7  waits: 0 messages" in penstock("tail", "jobs").stdout
    refused = penstock("tail", "jobs", "--follow")
    assert refused.returncode == 2
    assert "is a queue" in refused.stderr
    assert "queue" in penstock("status").stdout


def test_a_new_epoch_writes_the_queue_again_from_what_is_outstanding(
    connection: Connection, redis_client: redis.Redis, flow: Pipeline, streamer: Streamer, queue: FairQueue
) -> None:
    """Postgres loses the last commits: their ids are given out again, and must not meet the old messages."""
    queue.limit("a", TenantLimits(weight=2.0))
    stage(connection, 4)
    streamer.drain()
    finish(connection, [lease.message.id for lease in queue.reader().read(1)])
    stage(connection, 3, "lost")
    streamer.drain()
    streamer.close()
    connection.execute("DELETE FROM penstock.journal WHERE last_offset > 4")
    connection.execute("DELETE FROM penstock.staged_records WHERE key = 'lost'")
    connection.execute("SELECT setval('penstock.staged_records_id_seq', 4)")

    plan = reset_epoch(connection, redis_client, flow, apply=True)
    assert (plan.missing, [each.shard for each in plan.deleted]) == (0, ["jobs/0"])
    assert redis_client.exists("penstock:{jobs/0}:q-limits")
    stage(connection, 2, "new")
    streamer.drain()

    with queue.reader() as reader:
        found = [lease.message.tenant for lease in reader.read(100)]
    assert sorted(found) == ["a", "a", "a", "new", "new"]


def test_a_done_record_is_no_reason_for_a_new_epoch(
    connection: Connection, redis_client: redis.Redis, flow: Pipeline, streamer: Streamer, queue: FairQueue
) -> None:
    stage(connection, 4)
    streamer.drain()
    finish(connection, [lease.message.id for lease in queue.reader().read(2)])

    assert reset_epoch(connection, redis_client, flow).reason is None


@pytest.mark.parametrize(
    ("limits", "text", "options"),
    [
        ({}, "none", "--remove"),
        ({"is_paused": True}, "paused", "--pause"),
        (
            {"rate": 5, "is_paused": True, "max_running": 2},
            "rate 5, paused, max_running 2",
            "--rate 5 --pause --max-running 2",
        ),
    ],
)
def test_limits_are_described_and_a_change_names_its_command(limits: dict[str, Any], text: str, options: str) -> None:
    assert describe_limits(limits) == text
    change = LimitChange("jobs", "tenant", "a b", limits)
    assert change.command == f"penstock queues limit jobs --tenant 'a b' {options} --apply"
