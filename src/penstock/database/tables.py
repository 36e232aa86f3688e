"""Penstock's tables for SQLAlchemy: staging inserts through them.  A test compares them with the migrations."""

from functools import cache

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    ForeignKey,
    Identity,
    Index,
    Integer,
    Interval,
    MetaData,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import UserDefinedType


class Xid8(UserDefinedType[str]):
    """Postgres' ``xid8``: a transaction id that does not wrap around."""

    cache_ok = True

    def get_col_spec(self, **_: object) -> str:
        """The type's name in DDL."""
        return "xid8"


class PgSnapshot(UserDefinedType[str]):
    """Postgres' ``pg_snapshot``: which transactions a statement can see."""

    cache_ok = True

    def get_col_spec(self, **_: object) -> str:
        """The type's name in DDL."""
        return "pg_snapshot"


STAGED_LIMITS = {
    "channel": """length(channel) BETWEEN 1 AND 63 AND channel COLLATE "C" !~ '[^a-z0-9_.@-]'""",
    "shard": "shard BETWEEN 0 AND 1023",
    "key": "length(key) BETWEEN 1 AND 1024",
    "action": "length(action) BETWEEN 1 AND 255",
    "object": "length(object) BETWEEN 1 AND 255",
    "created_at": "created_at >= '1900-01-01 00:00:00+00' AND created_at < '2200-01-01 00:00:00+00'",
}
"""What the server accepts in a staged record, by column: the limits of ``stage``, for INSERTs written by hand."""

_NOW = text("clock_timestamp()")
_WHEN = DateTime(timezone=True)
_IS_DUE = text("NOT is_given AND tenant IS NULL")
_IS_REFUSED = text("NOT is_given AND tenant IS NOT NULL")


@cache
def metadata(schema: str) -> MetaData:
    """All of Penstock's tables in ``schema``."""
    tables = MetaData(schema=schema)
    _declare_streaming(tables)
    _declare_channels(tables)
    _declare_faults(tables)
    _declare_consuming(tables)
    _declare_replays(tables)
    _declare_reconciling(tables)
    return tables


def _declare_streaming(tables: MetaData) -> None:
    """Tables of the streamer, from staged records to the journal."""
    Table(
        "staged_records",
        tables,
        Column("id", BigInteger, Identity(always=True, cache=1), primary_key=True),
        Column("xid", Xid8, nullable=False, server_default=text("pg_current_xact_id()")),
        Column("channel", Text, nullable=False),
        Column("shard", Integer, nullable=False),
        Column("key", Text, nullable=False),
        Column("action", Text, nullable=False),
        Column("object", Text, nullable=False),
        Column("data", JSONB, nullable=False),
        Column("headers", JSONB),
        Column("created_at", _WHEN, nullable=False, server_default=_NOW),
        Index("staged_records_xid", "xid"),
        *(CheckConstraint(rule, name=f"staged_records_{column}") for column, rule in STAGED_LIMITS.items()),
    )
    Table(
        "epochs",
        tables,
        Column("epoch", Integer, primary_key=True, autoincrement=False),
        Column("system_identifier", Text, nullable=False),
        Column("timeline", Integer, nullable=False),
        Column("reason", Text, nullable=False),
        Column("opened_at", _WHEN, nullable=False, server_default=_NOW),
    )
    Table(
        "ticks",
        tables,
        Column("tick", BigInteger, primary_key=True, autoincrement=False),
        Column("snapshot", PgSnapshot, nullable=False),
        Column("epoch", Integer, nullable=False),
        Column("at", _WHEN, nullable=False, server_default=_NOW),
        Column("by_generation", Boolean, nullable=False, server_default=text("false")),
    )
    Table(
        "journal",
        tables,
        Column("channel", Text, primary_key=True),
        Column("shard", Integer, primary_key=True, autoincrement=False),
        Column("first_offset", BigInteger, primary_key=True, autoincrement=False),
        Column("last_offset", BigInteger, nullable=False),
        Column("record_ids", ARRAY(BigInteger), nullable=False),
        Column("epoch", Integer, nullable=False),
        Column("created_at", _WHEN, nullable=False, server_default=_NOW),
        CheckConstraint("cardinality(record_ids) = last_offset - first_offset + 1", name="journal_is_dense"),
    )


