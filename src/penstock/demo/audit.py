"""The audit: compares what was committed with what took effect."""

from dataclasses import dataclass

from psycopg.rows import dict_row

from penstock.channels.commands import RedisClient
from penstock.channels.log.streams import extents
from penstock.database.connections import Connection
from penstock.demo.rides import CANONICAL_COPIES, FLOODING, LATE_CONSUMER, pipeline, rides

CONSUMERS = tuple(
    sorted(name for name, spec in pipeline.consumers.items() if spec.channel == rides)
)
INDEX = "ride_index"
"""Name of both the Ick and its consumer."""

_COUNTS = """
SELECT (SELECT count(*) FROM rocket_rides_log.staged_records WHERE channel = 'rides') AS staged,
       (SELECT coalesce(sum(last_offset - first_offset + 1), 0)::bigint
        FROM rocket_rides_log.journal WHERE channel = 'rides') AS sequenced,
       (SELECT coalesce(sum(amount_cents), 0)::bigint FROM rocket_rides.rides) AS canonical_cents,
       (SELECT count(*) FROM rocket_rides.faults WHERE kind = 'crash') AS crashes,
       (SELECT count(*) FROM rocket_rides.faults WHERE kind = 'resent') AS resent,
       (SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY latency_us / 1000.0)
        FROM rocket_rides.effects WHERE latency_us > 0) AS p50_ms,
       (SELECT percentile_cont(0.99) WITHIN GROUP (ORDER BY latency_us / 1000.0)
        FROM rocket_rides.effects WHERE latency_us > 0) AS p99_ms
"""

_PROGRESS = """
SELECT coalesce(sum(applied), 0)::bigint AS applied, coalesce(sum(skipped), 0)::bigint AS skipped,
       coalesce(sum("offset"), 0)::bigint AS position
FROM rocket_rides_log.checkpoints
WHERE consumer = %(consumer)s
"""

_EFFECTS = """
SELECT (SELECT count(*)
        FROM rocket_rides_log.staged_records s
        WHERE s.channel = 'rides'
          AND NOT EXISTS (SELECT FROM rocket_rides.effects e
                          WHERE e.consumer = %(consumer)s AND e.record_id = s.id)) AS lost,
       (SELECT count(*) - count(DISTINCT record_id) FROM rocket_rides.effects WHERE consumer = %(consumer)s)
     + (SELECT count(*)
        FROM rocket_rides.effects e
        WHERE consumer = %(consumer)s
          AND NOT EXISTS (SELECT FROM rocket_rides_log.staged_records s WHERE s.id = e.record_id)) AS doubled,
       (SELECT count(*)
        FROM (SELECT "offset" < lag("offset") OVER (PARTITION BY shard ORDER BY number) AS earlier
              FROM rocket_rides.effects WHERE consumer = %(consumer)s) e
        WHERE earlier) AS out_of_order
"""  # noqa: E501  SQL

_TOTALS = {
    "ride_totals": "SELECT total_cents FROM rocket_rides.totals WHERE consumer = 'ride_totals'",
    "ride_copies": "SELECT coalesce(sum(amount_cents), 0)::bigint AS total_cents FROM "
    "rocket_rides.copies",
}

_INDEX = """
SELECT (SELECT count(*) FROM rocket_rides_log.staged_records WHERE channel = 'ride_index'),
       (SELECT coalesce(sum(amount_cents), 0)::bigint FROM rocket_rides.ride_index),
       (SELECT count(*)
        FROM (TABLE rocket_rides.indexable EXCEPT TABLE rocket_rides.ride_index
              UNION ALL
              (TABLE rocket_rides.ride_index EXCEPT TABLE rocket_rides.indexable)) AS different)
"""

_LATE_CONSUMER = f"""
SELECT (SELECT count(*) FROM rocket_rides_log.staged_records WHERE channel = 'rides'),
       (SELECT coalesce(sum(amount_cents), 0)::bigint FROM rocket_rides.late_copies),
       (SELECT count(*)
        FROM (({CANONICAL_COPIES} EXCEPT TABLE rocket_rides.late_copies)
              UNION ALL
              (TABLE rocket_rides.late_copies EXCEPT {CANONICAL_COPIES})) AS different)
"""

_RECEIPTS = """
SELECT (SELECT count(*) FROM rocket_rides.bookings),
       (SELECT count(*) FROM rocket_rides.receipts),
       (SELECT count(*)
        FROM rocket_rides.bookings b
        WHERE NOT EXISTS (SELECT FROM rocket_rides.receipts r WHERE r.ride_id = b.ride_id AND r.driver = b.driver)),
       (SELECT count(*) - count(DISTINCT ride_id) FROM rocket_rides.receipts)
     + (SELECT count(*)
        FROM rocket_rides.receipts r
        WHERE NOT EXISTS (SELECT FROM rocket_rides.bookings b WHERE b.ride_id = r.ride_id)),
       (SELECT count(*) FROM rocket_rides.bookings WHERE driver = %(flooding)s)
"""  # noqa: E501  SQL


