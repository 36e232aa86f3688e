"""Tells the story of a record, and why it is not further; reads Postgres and Redis only."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from psycopg.rows import dict_row

from penstock.channels.channel_kinds import get_kind
from penstock.channels.commands import RedisClient
from penstock.channels.log.streams import extents
from penstock.channels.refusals import WriteRefusal, find_refusal
from penstock.channels.routing import log_keys
from penstock.consuming.checkpoints import UnpassedShard, find_unpassed
from penstock.consuming.letter_retry import find_later
from penstock.database.driver_errors import postgres_errors
from penstock.database.registry import Pause, read_pauses
from penstock.database.statements import name_shards, quote
from penstock.database.store import Store
from penstock.declaring.kinds import Traits, get_traits
from penstock.errors import AppendRefused, Refused, SchemaMissing, ServerUnavailable
from penstock.journal.journal_reader import journal_bounds
from penstock.operating.consumers import ReaderKind, find_kind
from penstock.operating.worker_sessions import WorkerSession, read_sessions
from penstock.records import Offset, Place, RecordId, Shard, ShardName

BUSY_S = 1.0
"""Seconds after which a session of a consumer is a cause: somebody asks about this record."""

ReaderState = Literal[
    "applied",
    "cancelled",
    "dead-lettered",
    "parked",
    "halted",
    "paused",
    "barrier",
    "waiting",
    "behind",
    "unread",
]
"""A consumer's progress with a record."""


@dataclass(frozen=True, slots=True)
class ReaderProgress:
    """A consumer of the record's channel."""

    consumer: str
    # ``applied``: its checkpoint is past the record.  ``cancelled``: a job that has no effect.
    # ``dead-lettered`` and ``parked``: there is a dead letter of the record, in the second case
    # because an earlier one of its key has one.  ``halted``, ``paused``, at a ``barrier`` of a
    # reconciliation, or ``waiting`` for something: before the record.  ``behind``: it has not come
    # so far. ``unread``: it has no checkpoint in the shard.
    state: ReaderState
    checkpoint: int | None  # up to where all is applied; None if there is no checkpoint
    ahead: int  # records between the checkpoint and this one
    # time of the last move of the checkpoint, by which the record was applied; or of the
    # dead-lettering
    at: datetime | None
    reason: str | None  # cause of the halt, the wait or the dead letter
    # ``consumer``; ``reported``: it runs with another database, which reports its checkpoints here;
    # ``replay``: it is a ``penstock replay`` that has not ended
    kind: ReaderKind = "consumer"
    # place of the dead letter that is to be retried: of a parked one, the first of its key; None if
    # it is not dead-lettered or parked
    retry: str | None = None
    # place of a later record of its key that was applied, so that a retry needs ``--superseded``;
    # empty if there is none
    superseded_by: str = ""
    # true if the consumer has dead letters, which are to be retried before a halted shard goes on
    has_letters: bool = False
    resume: str = ""  # the command that resumes a paused consumer; empty for another

    @property
    def is_done(self) -> bool:
        """Returns whether the record has taken effect there, or is to have none."""
        return self.state in {"applied", "cancelled"}

    @property
    def is_dead_lettered(self) -> bool:
        """Returns whether there is a dead letter of the record."""
        return self.state in {"dead-lettered", "parked"}


@dataclass(frozen=True, slots=True)
class JobAttempt:
    """An attempt at a job that failed, or that did the job after others had failed."""

    attempt: int  # its number
    worker: str  # host and process
    began_at: datetime  # by the worker's clock, and so is ``ended_at``
    ended_at: datetime
    error: str | None  # class of the error; None if the job was done


