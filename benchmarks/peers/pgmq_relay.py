# /// script
# requires-python = ">=3.11"
# dependencies = ["pgmq==1.1.4", "psycopg[binary]>=3.2", "redis[hiredis]>=5.2"]
# ///
"""A queue of pgmq, and a relay from it into a stream: read with a visibility timeout, send, delete by ids."""

from typing import Any

import harness
from pgmq.install import get_embedded_install_sql

VISIBLE_AGAIN_S = 30


def relay(connection: harness.Connection, client: Any) -> int:
    """Two transactions, as in its documentation: after a crash between them, messages are delivered again."""
    rows = connection.execute(
        "SELECT msg_id, message->>'account', message::text, enqueued_at FROM pgmq.read('outbox', %s, %s)",
        [VISIBLE_AGAIN_S, harness.BATCH],
    ).fetchall()
    if rows:
        with client.pipeline(transaction=False) as pipeline:
            for message_id, account, payload, at in rows:
                row = (message_id, account, "insert", "movement", payload, at)
                pipeline.xadd(harness.STREAM, harness.make_fields(row))
            pipeline.execute()
        connection.execute("SELECT pgmq.delete('outbox', %s::bigint[])", [[row[0] for row in rows]])
    return len(rows)


if __name__ == "__main__":
    harness.main(
        harness.Peer(
            create=f"CREATE SCHEMA pgmq; {get_embedded_install_sql()}; SELECT pgmq.create('outbox')",
            fill="SELECT pgmq.send_batch('outbox', array_agg(data ORDER BY id)) FROM penstock.staged_records "
            "GROUP BY (id - 1) / 1000 ORDER BY min(id)",
            stage="SELECT pgmq.send_batch('outbox', %(payloads)s::jsonb[])",
            relay=relay,
        )
    )
