"""Reads what the journal has and a log lacks: batches, one shard after the other.

Postgres works ahead: it is asked for a shard's next batch as soon as the previous one has arrived,
before that is published.
"""

from collections import deque
from collections.abc import Container, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import NamedTuple, TypeVar

import psycopg
from psycopg.abc import Buffer
from psycopg.adapt import Loader
from psycopg.rows import args_row

from penstock.batches.columns import COLUMNS, Columns
from penstock.channels.batch_outcomes import Batch
from penstock.channels.isolation import OnUnusable, leaving_out
from penstock.database.connections import pipelined
from penstock.database.driver_errors import postgres_errors
from penstock.database.store import Store
from penstock.display import format_count
from penstock.errors import DamagedJournal
from penstock.records import BEGINNING, Epoch, Offset, RecordId, ShardName

BATCH_RECORDS = 500
"""Limit of records per batch: appending that many keeps Redis busy for about 2 ms."""

PACKED_RECORDS = 1000
"""The same for a log with packed entries: one entry, for which Redis takes about 0.4 ms."""

BATCH_BYTES = 512 * 1024
"""A batch ends early once its payloads, as Postgres stores them, exceed this many bytes."""

ROOMY = 8
"""Divisor of ``BATCH_BYTES``: a smaller batch of large payloads is followed by one of twice its
records."""

READ_AHEAD = 4
"""Limit of batches requested before the first has arrived: it bounds the memory for them."""

_DATA = COLUMNS.index("data")

_Item = TypeVar("_Item")


class JournaledBatch(NamedTuple):
    """Row of ``unpublished`` and ``unpublished_checked``, as columns of lines.

    It has what the journal has after a tail.
    """

    first: Offset
    last: Offset
    records: int
    beyond_hole: Offset | None  # the first offset that does not follow the one before
    gone: int  # number of records that are gone from staged_records
    first_gone: RecordId | None  # id of the first of them
    first_id: RecordId
    first_us: int
    ids: bytes
    keys: bytes
    actions: bytes
    objects: bytes
    data: bytes
    headers: bytes
    times: bytes


Cursor = psycopg.Cursor[JournaledBatch]


def keep_memory(store: Store) -> None:
    """Makes the session keep the memory of a batch for the next one."""
    store.execute("keep_memory", doing="preparing to read")


