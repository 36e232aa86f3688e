# /// script
# requires-python = ">=3.11"
# dependencies = ["saq[hiredis]==0.26.4", "redis[hiredis]>=5.2", "typing-extensions>=4.12"]
#
# [tool.penstock]
# records = 5_000
# works = ["jobs"]
# ///
"""saq: jobs that do nothing, worked off by one process that runs 100 at a time."""

import asyncio
import json
import os
from time import perf_counter, process_time
from typing import Any

from redis.asyncio import Redis
from saq import Worker
from saq.queue.redis import RedisQueue

COUNT = int(os.environ["PEER_RECORDS"])
CONCURRENCY = 100
done = 0


async def nothing(_: Any, **__: Any) -> None:
    """A job."""
    global done  # noqa: PLW0603  counted by one event loop
    done += 1


async def _main() -> None:
    queue = RedisQueue(Redis.from_url(os.environ["PEER_REDIS_URL"]))  # saq's own from_url takes no socket
    await queue.connect()
    for first in range(0, COUNT, CONCURRENCY):
        await asyncio.gather(*(queue.enqueue("nothing", payload="x" * 200) for _ in range(first, first + CONCURRENCY)))
    worker = Worker(queue, functions=[nothing], concurrency=CONCURRENCY)
    began, processor = perf_counter(), process_time()
    running = asyncio.create_task(worker.start())
    while done < COUNT:  # noqa: ASYNC110  as dear as an event, once in 10 ms
        await asyncio.sleep(0.01)
    took, busy = perf_counter() - began, process_time() - processor
    print(json.dumps({"": COUNT / took, "-cpu": busy / COUNT * 1e6}))
    await worker.stop()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(_main())
