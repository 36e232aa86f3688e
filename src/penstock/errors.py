"""Every error that Penstock raises on purpose.

An error is an instruction: it names the thing, what was found, the limit, and what to do.
``exit_code`` is what the command line ends with; ``page`` is the section of the documentation that
explains it (``docs/reference/errors.md``).

    PenstockError
    ├── DeclarationError          a declaration that cannot work                  (2, usage)
    │   ├── InvalidName           a name of a channel, consumer or schema
    │   ├── InvalidChore          a job that a recruiter cannot install
    │   ├── ChannelMismatch       a channel is registered otherwise than it is declared
    │   ├── ChannelRetired        a channel was retired, or has another name now
    │   └── ConsumerRenamed       a consumer has another name now
    ├── InvalidSetting            a setting with an invalid value                 (2)
    ├── Unknown                   a name that does not exist                      (2)
    ├── InvalidIckCall            a score, member or size that an Ick cannot take (2)
    ├── InvalidLogCall            an argument that a reader or writer refuses     (2)
    ├── InvalidMessage            a field of a message that a queue cannot take   (2)
    ├── InvalidStructureCall      an argument that a structure cannot take        (2)
    ├── LockBusy                  somebody else holds a lock, or computes a value (1)
    ├── TenantFull                a tenant's bytes in a queue are at their limit  (1)
    ├── StaleLease                the lease of a message or a lock has ended      (1)
    ├── StagingError              a record cannot be staged                       (1)
    │   ├── InvalidRecord         a field of the record is not acceptable
    │   ├── BypassedStaging       a statement bypasses the staging rules
    │   └── NotAttached           the session has no pipeline attached
    ├── BrokenTransaction         a handler ended or spoiled its transaction      (1)
    │   ├── HandlerCommitted      its effects are committed, its checkpoint is not
    │   └── HandlerNotRun         it returned a coroutine or a generator
    ├── HandlerExited             a handler called sys.exit()                     (1)
    ├── HandlerHung               handlers of a queue's worker do not return      (1)
    ├── Halted                    shards of a consumer are halted                 (1)
    ├── Paused                    an operator has paused a consumer               (1)
    ├── BarrierMissed             a consumer did not stop at a cut                (1)
    ├── SnapshotLost              a snapshot ended before it was read             (1)
    ├── UnreadableValue           a value that Spark's type cannot hold           (1)
    ├── DemoFailed                the demo could not finish                       (1)
    ├── ServerUnavailable         Postgres or Redis cannot be reached or started  (3)
    │   ├── AppendRefused         Redis answers, and refuses to write
    │   ├── DriverUnreachable     tasks on Spark cannot connect to their driver
    │   ├── ServerReplaced        Postgres was restarted or restored under a worker
    │   └── PrivilegeMissing      the role lacks a privilege in Postgres          (2)
    ├── JavaMissing               no Java runtime for Spark                       (3)
    ├── SparkTooOld               PySpark before 4.0                              (3)
    ├── CodecMissing              the library that a channel compresses with      (3)
    ├── SchemaMissing             the database has no Penstock schema, or another (2)
    │   ├── TriggerMissing        a declared trigger is missing or another one
    │   └── ObjectMissing         a table, column or function is missing; a ServerUnavailable, too
    ├── LogLost                   a log is no longer the one that was read        (4)
    ├── Gap                       records are gone before a consumer passed them  (4)
    └── Refused                   stopped for safety                              (5)
        ├── HistoryDiverged       Postgres lost commits, or is another one
        ├── ForeignLog            the stream holds entries of another program
        │   └── DamagedEntry      an entry of the stream cannot be read
        ├── LogDiverged            a log has lost what a group of readers has read
        ├── GroupLost             a group of readers is gone from Redis
        ├── DamagedIck            a key of an Ick holds something else, or is missing
        ├── ForeignQueue          a key of a queue holds something else
        ├── ForeignStructure      a key of a structure holds something else
        ├── QueueDamaged          no stream of a queue can be written
        ├── DamagedJournal        rows of the journal, or records that it names, were deleted
        ├── UnpublishableRecord   Postgres cannot read a record, or Redis does not take it
        ├── NotReplayable         a replay that is impossible, or a repeated one
        ├── ReadOnlyPostgres      a standby or a read-only server
        ├── Fenced                a newer epoch has taken over
        ├── RepairRefused         a constraint or trigger does not allow a repair
        ├── HiddenRows            row-level security hides rows from Penstock
        └── UnsafeSetting         a setting of a server endangers records
"""

from typing import ClassVar, Self


class PenstockError(Exception):
    """Root of the tree: ``except PenstockError`` catches all that Penstock raises on purpose."""

    exit_code: ClassVar[int] = 1
    page: ClassVar[str] = "errors#penstockerror"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__module__ == __name__:  # an application's own errors have no page here
            cls.page = f"errors#{cls.__name__.lower()}"


