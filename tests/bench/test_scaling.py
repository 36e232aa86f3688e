"""The simulation of many streamers agrees with what can be calculated."""

import pytest

from benchmarks.scaling import Costs, Machines, bound, simulate

COSTS = Costs(sequencer=0.8e-6, postgres=2.6e-6, python=3.4e-6, redis=2.3e-6)


@pytest.mark.parametrize(
    "machines", [Machines(1, 1, 4), Machines(2, 4, 16), Machines(8, 1, 2)], ids=str
)
def test_what_is_scarce_decides(machines: Machines) -> None:
    """One streamer, two, and a Postgres of two cores."""
    assert simulate(COSTS, machines) == pytest.approx(bound(COSTS, machines), rel=0.15)


def test_more_streamers_and_servers_are_faster_as_long_as_they_are_scarce() -> None:
    found = [simulate(COSTS, Machines(n, n, 16)) for n in (1, 2, 4)]
    assert found[1] > 1.6 * found[0]
    assert found[2] > 1.4 * found[1]
