"""A stream's position in Postgres, for which retention waits, and its lag.

Spark's checkpoint decides what a query reads; this is a copy, at most one micro-batch behind.  It
decides only where a query begins that has a name and no checkpoint.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.database.statements import name_shards
from penstock.database.store import Store
from penstock.errors import Fenced
from penstock.records import Shard, ShardName
from penstock.spark.releases import HAS_ADMISSION_CONTROL
from penstock.spark.sources.ranges import Positions
from penstock.spark.sources.source_options import Options
from penstock.spark.sources.task_process import postgres

PREFIX = "spark:"
"""Part of the registered name; handlers' names have no colon, so a query and a handler never share
a checkpoint."""


class RegisteredPosition:
    """Position of one query, which moves it; a second query of the same name fences it off."""

    def __init__(self, options: Options) -> None:
        assert options.consumer is not None
        self._options = options
        self._name = PREFIX + options.consumer
        self._known: Positions | None = None

    def read(self) -> Positions:
        """Returns the registered positions; empty for a new name."""
        doing, values = f"reading the position of {self._name}", {"consumer": self._name}
        rows = self._store.rows("read_positions", values, doing=doing)
        return {ShardName(channel, Shard(shard)): offset for channel, shard, offset in rows}

    def follow(self, positions: Positions) -> None:
        """Registers the positions, or moves the registered ones to them."""
        if positions == self._known:
            return
        if self._known is None:
            self._register(positions)
        else:
            self._move(
                self._known, {s: position for s, position in positions.items() if s in self._known}
            )
            if fresh := {s: position for s, position in positions.items() if s not in self._known}:
                self._register(fresh)
        self._known = dict(positions)

    def _register(self, positions: Positions) -> None:
        store = self._store
        with store.transaction(f"registering {self._name}"):
            # Retention takes the same lock, so it does not remove what the position has just
            # pointed at.
            for channel in sorted({shard.channel for shard in positions}):
                store.execute("lock_channel", {"channel": channel})
            store.execute("register_positions", self._rows(positions))

    def _move(self, previous: Positions, positions: Positions) -> None:
        moves = {
            shard: position for shard, position in positions.items() if position != previous[shard]
        }
        changed = self._store.execute(
            "move_positions",
            {**self._rows(moves), "expected": [previous[shard] for shard in moves]},
            doing=f"moving the position of {self._name}",
        ).rowcount
        if changed != len(moves):
            raise Fenced(
                f"{self._options.source}: another query moves the position of consumer "
                f"{self._options.consumer!r}, or it was "
                "retired. Give each query a name of its own"
            )

    def _rows(self, positions: Positions) -> dict[str, object]:
        return {
            "consumer": self._name,
            **name_shards(positions),
            "positions": list(positions.values()),
        }

    @property
    def _store(self) -> Store:
        return Store(postgres(self._options.database()), self._options.scope)


@dataclass(frozen=True, slots=True)
class QueryLag:
    """Records behind the newest offset of one source's shards, as Spark's Kafka source counts.

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


def lag(progress: Any) -> list[QueryLag]:
    """Returns the lag of each source of a query that is ``penstock.log`` or ``penstock.staged``.

    Before Spark 4.2 there is none.  PySpark takes no metrics from a Python data source, but it
    reports the offsets: since 4.2, the newest one, too.

        query.lastProgress                                  a dictionary, or
        StreamingQueryListener.onQueryProgress(event)       event.progress

    Args:
        progress: Of a query.
    """
    if not HAS_ADMISSION_CONTROL:
        return []
    report = progress if isinstance(progress, Mapping) else json.loads(progress.json)
    return [
        _make_lag(latest, end)
        for source in report.get("sources", ())
        if _is_ours(latest := _parse(source.get("latestOffset")))
        and _is_ours(end := _parse(source.get("endOffset")))
    ]


def _make_lag(latest: Mapping[str, Any], end: Mapping[str, Any]) -> QueryLag:
    behind = [
        max(0, newest - end.get(channel, {}).get(shard, newest))
        for channel, shards in latest.items()
        for shard, newest in shards.items()
    ]
    return QueryLag(min(behind), max(behind), sum(behind) / len(behind), sum(behind))


def _parse(offset: Any) -> Any:
    return json.loads(offset) if isinstance(offset, str) else offset


def _is_ours(offset: Any) -> bool:
    return (
        isinstance(offset, Mapping)
        and bool(offset)
        and all(
            isinstance(shards, Mapping)
            and shards
            and all(isinstance(position, int) for position in shards.values())
            for shards in offset.values()
        )
    )
