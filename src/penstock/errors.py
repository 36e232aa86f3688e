"""Every error that Penstock raises on purpose.

An error is an instruction: it names the thing, what was found, the limit, and what to do.  ``exit_code`` is what the
command line ends with; ``page`` is the section of the documentation that explains it (``docs/reference/errors.md``).

    PenstockError
    ├── DeclarationError          a declaration that cannot work                  (2, usage)
    │   └── InvalidName           a name of a channel, consumer or schema
    ├── InvalidSetting            a setting with an invalid value                 (2)
    ├── Unknown                   a name that does not exist                      (2)
    ├── InvalidIckCall            a score, member or size that an Ick cannot take (2)
    ├── InvalidMessage            a field of a message that a queue cannot take   (2)
    ├── TenantFull                a tenant's bytes in a queue are at their limit  (1)
    ├── StaleLease                the lease of a message has ended                (1)
    ├── StagingError              a record cannot be staged                       (1)
    │   ├── InvalidRecord         a field of the record is not acceptable
    │   ├── BypassedStaging       a statement bypasses the staging rules
    │   └── NotAttached           the session has no pipeline attached
    ├── TryAgain                  raised by a handler: not the record's fault     (1)
    ├── BrokenTransaction         a handler ended or spoiled its transaction      (1)
    │   ├── HandlerCommitted      its effects are committed, its checkpoint is not
    │   └── HandlerNotRun         it returned a coroutine or a generator
    ├── HandlerExited             a handler called sys.exit()                     (1)
    ├── HandlerHung               handlers of a queue's worker do not return      (1)
    ├── Halted                    shards of a consumer are halted                 (1)
    ├── BarrierMissed             a consumer did not stop at a cut                (1)
    ├── SnapshotLost              a snapshot ended before it was read             (1)
    ├── UnreadableValue           a value that Spark's type cannot hold           (1)
    ├── DemoFailed                the demo could not finish                       (1)
    ├── ServerUnavailable         Postgres or Redis cannot be reached or started  (3)
    │   └── AppendRefused         Redis answers, and refuses to write
    ├── JavaMissing               no Java runtime for Spark                       (3)
    ├── SchemaMissing             the database has no Penstock schema, or another (2)
    │   └── TriggerMissing        a declared trigger is missing or another one
    ├── PrivilegeMissing          the role lacks a privilege in Postgres          (2)
    ├── Gap                       records are gone before a consumer passed them  (4)
    └── Refused                   stopped for safety                              (5)
        ├── HistoryDiverged       Postgres lost commits, or is another one
        ├── ForeignLog            the stream holds entries of another program
        ├── DamagedIck            a key of an Ick holds something else, or is missing
        ├── ForeignQueue          a key of a queue holds something else
        ├── QueueDamaged          no stream of a queue can be written
        ├── DamagedJournal        rows of the journal, or records that it names, were deleted
        ├── UnpublishableRecord   Postgres cannot read a record, or Redis does not take it
        ├── ReadOnlyPostgres      a standby or a read-only server
        ├── Fenced                a newer epoch has taken over
        ├── HiddenRows            row-level security hides rows from Penstock
        └── UnsafeSetting         a setting of a server endangers records
"""

from datetime import timedelta
from math import isnan
from typing import ClassVar


class PenstockError(Exception):
    """The root of the tree: ``except PenstockError`` catches whatever Penstock raises on purpose."""

    exit_code: ClassVar[int] = 1
    page: ClassVar[str] = "errors#penstockerror"


class DeclarationError(PenstockError):
    """A pipeline is declared in a way that cannot work; raised by the declaration, not when the pipeline runs."""

    exit_code = 2
    page = "errors#declarationerror"


class InvalidName(DeclarationError):
    """The name of a channel, a consumer or a schema breaks the rule for names."""

    page = "errors#invalidname"


class InvalidSetting(PenstockError):
    """A setting has a value that it cannot take, is unknown, or is missing where it is needed."""

    exit_code = 2
    page = "errors#invalidsetting"


class Unknown(PenstockError):
    """A command names something that does not exist: a consumer, a channel, a dead letter."""

    exit_code = 2
    page = "errors#unknown"


class InvalidIckCall(PenstockError):
    """An operation of an Ick was called with a value that cannot be stored; nothing was written."""

    exit_code = 2
    page = "errors#invalidickcall"


class InvalidMessage(PenstockError):
    """A message, or a limit of a tenant, has a field that a queue cannot take; nothing was written.

    Attributes:
        field: The field.
    """

    exit_code = 2
    page = "errors#invalidmessage"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field} {message}")
        self.field = field


class TenantFull(PenstockError):
    """A tenant has as many bytes in a queue as it may have; its message was not written."""

    page = "errors#tenantfull"


class StaleLease(PenstockError):
    """The lease of a message has ended: another reader may have the message, or it was deleted."""

    page = "errors#stalelease"


class StagingError(PenstockError):
    """A record cannot be staged; the application's transaction should be rolled back."""

    page = "errors#stagingerror"


class InvalidRecord(StagingError):
    """A field of a record is not acceptable.

    Attributes:
        field: Path of the field, such as ``data.lines[3].price``.
    """

    page = "errors#invalidrecord"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class UnstagedChanges(UserWarning):
    """A warning, not an error: changes that a rule seems to cover are not staged, or would not be."""


class BypassedStaging(StagingError):
    """A bulk or Core statement would change a published class without staging its records."""

    page = "errors#bypassedstaging"


