"""An Ick that was marked from another journal is left as it is."""

from typing import Any

import pytest

from fixtures.flow import Site
from penstock import Ick
from penstock.errors import HistoryDiverged
from penstock.streaming.unpublished import unpublished

pytestmark = pytest.mark.channels(Ick("index", shards=1))

POSITION = "penstock:{index/0}:log"
MARK = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
SELECT 'index', 0, 'm' || i, 'dirty', 'member', 'null' FROM generate_series(1, 3) AS i
"""


@pytest.mark.parametrize("another", [{b"id": b"999"}, {b"ts": b"5"}], ids=["id", "time"])
def test_nothing_is_marked_after_a_batch_that_ends_with_another_record(
    site: Site, another: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next batch would fit, and its record would hide the foreign one.  The id of a lost record is given out again."""
    site.connection.execute(MARK)
    site.streamer.drain()
    client: Any = site.client  # the stubs are narrower than what it accepts
    [(last, fields)] = client.xrange(POSITION)
    client.delete(POSITION)
    client.xadd(POSITION, fields | another, id=last)
    site.connection.execute(MARK)
    _, sequencer, publisher = site.streamer.opened()
    publisher.tails.advance_target(sequencer.tick().tails)
    defaults: Any = unpublished.__kwdefaults__
    monkeypatch.setitem(defaults, "max_records", 3)

    with pytest.raises(HistoryDiverged, match="holds record"):
        publisher.resend(3)
    assert [entry for entry, _ in client.xrange(POSITION)] == [last]
