# /// script
# requires-python = ">=3.11"
# dependencies = ["psycopg[binary]>=3.2", "redis[hiredis]>=5.2"]
# ///
"""A relay with SKIP LOCKED, as most people write it: take pending rows, send them, delete them, commit.

Several of them may run; then the order is gone.  A crash between the sending and the commit sends again.
"""

from typing import Any

import harness

TAKE = """
SELECT id, key, action, object, payload::text, created_at
FROM peer_outbox
ORDER BY id
LIMIT %s
FOR UPDATE SKIP LOCKED
"""


def relay(connection: harness.Connection, client: Any) -> int:
    """One transaction."""
    with connection.transaction():
        rows = connection.execute(TAKE, [harness.BATCH]).fetchall()
        if rows:
            with client.pipeline(transaction=False) as pipeline:
                for row in rows:
                    pipeline.xadd(harness.STREAM, harness.fields(row))
                pipeline.execute()
            connection.execute(
                "DELETE FROM peer_outbox WHERE id = ANY (%s)", [[row[0] for row in rows]]
            )
    return len(rows)


if __name__ == "__main__":
    harness.main(
        harness.Peer(
            create="DROP TABLE IF EXISTS peer_outbox; CREATE TABLE peer_outbox (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
            "key text, action text, object text, payload jsonb, created_at timestamptz DEFAULT now())",
            fill="INSERT INTO peer_outbox (key, action, object, payload) "
            "SELECT key, action, object, data FROM penstock.staged_records ORDER BY id",
            stage="INSERT INTO peer_outbox (key, action, object, payload) SELECT key, 'insert', 'movement', payload "
            "FROM unnest(%(keys)s::text[], %(payloads)s::jsonb[]) AS r (key, payload)",
            relay=relay,
        )
    )
