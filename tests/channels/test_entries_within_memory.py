"""Guarantee 30, of memory: an entry of a few kilobytes costs no reader hundreds of megabytes before it is damaged."""

import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import redis
import zstandard
from sqlalchemy.orm import Session

from fixtures.damaged_entries import Fields, mutate, rewrite, zstd_frame
from fixtures.flow import OpenWorker, Publish
from fixtures.inspecting import Diagnose
from fixtures.libraries import Zstandard
from fixtures.verifying import Verify
from penstock import Log, Pipeline
from penstock.batches.columns import MAX_BYTES, Columns
from penstock.batches.entry import FIELDS, MAX_RECORDS, Entry
from penstock.channels.log.stream_entries import parse_entries, parse_leading
from penstock.cli.app import main
from penstock.clients import LogReader
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.errors import CodecMissing, DamagedEntry, ForeignLog
from penstock.operating.tracing.causes import trace
from penstock.records import Offset, Record, Shard, ShardName
from penstock.spark.sources import task_process
from penstock.spark.sources.record_readers import BatchReader
from penstock.spark.sources.record_store import LogStore
from penstock.spark.sources.source_options import Options

pytestmark = pytest.mark.things(shards=1, compression="zstd")

SHARD = ShardName("things", Shard(0))
STREAM = "penstock:{things/0}:log"
MORE = 400 * 1024 * 1024
ROWS = [(i, f"k{i}", "insert", "thing", '{"n": 1}', "", 1_000_000 + i) for i in range(1, 6)]

Bomb = Callable[[], Fields]


def pack(rows: Sequence[Any], codec: Any = "none", last: int | None = None) -> Fields:
    """An entry that ends at an offset: that of the last row's id, unless another is given."""
    columns = Columns.pack(rows).compressed(codec)
    first = Offset((rows[-1][0] if last is None else last) - len(rows) + 1)
    return dict(zip(FIELDS, Entry(SHARD, first, columns).values(), strict=True))


def compressed(**columns: bytes) -> Bomb:
    """An entry of five records, with these frames in place of its columns."""
    return lambda: pack(ROWS, "zstd") | {name.encode(): value for name, value in columns.items()}


