"""Records of tenants that had no room wait in Postgres: many such tenants do not keep others from being fed."""

import pytest

from fixtures.clients import RedisClient
from fixtures.constants import SetConstants
from penstock import Queue
from penstock.channels.queue import NewMessage
from penstock.clients import FairQueue
from penstock.database.connections import Connection
from penstock.declaring.unique import TenantLimits
from penstock.streaming import Streamer
from penstock.streaming.queues import REFILL_A_TENANT, REFILL_TENANTS
from penstock.testing import eventually

pytestmark = pytest.mark.channels(Queue("jobs"))

TENANTS = 1000

STAGE = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
SELECT 'jobs', 0, 't' || lpad(t::text, 4, '0'), 'send', 'receipt', '"waits"'
FROM generate_series(0, %s - 1) AS t, generate_series(1, %s) AS r
"""


def name(number: int) -> str:
    return f"t{number:04}"


@pytest.fixture
def queue(connection: Connection, redis_client: RedisClient, streamer: Streamer) -> FairQueue:
    """All tenants are full, and two more records of each wait in Postgres."""
    made = FairQueue(redis_client, "jobs")
    made.limit_all(TenantLimits(bytes=10))
    made.write_many([NewMessage(name(t), "0123456789") for t in range(TENANTS)])
    connection.execute(STAGE, (TENANTS, 2))
    streamer.drain()
    assert waiting(connection) == 2 * TENANTS
    return made


def waiting(connection: Connection, tenant: str = "%") -> int:
    [(count,)] = connection.execute(
        "SELECT count(*) FROM penstock.waiting_records WHERE NOT is_given AND tenant LIKE %s", (tenant,)
    ).fetchall()
    return int(count)


def care(streamer: Streamer) -> int:
    return streamer.opened().publisher.maintain_queues()


@pytest.fixture
def shortest_rounds(set_constants: SetConstants) -> None:
    """A round does as little as it may: as on a machine that is so slow that its time is over after the first step."""
    set_constants("streaming.queues", MAINTAIN_S=0.0)


@pytest.mark.usefixtures("shortest_rounds")
def test_a_tenant_that_has_room_again_is_fed_though_1000_others_are_full(
    queue: FairQueue, streamer: Streamer, connection: Connection
) -> None:
    """In some rounds of a second each; one tenant after the other."""
    for number in (TENANTS - 1, 500):
        queue.limit(name(number), TenantLimits())
        rounds = 0
        while waiting(connection, name(number)) and rounds < TENANTS:
            rounds += 1
            care(streamer)
        assert rounds <= 2 + TENANTS // REFILL_TENANTS


@pytest.mark.usefixtures("shortest_rounds")
def test_a_round_over_full_tenants_is_bounded_and_writes_nothing(
    queue: FairQueue, streamer: Streamer, connection: Connection, redis_client: RedisClient
) -> None:
    def changes() -> list[tuple[str]]:
        return connection.execute("SELECT xmin::text FROM penstock.waiting_records ORDER BY record_id").fetchall()

    assert len(queue) == TENANTS
    before = changes()
    for _ in range(5):
        redis_client.config_resetstat()
        assert care(streamer) == 0
        assert redis_client.info("commandstats")["cmdstat_evalsha"]["calls"] < 10
    assert changes() == before


@pytest.mark.slow
def test_when_all_have_room_again_all_is_fed(queue: FairQueue, streamer: Streamer, connection: Connection) -> None:
    queue.limit_all(None)
    eventually(lambda: care(streamer) >= 0 and waiting(connection) == 0, "all is fed", interval_s=0)
    assert len(queue) == 3 * TENANTS


@pytest.mark.usefixtures("shortest_rounds")
def test_a_tenant_with_room_for_all_is_fed_more_than_one_record_a_round(
    queue: FairQueue, streamer: Streamer, connection: Connection, set_constants: SetConstants
) -> None:
    """All of them, in a round that has the time."""
    connection.execute(STAGE, (1, 2 * REFILL_A_TENANT))
    streamer.drain()
    queue.limit(name(0), TenantLimits())
    before = waiting(connection, name(0))
    while waiting(connection, name(0)) == before:
        care(streamer)
    assert before > before - waiting(connection, name(0)) >= REFILL_A_TENANT
    set_constants("streaming.queues", MAINTAIN_S=600.0)
    care(streamer)
    assert waiting(connection, name(0)) == 0


@pytest.mark.usefixtures("shortest_rounds")
def test_of_a_tenant_with_room_for_some_the_others_are_left_as_they_are(
    queue: FairQueue, streamer: Streamer, connection: Connection
) -> None:
    """None is noted again."""
    rows = "SELECT record_id, xmin::text FROM penstock.waiting_records WHERE NOT is_given AND tenant = %s"
    connection.execute(STAGE, (1, 8))
    streamer.drain()
    before = connection.execute(rows, (name(0),)).fetchall()
    queue.limit(name(0), TenantLimits(bytes=40))
    while len(left := connection.execute(rows, (name(0),)).fetchall()) == len(before):
        care(streamer)

    assert 0 < len(left) < len(before) - 1
    assert {*left} <= {*before}


@pytest.mark.usefixtures("shortest_rounds")
def test_tenants_beyond_the_bytes_of_a_step_come_next(
    redis_client: RedisClient, streamer: Streamer, connection: Connection, set_constants: SetConstants
) -> None:
    """A step that reads one record of three tenants is not taken for one that has tried all three."""
    made = FairQueue(redis_client, "jobs")
    made.limit_all(TenantLimits(bytes=10))
    made.write_many([NewMessage(name(t), "0123456789") for t in range(3)])
    connection.execute(STAGE, (3, 1))
    streamer.drain()
    made.limit(name(2), TenantLimits())
    set_constants("streaming.unpublished", BATCH_BYTES=1)
    assert [waiting(connection, name(t)) for t in range(3)] == [1, 1, 1]

    fed = sum(care(streamer) for _ in range(4))

    assert fed == 1
    assert [waiting(connection, name(t)) for t in range(3)] == [1, 1, 0]
