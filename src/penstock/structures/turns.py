"""Reading as one of a group, without any input or output.

A group's readers take records in turn.  A reader that finds none joins the line, in Redis.  The
first in the line watches the log.  When records come, it takes its share of them, which is what is
there divided by the number of readers in the line, and leaves; the next one becomes the first, is
woken, and does the same.  So a burst is divided among all that wait, and who was served goes to the
end.

The line is a hint.  It decides who is woken, and nothing is assigned to a reader before it comes:
one that dies takes no record with it.  A wake-up that is lost, since the first in the line has
died, costs at most ``HEARTBEAT_S``: then the others look for themselves.
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic

import structlog

from penstock.batches.columns import CODECS, is_installed
from penstock.channels.commands import RedisCommands
from penstock.channels.driving import Steps
from penstock.channels.log.arguments import MAX_COUNT, check_number, refuse_left_out, wait_for_more
from penstock.channels.log.log_reader import MAX_BYTES
from penstock.channels.routing import GroupKeys, group_keys, next_shards
from penstock.channels.scripts import Call, script
from penstock.errors import PenstockError
from penstock.records import Offset, ShardName
from penstock.structures.group_options import GroupOptions
from penstock.structures.group_results import GroupState, ShardRead, Taken, parse_read, parse_state

log = structlog.get_logger("penstock.log")

HEARTBEAT_S = 0.5
"""Heartbeat interval of a waiting reader, in seconds; it then also looks for records that nobody
takes."""

VALID_MS = 1500
"""Milliseconds without a heartbeat after which a waiting reader has left the line."""

YIELD_S = 0.1
"""Seconds that a new reader lets those already waiting go first."""

GRACE_S = 0.05
"""Seconds for which records may wait before a reader takes them out of turn."""

CHECK_S = 60.0
"""Seconds between two checks for shards that the group leaves out."""

FULL_S = 0.1
"""Seconds until a shard at its pending limit is checked again."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A reader's place in the line (-1 if not in it), number of others, and wake-up list."""

    place: int
    others: int
    wake: int


@dataclass(frozen=True, slots=True)
class _Attempt:
    """Result of an attempt to read: records, and where and how long to wait for more."""

    taken: Taken
    positions: Mapping[ShardName, Offset]
    wait_s: float

    @property
    def is_something(self) -> bool:
        """Returns whether there is something to return to the caller."""
        return bool(self.taken or self.taken.missed or self.taken.dropped)


