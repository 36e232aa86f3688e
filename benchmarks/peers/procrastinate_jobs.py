# /// script
# requires-python = ">=3.11"
# dependencies = ["procrastinate==3.10.0", "psycopg[binary]>=3.2"]
#
# [tool.penstock]
# records = 5_000
# works = ["jobs"]
# ///
"""procrastinate: jobs that do nothing, worked off by one process that runs eight at a time."""

import asyncio
import json
import os
from time import perf_counter, process_time

import procrastinate
from procrastinate.schema import SchemaManager

COUNT = int(os.environ["PEER_RECORDS"])
CONCURRENCY = 8

connector = procrastinate.PsycopgConnector(
    conninfo=os.environ["PEER_DATABASE_URL"], min_size=4, max_size=CONCURRENCY + 4
)
app = procrastinate.App(connector=connector)
done = 0


@app.task(name="nothing", queue="bench")  # type: ignore[untyped-decorator]  # not installed where types are checked
async def nothing(payload: str) -> None:  # noqa: ARG001  the job's content
    """A job."""
    global done  # noqa: PLW0603  counted by one event loop
    done += 1


async def _main() -> None:
    async with app.open_async():
        await connector.execute_query_async(SchemaManager.get_schema().replace("%", "%%"))
        for first in range(0, COUNT, 1000):
            await nothing.batch_defer_async(*({"payload": "x" * 200} for _ in range(first, min(first + 1000, COUNT))))
        began, processor = perf_counter(), process_time()
        await app.run_worker_async(
            queues=["bench"], concurrency=CONCURRENCY, delete_jobs="always", wait=False, install_signal_handlers=False
        )
        took, busy = perf_counter() - began, process_time() - processor
    if done != COUNT:
        raise SystemExit(f"{done} of {COUNT} jobs were done")
    print(json.dumps({"": COUNT / took, "-cpu": busy / COUNT * 1e6}))


if __name__ == "__main__":
    asyncio.run(_main())
