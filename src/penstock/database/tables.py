"""Table that applications stage into, for SQLAlchemy; names of all tables, domains and functions.

A test compares them with the migrations. A test compares them with the migrations.
"""

from functools import cache

from sqlalchemy import BigInteger, Column, DateTime, Identity, Integer, MetaData, Table, Text, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import UserDefinedType

TABLE_NAMES = (
    "actions",
    "alembic_version",
    "barriers",
    "cancellations",
    "channels",
    "checkpoints",
    "dead_letters",
    "epochs",
    "former_consumers",
    "isolated_records",
    "job_groups",
    "job_notes",
    "job_results",
    "journal",
    "pauses",
    "queue_limits",
    "reconciliations",
    "repairs",
    "replays",
    "retired_channels",
    "schedules",
    "staged_records",
    "stopped_shards",
    "ticks",
    "troubles",
    "unique_names",
    "waiting_records",
)
"""The tables of the newest revision."""

DOMAINS = (
    "staged_action",
    "staged_channel",
    "staged_created_at",
    "staged_key",
    "staged_object",
    "staged_shard",
)
"""Types of the columns of staged records, with their limits."""

FUNCTIONS = {
    "journal_bounds": "(text, integer)",
    "journal_entries": "(text, integer, bigint, bigint)",
    "finish_records": "(text, bigint[], bigint[])",
    "cancel_jobs": "(text, bigint[], text, text)",
    "check_channel": "(text, text, integer)",
    "move_jobs": "(text, bigint[], timestamptz)",
    "stage_record": "(text, text, text, text, text, jsonb, jsonb)",
    "stage": "(text, text, text, text, jsonb, jsonb)",
    "stage_job": (
        "(text, text, jsonb, interval, timestamptz, timestamptz, text, text, text, text, interval, "
        "text, text, text, jsonb)"
    ),
    "mark_dirty": "(text, text)",
    "cancel_job": "(text, bigint, text, text)",
}
"""Penstock's functions, with the types of their arguments."""


class Xid8(UserDefinedType[str]):
    """Postgres' ``xid8``: a transaction id that does not wrap around."""

    cache_ok = True

    def get_col_spec(self, **_: object) -> str:
        """Returns the type's name in DDL."""
        return "xid8"


@cache
def staged_records(schema: str) -> Table:
    """Returns the table that applications insert into."""
    return Table(
        "staged_records",
        MetaData(schema=schema),
        Column("id", BigInteger, Identity(always=True, cache=1), primary_key=True),
        Column("xid", Xid8, nullable=False, server_default=text("pg_current_xact_id()")),
        Column("channel", Text, nullable=False),
        Column("shard", Integer, nullable=False),
        Column("key", Text, nullable=False),
        Column("action", Text, nullable=False),
        Column("object", Text, nullable=False),
        Column("data", JSONB, nullable=False),
        Column("headers", JSONB),
        Column(
            "created_at",
            DateTime(timezone=True),
            nullable=False,
            server_default=text("clock_timestamp()"),
        ),
    )