def repeated(text: bytes, size: int = MAX_BYTES) -> bytes:
    return zstandard.compress(text * (size // len(text)), 1)


def many(count: int) -> Fields:
    """An entry that says of itself that it holds many records, in a hundred bytes."""
    fields = pack(ROWS[:1], last=count)
    return fields | {b"first": b"1", b"to": b"%d 1000001" % count}


BOMBS: dict[str, Bomb] = {
    "lists in place of keys": compressed(keys=repeated(b"[],")),
    "a key that is too long": compressed(keys=zstandard.compress(b'"' + b"k" * MAX_BYTES + b'"', 1)),
    "an object that is a list": lambda: pack(ROWS) | {b"objects": b"[],\n" * (1 << 20)},
    "digits in place of an id": compressed(ids=zstd_frame(b"9", MAX_BYTES, says=MAX_BYTES)),
    "lines without an end": compressed(times=zstd_frame(b"\n", MAX_BYTES, says=MAX_BYTES)),
    "a payload of a gigabyte": compressed(data=zstd_frame(b"a", 1 << 30, says=1 << 30)),
    "a payload that understates its size": compressed(data=zstd_frame(b"a", 1 << 30, says=9)),
    "a payload that says nothing of its size": compressed(data=zstd_frame(b"a", 1 << 30)),
    "headers that say more than there is": compressed(headers=zstd_frame(b"a", 1, says=1 << 62)),
    "a million records": lambda: many(1_000_000),
}


def peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


@contextmanager
def memory_limit(more: int = MORE) -> Iterator[None]:
    """What is within it may have so much memory more than there is, and uses half of that.

    A reader survives the limit itself: there it takes the entry for damaged.
    """
    Path("/proc/self/clear_refs").write_text("5")  # the most that was used is what is used
    used = peak()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert peak() - used < more // 2


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_damage(bomb: str) -> None:
    fields = BOMBS[bomb]()
    last = 1_000_000 if bomb == "a million records" else 5
    assert sum(map(len, fields.values())) < 5 << 20

    with memory_limit(), pytest.raises(DamagedEntry, match=r"its (column|first).* cannot be read"):
        parse_entries(SHARD, [(b"%d-0" % last, fields)])


def test_the_largest_entry_that_is_written_is_read() -> None:
    """Keys of 1,024 characters that take six bytes each: 60 MB of JSON, in a second."""
    rows = [(i, "\1" * 1000 + f"{i:024}", "a", "o", "0", "", 0) for i in range(MAX_RECORDS)]
    read = parse_entries(SHARD, [(b"10000-0", pack(rows, "zstd", MAX_RECORDS))])
    assert read.keys == [row[1] for row in rows]


def test_a_column_that_is_too_large_to_be_read_compressed_is_not_compressed() -> None:
    large = [(5, "k", "insert", "thing", '"' + "a" * MAX_BYTES + '"', "", 0)]

    assert pack(large, "zstd")[b"codec"] == b"none"
    assert pack([(*large[0][:4], '"a"', "", 0)], "zstd")[b"codec"] == b"zstd"


def test_a_follower_takes_as_many_compressed_entries_at_once_as_there_is_memory_for() -> None:
    quarter = MAX_BYTES // 4
    column = {b"data": zstd_frame(b"1", quarter, says=quarter)}
    entries = [(b"%d-0" % i, pack(ROWS[:1], "zstd", last=i) | column) for i in range(1, 41)]

    with memory_limit():
        found = parse_leading(SHARD, entries)
    assert found.offsets == [1, 2, 3, 4]


UNREADABLE: dict[str, tuple[Fields, type[Exception]]] = {
    "a compressed one without the library": (pack(ROWS, "zstd", last=9), CodecMissing),
    "a damaged one": (pack(ROWS, last=9) | {b"keys": b""}, DamagedEntry),
    "one of somebody else's": ({b"somebody": b"else"}, ForeignLog),
}


@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("before", [0, 1, 3])
def test_a_follower_takes_what_comes_before_an_entry_that_it_cannot_read(
    kind: str, before: int, zstandard: Zstandard
) -> None:
    zstandard.remove()
    fields, error = UNREADABLE[kind]
    readable = [(b"%d-0" % i, pack(ROWS[:1], last=i)) for i in range(1, before + 1)]
    entries = [*readable, (b"9-0", fields), (b"10-0", pack(ROWS[:1], last=10))]

    if before:
        assert parse_leading(SHARD, entries).offsets == [*range(1, before + 1)]
    else:
        with pytest.raises(error):
            parse_leading(SHARD, entries)
    with pytest.raises(error):
        parse_entries(SHARD, entries)


ENTRIES, EACH = 40, 5
BOMBS_OF_ALL = 0.2


def change(entries: list[Any], random: Random, bombs: Sequence[Fields]) -> None:
    """Changes a field or two of each entry, every other one of which is not compressed before; some become bombs.

    The last one stays: a worker that starts compares it with the journal, and takes another for another log.
    """
    for number, each in enumerate(entries[:-1]):
        if number % 2:
            last = (number + 1) * EACH
            [*rows] = Entry.parse(SHARD, Offset(last), [*each[1].values()]).columns.rows()
            each[1] = pack(rows, last=last)
        for name in random.sample([*each[1]], random.choice([1, 2])):
            each[1][name] = mutate(random, each[1][name])
        if random.random() < BOMBS_OF_ALL:
            each[1] = random.choice(bombs)


@pytest.fixture
def consume(flow: Pipeline, things: Log, connection: Connection, open_worker: OpenWorker) -> Callable[[], object]:
    """Reads all as a consumer that begins anew; there have to be all records."""
    seen: list[int] = []

    @flow.consumer(reads=things)
    def reader(_: Session, records: Sequence[Record]) -> None:
        seen.extend(record.offset for record in records)

    def run() -> None:
        connection.execute('UPDATE penstock.checkpoints SET "offset" = 0')
        seen.clear()
        open_worker().drain()
        assert seen == [*range(1, len(seen) + 1)]

    return run


@pytest.fixture
def read(redis_client: redis.Redis, things: Log) -> Callable[[], object]:
    def run() -> None:
        with LogReader(redis_client, things) as log:
            for offset in range(1, ENTRIES * EACH, EACH):
                with suppress(ForeignLog):
                    log.read(0, offset, EACH)

    return run


@pytest.fixture
def read_on_spark(redis_url: str, database_url: str) -> Iterator[Callable[[], object]]:
    given = {"channel": "things", "redisUrl": redis_url, "databaseUrl": database_url}

    def run() -> None:
        reading = BatchReader(LogStore(Options.parse("penstock.log", given, streaming=False)))
        for task in reading.partitions():
            with suppress(ForeignLog):
                [*reading.read(task)]

    yield run
    task_process.redis_client(redis_url).close()
    task_process.postgres(database_url).close()


@pytest.fixture
def tail(monkeypatch: pytest.MonkeyPatch, database_url: str, redis_url: str) -> Callable[[], object]:
    for variable, url in (("DATABASE", database_url), ("REDIS", redis_url)):
        monkeypatch.setenv(f"PENSTOCK_{variable}_URL", url)
    monkeypatch.setattr("sys.argv", ["penstock", "tail", "things", "--count", "200"])

    def run() -> None:
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code in {None, 0, 5}

    return run


@pytest.mark.parametrize(
    "rounds",
    [1, pytest.param(500, marks=[pytest.mark.storm, pytest.mark.timeout(7200)])],
    ids=["40 entries", "20,000 entries"],
)
def test_every_reader_survives_changed_entries(
    rounds: int,
    publish: Publish,
    connection: Connection,
    redis_client: redis.Redis,
    verified: Verify,
    consume: Callable[[], object],
    read: Callable[[], object],
    read_on_spark: Callable[[], object],
    tail: Callable[[], object],
    diagnosed: Diagnose,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Two seconds: all that reads a log reads forty entries, most of them damaged, within a limit of memory."""
    consume()
    for _ in range(ENTRIES):
        publish(EACH)
    readers: list[Callable[[], object]] = [
        consume,
        read,
        read_on_spark,
        tail,
        lambda: verified().findings,
        diagnosed,
        lambda: trace(Store(connection), redis_client, "k1"),
    ]
    for each in readers:
        each()  # what is imported and cached is no part of the limit
    whole: Any = redis_client.dump(STREAM)
    bombs, random = [each() for each in BOMBS.values()], Random(rounds)

    with memory_limit():
        for _ in range(rounds):
            rewrite(redis_client, STREAM, lambda entries: change(entries, random, bombs))
            found = [each() for each in readers]
            redis_client.restore(STREAM, 0, whole, replace=True)
            said = f"{found} {capfd.readouterr()}"
            assert "is damaged" in said
            assert "more memory" not in said
