"""Peers: other ways to do the same, each a script of its own in ``benchmarks/peers``, with its own dependencies.

A script says in its head what it needs (PEP 723); ``uv`` makes an environment for it.  It gets its work in the
environment, and prints one JSON object: the figures, or ``{"skipped": reason}``.

A peer that is an extension of Postgres runs on the distribution's Postgres, which has it.  That server has the settings
and the rows of the bench's own; it is started for one run and removed after it, so that it is beside nobody else's.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.bench.measuring import Contestant, NotMeasured, Sample
from penstock.bench.plant import POSTGRES_SETTINGS, Backlog, Plant, fill, prepare
from penstock.embedded import EmbeddedPostgres

DIRECTORY = Path(__file__).parents[3] / "benchmarks" / "peers"
SHARED = "harness.py"
"""What the scripts share: no peer."""

EXTENSIONS = "share/postgresql/{}/extension"
"""Where a distribution's Postgres of a release keeps its extensions, below ``/usr``."""

STREAMER = ("drain", "latency")
"""What a peer can be measured at that does not say it: ``works``, in its head."""

LONGEST_S = 300.0


def peers_of(work: str, plant: Plant, backlog: Backlog, **load: float) -> dict[str, Contestant]:
    """The peers of a case, by their names; none outside of a checkout."""
    return {
        script.stem.replace("_", "-"): lambda script=script: _run(  # type: ignore[misc]  # bound now
            script, work, plant, backlog, load
        )
        for script in sorted(DIRECTORY.glob("*.py"))
        if script.name != SHARED and work in needs_of(script).get("works", STREAMER)
    }


def _run(script: Path, work: str, plant: Plant, backlog: Backlog, load: dict[str, float]) -> Sample:
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if uv is None:
        raise NotMeasured("uv is not installed: it makes the environments of peers")
    needs = needs_of(script)
    backlog = replace(backlog, records=min(backlog.records, needs.get("records", backlog.records)))
    with _lying_ready(work, plant, backlog, needs) as database_url:
        return _told_by(
            [uv, "run", "--quiet", "--no-project", "--script", str(script), work],
            {
                "PEER_DATABASE_URL": database_url,
                "PEER_REDIS_URL": plant.redis_url,
                "PEER_RECORDS": str(backlog.records),
                "PEER_STREAMS": " ".join(backlog.streams),
                **{f"PEER_{name.upper()}": str(value) for name, value in load.items()},
            },
        )


def _told_by(command: list[str], work: dict[str, str]) -> Sample:
    peer = subprocess.Popen(  # noqa: S603  a script of ours
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **work},
    )
    with peer:
        try:
            told, complained = peer.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            raise NotMeasured(f"did not come to an end within {LONGEST_S:.0f} s") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(peer.pid, signal.SIGKILL)  # uv, and what it has started
    if peer.returncode != 0:
        raise NotMeasured((complained.strip().splitlines() or ["failed"])[-1][:200])
    answer = json.loads(told.strip().splitlines()[-1])
    if "skipped" in answer:
        raise NotMeasured(answer["skipped"])
    return {str(suffix): float(value) for suffix, value in answer.items()}


def needs_of(script: Path) -> dict[str, Any]:
    """What a peer needs besides packages: the table ``tool.penstock`` in its head; empty where there is none."""
    lines = script.read_text().splitlines()
    head = lines[lines.index("# /// script") + 1 : lines.index("# ///")]
    needs = tomllib.loads("\n".join(line.removeprefix("#") for line in head))
    found: dict[str, Any] = needs.get("tool", {}).get("penstock", {})
    return found


@contextmanager
def _lying_ready(work: str, plant: Plant, backlog: Backlog, needs: dict[str, Any]) -> Iterator[str]:
    """URL of a database in which the backlog is staged, in a Postgres that has what the peer needs; or is in the log."""
    if work == "consume":
        yield plant.registered(backlog)
        return
    if "extension" not in needs:
        with plant.copied(backlog) as database_url:
            yield database_url
        return
    binaries = binaries_with(needs["extension"], Path("/usr"))
    if binaries is None:
        raise NotMeasured(f"{needs['extension']} is not installed: apt-get install {needs['apt']}")
    plant.empty_redis()
    directory = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    server = EmbeddedPostgres(directory, settings=POSTGRES_SETTINGS, binaries=binaries)
    try:
        server.start()
        prepare(server.url, lambda connection: fill(connection, backlog))
        yield server.url
    finally:
        server.remove()


def binaries_with(extension: str, root: Path) -> Path | None:
    """Where the programs of the newest Postgres below ``root`` are that has the extension; None if none has it."""
    found = {
        int(binaries.parent.name): binaries
        for binaries in (root / "lib/postgresql").glob("[0-9]*/bin")
        if (root / EXTENSIONS.format(binaries.parent.name) / f"{extension}.control").exists()
    }
    return found[max(found)] if found else None
