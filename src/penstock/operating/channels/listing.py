"""The registered channels, and what they hold."""

from dataclasses import dataclass

from penstock.database.connections import Connection
from penstock.database.errors import postgres_errors
from penstock.database.registry import registered_channels
from penstock.database.statements import statements
from penstock.errors import Unknown
from penstock.pipeline import Pipeline
from penstock.records import DEFAULT_SCOPE, Scope


@dataclass(frozen=True, slots=True)
class ListedChannel:
    """A registered channel.

    Attributes:
        channel: Its name.
        kind: ``log``, ``ick`` or ``queue``.
        shards: Number of its shards.
        keep_s: How long records stay after every consumer has passed them, in seconds.
        entries: Of a log: ``plain``, or how its entries are compressed.
        records: Records that the journal has.
        consumers: Names of its consumers.
        declared: Whether the pipeline declares it; None without a pipeline.
    """

    channel: str
    kind: str
    shards: int
    keep_s: float
    entries: str
    records: int
    consumers: tuple[str, ...]
    declared: bool | None


def list_channels(
    connection: Connection, pipeline: Pipeline | None = None, *, scope: Scope = DEFAULT_SCOPE
) -> list[ListedChannel]:
    """The registered channels, by name.

    Args:
        connection: In autocommit mode.
        pipeline: Marks the channels that it does not declare.
        scope: Gives the schema, if there is no pipeline.

    Raises:
        ServerUnavailable: Postgres does not answer.
        SchemaMissing: The tables are not there.
    """
    schema = scope.schema if pipeline is None else pipeline.scope.schema
    with postgres_errors("reading the channels"):
        rows = connection.execute(statements("penstock.operating.channels", schema)["list_channels"]).fetchall()
    declared = None if pipeline is None else pipeline.channels.keys()
    return [
        ListedChannel(
            *(name, kind, shards, keep_s, entries, records),
            consumers=tuple(consumers),
            declared=None if declared is None else name in declared,
        )
        for name, kind, shards, keep_s, entries, records, consumers in rows
    ]


def unknown_channel(connection: Connection, scope: Scope, name: str) -> Unknown:
    """The error for a name that is not registered: it lists those that are, and says if it was retired."""
    sql = statements("penstock.operating.channels", scope.schema)
    retired = connection.execute(sql["retired_channel"], {"channel": name}).fetchone()
    now = "" if retired is None else "; it was retired"
    names = ", ".join(sorted(registered_channels(connection, scope)))
    return Unknown(
        f"no channel {name!r} is registered{now}; there are: "
        + (names or "none. A channel is registered by its streamer: penstock stream")
    )
