"""A record is the same only if its id and the time of its staging are: one table for each place that compares records.

A Postgres that lost commits gives their ids out again, and a clock that was set back gives the same time again.  What else a record
holds makes it no other one.
"""

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import redis

import penstock
from fixtures.verifying import Verify
from penstock import Ick, Log, Pipeline, Queue
from penstock.batches.columns import Columns
from penstock.channels.batch_outcomes import Appended, Batch, Foreign, Reply
from penstock.channels.ick.marking import mark
from penstock.channels.log.appending import append_together
from penstock.channels.log.streams import extents
from penstock.channels.queue.publishing import QueueBatch, QueuedRecord, QueueWriter
from penstock.channels.routing import log_keys
from penstock.clients import LogGroup, LogReader
from penstock.consuming import WorkerSetup
from penstock.consuming.dead_lettering import DeadLetters
from penstock.consuming.several.source_link import SourceLink
from penstock.consuming.several.source_positions import SourcePosition
from penstock.database.connections import Connection, connect_postgres
from penstock.database.registry import register_channel, register_consumer
from penstock.database.store import Store
from penstock.errors import HistoryDiverged, LogDiverged, LogLost, Refused
from penstock.journal.journal_reader import JournaledRecord, has_record
from penstock.journal.lineage import check_tails
from penstock.operating.reset.doubt import LogComparison
from penstock.operating.reset.epoch import reset_epoch
from penstock.operating.reset.source_history import reset_source
from penstock.records import Epoch, LastRecord, Offset, OffsetRange, Place, Record, Shard, ShardName
from penstock.streaming import tick
from penstock.streaming.publisher import Publisher

SHARD, ICK, JOBS = (ShardName(name, Shard(0)) for name in ("things@eu", "index", "jobs"))
CHANNELS = (
    Log("things", shards=1, source="eu"),
    Ick("index", shards=1),
    Queue("jobs", shards=1),
    Queue("mail", shards=1),
)
STREAM = log_keys("penstock", SHARD).stream
US = 1_790_000_000_000_003
COUNT = 4
ALL = OffsetRange(SHARD, Offset(1), Offset(COUNT))

Row = tuple[int, str, str, str, str, str, int]
"""Id, key, action, object, data, headers and time of staging."""


def change(row: Row, *, id: int = 0, us: int = 0, key: str = "", data: str = "") -> Row:  # noqa: A002  the field's name
    return (row[0] + id, key or row[1], *row[2:4], data or row[4], row[5], row[6] + us)


CHANGES: dict[str, tuple[dict[str, Any], bool]] = {
    "the same": ({}, True),
    "another id": ({"id": 1_000}, False),
    "a microsecond later": ({"us": 1}, False),
    "a microsecond earlier": ({"us": -1}, False),
    "another id and time": ({"id": 1_000, "us": 1}, False),
    "another key": ({"key": "other"}, True),
    "another payload": ({"data": '"other"'}, True),
}
"""What another record has, and whether it is the same one."""

