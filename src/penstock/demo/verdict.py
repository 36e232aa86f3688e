"""The account: what was committed, against what took effect."""

from dataclasses import dataclass
from typing import Any

from penstock.channels.log import extents
from penstock.channels.server import RedisClient
from penstock.database.connections import Connection
from penstock.demo.rides import CANONICAL_COPIES, pipeline, rides

CONSUMERS = tuple(
    sorted(name for name, spec in pipeline.consumers.items() if spec.channel == rides)
)
INDEX = "ride-index"
"""Channel and consumer of the index have one name."""
NEWCOMER = "ride-newcomer"
"""The consumer of another module, that begins with the tables."""

_COUNTS = """
SELECT (SELECT count(*) FROM rocket_rides_log.staged_records WHERE channel = 'rides'),
       (SELECT coalesce(sum(last_offset - first_offset + 1), 0)::bigint FROM rocket_rides_log.journal WHERE channel = 'rides'),
       (SELECT coalesce(sum(amount_cents), 0)::bigint FROM rocket_rides.rides),
       (SELECT count(*) FROM rocket_rides.mischief WHERE kind = 'crash'),
       (SELECT count(*) FROM rocket_rides.mischief WHERE kind = 'resent')
"""

_EFFECTS = """
SELECT (SELECT count(*)
        FROM rocket_rides_log.staged_records s
        WHERE s.channel = 'rides'
          AND NOT EXISTS (SELECT FROM rocket_rides.effects e WHERE e.consumer = %(consumer)s AND e.record_id = s.id)),
       (SELECT count(*) - count(DISTINCT record_id) FROM rocket_rides.effects WHERE consumer = %(consumer)s)
     + (SELECT count(*)
        FROM rocket_rides.effects e
        WHERE consumer = %(consumer)s
          AND NOT EXISTS (SELECT FROM rocket_rides_log.staged_records s WHERE s.id = e.record_id))
"""

_OUT_OF_ORDER = """
SELECT count(*)
FROM (
    SELECT "offset" < lag("offset") OVER (PARTITION BY shard ORDER BY number) AS earlier
    FROM rocket_rides.effects
    WHERE consumer = %(consumer)s
) e
WHERE earlier
"""

_PROGRESS = """
SELECT coalesce(sum(applied), 0)::bigint, coalesce(sum(skipped), 0)::bigint, coalesce(sum("offset"), 0)::bigint
FROM rocket_rides_log.checkpoints
WHERE consumer = %(consumer)s
"""

_TOTALS = {
    "ride-totals": "SELECT total_cents FROM rocket_rides.totals WHERE consumer = 'ride-totals'",
    "ride-copies": "SELECT coalesce(sum(amount_cents), 0)::bigint FROM rocket_rides.copies",
}

_INDEX = """
SELECT (SELECT count(*) FROM rocket_rides_log.staged_records WHERE channel = 'ride-index'),
       (SELECT coalesce(sum(amount_cents), 0)::bigint FROM rocket_rides.ride_index),
       (SELECT count(*)
        FROM (TABLE rocket_rides.indexable EXCEPT TABLE rocket_rides.ride_index
              UNION ALL
              (TABLE rocket_rides.ride_index EXCEPT TABLE rocket_rides.indexable)) AS different)
"""

_NEWCOMER = f"""
SELECT (SELECT count(*) FROM rocket_rides_log.staged_records WHERE channel = 'rides'),
       (SELECT coalesce(sum(amount_cents), 0)::bigint FROM rocket_rides.newcomers),
       (SELECT count(*)
        FROM (({CANONICAL_COPIES} EXCEPT TABLE rocket_rides.newcomers)
              UNION ALL
              (TABLE rocket_rides.newcomers EXCEPT {CANONICAL_COPIES})) AS different)
"""

_LATENCIES = """
SELECT percentile_cont(ARRAY[0.5, 0.99]) WITHIN GROUP (ORDER BY latency_us / 1000.0)
FROM rocket_rides.effects
WHERE latency_us > 0
"""


