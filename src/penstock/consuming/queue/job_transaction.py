"""Runs a job's transaction: the handler's effects, and the fact that they have happened.

    first statement  →  finish_records  →  the handler's statements  →  the lease is still ours  →
                     COMMIT

It begins with the handler's first statement, so that a handler which computes, or waits for a
service, holds no transaction open meanwhile.  A handler without a statement has one that only
finishes the record.

Several short jobs may be done in one transaction, which finishes all of them or none, at its end:

    BEGIN  →  the statements of each handler  →  the leases are still ours  →  finish_records,
           COMMIT
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from math import inf
from time import monotonic
from typing import Any, ClassVar, NoReturn

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection as EngineConnection
from sqlalchemy import RootTransaction, event
from typing_extensions import override

from penstock.consuming.delivery import AskedToWait
from penstock.consuming.failures import NotApplied, Repeated, find_outcome
from penstock.consuming.handler import WorkerSetup
from penstock.consuming.transaction import HandlerTransaction, commit
from penstock.crash_points import crashpoint
from penstock.database.executor import CommittingExecutor
from penstock.database.statements import int_array
from penstock.database.store import Store
from penstock.declaring.kinds import LARGEST_MAX_BYTES
from penstock.declaring.outcomes import HandlerOutcome, Job, Snooze, find_ready_us
from penstock.errors import BrokenTransaction, InvalidRecord, ServerReplaced
from penstock.journal.lineage import check_same_server
from penstock.records import RecordId, forget_parsed
from penstock.staging.payload import as_plain, json_text

MAX_RESULT_BYTES = 64 * 1024
"""Largest result of a job, in bytes of JSON."""


class Ending(Enum):
    """End of a job's transaction."""

    APPLIED = auto()
    REPEATED = auto()
    """The effect had happened before; nothing was done."""
    STALE = auto()
    """The lease has ended, and another worker may have the job; nothing was done."""


