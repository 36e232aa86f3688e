"""What readers of the journal are given."""

from fixtures.flow import stage_rows
from penstock import Log
from penstock.database.connections import Connection
from penstock.database.registry import register_channel
from penstock.database.store import Store
from penstock.journal.journal_reader import registered_tails
from penstock.records import Offset
from penstock.streaming import tick


def test_the_tails_are_those_of_registered_shards_that_have_records(connection: Connection, things: Log) -> None:
    register_channel(Store(connection), Log("quiet", shards=3))
    stage_rows(connection, Log("unknown", shards=1), 2)
    stage_rows(connection, Log("things", shards=1), 2)
    register_channel(Store(connection), things)
    tick(Store(connection))

    assert registered_tails(Store(connection)) == {things.shard_names[0]: Offset(2)}
