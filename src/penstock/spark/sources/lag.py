"""How far a query is behind its log, from its progress.

PySpark takes no metrics from a Python data source (``metrics`` of a source in the progress is empty), but it reports the offsets.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Lag:
    """Records behind the newest offset, over the shards of one source, as Spark's Kafka source counts them.

    Attributes:
        min_offsets_behind_latest: Of the shard that is least behind.
        max_offsets_behind_latest: Of the shard that is most behind.
        avg_offsets_behind_latest: The average.
        total: The sum.
    """

    min_offsets_behind_latest: int
    max_offsets_behind_latest: int
    avg_offsets_behind_latest: float
    total: int


def lag(progress: Any) -> list[Lag]:
    """The lag of each source of a query that is ``penstock.log`` or ``penstock.staged``.

        query.lastProgress                                  a dictionary, or
        StreamingQueryListener.onQueryProgress(event)       event.progress

    Args:
        progress: Of a query.
    """
    given = progress if isinstance(progress, Mapping) else json.loads(progress.json)
    return [
        _make_lag(latest, end)
        for source in given.get("sources", ())
        if _is_ours(latest := _parse(source.get("latestOffset"))) and _is_ours(end := _parse(source.get("endOffset")))
    ]


def _make_lag(latest: Mapping[str, Any], end: Mapping[str, Any]) -> Lag:
    behind = [
        max(0, newest - end.get(channel, {}).get(shard, newest))
        for channel, shards in latest.items()
        for shard, newest in shards.items()
    ]
    return Lag(min(behind), max(behind), sum(behind) / len(behind), sum(behind))


def _parse(offset: Any) -> Any:
    return json.loads(offset) if isinstance(offset, str) else offset


def _is_ours(offset: Any) -> bool:
    return (
        isinstance(offset, Mapping)
        and bool(offset)
        and all(
            isinstance(shards, Mapping) and shards and all(isinstance(at, int) for at in shards.values())
            for shards in offset.values()
        )
    )
