"""The options of the data sources, with the names and meanings of Spark's Kafka source where it has them."""

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from penstock.declarations import checked_name
from penstock.errors import InvalidSetting
from penstock.records import DEFAULT_SCOPE, Offset, Scope

EARLIEST, LATEST = "earliest", "latest"
_NUMBERS = {-2: EARLIEST, -1: LATEST}

Where = Literal["earliest", "latest"] | dict[int, Offset | Literal["earliest", "latest"]]
"""Where to begin or end: a word for all shards, or an offset or a word for each shard."""

_DATABASE_URL, _REDIS_URL = "PENSTOCK_DATABASE_URL", "PENSTOCK_REDIS_URL"

SPARKS_OWN = {"checkpointlocation", "path"}
"""Options for Spark itself, which it passes on to the source."""

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
        shards: Number of its shards; None reads it from Postgres.
        starting: ``startingOffsets``: the first record to read; by default ``latest`` for streams, ``earliest`` for batches.
        ending: ``endingOffsets``: the end of a batch, exclusive; ``latest`` by default.
        max_records: ``maxRecordsPerTrigger``: most records of a micro-batch, over all shards; None sets no limit.
        min_partitions: ``minPartitions``: least number of tasks of a batch; None plans one for each shard, or fewer if there are
            few records.
        fail_on_data_loss: ``failOnDataLoss``: whether lost records fail the query, or are skipped with a warning.
        begins: ``beginsAt``, for writing: the first offset of each shard in an empty log; None reads it from the journal.
        scope: ``schema`` and ``namespace``.
        redis_url: ``redisUrl``; None takes ``PENSTOCK_REDIS_URL`` from the task's environment.
        database_url: ``databaseUrl``; None takes ``PENSTOCK_DATABASE_URL`` from the task's environment.
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
    scope: Scope
    redis_url: str | None
    database_url: str | None

    @classmethod
    def parse(cls, source: str, given: Mapping[str, Any], *, streaming: bool) -> "Options":
        """The options as Spark passes them.

        Raises:
            InvalidSetting: One is unknown, missing, or has an invalid value.
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
            parse_scope(options),
            options.get("redisurl"),
            options.get("databaseurl"),
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
        return find_database_url(self.database_url) is not None


def known_options(source: str, given: Mapping[str, Any], known: Collection[str]) -> dict[str, str]:
    """The options as Spark passes them, with lower-case names, because Spark ignores case.

    Raises:
        InvalidSetting: One is unknown.
    """
    options = {str(name).lower(): str(value) for name, value in given.items()}
    unknown = sorted(set(options).difference(known, SPARKS_OWN))
    if unknown:
        raise InvalidSetting(f"{source}: there is no option {unknown[0]!r}")
    return options


def parse_scope(options: Mapping[str, str]) -> Scope:
    """The scope of the pipeline, from the options ``schema`` and ``namespace``.

    Raises:
        InvalidName: One of them breaks the rule for names.
    """
    return Scope(
        options.get("schema", DEFAULT_SCOPE.schema),
        options.get("namespace", DEFAULT_SCOPE.namespace),
    )


def database_url(source: str, given: str | None) -> str:
    """URL of Postgres, from the option or the environment.

    Raises:
        InvalidSetting: Neither gives it.
    """
    return _require(source, find_database_url(given), "databaseUrl", _DATABASE_URL)


def find_database_url(given: str | None) -> str | None:
    """URL of Postgres, from the option or the environment; None if neither gives it."""
    return given or os.environ.get(_DATABASE_URL) or None


def redis_url(source: str, given: str | None) -> str:
    """URL of Redis, from the option or the environment.

    Raises:
        InvalidSetting: Neither gives it.
    """
    return _require(source, given or os.environ.get(_REDIS_URL), "redisUrl", _REDIS_URL)


def _require(source: str, url: str | None, option: str, variable: str) -> str:
    if not url:
        raise InvalidSetting(f"{source}: give option {option}, or set {variable}")
    return url


def whole_number(source: str, options: Mapping[str, str], key: str, name: str) -> int | None:
    """The value of an option that takes a whole number from 1; None if it is not given.

    Raises:
        InvalidSetting: It is not such a number.
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
            f"{source}: {name} is {text[:80]!r}; it takes 'earliest', 'latest', or JSON with an offset for each shard, such as "
            '{"0": 4118, "1": "latest"}'
        ) from error


def _begins(source: str, text: str | None) -> dict[int, int] | None:
    if text is None:
        return None
    where = _where(source, text, "beginsAt")
    if isinstance(where, str) or not all(isinstance(offset, int) for offset in where.values()):
        raise InvalidSetting(
            f"{source}: beginsAt is {text[:80]!r}; it takes JSON with an offset for each shard, "
            'such as {"0": 4118}'
        )
    return {shard: int(offset) for shard, offset in where.items()}


def _offset(value: Any) -> Any:
    if value in (EARLIEST, LATEST):
        return value
    if type(value) is int and (value in _NUMBERS or value >= 1):
        return _NUMBERS.get(value, Offset(value))
    raise ValueError(value)
