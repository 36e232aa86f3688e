# /// script
# requires-python = ">=3.11"
# dependencies = ["arq==0.26.3", "redis[hiredis]>=5.0,<6"]
#
# [tool.penstock]
# records = 5_000
# works = ["jobs"]
# ///
"""arq: jobs that do nothing, worked off by one process that runs 100 at a time."""

import asyncio
import json
import os
from time import perf_counter, process_time
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from arq import create_pool
from arq.connections import RedisSettings
from arq.worker import Worker

COUNT = int(os.environ["PEER_RECORDS"])
CONCURRENCY = 100


async def nothing(_: Any, __: str) -> None:
    """A job."""


def _settings() -> RedisSettings:
    url = urlsplit(os.environ["PEER_REDIS_URL"])
    if url.scheme == "unix":
        database = int(parse_qs(url.query).get("db", ["0"])[0])
        return RedisSettings(unix_socket_path=unquote(url.path), database=database)
    return RedisSettings.from_dsn(os.environ["PEER_REDIS_URL"])


async def _main() -> None:
    pool = await create_pool(_settings())
    for first in range(0, COUNT, CONCURRENCY):
        await asyncio.gather(*(pool.enqueue_job("nothing", "x" * 200) for _ in range(first, first + CONCURRENCY)))
    worker = Worker(
        [nothing],
        redis_pool=pool,
        burst=True,
        max_jobs=CONCURRENCY,
        keep_result=0,
        poll_delay=0.001,
        handle_signals=False,
    )
    began, processor = perf_counter(), process_time()
    await worker.main()
    took, busy = perf_counter() - began, process_time() - processor
    if worker.jobs_complete != COUNT:
        raise SystemExit(f"{worker.jobs_complete} of {COUNT} jobs were done")
    print(json.dumps({"": COUNT / took, "-cpu": busy / COUNT * 1e6}))
    await worker.close()


if __name__ == "__main__":
    asyncio.run(_main())