def _declare_channels(tables: MetaData) -> None:
    """Tables of channels, and of the records of queues that wait."""
    Table(
        "channels",
        tables,
        Column("channel", Text, primary_key=True),
        Column("kind", Text, nullable=False),
        Column("shards", Integer, nullable=False),
        Column("keep", Interval, nullable=False),
        Column("registered_at", _WHEN, nullable=False, server_default=_NOW),
        Column("streams", Integer),
        Column("hand", Integer),
        Column("entries", Text, nullable=False, server_default=text("'plain'")),
        Column("generations", ARRAY(Integer), nullable=False, server_default=text("'{}'")),
        Column("first_shard", Integer, nullable=False, server_default=text("0")),
        Column("redis_memory", BigInteger),
        Column("limits", JSONB, nullable=False, server_default=text("'{}'")),
    )
    Table(
        "retired_channels",
        tables,
        Column("channel", Text, primary_key=True),
        Column("retired_at", _WHEN, nullable=False, server_default=_NOW),
    )
    Table(
        "unique_names",
        tables,
        Column("channel", Text, primary_key=True),
        Column("name", Text, primary_key=True),
        Column("record_id", BigInteger, nullable=False),
        Column("shard", Integer, nullable=False),
        Column("is_queued", Boolean, nullable=False),
        Column("ends", _WHEN),
    )
    Table(
        "waiting_records",
        tables,
        Column("record_id", BigInteger, primary_key=True, autoincrement=False),
        Column("channel", Text, nullable=False),
        Column("shard", Integer, nullable=False),
        Column("tenant", Text),
        Column("due", _WHEN, nullable=False, server_default=_NOW),
        Column("is_given", Boolean, nullable=False, server_default=text("false")),
        Index("waiting_records_due", "channel", "shard", "due", postgresql_where=_IS_DUE),
        Index("waiting_records_tenants", "channel", "shard", "tenant", "record_id", postgresql_where=_IS_REFUSED),
        Index("waiting_records_given", "channel", "shard", "record_id", postgresql_where=text("is_given")),
    )


def _declare_faults(tables: MetaData) -> None:
    """Tables of what the streamer leaves out."""
    Table(
        "isolated_records",
        tables,
        Column("record_id", BigInteger, primary_key=True, autoincrement=False),
        Column("number", BigInteger, Identity(always=True), nullable=False, unique=True),
        Column("xid", Xid8, nullable=False),
        Column("channel", Text, nullable=False),
        Column("shard", Integer, nullable=False),
        Column("reason", Text, nullable=False),
        Column("is_early", Boolean, nullable=False, server_default=text("false")),
        Column("isolated_at", _WHEN, nullable=False, server_default=_NOW),
    )
    Table(
        "stopped_shards",
        tables,
        Column("channel", Text, primary_key=True),
        Column("shard", Integer, primary_key=True, autoincrement=False),
        Column("reason", Text, nullable=False),
        Column("stopped_at", _WHEN, nullable=False, server_default=_NOW),
    )


