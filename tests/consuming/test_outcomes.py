"""The three outcomes of a handler, said by consumers: guarantee 21 in the handler's own words."""

from collections.abc import Sequence
from typing import Any

import pytest
from psycopg.errors import SerializationFailure
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from structlog.testing import capture_logs

from fixtures.reader import ALL, Reader, apply, apply_all
from penstock import Cancel, DeadLetter, Snooze
from penstock.consuming.failures import FailureLog, NotApplied, find_outcome
from penstock.declaring.outcomes import HandlerOutcome
from penstock.records import Record, Shard, ShardName

SHARD = ShardName("rides", Shard(0))
REST = [record for record in ALL if record != 5]


def outcome_in_batch(outcome: HandlerOutcome, *, returns: bool = False) -> Any:
    """A handler of batches that says it of the fifth record, in the middle of its effects."""

    def handler(session: Session, records: Sequence[Record]) -> HandlerOutcome | None:
        apply(session, [record for record in records if record.id < 5])
        if any(record.id == 5 for record in records):
            if returns:
                return outcome
            raise outcome
        apply(session, [record for record in records if record.id > 5])
        return None

    return handler


@pytest.mark.usefixtures("twenty_records")
def test_a_class_is_as_good_as_its_instance(reader: Reader) -> None:
    """`return Cancel` without parentheses, as `raise Cancel` may be."""

    def handler(session: Session, record: Record) -> Any:
        if record.id == 5:
            return Cancel
        return apply(session, [record])

    reader.drain(handler, each=True)

    assert (reader.effects(), reader.dead()) == (REST, [])


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.usefixtures("twenty_records")
def test_a_cancelled_record_is_passed_without_an_effect(reader: Reader, *, returns: bool) -> None:
    reader.drain(outcome_in_batch(Cancel("gone"), returns=returns), attempts=1)

    assert (reader.effects(), reader.dead()) == (REST, [])
    assert reader.worker().round(0).applied == 0


@pytest.mark.usefixtures("twenty_records")
def test_a_record_is_dead_lettered_at_once_with_the_handlers_reason(reader: Reader) -> None:
    calls: list[int] = []
    handler = outcome_in_batch(DeadLetter("no address"))

    def counted(session: Session, records: Sequence[Record]) -> None:
        calls.extend(record.id for record in records)
        handler(session, records)

    reader.drain(counted, attempts=9)

    assert (reader.effects(), reader.dead()) == (REST, [(5, "DeadLetter: no address")])
    assert calls.count(5) < 9


@pytest.mark.usefixtures("twenty_records")
def test_handlers_of_one_record_return_outcomes(reader: Reader) -> None:
    said = [Snooze(0.01), Snooze(), Cancel("gone")]

    async def handler(session: AsyncSession, record: Record) -> HandlerOutcome | None:
        if record.id == 5:
            return said.pop(0) if len(said) > 1 else said[0]
        if record.id == 6:
            return DeadLetter("no address")
        await apply_all(session, [record])
        return None

    reader.drain(handler, each=True, attempts=1)

    assert (reader.effects(), reader.dead()) == (
        [record for record in REST if record != 6],
        [(6, "DeadLetter: no address")],
    )


@pytest.mark.usefixtures("twenty_records")
def test_a_consumer_that_halts_on_poison_halts_at_what_it_would_dead_letter(reader: Reader) -> None:
    halted = reader.drain(outcome_in_batch(DeadLetter("no address")), on_poison="halt")

    assert any("DeadLetter: no address" in why for why in halted.values())
    assert reader.dead() == []


@pytest.mark.parametrize(
    ("error", "is_failure"),
    [
        (ValueError(), True),
        *((error, False) for error in (Cancel(), Snooze(1), DeadLetter("no"), SerializationFailure())),
    ],
    ids=lambda value: type(value).__name__,
)
def test_neither_an_outcome_nor_a_conflict_is_logged_as_a_failure(error: Exception, *, is_failure: bool) -> None:
    with capture_logs() as logs:
        FailureLog("reader").show(SHARD, NotApplied(find_outcome(error), error))

    assert [line["event"] for line in logs] == ["handler failed"] * is_failure
