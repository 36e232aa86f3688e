# /// script
# requires-python = ">=3.11"
# dependencies = ["eventsourcing[postgres]==9.5.6", "psycopg[binary]>=3.2", "redis[hiredis]>=5.2"]
# ///
"""eventsourcing: an application's events are numbered in its notification log, and a relay follows that log.

An entry's id is its notification's number, so that the relay finds its position in the stream.  Events are recorded by
the library's function in Postgres, the faster of its two ways.  It does not take the table lock that keeps numbers from
becoming visible out of order.
"""

import json
import os
import sys
from datetime import datetime
from typing import Any

import harness
from eventsourcing.application import Application
from psycopg.conninfo import conninfo_to_dict

where = conninfo_to_dict(os.environ["PEER_DATABASE_URL"])
is_first = sys.argv[1] in {"drain", "latency"}
last: int | None = None
"""Number of the notification that was sent last; None until it has been read from the stream."""


def _application() -> Application[Any]:
    """The application; its first process creates the tables."""
    return Application(
        env={
            "PERSISTENCE_MODULE": "eventsourcing.postgres",
            "POSTGRES_DBNAME": str(where["dbname"]),
            "POSTGRES_HOST": str(where["host"]),
            "POSTGRES_PORT": str(where["port"]),
            "POSTGRES_USER": str(where["user"]),
            "POSTGRES_PASSWORD": str(where.get("password") or "peer"),
            "CREATE_TABLE": "y" if is_first else "n",
        }
    )


def relay(_connection: harness.Connection, client: Any) -> int:
    """Sends one section of the notification log."""
    global last  # noqa: PLW0603  the position of this process
    if last is None:
        newest = client.xrevrange(harness.STREAM, count=1)
        last = int(newest[0][0].partition(b"-")[0]) if newest else 0
    notifications = application.recorder.select_notifications(start=last + 1, limit=harness.BATCH)
    if notifications:
        with client.pipeline(transaction=False) as pipeline:
            for each in notifications:
                state = json.loads(each.state)
                at = datetime.fromisoformat(state["timestamp"])
                row = (each.id, state["key"], state["action"], state["object"], state["data"], at)
                pipeline.xadd(harness.STREAM, harness.make_fields(row), id=f"{each.id}-0")
            pipeline.execute()
        last = notifications[-1].id
    return len(notifications)


RECORD = """
SELECT es_insert_events_uuid(array_agg((
    gen_random_uuid(), 1, 'peer:Movement.Registered',
    convert_to(jsonb_build_object('timestamp', now(), 'key', key, 'action', action, 'object', object,
        'data', payload::text)::text, 'UTF8')
)::stored_event_uuid))
"""
"""What an application's ``save`` executes if Postgres' functions are enabled: a new aggregate for each record."""

if __name__ == "__main__":
    application = _application()
    harness.main(
        harness.Peer(
            create="SELECT",
            fill=f"SELECT count(*) FROM ({RECORD} FROM (SELECT *, data AS payload FROM penstock.staged_records ORDER BY id) r) s",
            stage=f"{RECORD} FROM (SELECT key, 'insert' AS action, 'movement' AS object, payload "
            "FROM unnest(%(keys)s::text[], %(payloads)s::text[]) AS r (key, payload)) r",
            relay=relay,
        )
    )
