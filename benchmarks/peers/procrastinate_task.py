# /// script
# requires-python = ">=3.11"
# dependencies = ["procrastinate==3.10.0", "psycopg[binary]>=3.2", "redis[hiredis]>=5.2"]
#
# [tool.penstock]
# records = 5_000
# ///
"""procrastinate: a job is deferred in the application's transaction, and the task sends its record.

A worker runs several jobs at the same time, and fetches and finishes each by its own statements; the order is lost.
Finished jobs are deleted.
"""

import asyncio
import json
import os
from datetime import datetime
from typing import Any

import harness
import procrastinate
import redis.asyncio
from procrastinate.schema import SchemaManager

CONCURRENCY = 8

client = redis.asyncio.Redis.from_url(os.environ["PEER_REDIS_URL"])
connector = procrastinate.PsycopgConnector(
    conninfo=os.environ["PEER_DATABASE_URL"], min_size=4, max_size=CONCURRENCY + 4
)
app = procrastinate.App(connector=connector)


@app.task(name="send", queue="outbox", pass_context=True)  # type: ignore[untyped-decorator]  # not installed where types are checked
async def send(context: Any, key: str, action: str, object: str, data: Any, at: str) -> None:  # noqa: A002
    """Sends a record."""
    row = (context.job.id, key, action, object, json.dumps(data), datetime.fromisoformat(at))
    await client.xadd(harness.STREAM, harness.make_fields(row))
    worker.moved += 1


async def _work() -> None:
    async with app.open_async():
        await app.run_worker_async(
            queues=["outbox"], concurrency=CONCURRENCY, delete_jobs="always", install_signal_handlers=False
        )


worker = harness.LibraryWorker(lambda: asyncio.run(_work()))

DEFER = """
SELECT procrastinate_defer_jobs_v1(array_agg((
    'outbox', 'send', 0, NULL, NULL,
    jsonb_build_object('key', key, 'action', action, 'object', object, 'data', payload, 'at', now()), NULL
)::procrastinate_job_to_defer_v1))
"""

if __name__ == "__main__":
    harness.main(
        harness.Peer(
            create=SchemaManager.get_schema(),
            fill=f"{DEFER} FROM (SELECT *, data AS payload FROM penstock.staged_records ORDER BY id) r",
            stage=f"{DEFER} FROM (SELECT key, 'insert' AS action, 'movement' AS object, payload "
            "FROM unnest(%(keys)s::text[], %(payloads)s::jsonb[]) AS r (key, payload)) r",
            relay=worker.relay,
        )
    )