class _NamesField(Exception):
    """An error that names what is wrong.

    Attributes:
        field: The field or argument, or the path to it.
    """

    separator: ClassVar[str] = " "

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}{self.separator}{message}")
        self.field = field

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        """Both arguments, so that it can be copied and pickled."""
        return type(self), (self.field, str(self).removeprefix(self.field + self.separator))


class DeclarationError(PenstockError):
    """A pipeline is declared in a way that cannot work.

    Raised by the declaration, not when the pipeline runs.
    """

    exit_code = 2


class InvalidName(DeclarationError):
    """The name of a channel, a consumer or a schema breaks the rule for names."""


class InvalidChore(_NamesField, DeclarationError):
    """A recruiter cannot install a job: its ``field``, ``name``, ``job`` or ``rate``, cannot work.

    Nothing was changed.
    """


class ChannelMismatch(DeclarationError):
    """A channel is registered as another kind, or with other shards, than a pipeline declares."""


class ChannelRetired(DeclarationError):
    """A channel was retired."""


class ConsumerRenamed(DeclarationError):
    """A consumer was renamed; by its old name it would be a new one, and apply everything again."""


class InvalidSetting(PenstockError):
    """A setting has a value that it cannot take, is unknown, or is missing where it is needed."""

    exit_code = 2


class Unknown(PenstockError):
    """A command, or a query of the application's, names what does not exist.

    A consumer, a channel, a dead letter, a table.
    """

    exit_code = 2


class InvalidIckCall(PenstockError):
    """An operation of an Ick was called with a value that cannot be stored; nothing was written."""

    exit_code = 2


class InvalidLogCall(_NamesField, PenstockError):
    """A reader or a writer of a log cannot take an argument: its ``field``; nothing was sent."""

    exit_code = 2


class InvalidMessage(_NamesField, PenstockError):
    """A message, or a limit of a tenant, has a field that a queue cannot take: its ``field``.

    Nothing was written.
    """

    exit_code = 2


class InvalidStructureCall(_NamesField, PenstockError):
    """A volatile hash, a pinned key, a lock or a tracker cannot take an argument: its ``field``.

    Nothing was written.
    """

    exit_code = 2


class LockBusy(PenstockError):
    """Somebody else holds a lock, or computes a value, for longer than the time to wait."""


class TenantFull(PenstockError):
    """A tenant has as many bytes in a queue as it may have; its message was not written."""


class StaleLease(PenstockError):
    """The lease of a message or a lock has ended: somebody else may have it, or it was deleted."""


class StagingError(PenstockError):
    """Postgres, or the state of the connection, refuses a record or a call about jobs.

    Roll the transaction back.
    """


class InvalidRecord(_NamesField, StagingError):
    """A field of a record is not acceptable.

    Its ``field`` is the path, such as ``data.lines[3].price``.
    """

    separator = ": "


class UnstagedChanges(UserWarning):
    """A warning, not an error: changes that a rule seems to cover are or would be unstaged."""


class BypassedStaging(StagingError):
    """A bulk or Core statement would change a published class without staging its records."""


class NotAttached(StagingError):
    """Records are staged on a session that the pipeline was not attached to."""


class BrokenTransaction(PenstockError):
    """A handler did to its transaction what only Penstock may.

    Ended it, made it read-only, or hid that it has failed.
    """


class HandlerCommitted(BrokenTransaction):
    """A handler committed its effects without the checkpoint.

    Another attempt would double them, so its shard halts.
    """


class HandlerNotRun(BrokenTransaction):
    """A handler returned a coroutine or a generator that nobody runs.

    It has done nothing, so its shard halts.
    """


class HandlerExited(PenstockError):
    """A handler raised ``SystemExit`` or ``KeyboardInterrupt``.

    Nothing of the batch is committed, and the worker ends.
    """


class HandlerHung(PenstockError):
    """More handlers of a worker hang than may run at the same time.

    Others have their jobs, and the process has to end.
    """


class Halted(PenstockError):
    """A consumer could not be drained: some of its shards are halted."""


class Paused(PenstockError):
    """A consumer could not be drained, or stopped at a cut: an operator has paused it."""


class BarrierMissed(PenstockError):
    """A consumer did not stop at the offsets of a cut; nothing was compared and nothing changed."""


class SnapshotLost(PenstockError):
    """The snapshot for reading the tables is gone; nothing was compared and nothing changed."""


class UnreadableValue(PenstockError):
    """A value that Spark's type for its column cannot hold.

    The error names the column, or the record of a payload.
    """


class DemoFailed(PenstockError):
    """The demo could not finish."""


class ServerUnavailable(PenstockError):
    """Postgres or Redis cannot be reached, or cannot be started."""

    exit_code = 3


class ServerReplaced(ServerUnavailable):
    """Postgres was restarted, restored or replaced under a worker.

    Its history has to be compared with the log's again.  Only opening the worker again does that,
    so nothing on the way to its loop may hide this error.
    """