@dataclass(frozen=True, slots=True)
class Copy:
    """Where a copy of the table stands that has not seen every record.

    Attributes:
        told: Records of its channel.
        applied: Records, or members of an Ick, that its consumer has applied.
        position: Records that are done, by the consumer's checkpoints.
        total_cents: The sum of all rides in it.
        different: Rows that the table has and the copy has not, or the other way round.
    """

    told: int
    applied: int
    position: int
    total_cents: int
    different: int


@dataclass(frozen=True, slots=True)
class Account:
    """Where the demo stands.

    Attributes:
        staged: Committed records.
        sequenced: Records in the journal.
        published: Records in the log.
        resent: Batches sent again on purpose.
        crashes: Processes that crashed on purpose.
        canonical_cents: The sum of all rides.
        consumers: For each its counts, its total, and what it lost or doubled.
        index: Of the consumer that is told what is dirty; its records are marks.
        newcomer: Of the consumer that began with the tables; where it has not begun, it has no position.
        p50_ms: Median time from staging to handler.
        p99_ms: The same for the slowest of a hundred.
    """

    staged: int
    sequenced: int
    published: int
    resent: int
    crashes: int
    canonical_cents: int
    consumers: dict[str, dict[str, int]]
    index: Copy
    newcomer: Copy
    p50_ms: float
    p99_ms: float

    @property
    def lost(self) -> int:
        """Committed records without effect, over all consumers."""
        return sum(consumer["lost"] for consumer in self.consumers.values())

    @property
    def doubled(self) -> int:
        """Effects too many, over all consumers."""
        return sum(consumer["doubled"] for consumer in self.consumers.values())

    @property
    def out_of_order(self) -> int:
        """Effects that came before one of an earlier offset of their shard, over all consumers."""
        return sum(consumer["out_of_order"] for consumer in self.consumers.values())

    @property
    def settled(self) -> bool:
        """Everything committed has reached every consumer's checkpoint."""
        return (
            self.staged == self.sequenced
            and all(c["position"] == self.staged for c in self.consumers.values())
            and self.index.position == self.index.told
        )

    @property
    def equal(self) -> bool:
        """Nothing lost, doubled or out of order, every total is the canonical one, the index is the table."""
        totals = {consumer["total_cents"] for consumer in self.consumers.values()}
        return (
            not (self.lost or self.doubled or self.out_of_order)
            and self.settled
            and totals == {self.canonical_cents}
            and not self.index.different
        )


def account(connection: Connection, client: RedisClient) -> Account:
    """Looks at everything: at the log, and then in one snapshot of Postgres, where all that it holds was before.

    Raises:
        ServerUnavailable: Redis does not answer.
        psycopg.Error: Postgres does not.
    """
    log = extents(client, pipeline.namespace, rides.shard_names)
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        [(staged, sequenced, canonical, crashes, resent)] = connection.execute(_COUNTS)
        consumers = {name: _consumer(connection, name) for name in CONSUMERS}
        index = _copy(connection, INDEX, _INDEX)
        newcomer = _copy(connection, NEWCOMER, _NEWCOMER)
        [(latencies,)] = connection.execute(_LATENCIES)
    p50, p99 = latencies or (0.0, 0.0)
    published = sum(extent.tail for extent in log.values())
    return Account(
        staged,
        sequenced,
        published,
        resent,
        crashes,
        canonical,
        consumers,
        index,
        newcomer,
        float(p50),
        float(p99),
    )


def _copy(connection: Connection, name: str, query: str) -> Copy:
    [(told, total, different)] = connection.execute(query.encode())
    [(applied, _, position)] = connection.execute(_PROGRESS, {"consumer": name})
    return Copy(told, applied, position, total, different)


def _consumer(connection: Connection, name: str) -> dict[str, int]:
    where: dict[str, Any] = {"consumer": name}
    [(lost, doubled)] = connection.execute(_EFFECTS, where)
    [(applied, skipped, position)] = connection.execute(_PROGRESS, where)
    [(out_of_order,)] = connection.execute(_OUT_OF_ORDER, where)
    [(total,)] = connection.execute(_TOTALS[name].encode())
    return {
        "applied": applied,
        "skipped": skipped,
        "position": position,
        "total_cents": total,
        "lost": lost,
        "doubled": doubled,
        "out_of_order": out_of_order,
    }
