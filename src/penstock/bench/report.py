"""What a run found: the machine, the versions, the outcomes; one object."""

import os
import platform
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from penstock.bench.measuring import Outcome
from penstock.bench.plant import Plant

PACKAGES = ("penstock", "psycopg", "sqlalchemy", "redis", "hiredis", "pyspark", "pyarrow")


@dataclass(frozen=True)
class Report:
    """All of a run.

    Attributes:
        machine: Processor, cores, memory, system; and its load before the run, which says whether it was alone.
        versions: Of Python, the servers and the libraries.
        cases: What was measured.
        skipped: Cases that were not, and why.
        failed: Those of them that ended with an error that nobody expected.
    """

    machine: dict[str, object]
    versions: dict[str, str]
    cases: list[Outcome] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    return {
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": os.cpu_count(),
        "memory_kb": int((_field("/proc/meminfo", "MemTotal") or "0").split()[0]),
        "system": platform.platform(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def versions(plant: Plant) -> dict[str, str]:
    """What was measured: asks the servers."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    with plant.postgres(plant.database("versions")) as connection:
        [(found["postgres"],)] = connection.execute("SHOW server_version").fetchall()
    with plant.redis() as client:
        server = client.info("server")
    found[str(server.get("server_name", "redis"))] = str(
        server.get("valkey_version", server["redis_version"])
    )
    return found


def _field(path: str, name: str) -> str | None:
    """A line ``name : value`` of one of the system's files; None where there is none."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = (line.partition(":")[2].strip() for line in lines if line.startswith(name))
    return next(found, None)
