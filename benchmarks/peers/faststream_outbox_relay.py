# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "faststream-outbox[asyncpg]==0.19.0",
#     "psycopg[binary]>=3.2",
#     "redis[hiredis]>=5.2",
# ]
#
# [tool.penstock]
# records = 20_000
# ///
"""faststream-outbox: its subscriber leases rows and deletes them in batches, and its handler sends each of them.

The settings are those that its page on performance recommends for many rows and a handler that may be repeated; with
asyncpg a commit wakes it.  Several workers send at the same time, so that the order is lost.
"""

import asyncio
import os
from typing import Any

import harness
import redis.asyncio
from faststream_outbox import OutboxBroker, make_outbox_table, outbox_autovacuum_ddl
from faststream_outbox.annotations import OutboxMessage
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import URL, MetaData
from sqlalchemy.dialects.postgresql import dialect
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.schema import CreateIndex, CreateTable, ExecutableDDLElement

WORKERS = 4
LEASED = 1000
DELETED = 100

OUTBOX = make_outbox_table(MetaData())


def _make_ddl() -> str:
    ddl: tuple[ExecutableDDLElement, ...] = (CreateTable(OUTBOX), *(CreateIndex(each) for each in OUTBOX.indexes))
    statements = (str(each.compile(dialect=dialect())) for each in ddl)  # type: ignore[no-untyped-call]  # SQLAlchemy does not type it
    return ";".join((*statements, outbox_autovacuum_ddl()))


def _make_engine_url() -> URL:
    where = conninfo_to_dict(os.environ["PEER_DATABASE_URL"])
    return URL.create(
        "postgresql+asyncpg",
        username=str(where["user"]),
        database=str(where["dbname"]),
        query={"host": str(where["host"]), "port": str(where["port"])},
    )


async def _work() -> None:
    client = redis.asyncio.Redis.from_url(os.environ["PEER_REDIS_URL"])
    engine = create_async_engine(_make_engine_url(), pool_size=WORKERS + 2)
    broker = OutboxBroker(engine, outbox_table=OUTBOX)

    async def keep_body(message: OutboxMessage) -> Any:
        return message.body

    @broker.subscriber(  # type: ignore[untyped-decorator]  # not installed where types are checked
        "outbox",
        max_workers=WORKERS,
        fetch_batch_size=LEASED,
        terminal_flush_batch_size=DELETED,
        min_fetch_interval=0.01,
        decoder=keep_body,
    )
    async def relay(payload: bytes, message: OutboxMessage) -> None:
        row = message.raw_message
        headers = message.headers
        entry = (row.id, headers["key"], headers["action"], headers["object"], payload, row.created_at)
        await client.xadd(harness.STREAM, harness.make_fields(entry))
        worker.moved += 1

    await broker.start()
    await asyncio.Event().wait()


worker = harness.LibraryWorker(lambda: asyncio.run(_work()))

INSERT = """
INSERT INTO outbox (queue, payload, headers)
SELECT 'outbox', convert_to(payload::text, 'UTF8'), jsonb_build_object('key', key, 'action', action, 'object', object,
    'content-type', 'application/json', 'correlation_id', gen_random_uuid())
"""
"""What ``broker.publish`` writes."""

if __name__ == "__main__":
    harness.main(
        harness.Peer(
            create=_make_ddl(),
            fill=f"{INSERT} FROM (SELECT *, data AS payload FROM penstock.staged_records ORDER BY id) r",
            stage=f"{INSERT} FROM (SELECT key, 'insert' AS action, 'movement' AS object, payload "
            "FROM unnest(%(keys)s::text[], %(payloads)s::text[]) AS r (key, payload)) r "
            "RETURNING pg_notify('outbox_outbox', queue)",
            relay=worker.relay,
        )
    )
