"""How many commands a job costs Redis: they are most of what Redis does for it."""

from collections.abc import Callable

import pytest

from fixtures.queues import Probe
from penstock.channels.queue import NewMessage

JOBS = 100

COMMANDS = {
    "one tenant": (1, {"write": 1.5, "take": 2.5, "settle": 0.5}),
    "a tenant for each job": (JOBS, {"write": 2.5, "take": 4.5, "settle": 0.5}),
}
"""Number of tenants, and the most commands for a job of 100 in a call: a body is appended and read for each, and the line
of its tenant is read, if that is not known.  Records, accounts, times and leases are read and written together."""


@pytest.mark.parametrize("name", COMMANDS)
def test_a_job_costs_few_commands(name: str, probe: Probe) -> None:
    tenants, most = COMMANDS[name]
    probe.is_frozen = True
    probe.write("first", "x")  # a new queue is looked through
    probe.done(probe.take())
    jobs = [NewMessage(f"tenant-{number % tenants}", "x") for number in range(JOBS)]

    def count(call: Callable[[], object]) -> float:
        probe.client.config_resetstat()
        call()
        return sum(int(command["calls"]) for command in probe.client.info("commandstats").values()) / JOBS

    costs = {"write": count(lambda: probe.run(probe.shard.write(jobs)))}
    taken = []
    costs["take"] = count(lambda: taken.extend(probe.take(JOBS)))
    assert len(taken) == JOBS
    costs["settle"] = count(lambda: probe.done(taken))
    assert {script: cost for script, cost in costs.items() if cost > most[script]} == {}
