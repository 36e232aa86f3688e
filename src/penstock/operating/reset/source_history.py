"""Has a consumer accept the history of a source that was restored: the operator's decision that the source is right.

The source has lost commits that were published, and gives their offsets to other records.  A consumer elsewhere was not
rolled back with it: it may have applied some of the lost ones, and would take the new ones at their offsets for applied.
Its checkpoints go back to the last record that both histories have; what lies between is in doubt: its effects stay.  Of most
of it the source has lost the records.  Those that were committed before the state that was restored, and published after it,
it has still, at other offsets: they take effect a second time.  The entries that ``reset epoch`` has kept tell which.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog

from penstock.channels.commands import RedisClient
from penstock.consuming.several.source_link import read_database
from penstock.database.statements import name_shards
from penstock.database.store import Store
from penstock.errors import Refused, Unknown
from penstock.journal.journal_reader import JournaledRecord, journal_bounds, records_at
from penstock.operating.consumers import list_consumers, unknown_consumer
from penstock.operating.reset.doubt import LogComparison, kept_key
from penstock.records import Epoch, Offset, OffsetRange, Place, Shard, ShardName

log = structlog.get_logger("penstock.operator")


@dataclass(frozen=True, slots=True)
class AcceptedShard:
    """Change of one shard by accepting the history of a source."""

    consumer: str
    shard: str
    before: int
    after: int  # its checkpoint afterwards: the last record that both histories have
    in_doubt: int  # offsets whose records were applied, and at which the source has others, or none
    again: int  # offsets of these that the source has given to other records already, which will be applied
    dead_letters: int  # dead letters of these offsets, which are removed
    resumes: bool  # true if the shard was halted and will continue
    known: int = 0  # records in doubt that Redis has still
    still_there: int = 0  # those of them that the source has, too, at other offsets: they will be applied a second time
    passed_over: int = 0  # records of both histories that will never be applied, because a later one was named


@dataclass(frozen=True, slots=True)
class _AppliedPosition:
    """A checkpoint, as the consumer has it."""

    shard: ShardName
    offset: Offset
    epoch: Epoch
    record: JournaledRecord | None
    halted: str | None
    dead_letters: Sequence[int]


@dataclass(frozen=True, slots=True)
class _SourceState:
    """State of the source: the ends of its journal, its records at the checkpoints, and where newer epochs begin.

    These are of the shards in which it has given out offsets in a newer epoch than the consumer has accepted.
    """

    epoch: Epoch
    bounds: dict[ShardName, tuple[Offset, Offset]]
    records: dict[ShardName, JournaledRecord]
    begins: dict[ShardName, Offset]


def reset_source(  # noqa: PLR0913  three servers, and what to do
    store: Store,
    source_store: Store,
    client: RedisClient,
    consumer: str,
    source: str,
    *,
    to: Place | None = None,
    apply: bool = False,
) -> tuple[AcceptedShard, ...]:
    """Plans that a consumer accepts a source's history; with ``apply``, carries it out.

    ``to`` is the last record that both histories have, if the source's journal cannot show it because no new epoch was
    opened there; or a record behind the checkpoint, to pass over what is before it, if the histories are the same.
    """
    where = {"consumer": consumer, "source": source}
    with store.transaction(f"accepting source {source}"):
        if apply:
            store.execute("lock_checkpoints", {"consumer": consumer})
        known = [_parse(row) for row in store.execute("source_checkpoints", where)]
        if not known:
            reads = {each.channel for each in list_consumers(store, consumer)}
            if not reads:
                raise unknown_consumer(store, consumer)
            raise Unknown(f"consumer {consumer} reads no source {source}; it reads {', '.join(sorted(reads))}")
        state = _read_source(source_store, known)
        chosen = [each for each in known if to is None or each.shard == to.shard]
        if not chosen:
            raise Unknown(f"consumer {consumer} has no checkpoint in {to}")
        compared = LogComparison(source_store, client)
        plan = tuple(_count_twice(compared, each, _plan(consumer, each, state, to), state.epoch) for each in chosen)
        database = read_database(store) if apply else ""
        for each, accepted in zip(chosen, plan, strict=True) if apply else ():
            record = _accept_at_source(source_store, accepted, each.shard, (database, state.epoch))
            last = {"record_id": record and record.id, "staged_us": record and record.staged_us}
            store.execute("accept_source", _locate(accepted, each.shard) | last | {"epoch": state.epoch})
    names = ("consumer", "shard", "before", "after", "in_doubt", "dead_letters")
    for accepted in plan if apply else ():
        facts = {name: getattr(accepted, name) for name in names}
        log.warning("source accepted", source=source, epoch=state.epoch, **facts)
    return plan


def _parse(row: tuple[Any, ...]) -> _AppliedPosition:
    channel, shard, offset, epoch, record_id, staged_us, halted, letters = row
    record = None if record_id is None else JournaledRecord(record_id, staged_us)
    return _AppliedPosition(ShardName(channel, Shard(shard)), offset, epoch, record, halted, letters)


def _read_source(store: Store, known: Sequence[_AppliedPosition]) -> _SourceState:
    with store.transaction("reading the source"):
        store.connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        epoch = store.value("greatest_epoch")
        begins = store.rows(
            "newer_epochs_begin",
            {**name_shards(each.shard for each in known), "epochs": [each.epoch for each in known]},
        )
        return _SourceState(
            epoch,
            journal_bounds(store, [each.shard for each in known]),
            records_at(store, {each.shard: each.offset for each in known}),
            {ShardName(channel, Shard(shard)): first for channel, shard, first in begins},
        )


def _plan(consumer: str, known: _AppliedPosition, state: _SourceState, to: Place | None) -> AcceptedShard:
    _, tail = state.bounds[known.shard]
    after = _find_common(known, state, tail) if to is None else to.offset
    if after > (tail if _is_same(known, state, tail) else min(known.offset, tail)):
        raise Refused(
            f"{known.shard}: the checkpoint is at {known.offset} and the source's journal ends at {tail}: both histories have "
            f"no record at {after}"
        )
    return AcceptedShard(
        consumer,
        str(known.shard),
        known.offset,
        after,
        in_doubt=max(0, known.offset - after),
        again=max(0, min(known.offset, tail) - after),
        dead_letters=sum(offset > after for offset in known.dead_letters),
        resumes=known.halted is not None,
        passed_over=max(0, after - known.offset),
    )


def _count_twice(compared: LogComparison, known: _AppliedPosition, plan: AcceptedShard, newest: Epoch) -> AcceptedShard:
    """Adds what the kept entries tell of the offsets in doubt.

    Each epoch that the source has opened since has kept what its log had then: the first of them what was applied.
    """
    if not plan.in_doubt:
        return plan
    last, found, still_there = plan.before, 0, 0
    for epoch in range(known.epoch + 1, newest + 1):
        doubt = OffsetRange(known.shard, Offset(plan.after + 1), Offset(last))
        kept = compared.count_still_there(doubt, kept_key(compared.store.scope, known.shard, Epoch(epoch)))
        found, still_there = found + kept.known, still_there + kept.still_there
        last = last if kept.first is None else kept.first - 1
    return replace(plan, known=found, still_there=still_there)


def _find_common(known: _AppliedPosition, state: _SourceState, tail: Offset) -> Offset:
    """The last offset up to the checkpoint that both histories have."""
    if _is_same(known, state, tail):
        return known.offset
    if state.epoch <= known.epoch:
        raise Refused(
            f"{known.shard}: the source's history is another one than was applied, and still in epoch {state.epoch}. Open a new "
            "one there first: penstock reset epoch. If Redis was emptied instead, name the last record that both have: "
            f'penstock reset source … --to "{known.shard} offset N"'
        )
    begins = state.begins.get(known.shard, Offset(tail + 1))
    return Offset(min(known.offset, tail, begins - 1))


def _is_same(known: _AppliedPosition, state: _SourceState, tail: Offset) -> bool:
    """True if the source has the record at the checkpoint, as far as its journal tells."""
    found = state.records.get(known.shard)
    return known.offset <= tail and (found is None or found.is_same_as(known.record))


def _locate(accepted: AcceptedShard, shard: ShardName) -> dict[str, Any]:
    return {"consumer": accepted.consumer, "channel": shard.channel, "shard": shard.shard, "offset": accepted.after}


def _accept_at_source(
    store: Store, accepted: AcceptedShard, shard: ShardName, by: tuple[str, Epoch]
) -> JournaledRecord | None:
    """Writes the checkpoint where retention waits: first, in case that only one side is committed; returns the record there."""
    database, epoch = by
    store.execute(
        "accept_at_source",
        {**_locate(accepted, shard), "database": database, "epoch": epoch},
        doing="writing to the source",
    )
    return records_at(store, {shard: Offset(accepted.after)}).get(shard)
