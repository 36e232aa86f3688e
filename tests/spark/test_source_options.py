"""Each option of the sources means what the page says: its default, its unit, and where it is refused."""

from dataclasses import fields
from typing import Any

import pytest

from penstock.errors import InvalidSetting
from penstock.records import Scope
from penstock.spark.sources.dirty_members import KNOWN as ICK_KNOWN
from penstock.spark.sources.dirty_members import IckOptions
from penstock.spark.sources.source_options import KNOWN, GivenOptions, Options, ServerOptions
from penstock.spark.sources.subscription import StagedSince, Subscription, Where, parse_offsets, parse_time, parse_times

AT_US = 1_767_225_600_000_000
"""The first moment of 2026."""

RECORDS: dict[str, tuple[str, str, Any, Any]] = {
    "subscribe": ("a, b", "subscription", Subscription(("things",)), Subscription(("a", "b"))),
    "subscribePattern": ("a.*", "subscription", Subscription(("things",)), Subscription((), "a.*")),
    "assign": ('{"a": [1, 0]}', "subscription", Subscription(("things",)), Subscription(("a",), None, {"a": frozenset({0, 1})})),
    "shards": ("2", "shards", None, 2),
    "consumer": ("archive", "consumer", None, "archive"),
    "startingOffsets": ("latest", "starting", None, Where("latest")),
    "startingTimestamp": ("1767225600000", "starting", None, Where(StagedSince(AT_US))),
    "startingOffsetsByTimestamp": ('{"0": 1767225600000}', "starting", None, Where("earliest", {("", 0): StagedSince(AT_US)})),
    "startingOffsetsByTimestampStrategy": ("LATEST", "no_later_record", "error", "latest"),
    "endingOffsets": ("earliest", "ending", Where("latest"), Where("earliest")),
    "endingTimestamp": ("2026-01-01T00:00:00Z", "ending", Where("latest"), Where(StagedSince(AT_US))),
    "endingOffsetsByTimestamp": ('{"a": {"1": 7}}', "ending", Where("latest"), Where("latest", {("a", 1): StagedSince(7000)})),
    "maxRecordsPerTrigger": ("7", "max_records", None, 7),
    "maxOffsetsPerTrigger": ("7", "max_records", None, 7),
    "minRecordsPerTrigger": ("7", "min_records", None, 7),
    "minOffsetsPerTrigger": ("7", "min_records", None, 7),
    "maxTriggerDelay": ("250ms", "max_delay_s", 900, 0.25),
    "minPartitions": ("7", "min_partitions", None, 7),
    "maxRecordsPerPartition": ("7", "max_partition_records", None, 7),
    "failOnDataLoss": ("False", "fail_on_data_loss", True, False),
    "fetchOffset.numRetries": ("0", "retries", 3, 0),
    "fetchOffset.retryIntervalMs": ("0", "retry_interval_s", 1.0, 0.0),
    "beginsAt": ('{"1": 7}', "begins", None, {1: 7}),
    "entries": ("plain", "stored_as", "none", "plain"),
    "compression": ("zstd", "stored_as", "none", "zstd"),
    "namespace": ("n", "scope", Scope("penstock", "penstock"), Scope("penstock", "n")),
    "schema": ("s", "scope", Scope("penstock", "penstock"), Scope("s", "penstock")),
    "redisUrl": ("redis://r", "redis_url", None, "redis://r"),
    "databaseUrl": ("postgresql://p", "database_url", None, "postgresql://p"),
}  # fmt: skip
"""A value of each option; its attribute, without it and with it."""

SUBSCRIBING = {"subscribe", "subscribePattern", "assign"}
FOR_STREAMS, FOR_BATCHES = {"consumer"}, {"endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"}


def parse(given: dict[str, str], *, streaming: bool | None = None) -> Options:
    return Options.parse("penstock.log", given, streaming=streaming)


@pytest.mark.parametrize("option", RECORDS)
def test_an_option_sets_its_attribute_alone(option: str) -> None:
    value, attribute, default, expected = RECORDS[option]
    channel = {} if option in SUBSCRIBING else {"channel": "things"}
    bare, found = parse({"channel": "things"}), parse({**channel, option.upper(): value})

    assert getattr(bare, attribute) == default
    if expected is not None:
        assert getattr(found, attribute) == expected
    changed = {each.name for each in fields(Options) if getattr(bare, each.name) != getattr(found, each.name)}
    assert changed <= {attribute}


@pytest.mark.parametrize("option", RECORDS)
def test_an_option_of_streams_is_refused_to_batches_and_the_other_way(option: str) -> None:
    given = {**({} if option in SUBSCRIBING else {"channel": "things"}), option: RECORDS[option][0]}

    for streaming, refused in ((True, FOR_BATCHES), (False, FOR_STREAMS)):
        if option in refused:
            with pytest.raises(InvalidSetting, match=option):
                parse(given, streaming=streaming)
        else:
            parse(given, streaming=streaming)


