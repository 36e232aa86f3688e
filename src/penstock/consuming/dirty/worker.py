"""The worker of a consumer that reads an Ick.

A turn at a shard is one reservation after the other, each batch one exchange: what is done goes, what is next comes.  The
last batch of a turn ends the reservation instead, so that shards are free for other processes whenever nobody works on
them.  A process that dies in its turn leaves its reservation behind: another one takes it over when it has stood still
for ``PATIENCE_S`` and Postgres no longer knows of a transaction that works on the shard.
"""

import os
import random
import socket
from collections.abc import Callable
from time import monotonic
from typing import Unpack

import structlog

from penstock.channels.ick import (
    Busy,
    HolderWatch,
    Reservation,
    Reservations,
    Superseded,
    update_progress,
)
from penstock.channels.routing import ick_shard_keys
from penstock.channels.server import redis_errors
from penstock.consuming.delivering import Delivered
from penstock.consuming.dirty.applying import MemberApplier, dirty_members
from penstock.consuming.loop import Choices, Consumed, Worker
from penstock.crashpoints import crashpoint
from penstock.declarations import ConsumerSpec
from penstock.pipeline import Pipeline
from penstock.records import Offset, ShardName

log = structlog.get_logger("penstock.consumer")

TURN_S = 0.5
"""How long a worker stays at a shard while there is more to do, before it looks at the others."""

PATIENCE_S = 1.0
"""How long a reservation of another process may stand still before it is taken over."""

BUSY_PAUSE_S = 0.1
"""How long a shard is left alone that another process works on."""

IDLE_PAUSE_S = 0.02
"""Pause between two looks at Icks that are empty."""

PASS_EVERY_S = 1.0
"""How often the checkpoints follow what is done."""

SIGN_OF_LIFE_S = 0.3


