"""What is called around handlers: no mistake in it passes a record that was not applied."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from fixtures.reader import ALL, Reader, apply, apply_all
from penstock import DeadLetter, Pipeline
from penstock.database.store import Store
from penstock.errors import DeclarationError
from penstock.operating.letters import of_consumer
from penstock.records import Record


def yields(call: Any, session: Session, items: object) -> Iterator[object]:
    yield call(session, items)


async def yields_async(call: Any, session: AsyncSession, items: object) -> AsyncIterator[object]:
    yield await call(session, items)


@pytest.mark.parametrize("around", [(yields,), (yields_async,), (print, yields_async)])
def test_what_is_around_handlers_and_contains_yield_is_refused_when_it_is_declared(
    flow: Pipeline, around: tuple[Any, ...]
) -> None:
    with pytest.raises(DeclarationError, match="contains `yield`"):
        flow.around(around[0], **({"asynchronous": around[1]} if around[1:] else {}))


@pytest.mark.usefixtures("twenty_records")
def test_a_context_manager_around_handlers_halts_the_shard_instead_of_passing_its_records(reader: Reader) -> None:
    """Guarantee 5."""
    reader.flow.around(contextmanager(yields))
    halted = reader.drain(apply)

    assert len(halted) == 2
    assert all("which nothing runs" in why for why in halted.values())
    assert reader.effects() == []


def forgets(call: Any, session: Session, items: object) -> None:
    call(session, items)


async def forgets_async(call: Any, session: AsyncSession, items: object) -> None:
    await call(session, items)


@pytest.mark.parametrize(
    ("is_async", "around"),
    [(False, forgets), (True, forgets), (True, forgets_async)],
    ids=["plain", "plain around async", "async"],
)
@pytest.mark.usefixtures("twenty_records")
def test_an_outcome_holds_if_what_is_around_forgets_to_return_it(
    reader: Reader, around: Any, *, is_async: bool
) -> None:
    """Guarantee 5."""

    def handler(session: Session, record: Record) -> DeadLetter | None:
        apply(session, [record])
        return DeadLetter("refused") if record.id == 5 else None

    async def handler_async(session: AsyncSession, record: Record) -> DeadLetter | None:
        await apply_all(session, [record])
        return DeadLetter("refused") if record.id == 5 else None

    reader.flow.around(around)
    reader.drain(handler_async if is_async else handler, each=True)

    assert reader.effects() == [id_ for id_ in ALL if id_ != 5]
    assert len(of_consumer(Store(reader.connection), "reader")) == 1
