"""Peers: other ways to do the same, each a script of its own in ``benchmarks/peers``, with its own dependencies.

A script says in its head what it needs (PEP 723); ``uv`` makes an environment for it.  It gets its work in the
environment, and prints one JSON object: the figures, or ``{"skipped": reason}``.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from penstock.bench.measuring import Contestant, NotMeasured, Sample
from penstock.bench.plant import Backlog, Plant

DIRECTORY = Path(__file__).parents[3] / "benchmarks" / "peers"
SHARED = "harness.py"
"""What the scripts share: no peer."""

LONGEST_S = 300.0


def peers_of(work: str, plant: Plant, backlog: Backlog, **load: float) -> dict[str, Contestant]:
    """The peers of a case, by their names; none outside of a checkout."""
    return {
        script.stem.replace("_", "-"): lambda script=script: _run(  # type: ignore[misc]  # bound now
            script, work, plant, backlog, load
        )
        for script in sorted(DIRECTORY.glob("*.py"))
        if script.name != SHARED
    }


def _run(script: Path, work: str, plant: Plant, backlog: Backlog, load: dict[str, float]) -> Sample:
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if uv is None:
        raise NotMeasured("uv is not installed: it makes the environments of peers")
    database_url = plant.staged(backlog)
    peer = subprocess.Popen(  # noqa: S603  a script of ours
        [uv, "run", "--quiet", "--no-project", "--script", str(script), work],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            "PEER_DATABASE_URL": database_url,
            "PEER_REDIS_URL": plant.redis_url,
            "PEER_RECORDS": str(backlog.records),
            **{f"PEER_{name.upper()}": str(value) for name, value in load.items()},
        },
    )
    with peer:
        try:
            told, complained = peer.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            raise NotMeasured(f"did not come to an end within {LONGEST_S:.0f} s") from None
        finally:
            if peer.returncode is None:
                os.killpg(peer.pid, signal.SIGKILL)  # uv, and what it has started
    if peer.returncode != 0:
        raise NotMeasured((complained.strip().splitlines() or ["failed"])[-1][:200])
    answer = json.loads(told.strip().splitlines()[-1])
    if "skipped" in answer:
        raise NotMeasured(answer["skipped"])
    return {str(suffix): float(value) for suffix, value in answer.items()}
