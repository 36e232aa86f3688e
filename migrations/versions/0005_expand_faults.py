"""Records that get no offset, and shards that are stopped.

Revision ID: penstock_0005
Revises: penstock_0004
Create Date: 2026-11-22
"""

from alembic import context, op

revision = "penstock_0005"
down_revision = "penstock_0004"
branch_labels = None
depends_on = None

ISOLATED_RECORDS = """
-- Staged rows that no tick can give an offset, as long as they have this xid.  is_early: its transaction has not begun.
CREATE TABLE {schema}.isolated_records (
    record_id   bigint      PRIMARY KEY,
    number      bigint      GENERATED ALWAYS AS IDENTITY UNIQUE,
    xid         xid8        NOT NULL,
    channel     text        NOT NULL,
    shard       integer     NOT NULL,
    reason      text        NOT NULL,
    is_early    boolean     NOT NULL DEFAULT false,
    isolated_at timestamptz NOT NULL DEFAULT clock_timestamp()
)
"""

STOPPED_SHARDS = """
-- Shards that the streamer leaves out, and why.
CREATE TABLE {schema}.stopped_shards (
    channel    text        NOT NULL,
    shard      integer     NOT NULL,
    reason     text        NOT NULL,
    stopped_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (channel, shard)
)
"""


def _schema() -> str:
    """The Penstock schema: ``-x penstock_schema=…``, ``penstock_schema`` in the configuration, or ``penstock``."""
    given = context.get_x_argument(as_dictionary=True).get("penstock_schema")
    configured = context.config.get_main_option("penstock_schema")
    return str(given or configured or "penstock")


def upgrade() -> None:
    quoted = op.get_context().dialect.identifier_preparer.quote_identifier(_schema())
    for table in (ISOLATED_RECORDS, STOPPED_SHARDS):
        op.execute(table.replace("{schema}", quoted))


def downgrade() -> None:
    quote = op.get_context().dialect.identifier_preparer.quote_identifier
    for table in ("stopped_shards", "isolated_records"):
        op.execute(f"DROP TABLE {quote(_schema())}.{table}")
