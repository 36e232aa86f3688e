"""What docs/explanation/queues.md shows and says."""

import re
from pathlib import Path
from typing import Any

import pytest

from fixtures.clients import connect_redis
from fixtures.queues import odds_of_sharing
from penstock.clients import FairQueue

PAGE = (Path(__file__).parents[3] / "docs" / "explanation" / "queues.md").read_text()
SUPERSCRIPTS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")


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


def number(text: str) -> float:
    mantissa, _, power = text.partition(" × 10")  # noqa: RUF001  as the page writes it
    if text.endswith("%"):
        return float(text.removesuffix(" %")) / 100
    return float(mantissa) * 10.0 ** int(power.translate(SUPERSCRIPTS))


@pytest.mark.parametrize(
    "row", re.findall(r"^\| (\d+) of (\d+) \| ([^`|]+) \| ([^|]+) \| ([^|]+) \|$", PAGE, re.MULTILINE)
)
def test_the_odds_are_those_of_the_page(row: tuple[str, ...]) -> None:
    size, streams, *odds = row
    for others, text in zip((1, 4, 16), odds, strict=True):
        assert odds_of_sharing(int(streams), int(size), others) == pytest.approx(number(text), rel=0.2)
