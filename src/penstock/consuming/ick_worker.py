"""Runs the worker of a consumer that reads an Ick.

    reserve at the Ick  →  lock the checkpoint's row  →  handler(session, members)  →  commit  →
                        exchange at the Ick

A visit to a shard is one reservation after the other: each exchange commits the members that are
done and reserves the next.  The end of a visit releases the reservation, so that other processes
may work on the shard.  A process that dies during a visit leaves a reservation behind; another
process takes it over once its heartbeat is ``TAKEOVER_AFTER_S`` old and no transaction in Postgres
holds the shard.

The handler reads the tables as they are when it runs, so handling a member twice is harmless, and
that is what a crash between the two commits leads to.  No member is forgotten: it leaves the Ick
only under the reservation that gave it out, and what has made it dirty again in the meantime stays.
"""

import os
import random
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

import structlog
from typing_extensions import override

from penstock.channels.ick.marking import update_progress
from penstock.channels.ick.reservations import (
    Busy,
    HolderWatch,
    Reservation,
    Reservations,
    Superseded,
)
from penstock.channels.isolation import leaving_out
from penstock.channels.routing import ick_shard_keys
from penstock.channels.server import redis_errors
from penstock.consuming.checkpoints import Advance, Checkpoints
from penstock.consuming.dead_lettering import DeadLetters, break_circuit
from penstock.consuming.deliverer import Deliverer
from penstock.consuming.delivery import Consumed, Delivered, Failed
from penstock.consuming.failures import NotApplied
from penstock.consuming.handler import WorkerSetup
from penstock.consuming.transaction import Locked, Planner, TransactionPlan
from penstock.consuming.worker import Worker
from penstock.crash_points import crashpoint, is_repeated
from penstock.database.executor import Executor
from penstock.database.store import Store
from penstock.declaring.declarations import ConsumerSpec
from penstock.errors import ServerUnavailable
from penstock.parsing import InvalidPayload
from penstock.records import Offset, ShardName

MICROSECONDS = 1_000_000
MAX_SCORE_S = 2**40
"""Scores beyond it are no times in seconds."""


@dataclass(frozen=True, slots=True)
class ReservedMember:
    """A member that is reserved.

    Its score is since when it is dirty, in seconds since 1970, if the pipeline has marked it.
    """

    member: bytes
    score: float

    @property
    def text(self) -> str:
        """Returns the member for the handler; bytes that are not UTF-8 are shown as numbers."""
        return self.member.decode(errors="backslashreplace").replace("\x00", "\\x00")

    @property
    def is_text(self) -> bool:
        """Returns whether UTF-8 and Postgres can hold the member."""
        return self.text.encode() == self.member

    @property
    def since_us(self) -> int:
        """Returns since when it is dirty, in microseconds since 1970.

        0 if its score is no such time.
        """
        return int(self.score * MICROSECONDS) if 0 <= self.score < MAX_SCORE_S else 0


class IckMembers:
    """Members of an Ick: all that are given, in any order.

    The checkpoint's row is locked, and does not move.
    """

    name = "members"

    def __init__(self, consumer: ConsumerSpec) -> None:
        self._consumer = consumer
        self._checkpoints, self._dead_letters = Checkpoints(consumer), DeadLetters(consumer)

    def plan(self, shard: ShardName, members: Sequence[ReservedMember]) -> Planner[Delivered]:
        """Applies all of them."""

        def planner(_: Store[Executor], locked: Locked) -> TransactionPlan[Delivered]:
            checkpoint = locked.get(shard)
            if checkpoint is None:
                return TransactionPlan(Delivered())
            if checkpoint.is_stopped:
                return TransactionPlan(
                    Delivered(halted=checkpoint.halted, is_paused=checkpoint.is_paused)
                )
            _refuse_bytes(members)
            texts = [member.text for member in members]
            return TransactionPlan(
                Delivered(
                    position=checkpoint.offset,
                    applied=len(members),
                    members=[member.member for member in members],
                    staged_us=[member.since_us for member in members if member.since_us],
                    clock_us=checkpoint.clock_us,
                ),
                [*texts],  # the handler's own: it may take members from it
                [Advance(checkpoint, checkpoint.offset, applied=len(members))],
                settle=lambda store: self._dead_letters.forget_members(store, shard, texts),
            )

        return planner

    def plan_dead_letter(
        self, shard: ShardName, member: ReservedMember, reason: str, attempts: int
    ) -> Planner[Delivered]:
        """Dead-letters a member, which need not come again."""

        def planner(store: Store[Executor], locked: Locked) -> TransactionPlan[Delivered]:
            checkpoint = locked.get(shard)
            if checkpoint is None or checkpoint.is_stopped:
                return TransactionPlan(Delivered())  # it stays dirty
            self._dead_letters.write_member(
                store,
                shard,
                member.text,
                since_us=member.since_us,
                reason=reason,
                attempts=attempts,
            )
            last = f"the last is {self.describe(shard, member)}: {reason}"
            halted = break_circuit(self._consumer, self._checkpoints, store, shard, last)
            return TransactionPlan(
                Delivered(
                    position=checkpoint.offset, dead=1, members=[member.member], halted=halted
                ),
                advances=[Advance(checkpoint, checkpoint.offset, dead=1)],
            )

        return planner

    def plan_pass(self, shard: ShardName, member: ReservedMember) -> Planner[Delivered]:
        """Passes a member, whose dead letter goes as well."""

        def planner(_store: Store[Executor], locked: Locked) -> TransactionPlan[Delivered]:
            checkpoint = locked.get(shard)
            if checkpoint is None or checkpoint.is_stopped:
                return TransactionPlan(Delivered())
            return TransactionPlan(
                Delivered(position=checkpoint.offset, cancelled=1, members=[member.member]),
                settle=lambda store: self._dead_letters.forget_members(store, shard, [member.text]),
            )

        return planner

    def identify(self, member: ReservedMember) -> object:
        """Identifies it by its bytes."""
        return member.member

    def skip_command(self, _shard: ShardName, _last: Offset) -> str:
        """Returns the command that passes nothing: to process members again does no harm."""
        return f"penstock reset checkpoint {self._consumer.name} --resume --apply"

    def renew(self, members: Sequence[ReservedMember]) -> None:
        """Does nothing: a handler gets texts."""

    def describe(self, shard: ShardName, member: ReservedMember) -> str:
        """Shows the member, which is a key."""
        return f"{shard} member {member.text!r}"

    def name_in_log(self, shard: ShardName, _: ReservedMember) -> str:
        """Names its shard alone."""
        return f"a member of {shard}"


