"""A verification from beginning to end.  Who reads and compares is an engine's business (``Examiner``)."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from penstock.channels.server import RedisClient
from penstock.database.connections import Connection, postgres_errors
from penstock.database.statements import DEFAULT_SCHEMA, statements
from penstock.journal import known_shards, missed_records
from penstock.records import ShardName
from penstock.verifying.bounds import Start, look
from penstock.verifying.comparing import Stretch
from penstock.verifying.findings import Fault, Found, Place, Stray, doubled, settled

FOUND_KEPT = 10_000
"""Most findings that are held in memory; beyond it they are counted."""


@dataclass(frozen=True)
class Examined:
    """What an engine found in the stretches.

    Attributes:
        records: How many records were compared.
        overtaken: How many come after a younger record of their key: of transactions that shared no lock.
        counts: How many offsets are concerned, by kind; strays left out.
        found: The first ``FOUND_KEPT`` of them; records of ``twice`` left out.
        strays: Entries that are not what belongs there, ``FOUND_KEPT`` at most.
        twice: Records that the journal has at several places, ``FOUND_KEPT`` at most.
    """

    records: int
    overtaken: int
    counts: Mapping[Fault, int]
    found: Sequence[Found]
    strays: Sequence[Stray]
    twice: Sequence[int]


class Examiner(Protocol):
    """What an engine does for a verification."""

    def examine(self, stretches: Sequence[Stretch]) -> Examined:
        """Compares every offset of the stretches."""


@dataclass(frozen=True)
class Verified:
    """What was looked at, and what was found.

    Attributes:
        records: How many records were compared.
        shards: In how many shards.
        unpublished: How many had an offset and were not in the log yet; no fault.
        overtaken: How many come after a younger record of their key, which transactions without a common lock may; no fault.
        counts: How many records or offsets are concerned, by kind.
        found: The first ``FOUND_KEPT`` of them, in the order of their places.
        seconds: How long it took.
    """

    records: int
    shards: int
    unpublished: int
    overtaken: int
    counts: Mapping[Fault, int]
    found: Sequence[Found]
    seconds: float

    @property
    def clean(self) -> bool:
        """Nothing was found."""
        return not self.counts


def verify(  # noqa: PLR0913  two servers, an engine, and what may be left out
    connection: Connection,
    client: RedisClient,
    examiner: Examiner,
    *,
    start: Start = None,
    schema: str = DEFAULT_SCHEMA,
    namespace: str = "penstock",
    declared: Iterable[ShardName] = (),
) -> Verified:
    """Compares staged records, journal, log and checkpoints.

    Args:
        connection: To the primary, in autocommit mode.
        client: Of the Redis that holds the log.
        examiner: The engine that reads and compares.
        start: Where to begin; checkpoints, ends and overlooked records are looked at in any case.
        schema: The Penstock schema.
        namespace: First part of the keys in Redis.
        declared: Shards to look at although Postgres may not know them.

    Raises:
        InvalidSetting: Postgres cannot read the time to start from.
        ServerUnavailable: Postgres or Redis does not answer.
        ForeignLog: The key of a shard holds another type.
        SchemaMissing: The tables are not there.
    """
    began = monotonic()
    shards = known_shards(connection, schema, declared)
    bounds = look(connection, client, shards, start, schema, namespace)
    examined = examiner.examine(bounds.stretches)
    overlooked = _overlooked(connection, schema)
    strays = [*bounds.strays, *examined.strays]
    asked = {*examined.twice, *(each.record for each in strays if each.record is not None)}
    places = _places(connection, schema, asked)
    besides = [*bounds.found, *settled(strays, places, examined.found), *overlooked]
    counts = Counter(examined.counts)
    for each in besides:
        counts[each.fault] += each.count
    found = sorted(
        [*besides, *examined.found, *doubled(examined.twice, places)],
        key=lambda each: (each.channel, each.shard, each.offset, each.fault, each.where),
    )
    return Verified(
        examined.records,
        len(shards),
        bounds.unpublished,
        examined.overtaken,
        {fault: counts[fault] for fault in Fault if counts[fault]},
        found[:FOUND_KEPT],
        monotonic() - began,
    )


def _places(connection: Connection, schema: str, records: set[int]) -> dict[int, list[Place]]:
    """Where the journal has some records."""
    found: dict[int, list[Place]] = {}
    if records:
        with postgres_errors("reading the journal"):
            rows = connection.execute(
                statements("penstock.verifying", schema)["places"], {"records": list(records)}
            ).fetchall()
        for record, *place in rows:
            found.setdefault(record, []).append((place[0], place[1], place[2]))
    return found


def _overlooked(connection: Connection, schema: str) -> list[Found]:
    return [
        Found(
            Fault.OVERLOOKED,
            "staged",
            each.shard.channel,
            each.shard.shard,
            0,
            each.count,
            each.first,
            f"{each.count:,} records were committed before the last tick and have no offset; the first is record {each.first}",
        )
        for each in missed_records(connection, schema)
    ]
