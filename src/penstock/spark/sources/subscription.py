"""Shards that a query reads, and where it begins and ends: a word, an offset, or a time."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from penstock.declaring.kinds import checked_channel
from penstock.errors import InvalidSetting, Unknown
from penstock.parsing import parse_json
from penstock.records import Offset, Shard, ShardName


@dataclass(frozen=True)
class Subscription:
    """Shards that a query reads: of channels, or of all logs whose names match a pattern.

    ``numbers`` are the shards to read of each channel; those of the others are all read.
    """

    channels: tuple[str, ...]
    pattern: str | None = None
    numbers: Mapping[str, frozenset[int]] | None = None

    @classmethod
    def parse(cls, text: str) -> "Subscription":
        """Returns the subscription of channels, by their names."""
        return cls(_checked(name.strip() for name in text.split(",")))

    @classmethod
    def parse_assigned(cls, text: str) -> "Subscription":
        """Returns the subscription of shards of channels, from JSON."""
        assigned = {
            channel: frozenset(map(_number, numbers))
            for channel, numbers in parse_json(text).items()
        }
        if not assigned or not all(assigned.values()):
            raise ValueError(text)
        return cls(_checked(assigned), None, assigned)

    @property
    def single(self) -> str | None:
        """Returns the name of the channel, if there is only one."""
        return self.channels[0] if len(self.channels) == 1 else None

    def resolve(self, source: str, registered: Mapping[str, int]) -> list[ShardName]:
        """Returns the shards to read; ``registered`` are numbers of shards of channels."""
        names = self.channels
        if self.pattern is not None:
            names = tuple(n for n in sorted(registered) if re.fullmatch(self.pattern, n))
            if not names:
                raise Unknown(
                    f"{source}: no log matches subscribePattern {self.pattern!r}; there are: "
                    f"{_list(registered)}"
                )
        return [shard for name in names for shard in self._shards(source, name, registered)]

    def _shards(self, source: str, name: str, registered: Mapping[str, int]) -> list[ShardName]:
        if name not in registered:
            raise Unknown(
                f"{source}: no channel {name!r} is registered; there are: {_list(registered)}. "
                "A streamer registers it when it starts"
            )
        count = registered[name]
        numbers = (self.numbers or {}).get(name, range(count))
        if max(numbers) >= count:
            raise Unknown(
                f"{source}: channel {name} has no shard {max(numbers)}; it has shards 0 to "
                f"{count - 1}"
            )
        return [ShardName(name, Shard(number)) for number in sorted(numbers)]


def _checked(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(checked_channel(name) for name in names))


def _number(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(value)
    return value


def _list(registered: Iterable[str]) -> str:
    return ", ".join(sorted(registered)) or "none"


EARLIEST: Literal["earliest"] = "earliest"
LATEST: Literal["latest"] = "latest"
_NUMBERS: dict[int, Literal["earliest", "latest"]] = {-2: EARLIEST, -1: LATEST}

BEGIN = "begin:"
"""Prefix of a channel's name in a Spark offset: where the query began.  No name of a channel has a
colon."""


@dataclass(frozen=True, slots=True)
class StagedSince:
    """The first record staged at a time, in microseconds since 1970, or later."""

    staged_us: int


ShardPlace = Offset | Literal["earliest", "latest"] | StagedSince


@dataclass(frozen=True)
class Where:
    """A place in each shard."""

    default: ShardPlace  # the place in a shard that is not named
    # the places in shards that are, by channel and number; the channel is empty if the query reads
    # only one
    named: Mapping[tuple[str, int], ShardPlace] = field(default_factory=dict)

    def get(self, shard: ShardName) -> ShardPlace:
        """Returns the place in a shard."""
        number = int(shard.shard)
        return self.named.get((shard.channel, number), self.named.get(("", number), self.default))

    def check(self, shards: Collection[ShardName], source: str) -> None:
        """Checks that the query reads every named shard.

        If it reads several channels, each shard has to be named with its channel.
        """
        read = {(shard.channel, int(shard.shard)) for shard in shards}
        if len(channels := {channel for channel, _ in read}) == 1:
            read |= {("", number) for _, number in read}
        for channel, number in sorted(self.named.keys() - read):
            if not channel and len(channels) > 1:
                raise InvalidSetting(
                    f"{source}: shard {number} is named without its channel, and the query reads "
                    "several: "
                    f'{{"{min(channels)}": {{"{number}": …}}}}'
                )
            owner = f"channel {channel}" if channel else "the channel"
            raise InvalidSetting(
                f"{source}: {owner} has no shard {number}; the query reads "
                f"{', '.join(map(str, sorted(shards)))}"
            )


def parse_offsets(text: str, default: ShardPlace) -> Where:
    """Parses words and offsets.

    Like all parsers of an option's value, it raises errors of Python's own.
    """
    if text.lower() in {EARLIEST, LATEST}:
        return Where(EARLIEST if text.lower() == EARLIEST else LATEST)
    return Where(default, _parse_shards(text, _parse_offset))


def parse_times(text: str, default: ShardPlace) -> Where:
    """Parses a time for each shard."""
    return Where(default, _parse_shards(text, _parse_since))


def parse_time(text: str) -> Where:
    """Parses one time for all shards."""
    return Where(_parse_since(text))


def _parse_shards(
    text: str, parse: Callable[[Any], ShardPlace]
) -> dict[tuple[str, int], ShardPlace]:
    """Parses Kafka's nested form, ``{"rides": {"0": 4118}}``, or one channel's, ``{"0": 4118}``."""
    places: dict[tuple[str, int], ShardPlace] = {}
    for key, value in parse_json(text).items():
        if key.startswith(BEGIN):  # of a progress's endOffset, which may be given as it is
            continue
        of_channel = (
            {(key, shard): place for shard, place in value.items()}
            if isinstance(value, dict)
            else None
        )
        shards = {("", key): value} if of_channel is None else of_channel
        places |= {
            (channel, int(shard)): parse(place) for (channel, shard), place in shards.items()
        }
    return places


def _parse_offset(value: Any) -> ShardPlace:
    if value in (EARLIEST, LATEST):
        return EARLIEST if value == EARLIEST else LATEST
    if type(value) is int and value in _NUMBERS:
        return _NUMBERS[value]
    if type(value) is int and value >= 1:
        return Offset(value)
    raise ValueError(value)


def _parse_since(value: Any) -> StagedSince:
    text = str(value)
    if text.isascii() and text.isdigit():
        return StagedSince(int(text) * 1000)
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError(text)
    return StagedSince(round(time.timestamp() * 1_000_000))
