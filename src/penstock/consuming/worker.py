"""The consumer's worker: waits for records, delivers them, in a loop.

Several processes of one consumer share its shards by the locks on the checkpoints: a shard that another process is
working on is left alone for a while.  Whoever reads what is applied already skips it.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Unpack

import structlog

from penstock.channels.log import Follower, extents
from penstock.consuming.applying import RecordApplier
from penstock.consuming.backfill import backfill
from penstock.consuming.checkpoints import Checkpoints
from penstock.consuming.delivering import Delivered
from penstock.consuming.loop import Choices, Consumed, Worker
from penstock.crashpoints import crashpoint
from penstock.database.connections import Connection, postgres_errors
from penstock.declarations import ConsumerSpec, Ick
from penstock.errors import DeclarationError
from penstock.pipeline import Pipeline
from penstock.records import Offset, Record, ShardName

log = structlog.get_logger("penstock.consumer")

SHARED_PAUSE_S = 1.0
"""How long a shard is left alone that another process is working on."""

HELD_PAUSE_S = 0.02
"""How often a shard that stands at a barrier is looked at again."""

TOGETHER_S = 0.02
"""Longest transaction that takes several shards together, in seconds, as far as the last records tell."""

LOOK_AGAIN_S = 2.0
"""How often an idle worker looks whether an operator has moved its checkpoints."""


class ConsumerWorker(Worker):
    """Runs one consumer of a log over some or all of its shards, in one thread."""

    def __init__(
        self,
        pipeline: Pipeline,
        consumer: ConsumerSpec,
        database_url: str,
        redis_url: str,
        **chosen: Unpack[Choices],
    ) -> None:
        """Sets up; ``open`` connects.

        Raises:
            DeclarationError: The consumer is set-based, and needs the Spark engine, or it reads an Ick.
        """
        if isinstance(consumer.channel, Ick):
            raise DeclarationError(
                f"consumer {consumer.name} reads an Ick, and this worker reads logs; make_worker(…) makes the right one"
            )
        if consumer.dataframe:
            raise DeclarationError(
                f"consumer {consumer.name} is set-based (dataframe=True) and runs on Spark: penstock run --engine spark"
            )
        super().__init__(pipeline, consumer, database_url, redis_url, **chosen)
        self._applier: RecordApplier | None = None
        self._follower: Follower | None = None
        self._positions: dict[ShardName, Offset] = {}
        self._held: set[ShardName] = set()
        self._look_again_at = 0.0
        self._record_s = math.inf  # of a handler that is not known yet

    def _registered(self, connection: Connection) -> None:
        """Reads where the consumer stands."""
        crashpoint("consumer.after_register")
        standing = Checkpoints(self.consumer, self._pipeline.schema).all(connection)
        self._positions = {shard: standing.get(shard, Offset(0)) for shard in self._shards}

    def open(self) -> None:
        """As ``Worker.open``, and reads the consumer's checkpoints."""
        super().open()
        assert self._engine is not None
        self._applier = RecordApplier(self._pipeline, self.consumer, self._engine)
        self._follower = Follower(self._client, self._pipeline.namespace, count=self.consumer.batch)
        self._held, self._look_again_at = set(), 0.0

    def close(self) -> None:
        """As ``Worker.close``."""
        if self._follower is not None:
            self._follower.close()
        if self._applier is not None:
            self._applier.close()
        super().close()
        self._applier = self._follower = None

    def round(self, block_ms: int | None = None) -> Consumed:
        """Waits for records, ``block_ms`` at the longest, and delivers what came: up to a batch of each shard.

        Raises:
            ServerUnavailable: Postgres or Redis does not answer.
            ForeignLog: The log holds what is not ours.
            Gap: The log is empty, and the journal does not reach back to a checkpoint.
            BrokenTransaction: The handler ends its transaction.
        """
        if self._applier is None:
            self.open()
        assert self._applier is not None
        assert self._follower is not None
        block_ms = self._block_ms if block_ms is None else block_ms
        consumed = Consumed()
        now = monotonic()
        awake = {s: at for s, at in self._positions.items() if self._rest_until.get(s, 0.0) <= now}
        if not awake:
            self._pause(min(block_ms / 1000, max(0.001, min(self._rest_until.values()) - now)))
            return consumed
        resting = [until - now for until in self._rest_until.values() if until > now]
        longest = min([block_ms, *(max(1, int(left * 1000)) for left in resting)])
        found = self._follower.wait(awake, longest if longest > 0 else None)
        crashpoint("consumer.after_read")
        if any(len(records) >= self.consumer.batch for records in found.values()):
            # There is more, most likely: Redis looks it up while this is applied.
            last = {shard: records[-1].offset for shard, records in found.items()}
            self._follower.request_ahead({**awake, **last})
        self._deliver(found, consumed)
        if self._reread_chance and found and random.random() < self._reread_chance:  # noqa: S311  not for secrets
            self.rewind(consumed.applied)
        if not found and monotonic() >= self._look_again_at:
            self._deliver(self._look_again(), consumed)
        return consumed

    def _deliver(self, found: Mapping[ShardName, Sequence[Record]], consumed: Consumed) -> None:
        """Delivers to shards together, as far as that goes, and to the others one after another."""
        assert self._applier is not None
        began, done_before = monotonic(), consumed.applied + consumed.dead

        def note(shard: ShardName, delivered: Delivered) -> None:
            self._note(shard, delivered)
            consumed.add(shard, delivered)

        together = self._applier.deliver_together(found) if self._is_little(found) else {}
        for shard, delivered in together.items():
            note(shard, delivered)
        for shard in [shard for shard in found if shard not in together]:
            note(shard, self._applier.deliver(shard, found[shard], self._pause))
            if self._stop():
                break
        if done := consumed.applied + consumed.dead - done_before:
            self._record_s = (monotonic() - began) / done

    def _is_little(self, found: Mapping[ShardName, Sequence[Record]]) -> bool:
        """Whether it goes into one transaction that is over soon: others of the consumer wait for the shards meanwhile."""
        records = sum(len(records) for records in found.values())
        return (
            len(found) > 1
            and records <= self.consumer.batch
            and records * self._record_s < TOGETHER_S
        )

    def _look_again(self) -> dict[ShardName, list[Record]]:
        """Takes over checkpoints that were moved while nothing arrived: by an operator, or by another process.

        Gives what the journal has and the log has lost, if the log ends beyond a checkpoint and nothing came of it.
        """
        assert self._applier is not None
        schema, missed = self._pipeline.schema, {}
        with postgres_errors("reading checkpoints"), self._applier.reading() as connection:
            standing = Checkpoints(self.consumer, schema).all(connection)
            self._positions.update((s, at) for s, at in standing.items() if s in self._positions)
            held = extents(self._client, self._pipeline.namespace, list(self._positions))
            for shard, extent in held.items():
                at = self._positions[shard]
                if shard in standing and extent.tail > at and not extent.entries:
                    missed[shard] = backfill(
                        connection, schema, shard, at, Offset(extent.tail + 1), self.consumer.batch
                    )
        self._look_again_at = monotonic() + LOOK_AGAIN_S
        return missed

    def _note(self, shard: ShardName, delivered: Delivered) -> None:
        """Where to read on, and when."""
        self._held.discard(shard)
        if delivered.position is not None:
            self._positions[shard] = delivered.position
        if delivered.halted is not None:
            self._rest_halted(shard)
        elif delivered.position is None:
            self._rest_until[shard] = monotonic() + SHARED_PAUSE_S
        elif delivered.held:
            self._held.add(shard)
            self._rest_until[shard] = monotonic() + HELD_PAUSE_S

    def rewind(self, records: int) -> None:
        """Reads again from so many records before the checkpoints, as after a restart of someone who knew less.

        Checkpoints stay where they are: what is read twice is skipped.
        """
        self._positions = {s: Offset(max(0, at - records)) for s, at in self._positions.items()}

    def drain(self, report: Callable[[Consumed], None] = lambda _: None) -> int:
        """Rounds until the log has nothing more; gives the number of records applied.

        Raises:
            As ``round``.
        """
        applied = 0
        while True:
            self._look_again_at = (
                0.0  # the end is where the journal says, not where the log goes silent
            )
            consumed = self.round(block_ms=0)
            applied += consumed.applied
            report(consumed)
            if consumed.positions:
                continue
            if not self._held:
                return applied
            self._pause(HELD_PAUSE_S)