class NotAttached(StagingError):
    """Records are staged on a session that the pipeline was not attached to."""

    page = "errors#notattached"


class TryAgain(PenstockError):
    """Raised by a handler: not the record's fault (a service is away). The batch is retried, however long it takes.

    Attributes:
        after: Seconds until the next attempt, or a ``timedelta``; None lets the pauses grow, up to ten seconds.
    """

    page = "errors#tryagain"
    after: float | timedelta | None = None

    def __init__(self, message: str = "", *, after: float | timedelta | None = None) -> None:
        super().__init__(message)
        self.after = after

    @property
    def after_s(self) -> float | None:
        """``after`` in seconds; None if it is missing, or no such number."""
        given = self.after
        if isinstance(given, timedelta):
            return given.total_seconds()
        try:
            return None if given is None or isnan(float(given)) else float(given)
        except (TypeError, ValueError):  # a handler's mistake in asking to wait is no reason to end
            return None


class BrokenTransaction(PenstockError):
    """A handler did to its transaction what only Penstock may: ended it, made it read-only, or hid that it has failed."""

    page = "errors#brokentransaction"


class HandlerCommitted(BrokenTransaction):
    """A handler committed its effects without the checkpoint: another attempt would double them, so its shard halts."""

    page = "errors#handlercommitted"


class HandlerNotRun(BrokenTransaction):
    """A handler returned a coroutine or a generator that nobody runs: it has done nothing, so its shard halts."""

    page = "errors#handlernotrun"


class HandlerExited(PenstockError):
    """A handler raised ``SystemExit`` or ``KeyboardInterrupt``: nothing of the batch is committed, and the worker ends."""

    page = "errors#handlerexited"


class HandlerHung(PenstockError):
    """As many handlers of a worker hang as may run at the same time: others have their jobs, and the process has to end."""

    page = "errors#handlerhung"


class Halted(PenstockError):
    """A consumer could not be drained: some of its shards are halted."""

    page = "errors#halted"


class BarrierMissed(PenstockError):
    """A consumer did not stop at the offsets of a cut; nothing was compared and nothing changed."""

    page = "errors#barriermissed"


class SnapshotLost(PenstockError):
    """The snapshot for reading the tables is gone; nothing was compared and nothing changed."""

    page = "errors#snapshotlost"


class UnreadableValue(PenstockError):
    """A value that Spark's type for its column cannot hold; the error names the column, or the record of a payload."""

    page = "errors#unreadablevalue"


class DemoFailed(PenstockError):
    """The demo could not finish."""

    page = "errors#demofailed"


class ServerUnavailable(PenstockError):
    """Postgres or Redis cannot be reached, or cannot be started."""

    exit_code = 3
    page = "errors#serverunavailable"


class AppendRefused(ServerUnavailable):
    """Redis answers, but refuses to write now (out of memory, read-only, loading): records wait in Postgres."""

    page = "errors#appendrefused"


class JavaMissing(PenstockError):
    """Spark needs a Java runtime, and there is none."""

    exit_code = 3
    page = "errors#javamissing"


class SchemaMissing(PenstockError):
    """The database does not hold the Penstock schema in the version that this release needs."""

    exit_code = 2
    page = "errors#schemamissing"


class TriggerMissing(SchemaMissing):
    """A trigger that a rule declares is missing, disabled, or is not that of its rule: changes would be lost."""

    page = "errors#triggermissing"


class PrivilegeMissing(PenstockError):
    """The role that Penstock connects as lacks a privilege in Postgres."""

    exit_code = 2
    page = "errors#privilegemissing"


class Gap(PenstockError):
    """The log continues beyond a consumer's checkpoint, and the journal no longer has the records between them."""

    exit_code = 4
    page = "errors#gap"


class Refused(PenstockError):
    """Penstock stops rather than risk a loss; an operator has to decide."""

    exit_code = 5
    page = "errors#refused"


class HistoryDiverged(Refused):
    """Redis or a consumer has records that Postgres does not know: Postgres lost commits, or is another server."""

    page = "errors#historydiverged"


class ForeignLog(Refused):
    """The key of a shard holds something that Penstock did not write."""

    page = "errors#foreignlog"


class DamagedIck(Refused):
    """A key of an Ick holds something that is not an Ick's, or has members without a version."""

    page = "errors#damagedick"


class ForeignQueue(Refused):
    """A key of a queue holds something that is not a queue's."""

    page = "errors#foreignqueue"


class QueueDamaged(Refused):
    """No stream of a queue can be written: all their keys hold other types."""

    page = "errors#queuedamaged"


class DamagedJournal(Refused):
    """Rows of a shard's journal, or records that it names, were deleted by something other than Penstock."""

    page = "errors#damagedjournal"


class UnpublishableRecord(Refused):
    """A record that Postgres cannot read back, or that Redis does not take; nothing after it in its shard is published."""

    page = "errors#unpublishablerecord"


class ReadOnlyPostgres(Refused):
    """The streamer was pointed at a standby or a read-only server."""

    page = "errors#readonlypostgres"


class Fenced(Refused):
    """A newer epoch of the log has been opened, or another Spark query has taken a name: this process belongs to an old one."""

    page = "errors#fenced"


class HiddenRows(Refused):
    """A policy of row-level security applies to what Penstock reads; rows that it hides would be lost silently."""

    page = "errors#hiddenrows"


class UnsafeSetting(Refused):
    """A server is set up in a way that can lose records."""

    page = "errors#unsafesetting"
