"""Members of an Ick, and the writes that go with their effects."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.channels.ick import Mark
from penstock.consuming.checkpoints import Advance, Checkpoints
from penstock.consuming.dead_lettering import DeadLetters, break_circuit
from penstock.consuming.delivery import Delivered, Failed
from penstock.consuming.failures import NotApplied
from penstock.consuming.transaction import Locked, Planner, TransactionPlan
from penstock.database.executor import Executor
from penstock.declaring.declarations import ConsumerSpec
from penstock.parsing import InvalidPayload
from penstock.records import Offset, Scope, ShardName

MICROSECONDS = 1_000_000
MAX_SCORE_S = 2**40
"""Scores beyond it are no times in seconds."""


@dataclass(frozen=True, slots=True)
class ReservedMember:
    """A member that is reserved; its score is since when it is dirty, in seconds since 1970, if the pipeline has marked it."""

    member: bytes
    score: float

    @property
    def text(self) -> str:
        """The member for the handler; bytes that are not UTF-8 are shown by their numbers."""
        return self.member.decode(errors="backslashreplace").replace("\x00", "\\x00")

    @property
    def is_text(self) -> bool:
        """True if UTF-8 and Postgres can hold the member."""
        return self.text.encode() == self.member

    @property
    def since_us(self) -> int:
        """Since when it is dirty, in microseconds since 1970; 0 if its score is no such time."""
        return int(self.score * MICROSECONDS) if 0 <= self.score < MAX_SCORE_S else 0


def reserved_members(marks: Sequence[Mark]) -> list[ReservedMember]:
    """The members of a reservation."""
    return [ReservedMember(member, score) for member, score in marks]


class IckMembers:
    """Members of an Ick: all that are given, in any order.  The checkpoint's row is locked, and does not move."""

    name = "members"

    def __init__(self, consumer: ConsumerSpec, scope: Scope) -> None:
        self._consumer = consumer
        self._checkpoints = Checkpoints(consumer, scope)
        self._dead_letters = DeadLetters(consumer, scope)

    def plan(self, shard: ShardName, members: Sequence[ReservedMember]) -> Planner[Delivered]:
        """Applies the members."""

        def planner(_: Executor, locked: Locked) -> TransactionPlan[Delivered]:
            checkpoint = locked.get(shard)
            if checkpoint is None:
                return TransactionPlan(Delivered())
            if checkpoint.is_stopped:
                return TransactionPlan(Delivered(halted=checkpoint.halted, is_paused=checkpoint.is_paused))
            _refuse_bytes(members)
            texts = [each.text for each in members]
            return TransactionPlan(
                Delivered(
                    position=checkpoint.offset,
                    applied=len(members),
                    members=[each.member for each in members],
                    latencies_us=[max(0, checkpoint.clock_us - each.since_us) for each in members if each.since_us],
                ),
                texts,
                [Advance(checkpoint, checkpoint.offset, applied=len(members))],
                settle=lambda executor: self._dead_letters.forget_members(executor, shard, texts),
            )

        return planner

    def plan_dead_letter(
        self, shard: ShardName, member: ReservedMember, reason: str, attempts: int
    ) -> Planner[Delivered]:
        """Dead-letters a member that has failed alone."""

        def planner(executor: Executor, locked: Locked) -> TransactionPlan[Delivered]:
            checkpoint = locked.get(shard)
            if checkpoint is None or checkpoint.is_stopped:
                return TransactionPlan(Delivered())  # it stays dirty
            self._dead_letters.write_member(
                executor, shard, member.text, since_us=member.since_us, reason=reason, attempts=attempts
            )
            last = f"the last is {self.describe(shard, member)}: {reason}"
            halted = break_circuit(self._consumer, self._checkpoints, executor, shard, last)
            return TransactionPlan(
                Delivered(position=checkpoint.offset, dead=1, members=[member.member], halted=halted),
                advances=[Advance(checkpoint, checkpoint.offset, dead=1)],
            )

        return planner

    def plan_pass(self, shard: ShardName, member: ReservedMember) -> Planner[Delivered]:
        """Commits a member without an effect."""

        def planner(_executor: Executor, locked: Locked) -> TransactionPlan[Delivered]:
            checkpoint = locked.get(shard)
            if checkpoint is None or checkpoint.is_stopped:
                return TransactionPlan(Delivered())
            return TransactionPlan(
                Delivered(position=checkpoint.offset, cancelled=1, members=[member.member]),
                settle=lambda found: self._dead_letters.forget_members(found, shard, [member.text]),
            )

        return planner

    def identify(self, member: ReservedMember) -> object:
        """The member."""
        return member.member

    def how_to_go_past(self, _shard: ShardName, _last: Offset) -> str:
        """Nothing is passed: to process members again does no harm."""
        return f"penstock reset checkpoint {self._consumer.name} --resume --apply"

    def renew(self, members: Sequence[ReservedMember]) -> None:
        """Nothing to do: a handler gets texts."""

    def describe(self, shard: ShardName, member: ReservedMember) -> str:
        """The member and its shard."""
        return f"{shard} member {member.text!r}"

    def name_in_log(self, shard: ShardName, _: ReservedMember) -> str:
        """The member's shard: its name is the application's."""
        return f"a member of {shard}"


def plan_progress(shard: ShardName, done_up_to: Offset) -> Planner[None]:
    """Moves the checkpoint: everything up to ``done_up_to`` is done.  It never goes back."""

    def planner(_: Executor, locked: Locked) -> TransactionPlan[None]:
        checkpoint = locked.get(shard)
        if checkpoint is None or checkpoint.offset >= done_up_to:
            return TransactionPlan(None)
        return TransactionPlan(None, advances=[Advance(checkpoint, done_up_to)])

    return planner


def _refuse_bytes(members: Sequence[ReservedMember]) -> None:
    """A member that is not text fails by itself, before a handler sees it."""
    for index, each in enumerate(members):
        if not each.is_text:
            error = InvalidPayload("the member is not text that UTF-8 and Postgres can hold")
            raise NotApplied(Failed(index, for_certain=True), error)