@dataclass(frozen=True, slots=True)
class Story:
    """The story of a record."""

    id: RecordId
    channel: str
    shard: int
    kind: str | None = None  # ``log``, ``ick`` or ``queue``; None if no such channel is registered
    is_known: bool = False  # true if the registered channel has this shard
    is_retired: bool = False  # true if the channel was retired
    key: str | None = None  # its key, or the tenant of a message; None if its row is gone
    action: str | None = None  # None if its row is gone
    object: str | None = None  # None if its row is gone
    # None if its row is gone, or has a time that no record can have
    staged_at: datetime | None = None
    # the id of the transaction that staged it; None if its row is gone
    transaction: str | None = None
    # the trace in its headers; None if it has none, or this role may not read headers
    trace_id: str | None = None
    # time of its commit; None unless Postgres has ``track_commit_timestamp``
    committed_at: datetime | None = None
    isolated: str | None = None  # reason that it can get no offset; None if it can
    is_seen: bool = True  # true if the last tick saw its transaction
    tick: int | None = None  # the tick that sequenced it; None if it is not, or is too long ago
    # time that it got its offset; None if it has none, or the journal does not name it any more
    sequenced_at: datetime | None = None
    offset: int | None = None  # its offset; None if it has none
    # the shard's last offset in Redis; None if Redis was not asked, or did not answer
    published: int | None = None
    # the oldest offset that the log in Redis still holds; None for the other kinds
    first: int | None = None
    redis: str | None = None  # error of Redis; None if it answered
    # reason that Redis refuses writes, if it lacks the record; None if it has it, or if nothing was
    # found
    refusal: WriteRefusal | None = None
    stopped: str | None = None  # reason that the streamer leaves its shard out; None if it does not
    # its state in an Ick or a queue: ``dirty``, ``reserved``, ``held``, ``waiting``, ``leased``,
    # ``delayed``, ``dead``, ``done``, ``cancelled``; None if nothing
    state: str | None = None
    why: str | None = None
    readers: tuple[ReaderProgress, ...] = ()
    attempts: tuple[JobAttempt, ...] = ()  # at a job, once one has failed: the last twenty
    # what the handler of a job said last: the part that is done; None if nothing
    progress: float | None = None
    # time of a job's result, which is kept for a while; None if there is none
    result_at: datetime | None = None

    @property
    def shard_name(self) -> ShardName:
        """Returns its shard."""
        return ShardName(self.channel, Shard(self.shard))

    @property
    def place(self) -> str:
        """Returns its place, as text."""
        if self.offset is None:
            return str(self.shard_name)
        return str(Place(self.shard_name, Offset(self.offset)))

    @property
    def traits(self) -> Traits:
        """Returns the traits of its channel's kind."""
        return get_traits(self.kind)

    @property
    def is_only_a_letter(self) -> bool:
        """Returns whether its row is gone, and what is left of it is a dead letter."""
        return self.transaction is None and any(reader.is_dead_lettered for reader in self.readers)

    @property
    def is_published(self) -> bool | None:
        """Returns whether Redis has had it; None if that is not known."""
        if self.offset is None:
            return False
        return None if self.published is None else self.offset <= self.published

    @property
    def is_done(self) -> bool:
        """Returns whether it has taken effect everywhere."""
        if any(reader.is_dead_lettered for reader in self.readers):
            return False
        if not self.traits.keeps_records:
            return self.state in {"done", "cancelled"}
        return bool(self.readers) and all(reader.is_done for reader in self.readers)


