"""How figures are measured: interleaved runs, medians, the worst limit, and a reason for each missing figure."""

import signal
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from benchmarks import BenchServers, Case, ContestantFailed, Figures, Interrupted, NotMeasured, Outcome, compare
from benchmarks.backlogs import FULL, QUICK
from benchmarks.cases import all_cases
from benchmarks.command import find_left_out, leave_out
from benchmarks.interrupts import remember_interrupts
from benchmarks.measuring import Marked, percentile
from benchmarks.published import PAGE as PUBLISHED
from benchmarks.published import find_worse, read_ratios
from benchmarks.report import Report, format_report


def giving(*values: float, order: list[str] | None = None, name: str = "") -> Callable[[], Figures]:
    left: Iterator[float] = iter(values)

    def contestant() -> Figures:
        if order is not None:
            order.append(name)
        return {"": next(left)}

    return contestant


def only(outcomes: list[Outcome]) -> Outcome:
    (outcome,) = outcomes
    return outcome


def test_contestants_are_measured_in_turn() -> None:
    order: list[str] = []
    case = Case(
        "c",
        "records/s",
        "",
        giving(1, 1, order=order, name="ours"),
        limits={"l": giving(1, 1, order=order, name="limit")},
        variants={"v": giving(1, 1, order=order, name="variant")},
        peers={"p": giving(1, 1, order=order, name="peer")},
    )

    compare(case, rounds=2)

    assert order == ["limit", "ours", "variant", "peer"] * 2


def test_a_figure_is_the_median_compared_with_the_slower_of_two_limits() -> None:
    case = Case(
        "c",
        "records/s",
        "",
        giving(50, 1000, 60),
        limits={"fast": giving(200, 200, 200), "slow": giving(120, 100, 1)},
        peers={"peer": giving(20, 20, 20)},
    )

    outcome = only(compare(case, rounds=3))

    assert (outcome.value, outcome.limit, outcome.ratio_to_limit) == (60, 100, 0.6)
    assert outcome.runs == [50, 1000, 60]
    assert outcome.peers["peer"].ratio == 3


def test_a_variant_is_compared_and_is_no_limit() -> None:
    case = Case("c", "µs", "", giving(4), variants={"plain": giving(10)}, better="less")

    outcome = only(compare(case, rounds=1))

    assert (outcome.variants["plain"].value, outcome.variants["plain"].ratio) == (10, 0.4)
    assert (outcome.limit, outcome.peers) == (None, {})


def test_when_less_is_better_the_limit_is_the_larger() -> None:
    case = Case("c", "ms", "", giving(4), limits={"a": giving(1), "b": giving(2)}, better="less")

    assert only(compare(case, rounds=1)).limit == 2


def test_a_run_may_give_several_figures_and_each_is_compared() -> None:
    case = Case("latency", "ms", "", lambda: {"": 2.0, "-p99": 9.0}, peers={"peer": lambda: {"": 1.0}}, better="less")

    median, tail = compare(case, rounds=1)

    assert (median.case, median.peers["peer"].ratio) == ("latency", 2)
    assert (tail.case, tail.value, tail.peers) == ("latency-p99", 9, {})


def test_a_peer_that_cannot_run_is_left_out_with_a_reason() -> None:
    def absent() -> Figures:
        raise NotMeasured("not installed")

    outcome = only(compare(Case("c", "records/s", "", giving(1, 1), peers={"p": absent}), rounds=2))

    assert outcome.peers == {}
    assert outcome.skipped == {"p": "not installed"}
    machine: dict[str, object] = {"cores": 2}
    first, second, *_ = format_report(Report(machine, {"python": "3"}, [outcome, outcome])).splitlines()
    assert (first, second) == ("without p: not installed", "cores 2")


def test_a_case_that_cannot_run_has_no_outcome() -> None:
    def ours() -> Figures:
        raise NotMeasured("no Java")

    with pytest.raises(NotMeasured, match="no Java"):
        compare(Case("c", "records/s", "", ours), rounds=1)


def test_a_failure_in_a_later_round_keeps_the_earlier_rounds_and_is_reported() -> None:
    case = Case("c", "records/s", "", giving(1), peers={"p": giving(2, 4), "q": giving(5)})

    outcome = only(compare(case, rounds=2))

    assert outcome.runs == [1]
    assert (outcome.peers["p"].value, outcome.peers["q"].value) == (3, 5)
    assert outcome.skipped == {"ours": "StopIteration: ", "q": "StopIteration: "}


def test_an_unexpected_error_fails_the_case_and_not_the_run() -> None:
    def ours() -> Figures:
        raise OSError("the disk is full")

    with pytest.raises(ContestantFailed, match="OSError: the disk is full"):
        compare(Case("c", "records/s", "", ours), rounds=5)


def test_ctrl_c_keeps_the_finished_runs() -> None:
    left = iter([2.0])

    def peer() -> Figures:
        for value in left:
            return {"": value}
        raise KeyboardInterrupt

    case = Case("c", "records/s", "", giving(1, 3), {"l": giving(4, 4)}, {"p": peer})

    with pytest.raises(Interrupted) as interrupt:
        compare(case, rounds=2)

    outcome = only(interrupt.value.outcomes)
    assert (outcome.runs, outcome.limit, outcome.peers["p"].value) == ([1, 3], 4, 2)
    assert outcome.skipped == {"p": "interrupted by Ctrl-C"}


