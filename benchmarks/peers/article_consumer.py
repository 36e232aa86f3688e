# /// script
# requires-python = ">=3.11"
# dependencies = ["psycopg[binary]>=3.2", "redis[hiredis]>=5.2"]
# [tool.penstock]
# works = ["consume"]
# ///
"""The consumer that articles on outboxes and Redis streams show: a batch and the checkpoint in one transaction.

It reads on from the entry that it saw last.  Nothing prevents a second consumer of the same name from doing the same, and
nothing detects entries that were evicted before it read them.  It works in the database of ``consume-bulk``, not in a
copy, so that it drops the table of an earlier round.
"""

import json
from collections import defaultdict
from typing import Any

import harness

CREATE = """
DROP TABLE IF EXISTS peer_checkpoints;
CREATE TABLE peer_checkpoints (stream text PRIMARY KEY, last_entry text NOT NULL)
"""

ADD = """
INSERT INTO bench.totals AS t (account, movements, cents)
SELECT * FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[])
ON CONFLICT (account) DO UPDATE SET movements = t.movements + excluded.movements, cents = t.cents + excluded.cents
"""

SAVE = """
INSERT INTO peer_checkpoints VALUES (%s, %s)
ON CONFLICT (stream) DO UPDATE SET last_entry = excluded.last_entry
"""


def run_once(connection: harness.Connection, client: Any, stream: str) -> int:
    """One transaction."""
    with connection.transaction():
        row = connection.execute("SELECT last_entry FROM peer_checkpoints WHERE stream = %s", [stream]).fetchone()
        entries = client.xrange(stream, f"({row[0]}" if row else "-", "+", count=harness.BATCH)
        if not entries:
            return 0
        movements: dict[int, int] = defaultdict(int)
        cents: dict[int, int] = defaultdict(int)
        for _, fields in entries:
            data = json.loads(fields[b"data"])
            movements[data["account"]] += 1
            cents[data["account"]] += data["cents"]
        accounts = sorted(movements)
        columns = ([of[account] for account in accounts] for of in (movements, cents))
        connection.execute(ADD, [accounts, *columns])
        connection.execute(SAVE, [stream, entries[-1][0].decode()])
    return len(entries)


if __name__ == "__main__":
    harness.consume(CREATE, run_once)