STAGE = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, created_at)
SELECT %(channel)s, 0, 'k' || n, 'insert', 'thing', to_jsonb(n), 'epoch'::timestamptz + (%(us)s + n) * interval '1 microsecond'
FROM generate_series(1, %(count)s) n
RETURNING id, key, action, object, data::text, '', %(us)s + data::int
"""


@dataclass(frozen=True)
class World:
    """Records in Postgres, each with an offset, and what Redis has of them.

    Attributes:
        rows: Those of the log.
        jobs: The only one of the queue.
        verified: Verifies all of it.
    """

    connection: Connection
    client: redis.Redis
    database_url: str
    pipeline: Pipeline
    verified: Verify
    rows: Sequence[Row]
    job: Row

    def batch(self, rows: Sequence[Row], entries: str, shard: ShardName = SHARD, first: int = 1) -> Batch:
        made = Batch(shard, Epoch(1), Offset(first), first == 1, Columns.pack(rows))
        return made.stored_as(entries)

    def fill(self, entries: str, last: Row, more: Sequence[Row] = ()) -> None:
        """Has the log hold ``last`` as its fourth record, and more behind it, in one entry or in one each."""
        self.client.delete(STREAM)
        self.append(self.batch([*self.rows[:-1], last, *more], entries))

    def append(self, batch: Batch) -> Reply:
        [(_, reply)] = append_together(self.client, "penstock", [batch])
        return reply

    @property
    def consumer(self) -> Any:
        return self.pipeline.get_consumer("reader")

    def link(self) -> SourceLink:
        """The database as the source of a consumer elsewhere, which is registered there."""
        link = SourceLink(self.database_url, WorkerSetup(self.pipeline, self.consumer, self.database_url))
        link.register("elsewhere", {})
        return link


@pytest.fixture
def world(connection: Connection, redis_client: redis.Redis, database_url: str, verified: Verify) -> World:
    pipeline = Pipeline(CHANNELS)
    pipeline.consumer(reads=CHANNELS[0], name="reader")(lambda _session, _records: None)
    pipeline.worker(reads=CHANNELS[2], name="doer")(lambda _session, _job: None)
    for channel in CHANNELS:
        register_channel(Store(connection), channel)
    register_consumer(Store(connection), pipeline.get_consumer("doer"))
    rows: dict[ShardName, list[Any]] = {
        shard: connection.execute(STAGE, {"channel": shard.channel, "us": US, "count": count}).fetchall()
        for shard, count in ((SHARD, COUNT), (JOBS, 1))
    }
    tick(Store(connection))
    [job] = rows[JOBS]
    return World(connection, redis_client, database_url, pipeline, verified, rows[SHARD], job)


Compare = Callable[[World, Row], bool]
"""True if a record is taken for the last one of the log, or for the job."""


def is_journals_tail(world: World, _: Row) -> bool:
    with suppress(HistoryDiverged):
        check_tails(Store(world.connection), world.client, [SHARD])
        return True
    return False


def is_kept_by_a_reset(world: World, _: Row) -> bool:
    plan = reset_epoch(world.connection, world.client, world.pipeline)
    assert (plan.reason is None) == (not plan.deleted)
    return not plan.deleted


def is_in_no_doubt(world: World, _: Row) -> bool:
    extent = extents(world.client, "penstock", [SHARD])[SHARD]
    compared = LogComparison(Store(world.connection), world.client)
    doubt = compared.find_doubt(SHARD, extent, (Offset(1), Offset(COUNT)), Epoch(2))
    assert doubt is None or (doubt.first, doubt.last, doubt.compared) == (COUNT, COUNT, COUNT)
    return doubt is None


def is_still_there(world: World, other: Row) -> bool:
    lost: list[int] = []
    compared = LogComparison(Store(world.connection), world.client)
    found = compared.count_still_there(ALL, STREAM, lambda record: lost.append(record.id))
    assert found.still_there + len(lost) == found.known == COUNT
    assert lost in ([], [other[0]])
    return not lost


def is_sent_again(world: World, _: Row) -> bool:
    publisher = Publisher(Store(world.connection), world.client, epoch=Epoch(1))
    publisher.refresh()
    with suppress(HistoryDiverged):
        publisher.resend(COUNT)
        return True
    return False


def is_known_to_the_log(entries: str, first: int = 1) -> Compare:
    def is_known(world: World, other: Row) -> bool:
        reply = world.append(world.batch(world.rows[first - 1 :], entries, first=first))
        assert reply in (Appended(Offset(extents(world.client, "penstock", [SHARD])[SHARD].tail), 0), foreign(other))
        return isinstance(reply, Appended)

    return is_known


def foreign(other: Row) -> Foreign:
    return Foreign(Offset(COUNT), str(other[0]))


def is_marked(world: World, other: Row) -> bool:
    def mark_again(row: Row) -> Reply:
        return mark(world.client, "penstock", world.batch([*world.rows[:-1], row], "none", ICK))

    return is_known_again(mark_again, world, other)


def is_queued(world: World, other: Row) -> bool:
    writer, at = QueueWriter(world.client, "penstock", JOBS, 1, 1), Offset(COUNT)

    def write(row: Row) -> Reply:
        fields: Any = (row[0], at, "t", "", None, None, ("", "", ""), "1", "{}", row[6])
        places: Any = [(row[0], row[6])]
        return writer.write(QueueBatch(JOBS, Epoch(1), at, at, True, places, [QueuedRecord(*fields)])).reply

    return is_known_again(write, world, other)


def is_known_again(send: Callable[[Row], Reply], world: World, other: Row) -> bool:
    """Whether the last record is taken for the other one, which was sent before."""
    send(other)
    reply = send(world.rows[-1])
    assert reply in (Appended(Offset(COUNT), 0), foreign(other))
    return isinstance(reply, Appended)


def is_the_one_that_was_read(entries: str, *, within: bool = False, offset: int = COUNT) -> Compare:
    """A reader that has read the fourth record; the log is another one afterwards, which goes on in the same entry or in the next."""

    def is_what_it_was(world: World, other: Row) -> bool:
        behind = MORE if within else ()
        world.fill(entries, world.rows[-1], behind)
        reader = LogReader(world.client, SHARD.channel)
        assert len(reader.read(count=COUNT)) == COUNT
        world.fill(entries, other, behind)
        if not within:
            world.append(world.batch(MORE, entries, first=COUNT + 1))
        with suppress(LogLost):
            reader.read(offset=offset)
            return True
        return False

    return is_what_it_was


def is_where_the_group_was(entries: str) -> Compare:
    def is_what_it_was(world: World, other: Row) -> bool:
        world.fill(entries, world.rows[-1])
        group = LogGroup(world.client, SHARD.channel, "sharers", shards=1)
        assert len(group.read(COUNT)) == COUNT
        world.fill(entries, other)
        with suppress(LogDiverged):
            group.read(COUNT)
            return True
        return False

    return is_what_it_was


def position(row: Row) -> SourcePosition:
    record = JournaledRecord(row[0], row[6])  # type: ignore[arg-type]  # of a row
    return SourcePosition(SHARD, Offset(COUNT), Epoch(1), record)


def make_record(row: Any, channel: str = SHARD.channel) -> Record:
    return Record(channel, Shard(0), Offset(COUNT), *row)


def is_applied(world: World, other: Row) -> bool:
    """What a consumer of several sources has applied, beside the source's journal: reported, confirmed, or accepted."""
    world.fill("none", world.rows[-1])
    with closing(world.link()) as link:
        reported = link.report(world.client, {SHARD: position(other)})
        assert reported.keys() <= {SHARD}
        try:
            assert link.confirm(position(other))
        except HistoryDiverged:
            assert reported
            return False
    assert not reported
    return True


