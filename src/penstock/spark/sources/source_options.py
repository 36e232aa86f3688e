"""Options of the data sources, named as in Spark's Kafka source where it has them."""

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from pyspark.sql.types import StructField, StructType

from penstock.declaring.kinds import LogChannel, checked_name
from penstock.display import mask
from penstock.errors import DeclarationError, InvalidSetting
from penstock.records import DEFAULT_SCOPE, Scope
from penstock.spark.sources.subscription import (
    EARLIEST,
    LATEST,
    ShardPlace,
    Subscription,
    Where,
    parse_offsets,
    parse_time,
    parse_times,
)

_OF_A_TABLE = "option."
"""Prefix of the options of a table that is being created; Spark also gives them without it, among
other properties."""

_KEPT = "penstock.options"
"""Metadata key of a table's first column that holds the table's options."""

SPARKS_OWN = frozenset({"checkpointlocation", "path", "queryname"})
"""Options for Spark itself, which it passes on to the source."""

_DATABASE_URL, _REDIS_URL = "PENSTOCK_DATABASE_URL", "PENSTOCK_REDIS_URL"
_OFFSETS = (
    "'earliest', 'latest', or JSON with an offset for each shard, "
    'such as {"0": 4118, "1": "latest"}'
)
_TIMES = (
    'JSON with a time for each shard, such as {"0": 1767225600000} or {"0": "2026-01-01T00:00:00Z"}'
)
_TIME = "milliseconds since 1970, or a time with its time zone, such as 2026-01-01T00:00:00Z"
_NO_OPTIONS = (
    ". In Spark's catalog, a table that names its columns has no options: "
    "SELECT * FROM t WITH ('channel' = '…')"
)

_Parsed = TypeVar("_Parsed")

_UNITS = {"us": 1e-6, "ms": 1e-3, "": 1e-3, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}


class GivenOptions:
    """Options of one source as Spark passes them: names in any case, values as text."""

    def __init__(
        self, source: str, raw_options: Mapping[str, Any], known_names: Collection[str]
    ) -> None:
        """Takes the options; ``known_names`` are their names as documented."""
        names = {name.lower() for name in known_names} | SPARKS_OWN
        values = {str(name).lower(): str(value) for name, value in raw_options.items()}
        if of_table := find_table_options(raw_options):
            # What else is not known are properties of the table, such as its owner.
            values = of_table | {name: values[name] for name in values if name in names}
        self.source, self.values = source, values
        if unknown := sorted(values.keys() - names):
            raise self.error(f"there is no option {unknown[0]!r}")

    def __contains__(self, name: str) -> bool:
        return name.lower() in self.values

    def __getitem__(self, name: str) -> str:
        return self.values[name.lower()]

    def get(self, name: str, default: str | None = None) -> str | None:
        """Returns the text of an option."""
        return self.values.get(name.lower(), default)

    def error(self, text: str) -> InvalidSetting:
        """Returns an error of the source."""
        return InvalidSetting(f"{self.source}: {text}")

    def find_one(self, *names: str) -> str | None:
        """Returns the one of several options that is given; None if none is.

        Several are an error.
        """
        present = [name for name in names if name in self]
        if len(present) > 1:
            raise self.error(f"give one of the options {' and '.join(present)}")
        return present[0] if present else None

    def parse(self, name: str, parser: Callable[[str], _Parsed], takes: str) -> _Parsed:
        """Returns the value of an option.

        The parser raises an error of Python's own if it is not what the option ``takes``.
        """
        try:
            return parser(self[name])
        except (ValueError, TypeError, AttributeError):
            raise self.error(f"{name} is {self[name][:80]!r}; it takes {takes}") from None

    def whole_number(self, name: str, least: int = 1) -> int | None:
        """Returns an option that takes a whole number; None if it is not given."""
        if name not in self:
            return None
        text = self[name]
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise self.error(f"{name} is {text!r}; it takes a whole number from {least}")
        return int(text)

    def flag(self, name: str, *, default: bool) -> bool:
        """Returns an option that takes true or false."""
        return self.word(name, ("true", "false") if default else ("false", "true")) == "true"

    def word(self, name: str, words: tuple[str, str]) -> str:
        """Returns an option that takes one of two words, by default the first."""
        text = self.values.get(name.lower(), words[0])
        if text.lower() not in words:
            raise self.error(f"{name} is {text!r}; it takes {' or '.join(words)}")
        return text.lower()

    def seconds(self, name: str, default: str) -> float:
        """Returns an option that takes a time as Spark writes it.

        That is a number of milliseconds, or has a unit.
        """
        text = self.values.get(name.lower(), default)
        match = re.fullmatch(r"([0-9]+) *(us|ms|s|m|min|h|d|)", text.strip().lower())
        if match is None:
            raise self.error(
                f"{name} is {text!r}; it takes a number with a unit (us, ms, s, m, h or d), such "
                "as 15m"
            )
        return int(match[1]) * _UNITS[match[2]]


