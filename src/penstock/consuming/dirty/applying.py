"""Members go to the handler in a transaction that holds the checkpoint's row; one that fails alone is set aside."""

from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from sqlalchemy.orm import Session

from penstock.channels.ick import Mark
from penstock.consuming.checkpoints import Checkpoint, Move
from penstock.consuming.delivering import Applier, Delivered, add
from penstock.consuming.failures import HandlerFailed, reason_of
from penstock.crashpoints import crashpoint
from penstock.database.connections import Connection
from penstock.database.statements import statements
from penstock.records import Offset, ShardName

log = structlog.get_logger("penstock.consumer")

MICROSECONDS = 1_000_000
LATEST_S = 2**40
"""Scores beyond it are no times in seconds."""


@dataclass(frozen=True, slots=True)
class DirtyMember:
    """A member that is reserved.

    Attributes:
        member: As it stands in the Ick.
        score: Since when it is dirty: seconds since 1970, if the pipeline has marked it.
    """

    member: bytes
    score: float

    @property
    def text(self) -> str:
        """What the handler gets; bytes that are not UTF-8 are shown by their numbers."""
        return self.member.decode(errors="backslashreplace").replace("\x00", "\\x00")

    @property
    def since_us(self) -> int:
        """Since when it is dirty, in microseconds since 1970; 0 if its score is no such time."""
        return int(self.score * MICROSECONDS) if 0 <= self.score < LATEST_S else 0


def dirty_members(marks: Sequence[Mark]) -> list[DirtyMember]:
    """The members of a reservation."""
    return [DirtyMember(member, score) for member, score in marks]


class MemberApplier(Applier[DirtyMember]):
    """Applies members of an Ick: all that it is given, in any order."""

    def _apply(
        self,
        session: Session,
        connection: Connection,
        locked: Checkpoint,
        items: Sequence[DirtyMember],
    ) -> Delivered:
        for index, item in enumerate(items):
            if item.text.encode() != item.member:
                error = ValueError("the member is not text that UTF-8 and Postgres can say")
                raise HandlerFailed(error, index)
        texts = [item.text for item in items]
        self._handle(session, texts)
        crashpoint("members.after_apply")
        where = self._checkpoints.key(locked.shard)
        connection.execute(self._sql["forget_members"], {**where, "keys": texts})
        self._checkpoints.advance(connection, Move(locked, locked.offset, applied=len(items)))
        crashpoint("members.after_checkpoint")
        return Delivered(
            position=locked.offset,
            applied=len(items),
            members=[item.member for item in items],
            latencies_us=[
                max(0, locked.clock_us - item.since_us) for item in items if item.since_us
            ],
        )

    def _give_up(
        self,
        shard: ShardName,
        item: DirtyMember,
        error: Exception,
        attempts: int,
        total: Delivered,
    ) -> None:
        reason = reason_of(error)
        log.warning(
            "member failed",
            consumer=self._consumer.name,
            shard=str(shard),
            error=type(error).__name__,
            then=self._consumer.on_poison,
        )
        with self._transaction([shard]) as (_, connection, taken):
            locked = taken.get(shard)
            if locked is None or locked.halted is not None:
                return  # it stays dirty
            if self._consumer.on_poison == "halt":
                total.halted = f"{shard} member {item.text!r} failed {attempts} times: {reason}"
                total.position = locked.offset
                self._checkpoints.halt(connection, shard, total.halted)
                return
            connection.execute(
                self._sql["set_member_aside"],
                {
                    **self._checkpoints.key(shard),
                    "key": item.text,
                    "since": item.since_us,
                    "reason": reason,
                    "attempts": attempts,
                },
            )
            self._checkpoints.advance(connection, Move(locked, locked.offset, dead=1))
        add(total, Delivered(position=locked.offset, dead=1, members=[item.member]))

    def is_free(self, shard: ShardName) -> bool:
        """Whether nobody works on the shard now, as far as Postgres knows.

        Raises:
            ServerUnavailable: Postgres does not answer.
        """
        with self._transaction([shard]) as (_, _, taken):
            return shard in taken

    def pass_to(self, shard: ShardName, passed: Offset) -> None:
        """Moves the checkpoint: everything up to ``passed`` is done.  It never goes back.

        Raises:
            ServerUnavailable: Postgres does not answer.
        """
        with self._transaction([shard]) as (_, connection, taken):
            locked = taken.get(shard)
            if locked is not None and locked.offset < passed:
                self._checkpoints.advance(connection, Move(locked, passed))

    @property
    def _sql(self) -> dict[str, bytes]:
        return statements("penstock.consuming", self._schema)
