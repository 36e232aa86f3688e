"""Cases on Spark: the engine in epochs beside the inline one, and the data sources."""

from benchmarks.backlogs import Scale
from benchmarks.cases.spark import epochs, sources, starting, tables
from benchmarks.measuring import Case
from benchmarks.servers import BenchServers


def make_cases(servers: BenchServers, scale: Scale) -> list[Case]:
    """All of them are slow: Spark takes seconds to start."""
    return [
        *starting.make_cases(servers, scale),
        *epochs.make_cases(servers, scale),
        *sources.make_cases(servers, scale),
        *tables.make_cases(servers, scale),
    ]
