"""Has a consumer accept a restored source's history: the operator decides that the source is right.

The source has lost commits that were published, and gives their offsets to other records.  A
consumer elsewhere was not rolled back with it: it may have applied some of the lost ones, and would
take the new ones at their offsets for applied.  Its checkpoints go back to the last record that
both histories have; what lies between is in doubt: its effects stay.  Of most of it the source has
lost the records.  Those that were committed before the state that was restored, and published after
it, it has still, at other offsets: they take effect a second time.  The entries that ``reset
epoch`` has kept tell which.
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
    # offsets of these that the source has given to other records already, which will be applied
    again: int
    dead_letters: int  # dead letters of these offsets, which are removed
    resumes: bool  # true if the shard was halted and will continue
    known: int = 0  # records in doubt that Redis has still
    # those of them that the source has, too, at other offsets: they will be applied a second time
    still_there: int = 0
    # records of both histories that will never be applied, because a later one was named
    passed_over: int = 0


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
    """State of the source: the journal's ends, records at checkpoints, and starts of newer epochs.

    These are of the shards in which it has given out offsets in a newer epoch than the consumer has
    accepted.
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

    ``to`` is the last record that both histories have, if the source's journal cannot show it
    because no new epoch was opened there; or a record behind the checkpoint, to pass over what is
    before it, if the histories are the same.
    """
    consumer_source = {"consumer": consumer, "source": source}
    with store.transaction(f"accepting source {source}"):
        if apply:
            store.execute("lock_checkpoints", {"consumer": consumer})
        positions = [_parse(row) for row in store.execute("source_checkpoints", consumer_source)]
        if not positions:
            reads = {position.channel for position in list_consumers(store, consumer)}
            if not reads:
                raise unknown_consumer(store, consumer)
            raise Unknown(
                f"consumer {consumer} reads no source {source}; it reads {', '.join(sorted(reads))}"
            )
        state = _read_source(source_store, positions)
        chosen = [position for position in positions if to is None or position.shard == to.shard]
        if not chosen:
            raise Unknown(f"consumer {consumer} has no checkpoint in {to}")
        compared = LogComparison(source_store, client)
        plan = tuple(
            _count_twice(compared, position, _plan(consumer, position, state, to), state.epoch)
            for position in chosen
        )
        database = read_database(store) if apply else ""
        for position, accepted in zip(chosen, plan, strict=True) if apply else ():
            record = _accept_at_source(
                source_store, accepted, position.shard, (database, state.epoch)
            )
            last = {"record_id": record and record.id, "staged_us": record and record.staged_us}
            store.execute(
                "accept_source", _locate(accepted, position.shard) | last | {"epoch": state.epoch}
            )
    names = ("consumer", "shard", "before", "after", "in_doubt", "dead_letters")
    for accepted in plan if apply else ():
        facts = {name: getattr(accepted, name) for name in names}
        log.warning("source accepted", source=source, epoch=state.epoch, **facts)
    return plan


def _parse(row: tuple[Any, ...]) -> _AppliedPosition:
    channel, shard, offset, epoch, record_id, staged_us, halted, letters = row
    record = None if record_id is None else JournaledRecord(record_id, staged_us)
    return _AppliedPosition(
        ShardName(channel, Shard(shard)), offset, epoch, record, halted, letters
    )


def _read_source(store: Store, positions: Sequence[_AppliedPosition]) -> _SourceState:
    with store.transaction("reading the source"):
        store.connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        epoch = store.value("greatest_epoch")
        rows = store.rows(
            "newer_epochs_begin",
            {
                **name_shards(position.shard for position in positions),
                "epochs": [position.epoch for position in positions],
            },
        )
        return _SourceState(
            epoch,
            journal_bounds(store, [position.shard for position in positions]),
            records_at(store, {position.shard: position.offset for position in positions}),
            {ShardName(channel, Shard(shard)): first for channel, shard, first in rows},
        )


def _plan(
    consumer: str, position: _AppliedPosition, state: _SourceState, to: Place | None
) -> AcceptedShard:
    _, tail = state.bounds[position.shard]
    target = _find_common(position, state, tail) if to is None else to.offset
    if target > (tail if _is_same(position, state, tail) else min(position.offset, tail)):
        raise Refused(
            f"{position.shard}: the checkpoint is at {position.offset} and the source's journal "
            f"ends at {tail}: both histories have "
            f"no record at {target}"
        )
    return AcceptedShard(
        consumer,
        str(position.shard),
        position.offset,
        target,
        in_doubt=max(0, position.offset - target),
        again=max(0, min(position.offset, tail) - target),
        dead_letters=sum(offset > target for offset in position.dead_letters),
        resumes=position.halted is not None,
        passed_over=max(0, target - position.offset),
    )


def _count_twice(
    compared: LogComparison, position: _AppliedPosition, plan: AcceptedShard, newest: Epoch
) -> AcceptedShard:
    """Adds what the kept entries tell of the offsets in doubt.

    Each epoch that the source has opened since has kept what its log had then: the first of them
    what was applied.
    """
    if not plan.in_doubt:
        return plan
    last, counted, still_there = plan.before, 0, 0
    for epoch in range(position.epoch + 1, newest + 1):
        doubt = OffsetRange(position.shard, Offset(plan.after + 1), Offset(last))
        records = compared.count_still_there(
            doubt, kept_key(compared.store.scope, position.shard, Epoch(epoch))
        )
        counted, still_there = counted + records.known, still_there + records.still_there
        last = last if records.first is None else records.first - 1
    return replace(plan, known=counted, still_there=still_there)


def _find_common(position: _AppliedPosition, state: _SourceState, tail: Offset) -> Offset:
    """Returns the last offset up to the checkpoint that both histories have."""
    if _is_same(position, state, tail):
        return position.offset
    if state.epoch <= position.epoch:
        raise Refused(
            f"{position.shard}: the source's history differs from what was applied, and is still "
            f"in epoch {state.epoch}. Open a new epoch there first: penstock reset epoch. If Redis "
            "was emptied instead, name the last record that both have: "
            f'penstock reset source … --to "{position.shard} offset N"'
        )
    begin = state.begins.get(position.shard, Offset(tail + 1))
    return Offset(min(position.offset, tail, begin - 1))


def _is_same(position: _AppliedPosition, state: _SourceState, tail: Offset) -> bool:
    """Returns whether the source has the record at the checkpoint, as far as its journal tells."""
    record = state.records.get(position.shard)
    return position.offset <= tail and (record is None or record.is_same_as(position.record))


def _locate(accepted: AcceptedShard, shard: ShardName) -> dict[str, Any]:
    return {
        "consumer": accepted.consumer,
        "channel": shard.channel,
        "shard": shard.shard,
        "offset": accepted.after,
    }


def _accept_at_source(
    store: Store, accepted: AcceptedShard, shard: ShardName, identity: tuple[str, Epoch]
) -> JournaledRecord | None:
    """Writes the checkpoint where retention waits; returns the record there.

    It is first, in case that only one side is committed.
    """
    database, epoch = identity
    store.execute(
        "accept_at_source",
        {**_locate(accepted, shard), "database": database, "epoch": epoch},
        doing="writing to the source",
    )
    return records_at(store, {shard: Offset(accepted.after)}).get(shard)
