"""What can be chosen of a source: names and meanings are those of Spark's Kafka source where there is one."""

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from penstock.database.statements import DEFAULT_SCHEMA
from penstock.declarations import checked_name, checked_schema
from penstock.errors import InvalidSetting
from penstock.records import Offset

EARLIEST, LATEST = "earliest", "latest"
_NUMBERS = {-2: EARLIEST, -1: LATEST}

Where = Literal["earliest", "latest"] | dict[int, Offset | Literal["earliest", "latest"]]
"""Where to begin or to end: a word for all shards, or for each shard an offset or a word."""

SPARKS_OWN = {"checkpointlocation", "path"}
"""Options that are meant for Spark, and reach us with ours."""

KNOWN = {
    "channel",
    "shards",
    "startingoffsets",
    "endingoffsets",
    "maxrecordspertrigger",
    "minpartitions",
    "failondataloss",
    "beginsat",
    "namespace",
    "schema",
    "redisurl",
    "databaseurl",
}


@dataclass(frozen=True)
class Options:
    """The options of one source.

    Attributes:
        channel: Name of the channel.
        shards: Number of its shards; None asks Postgres.
        starting: ``startingOffsets``: the first record to read; by default ``latest`` for streams, ``earliest`` for batches.
        ending: ``endingOffsets``: up to and without, for batches; ``latest`` by default.
        max_records: ``maxRecordsPerTrigger``: most records of a micro-batch, over all shards; None takes all there is.
        min_partitions: ``minPartitions``: what is read at once is divided into at least so many tasks; None takes one a shard, or
            fewer where there is little.
        fail_on_data_loss: ``failOnDataLoss``: whether records that are gone fail the query, or are left out with a warning.
        begins: ``beginsAt``, for writing: with which offset of each shard an empty log begins; None asks the journal.
        namespace: First part of the keys in Redis.
        schema: The Penstock schema in Postgres.
        redis_url: ``redisUrl``, or ``PENSTOCK_REDIS_URL`` of the task's environment.
        database_url: ``databaseUrl``, or ``PENSTOCK_DATABASE_URL`` of the task's environment.
    """

    source: str
    channel: str
    shards: int | None
    starting: Where
    ending: Where
    max_records: int | None
    min_partitions: int | None
    fail_on_data_loss: bool
    begins: dict[int, int] | None
    namespace: str
    schema: str
    redis_url: str | None
    database_url: str | None

    @classmethod
    def of(cls, source: str, given: Mapping[str, Any], *, streaming: bool) -> "Options":
        """The options as Spark hands them over.

        Raises:
            InvalidSetting: One is unknown, missing, or cannot be what it is.
            InvalidName: The channel, the schema or the namespace breaks the rule for names.
        """
        options = known_options(source, given, KNOWN)
        if "channel" not in options:
            raise InvalidSetting(f"{source}: option channel is missing: the name of the channel")
        if streaming and "endingoffsets" in options:
            raise InvalidSetting(f"{source}: endingOffsets is for batches; a stream has no end")
        default = LATEST if streaming else EARLIEST
        return cls(
            source,
            checked_name(options["channel"], "channel"),
            whole_number(source, options, "shards", "shards"),
            _where(source, options.get("startingoffsets", default), "startingOffsets"),
            _where(source, options.get("endingoffsets", LATEST), "endingOffsets"),
            whole_number(source, options, "maxrecordspertrigger", "maxRecordsPerTrigger"),
            whole_number(source, options, "minpartitions", "minPartitions"),
            _flag(source, options.get("failondataloss", "true"), "failOnDataLoss"),
            _begins(source, options.get("beginsat")),
            checked_schema(options.get("namespace", "penstock")),
            checked_schema(options.get("schema", DEFAULT_SCHEMA)),
            options.get("redisurl"),
            options.get("databaseurl"),
        )

    def redis(self) -> str:
        """Where the log is.

        Raises:
            InvalidSetting: Neither the option nor the environment says it.
        """
        return redis_url(self.source, self.redis_url)

    def database(self) -> str:
        """Where journal and staged records are.

        Raises:
            InvalidSetting: Neither the option nor the environment says it.
        """
        return database_url(self.source, self.database_url)

    def knows_database(self) -> bool:
        """Whether there is a Postgres to ask."""
        return bool(self.database_url or os.environ.get("PENSTOCK_DATABASE_URL"))


def known_options(source: str, given: Mapping[str, Any], known: Collection[str]) -> dict[str, str]:
    """The options as Spark hands them over, their names in small letters, as Spark takes no notice of capitals.

    Raises:
        InvalidSetting: One is unknown.
    """
    options = {str(name).lower(): str(value) for name, value in given.items()}
    unknown = sorted(set(options).difference(known, SPARKS_OWN))
    if unknown:
        raise InvalidSetting(f"{source}: there is no option {unknown[0]!r}")
    return options


def database_url(source: str, given: str | None) -> str:
    """Where Postgres is, by the option or by the environment.

    Raises:
        InvalidSetting: Neither says it.
    """
    return _url(source, given, "databaseUrl", "PENSTOCK_DATABASE_URL")


def redis_url(source: str, given: str | None) -> str:
    """Where Redis is, by the option or by the environment.

    Raises:
        InvalidSetting: Neither says it.
    """
    return _url(source, given, "redisUrl", "PENSTOCK_REDIS_URL")


def _url(source: str, given: str | None, option: str, variable: str) -> str:
    url = given or os.environ.get(variable)
    if not url:
        raise InvalidSetting(f"{source}: give option {option}, or set {variable}")
    return url


def whole_number(source: str, options: Mapping[str, str], key: str, name: str) -> int | None:
    """The value of an option that takes a number from 1; None if it is not given.

    Raises:
        InvalidSetting: It is none.
    """
    if key not in options:
        return None
    text = options[key]
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise InvalidSetting(f"{source}: {name} is {text!r}; it takes a whole number from 1")
    return int(text)


def _flag(source: str, text: str, name: str) -> bool:
    if text.lower() not in {"true", "false"}:
        raise InvalidSetting(f"{source}: {name} is {text!r}; it takes true or false")
    return text.lower() == "true"


def _where(source: str, text: str, name: str) -> Where:
    if text.lower() in {EARLIEST, LATEST}:
        return "earliest" if text.lower() == EARLIEST else "latest"
    try:
        given = json.loads(text)
        return {int(shard): _offset(value) for shard, value in given.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidSetting(
            f"{source}: {name} is {text[:80]!r}; it takes 'earliest', 'latest', or JSON with an offset for shards, such as "
            '{"0": 4118, "1": "latest"}'
        ) from error


def _begins(source: str, text: str | None) -> dict[int, int] | None:
    if text is None:
        return None
    where = _where(source, text, "beginsAt")
    if isinstance(where, str) or not all(isinstance(offset, int) for offset in where.values()):
        raise InvalidSetting(
            f"{source}: beginsAt is {text[:80]!r}; it takes JSON with an offset for shards, "
            'such as {"0": 4118}'
        )
    return {shard: int(offset) for shard, offset in where.items()}


def _offset(value: Any) -> Any:
    if value in (EARLIEST, LATEST):
        return value
    if type(value) is int and (value in _NUMBERS or value >= 1):
        return _NUMBERS.get(value, Offset(value))
    raise ValueError(value)
