"""Checks of arguments of readers, writers and groups of a log, and steps that they share."""

from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Literal, get_args

import redis
import redis.asyncio

from penstock.channels.commands import RedisCommands
from penstock.channels.driving import Sleep, Steps
from penstock.channels.log.follower import POLL_S
from penstock.channels.log.streams import ask_for_more
from penstock.channels.routing import log_keys
from penstock.channels.server import redis_errors
from penstock.declaring.kinds import LogChannel, refuse_sources
from penstock.errors import InvalidLogCall
from penstock.records import Offset, ShardName

NEWEST = Offset((1 << 53) - 1)
"""Beyond every offset: a script's numbers are exact up to here."""

MAX_COUNT = 1000
"""Most records of one read."""

MAX_S = 1e9
"""Upper limit of a time, in seconds, if nothing else bounds it: thirty years."""

Source = Literal["auto", "redis", "journal"]
"""Source of records: the journal for evicted records only, for none, or for all."""


def name_and_shards(log: LogChannel | str) -> tuple[str, int]:
    """Returns the name of a log and its number of shards; 1 if only the name is given.

    Raises ``DeclarationError``.
    """
    if not isinstance(log, LogChannel):
        return log, 1
    example = f"'{log.name}@{log.sources[0]}'" if log.sources else ""
    refuse_sources(log, "reader of a log", f"each has its own: give the name of one, {example}")
    return log.name, log.shards


def check_source(source: str, *, has_journal: bool) -> None:
    """Refuses an unknown source, or one that a reader does not have.  Raises ``InvalidLogCall``."""
    check_choice("source", source, get_args(Source))
    if source == "journal" and not has_journal:
        raise InvalidLogCall(
            "source", "is 'journal', and this reader has none: give it older=JournalRecords(…)"
        )


def check_choice(field: str, chosen: object, choices: tuple[str | None, ...]) -> None:
    """Refuses a value that is none of the choices.  Raises ``InvalidLogCall``."""
    if not (chosen is None or isinstance(chosen, str)) or chosen not in choices:
        raise InvalidLogCall(field, f"is {chosen!r}; it takes {', '.join(map(repr, choices))}")


def check_number(field: str, number: object, minimum: int = 0, maximum: int = NEWEST) -> int:
    """Returns the number, if it is a whole one within the limits.  Raises ``InvalidLogCall``."""
    if not isinstance(number, int) or isinstance(number, bool) or not minimum <= number <= maximum:
        raise InvalidLogCall(field, f"is {number!r}; it takes {minimum:,} to {maximum:,}")
    return number


def check_seconds(
    field: str, seconds: object, minimum: float = 0.0, maximum: float = MAX_S
) -> float:
    """Returns the seconds, if they are a number within the limits.  Raises ``InvalidLogCall``."""
    if (
        not isinstance(seconds, int | float)
        or isinstance(seconds, bool)
        or not minimum <= seconds <= maximum
    ):
        raise InvalidLogCall(
            field, f"is {seconds!r}; it takes {minimum:g} to {maximum:,.0f} seconds"
        )
    return seconds


def wait_for_more(
    client: RedisCommands, namespace: str, positions: Mapping[ShardName, Offset], seconds: float
) -> Steps[None]:
    """Waits until a shard has an entry after its position, at most ``seconds``.

    No single command can wait for several shards of a Cluster, which may be on several servers:
    they are polled.
    """
    if (
        not isinstance(client, redis.RedisCluster | redis.asyncio.RedisCluster)
        or len(positions) == 1
    ):
        streams = {
            log_keys(namespace, shard).stream: f"{offset}-0" for shard, offset in positions.items()
        }
        yield lambda client: client.xread(streams, count=1, block=max(1, int(seconds * 1000)))
        return
    until = monotonic() + seconds
    while monotonic() < until:
        if any(
            (
                yield lambda client: ask_for_more(client, namespace, positions).execute(
                    raise_on_error=False
                )
            )
        ):
            return
        yield Sleep(POLL_S)


def refuse_left_out(namespace: str, shards: int, unchecked: Sequence[ShardName]) -> Steps[None]:
    """Refuses a number of shards if Redis has shards beyond it.

    Their records would be left out silently.  ``unchecked`` is the first of the further shards that
    a resharded log would have: see ``next_shards``.  Raises ``InvalidLogCall``,
    ``ServerUnavailable`` or ``ForeignLog``.
    """
    keys = [log_keys(namespace, shard).epoch for shard in unchecked]

    def ask(client: RedisCommands) -> object:
        pipeline = client.pipeline(transaction=False)
        for key in keys:
            pipeline.get(key)
        return pipeline.execute()

    with redis_errors("looking for further shards"):
        epochs = yield ask
    written = [
        str(shard) for shard, epoch in zip(unchecked, epochs, strict=True) if epoch is not None
    ]
    if written:
        raise InvalidLogCall(
            "shards",
            f"is {shards}, and Redis has {', '.join(written)}: the log was resharded, and their "
            "records would be left "
            "out. Give the total number of its shards, old and new, shards=…; `penstock status` "
            "shows them",
        )