SERVER_OPTIONS = ("namespace", "schema", "redisUrl", "databaseUrl")
"""The options of ``ServerOptions``."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Servers and scope of a source's pipeline.

    A URL that is None is that of ``PENSTOCK_REDIS_URL`` or ``PENSTOCK_DATABASE_URL`` in the task's
    environment.
    """

    source: str
    scope: Scope = DEFAULT_SCOPE
    redis_url: str | None = None
    database_url: str | None = None

    @classmethod
    def parse_servers(cls, options: GivenOptions) -> dict[str, Any]:
        """Returns the attributes above."""
        scope = Scope(
            options.values.get("schema", DEFAULT_SCOPE.schema),
            options.values.get("namespace", DEFAULT_SCOPE.namespace),
        )
        urls = {"redis_url": options.get("redisUrl"), "database_url": options.get("databaseUrl")}
        return {"source": options.source, "scope": scope, **urls}

    def redis(self) -> str:
        """Returns the URL of the Redis that holds the channel; without one, raises an error."""
        return self._require(self.redis_url, "redisUrl", _REDIS_URL)

    def database(self) -> str:
        """Returns the URL of Postgres; without one, raises an error."""
        return self._require(self.database_url, "databaseUrl", _DATABASE_URL)

    def knows_database(self) -> bool:
        """Returns whether a URL of Postgres is given."""
        return self._find(self.database_url, "databaseUrl", _DATABASE_URL) is not None

    def _require(self, chosen: str | None, option: str, variable: str) -> str:
        if (url := self._find(chosen, option, variable)) is None:
            raise InvalidSetting(f"{self.source}: give option {option}, or set {variable}")
        return url

    def _find(self, chosen: str | None, option: str, variable: str) -> str | None:
        """Returns a URL.

        An empty option, which an unset secret is, must not choose the servers of the environment.
        """
        url = os.environ.get(variable) if chosen is None else chosen
        if url is not None and not url.strip():
            origin = variable if chosen is None else f"option {option}"
            raise InvalidSetting(f"{self.source}: {origin} is empty; give a URL, or remove it")
        return url


KNOWN = (
    *("channel", "subscribe", "subscribePattern", "assign", "shards", "consumer"),
    *(
        "startingOffsets",
        "startingTimestamp",
        "startingOffsetsByTimestamp",
        "startingOffsetsByTimestampStrategy",
    ),
    *("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"),
    *(
        "maxRecordsPerTrigger",
        "maxOffsetsPerTrigger",
        "minRecordsPerTrigger",
        "minOffsetsPerTrigger",
    ),
    *(
        "maxTriggerDelay",
        "minPartitions",
        "maxRecordsPerPartition",
        "failOnDataLoss",
        "includeHeaders",
    ),
    *("fetchOffset.numRetries", "fetchOffset.retryIntervalMs"),
    *("beginsAt", "entries", "compression", *SERVER_OPTIONS),
)
"""The options of ``penstock.log`` and ``penstock.staged``."""