def test_a_cleanup_error_after_ctrl_c_is_not_a_failure_of_the_case() -> None:
    def ours() -> Figures:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            raise OSError("the connection is closed")

    with remember_interrupts(), pytest.raises(Interrupted) as interrupt:
        compare(Case("c", "records/s", "", ours), rounds=1)

    assert interrupt.value.outcomes == []


def test_a_ctrl_c_that_python_swallows_ends_the_case_before_the_next_run() -> None:
    def ours() -> Figures:
        with suppress(KeyboardInterrupt):  # as inside a finalizer
            signal.raise_signal(signal.SIGINT)
        return {"": 1.0}

    with remember_interrupts(), pytest.raises(Interrupted) as interrupt:
        compare(Case("c", "records/s", "", ours), rounds=2)

    assert only(interrupt.value.outcomes).runs == [1]


def test_very_long_cases_are_measured_only_when_named_in_full() -> None:
    huge = "backlog-streamer-10000000"
    with BenchServers() as servers:  # starts no server
        cases = all_cases(servers, FULL)

    assert huge in find_left_out(cases, [], quick=False)
    assert huge in find_left_out(cases, ["backlog"], quick=False)
    assert huge not in find_left_out(cases, [huge], quick=False)


def test_quick_leaves_out_slow_cases_unless_cases_are_named() -> None:
    with BenchServers() as servers:
        cases = all_cases(servers, QUICK)

    left_out = set(find_left_out(cases, [], quick=True))
    assert {"spark-drain-2", "cost-idle-streamer", "backlog-streamer-1000000"} <= left_out
    assert not {"drain-200b-4", "cost-wal", "backlog-streamer-10000"} & left_out
    assert "spark-drain-2" not in find_left_out(cases, ["spark"], quick=True)


def test_quick_leaves_out_other_settings_and_peers_unless_cases_are_named() -> None:
    with BenchServers() as servers:
        cases = [case for case in all_cases(servers, QUICK) if case.name == "drain-200b-1"]

    [everything] = leave_out(cases, quick=False, peers=True, named=False)
    [quick] = leave_out(cases, quick=True, peers=True, named=False)
    [named] = leave_out(cases, quick=True, peers=True, named=True)

    assert (set(everything.variants), "pgq" in everything.peers) == ({"plain entries", "zstd", "metrics"}, True)
    assert (quick.variants, quick.peers) == ({}, {})
    assert (named.variants, named.peers) == (everything.variants, {})


def test_a_percentile_is_a_measured_value() -> None:
    values = [float(n) for n in range(100)]

    assert percentile(values, 0.5) == 50
    assert percentile(values, 0.99) == 99
    assert percentile([], 0.5) == 0


def test_a_run_at_another_rate_counts_and_is_marked() -> None:
    runs: Iterator[Figures] = iter([{"": 4.0}, Marked({"": 6.0}, "the producer reached 750 of 1000 records/s")])
    report = Report({}, {}, compare(Case("latency", "ms", "", lambda: next(runs), better="less"), rounds=2))

    assert only(report.cases).value == 5.0
    assert format_report(report).startswith("marked ours: latency: the producer reached 750 of 1000 records/s\n")


PAGE = """
| `drain` | records/s | ratio | |
| --- | --- | --- | --- |
| Penstock | 497,000 | | |
| `xadd` alone | 244,000 | 2.0 | a script |
| `peer` | 10 | 36 | |

| `cpu` | sum | ratio |
| --- | --- | --- |
| `peer` | 10 | 0.2 |

| case | | limit |
| --- | --- | --- |
| `steady` | 1 | 2 |
"""


@pytest.mark.parametrize(
    ("case", "ours", "found"),
    [
        pytest.param("drain", 325.0, [], id="a tenth less"),
        pytest.param(
            "drain", 323.0, ["drain: 32.3 times peer, published 36: worse by 10%"], id="more than a tenth less"
        ),
        pytest.param("drain", 500.0, [], id="more is better"),
        pytest.param("cpu", 2.2, [], id="a tenth more of what is to be little"),
        pytest.param("cpu", 2.3, ["cpu: 0.23 times peer, published 0.2: worse by 13%"], id="more of it"),
    ],
)
def test_a_ratio_that_is_worse_than_the_published_one_is_named(case: str, ours: float, found: list[str]) -> None:
    published = read_ratios(PAGE)
    [outcome] = compare(
        Case(case, "", "", giving(ours), peers={"peer": giving(10.0)}, better="more" if case == "drain" else "less"), 1
    )

    assert published == {("drain", "xadd"): 2.0, ("drain", "peer"): 36.0, ("cpu", "peer"): 0.2}
    assert [*find_worse([outcome], published)] == [*found, "1 ratio compared with bench.md, of 3 there"]


def test_published_ratios_are_of_cases_and_contestants_that_exist() -> None:
    with BenchServers() as servers:
        cases = {case.name: {*case.limits, *case.peers} for case in all_cases(servers, FULL)}
    published = read_ratios(PUBLISHED.read_text())

    assert len(published) > 15
    assert [(case, name) for case, name in published if name not in cases.get(case, set())] == []
