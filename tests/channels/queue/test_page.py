"""What docs/explanation/queues.md shows and says."""

import re
from pathlib import Path
from typing import Any

import pytest

from fixtures.clients import connect_redis
from penstock import Queue
from penstock.clients import FairQueue
from penstock.declaring.kinds import MAX_STREAMS

PAGE = (Path(__file__).parents[3] / "docs" / "explanation" / "queues.md").read_text()


def test_the_examples_run(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    example, declared, of_keys, _ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

    exec(example.replace("redis://localhost:6379", redis_url), {})

    assert capsys.readouterr().out == "b'{\"ride\": 17}'\n"
    assert FairQueue(connect_redis(redis_url), "receipts").stats().done == 1
    names: dict[str, Any] = {}
    exec(declared, names)
    exec(of_keys, names)
    assert names["receipts"].limits["account-7"].weight == 3
    assert names["calls"].key_limits["api.partner.com"].rate == 10


def test_the_numbers_of_streams_are_those_of_a_queue() -> None:
    shown = re.search(r"has (\d+) streams \(`streams`, at most (\d+)\)\. A tenant's name selects (\d+) of", PAGE)

    assert shown
    queue = Queue("receipts")
    assert [int(text) for text in shown.groups()] == [queue.streams, MAX_STREAMS, queue.hand]