@dataclass(frozen=True, kw_only=True)
class Options(ServerOptions):
    """Options of a source of records."""

    # ``channel``, ``subscribe``, ``subscribePattern`` or ``assign``: the shards to read
    subscription: Subscription
    shards: int | None  # number of the channel's shards; None reads it from Postgres
    # ``consumer``: the name under which a stream keeps its position in Postgres; None keeps it in
    # Spark's checkpoint only
    consumer: str | None
    # ``startingOffsets``, ``startingTimestamp`` or ``startingOffsetsByTimestamp``: the first record
    # to read. None: ``earliest`` for batches; for streams the position of ``consumer``, or
    # ``latest``.
    starting: Where | None
    # ``endingOffsets``, ``endingTimestamp`` or ``endingOffsetsByTimestamp``: the end of a batch,
    # exclusive
    ending: Where
    # ``startingOffsetsByTimestampStrategy``: ``error`` or ``latest``, for a start after the newest
    # record
    no_later_record: str
    # ``maxRecordsPerTrigger``: most records of a micro-batch, over all shards; None sets no limit
    max_records: int | None
    # ``minRecordsPerTrigger``: least records of a micro-batch; None waits for none
    min_records: int | None
    # ``maxTriggerDelay``: longest time, in seconds, that a micro-batch waits for ``min_records``
    max_delay_s: float
    # ``minPartitions``: least number of tasks of a batch; None plans one for each shard, or fewer
    # if there are few records
    min_partitions: int | None
    # ``maxRecordsPerPartition``: most records of a task; None sets no limit
    max_partition_records: int | None
    # ``failOnDataLoss``: whether lost records fail the query, or are skipped with a warning
    fail_on_data_loss: bool
    # ``fetchOffset.numRetries``: how often a call is repeated whose server does not answer
    retries: int
    retry_interval_s: float  # ``fetchOffset.retryIntervalMs``: pause before each, in seconds
    # ``beginsAt``, for writing: the first offset of each shard in an empty log; None reads it from
    # the journal
    begins: dict[int, int] | None
    stored_as: str  # ``entries`` and ``compression``, for writing: as ``Log.stored_as``

    @classmethod
    def parse(cls, source: str, options: Mapping[str, Any], *, streaming: bool | None) -> "Options":
        """Returns the options as Spark passes them; ``streaming`` is None if either is meant."""
        checked = GivenOptions(source, options, KNOWN)
        if streaming is not None:
            _check_mode(checked, streaming=streaming)
        retries, interval_ms = (
            checked.whole_number(f"fetchOffset.{n}", 0) for n in ("numRetries", "retryIntervalMs")
        )
        result = cls(
            **cls.parse_servers(checked),
            subscription=_subscription(checked),
            shards=checked.whole_number("shards"),
            consumer=checked_name(checked["consumer"], "consumer")
            if "consumer" in checked
            else None,
            starting=_where(checked, "starting", EARLIEST),
            ending=_where(checked, "ending", LATEST) or Where(LATEST),
            no_later_record=checked.word("startingOffsetsByTimestampStrategy", ("error", "latest")),
            max_records=_limit(checked, "max"),
            min_records=_limit(checked, "min"),
            max_delay_s=checked.seconds("maxTriggerDelay", "15m"),
            min_partitions=checked.whole_number("minPartitions"),
            max_partition_records=checked.whole_number("maxRecordsPerPartition"),
            fail_on_data_loss=checked.flag("failOnDataLoss", default=True),
            retries=3 if retries is None else retries,
            retry_interval_s=1.0 if interval_ms is None else interval_ms / 1000,
            begins=_begins(checked),
            stored_as=_stored_as(checked),
        )
        result._check(checked)
        return result

    def _check(self, options: GivenOptions) -> None:
        """Refuses options that contradict one another."""
        if self.shards is not None and self.subscription.single is None:
            raise options.error(
                "option shards is for one channel; the shards of several are read from Postgres"
            )
        if self.consumer is not None and self.subscription.numbers is not None:
            raise options.error(
                "consumer keeps a position in every shard of a channel; it cannot be given with "
                "assign"
            )
        minimum, maximum = self.min_records, self.max_records
        if minimum is not None and maximum is not None and minimum > maximum:
            raise options.error(
                f"minRecordsPerTrigger is {minimum}, maxRecordsPerTrigger is {maximum}; the "
                "minimum cannot be above the maximum"
            )


def find_table_options(raw_options: Mapping[str, Any]) -> dict[str, str]:
    """Returns the options of a table that is being created, in lower case; otherwise none."""
    options = {str(name).lower(): str(value) for name, value in raw_options.items()}
    return {
        name.removeprefix(_OF_A_TABLE): value
        for name, value in options.items()
        if name.startswith(_OF_A_TABLE)
    }


