"""The programs of docs/how-to/read-a-log.md run as they are written, one after the other."""

import re
from pathlib import Path
from typing import Any

import redis

from fixtures.logs import FilledLog
from penstock.clients import LogReader, LogWriter

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "read-a-log.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_programs_of_the_page_run(redis_client: redis.Redis, redis_url: str, database_url: str) -> None:
    log = FilledLog(redis_client)
    log.add(4130, shard=2, staged_us=lambda _: 1)
    blocks = [
        block.replace("redis://localhost:6379", redis_url)
        .replace("postgresql://localhost/app", database_url)
        .replace("block_s=30", "block_s=0.01")
        .replace("while True:", "for _ in range(6):")
        for block in BLOCKS
    ]
    names: dict[str, Any] = {}
    with LogReader.connect(redis_url, "rides", shards=4) as reader:
        for number, block in enumerate(blocks):
            exec(block, names)
            if number == 0:
                assert len(names["found"]) == 10
                names["reader"] = reader  # the page's own is closed

    assert names["positions"][2] == 4131
    with LogWriter.connect(redis_url, "clicks") as writer:
        assert writer.append([1]).first == 5
