"""How the streamer scales past this machine: a simulation from what a record costs each process.

    python -m benchmarks.scaling --postgres-cores 16

The costs are those of the case ``shares-cost`` in docs/reference/bench.md, or others that are given.  Records are committed
at a fixed rate; the rate at which every streamer still keeps up is found by bisection.  A streamer reads batches of its share on one connection to Postgres, works on them in one
thread and sends them to the Redis servers of its shards, with as many batches under way as it has in reality; the first
streamer interrupts that for a tick after every round.  Postgres has a number of cores, every streamer and every Redis server one.  The network takes no time.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import mean
from typing import Annotated

import typer

from penstock.channels.log.appending import AHEAD
from penstock.streaming.publisher import ROUND_S
from penstock.streaming.unpublished import BATCH_RECORDS, READ_AHEAD

STREAMERS = (1, 2, 4, 8, 16)
REDIS_SERVERS = (1, 2, 4, 8)
SIMULATED_S = 20.0
PRECISION = 0.01
SHARDS_PER_STREAMER = 4


@dataclass(frozen=True)
class Costs:
    """Processor time of each step, in seconds per record."""

    sequencer: float
    postgres: float
    python: float
    redis: float


@dataclass(frozen=True)
class Machines:
    """What there is of each."""

    streamers: int
    redis_servers: int
    postgres_cores: int


@dataclass
class _Streamer:
    """A streamer's share: batches that are sequenced, read, and under way."""

    number: int
    waiting: float = 0.0
    under_way: int = 0
    sent: int = 0
    reads_until: float = 0.0
    works_until: float = 0.0
    is_ticking: bool = False


Event = Callable[[float, _Streamer], None]


@dataclass
class _Simulation:
    """Events in the order of time: when, their number, what happens, to which streamer."""

    costs: Costs
    machines: Machines
    rate: float
    published: int = 0
    sequenced_until: float = 0.0
    _events: list[tuple[float, int, Event, int]] = field(default_factory=list)
    _lags: list[tuple[float, float]] = field(default_factory=list)
    _count: int = 0

    def keeps_up(self) -> bool:
        """Whether the lag at a tick does not grow: its mean in the last third of the time beside that in the second."""
        self._streamers = [_Streamer(number) for number in range(self.machines.streamers)]
        self._cores = [0.0] * self.machines.postgres_cores
        self._redis = [0.0] * self.machines.redis_servers
        self._add(0.0, self._tick, 0)
        while self._events and self._events[0][0] < SIMULATED_S:
            now, _, happen, number = heapq.heappop(self._events)
            happen(now, self._streamers[number])
        third = SIMULATED_S / 3
        earlier = [lag for at, lag in self._lags if third <= at < 2 * third]
        later = [lag for at, lag in self._lags if at >= 2 * third]
        return mean(later) - mean(earlier) <= PRECISION * self.rate * third

    def _add(self, when: float, happen: Event, number: int) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, happen, number))

    def _use_core(self, now: float, seconds: float) -> float:
        """Uses the first free core of Postgres; returns when it is done."""
        done = max(now, heapq.heappop(self._cores)) + seconds
        heapq.heappush(self._cores, done)
        return done

    def _tick(self, now: float, streamer: _Streamer) -> None:
        streamer.is_ticking = True
        self._lags.append((now, self.rate * now - self.published))
        self._records = self.rate * (now - self.sequenced_until)
        self.sequenced_until = now
        done = self._use_core(now, self._records * self.costs.sequencer)
        self._add(max(done, streamer.works_until), self._ticked, streamer.number)

    def _ticked(self, now: float, streamer: _Streamer) -> None:
        streamer.is_ticking = False
        for each in self._streamers:
            each.waiting += self._records / len(self._streamers)
            self._add(now, self._read, each.number)
        self._add(now + ROUND_S, self._tick, streamer.number)

    def _read(self, now: float, streamer: _Streamer) -> None:
        may_read = not streamer.is_ticking and streamer.under_way < READ_AHEAD + AHEAD
        if may_read and streamer.waiting >= BATCH_RECORDS and now >= streamer.reads_until:
            streamer.waiting -= BATCH_RECORDS
            streamer.under_way += 1
            streamer.reads_until = self._use_core(now, BATCH_RECORDS * self.costs.postgres)
            self._add(streamer.reads_until, self._work, streamer.number)

    def _work(self, now: float, streamer: _Streamer) -> None:
        self._add(now, self._read, streamer.number)
        began = max(now, streamer.works_until)
        streamer.works_until = began + BATCH_RECORDS * self.costs.python
        self._add(streamer.works_until, self._append, streamer.number)

    def _append(self, now: float, streamer: _Streamer) -> None:
        streamer.sent += 1
        shard = streamer.number * SHARDS_PER_STREAMER + streamer.sent % SHARDS_PER_STREAMER
        server = shard % len(self._redis)
        self._redis[server] = max(now, self._redis[server]) + BATCH_RECORDS * self.costs.redis
        self._add(self._redis[server], self._appended, streamer.number)

    def _appended(self, now: float, streamer: _Streamer) -> None:
        self.published += BATCH_RECORDS
        streamer.under_way -= 1
        self._add(now, self._read, streamer.number)


def simulate(costs: Costs, machines: Machines) -> float:
    """The highest rate, in records per second, with which the streamers keep up."""
    low, high = 0.0, 2 * bound(costs, machines)
    while high - low > PRECISION * high:
        rate = (low + high) / 2
        if _Simulation(costs, machines, rate).keeps_up():
            low = rate
        else:
            high = rate
    return low


def bound(costs: Costs, machines: Machines) -> float:
    """The same on paper: the scarcest of the processes, none of which ever waits for another."""
    each = max(costs.python, costs.postgres)
    return min(
        1 / (costs.sequencer + each / machines.streamers),
        machines.redis_servers / costs.redis,
        machines.postgres_cores / (costs.sequencer + costs.postgres),
    )


def lines(costs: Costs, postgres_cores: int) -> Iterator[str]:
    """A table: the simulated rate, and in brackets the one on paper, in thousands of records per second."""
    yield "| streamers | " + " | ".join(f"{n} Redis" for n in REDIS_SERVERS) + " |"
    yield "| --- " * (len(REDIS_SERVERS) + 1) + "|"
    for streamers in STREAMERS:
        cells = []
        for servers in REDIS_SERVERS:
            machines = Machines(streamers, servers, postgres_cores)
            found, paper = simulate(costs, machines), bound(costs, machines)
            cells.append(f"{found / 1000:.0f} ({paper / 1000:.0f})")
        yield f"| {streamers} | " + " | ".join(cells) + " |"


Cost = Annotated[float, typer.Option(help="µs per record", min=0.01)]


def main(
    sequencer: Cost = 0.48,
    postgres: Cost = 2.3,
    python: Cost = 0.68,
    redis: Cost = 0.54,
    postgres_cores: Annotated[int, typer.Option(min=1)] = 16,
) -> None:
    """Prints the table."""
    costs = Costs(*(each / 1e6 for each in (sequencer, postgres, python, redis)))
    for line in lines(costs, postgres_cores):
        typer.echo(line)


if __name__ == "__main__":
    typer.run(main)
