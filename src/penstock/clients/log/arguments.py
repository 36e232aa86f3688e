"""Arguments of readers, writers and groups of a log, checked; the error names the argument."""

from typing import Literal, get_args

from penstock.declaring.kinds import Log, refuse_sources
from penstock.errors import InvalidLogCall
from penstock.records import Offset

NEWEST = Offset((1 << 53) - 1)
"""Beyond every offset: a script's numbers are exact up to here."""

MAX_S = 1e9
"""Upper limit of a time, in seconds, if nothing else bounds it: thirty years."""

Source = Literal["auto", "redis", "journal"]
"""Source of records: the journal for those that Redis has evicted, for none, or for all."""


def name_and_shards(log: Log | str) -> tuple[str, int]:
    """The name of a log and the number of its shards: that of the channel; 1 if only the name is given.

    Raises ``DeclarationError``.
    """
    if not isinstance(log, Log):
        return log, 1
    example = f"'{log.name}@{log.sources[0]}'" if log.sources else ""
    refuse_sources(log, "reader of a log", f"each has its own: give the name of one, {example}")
    return log.name, log.shards


def check_source(source: str, *, has_journal: bool) -> None:
    """Refuses a source that is none, or that a reader does not have.  Raises ``InvalidLogCall``."""
    if source not in get_args(Source):
        raise InvalidLogCall("source", f"is {source!r}; it takes {', '.join(get_args(Source))}")
    if source == "journal" and not has_journal:
        raise InvalidLogCall("source", "is 'journal', and this reader has none: give it older=JournalRecords(…)")


def check_choice(field: str, chosen: object, choices: tuple[str | None, ...]) -> None:
    """Refuses what is none of the choices.  Raises ``InvalidLogCall``."""
    if not (chosen is None or isinstance(chosen, str)) or chosen not in choices:
        raise InvalidLogCall(field, f"is {chosen!r}; it takes {', '.join(map(repr, choices))}")


def check_number(field: str, number: object, least: int = 0, most: int = NEWEST) -> int:
    """The number, if it is a whole one within these limits.  Raises ``InvalidLogCall``."""
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
        raise InvalidLogCall(field, f"is {number!r}; it takes {least:,} to {most:,}")
    return number


def check_seconds(field: str, seconds: object, least: float = 0.0, most: float = MAX_S) -> float:
    """The seconds, if they are a number within these limits.  Raises ``InvalidLogCall``."""
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not least <= seconds <= most:
        raise InvalidLogCall(field, f"is {seconds!r}; it takes {least:g} to {most:,.0f} seconds")
    return seconds
