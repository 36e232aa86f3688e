"""Declarations that cannot work are refused at once."""

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from penstock import Ick, KeyLimits, Log, Pipeline, Queue, TenantLimits
from penstock.database.registry import RegisteredChannel
from penstock.declaring.declarations import ConsumerSpec, StagingRule, checked_changes
from penstock.errors import DeclarationError, InvalidMessage, InvalidName
from penstock.reconciling.reconciliation import find_reconciliations
from penstock.records import Record, Scope


class Base(DeclarativeBase):
    pass


class Ride(Base):
    __tablename__ = "rides"

    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str]


class NotMapped:
    id = 1


RIDES, JOBS = Log("rides"), Queue("jobs")


@pytest.mark.parametrize("name", ["a", "rides", "a-b_c.d", "0", "r" * 63])
def test_a_name_is_short_and_plain(name: str) -> None:
    assert Log(name).name == name


@pytest.mark.parametrize(
    "name", ["", "r" * 64, "Rides", "a:b", "{a}", "a b", "a\n", "a\x00", "ü", "-a", "a-", "*", "a/b", "'", None, 3]
)
def test_any_other_name_is_refused(name: Any) -> None:
    """Guarantee 23: one rule for identifiers."""
    with pytest.raises(InvalidName):
        Log(name)
    with pytest.raises(InvalidName):
        ConsumerSpec(name, RIDES, print)


def test_a_consumer_has_no_name_of_a_replay() -> None:
    """Both have checkpoints, and what they are is seen by their names."""
    Log("replay-3")
    with pytest.raises(InvalidName, match="replays have such names"):
        ConsumerSpec("replay-3", RIDES, print)


@pytest.mark.parametrize("schema", ["", "1a", "Penstock", "a-b", 'a"b', "s" * 64, "a b", None])
def test_a_schema_is_an_identifier_without_quotes(schema: Any) -> None:
    """Guarantee 31."""
    with pytest.raises(InvalidName):
        Pipeline(schema=schema)
    with pytest.raises(InvalidName, match="namespace"):
        Scope(namespace=schema)


@pytest.mark.parametrize("wrong", [{"shards": 1.5}, {"keep": timedelta(-1)}])
def test_a_channels_settings_are_whole_and_not_below_nothing(wrong: dict[str, Any]) -> None:
    with pytest.raises(DeclarationError, match=next(iter(wrong))):
        Log("rides", **wrong)


@given(st.text(st.characters(codec="utf-8"), min_size=1), st.integers(1, 1024))
def test_the_shard_of_a_key_is_its_sha256_modulo_the_shards(key: str, shards: int) -> None:
    expected = int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) % shards
    assert Log("rides", shards=shards).shard_for(key) == expected


def test_the_shards_of_keys_never_change() -> None:
    """Recorded here, because a change would break the order of every key."""
    assert [Log("rides", shards=8).shard_for(key) for key in ("1", "2", "ключ", "a:b")] == [3, 2, 2, 6]


def test_a_rule_may_name_a_single_kind_of_change() -> None:
    assert checked_changes("insert") == {"insert"}
    assert checked_changes(["insert", "delete"]) == {"insert", "delete"}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"type": NotMapped}, "not mapped"),
        ({"to": Log("others")}, "pipeline.add_channel"),
        ({"to": Log("rides", shards=8)}, "does not belong to this pipeline"),
        ({"on": []}, "it takes any of insert, update, delete"),
        ({"on": ["upsert"]}, "it takes any of"),
        ({"key": "number"}, "no attribute 'number'"),
        ({"data": ["id", "state"]}, "no attribute 'state'"),
        ({"data": "status"}, r"data=\['status'\]"),
        ({"capture": "psychic"}, "'orm' or 'trigger'"),
        ({"when": "status = 'x'"}, "SQL text"),
        ({"capture": "trigger", "key": lambda ride: ride.id}, "cannot call Python"),
        ({"capture": "trigger", "data": lambda ride: ride.id}, "cannot call Python"),
        ({"capture": "trigger", "when": lambda _: True}, "cannot call Python"),
    ],
)
def test_a_staging_rule_that_cannot_work_is_refused(wrong: dict[str, Any], reason: str) -> None:
    arguments: dict[str, Any] = {"type": Ride, "to": RIDES, "key": "id", **wrong}
    with pytest.raises(DeclarationError, match=reason):
        Pipeline([RIDES]).stages(arguments.pop("type"), **arguments)


