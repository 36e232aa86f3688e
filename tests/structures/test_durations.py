"""Each duration of a call of a structure is sent to Redis, or to Postgres, in the unit of its argument.

What the scripts do with it, to the millisecond, is compared elsewhere, by clocks that tests set.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from time import monotonic
from typing import Any

import pytest
import redis
from sqlalchemy import Column, Engine, Integer, MetaData, Table, event

from fixtures.sent import listen
from penstock import Unique, clients
from penstock.channels.ick.reservations import HolderWatch
from penstock.channels.queue.rounds import ReaderOptions
from penstock.clients import FairQueue, LogGroup, LogReader, LogWriter, PinnedKeys, PlainStream, VolatileHash
from penstock.errors import LockBusy

S, MS, US = 0.125, "125", "125000"
MOMENT = datetime(2126, 1, 1, 0, 0, 0, 125_000, tzinfo=UTC)


class Server:
    """The run's server, and clients of it."""

    def __init__(self, url: str, clients: ExitStack) -> None:
        self.url, self._clients = url, clients
        self.pins, self.hash = self.open(PinnedKeys.connect(url, "p")), self.open(VolatileHash.connect(url, "h"))
        self.queue = self.open(FairQueue.connect(url, "q"))

    def open(self, client: Any) -> Any:
        """A client that is closed with the test."""
        return self._clients.enter_context(client)

    def reader(self, **options: Any) -> Any:
        """A reader of the queue."""
        return self.open(self.queue.reader(**options))

    def lease(self) -> Any:
        """The lease of a message."""
        self.queue.write("t", b"x")
        [lease] = self.reader(lease_s=30).read()
        return lease

    def log(self) -> Any:
        """A reader of the log."""
        return self.open(LogReader.connect(self.url, "l"))

    def group(self, **options: Any) -> Any:
        """A reader of a group."""
        return self.open(LogGroup.connect(self.url, "l", "g", **options))

    def append(self) -> Any:
        """A writer of the log, which has a record then."""
        writer = self.open(LogWriter.connect(self.url, "l"))
        writer.append(["x"])
        return writer


def extended(server: Server) -> None:
    """Extends a lease, as its reader's thread does."""
    reader = server.reader(lease_s=S)
    server.queue.write("t", b"x")
    [lease] = reader.read()
    lease.held.extended_at = 0.0
    reader._heartbeat.beat()
    assert not lease.is_stale
    assert lease.held.extended_at, "what need not be extended again"


def write_with(server: Server, **fields: Any) -> None:
    server.queue.write("t", b"x", **fields)


def swept(server: Server) -> None:
    server.reader().read()


def exact(name: str, of: str | int, value: str = MS) -> tuple[str, Callable[[dict[str, Any]], Any], str]:
    """A script's argument, or that of its items at a place; or a command's word."""
    if isinstance(of, str):
        return name, lambda sent: sent[of], value
    return name, lambda sent: sent["items" if name.islower() else "words"][of], value


Row = tuple[Callable[[Server], Any], tuple[str, Callable[[dict[str, Any]], Any], str]]

