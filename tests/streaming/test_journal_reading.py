"""What readers of the journal are given."""

from fixtures.flow import stage_rows
from penstock import Log
from penstock.database.connections import Connection
from penstock.database.registry import register_channel
from penstock.journal.journal_reader import registered_tails
from penstock.records import DEFAULT_SCOPE, Offset
from penstock.streaming import tick


def test_the_tails_are_those_of_registered_shards_that_have_records(connection: Connection, things: Log) -> None:
    register_channel(connection, DEFAULT_SCOPE, Log("quiet", shards=3))
    stage_rows(connection, Log("unknown", shards=1), 2)
    stage_rows(connection, Log("things", shards=1), 2)
    register_channel(connection, DEFAULT_SCOPE, things)
    tick(connection, DEFAULT_SCOPE)

    assert registered_tails(connection, DEFAULT_SCOPE) == {things.shard_names[0]: Offset(2)}
