"""The options of the data sources, with the names and meanings of Spark's Kafka source where it has them."""

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pyspark.sql.types import StructField, StructType

from penstock.declaring.declarations import Log
from penstock.declaring.kinds import checked_name
from penstock.display import mask
from penstock.errors import DeclarationError, InvalidSetting
from penstock.records import DEFAULT_SCOPE, Scope
from penstock.spark.sources.columns import HEADERS, SPARK_SCHEMA
from penstock.spark.sources.places import EARLIEST, LATEST, Where, parse_offsets, parse_time, parse_times
from penstock.spark.sources.subscription import Subscription

_OF_A_TABLE = "option."
"""What Spark puts before the options of a table when it is created; it gives them without it, too, among other properties."""

_KEPT = "penstock.options"
"""The metadata that has them."""

_URLS = {"databaseurl": "PENSTOCK_DATABASE_URL", "redisurl": "PENSTOCK_REDIS_URL"}


def find_table_options(given: Mapping[str, Any]) -> dict[str, str]:
    """The options of a table that is being created, with lower-case names; none for anything else."""
    options = {str(name).lower(): str(value) for name, value in given.items()}
    return {name.removeprefix(_OF_A_TABLE): value for name, value in options.items() if name.startswith(_OF_A_TABLE)}


def keep_options(source: str, columns: StructType, given: Mapping[str, Any]) -> StructType:
    """The columns of a source; those of a table that is being created keep its options.

    Raises:
        InvalidSetting: A table cannot keep one of them.
    """
    options = find_table_options(given)
    if not options:
        return columns
    for name, variable in _URLS.items():
        if name in options and mask(options[name]) != options[name]:
            raise InvalidSetting(
                f"{source}: option {name} has a password, which everyone who may read the table's columns would see; leave it out, "
                f"and set {variable} for the driver and the executors"
            )
    if options.get("pushfilters", "false").lower() != "false":
        raise InvalidSetting(
            f"{source}: pushFilters is for a DataFrame that is used once; leave it out of a table, which any query may name twice"
        )
    first, *others = columns
    kept = StructField(first.name, first.dataType, first.nullable, {_KEPT: options})
    return StructType([kept, *others])


def with_kept_options(columns: StructType, given: Mapping[str, Any]) -> dict[str, str]:
    """The options of a reader: those that its table's columns keep, and those of the query, which override them."""
    kept = (column.metadata.get(_KEPT, {}) for column in columns)
    options = {name: value for each in kept for name, value in each.items()}
    return options | {str(name).lower(): str(value) for name, value in given.items()}


_DATABASE_URL, _REDIS_URL = "PENSTOCK_DATABASE_URL", "PENSTOCK_REDIS_URL"

SPARKS_OWN = {"checkpointlocation", "path", "queryname"}
"""Options for Spark itself, which it passes on to the source."""