def plan_progress(shard: ShardName, done_up_to: Offset) -> Planner[None]:
    """Moves the checkpoint: everything up to ``done_up_to`` is done.

    It never goes back.
    """

    def planner(_: Store[Executor], locked: Locked) -> TransactionPlan[None]:
        checkpoint = locked.get(shard)
        if checkpoint is None or checkpoint.offset >= done_up_to:
            return TransactionPlan(None)
        return TransactionPlan(None, advances=[Advance(checkpoint, done_up_to)])

    return planner


def _refuse_bytes(members: Sequence[ReservedMember]) -> None:
    """Raises for a member that is not text: it fails by itself, before a handler sees it."""
    for index, member in enumerate(members):
        if not member.is_text:
            error = InvalidPayload("the member is not text that UTF-8 and Postgres can hold")
            raise NotApplied(Failed(index, for_certain=True), error)


log = structlog.get_logger("penstock.consumer")

MAX_VISIT_S = 0.5
"""Limit of a visit to a shard, in seconds; then the others are visited."""

TAKEOVER_AFTER_S = 1.0
"""Age of another process's heartbeat, in seconds, from which its reservation is stale."""

BUSY_PAUSE_S = 0.1
"""Pause, in seconds, before another attempt at a shard that another process works on."""

IDLE_PAUSE_S = 0.02
"""Pause, in seconds, between two inspections of empty Icks."""

PROGRESS_EVERY_S = 1.0
"""Interval, in seconds, at which the checkpoints follow what is done."""

HEARTBEAT_S = 0.3
"""Interval, in seconds, of the heartbeat while a handler is retried."""


