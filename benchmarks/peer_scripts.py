"""Runs the peers: other ways to do the same work, each a script in ``peers/`` with its own dependencies.

A script declares its dependencies in its head (PEP 723), and ``uv`` creates an environment for it.  It gets its work in
environment variables, and prints one JSON object: its figures, or ``{"skipped": reason}``.

A peer that is an extension of Postgres runs on the distribution's Postgres, which has that extension.  This server has
the settings and the rows of the benchmark's own.  It is started for one run and removed after it, so that no other
contestant shares the machine with it.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import processor
from benchmarks.backlogs import Backlog, fill
from benchmarks.measuring import Contestant, Figures, Marked, NotMeasured
from benchmarks.servers import POSTGRES_SETTINGS, BenchServers, prepare
from penstock.embedded import EmbeddedPostgres

DIRECTORY = Path(__file__).with_name("peers")
SHARED = "harness.py"
"""Code that the scripts share; not a peer."""

EXTENSIONS = "share/postgresql/{}/extension"
"""Where the distribution's Postgres keeps its extensions, by release, below ``/usr``."""

STREAMER = ("drain", "latency")
"""Works of a peer whose head has no ``works``."""

TIMEOUT_S = 300.0


def find_peers(work: str, servers: BenchServers, backlog: Backlog, **load: float) -> dict[str, Contestant]:
    """The peers that can do this work, by name; with ``costs=True`` the figures are of processor time."""
    return {
        script.stem.replace("_", "-"): partial(_run, script, work, servers, backlog, load)
        for script in sorted(DIRECTORY.glob("*.py"))
        if script.name != SHARED and work in parse_needs(script).get("works", STREAMER)
    }


def _run(script: Path, work: str, servers: BenchServers, backlog: Backlog, load: dict[str, float]) -> Figures:
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if uv is None:
        raise NotMeasured("uv is not installed; it creates the environments of the peers")
    needs = parse_needs(script)
    backlog = replace(backlog, records=min(backlog.records, needs.get("records", backlog.records)))
    with _prepare_database(work, servers, backlog, needs) as database_url:
        return _run_command(
            [uv, "run", "--quiet", "--no-project", "--script", str(script), work],
            {
                "PEER_DATABASE_URL": database_url,
                "PEER_REDIS_URL": servers.redis_url,
                "PEER_RECORDS": str(backlog.records),
                "PEER_STREAMS": " ".join(backlog.streams),
                "PEER_METER": shlex.join([sys.executable, processor.__file__]),
                **{f"PEER_{name.upper()}": str(value) for name, value in load.items()},
            },
        )


def _run_command(command: list[str], work: dict[str, str]) -> Figures:
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"} | work
    peer = subprocess.Popen(  # noqa: S603  a script of this repository
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment
    )
    with peer:
        try:
            output, errors = peer.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise NotMeasured(f"did not finish within {TIMEOUT_S:.0f} s") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(peer.pid, signal.SIGKILL)  # uv, and every process that it has started
    if peer.returncode != 0:
        raise NotMeasured((errors.strip().splitlines() or ["failed"])[-1][:200])
    answer = json.loads(output.strip().splitlines()[-1])
    if "skipped" in answer:
        raise NotMeasured(answer["skipped"])
    mark = answer.pop("mark", None)
    figures = {str(suffix): float(value) for suffix, value in answer.items()}
    return figures if mark is None else Marked(figures, mark)


def parse_needs(script: Path) -> dict[str, Any]:
    """What a peer needs besides packages: the table ``tool.penstock`` in its head, or an empty one."""
    lines = script.read_text().splitlines()
    head = lines[lines.index("# /// script") + 1 : lines.index("# ///")]
    metadata = tomllib.loads("\n".join(line.removeprefix("#") for line in head))
    needs: dict[str, Any] = metadata.get("tool", {}).get("penstock", {})
    return needs


@contextmanager
def _prepare_database(work: str, servers: BenchServers, backlog: Backlog, needs: dict[str, Any]) -> Iterator[str]:
    """URL of a database with the backlog staged, or published if the peer consumes; with the extension that it needs."""
    if work == "consume":
        yield servers.publish_and_register(backlog)
        return
    if "extension" not in needs:
        with servers.copy(backlog) as database_url:
            yield database_url
        return
    binaries = find_binaries_with(needs["extension"], Path("/usr"))
    if binaries is None:
        raise NotMeasured(f"{needs['extension']} is not installed: apt-get install {needs['apt']}")
    servers.empty_redis()
    directory = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    server = EmbeddedPostgres(directory, settings=POSTGRES_SETTINGS, binaries=binaries)
    try:
        server.start()
        prepare(server.url, lambda connection: fill(connection, backlog))
        yield server.url
    finally:
        server.remove()


def find_binaries_with(extension: str, root: Path) -> Path | None:
    """The programs of the newest Postgres below ``root`` that has the extension; None if there is none."""
    found = {
        int(binaries.parent.name): binaries
        for binaries in (root / "lib/postgresql").glob("[0-9]*/bin")
        if (root / EXTENSIONS.format(binaries.parent.name) / f"{extension}.control").exists()
    }
    return found[max(found)] if found else None