def keep_options(source: str, columns: StructType, raw_options: Mapping[str, Any]) -> StructType:
    """Returns the columns of a source; those of a table being created keep its options."""
    options = find_table_options(raw_options)
    if not options:
        return columns
    for name, variable in (("databaseurl", _DATABASE_URL), ("redisurl", _REDIS_URL)):
        if name in options and mask(options[name]) != options[name]:
            raise InvalidSetting(
                f"{source}: option {name} has a password, which everyone who may read the table's "
                "columns would see; leave it out, "
                f"and set {variable} for the driver and the executors"
            )
    first, *others = columns
    first_field = StructField(first.name, first.dataType, first.nullable, {_KEPT: options})
    return StructType([first_field, *others])


def with_kept_options(columns: StructType, raw_options: Mapping[str, Any]) -> dict[str, str]:
    """Returns the options of a reader, kept by its table's columns and of the query.

    Those of the query override the others.
    """
    tables = (column.metadata.get(_KEPT, {}) for column in columns)
    options = {name: value for table in tables for name, value in table.items()}
    return options | {str(name).lower(): str(value) for name, value in raw_options.items()}


def _check_mode(options: GivenOptions, *, streaming: bool) -> None:
    for name in ("endingOffsets", "endingOffsetsByTimestamp", "endingTimestamp"):
        if streaming and name in options:
            raise options.error(f"{name} is for batches; a stream has no end")
    if not streaming and "consumer" in options:
        raise options.error("consumer is for streams; a batch keeps no position")


def _subscription(options: GivenOptions) -> Subscription:
    name = options.find_one("channel", "subscribe", "subscribePattern", "assign")
    match name:
        case None:
            raise options.error(
                "option channel is missing: the name of the "
                f"channel{'' if options.values else _NO_OPTIONS}"
            )
        case "assign":
            takes = 'JSON with shards for each channel, such as {"rides": [0, 1]}'
            return options.parse(name, Subscription.parse_assigned, takes)
        case "subscribePattern":
            try:
                return Subscription((), re.compile(options[name]).pattern)
            except re.error as error:
                takes = f"a regular expression: {error}"
                raise options.error(f"{name} is {options[name][:80]!r}; it takes {takes}") from None
        case _:
            return Subscription.parse(options[name])


def _where(
    options: GivenOptions, side: Literal["starting", "ending"], default: ShardPlace
) -> Where | None:
    parsers: dict[str, tuple[Callable[[str], Where], str]] = {
        f"{side}Offsets": (partial(parse_offsets, default=default), _OFFSETS),
        f"{side}Timestamp": (parse_time, _TIME),
        f"{side}OffsetsByTimestamp": (partial(parse_times, default=default), _TIMES),
    }
    name = options.find_one(*parsers)
    return None if name is None else options.parse(name, *parsers[name])


def _limit(options: GivenOptions, bound: Literal["max", "min"]) -> int | None:
    """Returns ``maxRecordsPerTrigger``, or ``maxOffsetsPerTrigger`` as Kafka's source names it."""
    name = options.find_one(f"{bound}RecordsPerTrigger", f"{bound}OffsetsPerTrigger")
    return None if name is None else options.whole_number(name)


def _stored_as(options: GivenOptions) -> str:
    chosen = {name: options[name] for name in ("entries", "compression") if name in options}
    try:
        return LogChannel("written", **chosen).stored_as  # type: ignore[arg-type]  # it checks them
    except DeclarationError as error:
        raise options.error(str(error).removeprefix("channel written: ")) from error


def _begins(options: GivenOptions) -> dict[int, int] | None:
    if "beginsAt" not in options:
        return None
    return options.parse(
        "beginsAt", _parse_begins, 'JSON with an offset for each shard, such as {"0": 4118}'
    )


def _parse_begins(text: str) -> dict[int, int]:
    places = parse_offsets(text, EARLIEST).named
    offsets = {
        shard: place
        for (channel, shard), place in places.items()
        if not channel and isinstance(place, int)
    }
    if not offsets or len(offsets) < len(places):
        raise ValueError(text)
    return {shard: int(offset) for shard, offset in offsets.items()}
