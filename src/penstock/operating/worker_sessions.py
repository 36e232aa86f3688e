"""Finds sessions of consumers that make no progress, and lists the processes of Penstock.

Those sessions wait for a lock, or their handler or its statement takes long.  More processes help
none of them.  Postgres knows who holds the lock; the queries are not shown, because they may hold
payloads.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from penstock.channels.commands import RedisClient
from penstock.channels.queue.inspection import count_leases
from penstock.channels.queue.stats import READER
from penstock.database.connections import APPLICATION_BYTES
from penstock.database.store import Store
from penstock.display import format_seconds
from penstock.errors import ServerUnavailable
from penstock.records import ShardName

LONG_S = 5.0
"""Seconds after which a session is shown."""

APPLICATION = "penstock consumer "
"""Beginning of the application names of consumers and workers.

Behind a name are the release and the process: see ``name_application``.
"""


@dataclass(frozen=True, slots=True)
class Blocker:
    """The transaction that holds a lock."""

    pid: int  # 0 for a prepared transaction
    application: str
    user: str | None  # the role that it has logged in as
    state: str | None  # ``active``, ``idle in transaction`` …; None if this role may not see it
    query_at: datetime | None  # when its last statement began
    age_s: float | None  # seconds that it has been open

    def __str__(self) -> str:
        """Returns a description."""
        if not self.pid:
            return "a prepared transaction"
        facts = [
            self.application or "unnamed",
            *([f"user {self.user}"] if self.user else []),
            self.state or "state hidden",
        ]
        if self.query_at is not None:
            facts.append(f"its statement began at {self.query_at:%H:%M:%S} UTC")
        if self.age_s is not None:
            facts.append(f"its transaction {format_seconds(self.age_s)} ago")
        return f"process {self.pid} ({', '.join(facts)})"

    @property
    def how_to_end(self) -> str:
        """Returns the command that ends it."""
        if not self.pid:
            return (
                "COMMIT PREPARED or ROLLBACK PREPARED: SELECT gid FROM pg_prepared_xacts ORDER BY "
                "prepared"
            )
        return f"end it in its application, or SELECT pg_terminate_backend({self.pid})"


@dataclass(frozen=True, slots=True)
class WorkerSession:
    """A session of a consumer, or of a worker of a queue."""

    application: str  # the name of the consumer after ``APPLICATION``, and the release
    pid: int
    # ``blocked``: it waits for a lock.  ``handler``: its transaction waits for the handler.
    # ``statement``: a statement runs.
    kind: Literal["blocked", "handler", "statement"]
    since_s: float | None  # seconds; None if this role may not see it
    blockers: tuple[Blocker, ...] = ()  # those that wait for nobody themselves

    def belongs_to(self, consumer: str) -> bool:
        """Returns whether this is a session of a consumer."""
        name, _, _ = self.application.partition("/")
        return name == f"{APPLICATION}{consumer}"[:APPLICATION_BYTES]

    def __str__(self) -> str:
        """Returns a description, to follow the consumer's name."""
        since = "" if self.since_s is None else f" for {format_seconds(self.since_s)}"
        match self.kind:
            case "blocked":
                return f"has waited{since} for a lock of {' and '.join(map(str, self.blockers))}"
            case "handler":
                return (
                    f"has been busy in its handler{since}, without a statement (process {self.pid})"
                )
            case _:
                return f"has been busy with one statement{since} (process {self.pid})"

    @property
    def cause(self) -> str:
        """Returns the cause in a word."""
        return "blocked" if self.kind == "blocked" else "busy"

    @property
    def how_to_go_on(self) -> str:
        """Returns what makes it go on."""
        match self.kind:
            case "blocked":
                return self.blockers[0].how_to_end
            case "handler":
                return (
                    "find out what the handler waits for: another server, a lock of its own, a "
                    "sleep; more processes do not help its shard"
                )
            case _:
                return (
                    "see what takes long: SELECT query FROM pg_stat_activity WHERE pid = "
                    f"{self.pid}"
                )


def read_sessions(store: Store, longer_s: float | None = None) -> tuple[WorkerSession, ...]:
    """Reads the sessions that make no progress, by their process."""
    sessions: dict[int, WorkerSession] = {}
    blockers: dict[int, list[Blocker]] = defaultdict(list)
    values = {"longer_s": LONG_S if longer_s is None else longer_s}
    doing = "reading the sessions of workers"
    for pid, application, kind, since_s, *blocker in store.rows(
        "worker_sessions", values, binary=True, doing=doing
    ):
        sessions[pid] = WorkerSession(application, pid, kind, since_s)
        if blocker[0] is not None:
            blockers[pid].append(Blocker(*blocker))
    return tuple(
        replace(session, blockers=tuple(blockers[pid])) for pid, session in sessions.items()
    )