KNOWN = {
    "channel",
    "subscribe",
    "subscribepattern",
    "assign",
    "shards",
    "consumer",
    "startingoffsets",
    "startingoffsetsbytimestamp",
    "startingoffsetsbytimestampstrategy",
    "startingtimestamp",
    "endingoffsets",
    "endingoffsetsbytimestamp",
    "endingtimestamp",
    "maxrecordspertrigger",
    "maxoffsetspertrigger",
    "minrecordspertrigger",
    "minoffsetspertrigger",
    "maxtriggerdelay",
    "minpartitions",
    "maxrecordsperpartition",
    "failondataloss",
    "pushfilters",
    "fetchoffset.numretries",
    "fetchoffset.retryintervalms",
    "includeheaders",
    "beginsat",
    "entries",
    "compression",
    "namespace",
    "schema",
    "redisurl",
    "databaseurl",
}
_UNITS = {"us": 1e-6, "ms": 1e-3, "": 1e-3, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True)
class Options:
    """The options of one source.

    Attributes:
        source: Name of the data source.
        subscription: ``channel``, or ``subscribePattern`` or ``assign``: the shards to read.
        shards: Number of the channel's shards; None reads it from Postgres.
        consumer: ``consumer``: the name under which a stream keeps its position in Postgres; None keeps it in Spark's
            checkpoint only.
        starting: ``startingOffsets``, ``startingTimestamp`` or ``startingOffsetsByTimestamp``: the first record to read.
            None: ``earliest`` for batches; for streams the position of ``consumer``, or ``latest``.
        ending: ``endingOffsets``, ``endingTimestamp`` or ``endingOffsetsByTimestamp``: the end of a batch, exclusive;
            ``latest`` by default.
        no_later_record: ``startingOffsetsByTimestampStrategy``: whether a start after the newest record is an ``error`` or
            means ``latest``.
        max_records: ``maxRecordsPerTrigger``: most records of a micro-batch, over all shards; None sets no limit.
        min_records: ``minRecordsPerTrigger``: least records of a micro-batch; None waits for none.
        max_delay_s: ``maxTriggerDelay``: longest time, in seconds, that a micro-batch waits for ``min_records``.
        min_partitions: ``minPartitions``: least number of tasks of a batch; None plans one for each shard, or fewer if there are
            few records.
        max_partition_records: ``maxRecordsPerPartition``: most records of a task; None sets no limit.
        fail_on_data_loss: ``failOnDataLoss``: whether lost records fail the query, or are skipped with a warning.
        push_filters: ``pushFilters``: whether filters of a batch decide what is read.
        retries: ``fetchOffset.numRetries``: how often a call is repeated whose server does not answer.
        retry_interval_s: ``fetchOffset.retryIntervalMs``: pause before each, in seconds.
        begins: ``beginsAt``, for writing: the first offset of each shard in an empty log; None reads it from the journal.
        stored_as: ``entries`` and ``compression``, for writing: as ``Log.stored_as``.
        scope: ``schema`` and ``namespace``.
        redis_url: ``redisUrl``; None takes ``PENSTOCK_REDIS_URL`` from the task's environment.
        database_url: ``databaseUrl``; None takes ``PENSTOCK_DATABASE_URL`` from the task's environment.
    """

    source: str
    subscription: Subscription
    shards: int | None
    consumer: str | None
    starting: Where | None
    ending: Where
    no_later_record: Literal["error", "latest"]
    max_records: int | None
    min_records: int | None
    max_delay_s: float
    min_partitions: int | None
    max_partition_records: int | None
    fail_on_data_loss: bool
    push_filters: bool
    retries: int
    retry_interval_s: float
    begins: dict[int, int] | None
    stored_as: str
    scope: Scope
    redis_url: str | None
    database_url: str | None

    @classmethod
    def parse(cls, source: str, given: Mapping[str, Any], *, streaming: bool | None) -> "Options":
        """The options as Spark passes them; ``streaming`` is None as long as either may be meant.

        Raises:
            InvalidSetting: One is unknown, missing, has an invalid value, or contradicts another.
            InvalidName: The channel, the consumer, the schema or the namespace breaks the rule for names.
        """
        options = known_options(source, given, KNOWN)
        if streaming is not None:
            _check_mode(source, options, streaming=streaming)
        subscription = Subscription.parse(source, options)
        shards = whole_number(source, options, "shards", "shards")
        if shards is not None and subscription.single is None:
            raise InvalidSetting(
                f"{source}: option shards is for one channel; the shards of several are read from Postgres"
            )
        if "consumer" in options and subscription.numbers is not None:
            raise InvalidSetting(
                f"{source}: consumer keeps a position in every shard of a channel; it cannot be given with assign"
            )
        most = _limit(source, options, "max")
        least = _limit(source, options, "min")
        if least is not None and most is not None and least > most:
            raise InvalidSetting(
                f"{source}: minRecordsPerTrigger is {least}, maxRecordsPerTrigger is {most}; the least cannot be above the most"
            )
        return cls(
            source=source,
            subscription=subscription,
            shards=shards,
            consumer=checked_name(options["consumer"], "consumer") if "consumer" in options else None,
            starting=_where(source, options, "starting", EARLIEST),
            ending=_where(source, options, "ending", LATEST) or Where(LATEST),
            no_later_record=_strategy(source, options),
            max_records=most,
            min_records=least,
            max_delay_s=_seconds(source, options.get("maxtriggerdelay", "15m"), "maxTriggerDelay"),
            min_partitions=whole_number(source, options, "minpartitions", "minPartitions"),
            max_partition_records=whole_number(source, options, "maxrecordsperpartition", "maxRecordsPerPartition"),
            fail_on_data_loss=_flag(source, options, "failondataloss", "failOnDataLoss"),
            push_filters=parse_push_filters(source, options),
            retries=_count(source, options, "fetchOffset.numRetries", 3),
            retry_interval_s=_count(source, options, "fetchOffset.retryIntervalMs", 1000) / 1000,
            begins=_begins(source, options.get("beginsat")),
            stored_as=_stored_as(source, options),
            scope=parse_scope(options),
            redis_url=options.get("redisurl"),
            database_url=options.get("databaseurl"),
        )

    def redis(self) -> str:
        """URL of the Redis that holds the log.

        Raises:
            InvalidSetting: Neither the option nor the environment gives it.
        """
        return redis_url(self.source, self.redis_url)

    def database(self) -> str:
        """URL of the Postgres that holds the journal.

        Raises:
            InvalidSetting: Neither the option nor the environment gives it.
        """
        return database_url(self.source, self.database_url)

    def knows_database(self) -> bool:
        """Whether a URL of Postgres is given."""
        return find_database_url(self.source, self.database_url) is not None