def test_rules_compare_by_value() -> None:
    rule = Pipeline([RIDES]).stages(Ride, to=RIDES, key="id", data=["id", "status"])

    assert rule == StagingRule(Ride, RIDES, frozenset({"insert", "update", "delete"}), "id", ("id", "status"))
    assert hash(rule)


def handle(session: Session, records: Sequence[Record]) -> None: ...


def test_names_are_unique_in_a_pipeline() -> None:
    pipeline = Pipeline([RIDES])
    assert pipeline.add_channel(Log("rides")) == RIDES
    with pytest.raises(DeclarationError, match="declared twice"):
        pipeline.add_channel(Log("rides", shards=8))
    pipeline.consumer(reads=RIDES)(handle)
    with pytest.raises(DeclarationError, match="declared twice"):
        pipeline.consumer(reads=RIDES)(handle)


RECONCILED: list[tuple[dict[str, Any], str | None]] = [
    *(({"tolerance": {"w": 1, "v": by}}, "tolerance of v is .*; it takes 0 or more") for by in (nan, -0.1, -inf)),
    *(({"tolerance": {"v": by}}, None) for by in (0, 0.0, 5e-324, 1, inf)),
    *(({part: ["v", name]}, "is not the name of a column") for part in ("key", "columns") for name in ("", "a\0b", 3)),
    *(({"tolerance": {name: 1}}, "is not the name of a column") for name in ("", "a\0b", 3)),
    ({"key": ["b", "a"], "columns": ["c", "b"]}, "column b is in key"),
    ({"key": ["b", "a"], "tolerance": {"a": 1}}, "column a is in key"),
    ({"key": [], "columns": ["a"], "tolerance": {"a": 1}}, None),
]


@pytest.mark.parametrize(("options", "reason"), RECONCILED)
def test_a_reconciliation_that_cannot_work_is_refused(options: dict[str, Any], reason: str | None) -> None:
    pipeline = Pipeline([RIDES])
    pipeline.consumer(reads=RIDES, name="reader")(handle)
    arguments: dict[str, Any] = {"of": "reader", "state": "public.s", "key": "id", **options}
    with nullcontext() if reason is None else pytest.raises(DeclarationError, match=reason):
        pipeline.reconciliation(**arguments)(lambda _: "SELECT 1")


@pytest.mark.parametrize(
    ("preferred", "found"),
    [([], ["first", "other"]), (["second"], ["second", "other"]), (["other", "second"], ["other", "second"])],
)
def test_a_consumer_has_one_reconciliation_for_each_table_of_its_own(preferred: list[str], found: list[str]) -> None:
    """Of several of one table, a preferred one; those of another consumer are none of its."""
    pipeline = Pipeline([RIDES])
    for name in ("reader", "stranger", "nobody"):
        pipeline.consumer(reads=RIDES, name=name)(handle)
    for name, state, of in (
        ("strange", "s", "stranger"),
        ("first", "s", "reader"),
        ("second", "s", "reader"),
        ("other", "x.s", "reader"),
    ):
        pipeline.reconciliation(of=of, state=state, key="id", name=name)(lambda _: "SELECT 1")
    specs = [pipeline.get_reconciliation(name) for name in ("strange", *preferred)]

    assert [each.name for each in find_reconciliations(pipeline, "reader", specs)] == found
    with pytest.raises(DeclarationError, match="nobody has no reconciliation"):
        find_reconciliations(pipeline, "nobody", specs)


def test_channels_compare_by_value() -> None:
    """A channel that is built again, for instance in another module, is the same channel."""
    pipeline = Pipeline([RIDES, Ick("index")])
    pipeline.stages(Ride, to=Log("rides"), key="id")
    pipeline.marks_dirty(Ride, to=Ick("index"), key="id")
    pipeline.consumer(reads=Ick("index"), name="first")(print)
    with pytest.raises(DeclarationError, match="first already reads index"):
        pipeline.consumer(reads=Ick("index"), name="second")(print)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (1, 1),
        (64_000_000, 64_000_000),
        ("64MB", 64 << 20),
        ("64 mb", 64 << 20),
        ("1.5GB", 3 << 29),
        ("2KiB", 2048),
        ("500B", 500),
        (None, None),
    ],
)
def test_a_memory_budget_is_bytes_or_a_text_with_its_unit(given: int | str | None, expected: int | None) -> None:
    assert Log("rides", redis_memory=given).memory_bytes == expected


