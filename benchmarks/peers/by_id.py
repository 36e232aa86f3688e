# /// script
# requires-python = ">=3.11"
# dependencies = ["psycopg[binary]>=3.2", "redis[hiredis]>=5.2"]
# ///
"""The streamer that articles on outboxes and Redis streams show: one process, rows in the order of their ids.

Each row is one XADD, and the range of ids that was sent is deleted.  A transaction that commits late has an id inside a
range that is already deleted: its record is lost.
"""

from typing import Any

import harness


def relay(connection: harness.Connection, client: Any) -> int:
    """One transaction, which sees one snapshot."""
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        rows = connection.execute(
            "SELECT id, key, action, object, payload::text, created_at FROM peer_staged ORDER BY id LIMIT %s",
            [harness.BATCH],
        ).fetchall()
        if rows:
            for row in rows:
                client.xadd(harness.STREAM, harness.make_fields(row))
            connection.execute("DELETE FROM peer_staged WHERE id <= %s", [rows[-1][0]])
    return len(rows)


if __name__ == "__main__":
    harness.main(
        harness.Peer(
            create="CREATE TABLE peer_staged (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
            "key text, action text, object text, payload jsonb, created_at timestamptz DEFAULT now())",
            fill="INSERT INTO peer_staged (key, action, object, payload) "
            "SELECT key, action, object, data FROM penstock.staged_records ORDER BY id",
            stage="INSERT INTO peer_staged (key, action, object, payload) SELECT key, 'insert', 'movement', payload "
            "FROM unnest(%(keys)s::text[], %(payloads)s::jsonb[]) AS r (key, payload)",
            relay=relay,
        )
    )