@dataclass(frozen=True, slots=True)
class OpenWriter:
    """A transaction that has written into staged records and is not committed.

    What it wrote is invisible until then.
    """

    pid: int | None  # the server's process; None of a prepared transaction
    prepared: str | None  # the name of a prepared transaction; None of others
    application: str | None  # the application's name; None if this role may not see it
    # ``idle in transaction`` …; None of a prepared transaction, or if this role may not see it
    state: str | None
    # for how long it has been open or prepared, in seconds; None if this role may not see it
    age_s: float | None
    user: str | None
    query: str | None = None  # its last statement, if that was asked for: it may contain payloads


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The cause that keeps a record from its next step."""

    # the first cause that holds, in one word or two: see ``docs/how-to/find-a-record.md``
    cause: str
    text: str
    fix: str | None = None  # command, or other remedy; None if nothing is wrong
    story: Story | None = None  # the record; None if no row has it
    # open transactions that wrote into staged records, if the record may be in one of them
    writers: tuple[OpenWriter, ...] = ()

    @property
    def is_applied(self) -> bool:
        """Returns whether the record has taken effect everywhere."""
        return self.cause == "applied"


Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Situation:
    """Facts that hold for all records."""

    tick: int
    tick_s: float  # seconds since then
    streamers: int
    has_policies: bool  # true if row-level security is enabled on staged records
    drawn: int | None  # the last record id that was drawn; None if this role may not see it
    # the newest id of the rows at which shards begin from which retention has removed records; None
    # if it has not
    removed_to: int | None
    sessions: tuple[WorkerSession, ...] = ()  # those of consumers that make no progress

    def find_session(self, consumer: str) -> WorkerSession | None:
        """Returns a session of the consumer without progress; first one that waits for a lock."""
        sessions = [session for session in self.sessions if session.belongs_to(consumer)]
        return min(sessions, key=lambda session: session.kind != "blocked", default=None)


class StoryReader:
    """Reads records of one pipeline."""

    def __init__(self, store: Store, client: RedisClient) -> None:
        self._store, self._client = store, client

    def find_ids(self, key: str, channel: str | None, limit: int) -> list[RecordId]:
        """Returns the newest kept records of a key, the oldest of them first."""
        values = {"key": key, "channel": channel, "limit": limit}
        return [RecordId(id_) for (id_,) in reversed(self._rows("ids_of_key", values))]

    def find_id(self, place: Place) -> RecordId | None:
        """Returns the record at a place; None if the journal does not name it."""
        [(id_,)] = self._rows(
            "id_at",
            {"channel": place.shard.channel, "shard": place.shard.shard, "offset": place.offset},
        )
        return None if id_ is None else RecordId(id_)

    def read(self, record: RecordId) -> Story | None:
        """Returns the story of a record; None if nothing of it is visible."""
        with self._store.transaction("tracing a record"):
            self._store.connection.execute(
                "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"
            )
            story = self._read_place(record)
            if story is None:
                return None
            names = {"channel": story.channel, "shard": story.shard, "id": record, "key": story.key}
            [(kind, is_known, stopped, is_retired, is_resharded, *waiting)] = self._rows(
                "shard_state", names
            )
            rows = self._rows("readers", names)
            trace_id = self._read_trace_id(record)
            notes = self._rows("job_notes", {"id": record}) if get_traits(kind).has_jobs else ()
            pauses = read_pauses(self._store)
            unpassed = {
                name: find_unpassed(self._store, name, story.channel)
                for name, *_ in (rows if is_resharded else ())
            }
        facts = {
            "kind": kind,
            "is_known": is_known,
            "stopped": stopped,
            "is_retired": is_retired,
            "trace_id": trace_id,
        }
        story = replace(story, **facts)
        story = self._ask_redis(story, waiting)
        for attempts, progress, result_at, has_no_effect in notes:
            attempts_made = tuple(map(_make_attempt, attempts or ()))
            story = replace(story, attempts=attempts_made, progress=progress, result_at=result_at)
            if story.state == "done" and has_no_effect is not None:
                story = replace(
                    story,
                    state="cancelled" if has_no_effect else "done",
                    why=_CANCELLED[has_no_effect],
                )
        readers = (_wait(story, _reader(story, row), unpassed) for row in rows)
        return replace(story, readers=tuple(_pause(story, reader, pauses) for reader in readers))

    def _read_trace_id(self, record: RecordId) -> str | None:
        tables = {"staged": self._table, "letters": quote(self._store.scope.schema, "dead_letters")}
        [(may_read,)] = self._rows("may_read_headers", tables)
        return (
            next((trace for (trace,) in self._rows("trace_id", {"id": record})), None)
            if may_read
            else None
        )

    def _read_place(self, record: RecordId) -> Story | None:
        story = next((Story(**row) for row in self._named("staged_record", {"id": record})), None)
        channel = None if story is None else story.channel
        for staged_shard in (None,) if story is None else (story.shard, None):
            values = {"channel": channel, "shard": staged_shard, "id": record}
            for channel_name, shard, offset, sequenced_at, _ in self._rows(
                "place_of_record", values
            ):
                story = story or Story(record, channel_name, shard)
                return replace(story, shard=shard, offset=offset, sequenced_at=sequenced_at)
        letters = () if story else self._named("letter_of_record", {"id": record})
        return next((Story(**row) for row in letters), story)

    def _ask_redis(self, story: Story, waiting: list[Any]) -> Story:
        """Returns the story with what Redis has of the record, if it can be there."""
        if story.traits.has_jobs and story.transaction is None:
            return replace(story, state="done", why="it is done")
        if story.offset is None or story.kind is None:
            return story
        try:
            [extent] = extents(
                self._client, self._store.scope.namespace, [story.shard_name]
            ).values()
            story = replace(
                story,
                published=extent.tail,
                first=extent.first if story.traits.keeps_records else None,
            )
            story = self._find(story, waiting)
        except AppendRefused as error:
            # A replica without its master may refuse reads as well.
            story = replace(story, redis=str(error))
        except (ServerUnavailable, Refused) as error:
            return replace(story, redis=str(error))
        refusal = None
        if not story.is_published:
            with suppress(ServerUnavailable):
                refusal = find_refusal(
                    self._client, log_keys(self._store.scope.namespace, story.shard_name).stream
                )
        return replace(story, refusal=refusal)

    def _find(self, story: Story, waiting: list[Any]) -> Story:
        """Returns the story with the state that a record has apart from its offset."""
        is_waiting, is_given, tenant, due_s = waiting
        if is_waiting and not is_given:
            why = (
                f"its tenant {tenant!r} has no room in Redis"
                if tenant is not None
                else f"it is due in {max(0.0, due_s):.0f} s, and waits in Postgres"
            )
            return replace(story, state="delayed", why=why)
        # A job may be in Redis before the position is.
        if story.key is None or not (story.is_published or story.traits.has_jobs):
            return story
        keys = self._client, self._store.scope.namespace, story.shard_name
        state = get_kind(story.kind).find(*keys, story.id, story.key, story.staged_at)
        return story if state is None else replace(story, state=state[0], why=state[1])

    def read_situation(self) -> Situation:
        """Returns facts that hold for all records."""
        with postgres_errors("reading the last tick"):
            bounds = journal_bounds(self._store)
            firsts = [first for first, _ in bounds.values()]
            values = {"table": self._table, **name_shards(bounds), "firsts": firsts}
            rows = self._rows("situation", values)
        if not rows:
            raise SchemaMissing(f"schema {self._store.scope.schema} has no tick: penstock init")
        return replace(Situation(*rows[0]), sessions=read_sessions(self._store, BUSY_S))

    def read_writers(self, *, with_query: bool = False) -> tuple[OpenWriter, ...]:
        """Returns the open transactions that have written staged records, oldest first."""
        values = {"table": self._table, "with_query": with_query}
        rows = self._store.rows(
            "open_writers", values, binary=True, doing="reading open transactions"
        )
        return tuple(OpenWriter(*row) for row in rows)

    @property
    def _table(self) -> str:
        return quote(self._store.scope.schema, "staged_records")

    def _named(self, name: str, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns rows whose columns have the names of a story's attributes."""
        with (
            postgres_errors("tracing a record"),
            self._store.connection.cursor(binary=True, row_factory=dict_row) as cursor,
        ):
            return cursor.execute(self._store[name], values).fetchall()

    def _rows(self, name: str, values: Mapping[str, Any]) -> list[Row]:
        return self._store.rows(name, values, binary=True, doing="tracing a record")


