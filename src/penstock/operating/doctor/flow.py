"""Penstock's tables: are they whole, and do records move?"""

from collections.abc import Iterator

from penstock.database.initialise import shipped_revision
from penstock.database.registry import registered_channels
from penstock.database.statements import statements
from penstock.journal import missed_records
from penstock.operating.doctor.finding import Check, Examined, Finding, age
from penstock.operating.status import Status
from penstock.streaming.sequencer import check_identity_cache

SAMPLE = 1000
"""Journal rows at either end whose records are looked for."""

RECORDS_LOOKED_AT = 100_000
LARGEST_OFFSET = 2**53
"""Beyond it numbers in Lua are not exact."""

SLOW_S = 60.0
STALLED_S = 15.0

NEEDED = {
    "staged_records": "SELECT DELETE",
    "journal": "SELECT INSERT DELETE",
    "ticks": "SELECT INSERT DELETE",
    "epochs": "SELECT INSERT",
    "channels": "SELECT INSERT UPDATE",
    "checkpoints": "SELECT INSERT UPDATE DELETE",
    "dead_letters": "SELECT INSERT UPDATE DELETE",
}
"""What the workers' roles need, by table."""


def schema(examined: Examined) -> Iterator[Finding]:
    """Are the tables those of this release?"""
    table = f'"{examined.schema}".alembic_version'
    operating = statements("penstock.operating", examined.schema)
    [(there,)] = examined.connection.execute(operating["has_schema"], {"table": table}).fetchall()
    init = "penstock init" + (
        "" if examined.schema == "penstock" else f" --schema {examined.schema}"
    )
    if not there:
        yield Finding(
            "schema", "error", f"schema {examined.schema} has no tables of Penstock", init
        )
        return
    rows = examined.connection.execute(
        statements(__package__, examined.schema)["revision"]
    ).fetchall()
    found, shipped = (rows[0][0] if rows else "none"), shipped_revision()
    if found == shipped:
        yield Finding("schema", "ok", f"schema {examined.schema} is at revision {found}")
    else:
        yield Finding(
            "schema",
            "error",
            f"schema {examined.schema} is at revision {found}; this release has {shipped}",
            init,
        )


def privileges(examined: Examined) -> Iterator[Finding]:
    """May this role do what the workers do?"""
    pairs = [(table, right) for table, rights in NEEDED.items() for right in rights.split()]
    rows = examined.connection.execute(
        statements(__package__, examined.schema)["privileges"],
        {
            "schema": examined.schema,
            "tables": [table for table, _ in pairs],
            "privileges": [right for _, right in pairs],
        },
    ).fetchall()
    if rows:
        lacking = ", ".join(f"{right} on {table}" for table, right in rows)
        yield Finding(
            "privileges",
            "warning",
            f"this role lacks {lacking}",
            f"GRANT {lacking} in schema {examined.schema} to the workers' role",
        )
    else:
        yield Finding("privileges", "ok", "this role may do all that workers do")


def identity(examined: Examined) -> Iterator[Finding]:
    """Are numbers drawn one at a time, and is their end far?"""
    check_identity_cache(examined.connection, examined.schema)
    [(highest, offset)] = examined.connection.execute(
        statements(__package__, examined.schema)["highest_id"],
        {"table": f'"{examined.schema}".staged_records'},
    ).fetchall()
    if max(highest, offset) > LARGEST_OFFSET // 2:
        yield Finding(
            "identity",
            "error",
            f"record {highest:,}, offset {offset:,}: numbers are exact up to {LARGEST_OFFSET:,}",
            "move to new channels before that",
        )
    else:
        yield Finding(
            "identity", "ok", f"numbers are drawn one at a time; the last was {highest:,}"
        )


def missed(examined: Examined) -> Iterator[Finding]:
    """Has the sequencer passed over a record?"""
    found = missed_records(examined.connection, examined.schema)
    if found:
        count, first = sum(each.count for each in found), min(each.first for each in found)
        yield Finding(
            "missed records",
            "error",
            f"{count:,} committed records have no offset and will get none (the first is {first}): something was restored in "
            "part, or changed by hand",
            "penstock reset epoch",
        )
    else:
        yield Finding("missed records", "ok", "every record that was seen has its offset")


def journal(examined: Examined) -> Iterator[Finding]:
    """Is the journal without holes, and are its records there?"""
    sql = statements(__package__, examined.schema)
    holes = examined.connection.execute(sql["holes"]).fetchall()
    for channel, shard, count, first in holes:
        yield Finding(
            "journal",
            "error",
            f"{channel}/{shard}: {count} holes, the first before offset {first}: rows were deleted by hand",
            "consumers before it halt with a Gap; see docs: errors#gap",
        )
    [(gone, first)] = examined.connection.execute(sql["gone"], {"entries": SAMPLE}).fetchall()
    if gone:
        yield Finding(
            "journal",
            "error",
            f"it names {gone} records that are gone from staged_records (the first is {first}): deleted by something else",
            "restore them; what is already in Redis stays there until it is evicted",
        )
    if not holes and not gone:
        yield Finding("journal", "ok", "without holes; its records are there")


