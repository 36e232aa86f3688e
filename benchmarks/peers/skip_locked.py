# /// script
# requires-python = ">=3.11"
# dependencies = ["psycopg[binary]>=3.2", "redis[hiredis]>=5.2"]
# ///
"""A relay with SKIP LOCKED, as most people write it: take pending rows, send one after another, delete them, commit.

Several relays may run, but then the order is lost.  After a crash between sending and commit, the rows are sent again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import harness

TAKE = """
SELECT id, key, action, object, payload::text, created_at
FROM peer_outbox
ORDER BY id
LIMIT %s
FOR UPDATE SKIP LOCKED
"""

OutboxRows = Sequence[Sequence[Any]]


def make_peer(send: Callable[[Any, OutboxRows], None]) -> harness.Peer:
    """The peer that sends its rows by ``send``."""

    def relay(connection: harness.Connection, client: Any) -> int:
        """One transaction."""
        with connection.transaction():
            rows = connection.execute(TAKE, [harness.BATCH]).fetchall()
            if rows:
                send(client, rows)
                connection.execute("DELETE FROM peer_outbox WHERE id = ANY (%s)", [[row[0] for row in rows]])
        return len(rows)

    return harness.Peer(
        create="CREATE TABLE peer_outbox (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
        "key text, action text, object text, payload jsonb, created_at timestamptz DEFAULT now())",
        fill="INSERT INTO peer_outbox (key, action, object, payload) "
        "SELECT key, action, object, data FROM penstock.staged_records ORDER BY id",
        stage="INSERT INTO peer_outbox (key, action, object, payload) SELECT key, 'insert', 'movement', payload "
        "FROM unnest(%(keys)s::text[], %(payloads)s::jsonb[]) AS r (key, payload)",
        relay=relay,
    )


def send_one_by_one(client: Any, rows: OutboxRows) -> None:
    """One round trip per row."""
    for row in rows:
        client.xadd(harness.STREAM, harness.make_fields(row))


if __name__ == "__main__":
    harness.main(make_peer(send_one_by_one))