class GroupReader:
    """Decides what one reader of a group asks Redis for."""

    def __init__(self, client: RedisCommands, options: GroupOptions) -> None:
        """Sets up; nothing is sent."""
        self._client, self.options = client, options
        self._name = uuid.uuid4().hex[:16]
        self.shards = {
            shard: group_keys(options.namespace, shard, options.group)
            for shard in map(options.shard, range(options.shards))
        }
        self._known: set[ShardName] = set()
        self._error: PenstockError | None = None
        self._round = 0
        self._check_at = 0.0
        self._codecs = f" {' '.join(codec for codec in CODECS if is_installed(codec))} "

    def read(self, count: int, block_s: float) -> Steps[Taken]:
        """Returns the next records; see ``LogGroup.read``."""
        check_number("count", count, 1, MAX_COUNT)
        self._raise_error()
        yield from self._refuse_left_out()
        until = monotonic() + block_s
        line = yield from self._ask_line("look")
        if line.others == 0 or block_s <= 0:
            attempt = yield from self._attempt(count, line)
            if attempt.is_something or block_s <= 0:
                return attempt.taken
        return (yield from self._wait(count, until))

    def _refuse_left_out(self) -> Steps[None]:
        if monotonic() >= self._check_at:
            options = self.options
            further = next_shards(options.log, options.shards)
            yield from refuse_left_out(options.namespace, options.shards, further)
            self._check_at = monotonic() + CHECK_S

    def _wait(self, count: int, until: float) -> Steps[Taken]:
        patience_s, is_overdue = YIELD_S, False
        while True:
            line = yield from self._ask_line("wait")
            attempt = None
            if line.place == 0 or is_overdue:
                attempt = yield from self._attempt(count, line)
                if attempt.is_something:
                    return attempt.taken
            remaining_s = until - monotonic()
            if remaining_s <= 0:
                yield from self._ask_line("leave")
                return Taken()
            if attempt is not None and line.place == 0:
                yield from self._watch(attempt, self._wake(line), min(remaining_s, HEARTBEAT_S))
                is_overdue = False
            else:
                wait_s = max(0.01, min(remaining_s, patience_s))
                is_overdue = yield from self._await_turn(self._wake(line), wait_s)
                patience_s = HEARTBEAT_S

    def _await_turn(self, key: str, wait_s: float) -> Steps[bool]:
        """Waits to be woken.

        Returns whether nobody takes the available records, though it was another reader's turn.
        """
        if (yield from _is_woken(key, wait_s)):
            return False
        states = yield from self.states()
        if not any(map(self._available, states.values())):
            return False
        return not (yield from _is_woken(key, GRACE_S))

    def _watch(self, attempt: _Attempt, wake: str, longest_s: float) -> Steps[None]:
        """Waits for records, or, where none can be taken, until it is time to try again."""
        wait_s = max(0.01, min(longest_s, attempt.wait_s))
        if attempt.positions:
            yield from wait_for_more(
                self._client, self.options.namespace, attempt.positions, wait_s
            )
        else:
            yield from _is_woken(wake, wait_s)

    def _wake(self, line: _Line) -> str:
        return self._home.wake(line.wake)

    @property
    def _home(self) -> GroupKeys:
        """Returns the keys of the group itself, which are in the first shard's slot."""
        return self.shards[self.options.shard(0)]

    def _ask_line(self, word: str) -> Steps[_Line]:
        call = Call(self._home.line, (self._name, word, VALID_MS))
        [[_, place, others, wake]] = yield from script("log/group/line").checked_steps([call])
        return _Line(int(place), int(others), int(wake))

    def _attempt(self, count: int, line: _Line) -> Steps[_Attempt]:
        """Takes this reader's share and leaves the line with it, so that the next one comes."""
        try:
            attempt = yield from self._take(count, line.others)
        except PenstockError:
            yield from self._leave(line)
            raise
        if attempt.is_something:
            yield from self._leave(line)
        return attempt

    def _leave(self, line: _Line) -> Steps[None]:
        if line.place >= 0:
            yield from self._ask_line("leave")

    def _take(self, count: int, others: int) -> Steps[_Attempt]:
        states: Mapping[ShardName, GroupState] = {}
        if others or len(self.shards) > 1:
            states = yield from self.states()
            total = sum(map(self._available, states.values()))
            count = min(count, max(1, -(-total // (others + 1))))
        records, positions, waits = Taken(), dict[ShardName, Offset](), [HEARTBEAT_S]
        remaining_bytes = MAX_BYTES
        for shard in self._rotated():
            if len(records) >= count or remaining_bytes <= 0:
                break
            state = states.get(shard)
            if state is not None and not self._is_worth_reading(state):
                read = self._nothing(state)
            else:
                shard_read = yield from self._read_shard(
                    shard, count - len(records), remaining_bytes, records
                )
                if shard_read is None:
                    break
                read = shard_read
            records += read.taken
            remaining_bytes -= read.bytes
            if read.after is not None:
                positions[shard] = read.after
            waits.append(FULL_S if read.after is None else HEARTBEAT_S)
            waits += [] if read.due_in_s is None else [read.due_in_s]
        return _Attempt(records, positions, min(waits))

    def _rotated(self) -> list[ShardName]:
        """Returns the shards, beginning with another one each time."""
        self._round += 1
        shards = [*self.shards]
        begin = self._round % len(shards)
        return shards[begin:] + shards[:begin]

    def _available(self, state: GroupState) -> int:
        return state.available(self.options.pending_limit)

    def _is_worth_reading(self, state: GroupState) -> bool:
        """Returns whether a read would take or report something.

        That includes a group that has to begin, and a log that ends before the cursor.
        """
        offset = state.next_offset
        return offset is None or state.tail < offset - 1 or self._available(state) > 0

    @staticmethod
    def _nothing(state: GroupState) -> ShardRead:
        offset = state.next_offset
        is_at_end = offset is not None and state.tail < offset
        return ShardRead(Taken(), state.tail if is_at_end else None, state.due_in_s)

    def _read_shard(
        self, shard: ShardName, count: int, max_bytes: int, earlier: Taken
    ) -> Steps[ShardRead | None]:
        """Reads a shard; returns None if that fails after records of other shards were read.

        The caller gets those first.
        """
        options = self.options
        keys = self.shards[shard]
        names = (keys.log.stream, keys.log.epoch, keys.log.ends, keys.cursor, *keys.ledger)
        pending = (
            _milliseconds(options.retry_s),
            _milliseconds(options.expire_s),
            options.max_pending,
        )
        limits = *pending, int(options.evicted == "skip"), max_bytes
        call = Call(
            names, (count, options.start or "", int(shard in self._known), *limits, self._codecs)
        )
        [reply] = yield from script("log/group/read").checked_steps([call])
        try:
            read = parse_read(reply, shard, options.group)
        except PenstockError as error:
            if not earlier:
                raise
            self._error = error
            return None
        self._known.add(shard)
        self._report(read.taken)
        self._error = self._error or read.error
        return read

    def _report(self, records: Taken) -> None:
        """Logs skipped records: a caller may not ask for them."""
        for why, ranges in (("missed", records.missed), ("dropped", records.dropped)):
            for skipped in ranges:
                place = {"shard": str(skipped.shard), "first": skipped.first, "last": skipped.last}
                log.warning("records skipped", group=self.options.group, **place, reason=why)

    def _raise_error(self) -> None:
        """Raises the error that the last read met after the records that it returned."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def states(self, *, whole: bool = False) -> Steps[dict[ShardName, GroupState]]:
        """Returns the group in each shard; only ``whole`` looks for the log's first record."""
        calls = [
            Call((keys.log.stream, keys.log.epoch, keys.cursor, *keys.ledger), (int(whole),))
            for keys in self.shards.values()
        ]
        replies = yield from script("log/group/info").checked_steps(calls)
        return {
            shard: parse_state(reply, shard, self.options.group)
            for shard, reply in zip(self.shards, replies, strict=True)
        }


def _is_woken(key: str, seconds: float) -> Steps[bool]:
    """Waits on a reader's wake-up list, at most ``seconds``; returns whether it was woken."""
    return (yield lambda client: client.blpop([key], timeout=seconds)) is not None


def _milliseconds(seconds: float | None) -> int:
    return 0 if seconds is None else max(1, int(seconds * 1000))
