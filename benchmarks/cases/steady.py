"""Producers at full speed beside a streamer and a consumer; applied records are removed."""

from benchmarks import watching
from benchmarks.application import BULK, Form
from benchmarks.backlogs import NOTHING, Scale
from benchmarks.cases.consuming import count_applied
from benchmarks.measuring import Case, Figures, NotMeasured
from benchmarks.producing import produce_freely
from benchmarks.servers import BenchServers
from penstock.testing import eventually

APP = "benchmarks.application:keeping_nothing"
PRODUCERS = 2
AT_ONCE = 10
"""Records per transaction."""


def make_cases(servers: BenchServers, scale: Scale) -> list[Case]:
    """One: the rate at which records are applied, and the rate that the producers reach meanwhile."""
    return [
        Case(
            name="steady",
            unit="records/s",
            sentence=f"a consumer applies what {PRODUCERS} producers commit as fast as they can, {AT_ONCE} per transaction",
            ours=lambda: _measure_with_pipeline(servers, scale.seconds),
            limits={"producers alone": lambda: _measure_producers_alone(servers, scale.seconds)},
            variants={"plain entries": lambda: _measure_with_pipeline(servers, scale.seconds, "plain")},
        )
    ]


def _measure_with_pipeline(servers: BenchServers, seconds: float, form: Form = "packed") -> Figures:
    """Counts what is applied when the producers end, then waits until the rest is.

    Raises:
        NotMeasured: Some records are not applied in time.
    """
    database_url = servers.stage(NOTHING)
    with (
        watching.run_engine(
            "inline", database_url, servers.redis_url, consumers=[BULK], app=watching.name_app(APP, form)
        ),
        servers.postgres(database_url) as connection,
    ):
        committed, took = produce_freely(database_url, PRODUCERS, AT_ONCE, seconds, NOTHING.shards)
        done = count_applied(connection, BULK)
        try:
            eventually(
                lambda: count_applied(connection, BULK) == committed,
                f"all {committed} records are applied",
                timeout_s=watching.LATE_S,
            )
        except AssertionError as error:
            raise NotMeasured(str(error)) from None
        return {"": done / took, "-produced": committed / took}


def _measure_producers_alone(servers: BenchServers, seconds: float) -> Figures:
    committed, took = produce_freely(servers.stage(NOTHING), PRODUCERS, AT_ONCE, seconds, NOTHING.shards)
    return {"": committed / took, "-produced": committed / took}
