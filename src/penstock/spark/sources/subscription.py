"""The shards that a query reads: those of one channel, of several, or of all whose names match a pattern."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.declaring.kinds import checked_channel
from penstock.errors import InvalidSetting, Unknown
from penstock.parsing import parse_json
from penstock.records import Shard, ShardName

_NAMES = {"channel": "channel", "subscribe": "subscribe", "subscribepattern": "subscribePattern", "assign": "assign"}

_OF_A_TABLE = (
    """. In Spark's catalog, a table that names its columns has no options: SELECT * FROM t WITH ('channel' = '…')"""
)


@dataclass(frozen=True)
class Subscription:
    """What a query reads.

    Attributes:
        channels: Names of channels; empty with a pattern.
        pattern: A regular expression that the whole name of a log must match; None without one.
        numbers: The shards to read of each channel; those of the others are all read.
    """

    channels: tuple[str, ...]
    pattern: str | None = None
    numbers: Mapping[str, frozenset[int]] | None = None

    @classmethod
    def parse(cls, source: str, options: Mapping[str, str]) -> "Subscription":
        """The options ``channel`` (or ``subscribe``), ``subscribePattern`` and ``assign``, of which there is one.

        Raises:
            InvalidSetting: None or several are given, or one has an invalid value.
            InvalidName: The name of a channel breaks the rule for names.
        """
        given = [name for name in _NAMES if name in options]
        if not given:
            raise InvalidSetting(
                f"{source}: option channel is missing: the name of the channel" + ("" if options else _OF_A_TABLE)
            )
        if len(given) > 1:
            names = " and ".join(_NAMES[name] for name in given)
            raise InvalidSetting(f"{source}: give one of the options {names}")
        text = options[given[0]]
        if given[0] == "assign":
            return cls._assigned(source, text)
        if given[0] == "subscribepattern":
            return cls((), _checked_pattern(source, text))
        return cls(_checked(name.strip() for name in text.split(",")))

    @classmethod
    def _assigned(cls, source: str, text: str) -> "Subscription":
        try:
            given = {
                channel: frozenset(_number(each) for each in numbers) for channel, numbers in parse_json(text).items()
            }
        except (ValueError, TypeError, AttributeError):
            given = {}
        if not given or not all(given.values()):
            raise InvalidSetting(
                f"{source}: assign is {text[:80]!r}; it takes JSON with shards for each channel, such as "
                '{"rides": [0, 1]}'
            )
        return cls(_checked(given), None, given)

    @property
    def single(self) -> str | None:
        """The name of the channel, if there is only one."""
        return self.channels[0] if len(self.channels) == 1 else None

    def resolve(self, source: str, registered: Mapping[str, int]) -> list[ShardName]:
        """The shards to read.

        Args:
            source: Name of the data source, for errors.
            registered: The number of shards of each log that there is.

        Raises:
            Unknown: There is no such log, or shard.
        """
        wanted = self.channels
        if self.pattern is not None:
            wanted = tuple(n for n in sorted(registered) if re.fullmatch(self.pattern, n))
            if not wanted:
                raise Unknown(
                    f"{source}: no log matches subscribePattern {self.pattern!r}; there are: {_list(registered)}"
                )
        return [shard for name in wanted for shard in self._shards(source, name, registered)]

    def _shards(self, source: str, name: str, registered: Mapping[str, int]) -> list[ShardName]:
        if name not in registered:
            raise Unknown(
                f"{source}: no channel {name!r} is registered; there are: {_list(registered)}. "
                "A streamer registers it when it starts"
            )
        count = registered[name]
        numbers = (self.numbers or {}).get(name, range(count))
        if max(numbers) >= count:
            raise Unknown(f"{source}: channel {name} has no shard {max(numbers)}; it has shards 0 to {count - 1}")
        return [ShardName(name, Shard(number)) for number in sorted(numbers)]


def _checked(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(checked_channel(name) for name in names))


def _checked_pattern(source: str, text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise InvalidSetting(
            f"{source}: subscribePattern is {text[:80]!r}; it takes a regular expression: {error}"
        ) from None
    return text


def _number(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(value)
    return value


def _list(registered: Iterable[str]) -> str:
    return ", ".join(sorted(registered)) or "none"
