"""Waits until consumers are up to date: a sensor for Airflow, and a gate before ``dbt build``.

python fresh.py ride_totals && dbt build

    PythonSensor(task_id="rides_are_fresh", python_callable=is_fresh, op_args=["ride_totals"])
"""

import json
import subprocess
import sys
import time

INTERVAL_S, TIMEOUT_S = 10.0, 1800.0


def is_fresh(*consumers: str, most_behind_s: float = 60.0) -> bool:
    """True if each consumer has applied all that is older than a minute; False also while a server does not answer."""
    status = subprocess.run(["penstock", "status", "--json"], capture_output=True, text=True, check=False)  # noqa: S607
    if not status.stdout:
        return False
    found = json.loads(status.stdout)
    staged_s = {each["channel"]: max(shard["staged_s"] for shard in each["shards"]) for each in found["channels"]}
    behind_s = {  # of what is staged and not sequenced, too: the streamer may be what is down
        each["consumer"]: max(staged_s[each["channel"]], *(shard["lag_s"] for shard in each["shards"]))
        for each in found["consumers"]
        if not any(shard["halted"] for shard in each["shards"])
    }
    return all(behind_s.get(consumer, float("inf")) <= most_behind_s for consumer in consumers)


if __name__ == "__main__":
    until = time.monotonic() + TIMEOUT_S
    while not is_fresh(*sys.argv[1:]):
        if time.monotonic() > until:
            sys.exit(f"{', '.join(sys.argv[1:])}: not up to date after {TIMEOUT_S:.0f} s")
        time.sleep(INTERVAL_S)
