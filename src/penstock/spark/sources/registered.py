"""A stream's position in Postgres: retention waits for it, and ``penstock status`` shows its lag.

Spark's checkpoint decides what a query reads; this is a copy, at most one micro-batch behind.  It decides only where a query
begins that has a name and no checkpoint.
"""

from penstock.database.connections import WorkerConnection
from penstock.database.errors import postgres_errors
from penstock.database.statements import statements
from penstock.errors import Fenced
from penstock.records import Shard, ShardName
from penstock.spark.sources.connections import postgres
from penstock.spark.sources.options import Options
from penstock.spark.sources.ranges import Positions

PREFIX = "spark:"
"""Part of the registered name; no name of a handler has a colon, so that a query and a handler never share a checkpoint."""


class RegisteredPosition:
    """The position of one query, which moves it; a second query of the same name fences it off."""

    def __init__(self, options: Options) -> None:
        assert options.consumer is not None
        self._options = options
        self._name = PREFIX + options.consumer
        self._sql = statements("penstock.spark.sources", options.scope.schema)
        self._known: Positions | None = None

    def read(self) -> Positions:
        """The registered positions; empty for a new name.

        Raises:
            ServerUnavailable: Postgres does not answer.
        """
        with postgres_errors(f"reading the position of {self._name}"):
            rows = self._connection.execute(self._sql["read_positions"], {"consumer": self._name}).fetchall()
        return {ShardName(channel, Shard(shard)): offset for channel, shard, offset in rows}

    def follow(self, positions: Positions) -> None:
        """Registers the positions, or moves what is registered to them.

        Raises:
            Fenced: Another query has the same name.
            ServerUnavailable: Postgres does not answer.
        """
        if positions == self._known:
            return
        if self._known is None:
            self._register(positions)
        else:
            self._move(self._known, {s: at for s, at in positions.items() if s in self._known})
            if fresh := {s: at for s, at in positions.items() if s not in self._known}:
                self._register(fresh)
        self._known = dict(positions)

    def _register(self, positions: Positions) -> None:
        lock = statements("penstock.database", self._options.scope.schema)["lock_channel"]
        connection = self._connection
        with postgres_errors(f"registering {self._name}"), connection.transaction():
            # Retention takes the same lock, so it does not remove what the position has just pointed at.
            for channel in sorted({shard.channel for shard in positions}):
                connection.execute(lock, {"channel": channel})
            connection.execute(self._sql["register_positions"], self._rows(positions))

    def _move(self, before: Positions, positions: Positions) -> None:
        moved = {shard: at for shard, at in positions.items() if at != before[shard]}
        with postgres_errors(f"moving the position of {self._name}"):
            changed = self._connection.execute(
                self._sql["move_positions"], {**self._rows(moved), "expected": [before[shard] for shard in moved]}
            ).rowcount
        if changed != len(moved):
            raise Fenced(
                f"{self._options.source}: another query moves the position of consumer {self._options.consumer!r}, or it was "
                "retired. Give each query a name of its own"
            )

    def _rows(self, positions: Positions) -> dict[str, object]:
        return {
            "consumer": self._name,
            "channels": [shard.channel for shard in positions],
            "shards": [int(shard.shard) for shard in positions],
            "positions": list(positions.values()),
        }

    @property
    def _connection(self) -> WorkerConnection:
        return postgres(self._options.database())