def unpublished(  # noqa: PLR0913  where to begin, where to end, how much
    store: Store,
    target: Mapping[ShardName, Offset],
    tails: Mapping[ShardName, Offset],
    *,
    epoch: Epoch,
    until: float,
    max_records: int = BATCH_RECORDS,
    packed: Container[str] = (),
    queues: Container[str] = (),
    on_unusable: OnUnusable | None = None,
) -> Generator[Batch, None, None]:
    """Yields the journal's batches after ``tails``, up to ``target``; close it unless exhausted.

    The connection, in autocommit mode, is not used for anything else until the end.  A shard that
    ``tails`` does not name is empty.  Every shard gets at least one batch, however late ``until``
    is, by the monotonic clock: otherwise the first ones, if busy, would starve the others.  A batch
    has at most ``max_records`` records, or ``PACKED_RECORDS`` in the channels ``packed``.

    Records of ``queues`` are gone once they are done: they then have an id, and no key.
    ``on_unusable`` is called with a shard whose journal is damaged; None raises.
    """

    def request(shard: ShardName, tail: Offset) -> tuple[ShardName, Offset, int, Cursor]:
        arguments = {"channel": shard.channel, "shard": shard.shard, "tail": tail}
        allowed = PACKED_RECORDS if shard.channel in packed else max_records
        records = min(allowed, fitting.get(shard, allowed))
        limits = {"records": min(records, target[shard] - tail), "bytes": BATCH_BYTES}
        cursor = store.connection.cursor(row_factory=args_row(JournaledBatch))
        cursor.adapters.register_loader("text", _BytesLoader)  # they are passed on as they come
        statement = store["unpublished_checked" if shard in checked else "unpublished"]
        return shard, tail, limits["records"], cursor.execute(statement, {**arguments, **limits})

    lacking = deque(
        (shard, tails.get(shard, BEGINNING))
        for shard, tail in target.items()
        if tail > tails.get(shard, BEGINNING)
    )
    if not lacking:
        return
    first_requests_left, checked, fitting = len(lacking), set[ShardName](), dict[ShardName, int]()
    requested: deque[tuple[ShardName, Offset, int, Cursor]] = deque()

    def request_ahead() -> None:
        nonlocal first_requests_left
        while (
            lacking
            and len(requested) < READ_AHEAD
            and (first_requests_left > 0 or monotonic() < until)
        ):
            first_requests_left -= 1
            requested.append(request(*lacking.popleft()))

    with postgres_errors("reading unpublished records"), pipelined(store.connection):
        store.execute("prepare_reading")
        request_ahead()
        while requested:
            shard, tail, records, cursor = requested.popleft()
            if (row := cursor.fetchone()) is None and shard not in checked:
                checked.add(shard)  # its next batches probably are not as usual either
                row = request(shard, tail)[3].fetchone()
            if row is not None and row.records < records:
                # of large payloads, for which the next batch is to have room
                fitting[shard] = max(1, row.records * 9 // 10)
                checked.discard(shard)
            elif row is not None and shard in fitting and len(row.data) < BATCH_BYTES // ROOMY:
                fitting[shard] = 2 * records
            batches: list[Batch] = []
            with leaving_out(shard, on_unusable):
                row = None if _is_behind_hole(store, shard, tail, row) else row
                read = _check(shard, tail, row, target[shard], may_be_gone=shard.channel in queues)
                batches.append(_make_batch(shard, tail, read, epoch))
            lacking.extend((shard, batch.last) for batch in batches if batch.last < target[shard])
            request_ahead()
            yield from batches


class _BytesLoader(Loader):
    """Loads text as the bytes that came over the connection."""

    def load(self, data: Buffer) -> bytes:
        return bytes(data)


def _is_behind_hole(
    store: Store, shard: ShardName, tail: Offset, row: JournaledBatch | None
) -> bool:
    """Returns whether a batch begins after the tail although the journal has records between."""
    if row is None or row.first == tail + 1:
        return False
    parameters = {"channel": shard.channel, "shard": shard.shard, "tail": tail}
    return bool(store.value("journal_goes_back", parameters))


def _check(
    shard: ShardName, tail: Offset, row: JournaledBatch | None, target: Offset, *, may_be_gone: bool
) -> JournaledBatch:
    """Returns the row of a batch, if the journal has all of it."""
    if row is None:
        raise DamagedJournal(
            f"{shard} offset {tail + 1}…{target}: these rows of the journal are gone. They were "
            "deleted by something other "
            "than Penstock; the records that they named are not published. See penstock doctor; "
            "then: penstock reset epoch"
        )
    if row.gone and not may_be_gone:
        raise DamagedJournal(
            f"{shard} offset {row.first}…{row.last}: the journal names records that are gone from "
            f"staged_records ({row.gone:,}, the first is record {row.first_gone}). They were "
            "deleted by something other than Penstock, or Postgres was restored in part; nothing "
            "after them in this shard can be published in order. See penstock doctor"
        )
    if row.beyond_hole is not None:
        raise DamagedJournal(
            f"{shard} offset {row.first}…{row.last}: the journal has only "
            f"{format_count(row.records, 'record')} there. Rows of it were deleted by something "
            f"other than Penstock, before offset {row.beyond_hole}; nothing after the hole can be "
            "published. See penstock doctor"
        )
    return row


def _make_batch(shard: ShardName, tail: Offset, row: JournaledBatch, epoch: Epoch) -> Batch:
    # A pretty array has a line a string, and no string of JSON has a line break.
    strings = [
        array[1:-1].replace(b",\n ", b"\n") for array in (row.keys, row.actions, row.objects)
    ]
    # The journal has no holes: if the first record is beyond after + 1, the journal begins there.
    columns = Columns.of_lines(
        row.records,
        row.first_id,
        row.first_us,
        [row.ids, *strings, row.data, row.headers, row.times],
    )
    return Batch(shard, epoch, row.first, begins=row.first > tail + 1, columns=columns)


def count_missing(target: Mapping[ShardName, Offset], tails: Mapping[ShardName, Offset]) -> int:
    """Returns the number of records between ``tails`` and ``target``."""
    return sum(max(0, tail - tails.get(shard, BEGINNING)) for shard, tail in target.items())


def group_batches(batches: Iterator[Batch]) -> Iterator[list[Batch]]:
    """Yields groups of batches that go to Redis in one call.

    Their payloads, without the last batch's, are below ``BATCH_BYTES``.
    """
    group: list[Batch] = []
    size = 0
    for batch in batches:
        group.append(batch)
        size += len(batch.columns.texts[_DATA])
        if size >= BATCH_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def read_ahead(items: Iterator[_Item]) -> Generator[_Item, None, None]:
    """Yields items; takes the next one in a thread while the caller works on this one."""
    with ThreadPoolExecutor(1, "penstock-read") as thread:
        coming = thread.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = thread.submit(next, items, None)
            yield item