@dataclass(frozen=True, slots=True)
class Copy:
    """The progress of a copy of the table whose consumer does not apply every record."""

    records: int  # records of its channel; for an Ick, marks
    applied: int  # records, or members of an Ick, that its consumer has applied
    position: int  # records before the consumer's checkpoints
    total_cents: int
    different: int  # rows that only the table or only the copy has


@dataclass(frozen=True, slots=True)
class Receipts:
    """The work of the queue: committed bookings, and those of the driver with most of them."""

    booked: int
    sent: int
    lost: int
    doubled: int
    flooding: int


@dataclass(frozen=True, slots=True)
class Audit:
    """The state of the demo."""

    staged: int
    sequenced: int
    published: int
    resent: int
    crashes: int  # processes that crashed on purpose
    canonical_cents: int
    # for each consumer its counts, its total, and how many records it lost or doubled
    consumers: dict[str, dict[str, int]]
    index: Copy  # the copy of the Ick's consumer
    # the copy of the consumer that begins with the tables; its position is 0 before it has begun
    late_consumer: Copy
    receipts: Receipts
    p50_ms: float  # median time from staging to handler, in milliseconds
    p99_ms: float

    @property
    def lost(self) -> int:
        """Committed records without effect, over all consumers and the queue."""
        return sum(consumer["lost"] for consumer in self.consumers.values()) + self.receipts.lost

    @property
    def doubled(self) -> int:
        """Superfluous effects, over all consumers and the queue."""
        doubled = sum(consumer["doubled"] for consumer in self.consumers.values())
        return doubled + self.receipts.doubled

    @property
    def out_of_order(self) -> int:
        """Effects that came before one of an earlier offset of their shard, over all consumers."""
        return sum(consumer["out_of_order"] for consumer in self.consumers.values())

    @property
    def arrived(self) -> int:
        """Records before checkpoints, and jobs done: grows as long as anything moves."""
        copies = (self.index, self.late_consumer)
        positions = [consumer["position"] for consumer in self.consumers.values()]
        return sum(positions) + sum(copy.position for copy in copies) + self.receipts.sent

    @property
    def settled(self) -> bool:
        """True if all checkpoints are past all committed records, and every job is done."""
        return (
            self.staged == self.sequenced
            and all(c["position"] == self.staged for c in self.consumers.values())
            and self.index.position == self.index.records
            and not self.receipts.lost
        )

    @property
    def equal(self) -> bool:
        """True if nothing is lost, doubled or out of order, and totals and index are right."""
        totals = {consumer["total_cents"] for consumer in self.consumers.values()}
        return (
            not (self.lost or self.doubled or self.out_of_order)
            and self.settled
            and totals == {self.canonical_cents}
            and not self.index.different
        )


def audit(connection: Connection, client: RedisClient) -> Audit:
    """Reads the log, then Postgres in one snapshot, which has everything in the log."""
    log = extents(client, pipeline.scope.namespace, rides.shard_names)
    with connection.transaction(), connection.cursor(row_factory=dict_row) as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        [counts] = cursor.execute(_COUNTS)
        consumers = {}
        for name in CONSUMERS:
            rows = [
                cursor.execute(query.encode(), {"consumer": name}).fetchone()
                for query in (_PROGRESS, _EFFECTS, _TOTALS[name])
            ]
            consumers[name] = {
                column: value for row in rows if row for column, value in row.items()
            }
        copies = [
            _copy(connection, name, query)
            for name, query in ((INDEX, _INDEX), (LATE_CONSUMER, _LATE_CONSUMER))
        ]
        [receipts] = connection.execute(_RECEIPTS, {"flooding": FLOODING})
    counts |= {name: counts[name] or 0.0 for name in ("p50_ms", "p99_ms")}
    published = sum(extent.tail for extent in log.values())
    return Audit(
        **counts,
        published=published,
        consumers=consumers,
        index=copies[0],
        late_consumer=copies[1],
        receipts=Receipts(*receipts),
    )


def _copy(connection: Connection, name: str, query: str) -> Copy:
    [(records, total, different)] = connection.execute(query.encode())
    [(applied, _, position)] = connection.execute(_PROGRESS, {"consumer": name})
    return Copy(records, applied, position, total, different)
