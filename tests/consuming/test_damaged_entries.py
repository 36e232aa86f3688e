"""Guarantee 30: a consumer reads the records of a damaged entry from the journal; nothing is skipped, nothing comes twice."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
import redis
from sqlalchemy.orm import Session
from structlog.testing import capture_logs

from fixtures.constants import SetConstants
from fixtures.damaged_entries import COMPRESSED, PLAIN, damage_entry
from fixtures.flow import OpenWorker, Publish, Site, entry_of_a_record, running, stage_rows
from fixtures.libraries import Zstandard
from fixtures.proxy import Proxy, behind
from fixtures.verifying import Verify, only
from penstock import Log, Pipeline
from penstock.channels.log.streams import read, read_newest
from penstock.consuming import WorkerSetup
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.errors import CodecMissing, DamagedEntry, ForeignLog
from penstock.records import Offset, Record
from penstock.streaming import Streamer
from penstock.testing import eventually
from penstock.verifying.comparing import FindingKind
from penstock.verifying.verification import InlineExaminer, verify

STREAM = "penstock:{things/0}:log"
BY_CODEC = {"none": PLAIN, "zstd": COMPRESSED}
ENTRIES, EACH = 4, 20
REASON = "entry damaged"


@pytest.fixture
def codec() -> str:
    return "none"


@pytest.fixture
def things(codec: str) -> Log:
    return Log("things", shards=1, compression="zstd" if codec == "zstd" else "none")


@pytest.fixture
def seen() -> list[int]:
    """Ids of the records that the handler got, which are their offsets."""
    return []


MakeWorker = Callable[[], LogWorker]


@pytest.fixture
def make_worker(flow: Pipeline, things: Log, seen: list[int], open_worker: OpenWorker) -> MakeWorker:
    @flow.consumer(reads=things, batch=7)  # no divisor of an entry's records
    def reader(_: Session, records: Sequence[Record]) -> None:
        assert all(int(record.id) == record.offset for record in records)
        seen.extend([record.data["number"] + EACH * int(record.key[0]) for record in records])

    return open_worker


@pytest.fixture
def worker(make_worker: MakeWorker) -> LogWorker:
    return make_worker()


@pytest.fixture
def published(worker: LogWorker, publish: Publish, things: Log) -> Log:
    """The channel, with four entries of 20 records each."""
    for number in range(ENTRIES):
        publish(EACH, f"{number} ")
    return things


def damage(client: redis.Redis, codec: str, how: str, place: int = 1) -> None:
    damage_entry(client, STREAM, place, BY_CODEC[codec][how])


def every_damage(client: redis.Redis, codec: str) -> Iterator[str]:
    """Damages the second entry in every way, one after another; between two of them the log is whole again."""
    whole: Any = client.dump(STREAM)
    for how in BY_CODEC[codec]:
        damage(client, codec, how)
        yield how
        client.restore(STREAM, 0, whole, replace=True)


def reported(logs: list[Any]) -> list[str]:
    return [each["reason"] for each in logs if each["event"] == REASON]


@pytest.mark.slow
@pytest.mark.parametrize("codec", BY_CODEC)
def test_the_records_of_a_damaged_entry_come_from_the_journal(
    codec: str,
    published: Log,
    make_worker: MakeWorker,
    seen: list[int],
    connection: Connection,
    redis_client: redis.Redis,
) -> None:
    for how in every_damage(redis_client, codec):
        connection.execute('UPDATE penstock.checkpoints SET "offset" = 0')
        seen.clear()
        backfilled: list[int] = []

        with capture_logs() as logs, make_worker() as worker:
            worker.drain(lambda consumed: backfilled.append(consumed.backfilled))  # noqa: B023  called at once

        assert seen == [*range(1, ENTRIES * EACH + 1)], how
        assert sum(backfilled) == EACH, how
        [reason] = reported(logs)
        assert "DamagedEntry: things/0: entry 40-0 (offset" in reason, how
        assert [each for each in logs if each["event"] == "shard unusable"] == [], how


@pytest.mark.parametrize("codec", BY_CODEC)
def test_a_reader_without_postgres_names_the_entry_and_its_offsets(
    codec: str, published: Log, redis_client: redis.Redis
) -> None:
    [shard] = published.shard_names
    said = re.compile(r"things/0: entry 40-0 \(offset.* is damaged: ")
    for how in every_damage(redis_client, codec):
        with pytest.raises(DamagedEntry, match=said) as raised:
            read(redis_client, "penstock", shard, Offset(0), 1000)
        assert raised.value.first <= raised.value.last == 40, how
        with pytest.raises(DamagedEntry, match=said):
            read_newest(redis_client, "penstock", shard, 1000)
        rest = read(redis_client, "penstock", shard, Offset(40), 1000)
        assert rest.offsets == [*range(41, 81)], how


def test_wherever_the_entry_is(
    published: Log, make_worker: MakeWorker, seen: list[int], connection: Connection, redis_client: redis.Redis
) -> None:
    whole: Any = redis_client.dump(STREAM)
    for place in range(ENTRIES):
        damage(redis_client, "none", "an id that is no number", place)
        connection.execute('UPDATE penstock.checkpoints SET "offset" = 0')
        seen.clear()

        with make_worker() as worker:
            worker.drain()

        assert seen == [*range(1, ENTRIES * EACH + 1)], place
        redis_client.restore(STREAM, 0, whole, replace=True)


def test_a_checkpoint_inside_of_it_goes_on_from_there(
    published: Log, worker: LogWorker, seen: list[int], redis_client: redis.Redis
) -> None:
    for _ in range(4):
        worker.round(0)
    damage(redis_client, "none", "an empty column")
    worker.close()

    worker.drain()

    assert seen == [*range(1, ENTRIES * EACH + 1)]


@pytest.mark.parametrize("notices", ["at once", "late"])
def test_a_shard_stops_where_the_journal_no_longer_has_them(
    site: Site, published: Log, seen: list[int], postgres_proxy: Proxy, notices: str
) -> None:
    """And says so, whenever Postgres notices that the worker has closed the connection on which it locked the shard."""
    if notices == "late":
        postgres_proxy.linger()
    damage(site.client, "none", "an empty column")
    site.connection.execute("DELETE FROM penstock.journal WHERE first_offset = 21")

    url = behind(postgres_proxy, site.database_url)
    with (
        LogWorker(WorkerSetup(site.flow, site.flow.get_consumer("reader"), url, site.redis_url)) as worker,
        pytest.raises(DamagedEntry, match=r"\(offsets 21-40\).* the journal has no record after"),
    ):
        worker.drain()

    assert seen == [*range(1, 21)]
    [(waiting,)] = site.connection.execute("SELECT waiting FROM penstock.checkpoints")
    assert "DamagedEntry: things/0: entry 40-0" in waiting


def test_an_entry_that_was_deleted_is_filled_from_the_journal(
    published: Log, worker: LogWorker, seen: list[int], redis_client: redis.Redis
) -> None:
    redis_client.xdel(STREAM, "40-0")

    worker.drain()

    assert seen == [*range(1, ENTRIES * EACH + 1)]


def test_so_are_the_newest_entries(
    published: Log, worker: LogWorker, seen: list[int], redis_client: redis.Redis
) -> None:
    """The stream goes silent before its end: nothing that comes tells of them."""
    redis_client.xdel(STREAM, "60-0", "80-0")

    worker.drain()

    assert seen == [*range(1, ENTRIES * EACH + 1)]


@pytest.mark.parametrize("first", [11, 20])
def test_an_entry_that_begins_before_the_end_of_another_is_damaged(
    published: Log, redis_client: redis.Redis, first: int
) -> None:
    """One that is whole, of the same records: only its place is another.  It shares ten records with another, or one."""
    [shard] = published.shard_names
    entries: Any = redis_client.xrange(STREAM)
    redis_client.delete(STREAM)
    moved = b"%d-0" % (first + EACH - 1), entries[1][1] | {b"first": b"%d" % first}
    for entry, fields in [entries[0], moved, *entries[1:]]:
        redis_client.xadd(STREAM, fields, id=entry)

    with pytest.raises(DamagedEntry, match=f"begins at offset {first}, and the one before ends at 20"):
        read(redis_client, "penstock", shard, Offset(0), 1000)


@pytest.mark.parametrize("fields", [{"who": "me"}, entry_of_a_record(7)], ids=["other fields", "a record of its own"])
def test_an_entry_that_somebody_added_stops_the_shard_behind_the_records(
    fields: Any, published: Log, worker: LogWorker, seen: list[int], redis_client: redis.Redis
) -> None:
    redis_client.xadd(STREAM, fields, id="1000-0")

    with suppress(ForeignLog):
        worker.drain()

    assert seen == [*range(1, ENTRIES * EACH + 1)]


def test_a_damaged_payload_is_dead_lettered_as_the_journal_has_it(
    published: Log, worker: LogWorker, seen: list[int], connection: Connection, redis_client: redis.Redis
) -> None:
    damage_entry(
        redis_client,
        STREAM,
        1,
        lambda fields, _: fields.update({b"data": fields[b"data"].replace(b'"number": 3}', b'"number"; 3}')}),
    )

    worker.drain()

    assert seen == [each for each in range(1, ENTRIES * EACH + 1) if each != 23]
    [(offset, data)] = connection.execute('SELECT "offset", data FROM penstock.dead_letters')
    assert (offset, data) == (23, {"number": 3})


@pytest.mark.parametrize("codec", ["zstd"])
def test_a_missing_library_stops_the_shard_and_nothing_else(
    codec: str, published: Log, worker: LogWorker, seen: list[int], set_constants: SetConstants, zstandard: Zstandard
) -> None:
    set_constants("channels.isolation", RETRY_EVERY_S=0.05)
    zstandard.remove()
    with pytest.raises(CodecMissing, match=r"pip install 'penstock-outbox\[zstd\]'"):
        worker.drain()
    assert seen == []

    with running(worker.run):
        zstandard.restore()
        eventually(lambda: len(seen) == ENTRIES * EACH, "it is installed")


def test_a_key_may_have_the_text_of_an_escaped_nul(
    published: Log, connection: Connection, streamer: Streamer, redis_client: redis.Redis
) -> None:
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)"
        r" VALUES ('things', 0, '\u0000', 'insert', 'thing', '{}')"
    )
    streamer.drain()

    [shard] = published.shard_names
    assert read_newest(redis_client, "penstock", shard, 1)[0].key == r"\u0000"


def test_verify_names_a_damaged_entry_and_its_offsets(
    published: Log, verified: Verify, redis_client: redis.Redis
) -> None:
    assert verified().clean
    damage(redis_client, "none", "an empty column")

    found = only(verified())

    assert (found.kind, found.where) == (FindingKind.DAMAGED, "log")
    assert (found.offset, found.count) == (21, EACH)
    assert "entry 40-0 (offsets 21-40) is damaged: its column keys cannot be read" in found.text
    assert "delete the key of its shard" in found.text


@pytest.mark.parametrize(
    ("how", "counts"),
    [
        ("an empty column", {FindingKind.DAMAGED: EACH}),
        ("no first offset", {FindingKind.DAMAGED: 1, FindingKind.MISSING: EACH - 1}),
    ],
)
def test_verify_in_small_ranges_names_it_in_each(
    how: str,
    counts: dict[FindingKind, int],
    published: Log,
    verified: Verify,
    redis_client: redis.Redis,
    set_constants: SetConstants,
) -> None:
    set_constants("verifying.verification", OFFSETS_A_READ=7)
    damage(redis_client, "none", how)

    assert verified().counts == counts


@pytest.mark.parametrize("codec", BY_CODEC)
def test_verify_finds_every_damage(
    codec: str, published: Log, connection: Connection, redis_client: redis.Redis, redis_url: str
) -> None:
    examiner = InlineExaminer(Store(connection), redis_url)
    for how in every_damage(redis_client, codec):
        found = verify(Store(connection), redis_client, examiner).counts
        assert FindingKind.DAMAGED in found, how


def test_verify_finds_a_changed_byte_in_a_payload(published: Log, verified: Verify, redis_client: redis.Redis) -> None:
    damage_entry(
        redis_client, STREAM, 1, lambda fields, _: fields.update({b"data": fields[b"data"].replace(b" 3}", b" 4}")})
    )

    found = only(verified())

    assert (found.kind, found.offset, found.text.partition(" ")[0]) == (FindingKind.CHANGED, 23, "data")


def test_the_log_is_whole_again_once_its_key_is_deleted(
    published: Log, verified: Verify, streamer: Streamer, redis_client: redis.Redis
) -> None:
    damage(redis_client, "none", "an empty column")
    redis_client.delete(STREAM)
    streamer.close()
    streamer.drain()

    assert verified().clean


@pytest.mark.parametrize("how", ["an empty column", "too few records", "no first offset"])
def test_a_log_whose_newest_entry_is_damaged_goes_on(
    site: Site, how: str, published: Log, worker: LogWorker, seen: list[int]
) -> None:
    """A streamer that starts compares the last record, by what the entry says of it."""
    damage(site.client, "none", how, ENTRIES - 1)
    site.streamer.close()
    worker.close()

    stage_rows(site.connection, published, EACH, f"{ENTRIES} ")
    site.streamer.drain()
    worker.drain()

    assert seen == [*range(1, (ENTRIES + 1) * EACH + 1)]


def test_a_streamer_leaves_a_shard_out_whose_last_record_cannot_be_told(
    published: Log, streamer: Streamer, redis_client: redis.Redis
) -> None:
    damage(redis_client, "none", "no last record", ENTRIES - 1)
    streamer.close()

    with pytest.raises(DamagedEntry, match=r"things/0: entry 80-0 .*is damaged: its field from or to"):
        streamer.drain()
