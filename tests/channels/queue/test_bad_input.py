"""What a queue cannot take: a typed error at the call, and nothing is half done."""

from datetime import UTC, datetime
from typing import Any

import pytest
import redis

from penstock.channels.queue import NewMessage
from penstock.clients import FairQueue
from penstock.declaring.kinds import shard_for_key
from penstock.declaring.unique import TenantLimits, Unique
from penstock.errors import DeclarationError, InvalidMessage, StaleLease, TenantFull

pytestmark = pytest.mark.queue(streams=8, hand=2)

MEBIBYTE = 1024 * 1024
NAN, INF = float("nan"), float("inf")
NAIVE = datetime(2026, 1, 1)  # noqa: DTZ001

BAD_FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("tenant", {"tenant": ""}),
    ("tenant", {"tenant": "x" * 257}),
    ("tenant", {"tenant": "ä" * 129}),
    ("tenant", {"tenant": None}),
    ("tenant", {"tenant": 7}),
    ("tenant", {"tenant": "a\0b"}),
    ("tenant", {"tenant": "a\1b"}),
    ("tenant", {"tenant": "\ud800"}),
    ("key", {"key": "x" * 257}),
    ("key", {"key": b"k"}),
    ("id", {"id": ""}),
    ("id", {"id": 7}),
    ("payload", {"payload": b"x" * (MEBIBYTE + 1)}),
    ("payload", {"payload": "ä" * (MEBIBYTE // 2 + 1)}),
    ("payload", {"payload": {"a": 1}}),
    ("payload", {"payload": None}),
    ("payload", {"payload": "\ud800"}),
    ("headers", {"headers": "x" * (MEBIBYTE + 1)}),
    ("headers", {"headers": b"bytes"}),
    ("headers", {"headers": "\udfff"}),
    ("delay_s", {"delay_s": -0.1}),
    ("delay_s", {"delay_s": NAN}),
    ("delay_s", {"delay_s": INF}),
    ("delay_s", {"delay_s": "1"}),
    ("due", {"due": NAIVE}),
    ("due", {"due": 5}),
    ("due", {"due": datetime(2026, 1, 1, tzinfo=UTC), "delay_s": 1.0}),
    ("deadline", {"deadline": NAIVE}),
    ("deadline", {"deadline": "tomorrow"}),
    ("unique", {"unique": "name"}),
    ("unique.name", {"unique": Unique("")}),
    ("unique.until", {"unique": Unique("n", until="forever")}),  # type: ignore[arg-type]
    ("unique.within", {"unique": Unique("n", within="shard")}),  # type: ignore[arg-type]
    ("unique.window", {"unique": Unique("n", window="soon")}),
    ("unique.window", {"unique": Unique("n", window=-1)}),
    ("unique.window", {"unique": Unique("n", window=NAN)}),
    ("unique.window", {"unique": Unique("n", window=INF)}),
]


@pytest.mark.parametrize(("field", "values"), BAD_FIELDS)
def test_a_field_that_a_queue_cannot_take_is_named_at_the_call(
    field: str, values: dict[str, Any], queue: FairQueue, redis_client: redis.Redis
) -> None:
    with pytest.raises(InvalidMessage) as raised:
        queue.write(**({"tenant": "t", "payload": "p"} | values))

    assert raised.value.field == field
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400
    assert redis_client.dbsize() == 0


def test_values_at_the_limit_are_taken(queue: FairQueue) -> None:
    queue.write(
        "ä" * 128, b"x" * MEBIBYTE, key="k" * 256, id="i" * 256, headers="h" * MEBIBYTE,
        unique=Unique("u" * 256),
    )  # fmt: skip
    queue.write("t", b"")

    with queue.reader() as reader:
        leases = reader.read(10) + reader.read(10)
        assert {len(lease.message.payload) for lease in leases} == {0, MEBIBYTE}
        assert {lease.message.tenant for lease in leases} == {"ä" * 128, "t"}
        reader.done(leases)
    assert len(queue) == 0


@pytest.mark.parametrize(
    "shape",
    [
        {"streams": 0},
        {"streams": -1},
        {"streams": 257},
        {"streams": 4, "hand": 5},
        {"hand": 0},
        {"shards": 0},
        {"name": ""},
        {"name": "Jobs"},
        {"name": "a/b"},
        {"name": "x" * 64},
    ],
)
def test_a_shape_that_cannot_be_is_refused(shape: dict[str, Any], redis_client: redis.Redis) -> None:
    with pytest.raises(DeclarationError):
        FairQueue(redis_client, **({"name": "jobs"} | shape))


@pytest.mark.parametrize(
    "options",
    [
        {"lease_s": 0},
        {"lease_s": NAN},
        {"lease_s": 1e9},
        {"limit_s": 0},
        {"limit_s": NAN},
        {"attempts": 0},
        {"preferred": -1},
        {"preferred": 256},
    ],
)
def test_an_option_of_a_reader_that_cannot_be_is_refused(options: dict[str, Any], queue: FairQueue) -> None:
    [name] = options
    with pytest.raises(DeclarationError, match="preferred is .* 0 to 255$" if name == "preferred" else name):
        queue.reader(**options)


@pytest.mark.parametrize(
    "values",
    [
        {"weight": 0},
        {"weight": NAN},
        {"weight": 1e-9},
        {"weight": 1e9},
        {"weight": "3"},
        {"in_flight": 0},
        {"rate": -1},
        {"rate": INF},
        {"burst": 0},
        {"bytes": -5},
    ],
)
def test_a_limit_that_cannot_be_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidMessage) as raised:
        TenantLimits(**values)

    assert raised.value.field == next(iter(values))


@pytest.mark.parametrize("tenant", ["", "x" * 257, "a\0b"])
def test_limits_of_no_tenant_are_refused(tenant: str, queue: FairQueue) -> None:
    with pytest.raises(InvalidMessage):
        queue.limit(tenant, TenantLimits(weight=3))


@pytest.mark.parametrize("count", [0, -1])
def test_a_count_of_nothing_is_refused(count: int, queue: FairQueue) -> None:
    with queue.reader() as reader, pytest.raises(InvalidMessage, match="count"):
        reader.read(count)


def test_unknown_ids_are_said_to_be_unknown(queue: FairQueue) -> None:
    queue.write("t", "one")

    assert queue.delete("t", ["nobody"]) == ["unknown"]
    assert queue.explain("t", "nobody") is None
    assert len(queue) == 1


@pytest.mark.parametrize("delay_s", [-1.0, NAN, INF])
def test_a_delay_that_cannot_be_leaves_the_lease(delay_s: float, queue: FairQueue) -> None:
    queue.write("t", "one")
    with queue.reader() as reader:
        [lease] = reader.read()
        with pytest.raises(InvalidMessage):
            lease.snooze(delay_s)
        with pytest.raises(InvalidMessage):
            lease.fail("bad", delay_s=delay_s)
        with pytest.raises(InvalidMessage):
            lease.done(seconds=NAN)
        lease.done()
    assert len(queue) == 0


def test_any_reason_of_a_dead_letter_is_kept(queue: FairQueue) -> None:
    """It may be the text of any error."""
    queue.write("t", "one")
    with queue.reader() as reader:
        [lease] = reader.read()
        lease.dead("bad \ud800 \0 " + "x" * 100_000)

    [dead] = queue.dead_letters()
    assert dead.reason.startswith("bad ")
    assert len(dead.reason) < 10_000


def test_a_settled_lease_cannot_be_settled_otherwise(queue: FairQueue) -> None:
    queue.write("t", "one")
    with queue.reader() as reader:
        [lease] = reader.read()
        lease.done()
        lease.done()
        for settle in (lease.release, lambda: lease.dead("bad"), lambda: lease.snooze(1)):
            with pytest.raises(StaleLease):
                settle()
    assert queue.stats().done == 1


def test_a_full_tenant_is_told_so_and_others_write(queue: FairQueue) -> None:
    queue.limit("elephant", TenantLimits(bytes=10))
    queue.write("elephant", "x" * 10)

    with pytest.raises(TenantFull, match="elephant"):
        queue.write("elephant", "y")
    queue.write("mouse", "y")
    results = queue.write_many([NewMessage("elephant", "y"), NewMessage("mouse", "z")])
    assert [(each.is_kept, each.is_new) for each in results] == [(False, False), (True, True)]
    assert len(queue) == 3


def test_ids_may_have_spaces(queue: FairQueue) -> None:
    queue.write("t", "one", id="the first", unique=Unique("name"))

    assert queue.write("t", "two", unique=Unique("name")).duplicate_of == "the first"


def test_leases_of_the_same_id_in_two_shards_are_told_apart(redis_client: redis.Redis) -> None:
    """Ids are the writer's, and each shard knows its own."""
    queue = FairQueue(redis_client, "jobs", shards=2)
    tenants = {shard_for_key(f"t{number}", 2): f"t{number}" for number in range(8)}
    for tenant in tenants.values():
        queue.write(tenant, "one", id="same")
    with queue.reader() as reader:
        leases = reader.read(10)
        assert len({lease.message.shard for lease in leases}) == len(leases) == 2
        assert queue.delete(leases[0].message.tenant, ["same"]) == ["leased"]
        assert reader.done(leases) == [False, True]


def test_a_tenant_neither_deletes_nor_hides_another_ones_message(queue: FairQueue) -> None:
    queue.write("mine", "one", id="same")

    assert queue.delete("yours", ["same"]) == ["unknown"]
    with pytest.raises(InvalidMessage, match="the id of another tenant's message"):
        queue.write("yours", "other", id="same")
    assert queue.write("mine", "one", id="same").is_new is False
    assert queue.delete("mine", ["same"]) == ["waiting"]


def test_a_unique_name_of_several_shards_is_one_within_its_tenant(redis_client: redis.Redis) -> None:
    """A shard knows only its own names: 40 tenants got 8 messages of one name into 8 shards."""
    queue = FairQueue(redis_client, "divided", shards=8)
    everywhere, within = Unique("n"), Unique("n", within="tenant")

    with pytest.raises(InvalidMessage, match=r"^unique .* 8 shards.*within='tenant'"):
        queue.write("t", "x", unique=everywhere)
    assert len(queue) == 0
    for is_new in (True, False):
        made = [NewMessage(f"t{number}", "x", unique=within) for number in range(40)]
        assert {each.is_new for each in queue.write_many(made)} == {is_new}
    assert queue.write("t1", "x", unique=Unique("m", within="tenant")).is_new
