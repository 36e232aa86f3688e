"""Where a query begins or ends in each shard: a word, an offset, or a time."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from penstock.errors import InvalidSetting
from penstock.parsing import parse_json
from penstock.records import Offset, ShardName

EARLIEST: Literal["earliest"] = "earliest"
LATEST: Literal["latest"] = "latest"
_NUMBERS: dict[int, Literal["earliest", "latest"]] = {-2: EARLIEST, -1: LATEST}

BEGIN = "begin:"
"""Before the name of a channel, in an offset of Spark's: where the query began.  No name of a channel has a colon."""

_OFFSETS = '\'earliest\', \'latest\', or JSON with an offset for each shard, such as {"0": 4118, "1": "latest"}'
_TIMES = 'JSON with a time for each shard, such as {"0": 1767225600000} or {"0": "2026-01-01T00:00:00Z"}'
_TIME = "milliseconds since 1970, or a time with its time zone, such as 2026-01-01T00:00:00Z"


@dataclass(frozen=True, slots=True)
class Since:
    """The first record that was staged at a time or later.

    Attributes:
        staged_us: The time, in microseconds since 1970.
    """

    staged_us: int


Place = Offset | Literal["earliest", "latest"] | Since


@dataclass(frozen=True)
class Where:
    """A place in each shard.

    Attributes:
        default: The place in a shard that is not named.
        named: The places in shards that are, by channel and number; the channel is empty if the query reads only one.
    """

    default: Place
    named: Mapping[tuple[str, int], Place] = field(default_factory=dict)

    def get(self, shard: ShardName) -> Place:
        """The place in a shard."""
        number = int(shard.shard)
        return self.named.get((shard.channel, number), self.named.get(("", number), self.default))

    def check(self, shards: Collection[ShardName], source: str) -> None:
        """Checks that the query reads every shard that is named.

        Raises:
            InvalidSetting: It does not; or it reads several channels, and a shard is named without its channel.
        """
        read = {(each.channel, int(each.shard)) for each in shards}
        if len(channels := {channel for channel, _ in read}) == 1:
            read |= {("", number) for _, number in read}
        for channel, number in sorted(self.named.keys() - read):
            if not channel and len(channels) > 1:
                raise InvalidSetting(
                    f"{source}: shard {number} is named without its channel, and the query reads several: "
                    f'{{"{min(channels)}": {{"{number}": …}}}}'
                )
            of = f"channel {channel}" if channel else "the channel"
            raise InvalidSetting(
                f"{source}: {of} has no shard {number}; the query reads {', '.join(sorted(map(str, shards)))}"
            )


def is_begin(name: str) -> bool:
    """Whether a name in an offset of Spark's says where the query began."""
    return name.startswith(BEGIN)


def parse_offsets(source: str, name: str, text: str, default: Place) -> Where:
    """The value of an option that takes words and offsets.

    Raises:
        InvalidSetting: It is neither a word nor JSON with an offset for each shard.
    """
    if text.lower() in {EARLIEST, LATEST}:
        return Where(EARLIEST if text.lower() == EARLIEST else LATEST)
    return Where(default, _parse_shards(source, name, text, _parse_offset, _OFFSETS))


def parse_times(source: str, name: str, text: str, default: Place) -> Where:
    """The value of an option that takes a time for each shard.

    Raises:
        InvalidSetting: It is not JSON with a time for each shard.
    """
    return Where(default, _parse_shards(source, name, text, _parse_since, _TIMES))


def parse_time(source: str, name: str, text: str) -> Where:
    """The value of an option that takes one time for all shards.

    Raises:
        InvalidSetting: It is not a time.
    """
    try:
        return Where(_parse_since(text))
    except ValueError:
        raise InvalidSetting(f"{source}: {name} is {text[:80]!r}; it takes {_TIME}") from None


def _parse_shards(
    source: str, name: str, text: str, parse: Callable[[Any], Place], takes: str
) -> dict[tuple[str, int], Place]:
    """Kafka's nested form, ``{"rides": {"0": 4118}}``, or that of one channel, ``{"0": 4118}``."""
    try:
        found: dict[tuple[str, int], Place] = {}
        for key, value in parse_json(text).items():
            if is_begin(key):  # of a progress's endOffset, which may be given as it is
                continue
            shards = (
                {("", key): value}
                if not isinstance(value, dict)
                else {(key, shard): each for shard, each in value.items()}
            )
            found |= {(channel, int(shard)): parse(each) for (channel, shard), each in shards.items()}
    except (ValueError, TypeError, AttributeError):
        raise InvalidSetting(f"{source}: {name} is {text[:80]!r}; it takes {takes}") from None
    return found


def _parse_offset(value: Any) -> Place:
    if value in (EARLIEST, LATEST):
        return EARLIEST if value == EARLIEST else LATEST
    if type(value) is int and value in _NUMBERS:
        return _NUMBERS[value]
    if type(value) is int and value >= 1:
        return Offset(value)
    raise ValueError(value)


def _parse_since(value: Any) -> Since:
    text = str(value)
    if text.isascii() and text.isdigit():
        return Since(int(text) * 1000)
    at = datetime.fromisoformat(text)
    if at.tzinfo is None:
        raise ValueError(text)
    return Since(round(at.timestamp() * 1_000_000))