SENT: dict[str, Row] = {
    "FencedLock lease_s": (lambda s: s.pins.lock("l", lease_s=S).acquire(0), exact("pinned/lock", "lease")),
    "PinnedKeys.lock lease_s": (lambda s: s.pins.lock("l", lease_s=S).acquire(0), exact("pinned/lock", "lease")),
    "Grant.renew lease_s": (lambda s: s.pins.lock("l", lease_s=30).acquire(0).renew(S), exact("pinned/renew", "ttl")),
    "Grant lease_s": (lambda s: s.pins.lock("l", lease_s=S).acquire(0).renew(), exact("pinned/renew", "ttl")),
    "PinnedKeys.put ttl_s": (lambda s: s.pins.put("k", b"v", S), exact("pinned/put", "ttl")),
    "PinnedKeys.put, when it is old": (lambda s: s.pins.put("k", b"v", S), exact("pinned/put", "fresh")),
    "PinnedKeys.renew ttl_s": (lambda s: s.pins.renew("k", S), exact("pinned/renew", "ttl")),
    "PinnedKeys.compute ttl_s": (lambda s: s.pins.compute("k", lambda: b"v", S, fresh_s=1), exact("pinned/put", "ttl")),
    "PinnedKeys.compute fresh_s": (
        lambda s: s.pins.compute("k", lambda: b"v", 1, fresh_s=S),
        exact("pinned/put", "fresh"),
    ),
    "PinnedKeys.compute, when it is old": (
        lambda s: s.pins.compute("k", lambda: b"v", S),
        exact("pinned/put", "fresh"),
    ),
    "PinnedKeys.compute lease_s": (
        lambda s: s.pins.compute("k", lambda: b"v", 1, lease_s=S),
        exact("pinned/lock", "lease"),
    ),
    "VolatileHash.hset ttl_s": (lambda s: s.hash.hset("f", b"v", S), exact("volatile/set", "ttl")),
    "VolatileHash.hset_many ttl_s": (lambda s: s.hash.hset_many({"f": b"v"}, S), exact("volatile/set", "ttl")),
    "VolatileHash.hexpire ttl_s": (lambda s: s.hash.hexpire("f", S), exact("volatile/expire", "ttl")),
    "Lease.done seconds": (lambda s: s.lease().done(seconds=S), exact("queue/settle", 4, "0.125000")),
    "Lease.fail delay_s": (lambda s: s.lease().fail("why", delay_s=S), exact("queue/settle", 3)),
    "Lease.snooze delay_s": (lambda s: s.lease().snooze(S), exact("queue/settle", 3)),
    "ReaderOptions lease_s": (lambda s: s.reader(lease_s=S).read(), exact("queue/take", "lease")),
    "ReaderOptions lease_s, extended": (extended, exact("queue/extend", "lease")),
    "between sweeps": (swept, exact("queue/sweep", "interval", "1000")),
    "NewMessage delay_s": (lambda s: s.queue.write("t", b"x", delay_s=S), exact("queue/write", 4, f"+{MS}")),
    "NewMessage due": (lambda s: s.queue.write("t", b"x", due=MOMENT), exact("queue/write", 4, "4922899200125")),
    "NewMessage deadline": (
        lambda s: s.queue.write("t", b"x", deadline=MOMENT),
        exact("queue/write", 5, "4922899200125"),
    ),
    **{
        f"Unique window {type(window).__name__}": (
            partial(write_with, unique=Unique("u", window=window)),
            exact("queue/write", 8),
        )
        for window in (S, timedelta(seconds=S), "125ms")
    },
    "GroupOptions retry_s": (lambda s: s.group(retry_s=S).read(), exact("log/group/read", "retry")),
    "GroupOptions expire_s": (lambda s: s.group(retry_s=1, expire_s=S).read(), exact("log/group/read", "expire")),
    "LogWriter.evict older_than_s": (lambda s: s.append().evict(older_than_s=S), exact("log/evict", "age_us", US)),
    "LogReader.offset_at slack_s": (
        lambda s: s.log().offset_at(MOMENT, slack_s=S),
        exact("log/seek", "threshold", "4922899200000000"),
    ),
    "PlainStream idle_s": (
        lambda s: s.queue.adopt(PlainStream("stream", "g", lambda _: "t", lambda _: b"x", idle_s=S)),
        exact("XAUTOCLAIM", 3),
    ),
}
"""A call, and its duration in what is sent."""


@pytest.fixture
def server(redis_url: str, redis_client: redis.Redis) -> Iterator[Server]:
    redis_client.xadd("stream", {"a": "b"})
    redis_client.xgroup_create("stream", "g", "$")
    with ExitStack() as opened:
        yield Server(redis_url, opened)


@pytest.mark.parametrize("name", SENT)
def test_the_server_is_told_the_time_that_was_given(name: str, server: Server) -> None:
    call, (what, read, expected) = SENT[name]
    if name.startswith("LogReader"):
        server.append()

    sent = listen(server.url, what, partial(call, server))
    assert {read(each) for each in sent} == {expected}


