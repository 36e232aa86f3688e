"""Reads a range, for every engine, apart from the expected records themselves."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import redis

from penstock.channels.commands import RedisClient
from penstock.channels.log import NAMES, extents, is_batch, parse_batch
from penstock.channels.routing import log_keys
from penstock.channels.server import connect_redis, redis_errors
from penstock.database.connections import Connection
from penstock.database.driver_errors import postgres_errors
from penstock.database.statements import statements
from penstock.errors import ForeignLog
from penstock.records import Scope, ShardName
from penstock.verifying.comparing import Entry, VerificationRange

OFFSETS_A_READ = 2_000
BYTES_A_READ = 16 * 1024 * 1024
"""Most payload bytes of one read, as Postgres stores them, unless a single record is larger."""


def divide(wanted: VerificationRange, most: int) -> Iterator[VerificationRange]:
    """Ranges of at most ``most`` offsets."""
    for after in range(wanted.after, wanted.until, most):
        until = min(wanted.until, after + most)
        yield replace(wanted, after=after, until=until)


def connect_unparsed(url: str) -> RedisClient:
    """A client that returns stream entries as they are on the wire, without a dictionary for each."""
    client: Any = connect_redis(url)
    # On a Cluster, the nodes' clients have built the dictionaries before this callback runs.
    on_a_cluster = isinstance(client, redis.RedisCluster)
    client.set_response_callback("XRANGE", _flatten if on_a_cluster else lambda reply, **_options: reply)
    made: RedisClient = client
    return made


def _flatten(reply: Any, **_options: Any) -> Any:
    return [(entry, [part for pair in fields.items() for part in pair]) for entry, fields in reply]


def read_entries(client: RedisClient, scope: Scope, wanted: VerificationRange) -> list[Entry]:
    """The entries of the log up to the last published offset, including any with other ids; of a batch, one for each record."""
    key = log_keys(scope.namespace, wanted.shard).stream
    until = min(wanted.until, wanted.published)
    if until <= wanted.after:
        return []
    with redis_errors(f"reading {wanted.shard}"):
        entries: list[Entry] = client.execute_command("XRANGE", key, f"{wanted.after + 1}-0", str(until))
        # A batch that begins in the range may end beyond it.
        beyond: list[Entry] = client.execute_command("XRANGE", key, str(until + 1), "+", "COUNT", 1)
    entries += [entry for entry in beyond if is_batch(entry[1])]
    return [each for entry in entries for each in _unpack(wanted.shard, entry, range(wanted.after + 1, until + 1))]


def _unpack(shard: ShardName, entry: Entry, offsets: range) -> Iterator[Entry]:
    """A batch as entries of one record each; any other entry as it is, and so is a damaged batch."""
    entry_id, fields = entry
    if not is_batch(fields):
        yield entry
        return
    try:
        batch = parse_batch(shard, entry_id, fields)
    except ForeignLog:
        yield entry
        return
    for offset, values in enumerate(batch.columns.rows(), batch.first):
        if offset in offsets:
            texts = (str(value).encode() for value in values)
            yield b"%d-0" % offset, [*chain.from_iterable(zip(NAMES, texts, strict=True))]


def read_beginning(connection: Connection, scope: Scope, wanted: VerificationRange) -> int:
    """The first offset that the journal has now."""
    return _read_number(connection, scope, "begins", wanted, wanted.until + 1)


def read_log_beginning(client: RedisClient, scope: Scope, wanted: VerificationRange) -> int:
    """The first offset that the log has now, if older ones may have been evicted; otherwise 0."""
    if not wanted.evicts:
        return 0
    [found] = extents(client, scope.namespace, [wanted.shard]).values()
    return found.first


def offsets_a_read(connection: Connection, scope: Scope, part: VerificationRange) -> int:
    """Number of offsets in one read, limited so that large payloads do not fill a worker's memory."""
    largest = _read_number(connection, scope, "heaviest", part, 0)
    return max(1, min(OFFSETS_A_READ, BYTES_A_READ // max(1, largest)))


def _read_number(connection: Connection, scope: Scope, statement: str, wanted: VerificationRange, default: int) -> int:
    where = {"channel": wanted.shard.channel, "shard": wanted.shard.shard}
    with postgres_errors(f"reading {wanted.shard}"):
        row = connection.execute(
            statements("penstock.verifying", scope.schema)[statement],
            {**where, "after": wanted.after, "until": wanted.until},
        ).fetchone()
    return default if row is None or row[0] is None else int(row[0])