class DriverUnreachable(ServerUnavailable):
    """Tasks of the engine on Spark cannot connect to their driver, which plans and stops them."""


class AppendRefused(ServerUnavailable):
    """Redis answers, but refuses to write now (out of memory, read-only, loading).

    Records wait in Postgres.
    """


class JavaMissing(PenstockError):
    """Spark needs a Java runtime, and there is none."""

    exit_code = 3


class SparkTooOld(PenstockError):
    """PySpark is installed, and is older than 4.0, which has no data sources in Python."""

    exit_code = 3


class CodecMissing(PenstockError):
    """The library that a channel's entries are compressed with is not installed."""

    exit_code: ClassVar[int] = 3


class SchemaMissing(PenstockError):
    """The database does not hold the Penstock schema in the version that this release needs."""

    exit_code = 2


class TriggerMissing(SchemaMissing):
    """A trigger that a rule declares is missing, disabled, not that of its rule, or one of two.

    Changes would be lost or doubled.
    """


class ObjectMissing(SchemaMissing, ServerUnavailable):
    """A table, a column or a function that a statement of Penstock's names is not there.

    A worker that has worked waits for it: a migration may be under way.
    """

    exit_code = 2


class PrivilegeMissing(ServerUnavailable):
    """The role that Penstock connects as lacks a privilege in Postgres.

    A command, or a worker at its start, ends with it; a worker that has worked waits until the
    privilege is granted again.
    """

    exit_code = 2


class LogLost(PenstockError):
    """A log is no longer the one that a reader has read: it ends before that, or has other records.

    Attributes:
        shard: The shard, such as ``rides/2``.
        read: The highest offset that the reader has read.
        tail: Where the log ends now.
    """

    exit_code = 4

    def __init__(self, message: str = "", shard: str = "", read: int = 0, tail: int = 0) -> None:
        super().__init__(message)
        self.shard, self.read, self.tail = shard, read, tail


class Gap(PenstockError):
    """The log continues beyond a consumer's checkpoint, and the records between are gone.

    Attributes:
        last: The last offset that is missing; None if it is not known.
    """

    exit_code = 4
    last: int | None = None


class Refused(PenstockError):
    """Penstock stops rather than risk a loss; an operator has to decide."""

    exit_code = 5


class HistoryDiverged(Refused):
    """Redis or a consumer has records that Postgres does not know.

    Postgres lost commits, or is another server.
    """


class ForeignLog(Refused):
    """The key of a shard holds something that Penstock did not write."""


class DamagedEntry(ForeignLog):
    """An entry of a log has the form that Penstock writes, and cannot be read.

    Attributes:
        first: Offset of its first record; that of its last one if the entry does not tell.
        last: Offset of its last record.
    """

    def __init__(self, message: str = "", first: int = 0, last: int = 0) -> None:
        super().__init__(message)
        self.first, self.last = first, last


class LogDiverged(Refused):
    """A log ends before a record that a group of readers has read, or has another one there."""


class GroupLost(Refused):
    """A group of readers that existed, or that has to, is gone from Redis."""


class DamagedIck(Refused):
    """A key of an Ick holds something that is not an Ick's, or has members without a version."""


class ForeignQueue(Refused):
    """A key of a queue holds something that is not a queue's."""


class ForeignStructure(Refused):
    """A key of a volatile hash, of pinned keys or of a queue tracker holds something else."""


class QueueDamaged(Refused):
    """No stream of a queue can be written: all their keys hold other types."""


class DamagedJournal(Refused):
    """Rows of a shard's journal, or records that it names, were deleted by others than Penstock."""


class UnpublishableRecord(Refused):
    """A record that Postgres cannot read back, or that Redis does not take.

    Nothing after it in its shard is published.
    """


class NotReplayable(Refused):
    """Records cannot be replayed into a channel, or this replay has already been carried out."""


class ReadOnlyPostgres(Refused):
    """The streamer was pointed at a standby or a read-only server."""


class Fenced(Refused):
    """A newer epoch of the log has been opened, or another Spark query has taken a name.

    This process belongs to an old one.
    """


class RepairRefused(Refused):
    """A constraint, a reference, a trigger or a rule does not allow the repair of a state.

    The rows concerned are as they were.
    """


class HiddenRows(Refused):
    """A policy of row-level security applies to what Penstock reads.

    Rows that it hides would be lost silently.
    """


class UnsafeSetting(Refused):
    """A server is set up in a way that can lose records."""


def from_wire(kind: str, message: str) -> PenstockError:
    """Rebuilds an error of another process from its class's name and its text.

    Its other attributes stay behind.  One of an application's own classes becomes a
    ``PenstockError``.
    """
    cls = globals().get(kind)
    if not (isinstance(cls, type) and issubclass(cls, PenstockError)):
        return PenstockError(message)
    if not issubclass(cls, _NamesField):
        return cls(message)
    field, _, text = message.partition(cls.separator)
    error: PenstockError = cls(field, text)
    return error