def is_confirmed(world: World, other: Row) -> bool:
    """A later record of the log, beside the source's journal."""
    later = make_record(other)
    with closing(world.link()) as link:
        return link.confirm(replace(position(world.rows[0]), offset=Offset(1)), later)


def is_accepted(world: World, other: Row) -> bool:
    world.connection.execute(
        'INSERT INTO penstock.checkpoints (consumer, channel, shard, "offset", epoch, source, record_id, staged_us) '
        "VALUES ('totals', %s, 0, %s, 1, 'eu', %s, %s)",
        [SHARD.channel, COUNT, other[0], other[6]],
    )
    try:
        with connect_postgres(world.database_url, application="test") as source:
            [plan] = reset_source(Store(world.connection), Store(source), world.client, "totals", "eu")
    except Refused:
        return False
    assert (plan.after, plan.in_doubt) == (COUNT, 0)
    return True


def is_dead_lettered_as_staged(world: World, other: Row, channel: str = SHARD.channel) -> bool:
    """The payload of a dead letter is the staged row's, if that is the record that failed."""
    came = '"as it came"'
    record = make_record(change(other, data=came), channel)
    letters = DeadLetters(world.consumer)
    letters.write(Store(world.connection), ShardName(channel, Shard(0)), [record], reason="test", attempts=1)
    [(data, key)] = world.connection.execute("SELECT data::text, key FROM penstock.dead_letters").fetchall()
    assert (data, key) in ((world.rows[-1][4], other[1]), (came, other[1]))
    return bool(data != came)


def is_finished(world: World, other: Row, channel: str) -> bool:
    values = {"channel": channel, "id": other[0], "staged_us": other[6]}
    rows = Store(world.connection).rows("finish_record", values)
    return is_gone(world, said=rows[0][1] == "1")


def is_dead_lettered(world: World, other: Row, channel: str) -> bool:
    letters = DeadLetters(world.pipeline.get_consumer("doer"))
    shard = ShardName(channel, Shard(0))
    done = letters.write_job(Store(world.connection), shard, other[0], other[6], reason="test", attempts=1)
    return is_gone(world, said=done)


def is_a_duplicate(world: World, other: Row, channel: str) -> bool:
    values = {"channel": channel, "shard": 0, "ids": [other[0]], "staged_us": [other[6]], "names": ["n"]}
    values |= {"holders": [None], "in_window": [False], "reserved": "penstock"}
    rows = Store(world.connection).rows("finish_duplicates", values)
    return is_gone(world, said=bool(rows))


