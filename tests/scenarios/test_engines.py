"""The same scenarios on both engines."""

import os
import signal

import pytest

from fixtures.engines import Start, effects
from fixtures.flow import stage_rows
from penstock import Log
from penstock.database.connections import Connection
from penstock.testing import eventually

READY_S = 180.0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_records_have_one_effect_across_a_kill_a_poison_record_and_a_clean_stop(
    start: Start, connection: Connection, things: Log
) -> None:
    """Guarantees 4, 21 and 27: killed under load, started again, stopped by a signal: none lost, none doubled."""
    process = start()
    stage_rows(connection, things, 200, "first ")
    eventually(lambda: len(effects(connection, "one")) >= 100, "records flow", timeout_s=READY_S)

    stage_rows(connection, things, 300, "second ")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    stage_rows(connection, things, 100, "third ")
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "VALUES ('things', 0, 'poison', 'insert', 'thing', %s::jsonb)",
        ["[" * 985 + "]" * 985],  # which Python cannot parse
    )
    process = start()

    everything = list(range(1, 602))
    eventually(lambda: effects(connection, "one") == everything, "all of it, once", timeout_s=READY_S)
    eventually(lambda: effects(connection, "two") == everything[:-1], "but the poison", timeout_s=READY_S)
    # A transaction of its own, after that of the records beside it.
    eventually(
        lambda: dead_letters(connection) == [("two", "poison")], "the poison is a dead letter", timeout_s=READY_S
    )

    process.send_signal(signal.SIGTERM)
    assert process.wait(180) == 0
    stage_rows(connection, things, 10, "after ")
    assert effects(connection, "one") == everything


def dead_letters(connection: Connection) -> list[tuple[str, str]]:
    return connection.execute("SELECT consumer, key FROM penstock.dead_letters").fetchall()
