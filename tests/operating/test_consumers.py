"""Registered consumers are listed and retired."""

from typing import Any

import pytest

from penstock import Log, Pipeline
from penstock.database.connections import Connection
from penstock.database.registry import register_consumer
from penstock.errors import Unknown
from penstock.operating.consumers import list_consumers, retire


@pytest.fixture(autouse=True)
def _reader(connection: Connection, flow: Pipeline, things: Log) -> None:
    def reader(_session: Any, _records: Any) -> None:
        """Does nothing."""

    flow.consumer(reads=things)(reader)
    register_consumer(connection, flow.scope, flow.get_consumer("reader"))


def test_a_registered_consumer_is_listed(connection: Connection) -> None:
    assert [(r.consumer, r.channel, r.shards, r.lag) for r in list_consumers(connection)] == [
        ("reader", "things", 2, 0)
    ]


def test_a_plan_to_retire_changes_nothing(connection: Connection) -> None:
    plan = retire(connection, "reader")

    assert plan == list_consumers(connection, "reader")
    assert len(plan) == 1


def test_a_retired_consumer_holds_up_retention_no_longer(connection: Connection) -> None:
    retire(connection, "reader", apply=True)

    assert list_consumers(connection) == []
    assert connection.execute("SELECT FROM penstock.checkpoints").fetchall() == []


def test_an_unknown_name_is_refused_with_the_list_of_consumers(
    connection: Connection,
) -> None:
    with pytest.raises(Unknown, match="there are: reader"):
        retire(connection, "raeder", apply=True)
