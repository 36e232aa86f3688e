"""The chores of a pipeline: slices of what its streamer and its workers do, for a recruiter.

    Chores(pipeline, database, redis_url).install(recruiter, rate=0.1)

Each chore takes one small step with the classes that the other engines use, on connections of the
thread that runs it.  They are opened at first use, wait for nothing longer than a moment, and are
closed when the thread is idle.

A chore that finds nothing says so.  It gives up if another process holds what it needs, if its time
is up, or if a server does not answer; then it leaves that server alone for a while.  Whatever it
has begun is complete, or rolled back, or begun again by the next one, as after a crash of a worker.
"""

import os
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.declaring.kinds import refuse_sources
from penstock.engines.stealing.advice import Advisor, Gauges
from penstock.engines.stealing.job_threads import when_idle
from penstock.engines.stealing.recruiter import Recruiter
from penstock.engines.stealing.sampler import TOLERANCE, Outcome
from penstock.errors import DeclarationError, InvalidChore
from penstock.pipeline import Pipeline

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from penstock.engines.stealing.tools import Tools

RECORDS = 50
"""Most records, members or jobs of one slice."""

TIMEOUT_S = 1.0
"""Longest wait for an answer of a server, in seconds.

A statement of a handler may take five times as long.
"""

Step = Callable[["Tools"], bool]
"""Does a slice; returns whether there was anything to do."""


@dataclass(frozen=True, eq=False)
class Chore:
    """A job for a recruiter: a callable that does one slice.

    Attributes:
        name: Its name when all chores of a pipeline are installed together.
        weight: Its part of their total rate, beside those of the others.
    """

    name: str
    weight: float
    _chores: "Chores"
    _step: Step

    def __call__(self) -> Outcome:
        """Does a slice.

        Raises:
            PenstockError: Other than that a server is unavailable: an operator has to know.
        """
        return self._chores.do(self._step)


