"""The streamer's session keeps the memory of a batch."""

from pathlib import Path

import pytest

from penstock.database.connections import Connection
from penstock.streaming import Streamer

PAYLOADS = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
SELECT 'things', 0, 'k', 'insert', 'thing', to_jsonb(repeat(md5(i::text), 60)) FROM generate_series(1, 400) AS i
"""


def faults(process: int) -> int:
    """Pages that the system has given to a process."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[7])


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="counts pages as Linux does")
def test_memory_is_not_fetched_again_for_each_batch(streamer: Streamer, connection: Connection) -> None:
    streamer.open()
    backend = streamer.opened().store.connection.info.backend_pid
    fetched = []
    for _ in range(4):
        connection.execute(PAYLOADS)
        before = faults(backend)
        assert streamer.drain() == 400
        fetched.append(faults(backend) - before)

    assert min(fetched) < 200  # each time 400, if it is not kept
