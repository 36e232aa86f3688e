"""A log of Penstock in a stream of NATS JetStream: in order by key, and once while NATS remembers what it has.

nats stream add orders --subjects 'orders.>' --dupe-window 2m
penstock run --app relay_to_nats:pipeline --engine inline
"""

import asyncio
import os
from collections import defaultdict
from collections.abc import Sequence

import nats
from nats.errors import Error
from nats.js import JetStreamContext
from sqlalchemy.ext.asyncio import AsyncSession

from penstock import Log, Pipeline, Record, Snooze

orders = Log("orders", shards=4)
pipeline = Pipeline([orders])


@pipeline.consumer(reads=orders)
async def to_nats(_session: AsyncSession, records: Sequence[Record]) -> None:
    """Sends a batch, and passes its records only when NATS has stored all of them; else the batch is sent again.

    NATS recognises a message that it has by its id, which is the place of the record.  A connection for each batch takes
    some milliseconds, and leaves nothing to keep alive; for many small batches, keep one for each event loop.
    """
    try:
        async with await nats.connect(
            os.environ.get("NATS_URL", "nats://127.0.0.1:4222"), max_reconnect_attempts=1
        ) as client:
            stream = client.jetstream()
            await asyncio.gather(*(send(stream, of_key) for of_key in group_by_key(records).values()))
    except (Error, OSError) as error:
        raise Snooze(
            "5s", f"NATS: {type(error).__name__}"
        ) from error  # which is no attempt: no record is dead-lettered for it


def group_by_key(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of each key, in their order."""
    groups = defaultdict[str, list[Record]](list)
    for record in records:
        groups[record.key].append(record)
    return groups


async def send(stream: JetStreamContext, records: Sequence[Record]) -> None:
    """Sends the records of a key one after another: what is sent again after a refusal must not come behind what was taken."""
    for record in records:
        await stream.publish(f"orders.{record.action}", record.data_json.encode(), headers=name(record))


def name(record: Record) -> dict[str, str]:
    """The headers of a message."""
    return {"Nats-Msg-Id": str(record.place), "penstock-key": record.key}