def declared(examined: Examined) -> Iterator[Finding]:
    """Do the pipeline and the tables know the same channels and consumers?"""
    rows = examined.connection.execute(
        statements(__package__, examined.schema)["nowhere"], {"most": RECORDS_LOOKED_AT}
    ).fetchall()
    for channel, count in rows:
        yield Finding(
            "channels",
            "warning",
            f"{count:,} records are for {channel!r}, which is not registered, or for a shard that it does not have",
            "declare it in the pipeline, and run penstock stream",
        )
    if examined.pipeline is None:
        yield Finding(
            "channels", "ok", "compared with nothing: give --app to compare with what is declared"
        )
        return
    yield from _channels(examined)


def _channels(examined: Examined) -> Iterator[Finding]:
    assert examined.pipeline is not None
    channels = registered_channels(examined.connection, examined.schema)
    registered = {name: (channel.kind, channel.shards) for name, channel in channels.items()}
    well = True
    for name, channel in examined.pipeline.channels.items():
        if name not in registered:
            well = False
            yield Finding(
                "channels",
                "warning",
                f"{name} is declared, and was never streamed",
                "penstock stream",
            )
        elif registered[name] != (channel.kind, channel.shards):
            well = False
            kind, shards = registered[name]
            yield Finding(
                "channels",
                "error",
                f"{name} is declared as a {channel.kind} of {channel.shards} shards, and runs as a {kind} of {shards}",
                "declare it as it runs, or open a channel of another name",
            )
    for name in sorted(set(registered) - set(examined.pipeline.channels)):
        well = False
        yield Finding(
            "channels",
            "warning",
            f"{name} is registered, and the pipeline does not declare it: its records are kept for ever",
            "declare it, or have its own pipeline streamed",
        )
    if well:
        yield Finding("channels", "ok", f"{len(registered)} registered as they are declared")


def consumers(examined: Examined) -> Iterator[Finding]:
    """Do they move, and is there any that nobody knows?"""
    found = examined.status
    findings = [
        *_streaming(found),
        *_halted(found),
        *_unknown(found),
        *_set_aside(found),
        *_late(found),
    ]
    yield from findings
    if not findings:
        yield Finding(
            "consumers", "ok", f"{len(found.consumers)} registered; none halted, none late"
        )


def _streaming(found: Status) -> Iterator[Finding]:
    for channel in found.channels:
        oldest = max((shard.staged_s for shard in channel.shards if shard.staged), default=0.0)
        if oldest > STALLED_S:
            staged = sum(shard.staged for shard in channel.shards)
            yield Finding(
                "streamer",
                "error",
                f"{channel.channel}: {staged:,} committed records wait for the sequencer, the oldest for {age(oldest)}",
                "penstock stream, or penstock run",
            )


def _halted(found: Status) -> Iterator[Finding]:
    for consumer, shard, reason in found.halted:
        yield Finding(
            "consumers",
            "error",
            f"{consumer} is halted in {shard}: {reason}",
            f"mend its cause, then: penstock reset checkpoint {consumer} --resume --yes",
        )


def _unknown(found: Status) -> Iterator[Finding]:
    for consumer in found.consumers:
        if consumer.declared is False:
            yield Finding(
                "consumers",
                "warning",
                f"{consumer.consumer} is registered, and the pipeline does not declare it: everything after its checkpoints is kept",
                f"penstock consumers retire {consumer.consumer} --yes",
            )


def _set_aside(found: Status) -> Iterator[Finding]:
    for consumer in found.consumers:
        letters = sum(shard.set_aside for shard in consumer.shards)
        if letters:
            yield Finding(
                "dead letters",
                "warning",
                f"{consumer.consumer} has set {letters:,} records aside",
                f"penstock dead-letters list {consumer.consumer}",
            )


def _late(found: Status) -> Iterator[Finding]:
    for consumer in found.consumers:
        lag = sum(shard.lag for shard in consumer.shards)
        seconds = max((shard.lag_s for shard in consumer.shards), default=0.0)
        if lag and seconds > SLOW_S:
            yield Finding(
                "consumers",
                "warning",
                f"{consumer.consumer} is {lag:,} records and {age(seconds)} behind",
                f"penstock consume {consumer.consumer}, in more processes if one does not keep up",
            )


SCHEMA: tuple[Check, ...] = (schema,)
CHECKS: tuple[Check, ...] = (privileges, identity, missed, journal, declared, consumers)