def test_every_option_is_listed() -> None:
    """``includeHeaders`` is the schema's."""
    assert {*RECORDS, "channel", "includeHeaders"} == {*KNOWN}
    assert {*ICKS, "channel", "namespace", "schema", "redisUrl", "databaseUrl"} == {*ICK_KNOWN}


ICKS: dict[str, tuple[str, str, Any, Any]] = {
    "key": ("k", "key", "", "k"),
    "shards": ("3", "shards", None, 3),
    "maxMembersPerTrigger": ("9", "max_members", None, 9),
    "takeoverAfterSeconds": ("5", "takeover_after_s", 30, 5),
}


@pytest.mark.parametrize("option", ICKS)
def test_an_option_of_an_ick_sets_its_attribute(option: str) -> None:
    value, attribute, default, expected = ICKS[option]
    channel = {} if option == "key" else {"channel": "index"}

    assert getattr(IckOptions.parse({"channel": "index"}), attribute) == default
    found = IckOptions.parse({**channel, option: value})
    assert (getattr(found, attribute), found.shown) == (expected, "k" if option == "key" else "index")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("7us", 7e-6), ("7 ms", 0.007), ("7", 0.007), ("7s", 7), ("7m", 420), ("7min", 420), ("7 H", 25_200)),
        *((" 7d ", 604_800), ("0", 0), ("-7s", None), ("7.5s", None), ("7w", None), ("s", None), ("", None), ("\u0667s", None)),
    ],
)  # fmt: skip
def test_a_time_has_a_unit_of_sparks_or_is_in_milliseconds(text: str, seconds: float | None) -> None:
    given = {"channel": "things", "maxTriggerDelay": text}
    if seconds is None:
        with pytest.raises(InvalidSetting, match="a number with a unit"):
            parse(given)
    else:
        assert parse(given).max_delay_s == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "least", "number"),
    [("1", 1, 1), ("0", 1, None), ("0", 0, 0), ("-1", 0, None), ("1.0", 0, None), ("\u0661", 0, None), ("", 0, None), ("9" * 30, 0, int("9" * 30))],
)  # fmt: skip
def test_a_whole_number_is_in_digits_and_not_below_the_least(text: str, least: int, number: int | None) -> None:
    options = GivenOptions("s", {"n": text}, {"n"})
    if number is None:
        with pytest.raises(InvalidSetting, match=f"a whole number from {least}"):
            options.whole_number("n", least)
    else:
        assert options.whole_number("n", least) == number


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"0": -2}', "earliest"),
        ('{"0": -1}', "latest"),
        ('{"0": "earliest"}', "earliest"),
        ('{"0": "latest"}', "latest"),
        ('{"0": 1}', 1),
        *((f'{{"0": {wrong}}}', None) for wrong in ("0", "-3", "1.0", "true", '"1"', "null", "[1]")),
        ("Latest", "latest"),
        ("EARLIEST", "earliest"),
        ("none", None),
    ],
)
def test_a_place_is_a_word_or_an_offset_as_kafkas_source_has_them(text: str, place: Any) -> None:
    if place is None:
        with pytest.raises((ValueError, TypeError, AttributeError)):
            parse_offsets(text, "earliest")
        return
    found = parse_offsets(text, "earliest")
    assert (found.named.get(("", 0)) or found.default) == place


@pytest.mark.parametrize(
    ("text", "us"),
    [
        ("1767225600000", AT_US),
        ("0", 0),
        ("2026-01-01T00:00:00Z", AT_US),
        ("2026-01-01T02:00:00.000001+02:00", AT_US + 1),
        ("1969-12-31T23:59:59.5Z", -500_000),
        ("2026-01-01T00:00:00", None),
        ("-1", None),
        ("1.5", None),
    ],
)
def test_a_time_is_in_milliseconds_or_has_its_zone(text: str, us: int | None) -> None:
    if us is None:
        with pytest.raises(ValueError, match=r".*"):
            parse_time(text)
    else:
        assert parse_time(text).default == StagedSince(us)
        assert parse_times(f'{{"7": "{text}"}}', "latest") == Where("latest", {("", 7): StagedSince(us)})


def test_servers_are_those_of_the_options_or_else_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", "postgresql://environment")
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "redis://environment")
    own = ServerOptions(source="s", redis_url="redis://own", database_url="postgresql://own")
    others = ServerOptions(source="s")

    assert (own.redis(), own.database(), own.knows_database()) == ("redis://own", "postgresql://own", True)
    assert (others.redis(), others.database(), others.knows_database()) == (
        "redis://environment",
        "postgresql://environment",
        True,
    )
    for variable in ("PENSTOCK_DATABASE_URL", "PENSTOCK_REDIS_URL"):
        monkeypatch.delenv(variable)
    assert not others.knows_database()
    with pytest.raises(InvalidSetting, match="give option databaseUrl, or set PENSTOCK_DATABASE_URL"):
        others.database()
    with pytest.raises(InvalidSetting, match="give option redisUrl, or set PENSTOCK_REDIS_URL"):
        others.redis()