class Chores:
    """The chores of one pipeline.

    Any number of processes may do any of them at once, beside streamers and workers: slower, never
    wrong.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        database: "str | Engine",
        redis_url: str,
        *,
        records: int = RECORDS,
        timeout_s: float = TIMEOUT_S,
        **options: Any,
    ) -> None:
        """Connects to nothing, and imports no driver.

        Args:
            pipeline: Whose chores.
            database: The primary: a URL, or an engine whose URL is used.
            redis_url: Of the server that holds the channels.
            records: Most records, members or jobs of one slice.
            timeout_s: Longest wait for an answer of a server, in seconds.
            options: ``prepare=False`` prepares no statements, as behind a pooler.

        Raises:
            DeclarationError: ``records`` or ``timeout_s`` is out of range, or there is another
                option.
        """
        if records < 1 or not timeout_s > 0:
            raise DeclarationError(
                f"records is {records} and timeout_s {timeout_s}; they take 1 and more than 0 "
                "seconds"
            )
        if unknown := options.keys() - {"prepare"}:
            raise DeclarationError(f"chores have no option {min(unknown)}")
        self.pipeline, self.records = pipeline, records
        self._servers = (database, redis_url)
        self._options = {"records": records, "timeout_s": timeout_s, **options}
        self._inherited: list[Tools] = []
        self.gauges: Gauges | None = None

    def stream(self) -> Chore:
        """Sequences what was committed, and publishes at most ``records`` of it."""
        return self._make("stream", 4, lambda tools: not tools.refreshed_streamer().stream().idle)

    def consume(self, consumer: str) -> Chore:
        """Has the handler of a consumer do at most ``records`` records, members or jobs.

        Raises:
            DeclarationError: The pipeline has no such consumer, or it is set-based and needs Spark.
        """
        spec = self.pipeline.get_consumer(consumer)
        why = "it needs their databases: run it with penstock run, or penstock consume"
        refuse_sources(spec.channel, f"chore of consumer {consumer}", why)
        if spec.dataframe:
            raise DeclarationError(
                f"consumer {consumer} is set-based (dataframe=True) and runs on Spark: leave it "
                "out of the chores, and run it with: penstock run --engine spark"
            )
        return self._make(f"consume.{consumer}", 4, lambda tools: tools.consume(spec))

    def retain(self) -> Chore:
        """Removes records that all consumers have passed and ``keep`` releases, for a moment."""
        return self._make("retain", 1, lambda tools: tools.refreshed_streamer().retain() > 0)

    def reclaim(self) -> Chore:
        """Refills queues in Redis and dead-letters late messages, for some milliseconds."""
        return self._make("reclaim", 1, lambda tools: tools.refreshed_streamer().maintain() > 0)

    def sweep(self) -> Chore:
        """Notes records that can get no offset.

        Checks one shard for records that have lost theirs.
        """

        def sweep(tools: "Tools") -> bool:
            tools.refreshed_streamer().sweep()
            return True

        return self._make("sweep", 0.2, sweep)

    def measure(self) -> Chore:
        """Refreshes ``gauges`` and the advice."""

        def measure(tools: "Tools") -> bool:
            self.gauges = tools.measure()
            return True

        return self._make("measure", 0.2, measure)

    def all(self, consumers: Collection[str] | None = None) -> list[Chore]:
        """Every chore that the pipeline needs.

        Args:
            consumers: Names of the consumers; None takes all.

        Raises as ``consume``.
        """
        names = self.pipeline.consumers if consumers is None else consumers
        chores = [self.stream(), *map(self.consume, names), self.retain()]
        if any(channel.traits.has_jobs for channel in self.pipeline.channels.values()):
            chores.append(self.reclaim())
        return [*chores, self.sweep(), self.measure()]

    def install(
        self,
        recruiter: Recruiter,
        rate: float = 0.1,
        *,
        max_rate: float | None = None,
        consumers: Collection[str] | None = None,
        processes: int = 1,
    ) -> Advisor:
        """Installs every chore that the pipeline needs.

        Args:
            recruiter: Whose jobs they become.
            rate: The share of requests, more than 0 and at most 1, that are recruited for any of
                them.
            max_rate: Lets the rates follow the load: together they rise to this at most, and fall
                to ``rate`` again.
            consumers: Names of the consumers; None takes all.
            processes: How many processes share the requests, and have installed the chores, for the
                advice.

        Returns:
            What says which rates would keep up.

        Raises:
            InvalidChore: A rate is out of range, all rates of the recruiter together exceed 1, or a
                chore is installed already; nothing was installed.
            DeclarationError: A consumer needs Spark.
        """
        highest = rate if max_rate is None else max_rate
        if not 0 < rate <= highest <= 1:
            raise InvalidChore(
                "rate", f"is {rate}, up to {highest}; it takes more than 0 and at most 1"
            )
        others = sum(recruiter.rates().values())
        if others + highest > 1 + TOLERANCE:
            raise InvalidChore(
                "rate",
                f"may rise to {highest}, and other jobs have {others:g} already: more than 1",
            )
        chores = self.all(consumers)
        shares = {chore.name: chore.weight / sum(c.weight for c in chores) for chore in chores}
        advisor = Advisor(
            recruiter,
            {name: (share * rate, share * highest) for name, share in shares.items()},
            records=self.records,
            processes=processes,
            prefix=self._prefix,
        )
        installed: list[str] = []
        try:
            for chore in chores:
                job = advisor.following(chore, self) if chore.name.endswith(".measure") else chore
                recruiter.install(job, chore.name, shares[chore.name] * rate)
                installed.append(chore.name)
        except InvalidChore:
            for name in installed:
                recruiter.uninstall(name)
            raise
        return advisor

    def close(self) -> None:
        """Closes the connections of this thread; its next slice opens them again."""
        self._tools().close()

    def do(self, step: Step) -> Outcome:
        """Does a slice with the tools of this thread."""
        tools = self._tools()
        when_idle(tools.close)
        return tools.attempt(step)

    @property
    def _prefix(self) -> str:
        return f"{self.pipeline.scope.schema}."

    def _make(self, name: str, weight: float, step: Step) -> Chore:
        return Chore(self._prefix + name, weight, self, step)

    def _tools(self) -> "Tools":
        """Tools of this thread.  Tools from before a fork belong to the parent process.

        They are kept and never used.
        """
        from penstock.engines.stealing.tools import Tools  # noqa: PLC0415  a process that recruits nobody needs no drivers

        # Made now, of the class that is there now: see
        # `Recruiter`.  Two threads that come first get the same.
        thread: Any = vars(self).setdefault("_thread", threading.local())
        tools: Tools | None = getattr(thread, "tools", None)
        if tools is not None and tools.process != os.getpid():
            self._inherited.append(tools)
            tools = None
        if tools is None:
            tools = thread.tools = Tools(self.pipeline, *self._servers, **self._options)
        return tools