@dataclass(frozen=True, slots=True)
class _NamedProcess:
    """The name that a process of Penstock gives to its connections."""

    application: str  # without the release and the process
    release: str | None  # None if the name does not say
    process: str | None  # the end of ``find_process``; None if the name does not say

    @property
    def consumer(self) -> str | None:
        """The consumer that it works for; None if it does something else."""
        is_worker = self.application.startswith(APPLICATION)
        return self.application.removeprefix(APPLICATION) if is_worker else None

    @property
    def what(self) -> str:
        """What it does, as in ``streamer``."""
        return self.application.removeprefix("penstock ")


@dataclass(frozen=True, slots=True)
class ProcessSession(_NamedProcess):
    """A session of one of Penstock's processes."""

    pid: int
    user: str | None  # the role that it has logged in as
    host: str | None  # address of its client; None for a socket, or if this role may not see it
    since: datetime | None  # when it connected
    state: str | None  # ``active``, ``idle`` …; None if this role may not see it
    changed_at: datetime | None  # since when it is in that state


def list_sessions(store: Store) -> list[ProcessSession]:
    """Reads the sessions of Penstock's processes, by what they do."""
    doing = "reading the sessions of Penstock"
    rows = store.rows("penstock_sessions", {}, binary=True, doing=doing)
    return [ProcessSession(*row) for row in rows]


@dataclass(frozen=True, slots=True)
class ListedProcess(_NamedProcess):
    """A process, as one of the things that it does."""

    host: str | None = None  # as of a session
    connections: int = 0
    busy: int | None = 0  # connections in a statement or a transaction; None if that is hidden
    since: datetime | None = None  # when the oldest of its connections was opened
    heard_at: datetime | None = None  # when the last statement of one began or ended
    # jobs of a queue that are leased to it; None if it has none, or Redis was not asked
    jobs: int | None = None
    # slots of its readers that have jobs, and how many of them can be busy; None if it has no jobs,
    # or its release does not name its slots
    slots: int | None = None
    busy_slots: int | None = None

    def is_holder(self, consumer: str, process: str | None) -> bool:
        """Returns whether it is a reader of a queue, whose name is not cut."""
        is_same = bool(process and self.process) and str(process).endswith(str(self.process))
        return is_same and self.consumer == consumer


def list_processes(
    sessions: Iterable[ProcessSession], leases: Mapping[str, int]
) -> list[ListedProcess]:
    """Returns the processes of sessions, and of the readers of queues that have leases.

    A worker whose handlers take no session shows by its leases that it is busy.
    """
    grouped: dict[tuple[str | None, ...], list[ProcessSession]] = defaultdict(list)
    for session in sessions:
        grouped[session.application, session.release, session.process, session.host].append(session)
    processes = [_sum_sessions(group) for group in grouped.values()]
    for holder, jobs in leases.items():
        if (match := READER.fullmatch(holder)) is None:
            continue
        consumer, process = match["consumer"], match["process"]
        same = [i for i, listed in enumerate(processes) if listed.is_holder(consumer, process)]
        if not same:  # without a process: of a release before this, or of a queue alone
            beginning = "penstock " if process is None else APPLICATION
            processes.append(ListedProcess(f"{beginning}{consumer}", None, process))
        i = same[0] if same else -1
        listed = replace(processes[i], jobs=(processes[i].jobs or 0) + jobs)
        if match["slots"] is not None:
            slots = int(match["slots"])
            busy = (listed.busy_slots or 0) + min(jobs, slots)
            listed = replace(listed, slots=(listed.slots or 0) + slots, busy_slots=busy)
        processes[i] = listed
    return processes


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes of Penstock, as its connections and the queues show them."""

    processes: Sequence[ListedProcess]
    sessions: Sequence[ProcessSession]
    note: str = ""  # what of the jobs is not known, and why; empty if all is


def read_processes(
    sessions: Sequence[ProcessSession],
    client: RedisClient,
    namespace: str,
    leased: Sequence[ShardName] = (),
) -> Processes:
    """Reads the jobs of processes; ``leased`` are the shards of queues that have leases.

    Without Redis, their jobs are unknown.
    """
    leases, note = Counter[str](), ""
    try:
        if leased:
            leases, are_all = count_leases(client, namespace, leased)
            note = "" if are_all else "Only a part of the jobs was counted."
    except ServerUnavailable as error:
        note = f"Jobs are not known: {error}"
    return Processes(list_processes(sessions, leases), sessions, note)


def _sum_sessions(sessions: Sequence[ProcessSession]) -> ListedProcess:
    first, states = sessions[0], [session.state for session in sessions]
    changes = [session.changed_at for session in sessions if session.changed_at is not None]
    return ListedProcess(
        first.application,
        first.release,
        first.process,
        first.host,
        len(sessions),
        None if None in states else len(states) - states.count("idle"),
        min((session.since for session in sessions if session.since is not None), default=None),
        max(changes, default=None),
    )
