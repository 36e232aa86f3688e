"""What can be done to a group besides reading."""

from collections.abc import Iterable, Sequence
from typing import get_args

from penstock.channels.routing import GroupKeys
from penstock.channels.scripts import Call
from penstock.clients.log.arguments import check_number
from penstock.clients.log.groups.options import Start
from penstock.clients.log.groups.results import parse_moved
from penstock.clients.log.groups.steps import Ask, Steps
from penstock.records import Offset, OffsetRange, Record, ShardName

RANGES = 500
"""Most ranges of one call."""


def acknowledge(keys: GroupKeys, ranges: Sequence[tuple[int, int]]) -> Steps[int]:
    """Acknowledges records of a shard, by first and last offset; returns how many were pending."""
    _, due, pending = keys.ledger
    acknowledged = 0
    for at in range(0, len(ranges), RANGES):
        flat = [offset for each in ranges[at : at + RANGES] for offset in each]
        [reply] = yield Ask("log/group/acknowledge", [Call((due, pending), flat)])
        acknowledged += int(reply[1])
    return acknowledged


def move(keys: GroupKeys, shard: ShardName, group: str, to: int | Start) -> Steps[Offset]:
    """Moves the cursor; returns the offset that is read next.

    Raises:
        InvalidLogCall: ``to`` is no offset.
    """
    if to not in get_args(Start):
        check_number("to", to)
    own = (keys.log.stream, keys.log.epoch, keys.cursor, *keys.ledger)
    [reply] = yield Ask("log/group/move", [Call(own, (to,))])
    return parse_moved(reply, shard, group)


def find_ranges(records: Iterable[Record]) -> dict[int, list[tuple[int, int]]]:
    """The offsets of records, as ranges by the number of their shard."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    for record in sorted(records, key=lambda each: (each.shard, each.offset)):
        of = ranges.setdefault(record.shard, [])
        if of and of[-1][1] >= record.offset - 1:
            of[-1] = (of[-1][0], int(record.offset))
        else:
            of.append((int(record.offset), int(record.offset)))
    return ranges


def checked_ranges(offsets: Sequence[int | tuple[int, int] | OffsetRange]) -> list[tuple[int, int]]:
    """Offsets and ranges of them, as ranges.

    Raises:
        InvalidLogCall: One of them ends before it begins, or is no offset.
    """
    ranges = []
    for each in offsets:
        match each:
            case OffsetRange():
                first, last = int(each.first), int(each.last)
            case (first, last):
                pass
            case _:
                first = last = each
        check_number("offsets", first, 1)
        ranges.append((first, check_number("offsets", last, first)))
    return ranges
