"""What a delivery did: what workers count, show, and go on from."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.records import Offset, Shard, ShardName


@dataclass
class Delivered:
    """What became of a delivery to one shard.

    Attributes:
        position: The checkpoint afterwards; None if another process holds the shard.
        applied: Records whose effects are committed.
        skipped: Records that had been applied before.
        dead: Records that were dead-lettered.
        backfilled: Records that came from the journal, because the log has lost them.
        halted: Why the shard stopped; None if it did not.
        held: The shard stands at a barrier, and has not applied what lies behind.
        waits_for: Of a held shard: the shard of an earlier generation that it waits for; None at a barrier.
        retry_after_s: Seconds until what failed is to be delivered again; None if nothing is to be.
        missing: Records that the log has lost, from the journal: nothing was applied, they have to be delivered first.
        members: Members of an Ick that need not come again.
        latencies_us: For each applied record the time from staging to its handler, by Postgres' clock.
    """

    position: Offset | None = None
    applied: int = 0
    skipped: int = 0
    dead: int = 0
    backfilled: int = 0
    halted: str | None = None
    held: bool = False
    waits_for: Shard | None = None
    retry_after_s: float | None = None
    missing: Sequence[Any] = ()
    members: list[bytes] = field(default_factory=list)
    latencies_us: list[int] = field(default_factory=list)

    @property
    def is_left(self) -> bool:
        """Whether the shard is left for later: another process holds it, or an attempt has failed."""
        return self.position is None and self.halted is None

    def add(self, done: "Delivered") -> None:
        """Adds what one transaction did."""
        self.position = done.position
        self.applied += done.applied
        self.skipped += done.skipped
        self.dead += done.dead
        self.backfilled += done.backfilled
        self.halted = done.halted
        self.held, self.waits_for = done.held, done.waits_for
        self.members.extend(done.members)
        self.latencies_us.extend(done.latencies_us)


_COUNTS = ("applied", "skipped", "dead", "backfilled", "cancelled", "snoozed", "retried", "stale")


@dataclass
class Consumed:
    """What one round did, over all shards: see ``Delivered`` for the counts.

    Attributes:
        positions: Where the consumer stands in the shards that this round touched.
        cancelled: Jobs that were finished without an effect, because the handler said so.
        snoozed: Jobs that the handler has put off.
        retried: Jobs that have failed, and wait for another attempt.
        stale: Jobs whose lease had ended when their handler returned: nothing of it was committed.
        left: Shards that were left for later: another process was working on them, or an attempt has failed.
    """

    applied: int = 0
    skipped: int = 0
    dead: int = 0
    backfilled: int = 0
    halted: dict[ShardName, str] = field(default_factory=dict)
    positions: dict[ShardName, Offset] = field(default_factory=dict)
    latencies_us: list[int] = field(default_factory=list)
    cancelled: int = 0
    snoozed: int = 0
    retried: int = 0
    stale: int = 0
    left: set[ShardName] = field(default_factory=set)

    def add(self, shard: ShardName, delivered: Delivered) -> None:
        """Counts a delivery."""
        self.applied += delivered.applied
        self.skipped += delivered.skipped
        self.dead += delivered.dead
        self.backfilled += delivered.backfilled
        self.latencies_us.extend(delivered.latencies_us)
        if delivered.halted is not None:
            self.halted[shard] = delivered.halted
        if delivered.position is not None:
            self.positions[shard] = delivered.position
        elif delivered.is_left:
            self.left.add(shard)

    def merge(self, later: "Consumed") -> None:
        """Adds what a later round did."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(later, name))
        self.halted |= later.halted
        self.positions |= later.positions
        self.latencies_us += later.latencies_us
        self.left |= later.left

    @property
    def done(self) -> int:
        """Items that need not be delivered again."""
        return self.applied + self.skipped + self.dead

    @property
    def idle(self) -> bool:
        """Nothing was delivered."""
        return not (self.applied or self.skipped or self.dead or self.cancelled)
