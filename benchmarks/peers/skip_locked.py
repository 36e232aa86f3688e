# /// script
# requires-python = ">=3.11"
# dependencies = ["psycopg[binary]>=3.2", "redis[hiredis]>=5.2"]
# ///
"""A relay with SKIP LOCKED, as most people write it: take pending rows, send one after the other, delete them, commit.

Several of them may run; then the order is gone.  A crash between the sending and the commit sends again.
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

Rows = Sequence[Sequence[Any]]


def relay_by(send: Callable[[Any, Rows], None]) -> harness.Peer:
    """The peer whose rows go by ``send``."""

    def relay(connection: harness.Connection, client: Any) -> int:
        """One transaction."""
        with connection.transaction():
            rows = connection.execute(TAKE, [harness.BATCH]).fetchall()
            if rows:
                send(client, rows)
                connection.execute(
                    "DELETE FROM peer_outbox WHERE id = ANY (%s)", [[row[0] for row in rows]]
                )
        return len(rows)

    return harness.Peer(
        create="DROP TABLE IF EXISTS peer_outbox; CREATE TABLE peer_outbox (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
        "key text, action text, object text, payload jsonb, created_at timestamptz DEFAULT now())",
        fill="INSERT INTO peer_outbox (key, action, object, payload) "
        "SELECT key, action, object, data FROM penstock.staged_records ORDER BY id",
        stage="INSERT INTO peer_outbox (key, action, object, payload) SELECT key, 'insert', 'movement', payload "
        "FROM unnest(%(keys)s::text[], %(payloads)s::jsonb[]) AS r (key, payload)",
        relay=relay,
    )


def one_by_one(client: Any, rows: Rows) -> None:
    """A round trip a row."""
    for row in rows:
        client.xadd(harness.STREAM, harness.fields(row))


if __name__ == "__main__":
    harness.main(relay_by(one_by_one))
