# /// script
# requires-python = ">=3.11"
# dependencies = ["dramatiq[redis]==1.18.0", "redis[hiredis]>=5.2,<7"]
#
# [tool.penstock]
# records = 10_000
# works = ["jobs"]
# ///
"""dramatiq: jobs that do nothing, worked off by eight threads of one process."""

import json
import os
import threading
from time import perf_counter, process_time, sleep

import dramatiq
from dramatiq.brokers.redis import RedisBroker

COUNT = int(os.environ["PEER_RECORDS"])
THREADS = 8

broker = RedisBroker(url=os.environ["PEER_REDIS_URL"])
dramatiq.set_broker(broker)
lock = threading.Lock()
done = 0


@dramatiq.actor  # type: ignore[untyped-decorator]  # not installed where types are checked
def nothing(_: str) -> None:
    """A job."""
    global done  # noqa: PLW0603  counted under a lock
    with lock:
        done += 1


if __name__ == "__main__":
    for _ in range(COUNT):
        nothing.send("x" * 200)
    worker = dramatiq.Worker(broker, worker_threads=THREADS)
    began, processor = perf_counter(), process_time()
    worker.start()
    while done < COUNT:
        sleep(0.01)
    took, busy = perf_counter() - began, process_time() - processor
    print(json.dumps({"": COUNT / took, "-cpu": busy / COUNT * 1e6}))
    worker.stop()
