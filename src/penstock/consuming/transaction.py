"""Runs the handler's transaction.

No other code locks checkpoints, calls a handler, advances and commits.

    BEGIN  →  lock the checkpoints' rows  →  plan  →  handler(session, items)  →  settle  →  advance
           →  COMMIT

The plan says which items are due, and what is written with them: records of a log, members of an
Ick, a DataFrame, or a dead letter that is retried.  Effects and checkpoints are one transaction, so
delivery may be repeated, by anyone, and the effect happens once.

A failure between BEGIN and the answer to COMMIT is raised as ``NotApplied``, with its meaning for
the items.  A server that cannot be reached, or cannot even lock, is ``ServerUnavailable``: nothing
was tried.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

import structlog
from sqlalchemy import Connection as EngineConnection
from sqlalchemy import RootTransaction

from penstock.consuming.checkpoints import Advance, Checkpoint, Checkpoints
from penstock.consuming.delivery import COUNTED, Conflict, Counts
from penstock.consuming.failures import Culprit, NotApplied, error_class, find_outcome, is_exit
from penstock.consuming.handler import WorkerSetup, exit_text, make_caller
from penstock.consuming.spans import NotedTrace, note_trace
from penstock.crash_points import crashpoint
from penstock.database import driver_errors
from penstock.database.connections import silent_for
from penstock.database.driver_errors import (
    CONFLICTS,
    ErrorKind,
    classify,
    driver_error,
    postgres_errors,
    sqlstate,
)
from penstock.database.executor import CommittingExecutor, Executor, make_executor
from penstock.database.store import Store
from penstock.errors import BrokenTransaction, HandlerCommitted, HandlerExited
from penstock.journal.lineage import check_same_server
from penstock.observer import Delivery, HandlerBegan, HandlerEnded
from penstock.records import Offset, ShardName

log = structlog.get_logger("penstock.consumer")

Result = TypeVar("Result")

AFTER_COMMIT = "penstock_after_commit"
"""Key in the ``info`` of a connection: functions that are called when its transaction is committed,
and do not raise."""

Locked = Mapping[ShardName, Checkpoint]
"""The checkpoints that this transaction holds; those that another process works on are missing."""


def _nothing(_: Store[Executor]) -> None: ...


@dataclass(frozen=True, slots=True)
class TransactionPlan(Generic[Result]):
    """The work of one transaction."""

    result: Result  # returned by ``apply`` if it is committed
    items: Any = None  # argument of the handler; None if it is not to be called
    advances: Sequence[Advance] = ()  # moves of the locked checkpoints
    settle: Callable[[Store[Executor]], None] = _nothing  # writes the rest, after the handler


Planner = Callable[[Store[Executor], Locked], TransactionPlan[Result]]
"""Makes the plan of a transaction from the checkpoints that it has locked."""


class HandlerTransaction:
    """Transactions of one consumer, one after the other, on a connection that is kept."""

    after_commit: ClassVar[str] = (
        "the handler committed the transaction that carries the checkpoint: its effects are in the "
        "database, and would be doubled by another attempt. Take the COMMIT out of the handler, "
        "and check the effects of this batch"
    )
    """Text about a handler that has committed; the caller adds the command that goes on behind its
    records."""

    def __init__(
        self, setup: WorkerSetup, *, server_start_us: int | None = None, in_task: bool = False
    ) -> None:
        """Sets up; the first transaction connects.

        On another server than that of ``server_start_us``, whose history was compared with the log,
        nothing is applied.  ``in_task``: its methods are called in the greenlet of a task, of the
        event loop that an ``async def`` handler runs in.
        """
        consumer = setup.consumer
        self.observers = setup.pipeline.observers
        self._consumer, self._timeouts, self._scope = consumer, setup.timeouts, setup.scope
        self._names = consumer.name, consumer.channel.name
        self._server_start_us = server_start_us
        self._checkpoints = Checkpoints(consumer)
        self._caller = make_caller(setup, in_task=in_task)
        self._engine = self._caller.engine.execution_options(isolation_level=consumer.isolation)
        self._connection: EngineConnection | None = None
        self._called_at = self._locked_at = 0.0
        self.committed_us = 0  # from the last transaction's locks to the answer to its COMMIT
        self._trace: str | None = None
        self._xid = ""
        self._reached: dict[ShardName, Offset] = {}

    def apply(
        self, shards: Collection[ShardName], plan: Planner[Result], *, name: str = "consumer"
    ) -> Result:
        """Runs a transaction with the checkpoints of ``shards``; its crash points have ``name``."""
        return self._caller.enter(lambda: self._apply(shards, plan, name))

    def write(
        self, shard: ShardName, function: Callable[[Store[Executor], Checkpoint], None]
    ) -> bool:
        """Writes beside a shard's locked checkpoint; false if another process holds it."""

        def plan(store: Store[Executor], locked: Locked) -> TransactionPlan[bool]:
            for checkpoint in locked.values():
                function(store, checkpoint)
            return TransactionPlan(shard in locked)

        return self.apply([shard], plan)

    def read(self, function: Callable[[Store[Executor]], Result]) -> Result:
        """Runs statements that change nothing, on the same connection."""

        def reading() -> Result:
            with postgres_errors(f"reading for {self._consumer.name}"), self._connected() as open_:
                transaction = open_.begin()
                result = function(self._store(open_))
                transaction.rollback()
            return result

        return self._caller.enter(reading)

    def report(self, counts: Counts) -> None:
        """Has the observers see what became of records, members or jobs."""
        if self.observers:
            numbers = {name: count for name in COUNTED if (count := getattr(counts, name))}
            if numbers:
                self.observers(Delivery(*self._names, numbers, counts.latencies_us, self._trace))

    def close(self) -> None:
        """Closes the connection; what is under way is rolled back."""
        self._caller.enter(self._give_back)
        self._caller.close()

    def _apply(self, shards: Collection[ShardName], plan: Planner[Result], name: str) -> Result:
        with self._connected() as connection:
            self._caller.aborts.last = None
            transaction = connection.begin()
            store = self._store(connection)
            planned = self._plan(store, shards, plan)
            self._reached = {advance.locked.shard: advance.to for advance in planned.advances}
            self._called_at = monotonic()
            if planned.items is not None:
                self._call(connection, planned.items)
                crashpoint(f"{name}.after_apply")
            self._settle(store, planned)
            crashpoint(f"{name}.before_commit")
            if planned.advances:
                self._advance(store, planned.advances)
            commit(transaction)  # of SQLAlchemy's: nothing is sent if Postgres has committed
            self.committed_us = int((monotonic() - self._locked_at) * 1e6)
        crashpoint(f"{name}.after_commit")
        return planned.result

    def _plan(
        self, store: Store[Executor], shards: Collection[ShardName], plan: Planner[Result]
    ) -> TransactionPlan[Result]:
        """Locks and plans; remembers the id of the transaction that has the locks."""
        try:
            with postgres_errors(f"locking checkpoints of {self._consumer.name}"):
                locked = self._checkpoints.lock(store, shards)
                self._locked_at = monotonic()
                self._xid = ""
                for checkpoint in locked.values():
                    check_same_server(checkpoint.server_start_us, self._server_start_us)
                    self._xid = checkpoint.transaction
                return plan(store, locked)
        except CONFLICTS as error:
            raise NotApplied(Conflict(), error) from error

    def _call(self, connection: EngineConnection, items: Any) -> None:
        size = len(items) if isinstance(items, Sized) else 0  # a DataFrame has none
        if self.observers:
            self.observers(HandlerBegan(*self._names, size))
        begun_at, trace = monotonic(), note_trace()
        try:
            with self._handler_silence(connection):
                self._caller.call(connection, items)
        except BaseException as raised:  # noqa: BLE001  told apart, and raised again as one of ours
            index, error = None, raised
            if isinstance(raised, Culprit):
                index, error = raised.index, raised.__cause__ or raised
            self._note_called(size, begun_at, trace, error)
            self._raise_failure(index, error)
        self._note_called(size, begun_at, trace)

    @staticmethod
    def _handler_silence(connection: EngineConnection) -> AbstractContextManager[None]:
        driver: Any = connection.connection.driver_connection
        return silent_for(driver, driver.handler_silence_s)

    def _note_called(
        self, size: int, begun_at: float, trace: NotedTrace, error: BaseException | None = None
    ) -> None:
        if error is None:
            self._trace = trace.id
        if self.observers:
            seconds = monotonic() - begun_at
            self.observers(HandlerEnded(*self._names, size, seconds, error_class(error), trace.id))

    def _raise_failure(self, index: int | None, error: BaseException) -> NoReturn:
        """Raises the meaning of an error of the handler."""
        committed = self._committed_by_handler()
        if committed is None and is_exit(error):
            raise HandlerExited(exit_text(self._consumer, error)) from error
        if self._was_idle(error):
            error = self._too_slow(error)
        # Its checkpoint's row could be locked before.  Another server that the handler writes to
        # may be read-only for a while.
        elif (
            sqlstate(error) == driver_errors.READ_ONLY
            and driver_error(error) is self._caller.aborts.last
        ):
            error = self._made_read_only(error)
        error = committed or error
        raise NotApplied(find_outcome(error, index), error, reached=self._reached) from error

    def _settle(self, store: Store[Executor], planned: TransactionPlan[Result]) -> None:
        """Writes the rest of the plan."""
        try:
            planned.settle(store)
        except Exception as error:
            cause = self._explained(error)
            raise NotApplied(find_outcome(cause), cause, reached=self._reached) from error

    def _advance(self, store: Store[CommittingExecutor], advances: Sequence[Advance]) -> None:
        """Moves the checkpoints, and commits, if the transaction is the one that locked them."""
        try:
            self._checkpoints.advance_and_commit(store, advances)
        except Exception as error:
            cause = self._explained(error)
            at_commit = not isinstance(cause, BrokenTransaction | HandlerCommitted)
            raise NotApplied(
                find_outcome(cause), cause, at_commit=at_commit, reached=self._reached
            ) from error

    def _explained(self, error: Exception) -> Exception:
        """Returns the error, or the handler's own fault that is behind it."""
        consumer = f"consumer {self._consumer.name}"
        match sqlstate(error):
            case driver_errors.IN_FAILED_TRANSACTION:
                text = (
                    f"{consumer}: the handler caught a database error and continued, but Postgres "
                    "had aborted the transaction. Let the error propagate, or put statements that "
                    "may fail into `with session.begin_nested():`, or Django's "
                    "`transaction.atomic()` for its ORM"
                )
                hidden = BrokenTransaction(text)
                hidden.__cause__ = self._caller.aborts.last
                return hidden
            case driver_errors.READ_ONLY:
                return self._made_read_only(error)
            case _ if self._was_idle(error):
                return self._too_slow(error)
            case _ if isinstance(error, BrokenTransaction):
                return self._committed_by_handler() or error
            case _:
                return error

    def _was_idle(self, error: BaseException) -> bool:
        """Returns whether the handler sent no statement for so long that Postgres gave it up.

        Statements that are sent together find the connection closed, and get no code.
        """
        return (
            monotonic() - self._called_at >= self._consumer.idle_timeout
            and sqlstate(error) in {driver_errors.IDLE_IN_TRANSACTION, None}
            and classify(error) is ErrorKind.UNAVAILABLE
        )

    def _too_slow(self, error: BaseException) -> BrokenTransaction:
        slow = BrokenTransaction(
            f"consumer {self._consumer.name}: the handler went {self._consumer.idle_timeout:g} s "
            "without a statement on its session, and Postgres ended its transaction. Use a "
            "smaller batch, or a longer idle_timeout"
        )
        slow.__context__ = error
        return slow

    def _made_read_only(self, error: BaseException) -> BrokenTransaction:
        broken = BrokenTransaction(
            f"consumer {self._consumer.name}: the handler made its transaction read-only, so the "
            "checkpoint cannot be moved"
        )
        broken.__context__ = error
        return broken

    def _committed_by_handler(self) -> Exception | None:
        """Returns the error of a handler that committed before it failed; None if it did not."""
        assert self._connection is not None
        with suppress(Exception):  # the connection may be gone: the next attempt will see
            self._connection.rollback()
            with self._connection.begin():
                return self._find_commit(self._store(self._connection))
        return None

    def _find_commit(self, store: Store[Executor]) -> HandlerCommitted | None:
        """Returns the error if the transaction was committed: effects without their checkpoint."""
        if not self._xid:
            return None
        row = store.connection.execute(
            b"SELECT pg_xact_status(%(transaction)s::xid8)", {"transaction": self._xid}
        ).fetchone()
        if row is None or row[0] != "committed":
            return None
        name = self._consumer.name
        return HandlerCommitted(f"consumer {name}: {self.after_commit.format(consumer=name)}")

    def _store(self, connection: EngineConnection) -> Store[CommittingExecutor]:
        """Returns a store that executes statements of ours between those of the handler."""
        return Store(
            make_executor(connection, self._consumer.idle_timeout, self._timeouts), self._scope
        )

    @contextmanager
    def _connected(self) -> Iterator[EngineConnection]:
        """Yields the connection, kept from one transaction to the next.

        After a failure it is a new one, without a handler's settings.
        """
        if self._connection is None:
            with postgres_errors(f"connecting for {self._consumer.name}"):
                self._connection = self._engine.connect()
        try:
            yield self._connection
        except NotApplied as failed:
            self._end(keep=isinstance(failed.outcome, Conflict))
            raise
        except BaseException:
            self._end(keep=False)
            raise

    def _end(self, *, keep: bool) -> None:
        """Rolls back."""
        assert self._connection is not None
        try:
            if keep:
                self._connection.info.pop(AFTER_COMMIT, None)
                self._connection.rollback()
                self._store(self._connection).connection.release_locks()
                return
            with suppress(Exception):
                # the locks of a connection that is only closed last until Postgres notices
                self._connection.rollback()
            self._connection.invalidate()
        except Exception:  # noqa: BLE001  the connection is gone, and so is what was done on it
            log.debug("connection lost", consumer=self._consumer.name)
        self._give_back()
        # One that the handler has closed is in the pool already, with a transaction open.
        self._engine.dispose()

    def _give_back(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def commit(transaction: RootTransaction) -> None:
    """Commits.

    Raises ``NotApplied`` if it was refused, or the connection was cut; then it may be committed.
    """
    try:
        transaction.commit()
    except Exception as error:
        raise NotApplied(find_outcome(error), error, at_commit=True) from error
    for function in transaction.connection.info.pop(AFTER_COMMIT, ()):
        function()
