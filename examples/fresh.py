"""Waits until consumers are up to date: a sensor for Airflow, and a gate before ``dbt build``.

python fresh.py ride_totals && dbt build

    PythonSensor(task_id="rides_are_fresh", python_callable=is_fresh, op_args=["ride_totals"])
"""

import json
import subprocess
import sys
import time
from collections import defaultdict

INTERVAL_S, TIMEOUT_S = 10.0, 1800.0


def is_fresh(*consumers: str, most_behind_s: float = 60.0) -> bool:
    """True if each consumer has applied all that is older than a minute; False also while a server does not answer.

    Of a consumer of several sources, ask in each source's database.
    """
    status = subprocess.run(["penstock", "status", "--json"], capture_output=True, text=True, check=False)  # noqa: S607
    if not status.stdout:
        return False
    found = json.loads(status.stdout)
    staged_s = {each["channel"]: max(shard["staged_s"] for shard in each["shards"]) for each in found["channels"]}
    behind_s = defaultdict[str, list[float]](list)
    for each in found["consumers"]:
        # What is staged and not sequenced counts, too: the streamer may be what is down.  Of another source's it is not known.
        behind_s[each["consumer"]].append(staged_s.get(each["channel"], float("inf")))
        for shard in each["shards"]:
            behind_s[each["consumer"]].append(float("inf") if shard["halted"] else shard["lag_s"])
    return all(max(behind_s[consumer], default=float("inf")) <= most_behind_s for consumer in consumers)


if __name__ == "__main__":
    until = time.monotonic() + TIMEOUT_S
    while not is_fresh(*sys.argv[1:]):
        if time.monotonic() > until:
            sys.exit(f"{', '.join(sys.argv[1:])}: not up to date after {TIMEOUT_S:.0f} s")
        time.sleep(INTERVAL_S)