class IckWorker(Worker):
    """Runs one consumer of an Ick over some or all of its shards, in one thread."""

    def __init__(self, setup: WorkerSetup) -> None:
        """Sets up; ``open`` connects."""
        super().__init__(setup)
        consumer = setup.consumer
        members = IckMembers(consumer)
        self._deliverer = Deliverer(consumer, members, members)
        self._holder = f"{consumer.name}@{socket.gethostname()}:{os.getpid()}"
        self._identities: dict[ShardName, str] = {}
        self._icks: dict[ShardName, Reservations] = {}
        self._holder_watch: dict[ShardName, HolderWatch] = {}
        self._halted: set[ShardName] = set()
        self._done_up_to: dict[ShardName, Offset] = {}
        self._progress_at = 0.0

    @override
    def open(self) -> None:
        super().open()
        for shard in self._shards:
            key = ick_shard_keys(self._scope.namespace, shard).name
            ick = Reservations(self._client, key, holder=self._holder, size=self.consumer.batch)
            self._icks[shard] = ick
            # After a connection that failed, what we hold is still ours.
            ick.holder = self._identities.setdefault(shard, ick.holder)
            # Kept: a process that seldom takes a slice would see no reservation for long enough.
            self._holder_watch.setdefault(shard, HolderWatch(TAKEOVER_AFTER_S))
        self._halted, self._done_up_to, self._progress_at = set(), {}, 0.0

    @override
    def _round(self, block_ms: int | None) -> Consumed:
        """Waits for members, ``block_ms`` at the longest, and visits each shard that has some."""
        self._opened()
        consumed = Consumed()
        block_s = (self._setup.block_ms if block_ms is None else block_ms) / 1000
        if self._waits_for_resume(block_s):
            return consumed
        end = monotonic() + block_s
        while not self._stop():
            waiting = self._waiting()
            self._unusable.forget_due()
            for shard in waiting:
                with leaving_out(shard, self._leave_out):
                    self._visit(shard, consumed)
                if self._is_over(consumed):
                    break
            if monotonic() >= self._progress_at:
                self._advance_checkpoints()
            remaining_s = end - monotonic()
            if consumed.applied or consumed.dead or self._is_paused or remaining_s <= 0:
                break
            self._pause(min(IDLE_PAUSE_S, remaining_s))
        return consumed

    @override
    def drain(self, report: Callable[[Consumed], None] = lambda _: None) -> int:
        applied = 0
        while True:
            consumed = self.round(block_ms=0)
            applied += consumed.applied
            report(consumed)
            if (
                self._is_paused
                or set(self._occupied()) <= self._halted | self._unusable.errors.keys()
            ):
                break
            if consumed.idle:
                self._pause(IDLE_PAUSE_S)
        self._advance_checkpoints()
        self._unusable.raise_first()
        return applied

    def _occupied(self) -> list[ShardName]:
        """Returns the shards that have members: dirty, reserved or held.

        Writes nothing.
        """
        pipeline = self._client.pipeline(transaction=False)
        for shard in self._shards:
            keys = self._icks[shard].keys
            for key in (keys.dirty, keys.reserved, keys.held):
                pipeline.exists(key)
        with redis_errors("inspecting Icks"):
            answers = pipeline.execute()
        return [s for i, s in enumerate(self._shards) if any(answers[3 * i : 3 * i + 3])]

    def _waiting(self) -> list[ShardName]:
        """Returns the shards that have members and are not left alone, beginning anywhere.

        Processes should spread.
        """
        shards = self._awake(self._occupied())
        start = random.randrange(len(shards)) if shards else 0  # noqa: S311  not for secrets
        return shards[start:] + shards[:start]

    def _visit(self, shard: ShardName, consumed: Consumed) -> None:
        """Delivers batch after batch of one shard, for a while."""
        ick = self._icks[shard]
        answer = self._reserve(shard)
        if isinstance(answer, Busy):
            self._rest(shard, BUSY_PAUSE_S)
            consumed.left.add(shard)
            return
        until = monotonic() + MAX_VISIT_S
        reservation: Reservation | Superseded = answer
        while isinstance(reservation, Reservation) and reservation.marks:
            crashpoint("members.after_reserve")
            delivered = self._deliver(shard, reservation)
            consumed.add(shard, delivered)
            if is_repeated("members.after_delivery"):
                delivered.members.clear()
            is_whole = len(delivered.members) == len(reservation.marks)
            if not is_whole or self._is_over(consumed) or monotonic() >= until:
                ick.release(reservation, delivered.members)
                self._note_delivered(shard, delivered)
                return
            reservation = ick.exchange(reservation)
            crashpoint("members.after_exchange")
        if isinstance(reservation, Reservation):
            ick.release(reservation)

    def _reserve(self, shard: ShardName) -> Reservation | Busy:
        ick = self._icks[shard]
        answer = ick.reserve()
        if not isinstance(answer, Busy) or not self._holder_watch[shard].is_stale(answer):
            return answer
        if not self._is_free(shard):
            return answer
        log.warning(
            "taking over shard", consumer=self.consumer.name, shard=str(shard), holder=answer.holder
        )
        return ick.reserve(in_place_of=answer)

    def _is_free(self, shard: ShardName) -> bool:
        """Returns whether nobody works on the shard now, as far as Postgres knows."""
        try:
            return self._opened().write(shard, lambda *_: None)
        except NotApplied:  # not known
            return False

    def _deliver(self, shard: ShardName, reservation: Reservation) -> Delivered:
        ick = self._icks[shard]

        def pause(seconds: float) -> bool:
            """Waits, with heartbeats; true if there is no sense in another attempt."""
            end = monotonic() + seconds
            while (remaining_s := end - monotonic()) > 0:
                if self._pause(min(remaining_s, HEARTBEAT_S)):
                    return True
                if isinstance(ick.commit(reservation, ()), Superseded):
                    return True
            return self._stop()

        members = [ReservedMember(member, score) for member, score in reservation.marks]
        return self._deliverer.deliver(self._opened(), shard, members, pause)

    def _note_delivered(self, shard: ShardName, delivered: Delivered) -> None:
        """Sets when to visit the shard again."""
        self._note(shard, delivered, BUSY_PAUSE_S)
        self._halted.discard(shard)
        if delivered.halted is not None:
            self._halted.add(shard)

    def _advance_checkpoints(self) -> None:
        """Moves the checkpoints up to the processed marks.

        Retention keeps nothing before them.
        """
        transaction = self._opened()
        # an idle worker has to notice that it is not registered any more
        with suppress(ServerUnavailable):
            transaction.read(self._checkpoints.all)
        answers = self._ask_usable(update_progress, self._shards)
        for shard, progress in answers.items():
            if progress.done_up_to > self._done_up_to.get(shard, Offset(0)):
                with suppress(NotApplied):  # it is tried again
                    transaction.apply([shard], plan_progress(shard, progress.done_up_to))
                    self._done_up_to[shard] = progress.done_up_to
        self._progress_at = monotonic() + PROGRESS_EVERY_S
