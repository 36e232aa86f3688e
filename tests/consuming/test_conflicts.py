"""A transaction of a worker that loses against another one is run again, whichever of its statements loses: no worker ends for it (Guarantee 17)."""

from collections.abc import Sequence

import pytest
from sqlalchemy.orm import Session

from fixtures.constants import SetConstants
from fixtures.flow import OpenWorker, Site, running, stage_rows
from fixtures.losing import losses, make_losing
from fixtures.reader import Reader
from penstock.consuming.letter_retry import DeadLetterRow
from penstock.database.store import Store
from penstock.operating.letters import of_consumer, request_retries
from penstock.records import Record
from penstock.testing import eventually

OF_A_LOG = [
    ("checkpoints", "UPDATE", "40001"),  # advances, retries and their notes, waiting, halts
    ("dead_letters", "INSERT", "40P01"),
    ("dead_letters", "UPDATE", "40003"),  # requests are taken, later records noted, failures noted
    ("dead_letters", "DELETE", "40001"),
]


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize(("table", "event", "state"), OF_A_LOG)
def test_no_statement_of_a_logs_worker_that_loses_ends_it(
    site: Site, open_worker: OpenWorker, table: str, event: str, state: str, set_constants: SetConstants
) -> None:
    set_constants("consuming.letter_retry", ASK_EVERY_S=0.01)
    refused, done = {3, 30}, set[int]()

    @site.flow.consumer(reads=site.things, name="reader", attempts=1)
    def read(_: Session, records: Sequence[Record]) -> None:
        numbers = {record.data["number"] for record in records}
        if numbers & refused:
            raise ValueError
        done.update(numbers)

    def letters() -> list[DeadLetterRow]:
        return of_consumer(Store(site.connection), "reader")

    with site.connection.transaction():
        stage_rows(site.connection, site.things, 20)
    site.streamer.drain()
    with open_worker(block_ms=20) as worker:
        worker.drain()
        assert len(letters()) == 1
        make_losing(site.connection, table, event, state)
        with running(worker.run, site.streamer.run):
            with site.connection.transaction():
                stage_rows(site.connection, site.things, 40, "m")
            request_retries(Store(site.connection), letters())  # fails again, once
            eventually(
                lambda: {letter.attempts for letter in letters()} >= {1, 2}, "one is noted, another failed again"
            )
            refused.clear()
            request_retries(Store(site.connection), letters())
            eventually(lambda: not letters(), "all letters are applied")
            eventually(lambda: losses(site.connection) > 3, "it has lost, and gone on")
    assert done == set(range(1, 41))


@pytest.mark.usefixtures("twenty_records", "short_pauses")
def test_a_halt_that_loses_is_tried_again(reader: Reader) -> None:
    def fail(_: Session, __: Sequence[Record]) -> None:
        raise ValueError

    reader.declare(fail, attempts=1, on_poison="halt")
    make_losing(reader.connection, "checkpoints", "UPDATE", "40001")
    halted = reader.drain()

    assert {*halted} == {"things/0", "things/1"}
    assert losses(reader.connection) > 0