WAITS: dict[str, tuple[Callable[[Server], object], str]] = {
    "QueueReader.read block_s": (lambda s: s.reader().read(block_s=S), "BLPOP"),
    "LogReader.read block_s": (lambda s: s.log().read(block_s=S), "XREAD"),
    "LogReader.read_any block_s": (lambda s: s.log().read_any({0: 1}, block_s=S), "XREAD"),
    "LogGroup.read block_s": (lambda s: s.group().read(block_s=S), "XREAD"),
}
"""A call that finds nothing, and the command that waits for as long as it may."""

MOST_WAITS = 10
"""A wait that is too short is repeated, a hundred times within this time."""


@pytest.mark.parametrize("name", WAITS)
def test_a_call_that_finds_nothing_waits_for_the_time_that_was_given(name: str, server: Server) -> None:
    call, command = WAITS[name]
    began = monotonic()
    sent = listen(server.url, command, partial(call, server))
    assert monotonic() - began >= S
    assert 0 < len(sent) < MOST_WAITS
    for each in sent:
        words = each["words"]
        waited_s = float(words[-1]) if command == "BLPOP" else int(words[words.index("BLOCK") + 1]) / 1000
        assert 0 < waited_s <= S


def hold(server: Server) -> Any:
    lock = server.pins.lock("l")
    lock.acquire(0)
    return lock


LOCKS: dict[str, Callable[[Server], object]] = {
    "FencedLock.acquire wait_s": lambda s: hold(s).acquire(S),
    "FencedLock.hold wait_s": lambda s: hold(s).hold(S).__enter__(),
    "PinnedKeys.compute wait_s": lambda s: s.pins.compute(
        "l", lambda: s.open(PinnedKeys.connect(s.url, "p")).compute("l", lambda: b"", 1, wait_s=S), 1
    ),
}
"""A call that finds the lock held."""


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_that_is_held_is_waited_for_as_long_as_was_said(name: str, server: Server) -> None:
    began = monotonic()
    with pytest.raises(LockBusy, match=re.escape("0.125 s")):
        LOCKS[name](server)
    assert monotonic() - began >= S


def test_a_statement_of_a_tracker_takes_no_longer_than_was_said(engine: Engine) -> None:
    said: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *call: said.append(f"{call[2]} {call[3]}"))
    table = Table("queued", MetaData(), Column("id", Integer))
    table.create(engine)
    ids = clients.queued_ids_in(engine, table.c.id, timeout_s=S)
    said.clear()
    assert ids.walk(None, 1) == []
    assert [each for each in said if re.search("timeout", each)] != []
    assert all(re.search(rf"\b{MS}(ms)?\b", each) for each in said if "timeout" in each)


ELSEWHERE = {
    "ReaderOptions limit_s": "tests/channels/queue/test_readers.py",
    "HolderWatch takeover_after_s": "tests/channels/ick/test_reservations.py",
    "queued_ids_in timeout_s": "above",
}


def _parameters() -> set[str]:
    """The parameters of all that is public whose names say that they are times."""
    found = set()
    public: dict[str, Any] = {name: getattr(clients, name) for name in clients.__all__ if "Async" not in name}
    for name, thing in (
        public | {"ReaderOptions": ReaderOptions, "HolderWatch": HolderWatch, "Unique": Unique}
    ).items():
        functions = {name: thing}
        if inspect.isclass(thing):
            functions |= {f"{name}.{each}": getattr(thing, each) for each in dir(thing) if not each.startswith("_")}
        for place, function in functions.items():
            with suppress(TypeError, ValueError):
                found |= {f"{place} {each}" for each in inspect.signature(function).parameters if _is_time(each)}
    return found


def _is_time(name: str) -> bool:
    return name.endswith("_s") or name in {"seconds", "due", "deadline", "window"}


RESULTS = {"GroupState due_in_s", "GroupState due", "QueueStats oldest_s", "QueueStats longest_wait_s"}


def test_every_time_is_listed() -> None:
    listed = {" ".join(name.replace(",", "").split(" ")[:2]) for name in (*SENT, *WAITS, *LOCKS, *ELSEWHERE)}

    assert _parameters() - RESULTS <= listed