def record_schema(source: str, given: Mapping[str, Any]) -> StructType:
    """The columns of a record; without ``headers``, if ``includeHeaders`` is false.

    Raises:
        InvalidSetting: An option is invalid, so that ``load`` fails, and not the first action; or a table cannot keep one.
        InvalidName: A name breaks the rule for names.
    """
    Options.parse(source, given, streaming=None)
    options = known_options(source, given, KNOWN)
    included = _flag(source, options, "includeheaders", "includeHeaders")
    columns = StructType([f for f in SPARK_SCHEMA if included or f.name != HEADERS])
    return keep_options(source, columns, given)


def known_options(source: str, given: Mapping[str, Any], known: Collection[str]) -> dict[str, str]:
    """The options as Spark passes them, with lower-case names, because Spark ignores case.

    Raises:
        InvalidSetting: One is unknown.
    """
    options = {str(name).lower(): str(value) for name, value in given.items()}
    known = {*known, *SPARKS_OWN}
    of_table = find_table_options(given)
    if of_table:  # what else is not known are properties of the table, such as its owner
        options = of_table | {name: options[name] for name in options if name in known}
    unknown = sorted(set(options).difference(known))
    if unknown:
        raise InvalidSetting(f"{source}: there is no option {unknown[0]!r}")
    return options


def parse_scope(options: Mapping[str, str]) -> Scope:
    """The scope of the pipeline, from the options ``schema`` and ``namespace``.

    Raises:
        InvalidName: One of them breaks the rule for names.
    """
    return Scope(options.get("schema", DEFAULT_SCOPE.schema), options.get("namespace", DEFAULT_SCOPE.namespace))


def database_url(source: str, given: str | None) -> str:
    """URL of Postgres, from the option or the environment.

    Raises:
        InvalidSetting: Neither gives it, or it is empty.
    """
    return _require(source, find_database_url(source, given), "databaseUrl", _DATABASE_URL)


def find_database_url(source: str, given: str | None) -> str | None:
    """URL of Postgres, from the option or the environment; None if neither gives it.

    Raises:
        InvalidSetting: It is empty.
    """
    return _find(source, given, "databaseUrl", _DATABASE_URL)


def redis_url(source: str, given: str | None) -> str:
    """URL of Redis, from the option or the environment.

    Raises:
        InvalidSetting: Neither gives it, or it is empty.
    """
    found = _find(source, given, "redisUrl", _REDIS_URL)
    return _require(source, found, "redisUrl", _REDIS_URL)


def _find(source: str, given: str | None, option: str, variable: str) -> str | None:
    """A URL; an empty option, which an unset secret is, must not choose the servers of the environment."""
    url = os.environ.get(variable) if given is None else given
    if url is not None and not url.strip():
        what = variable if given is None else f"option {option}"
        raise InvalidSetting(f"{source}: {what} is empty; give a URL, or remove it")
    return url


def _require(source: str, url: str | None, option: str, variable: str) -> str:
    if url is None:
        raise InvalidSetting(f"{source}: give option {option}, or set {variable}")
    return url


def whole_number(source: str, options: Mapping[str, str], key: str, name: str) -> int | None:
    """The value of an option that takes a whole number from 1; None if it is not given.

    Raises:
        InvalidSetting: It is not such a number.
    """
    return _parse_number(source, options[key], name, 1) if key in options else None


def _count(source: str, options: Mapping[str, str], name: str, default: int) -> int:
    return _parse_number(source, options.get(name.lower(), str(default)), name, 0)


