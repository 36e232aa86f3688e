"""What is reported when shards halt, wait, stop and go on, and dead letters come and go, beside a plain model."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from penstock.database.connections import Connection
from penstock.observer import TroubleReport
from penstock.records import DEFAULT_SCOPE
from penstock.streaming.troubles import TroubleWatch

CONSUMERS, SHARDS = ["one", "two"], [0, 1]
WHO = st.tuples(st.sampled_from(CONSUMERS), st.sampled_from(SHARDS))
SERVER = "waiting for the server: deadlock detected"
WAITING = [None, (SERVER, True), (SERVER, False), ("waiting for a right", True)]  # the text, and whether it is long ago
WHY = st.sampled_from([None, None, "one", "another"])
CHANGES = st.one_of(
    st.tuples(st.just("halt"), st.tuples(WHO, WHY)),
    st.tuples(st.just("wait"), st.tuples(WHO, st.sampled_from(WAITING))),
    st.tuples(st.just("dead_letter"), st.tuples(WHO, st.integers(0, 3), st.sampled_from([None, None, "other"]))),
    st.tuples(st.just("stop"), st.tuples(st.sampled_from(SHARDS), WHY)),
    st.tuples(st.just("retire"), st.tuples(st.sampled_from(CONSUMERS))),
    st.tuples(st.just("begin_an_epoch"), st.tuples()),
)
"""A change by its method's name, with its arguments."""


class Troubles(RuleBasedStateMachine):
    """Two consumers of two shards; a report is (kind, consumer, shard, count)."""

    connection: Connection
    database_url: str

    def __init__(self) -> None:
        super().__init__()
        self.connection.execute("TRUNCATE penstock.checkpoints, penstock.stopped_shards, penstock.troubles")
        self.connection.execute("DELETE FROM penstock.epochs WHERE epoch > 1")
        self.reports: list[TroubleReport] = []
        self.watch = TroubleWatch([self.reports.append], self.database_url, DEFAULT_SCOPE)
        self.epoch = 1
        self.halted: dict[tuple[str, int], str] = {}
        self.waiting: dict[tuple[str, int], Any] = {}
        self.dead: dict[tuple[str, int], tuple[int, bool]] = {}
        self.stopped: dict[int, str] = {}
        self.noted: dict[tuple[Any, ...], Any] = {}
        for consumer in CONSUMERS:
            self.register(consumer)

    def register(self, consumer: str) -> None:
        for shard in SHARDS:
            self.connection.execute(
                'INSERT INTO penstock.checkpoints (consumer, channel, shard, "offset", epoch) VALUES (%s, %s, %s, 0, 1)',
                (consumer, "things", shard),
            )
            self.dead[consumer, shard] = (0, True)

    def retire(self, consumer: str) -> None:
        """It is registered again after it was looked for."""
        self.connection.execute("DELETE FROM penstock.checkpoints WHERE consumer = %s", [consumer])
        for shard in SHARDS:
            for state in (self.halted, self.waiting, self.dead):
                state.pop((consumer, shard), None)
        self.look()
        self.register(consumer)

    @rule(changes=st.lists(CHANGES, min_size=1, max_size=3))
    def change_and_look(self, changes: list[tuple[str, tuple[Any, ...]]]) -> None:
        for name, arguments in changes:
            getattr(self, name)(*arguments)
        self.look()

    def set(self, who: tuple[str, int], values: str, *arguments: Any) -> None:
        statement = f"UPDATE penstock.checkpoints SET {values} WHERE consumer = %s AND shard = %s"
        self.connection.execute(statement.encode(), (*arguments, *who))

    def halt(self, who: tuple[str, int], why: str | None) -> None:
        self.set(who, "halted = %s", why)
        self.halted = {key: text for key, text in self.halted.items() if key != who}
        if why is not None:
            self.halted[who] = why

    def wait(self, who: tuple[str, int], waits: tuple[str, bool] | None) -> None:
        text, is_long = waits or (None, True)
        self.set(who, "waiting = %s, updated_at = clock_timestamp() - %s::interval", text, "1 day" if is_long else "0")
        self.waiting[who] = waits

    def dead_letter(self, who: tuple[str, int], dead: int, reported_by: str | None) -> None:
        """Those that another one's checkpoint reports do not count."""
        self.set(who, "dead = %s, reported_by = %s", dead, reported_by)
        self.dead[who] = (dead, reported_by is None)

    def stop(self, shard: int, why: str | None) -> None:
        self.connection.execute("DELETE FROM penstock.stopped_shards WHERE shard = %s", [shard])
        self.stopped = {key: text for key, text in self.stopped.items() if key != shard}
        if why is not None:
            self.connection.execute("INSERT INTO penstock.stopped_shards VALUES ('things', %s, %s)", (shard, why))
            self.stopped[shard] = why

    def begin_an_epoch(self) -> None:
        self.epoch += 1
        self.connection.execute("INSERT INTO penstock.epochs VALUES (%s, 'x', 1, 'test')", [self.epoch])

    def look(self) -> None:
        found: dict[tuple[Any, ...], Any] = {("halted", *who): why for who, why in self.halted.items()}
        found |= {("stopped", None, shard): why for shard, why in self.stopped.items()}
        found |= {("waiting", *who): "" for who, waits in self.waiting.items() if waits == (SERVER, True)}
        for consumer in CONSUMERS:
            counts = [dead for (name, _), (dead, counts) in self.dead.items() if name == consumer and counts]
            if counts:
                found["dead-lettered", consumer, None] = sum(counts)
        found["epoch", None, None] = self.epoch
        # What has ended is forgotten: a shard still waits, whatever it waits for, until it does not.
        ended = {key for key in self.noted if key[0] in {"halted", "stopped"} and key not in found}
        ended |= {key for key in self.noted if key[0] == "waiting" and self.waiting.get(key[1:]) is None}
        ended |= {key for key in self.noted if key[0] == "dead-lettered" and not any(c == key[1] for c, _ in self.dead)}
        self.noted = {key: detail for key, detail in self.noted.items() if key not in ended}
        expected = []
        for key, detail in found.items():
            before = self.noted.get(key)
            if before == detail or (key[0] == "dead-lettered" and detail == 0 and before is None):
                continue
            self.noted[key] = detail
            count = detail - (before or 0) if key[0] == "dead-lettered" else detail if key[0] == "epoch" else 1
            if count > 0 and not (key[0] == "epoch" and before is None):
                expected.append((*key, count))
        self.reports.clear()
        self.watch.look()
        got = [(report.kind, report.consumer, report.shard, report.count) for report in self.reports]
        assert sorted(got, key=str) == sorted(expected, key=str)


def test_each_trouble_is_reported_when_it_begins_and_when_it_comes_back(
    connection: Connection, database_url: str
) -> None:
    machine: Any = type("Checked", (Troubles,), {"connection": connection, "database_url": database_url})
    run_state_machine_as_test(machine, settings=settings(max_examples=15, stateful_step_count=25))
