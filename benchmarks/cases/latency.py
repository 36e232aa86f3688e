"""From the producer's transaction to the log, and to the consumer's commit, at a given rate."""

from collections.abc import Callable, Mapping
from functools import partial

from benchmarks import watching
from benchmarks.application import BULK, Form
from benchmarks.backlogs import NOTHING, OBSERVED, Scale
from benchmarks.cases import limits
from benchmarks.measuring import Case, Figures, Marked, NotMeasured, percentile
from benchmarks.peer_scripts import find_peers
from benchmarks.producing import ProducerLoad, produce
from benchmarks.servers import BenchServers

LOADS = ((10, 1), (1_000, 1), (10_000, 10))
"""Records per second, and records per transaction."""

QUIET = 100
"""Records per second below which the producer is an application with sessions, and the load lasts longer."""

SPARKS_LOAD = (1_000, 1)

KEPT_UP = 0.9
"""Share of the intended rate below which a run is marked."""


def make_cases(servers: BenchServers, scale: Scale) -> list[Case]:
    """To the effect and to the log, at each rate; and on Spark."""
    found = []
    for rate, at_once in LOADS:
        seconds = scale.seconds * (3 if rate < QUIET else 1)
        load = ProducerLoad(rate, at_once, seconds, in_sessions=rate < QUIET)
        found.append(
            Case(
                name=f"latency-{rate}",
                unit="ms",
                sentence=f"from a producer's BEGIN to the consumer's COMMIT, inline, {rate:,} records/s (p50, p99)",
                ours=partial(_measure_to_effect, servers, load, "inline"),
                limits={"a commit": lambda: limits.time_commits(servers)},
                variants={
                    "plain entries": partial(_measure_to_effect, servers, load, "inline", "plain"),
                    OBSERVED: partial(_measure_to_effect, servers, load, "inline", "observed"),
                },
                better="less",
            )
        )
        found.append(
            Case(
                name=f"latency-log-{rate}",
                unit="ms",
                sentence=f"from a producer's BEGIN to a reader of the log, inline, {rate:,} records/s (p50, p99)",
                ours=partial(_measure_to_log, servers, load),
                limits={"a commit": lambda: limits.time_commits(servers)},
                variants={"plain entries": partial(_measure_to_log, servers, load, "plain")},
                peers=find_peers("latency", servers, NOTHING, rate=rate, at_once=at_once, seconds=load.seconds),
                better="less",
            )
        )
    return [*found, _make_spark_case(servers, scale)]


def _make_spark_case(servers: BenchServers, scale: Scale) -> Case:
    load = ProducerLoad(*SPARKS_LOAD, seconds=scale.seconds)
    return Case(
        name=f"latency-spark-{load.rate}",
        unit="ms",
        sentence=f"from a producer's BEGIN to the consumer's COMMIT, on Spark in epochs, {load.rate:,} records/s (p50, p99)",
        ours=lambda: _measure_to_effect(servers, load, "spark"),
        limits={
            "inline engine": lambda: _measure_to_effect(servers, load, "inline"),
            "a commit": lambda: limits.time_commits(servers),
        },
        better="less",
        slow=True,
        rounds=scale.few_rounds,
    )


def _measure_to_effect(
    servers: BenchServers, load: ProducerLoad, engine: watching.EngineName, form: watching.Twin = "packed"
) -> Figures:
    database_url = servers.stage(NOTHING)
    app = watching.name_app(watching.NOTING, form)
    with watching.watch_effects(engine, database_url, servers.redis_url, [BULK], app=app) as arrivals:
        return time_records(database_url, load, arrivals)


def _measure_to_log(servers: BenchServers, load: ProducerLoad, form: Form = "packed") -> Figures:
    database_url = servers.stage(NOTHING)
    with (
        watching.run_engine("inline", database_url, servers.redis_url, app=watching.name_app(watching.APP, form)),
        watching.watch_entries(servers.redis_url, NOTHING.streams) as arrivals,
    ):
        return time_records(database_url, load, arrivals)


def time_records(database_url: str, load: ProducerLoad, arrivals: Callable[[int], Mapping[int, float]]) -> Figures:
    """Produces a load, and measures how long each record took: median and 99th percentile, in ms.

    They are marked with the rate that the producer has reached, if it was too slow.

    Raises:
        NotMeasured: Records did not arrive in time.
    """
    produced = produce(database_url, load, NOTHING.shards)
    arrived = arrivals(len(produced.began))
    missing = len(produced.began) - len(arrived)
    if missing:
        raise NotMeasured(f"{missing} records did not arrive within {watching.LATE_S:.0f} s")
    # The first tenth warms up connections and prepared statements.
    counted = sorted(arrived)[len(arrived) // 10 :]
    took = [(arrived[number] - produced.began[number]) * 1000 for number in counted]
    figures = {"": percentile(took, 0.5), "-p99": percentile(took, 0.99)}
    if produced.rate >= KEPT_UP * load.rate:
        return figures
    return Marked(figures, f"the producer reached {produced.rate:.0f} of {load.rate} records/s")
