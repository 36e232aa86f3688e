"""4 → 6 → 3 shards, under load, while everything is killed and deployed anew."""

import os
import signal
from pathlib import Path

import pytest

from fixtures.flow import Site
from fixtures.running_pipeline import Process, Processes
from fixtures.truth import TABLES, Load, await_everything
from penstock import Log
from penstock.testing import eventually

APPLICATION = """
import os
from datetime import timedelta
from fixtures.truth import declare_consumers
from penstock import Log, Pipeline

things = Log("things", shards=int(os.environ["SHARDS"]), keep=timedelta(seconds=2))
pipeline = Pipeline([things])
declare_consumers(pipeline, things, batch=100)
"""
ALL_SHARDS = Log("things", shards=4 + 6 + 3)
TIMEOUT_S = 120
ENGINES = ["inline", pytest.param("spark", marks=[pytest.mark.spark, pytest.mark.storm])]


def kill(process: Process) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("engine", ENGINES)
def test_shards_change_under_load_and_kills_and_deployments_in_both_orders(
    site: Site, engine: str, penstock_processes: Processes, tmp_path: Path
) -> None:
    """Guarantees 4 and 6: 4 → 6, the application first; 6 → 3, the workers first; nothing lost, doubled or out of order."""
    site.connection.execute(TABLES)
    (tmp_path / "shop.py").write_text(APPLICATION)

    def deploy_workers(shards: int) -> Process:
        penstock_processes.set("SHARDS", str(shards))
        return penstock_processes("run", "--engine", engine)

    def await_effects(first: int) -> None:
        """Of both consumers, in the shards of a generation."""
        query = "SELECT count(DISTINCT consumer) FROM public.effects WHERE shard >= %s"
        found = lambda: site.connection.execute(query, [first]).fetchone() == (2,)  # noqa: E731
        eventually(found, f"records flow in shards from {first} on", timeout_s=TIMEOUT_S)

    def reshard(shards: int) -> None:
        words = "channels", "reshard", "things", "--shards", str(shards), "--apply"
        assert penstock_processes(*words).wait(TIMEOUT_S) == 0

    running = deploy_workers(4)
    with Load(site.database_url, shards=4) as load:
        await_effects(0)
        reshard(6)
        load.shards = 6
        if engine == "inline":  # Spark takes long to start
            kill(running)
            running = deploy_workers(4)
        await_effects(4)

        kill(running)
        running = deploy_workers(6)
        load.go_on(1.0)
        reshard(3)
        load.go_on(0.3)
        kill(running)
        running = deploy_workers(3)
        await_effects(10)
        load.shards = 3
        load.go_on(0.5)

    found = await_everything(site.connection, site.client, ALL_SHARDS, at_home=False, timeout_s=TIMEOUT_S)
    assert found > 100
    kill(running)