def _parse_number(source: str, text: str, name: str, least: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise InvalidSetting(f"{source}: {name} is {text!r}; it takes a whole number from {least}")
    return int(text)


def parse_push_filters(source: str, options: Mapping[str, str]) -> bool:
    """The option ``pushFilters``.

    Raises:
        InvalidSetting: It is neither true nor false.
    """
    return _flag(source, {"pushfilters": "false", **options}, "pushfilters", "pushFilters")


def _flag(source: str, options: Mapping[str, str], key: str, name: str) -> bool:
    text = options.get(key, "true")
    if text.lower() not in {"true", "false"}:
        raise InvalidSetting(f"{source}: {name} is {text!r}; it takes true or false")
    return text.lower() == "true"


def _stored_as(source: str, options: Mapping[str, str]) -> str:
    chosen = {name: options[name] for name in ("entries", "compression") if name in options}
    try:
        return Log("written", **chosen).stored_as  # type: ignore[arg-type]  # it checks them
    except DeclarationError as error:
        raise InvalidSetting(f"{source}: {str(error).removeprefix('channel written: ')}") from error


_FOR_BATCHES = {
    "endingoffsets": "endingOffsets",
    "endingoffsetsbytimestamp": "endingOffsetsByTimestamp",
    "endingtimestamp": "endingTimestamp",
}


def _check_mode(source: str, options: Mapping[str, str], *, streaming: bool) -> None:
    for key in options:
        if streaming and key in _FOR_BATCHES:
            raise InvalidSetting(f"{source}: {_FOR_BATCHES[key]} is for batches; a stream has no end")
    if not streaming and "consumer" in options:
        raise InvalidSetting(f"{source}: consumer is for streams; a batch keeps no position")


def _where(source: str, options: Mapping[str, str], side: Literal["starting", "ending"], default: Any) -> Where | None:
    parsers = {
        f"{side}Offsets": lambda name, text: parse_offsets(source, name, text, default),
        f"{side}Timestamp": lambda name, text: parse_time(source, name, text),
        f"{side}OffsetsByTimestamp": lambda name, text: parse_times(source, name, text, default),
    }
    given = [name for name in parsers if name.lower() in options]
    if len(given) > 1:
        raise InvalidSetting(f"{source}: give one of {' and '.join(given)}")
    return parsers[given[0]](given[0], options[given[0].lower()]) if given else None


def _strategy(source: str, options: Mapping[str, str]) -> Literal["error", "latest"]:
    text = options.get("startingoffsetsbytimestampstrategy", "error").lower()
    if text not in {"error", "latest"}:
        raise InvalidSetting(f"{source}: startingOffsetsByTimestampStrategy is {text!r}; it takes error or latest")
    return "latest" if text == "latest" else "error"


def _limit(source: str, options: Mapping[str, str], which: Literal["max", "min"]) -> int | None:
    """``maxRecordsPerTrigger``, or ``maxOffsetsPerTrigger`` as Kafka's source names it."""
    names = (f"{which}RecordsPerTrigger", f"{which}OffsetsPerTrigger")
    given = [name for name in names if name.lower() in options]
    if len(given) > 1:
        raise InvalidSetting(f"{source}: {given[0]} and {given[1]} are the same option; give one")
    return whole_number(source, options, given[0].lower(), given[0]) if given else None


def _seconds(source: str, text: str, name: str) -> float:
    """A time as Spark writes it: a number of milliseconds, or with a unit."""
    match = re.fullmatch(r"([0-9]+) *(us|ms|s|m|min|h|d|)", text.strip().lower())
    if match is None:
        raise InvalidSetting(
            f"{source}: {name} is {text!r}; it takes a number with a unit (us, ms, s, m, h or d), such as 15m"
        )
    return int(match[1]) * _UNITS[match[2]]


def _begins(source: str, text: str | None) -> dict[int, int] | None:
    if text is None:
        return None
    where = parse_offsets(source, "beginsAt", text, EARLIEST)
    named = {shard: place for (channel, shard), place in where.named.items() if not channel}
    if not named or not all(isinstance(offset, int) for offset in named.values()):
        raise InvalidSetting(
            f'{source}: beginsAt is {text[:80]!r}; it takes JSON with an offset for each shard, such as {{"0": 4118}}'
        )
    return {shard: int(offset) for shard, offset in named.items() if isinstance(offset, int)}
