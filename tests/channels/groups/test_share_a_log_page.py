"""The programs of docs/how-to/share-a-log.md run as they are written."""

import re
from pathlib import Path
from typing import Any

import pytest
import redis

from channels.groups.conftest import GroupedLog
from penstock.clients import LogGroup

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "share-a-log.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_programs_of_the_page_run(
    redis_client: redis.Redis, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    work = GroupedLog(redis_client, "rides")
    work.append(3, shard=2)
    names: dict[str, Any] = {}
    for number, block in enumerate(BLOCKS):
        exec(block.replace("redis://localhost:6379", redis_url), names)
        if number == 0:
            with LogGroup.connect(redis_url, "rides", "mailers", shards=4) as group:
                assert [each.pending for each in group.states().values()] == [0] * 4
        else:
            names["group"].close()

    assert "3 k3 {'n': 3}" in capsys.readouterr().out
    assert not redis_client.exists("penstock:{rides/0}:group:mailers")