class MemberWorker(Worker):
    """Runs one consumer of an Ick over some or all of its shards, in one thread."""

    def __init__(
        self,
        pipeline: Pipeline,
        consumer: ConsumerSpec,
        database_url: str,
        redis_url: str,
        **chosen: Unpack[Choices],
    ) -> None:
        """Sets up; ``open`` connects."""
        super().__init__(pipeline, consumer, database_url, redis_url, **chosen)
        self._holder = f"{consumer.name}@{socket.gethostname()}:{os.getpid()}"
        self._identities: dict[ShardName, str] = {}
        self._applier: MemberApplier | None = None
        self._icks: dict[ShardName, Reservations] = {}
        self._patience: dict[ShardName, HolderWatch] = {}
        self._halted: set[ShardName] = set()
        self._passed: dict[ShardName, Offset] = {}
        self._pass_at = 0.0

    def open(self) -> None:
        """As ``Worker.open``."""
        super().open()
        assert self._engine is not None
        self._applier = MemberApplier(self._pipeline, self.consumer, self._engine)
        for shard in self._shards:
            ick = self._icks[shard] = Reservations(
                self._client,
                ick_shard_keys(self._pipeline.namespace, shard).name,
                holder=self._holder,
                size=self.consumer.batch,
            )
            # After a connection that failed, what we hold is still ours.
            ick.holder = self._identities.setdefault(shard, ick.holder)
            self._patience[shard] = HolderWatch(PATIENCE_S)
        self._halted, self._passed, self._pass_at = set(), {}, 0.0

    def close(self) -> None:
        """As ``Worker.close``."""
        if self._applier is not None:
            self._applier.close()
        super().close()
        self._applier = None

    def round(self, block_ms: int | None = None) -> Consumed:
        """Waits for members, ``block_ms`` at the longest, and takes a turn at each shard that has some.

        Raises:
            ServerUnavailable: Postgres or Redis does not answer.
            AppendRefused: Redis takes no writes now.
            DamagedIck: An Ick is not whole.
            BrokenTransaction: The handler ends its transaction.
        """
        if self._applier is None:
            self.open()
        consumed = Consumed()
        end = monotonic() + (self._block_ms if block_ms is None else block_ms) / 1000
        while not self._stop():
            waiting = self._waiting()
            for shard in waiting:
                self._turn(shard, consumed)
                if self._stop():
                    break
            if monotonic() >= self._pass_at:
                self._follow()
            left = end - monotonic()
            if consumed.applied or consumed.dead or left <= 0:
                break
            self._pause(min(IDLE_PAUSE_S, left))
        return consumed

    def drain(self, report: Callable[[Consumed], None] = lambda _: None) -> int:
        """Rounds until the Ick has nothing more, but for shards that are halted; gives the number of members applied.

        Raises:
            As ``round``.
        """
        applied = 0
        while True:
            consumed = self.round(block_ms=0)
            applied += consumed.applied
            report(consumed)
            if set(self._occupied()) <= self._halted:
                break
            if consumed.idle:
                self._pause(IDLE_PAUSE_S)
        self._follow()
        return applied

    def _occupied(self) -> list[ShardName]:
        """The shards that have members: dirty, reserved or held.  Writes nothing."""
        pipeline = self._client.pipeline(transaction=False)
        for shard in self._shards:
            keys = self._icks[shard].keys
            for key in (keys.dirty, keys.reserved, keys.held):
                pipeline.exists(key)
        with redis_errors("looking at Icks"):
            found = pipeline.execute()
        return [s for i, s in enumerate(self._shards) if any(found[3 * i : 3 * i + 3])]

    def _waiting(self) -> list[ShardName]:
        """The shards that have members and are not to be left alone, beginning anywhere: processes should spread."""
        now = monotonic()
        found = [s for s in self._occupied() if self._rest_until.get(s, 0.0) <= now]
        at = random.randrange(len(found)) if found else 0  # noqa: S311  not for secrets
        return found[at:] + found[:at]

    def _turn(self, shard: ShardName, consumed: Consumed) -> None:
        """Batch after batch of one shard, for a while."""
        ick = self._icks[shard]
        held = self._reserve(shard)
        if isinstance(held, Busy):
            self._rest_until[shard] = monotonic() + BUSY_PAUSE_S
            return
        until = monotonic() + TURN_S
        reservation: Reservation | Superseded = held
        while isinstance(reservation, Reservation) and reservation.marks:
            crashpoint("members.after_reserve")
            delivered = self._deliver(shard, reservation)
            consumed.add(shard, delivered)
            if self._reread_chance and random.random() < self._reread_chance:  # noqa: S311  the same
                delivered.members.clear()
            is_whole = len(delivered.members) == len(reservation.marks)
            if not is_whole or self._stop() or monotonic() >= until:
                ick.release(reservation, delivered.members)
                self._note(shard, delivered)
                return
            reservation = ick.exchange(reservation)
            crashpoint("members.after_exchange")
        if isinstance(reservation, Reservation):
            ick.release(reservation)

    def _reserve(self, shard: ShardName) -> Reservation | Busy:
        ick = self._icks[shard]
        answer = ick.reserve()
        if isinstance(answer, Busy) and self._patience[shard].is_stale(answer):
            assert self._applier is not None
            if self._applier.is_free(shard):
                log.warning(
                    "taking over", consumer=self.consumer.name, shard=str(shard), of=answer.holder
                )
                return ick.reserve(in_place_of=answer)
        return answer

    def _deliver(self, shard: ShardName, reservation: Reservation) -> Delivered:
        assert self._applier is not None
        ick = self._icks[shard]

        def pause(seconds: float) -> bool:
            """Waits with signs of life; true if there is no sense in another attempt."""
            end = monotonic() + seconds
            while (left := end - monotonic()) > 0:
                if self._pause(min(left, SIGN_OF_LIFE_S)):
                    return True
                if isinstance(ick.commit(reservation, ()), Superseded):
                    return True
            return self._stop()

        return self._applier.deliver(shard, dirty_members(reservation.marks), pause)

    def _note(self, shard: ShardName, delivered: Delivered) -> None:
        """When to look at the shard again."""
        self._halted.discard(shard)
        if delivered.halted is not None:
            self._halted.add(shard)
            self._rest_halted(shard)
        elif delivered.position is None:
            self._rest_until[shard] = monotonic() + BUSY_PAUSE_S

    def _follow(self) -> None:
        """Moves the checkpoints up to what is done: nothing before that has to be kept."""
        assert self._applier is not None
        found = update_progress(self._client, self._pipeline.namespace, self._shards)
        for shard, progress in found.items():
            if progress.done_up_to > self._passed.get(shard, Offset(0)):
                self._applier.pass_to(shard, progress.done_up_to)
                self._passed[shard] = progress.done_up_to
        self._pass_at = monotonic() + PASS_EVERY_S
