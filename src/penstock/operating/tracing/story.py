"""The story of a record, and why it is not further, as values."""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from penstock.channels.refusals import WriteRefusal
from penstock.operating.consumers import ReaderKind
from penstock.records import Offset, Place, RecordId, Shard, ShardName

ReaderState = Literal["applied", "dead-lettered", "parked", "halted", "barrier", "waiting", "behind", "unread"]
"""A consumer's progress with a record."""


@dataclass(frozen=True, slots=True)
class ReaderProgress:
    """A consumer of the record's channel.

    Attributes:
        state: ``applied``: its checkpoint is past the record.  ``dead-lettered`` and ``parked``: there is a dead letter of the
            record, in the second case because an earlier one of its key has one.  ``halted``, at a ``barrier`` of a
            reconciliation, or ``waiting`` for something: before the record.  ``behind``: it has not come so far.
            ``unread``: it has no checkpoint in the shard.
        checkpoint: Up to where all is applied; None if there is no checkpoint.
        ahead: Records between the checkpoint and this one.
        at: Time of the last move of the checkpoint, by which the record was applied; or of the dead-lettering.
        reason: Cause of the halt, the wait or the dead letter.
        kind: ``consumer``; ``reported``: it runs with another database, which reports its checkpoints here; ``replay``: it is a
            ``penstock replay`` that has not ended.
        retry: Place of the dead letter that is to be retried: of a parked one, the first of its key; None if it is not
            dead-lettered or parked.
        superseded_by: Place of a later record of its key that was applied, so that a retry needs ``--superseded``; empty if there is
            none.
        has_letters: True if the consumer has dead letters, which are to be retried before a halted shard goes on.
    """

    consumer: str
    state: ReaderState
    checkpoint: int | None
    ahead: int
    at: datetime | None
    reason: str | None
    kind: ReaderKind = "consumer"
    retry: str | None = None
    superseded_by: str = ""
    has_letters: bool = False

    @property
    def is_done(self) -> bool:
        """True if the record has taken effect there."""
        return self.state == "applied"

    @property
    def is_dead_lettered(self) -> bool:
        """True if there is a dead letter of the record."""
        return self.state in {"dead-lettered", "parked"}


@dataclass(frozen=True, slots=True)
class Story:
    """The story of a record.

    Attributes:
        kind: ``log``, ``ick`` or ``queue``; None if no such channel is registered.
        is_known: True if the registered channel has this shard.
        is_retired: True if the channel was retired.
        key: Its key, or the tenant of a message; None if its row is gone.
        action: None if its row is gone.
        object: None if its row is gone.
        staged_at: None if its row is gone, or has a time that no record can have.
        transaction: The id of the transaction that staged it; None if its row is gone.
        committed_at: Time of its commit; None unless Postgres has ``track_commit_timestamp``.
        isolated: Reason that it can get no offset; None if it can.
        is_seen: True if the last tick saw its transaction.
        tick: The tick that sequenced it; None if it is not, or is too long ago.
        sequenced_at: Time that it got its offset; None if it has none, or the journal does not name it any more.
        offset: Its offset; None if it has none.
        published: The shard's last offset in Redis; None if Redis was not asked, or did not answer.
        first: The oldest offset that the log in Redis still holds; None for the other kinds.
        redis: Error of Redis; None if it answered.
        refusal: Reason that Redis refuses writes, if it lacks the record; None if it has it, or if nothing was found.
        stopped: Reason that the streamer leaves its shard out; None if it does not.
        state: Its state in an Ick or a queue: ``dirty``, ``reserved``, ``held``, ``waiting``, ``leased``, ``delayed``, ``dead``,
            ``done``; None if nothing.
    """

    id: RecordId
    channel: str
    shard: int
    kind: str | None = None
    is_known: bool = False
    is_retired: bool = False
    key: str | None = None
    action: str | None = None
    object: str | None = None
    staged_at: datetime | None = None
    transaction: str | None = None
    committed_at: datetime | None = None
    isolated: str | None = None
    is_seen: bool = True
    tick: int | None = None
    sequenced_at: datetime | None = None
    offset: int | None = None
    published: int | None = None
    first: int | None = None
    redis: str | None = None
    refusal: WriteRefusal | None = None
    stopped: str | None = None
    state: str | None = None
    why: str | None = None
    readers: tuple[ReaderProgress, ...] = ()

    @property
    def shard_name(self) -> ShardName:
        """Its shard."""
        return ShardName(self.channel, Shard(self.shard))

    @property
    def place(self) -> str:
        """Its place, as text."""
        if self.offset is None:
            return str(self.shard_name)
        return str(Place(self.shard_name, Offset(self.offset)))

    @property
    def is_only_a_letter(self) -> bool:
        """True if its row is gone, and what is left of it is a dead letter."""
        return self.transaction is None and any(each.is_dead_lettered for each in self.readers)

    @property
    def is_published(self) -> bool | None:
        """True if Redis has had it; None if that is not known."""
        if self.offset is None:
            return False
        return None if self.published is None else self.offset <= self.published

    @property
    def is_done(self) -> bool:
        """True if it has taken effect everywhere."""
        if any(reader.is_dead_lettered for reader in self.readers):
            return False
        if self.kind in {"ick", "queue"}:
            return self.state == "done"
        return bool(self.readers) and all(reader.is_done for reader in self.readers)


@dataclass(frozen=True, slots=True)
class OpenWriter:
    """A transaction that has written into staged records and is not committed; what it wrote is invisible until then.

    Attributes:
        pid: The server's process; None of a prepared transaction.
        prepared: The name of a prepared transaction; None of others.
        application: The application's name; None if this role may not see it.
        state: ``idle in transaction`` …; None of a prepared transaction, or if this role may not see it.
        age_s: For how long it has been open or prepared, in seconds; None if this role may not see it.
        query: Its last statement, if that was asked for: it may contain payloads.
    """

    pid: int | None
    prepared: str | None
    application: str | None
    state: str | None
    age_s: float | None
    user: str | None
    query: str | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The cause that keeps a record from its next step.

    Attributes:
        cause: The first cause that holds, in one word or two: see ``docs/how-to/find-a-record.md``.
        fix: Command, or other remedy; None if nothing is wrong.
        story: The record; None if no row has it.
        writers: Open transactions that wrote into staged records, if the record may be in one of them.
    """

    cause: str
    text: str
    fix: str | None = None
    story: Story | None = None
    writers: tuple[OpenWriter, ...] = ()

    @property
    def is_applied(self) -> bool:
        """True if the record has taken effect everywhere."""
        return self.cause == "applied"
