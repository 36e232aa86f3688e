"""Numbers, rates, times and lines as people see them."""

import re
from datetime import UTC, datetime, timedelta, timezone

import pytest

from penstock.console.rendering import draw_lines, format_number, format_rate, format_time
from penstock.operating.status.snapshot import RegisteredSchedule


@pytest.mark.parametrize(
    ("every", "text"),
    [
        ("21600s", "6h"),
        ("600s", "10m"),
        ("90s", "90s"),
        ("86400s", "1d"),
        ("0.5s", "0.5s"),
        ("17 3 * * *", "17 3 * * *"),
    ],
)
def test_an_interval_is_shown_as_somebody_would_type_it(every: str, text: str) -> None:
    assert RegisteredSchedule("n", "q", every, "UTC", None, None, 0.0, None, None, "").text == text


@pytest.mark.parametrize(
    ("value", "number", "rate"),
    [
        (None, "-", "-"),
        (0, "0", "0/s"),
        (0.04, "0", "0.0/s"),
        (0.16, "0", "0.2/s"),
        (9.94, "10", "9.9/s"),
        (10, "10", "10/s"),
        (1234.4, "1,234", "1,234/s"),
    ],
)
def test_numbers_have_their_thousands_and_slow_rates_a_digit_more(value: float | None, number: str, rate: str) -> None:
    assert (format_number(value), format_rate(value)) == (number, rate)


def test_times_are_in_utc() -> None:
    at = datetime(2026, 11, 29, 1, 2, 3, 456, tzinfo=timezone(timedelta(hours=2)))

    assert format_time(at) == '<time datetime="2026-11-28T23:02:03+00:00">2026-11-28 23:02:03 UTC</time>'
    assert format_time(at.astimezone(UTC)) == format_time(at)
    assert format_time(None) == "-"


def test_a_line_has_a_gap_where_nothing_is_known() -> None:
    drawn = draw_lines([[None, 4, 2, None, 0]], "lag")

    assert re.findall(r'<polyline points="(.*?)"/>', drawn) == ["40.0,2.0 80.0,16.5", "160.0,31.0"]
    assert "points" not in draw_lines([[None, None]], "lag")
    assert re.findall(r'<polygon points="(.*?)"/>', drawn)[0] == "40,32 40.0,2.0 80.0,16.5 80,32"


def test_lines_of_a_chart_have_one_scale() -> None:
    drawn = draw_lines([[0, 2], [4, None], [1, 1]], "latency")

    assert re.findall(r'<polyline(.*?) points="(.*?)"/>', drawn) == [
        ("", "0.0,31.0 160.0,16.5"),
        (' class="line-2"', "0.0,2.0"),
        (' class="line-3"', "0.0,23.8 160.0,23.8"),
    ]
    assert drawn.count("<polygon") == 1


@pytest.mark.parametrize(
    ("values", "points"),
    [
        ([], "0.0,31.0 160.0,31.0"),
        ([7], "0.0,31.0 160.0,31.0"),
        ([0, 0, 0], "0.0,31.0 160.0,31.0"),
        ([0, 5], "0.0,31.0 160.0,2.0"),
        ([4, 2, 0, 1, 4], "0.0,2.0 40.0,16.5 80.0,31.0 120.0,23.8 160.0,2.0"),
    ],
)
def test_a_line_reaches_from_edge_to_edge_and_its_scale_begins_at_0(values: list[float], points: str) -> None:
    drawn = draw_lines([values], "<lag>")

    assert f'<polyline points="{points}"/>' in drawn
    assert f'<polygon points="0,32 {points} 160,32"/>' in drawn
    assert 'viewBox="0 0 160 32"' in drawn
    assert 'aria-label="&lt;lag&gt;"' in drawn
