"""How a log's entries hold records may change at any time, and every reader takes what it finds."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import redis

from fixtures.constants import SetConstants
from fixtures.flow import Publish, Site, stage_rows
from fixtures.libraries import Zstandard
from penstock import Log, Pipeline
from penstock.batches.columns import Columns
from penstock.batches.entry import FIELDS
from penstock.channels.batch_outcomes import Batch
from penstock.channels.log.stream_entries import NAMES
from penstock.channels.log.streams import evict
from penstock.consuming import WorkerSetup
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import Connection
from penstock.database.registry import registered_channels
from penstock.database.store import Store
from penstock.errors import CodecMissing, DeclarationError
from penstock.records import Epoch, Offset, Record, ShardName
from penstock.streaming import Streamer

STREAM = "penstock:{things/0}:log"
FORMS: list[dict[str, Any]] = [
    {"entries": "plain"},
    {"entries": "packed"},
    {"compression": "zstd"},
    {"entries": "plain"},
    {"compression": "zstd"},
    {"entries": "packed"},
]


def declare(**form: Any) -> Log:
    return Log("things", shards=2, **form)


def codecs(client: redis.Redis) -> list[str]:
    """How the entries of a stream are stored, from the oldest on, without repetitions."""
    entries: Any = client.xrange(STREAM)
    found = [fields.get(b"codec", b"plain").decode() for _, fields in entries]
    return [each for place, each in enumerate(found) if found[place - 1 : place] != [each]]


def test_a_log_changes_its_entries_in_place_and_back(
    connection: Connection, database_url: str, redis_url: str, redis_client: redis.Redis
) -> None:
    seen: list[int] = []
    for form in FORMS:
        things = declare(**form)
        flow = Pipeline([things])

        @flow.consumer(reads=things, batch=7)
        def reader(_: object, records: Sequence[Record]) -> None:
            seen.extend(record.offset for record in records if record.shard == 0)

        with Streamer(flow, database_url, redis_url) as streamer:
            stage_rows(connection, things, 40)
            streamer.drain()
            streamer.round()
            worker = LogWorker(WorkerSetup(flow, flow.get_consumer("reader"), database_url, redis_url))
            worker.drain()
            worker.close()

    assert codecs(redis_client) == ["plain", "none", "zstd", "plain", "zstd", "none"]
    assert seen == [*range(1, len(seen) + 1)]


def test_a_streamer_at_work_takes_the_new_form_over(
    connection: Connection, database_url: str, redis_url: str, redis_client: redis.Redis, set_constants: SetConstants
) -> None:
    set_constants("streaming.streamer", REFRESH_EVERY_S=0.0)
    plain, packed = declare(entries="plain"), declare()
    with Streamer(Pipeline([plain]), database_url, redis_url) as streamer:
        stage_rows(connection, plain, 20)
        streamer.drain()
        with Streamer(Pipeline([packed]), database_url, redis_url):
            pass  # another release, deployed beside it, has registered its own
        stage_rows(connection, plain, 20)
        streamer.drain()

    assert codecs(redis_client) == ["plain", "none"]
    assert registered_channels(Store(connection))["things"].entries == "none"


def test_few_records_are_one_entry_a_tick(publish: Publish, redis_client: redis.Redis) -> None:
    for _ in range(3):
        publish(20)

    assert redis_client.xlen(STREAM) == 3


def test_retention_keeps_an_entry_with_a_record_that_is_needed(
    publish: Publish, things: Log, logged: Callable[[Log], dict[ShardName, list[Record]]], redis_client: redis.Redis
) -> None:
    for _ in range(3):
        publish(20)
    shard = things.shard_names[0]
    whole = [record.offset for record in logged(things)[shard]]
    entries: Any = redis_client.xrange(STREAM)
    entry_ends = [int(entry.split(b"-")[0]) for entry, _ in entries]

    evict(redis_client, "penstock", shard, Offset(entry_ends[0]))
    assert [record.offset for record in logged(things)[shard]] == whole
    evict(redis_client, "penstock", shard, Offset(entry_ends[0] + 1))
    assert [record.offset for record in logged(things)[shard]] == whole[entry_ends[0] :]


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"entries": "row"}, "entries is 'row'; it takes 'packed' or 'plain'"),
        ({"compression": "lz4"}, "compression is 'lz4'; it takes 'none' or 'zstd'"),
        ({"entries": "plain", "compression": "zstd"}, "only packed entries are compressed"),
    ],
)
def test_a_form_that_does_not_exist_is_refused(form: dict[str, Any], said: str) -> None:
    with pytest.raises(DeclarationError, match=said):
        declare(**form)


def test_a_missing_library_is_named(zstandard: Zstandard) -> None:
    zstandard.remove()
    columns = Columns.pack([(1, "k", "insert", "thing", "{}", "", 0)])
    batch = Batch(declare().shard_names[0], Epoch(1), Offset(1), False, columns)

    with pytest.raises(CodecMissing, match=r"pip install 'penstock-outbox\[zstd\]'"):
        batch.stored_as("zstd")


@pytest.mark.parametrize("count", [20, 2000])
def test_without_the_library_other_channels_flow_and_the_channel_follows_once_it_is_there(
    site: Site, zstandard: Zstandard, set_constants: SetConstants, count: int
) -> None:
    set_constants("channels.isolation", RETRY_EVERY_S=0.0)
    zstandard.remove()
    things, others = declare(compression="zstd"), Log("others", shards=2)

    def published(channel: Log) -> int:
        return sum(map(len, site.logged(channel).values()))

    with Streamer(Pipeline([things, others]), site.database_url, site.redis_url) as streamer:
        for channel in (things, others):
            stage_rows(site.connection, channel, count)
        with pytest.raises(CodecMissing):
            streamer.drain()

        zstandard.restore()
        assert (published(things), published(others)) == (0, count)
        streamer.round()
        streamer.drain()
        assert published(things) == count


def test_a_reader_of_plain_entries_does_not_take_a_batch_for_a_record() -> None:
    """Releases before packed entries read seven fields by name, and ignore others: one of them has to be missing."""
    assert not {*NAMES} <= {*FIELDS}
    assert not {*NAMES[:4]} & {*FIELDS}