class JobTransaction(HandlerTransaction):
    """Transactions of one slot of a worker, one after the other."""

    after_commit: ClassVar[str] = (
        "the handler committed its transaction, and failed afterwards: what it wrote until then is "
        "in the database, the job counts as done, and will not be done again. Take the COMMIT out "
        "of the handler, check the rest of this job, then: penstock reset checkpoint {consumer} "
        "--resume --apply"
    )

    def __init__(self, setup: WorkerSetup, *, server_start_us: int | None = None) -> None:
        """Sets up; see ``HandlerTransaction``."""
        super().__init__(setup, server_start_us=server_start_us, in_task=setup.consumer.is_async)
        self._job: Job[Any] | None = None
        self._executing: Store[CommittingExecutor] | None = None
        self._error: Exception | None = None
        self._is_repeated = self._is_together = False
        # Postgres' time after the answer to the last COMMIT, in microseconds since 1970
        self._committed_at_us = 0
        self._clock_us = 0  # its time when the transaction had its first statement
        # of jobs that were not applied together: the index of the one at fault, if it is known
        self.culprit: int | None = None
        # True if the handler of the culprit had ended the transaction, and had begun no other
        self.is_ended_by_culprit = False
        self._caller.after_item = self._check_not_ended
        event.listen(self._caller.engine, "before_cursor_execute", self._before_statement)

    def apply_job(self, job: Job[Any], is_ours: Callable[[], bool]) -> Ending | HandlerOutcome:
        """Attempts a job; ``is_ours`` is asked right before COMMIT whether the lease is still ours.

        Returns the end, or the handler's outcome; unless it is ``APPLIED``, nothing was written.
        """
        return self._caller.enter(lambda: self._transact(job, is_ours, self._handle))

    def finish(self, job: Job[Any], is_ours: Callable[[], bool]) -> Ending | HandlerOutcome:
        """Finishes a job without an effect."""
        forget_parsed(job)  # a result that the handler has set
        return self._caller.enter(lambda: self._transact(job, is_ours, None))

    def apply_together(self, jobs: Sequence[Job[Any]], find_lost: Callable[[], int | None]) -> bool:
        """Attempts several jobs in one transaction; false if one is lost, finished or cancelled.

        ``find_lost`` is asked after the handlers for the index of one that must not be committed.
        None is finished before: a handler that commits by itself would lose the jobs after its own.
        If it returns false, or raises ``NotApplied``, nothing was written, and ``culprit`` is set,
        if it is known.
        """
        return self._caller.enter(lambda: self._transact_together(jobs, find_lost))

    def latency_us(self, job: Job[Any]) -> int:
        """Returns the time until the last COMMIT since a job was staged, or was due if later."""
        return max(0, self._committed_at_us - find_ready_us(job.staged_us, job.headers_json))

    def _note_committed(self, clock_us: int, clock_at: float) -> None:
        """Notes that the answer to COMMIT is there; Postgres' time was read at ``clock_at``."""
        self._committed_at_us = clock_us + int((monotonic() - clock_at) * 1e6)

    def _transact_together(
        self, jobs: Sequence[Job[Any]], find_lost: Callable[[], int | None]
    ) -> bool:
        self.culprit, self.is_ended_by_culprit = None, False
        with self._connected() as connection:
            transaction = connection.begin()  # nothing is sent before the first statement
            self._caller.aborts.last = None
            store = self._store(connection)
            self._begin_together(store)
            self._is_together = True
            try:
                self._call(connection, jobs)
            finally:
                self._is_together = False
            crashpoint("jobs.after_apply")
            self._write_results(store, jobs)
            self.culprit = find_lost()
            crashpoint("jobs.before_commit")
            if self.culprit is not None or not self._finish_together(store, jobs):
                self._end(keep=True)
                return False
            commit(transaction)  # of SQLAlchemy's: nothing is sent
        crashpoint("jobs.after_commit")
        return True

    def _begin_together(self, store: Store[CommittingExecutor]) -> None:
        self._xid = ""
        try:
            *_, xid, started_us, clock_us = store.connection.begin_with(store["begin_jobs"], {})
        except Exception as error:
            raise NotApplied(find_outcome(error), error) from error
        check_same_server(int(started_us), self._server_start_us)
        self._xid, self._called_at, self._clock_us = xid, monotonic(), int(clock_us)

    def _write_results(self, store: Store[CommittingExecutor], jobs: Sequence[Job[Any]]) -> None:
        for index, job in enumerate(jobs):
            try:
                self._write_result(store, job)
            except Exception as error:
                self.culprit = index
                cause = self._explained(error)
                raise NotApplied(find_outcome(cause), cause) from error

    def _finish_together(self, store: Store[CommittingExecutor], jobs: Sequence[Job[Any]]) -> bool:
        """Finishes the jobs and commits; false if one was finished or cancelled meanwhile."""
        values: dict[str, str | int] = {
            "transaction": self._xid,
            "channel": self._consumer.channel.name,
            "ids": int_array(job.id for job in jobs),
            "staged": int_array(job.staged_us for job in jobs),
            "count": len(jobs),
        }
        try:
            store.connection.commit_with(store["finish_together"], values)
        except Exception as error:
            if _is_refused(error):
                if (committed := self._committed_by_handler()) is None:
                    return False
                raise NotApplied(find_outcome(committed), committed) from error
            cause = self._explained(error)
            raise NotApplied(find_outcome(cause), cause, at_commit=cause is error) from error
        self._note_committed(self._clock_us, self._called_at)
        return True

    def _check_not_ended(self) -> None:
        """Raises if the last called handler has ended the transaction of several jobs."""
        if self._is_together and self._is_idle():
            raise self._ended_by_handler()

    def _is_idle(self) -> bool:
        """Returns whether no transaction is open."""
        connection = self._connection
        if connection is None or connection.closed or connection.invalidated:
            return False
        driver: Any = connection.connection.driver_connection
        return bool(driver.pgconn.transaction_status == TransactionStatus.IDLE)

    def finish_all(
        self, jobs: Sequence[Job[Any]], results: Mapping[RecordId, str]
    ) -> set[RecordId]:
        """Finishes jobs whose handlers took no session, with their results, in one transaction.

        Returns those that had not been finished or cancelled before.  Another server than that
        whose history was compared may answer: nothing there depends on it, since a record is known
        by its id and its time of staging.
        """
        values: dict[str, Any] = {
            "channel": self._consumer.channel.name,
            "ids": int_array(job.id for job in jobs),
            "staged": int_array(job.staged_us for job in jobs),
        }
        if results:
            values |= {"with_results": int_array(results), "results": [*results.values()]}
        with self._connected() as connection:
            crashpoint("jobs.before_commit")
            sent_at = monotonic()
            try:
                store = self._store(connection)
                statement = store["finish_jobs_with_results" if results else "finish_jobs"]
                finished = store.connection.execute_alone(statement, values).fetchall()
            except Exception as error:
                raise NotApplied(find_outcome(error), error, at_commit=True) from error
        if finished:
            self._note_committed(finished[0][1], sent_at)
        crashpoint("jobs.after_commit")
        return {RecordId(number) for number, _ in finished}

    def _transact(
        self,
        job: Job[Any],
        is_ours: Callable[[], bool],
        handle: Callable[[EngineConnection], None] | None,
    ) -> Ending | HandlerOutcome:
        with self._connected() as connection:
            transaction = connection.begin()  # nothing is sent before the first statement
            self._begin(connection, job)
            try:
                if handle is not None:
                    handle(connection)
                self._check_effect(is_none=handle is None)
                if not is_ours():
                    self._end(keep=True)
                    return Ending.STALE
                crashpoint("jobs.before_commit")
                self._commit(transaction)
            except HandlerOutcome as outcome:
                self._end(keep=True)
                if isinstance(outcome, Snooze) and outcome.after_s is None:
                    raise NotApplied(AskedToWait(), outcome) from outcome
                return outcome
            except Repeated:
                self._end(keep=True)
                return Ending.REPEATED
            finally:
                self._job = self._executing = None
        crashpoint("jobs.after_commit")
        return Ending.APPLIED

    def _begin(self, connection: EngineConnection, job: Job[Any]) -> None:
        self._caller.aborts.last = None
        self._executing = self._store(connection)
        self._job, self._xid, self._called_at = job, "", inf
        self._error, self._is_repeated = None, False

    def _handle(self, connection: EngineConnection) -> None:
        self._call(connection, [self._job])
        crashpoint("jobs.after_apply")

    def _before_statement(self, *_: Any) -> None:
        """Finishes the record before the handler's first statement.

        One job of several must not begin another transaction.
        """
        self._check_not_ended()
        if self._job is not None and self._executing is not None and not self._xid:
            self._finish(self._executing, self._job)

    def _finish(self, store: Store[CommittingExecutor], job: Job[Any]) -> None:
        """Finishes the record, unless it was finished before or another Postgres answers."""
        if self._is_repeated:
            raise Repeated
        try:
            *_, xid, finished, started_us, clock_us = store.connection.begin_with(
                store["finish_record"],
                {"channel": job.channel, "id": job.id, "staged_us": job.staged_us},
            )
            check_same_server(int(started_us), self._server_start_us)
        except Exception as error:
            self._error = self._error or error  # even if the handler hides it
            raise
        if finished == "0":
            self._is_repeated = True
            raise Repeated
        self._xid, self._called_at, self._clock_us = xid, monotonic(), int(clock_us)

    def _check_effect(self, *, is_none: bool) -> None:
        """Finishes the record, if the handler had no statement, and writes the rest of its end."""
        assert self._job is not None
        assert self._executing is not None
        store = self._executing
        self._raise_if_not_ours()
        try:
            if not self._xid:
                self._finish(store, self._job)
            self._write_result(store, self._job)
            if is_none:
                job = self._job
                store.execute(
                    "note_no_effect", {"id": job.id, "channel": job.channel, "shard": job.shard}
                )
        except (Repeated, ServerReplaced):
            raise
        except Exception as error:
            cause = self._explained(error)
            raise NotApplied(find_outcome(cause), cause) from error

    @staticmethod
    def _write_result(store: Store[CommittingExecutor], job: Job[Any]) -> None:
        if job.result is not None:
            values = {"id": job.id, "channel": job.channel, "result": encode_result(job.result)}
            store.execute("write_result", values)

    def _commit(self, transaction: RootTransaction) -> None:
        """Commits, if this still is the transaction in which the record was finished.

        Then the handler has not ended it.
        """
        assert self._executing is not None
        store = self._executing
        try:
            store.connection.commit_with(store["check_transaction"], {"transaction": self._xid})
        except Exception as error:
            cause = self._explained(self._ended_by_handler() if _is_refused(error) else error)
            raise NotApplied(find_outcome(cause), cause, at_commit=cause is error) from error
        self._note_committed(self._clock_us, self._called_at)
        commit(transaction)  # of SQLAlchemy's: nothing is sent

    def _ended_by_handler(self) -> BrokenTransaction:
        return BrokenTransaction(
            f"consumer {self._consumer.name}: the handler ended its transaction. A handler must "
            "not commit or roll back its session: return to commit, raise to roll back"
        )

    def _raise_if_not_ours(self) -> None:
        """Raises the error of the first statement, if the handler has hidden it."""
        if self._is_repeated:
            raise Repeated
        if isinstance(self._error, ServerReplaced):
            raise self._error
        if self._error is not None:
            raise NotApplied(find_outcome(self._error), self._error) from self._error

    @override
    def _raise_failure(self, index: int | None, error: BaseException) -> NoReturn:
        if self._is_together:
            self.culprit, self.is_ended_by_culprit = index, index is not None and self._is_idle()
            super()._raise_failure(index, error)
        self._raise_if_not_ours()
        if isinstance(error, HandlerOutcome | Repeated):
            raise error
        super()._raise_failure(index, error)


def _is_refused(error: Exception) -> bool:
    """Returns whether the last statement has refused to commit, by a division by zero."""
    # One of a trigger of the application's, which was deferred to the end, has a context.
    return isinstance(error, psycopg.errors.DivisionByZero) and not error.diag.context


def encode_result(value: object) -> str:
    """Returns a result as JSON.  Raises ``InvalidRecord``."""
    text = json_text(as_plain(value, "result"), "result", LARGEST_MAX_BYTES)
    if (size := len(text.encode())) > MAX_RESULT_BYTES:
        raise InvalidRecord(
            "result",
            f"{size} bytes of JSON; the limit is {MAX_RESULT_BYTES}. Keep it elsewhere, and set a "
            "reference",
        )
    return text
