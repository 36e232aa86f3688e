"""The cases of Spark: the engine in epochs beside the inline one, and the data sources."""

from penstock.bench.cases.spark import epochs, sources, tables
from penstock.bench.measuring import Case
from penstock.bench.plant import Plant, Scale


def cases(plant: Plant, scale: Scale) -> list[Case]:
    """All of them are slow: Spark takes seconds to start."""
    return [
        *epochs.cases(plant, scale),
        *sources.cases(plant, scale),
        *tables.cases(plant, scale),
    ]
