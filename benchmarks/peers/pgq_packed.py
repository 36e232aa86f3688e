# /// script
# requires-python = ">=3.11"
# dependencies = ["psycopg[binary]>=3.2", "redis[hiredis]>=5.2"]
#
# [tool.penstock]
# extension = "pgq"
# apt = "postgresql-15-pgq3 pgqd"
# ///
"""The relay from PgQ without redis-py's pipeline: hiredis packs the commands, and replies are read one by one."""

from typing import Any

import harness
import pgq


def send(client: Any, rows: pgq.EventRows) -> None:
    """One round trip."""
    connection = client.connection_pool.get_connection()
    try:
        connection.send_packed_command(connection.pack_commands(map(_make_command, rows)))
        for _ in rows:
            connection.read_response()  # an error is raised
    finally:
        client.connection_pool.release(connection)


def _make_command(row: Any) -> tuple[Any, ...]:
    pairs = harness.make_fields(row).items()
    return ("XADD", harness.STREAM, "*", *(word for pair in pairs for word in pair))


if __name__ == "__main__":
    harness.main(pgq.make_peer(send))