def is_outstanding(world: World, other: Row, channel: str) -> bool:
    values = {"channel": channel, "ids": [other[0]], "staged": [other[6]]}
    return bool(Store(world.connection).rows("outstanding_jobs", values))


def is_gone(world: World, *, said: bool) -> bool:
    """Whether the job's row is gone, as was said."""
    [(left,)] = world.connection.execute(
        "SELECT count(*) FROM penstock.staged_records WHERE channel = 'jobs'"
    ).fetchall()
    assert left == (not said)
    return said


def is_in_postgres(world: World, other: Row) -> bool:
    return has_record(Store(world.connection), LastRecord(Place(SHARD, Offset(COUNT)), other[0], other[6]))  # type: ignore[arg-type]  # of a row


MORE: Sequence[Row] = [(9_000 + n, "m", "insert", "thing", "1", "", US + 90 + n) for n in range(2)]
"""Records of the log that the journal does not have."""

AS_STORED: dict[str, tuple[Compare, str]] = {
    "the journal's tail": (is_journals_tail, "journal/lineage.py _compare_tails"),
    "what a reset keeps": (is_kept_by_a_reset, "operating/reset/epoch.py _find_disagreeing"),
    "what is in doubt": (is_in_no_doubt, "operating/reset/doubt.py _differs"),
    "what Postgres has of what is in doubt": (is_still_there, "penstock.operating still_there"),
    "what is sent again": (is_sent_again, "channels/log/appending.py _compare"),
}
"""Compare the log, in which a record is the other one, with Postgres."""

COMPARED: dict[str, tuple[Compare, str]] = {
    **{
        f"a batch of {way}, from {first} on": (is_known_to_the_log(way, first), "lua/log/append.lua")
        for way in ("plain", "none")
        for first in (1, COUNT)
    },
    "a member that is marked": (is_marked, "lua/ick/pipeline/mark.lua"),
    "a job that is queued": (is_queued, "lua/queue/pipeline/write.lua"),
    "a reader's last entry": (is_the_one_that_was_read("none", offset=COUNT + 1), "lua/log/read.lua"),
    "a reader's last plain entry": (is_the_one_that_was_read("plain", offset=COUNT + 1), "lua/log/read.lua"),
    "a reader's last record, read again": (
        is_the_one_that_was_read("plain"),
        "channels/log/log_reader.py _check_identity",
    ),
    "a reader's last record, within an entry": (
        is_the_one_that_was_read("none", within=True),
        "channels/log/log_reader.py _check_identity",
    ),
    "a group's last entry": (is_where_the_group_was("none"), "lua/log/group/_history.lua"),
    "a group's last plain entry": (is_where_the_group_was("plain"), "lua/log/group/_history.lua"),
    "what was applied of a source": (is_applied, "consuming/several/source_link.py _explain"),
    "what follows of a source": (is_confirmed, "consuming/several/source_link.py confirm"),
    "what is accepted of a source": (is_accepted, "operating/reset/source_history.py _is_same"),
    "the last record in Postgres": (is_in_postgres, "penstock.journal staged_at"),
    "a dead letter's row": (is_dead_lettered_as_staged, "penstock.consuming dead_letter_records"),
}
"""Compare a record that is named, or the log with what it was."""

OF_JOBS: dict[str, tuple[Callable[[World, Row, str], bool], str]] = {
    "a job that is finished": (is_finished, "finish_records"),
    "a job that is not finished yet": (is_outstanding, "penstock.consuming outstanding_jobs"),
    "a job that is dead-lettered": (is_dead_lettered, "penstock.consuming dead_letter_job"),
    "a job that is a duplicate": (is_a_duplicate, "penstock.streaming finish_duplicates"),
}


@pytest.mark.parametrize("entries", ["plain", "none"])
def test_the_log_and_postgres_have_the_same_record(world: World, entries: str) -> None:
    for what, (changed, is_same) in CHANGES.items():
        other = change(world.rows[-1], **changed)
        world.fill(entries, other)

        found = {name: compare(world, other) for name, (compare, _) in AS_STORED.items()}
        assert found == dict.fromkeys(AS_STORED, is_same), what
        # Its content is compared, too.
        assert world.verified().clean == (not changed), what