@pytest.mark.parametrize(
    "given", [0, -1, True, 1.5, "", "64", "64 megabytes", "-1MB", "0B", "1e3MB", "9999999TB", b"64MB"]
)
def test_any_other_memory_budget_is_refused(given: Any) -> None:
    with pytest.raises(DeclarationError, match=r"channel rides: redis_memory is .*64MB"):
        Log("rides", redis_memory=given)


def test_the_shards_of_all_generations_have_no_more_than_the_budget() -> None:
    channel = RegisteredChannel("rides", "log", 4, timedelta(0), redis_memory=1000)
    grown = replace(channel, generations=[6, 3])

    assert [channel.memory_part(n) for n in range(4)] == [250] * 4
    assert [grown.memory_part(n) for n in range(13)] == [50] * 10 + [166] * 3
    assert replace(channel, redis_memory=None).memory_part(0) is None


def test_limits_of_tenants_are_checked_and_registered_without_defaults() -> None:
    limits = {"a": TenantLimits(weight=3, is_paused=True), "": TenantLimits(in_flight=2)}
    queue = Queue("jobs", limits=limits)

    assert queue.limits_as_json["tenants"] == {"a": {"weight": 3, "is_paused": True}, "": {"in_flight": 2}}
    assert hash(queue) == hash(Queue("jobs"))
    with pytest.raises(DeclarationError, match=r"channel jobs: limits of 'a' is int; .*TenantLimits"):
        Queue("jobs", limits={"a": 3})  # type: ignore[dict-item]
    with pytest.raises(InvalidMessage, match="limits has a control character"):
        Queue("jobs", limits={"a\1": TenantLimits()})


def test_limits_of_keys_are_checked_and_of_several_shards_only_within_tenants() -> None:
    limits = {"": KeyLimits(in_flight=1), "api": KeyLimits(rate=10, burst=5)}

    assert Queue("jobs", key_limits=limits).limits_as_json == {
        "tenants": {},
        "keys": {"": {"in_flight": 1}, "api": {"rate": 10, "burst": 5}},
        "within": "queue",
    }
    assert Queue("jobs", shards=2, key_limits=limits, keys_within="tenant").limits_as_json["within"] == "tenant"
    with pytest.raises(
        DeclarationError, match=r"each of its 2 shards counts only its own messages: .*keys_within='tenant'"
    ):
        Queue("jobs", shards=2, key_limits=limits)
    with pytest.raises(DeclarationError, match="keys_within is 'shard'"):
        Queue("jobs", keys_within="shard")  # type: ignore[arg-type]
    with pytest.raises(InvalidMessage, match="in_flight is 0"):
        KeyLimits(in_flight=0)


NO_VALUES: tuple[Any, ...] = (None, "7 weeks", [], object(), True, -1)


@pytest.mark.parametrize("value", NO_VALUES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(
    "declare",
    [
        lambda value: Log("a", shards=value),
        lambda value: Log("a", keep=value),
        lambda value: Log("a", max_bytes=value),
        lambda value: Log("a", sources=value),
        lambda value: Queue("a", streams=value),
        lambda value: Queue("a", limits=value),
        *(
            lambda value, what=what: Pipeline([RIDES]).consumer(reads=RIDES, name="a", **{what: value})(
                lambda _session, _records: None
            )
            for what in ("batch", "attempts", "halt_after", "idle_timeout")
        ),
        *(
            lambda value, what=what: Pipeline([JOBS]).worker(reads=JOBS, name="a", **{what: value})(
                lambda _session, _job: None
            )
            for what in ("concurrency", "lease", "limit", "backoff")
        ),
    ],
)
def test_a_value_of_another_type_is_refused_where_it_is_declared(declare: Any, value: Any) -> None:
    if value == []:
        value = {}.keys  # a method that was not called; an empty list of sources is none
    with pytest.raises((DeclarationError, InvalidName)):
        declare(value)
