"""An Ick whose shards are on three nodes of a Cluster is marked, inspected and repaired as on one server."""

from collections.abc import Iterator
from typing import Any

import pytest

from fixtures.clients import connect_redis
from fixtures.dirty import DOCUMENTS, mark_changed
from fixtures.topologies import Cluster
from penstock import Ick, Pipeline
from penstock.channels.ick.shard_states import oldest
from penstock.channels.routing import ick_shard_keys
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.operating.doctor.diagnosis import diagnose
from penstock.operating.reset.checkpoint import reset_ick
from penstock.operating.status.gathering import status
from penstock.streaming import Streamer

INDEX = Ick("index", shards=2)
pytestmark = pytest.mark.channels(INDEX)


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Any]:
    with connect_redis(cluster.url) as made:
        yield made


@pytest.fixture
def marked(connection: Connection, flow: Pipeline, cluster: Cluster, database_url: str) -> Iterator[Connection]:
    """The connection, after 20 members have been marked dirty."""
    connection.execute(DOCUMENTS)
    mark_changed(connection, [f"d{n}" for n in range(20)])
    streamer = Streamer(flow, database_url, cluster.url)
    streamer.drain()
    yield connection
    streamer.close()


def test_status_tail_doctor_and_reset_support_a_cluster(marked: Connection, flow: Pipeline, client: Any) -> None:
    shards = status(Store(marked), client, flow).channels[0].shards
    sound = [f for f in diagnose(Store(marked), client, flow) if f.check == "icks"]
    keys = ick_shard_keys("penstock", INDEX.shard_names[1])
    client.set(keys.ick.dirty, "somebody's")
    [damaged] = [f for f in diagnose(Store(marked), client, flow) if f.check == "icks"]
    [repaired] = reset_ick(marked, client, "index", flow, apply=True)

    assert sum(shard.ick.dirty for shard in shards if shard.ick is not None) == 20
    assert [f.grade for f in sound] == ["ok"]
    assert (damaged.grade, repaired.key, client.type(keys.ick.version)) == ("error", keys.ick.dirty, b"string")
    assert len(oldest(client, "penstock", INDEX.shard_names, 100)) == shards[0].ick.dirty  # type: ignore[union-attr]