@pytest.mark.parametrize("what", CHANGES)
def test_a_record_that_is_named_is_the_same_one(world: World, what: str) -> None:
    changed, is_same = CHANGES[what]
    found = {}
    for name, (compare, place) in COMPARED.items():
        other = change(world.rows[-1], **changed)
        world.client.flushall()
        world.connection.execute("DELETE FROM penstock.checkpoints WHERE channel = %s", [SHARD.channel])
        if place == "lua/log/append.lua":
            world.fill("plain" if "plain" in name else "none", other)
        found[name] = compare(world, other)

    assert found == dict.fromkeys(COMPARED, is_same)


@pytest.mark.parametrize("name", OF_JOBS)
def test_a_job_is_the_one_that_was_queued(world: World, name: str) -> None:
    compare, _ = OF_JOBS[name]
    for what, (changed, is_same) in CHANGES.items():
        for channel in (JOBS.channel, SHARD.channel, "mail"):
            with world.connection.transaction(force_rollback=True):
                found = compare(world, change(world.job, **changed), channel)
            assert found == (is_same and channel == JOBS.channel), (what, channel)


def test_a_dead_letter_of_another_channel_has_its_own_payload(world: World) -> None:
    assert not is_dead_lettered_as_staged(world, world.rows[-1], "others")


IDS, TIMES = (7, 8), (None, 5, 6)


@pytest.mark.parametrize("us", TIMES)
@pytest.mark.parametrize("other_us", TIMES)
@pytest.mark.parametrize("other_id", IDS)
def test_a_time_that_is_not_known_is_not_compared(other_id: int, us: int | None, other_us: int | None) -> None:
    """Retention removes rows that the journal still names."""
    one, other = JournaledRecord(7, us), JournaledRecord(other_id, other_us)  # type: ignore[arg-type]  # plain numbers

    assert one.is_same_as(other) == (other_id == 7 and (us is None or other_us is None or us == other_us))
    assert one.is_same_as(None)


ROOT = Path(penstock.__file__).parent
IN_PYTHON = re.compile(r"is_same_as|staged_us|identity")
IN_WHERE = re.compile(r"\b(?:WHERE|AND)\b[^\n]* = (?:%\(staged_us\)s|\w+\.staged_us)|\bcreated_at = ")
IN_LUA = re.compile(r"[=~]= (?:at|ours|identity)\b")
NO_RECORDS = {
    "spark/sources/dirty_members.py partitions",  # identities of reservations
    "spark/sources/reservation_sequence.py _end",  # the same
    "lua/log/group/read.lua",  # a cursor
}


def _compared_in_python() -> Iterator[str]:
    sources = {path: path.read_text() for path in ROOT.rglob("*.py")}
    for path, text in sources.items():
        for function in ast.walk(ast.parse(text)) if IN_PYTHON.search(text) else ():
            if isinstance(function, ast.FunctionDef) and any(map(_compares, ast.walk(function))):
                yield f"{path.relative_to(ROOT)} {function.name}"


def _compares(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare) and any(isinstance(each, (ast.Eq, ast.NotEq)) for each in node.ops):
        names = {getattr(each, "attr", getattr(each, "id", "")) for each in ast.walk(node)}
        return bool(names & {"staged_us", "identity", "_identity"})
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "is_same_as"


def _compared_in_sql() -> Iterator[str]:
    for path in ROOT.rglob("*.sql"):
        for name, text in re.findall(r"-- :name (\w+)\n(.*?)(?=\n-- :name|\Z)", path.read_text(), re.DOTALL):
            if IN_WHERE.search(text):
                yield f"{'.'.join(('penstock', *path.relative_to(ROOT).parent.parts))} {name}"
    for path in (ROOT.parents[1] / "migrations").rglob("*.py"):
        for name, text in re.findall(r"CREATE FUNCTION {schema}\.(\w+)(.*?)\"\"\"", path.read_text(), re.DOTALL):
            if " = staged_us" in text:
                yield name


def _compared_in_lua() -> Iterator[str]:
    lua = ROOT.parents[1] / "lua"
    return (str(path.relative_to(lua.parent)) for path in lua.rglob("*.lua") if IN_LUA.search(path.read_text()))


def test_every_place_that_compares_records_is_in_the_table() -> None:
    found = {*_compared_in_python(), *_compared_in_sql(), *_compared_in_lua()} - NO_RECORDS
    listed = {place for _, place in (*AS_STORED.values(), *COMPARED.values(), *OF_JOBS.values())}

    assert {place.replace("lua/log/_tail.lua", "lua/log/append.lua") for place in found} == listed