def _declare_consuming(tables: MetaData) -> None:
    """Tables of consumers."""
    Table(
        "checkpoints",
        tables,
        Column("consumer", Text, primary_key=True),
        Column("channel", Text, primary_key=True),
        Column("shard", Integer, primary_key=True, autoincrement=False),
        Column("offset", BigInteger, nullable=False),
        Column("epoch", Integer, nullable=False),
        Column("applied", BigInteger, nullable=False, server_default=text("0")),
        Column("skipped", BigInteger, nullable=False, server_default=text("0")),
        Column("dead", BigInteger, nullable=False, server_default=text("0")),
        Column("halted", Text),
        Column("waiting", Text),
        Column("updated_at", _WHEN, nullable=False, server_default=_NOW),
        Column("dead_in_a_row", BigInteger, nullable=False, server_default=text("0")),
        Column("applied_at_dead", BigInteger),
        Column("source", Text),
        Column("record_id", BigInteger),
        Column("staged_us", BigInteger),
        Column("reported_by", Text),
    )
    Table(
        "former_consumers",
        tables,
        Column("consumer", Text, primary_key=True),
        Column("successor", Text, nullable=False),
        Column("ended_at", _WHEN, nullable=False, server_default=_NOW),
    )
    Table(
        "dead_letters",
        tables,
        Column("consumer", Text, primary_key=True),
        Column("channel", Text, primary_key=True),
        Column("shard", Integer, primary_key=True, autoincrement=False),
        Column("offset", BigInteger, primary_key=True, autoincrement=False),
        Column("record_id", BigInteger, nullable=False),
        Column("key", Text, nullable=False),
        Column("action", Text, nullable=False),
        Column("object", Text, nullable=False),
        Column("data", JSONB, nullable=False),
        Column("headers", JSONB),
        Column("staged_at", _WHEN, nullable=False),
        Column("reason", Text, nullable=False),
        Column("attempts", Integer, nullable=False),
        Column("parked", Boolean, nullable=False, server_default=text("false")),
        Column("failed_at", _WHEN, nullable=False, server_default=_NOW),
        Column("later_shard", Integer),
        Column("later_offset", BigInteger),
        Index("dead_letters_key", "consumer", "channel", "shard", text("hashtextextended(key, 0)")),
    )


def _declare_replays(tables: MetaData) -> None:
    """The table of replays into other channels."""
    Table(
        "replays",
        tables,
        Column("replay", BigInteger, Identity(always=True), primary_key=True),
        Column("request", Text, nullable=False),
        Column("channel", Text, nullable=False),
        Column("target", Text, nullable=False),
        Column("key", Text),
        Column("since", _WHEN),
        Column("until", _WHEN),
        Column("shards", ARRAY(Integer), nullable=False),
        Column("firsts", ARRAY(BigInteger), nullable=False),
        Column("lasts", ARRAY(BigInteger), nullable=False),
        Column("staged", BigInteger, nullable=False, server_default=text("0")),
        Column("begun_at", _WHEN, nullable=False, server_default=_NOW),
        Column("ended_at", _WHEN),
    )


def _declare_reconciling(tables: MetaData) -> None:
    """Tables of reconcile: barriers, runs and repairs."""
    Table(
        "barriers",
        tables,
        Column("consumer", Text, primary_key=True),
        Column("channel", Text, primary_key=True),
        Column("shard", Integer, primary_key=True, autoincrement=False),
        Column("offset", BigInteger, nullable=False),
        Column("run", Text, primary_key=True),
        Column("expires_at", _WHEN, nullable=False),
    )
    Table(
        "reconciliations",
        tables,
        Column("id", BigInteger, Identity(always=True), primary_key=True),
        Column("name", Text, nullable=False),
        Column("consumer", Text, nullable=False),
        Column("intent", Text, nullable=False),
        Column("tick", BigInteger),
        Column("compared", BigInteger),
        Column("missing", BigInteger),
        Column("surplus", BigInteger),
        Column("different", BigInteger),
        Column("repaired", BigInteger, nullable=False, server_default=text("0")),
        Column("paused_s", Double),
        Column("outcome", Text, nullable=False, server_default=text("'running'")),
        Column("begun_at", _WHEN, nullable=False, server_default=_NOW),
        Column("ended_at", _WHEN),
        Column("engine", Text),
        Column("remaining", ARRAY(Text)),
        Index("reconciliations_name", "name", "id"),
    )
    Table(
        "repairs",
        tables,
        Column(
            "reconciliation",
            BigInteger,
            ForeignKey(f"{tables.schema}.reconciliations.id", ondelete="CASCADE"),
            primary_key=True,
        ),
        Column("number", BigInteger, Identity(always=True), primary_key=True),
        Column("key", JSONB, nullable=False),
        Column("kind", Text, nullable=False),
        Column("before", JSONB),
        Column("after", JSONB),
        Column("repaired_at", _WHEN, nullable=False, server_default=_NOW),
    )


def staged_records(schema: str) -> Table:
    """The table that applications insert into."""
    return metadata(schema).tables[f"{schema}.staged_records"]