def _make_attempt(attempt: dict[str, Any]) -> JobAttempt:
    times = {name: datetime.fromisoformat(attempt[name]) for name in ("began_at", "ended_at")}
    return JobAttempt(**{**attempt, **times})


def _wait(
    story: Story, reader: ReaderProgress, unpassed: Mapping[str, UnpassedShard | None]
) -> ReaderProgress:
    """Returns the reader as one that waits, if only shards of an earlier generation hold it up."""
    predecessor = unpassed.get(reader.consumer)
    if reader.state != "behind" or predecessor is None or not predecessor.blocks(story.shard):
        return reader
    return replace(reader, state="waiting", reason=predecessor.explain(story.channel))


def _pause(story: Story, reader: ReaderProgress, pauses: tuple[Pause, ...]) -> ReaderProgress:
    """Returns the reader as one that is paused, if it would go on otherwise."""
    pause_ = next((pause for pause in pauses if pause.holds(reader.consumer, story.channel)), None)
    if (
        pause_ is None
        or reader.kind == "reported"
        or reader.state not in {"behind", "waiting", "barrier"}
    ):
        return reader
    return replace(reader, state="paused", reason=str(pause_), resume=pause_.how_to_resume)


_CANCELLED = {
    True: "it was cancelled, and has no effect",
    False: "it was cancelled too late: a worker had begun it, and has finished it",
}


def _reader(story: Story, row: Row) -> ReaderProgress:
    (
        consumer,
        is_reported,
        checkpoint,
        halted,
        waiting,
        updated_at,
        barrier,
        has_letters,
        *letter,
    ) = row
    reason, parked, failed_at, later_shard, later_offset, retry_shard, retry = letter
    kind = find_kind(consumer, is_reported=is_reported)
    ahead = max(0, (story.offset or 0) - 1 - checkpoint) if checkpoint is not None else 0

    def make(state: ReaderState, why: str | None, passed: int = ahead) -> ReaderProgress:
        return ReaderProgress(consumer, state, checkpoint, passed, updated_at, why, kind)

    if reason is not None:
        state: ReaderState = "parked" if parked else "dead-lettered"
        place = str(Place(ShardName(story.channel, Shard(retry_shard)), Offset(retry)))
        later = (
            find_later(story.channel, later_shard, later_offset)
            if story.traits.keeps_records
            else ""
        )
        return replace(make(state, reason, 0), at=failed_at, retry=place, superseded_by=later)
    if checkpoint is None:
        return make("unread", None)
    is_past = story.offset is not None and story.offset <= checkpoint
    if is_past if story.traits.keeps_records else is_past or story.is_done:
        return (
            make("cancelled", story.why, 0)
            if story.state == "cancelled"
            else make("applied", None, 0)
        )
    if halted is not None:
        return replace(
            make("halted", halted), has_letters=has_letters and story.traits.keeps_records
        )
    if barrier is not None:
        return make("barrier", f"a reconciliation has stopped it at offset {barrier} for a moment")
    return make("behind" if waiting is None else "waiting", waiting)
