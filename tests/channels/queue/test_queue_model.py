"""Thousands of random steps on one shard of a queue, against a plain model in Python.

The model knows what each message is, and nothing of how the queue finds it.  It follows the queue's own clock.
"""

from collections import Counter
from datetime import UTC, datetime

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fixtures.queue_world import Known, World
from fixtures.queues import INDEXES, Given, Probe
from penstock.channels.queue import NewMessage
from penstock.declaring.unique import KeyLimits, Priority, TenantLimits, Unique
from penstock.errors import TenantFull

TENANTS = st.sampled_from(["elephant", "mouse", "mouse2", "ä"])
KEYS = st.sampled_from(["", "", "k", "k2"])
WORKERS = st.sampled_from(["w1", "w2"])
UNIQUES = st.one_of(
    st.none(),
    st.none(),
    st.none(),
    st.builds(Unique, st.sampled_from(["u", "v"]), st.sampled_from(["queued", "running"])),
    st.builds(Unique, st.sampled_from(["u", "v"]), window=st.just(60.0)),
)
Fields = tuple[str, str, Unique | None, float, float | None, Priority]
FIELDS: st.SearchStrategy[Fields] = st.tuples(
    TENANTS,
    KEYS,
    UNIQUES,
    st.sampled_from([0.0, 0.0, 0.0, 5.5, 50.5]),
    st.sampled_from([None, None, None, -1.5, 15.5, 100.5]),
    st.sampled_from(["normal", "normal", "high", "low"]),
)
OUTCOMES = st.tuples(
    st.sampled_from(["done", "done", "retry", "snooze", "release", "dead"]), st.sampled_from([0.0, 5.5])
)
LIMITS = st.sampled_from(
    [None, {"is_paused": True}, {"in_flight": 1}, {"elastic": 1}, {"weight": 3.0}, {"in_flight": 3}, {"bytes": 3}]
)
KEY_LIMITS = st.dictionaries(
    st.sampled_from(["k", "k2"]),
    st.builds(KeyLimits, in_flight=st.sampled_from([None, 1, 2]), is_paused=st.sampled_from([False, False, True])),
)
LEASE_MS = 20_500
BODIES_TELL = [name for name in INDEXES if name not in ("messages", "finished", "windows")]
"""Keys that may be lost without a change that anybody sees."""


class Model(RuleBasedStateMachine):
    """The queue in Redis, and a model of it."""

    client: redis.Redis

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.probe = Probe(self.client, streams=4, hand=2, is_frozen=True)
        self.probe.write("nobody", "x")
        self.probe.done(self.probe.take(1))
        self.probe.pass_time(1e6)
        self.probe.sweep()
        self.written = 0
        self.world = World()
        self.requests: dict[str, tuple[str, list[Given]]] = {}
        self.taken_at: dict[str, float] = {}
        self.held: list[Given] = []
        self.ended: list[str] = []
        self.totals = Counter({"written": 1, "done": 1})

    def _now(self) -> float:
        return self.probe.now_ms()

    @initialize(fields=st.lists(FIELDS, min_size=2, max_size=8))
    def begin(self, fields: list[Fields]) -> None:
        for each in fields:
            self._write(*each)

    @rule(fields=st.lists(FIELDS, min_size=1, max_size=4))
    def write(self, fields: list[Fields]) -> None:
        for each in fields:
            self._write(*each)

    def _write(
        self, tenant: str, key: str, unique: Unique | None, delay_s: float, deadline_s: float | None, priority: Priority
    ) -> None:
        before = self._now()
        deadline = None if deadline_s is None else datetime.fromtimestamp(round(before / 1000 + deadline_s, 3), UTC)
        self.written += 1
        new = NewMessage(
            tenant,
            str(self.written),
            id=f"m{self.written:04}",
            key=key,
            unique=unique,
            delay_s=delay_s,
            deadline=deadline,
            priority=priority,
        )
        [written] = self.probe.run(self.probe.shard.write([new]))
        now = self._now()

        holder = self.world.holder(unique.name, now) if unique else None
        is_full = holder is None and not self.world.has_room(new)
        assert written.duplicate_of == holder
        assert isinstance(written.refused, TenantFull) == is_full
        assert written.is_new == (holder is None and not is_full)
        if written.is_new:
            self._add(new, now)
            self.totals["written"] += 1

    def _add(self, new: NewMessage, now: float) -> None:
        world = self.world
        world.messages[new.id] = Known(
            new,
            "delayed" if new.delay_s else "waiting",
            world.next_place(),
            due=now + new.delay_s * 1000,
            deadline=new.deadline.timestamp() * 1000 if new.deadline else float("inf"),
            has_name=new.unique is not None and not new.unique.window,
        )
        if new.unique:
            world.windows.pop(new.unique.name, None)
        if new.unique and new.unique.window:
            world.windows[new.unique.name] = (new.id, now + 60_000)

    def _forget(self) -> None:
        forgotten = self.world.forget_finished(self._now())
        self.ended += forgotten
        self.held = [each for each in self.held if each.id not in forgotten]

    @precondition(lambda self: self.world.messages)
    @rule(data=st.data())
    def write_again(self, data: st.DataObject) -> None:
        """As after a lost reply."""
        known = data.draw(st.sampled_from(sorted(self.world.messages)))
        [written] = self.probe.run(self.probe.shard.write([self.world.messages[known].new]))

        assert (written.is_new, written.is_kept) == (False, True)

    @rule(worker=WORKERS, count=st.sampled_from([1, 1, 2, 5]), outcomes=st.lists(OUTCOMES, min_size=1, max_size=4))
    def work(self, worker: str, count: int, outcomes: list[tuple[str, float]]) -> None:
        """Takes messages, and settles some of them at once."""
        for given, (outcome, delay_s) in zip(self.take(worker, count), outcomes, strict=False):
            self._settle(given, outcome, delay_s)

    @rule(worker=WORKERS, count=st.sampled_from([1, 1, 2, 5]))
    def takes(self, worker: str, count: int) -> None:
        self.take(worker, count)

    def take(self, worker: str, count: int) -> list[Given]:
        request = self.probe.new_request(worker)
        taken = self.probe.take(count, worker, request=request, lease_s=LEASE_MS / 1000)
        self._check_taken(taken, count)
        if taken:
            self.requests[worker] = (request, taken)
            self.taken_at[worker] = self._now()
        self.held += taken
        return taken

    def _check_taken(self, taken: list[Given], count: int) -> None:
        now, world = self._now(), self.world
        self.totals["reclaimed"] += world.move_due(now)
        buried = [each for each in world.of("waiting") if each.deadline <= now]
        for each in buried:
            if self.probe.state(each.new.id) == "dead":
                self._end(each, "dead")
        for given in taken:
            known = world.messages[given.id]
            assert known.state == "waiting", "nothing is handed over while another validly holds it"
            assert world.may_go(known)
            assert known.deadline > now
            assert given.message.payload == str(known.new.payload).encode()
            assert given.message.attempts == known.attempts + 1
            lane = known.new.tenant, known.new.key, known.new.priority
            before = [
                each.place for each in world.of("waiting") if (each.new.tenant, each.new.key, each.new.priority) == lane
            ]
            assert known.place == min(before), "a key's messages of a priority come in the order of its line"
            known.state, known.token, known.attempts = "leased", given.token, known.attempts + 1
            known.until, known.settled = now + LEASE_MS, ("", "")
            if known.new.unique and known.new.unique.until == "queued":
                known.has_name = False
        if len(taken) < count and not buried:
            assert not any(map(world.may_go, world.of("waiting"))), "no reader is left idle"

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def take_again(self, data: st.DataObject) -> None:
        """The reply was lost: the same request returns what is still its own."""
        worker = data.draw(st.sampled_from(sorted(self.requests)))
        request, taken = self.requests[worker]
        if self._now() - self.taken_at[worker] > 3_000_000:
            return  # a sweep forgets after an hour what a worker has asked for
        again = self.probe.take(5, worker, request=request)

        messages = self.world.messages
        assert [each.id for each in again] == [
            each.id for each in taken if each.id in messages and messages[each.id].token == request
        ]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), outcome=OUTCOMES)
    def settle(self, data: st.DataObject, outcome: tuple[str, float]) -> None:
        """By a worker that has the message, or had it before, or has settled it already."""
        self._settle(data.draw(st.sampled_from(self.held)), *outcome)

    def _settle(self, given: Given, outcome: str, delay_s: float) -> None:
        delay_s = delay_s if outcome in ("retry", "snooze") else 0.0
        is_ours = self.probe.settle(given, outcome, delay_s=delay_s, seconds=0.0, reason="bad")
        now, known = self._now(), self.world.messages[given.id]

        if known.settled == (given.token, outcome) and known.token == "":
            assert is_ours, "a settlement may be repeated"
            return
        is_old = known.token != given.token and (given.token, outcome) in known.settlements
        if is_old and known.has_lost_record:
            return  # repeated, as far as the body tells
        assert is_ours == (known.state == "leased" and known.token == given.token)
        if is_ours:
            known.settled = (given.token, outcome)
            known.settlements.add(known.settled)
            self._leave(known, outcome, now + delay_s * 1000, delay_s)

    def _leave(self, known: Known, outcome: str, due: float, delay_s: float) -> None:
        known.token = ""
        if outcome in ("done", "dead"):
            self._end(known, "finished" if outcome == "done" else "dead")
            return
        known.attempts -= outcome != "retry"
        known.state, known.due = ("delayed" if delay_s else "waiting"), due

    def _end(self, known: Known, state: str) -> None:
        known.state, known.has_name, known.token = state, False, ""
        self.totals["done" if state == "finished" else "died"] += 1
        known.done_at = self._now()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        given = data.draw(st.sampled_from(self.held))
        is_ours = self.probe.extend(given, LEASE_MS / 1000)

        known = self.world.messages[given.id]
        assert is_ours == (known.state == "leased" and known.token == given.token)
        if is_ours:
            # A lease counts from a clock that is not stored by this call, and stands at most this much later.
            known.until = float(self.client.zscore(self.probe.key("leases"), given.id) or 0)

    @precondition(lambda self: self.world.messages)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.world.messages)))
        known = self.world.messages[id_]
        [was] = self.probe.run(self.probe.shard.delete([id_]))

        assert was == (known.state if known.state != "finished" else "unknown")
        if was != "unknown":
            # It can be written again now, which is another story.
            del self.world.messages[id_]
            if was != "dead":
                self.world.windows = {name: of for name, of in self.world.windows.items() if of[0] != id_}
            self.held = [each for each in self.held if each.id != id_]
            for worker, (request, taken) in self.requests.items():
                self.requests[worker] = (request, [each for each in taken if each.id != id_])

    @precondition(lambda self: self.world.of("dead"))
    @rule(data=st.data())
    def redrive(self, data: st.DataObject) -> None:
        ids = sorted(each.new.id for each in self.world.of("dead"))
        id_ = data.draw(st.sampled_from(ids))
        assert self.probe.run(self.probe.shard.redrive([id_, "nobody"])) == 1

        known = self.world.messages[id_]
        known.state, known.attempts, known.settled = "waiting", 0, ("", "")
        known.place = self.world.next_place()
        if known.deadline <= self._now():
            known.deadline = float("inf")
        unique = known.new.unique
        if unique and self.world.holder(unique.name, self._now()) is None:
            known.has_name = True
            self.world.windows.pop(unique.name, None)

    @rule(tenant=TENANTS, values=LIMITS)
    def limit(self, tenant: str, values: dict[str, float] | None) -> None:
        """A pause and its end, too."""
        limits = TenantLimits(**values) if values else None  # type: ignore[arg-type]
        self.probe.limit(tenant, limits)

        self.world.limits[tenant] = limits or TenantLimits()

    @rule(limits=KEY_LIMITS)
    def limit_keys(self, limits: dict[str, KeyLimits]) -> None:
        """Within each tenant, as one declaration after another."""
        self.probe.limit_keys(within="tenant", **limits)
        self._bury_late()
        self._names_after_a_rebuild()
        self.world.key_limits = limits

    @rule(streams=st.sampled_from([1, 2, 4, 9, 16]))
    def resize(self, streams: int) -> None:
        """A writer or reader with another number of streams."""
        self.probe.resize(streams)

    @rule(seconds=st.sampled_from([1.0, 6.0, 25.0, 70.0]))
    def pass_time(self, seconds: float) -> None:
        """A worker that holds a lease has crashed, if it is long enough."""
        if self._now():
            self.probe.pass_time(seconds)
            self._forget()

    @rule(seconds=st.sampled_from([1.0, 3600.0]))
    def set_the_server_back(self, seconds: float) -> None:
        if self._now():
            self.probe.set_back(seconds)
            self._forget()

    @rule()
    def sweep(self) -> None:
        assert self.probe.is_whole()
        self._bury_late()

    def _bury_late(self) -> None:
        for each in self.world.of("waiting", "delayed"):
            if each.deadline <= self._now():
                self._end(each, "dead")

    @precondition(lambda self: self._now())
    @rule(name=st.sampled_from(BODIES_TELL))
    def lose_a_key(self, name: str) -> None:
        """Somebody has deleted it."""
        before = self._now()
        is_gone = self.client.delete(self.probe.key(name)) == 1
        assert self.probe.sweep() == 0
        if name == "meta":  # its clock begins anew, and so do its counters
            self.client.hset(self.probe.key("meta"), "clock", before)
            self.totals.clear()
            self.probe.limit_keys(within="tenant", **self.world.key_limits)  # as the streamer does
        assert self.probe.is_whole()
        self._bury_late()
        if not is_gone:
            return
        if name == "takes":
            self.requests.clear()
        if name == "leases":
            for each in self.world.of("leased"):
                until = self.client.zscore(self.probe.key("leases"), each.new.id)
                each.until = float(until or 0)
        self._names_after_a_rebuild()

    def _names_after_a_rebuild(self) -> None:
        """A message that has a name and is not done holds it."""
        names = dict(self.client.hgetall(self.probe.key("uniques")))
        for each in self.world.messages.values():
            unique = each.new.unique
            is_open = each.state in ("waiting", "leased", "delayed")
            each.has_name = bool(is_open and unique and names.get(unique.name.encode()) == each.new.id.encode())
        for name, (id_, until) in list(self.world.windows.items()):
            if until <= self._now() or names.get(name.encode()) != id_.encode():
                del self.world.windows[name]
            elif id_ in self.world.messages:
                self.world.messages[id_].has_name = False

    @precondition(lambda self: self._now())
    @rule()
    def lose_all_records(self) -> None:
        """Attempts are those of the bodies, and leases are stale; what was done stays done."""
        names = ("messages", "finished", "windows", "waiting", "leases", "delayed", "dead")
        if not self.client.exists(self.probe.key("messages")):
            return
        self.client.delete(*map(self.probe.key, names))
        assert self.probe.sweep() == 0
        assert self.probe.is_whole()
        for each in self.world.of("leased"):
            each.state, each.token = "waiting", ""
        for each in self.world.of("waiting", "delayed", "dead"):
            each.settled, each.has_lost_record = ("", ""), True
            if each.state == "waiting":
                [each.attempts] = [self._attempts(each.new.id)]
        for each in self.world.of("finished"):
            self.ended.append(each.new.id)
            del self.world.messages[each.new.id]
        self.held = [each for each in self.held if each.id in self.world.messages]
        self.requests.clear()
        self.world.windows.clear()
        self._bury_late()
        self._names_after_a_rebuild()

    def _attempts(self, id_: str) -> int:
        found = self.probe.run(self.probe.shard.explain(id_))
        assert found is not None
        return int(float(found["attempts"]))

    @invariant()
    def counts_are_right(self) -> None:
        stats = self.probe.stats()
        for name in ("waiting", "leased", "delayed", "dead"):
            assert stats[name] == len(self.world.of(name)), name
        assert stats["lost"] == 0
        assert stats["damaged"] == 0
        for name in ("written", "done", "died", "reclaimed"):
            assert stats[name] == self.totals[name], name

    @precondition(lambda self: self.world.messages)
    @rule(data=st.data())
    def explain(self, data: st.DataObject) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.world.messages)))
        known, facts, now = self.world.messages[id_], self.probe.explain(id_).facts, self._now()

        assert (facts["state"], facts["tenant"], facts["key"]) == (known.state, known.new.tenant, known.new.key)
        assert facts["attempts"] == str(known.attempts) or known.has_lost_record
        assert (facts.get("holder", "") == known.token) or known.state != "leased"
        for state, name, moment in (("leased", "lease", known.until), ("delayed", "due", known.due)):
            if known.state == state:
                assert float(facts[name]) == pytest.approx((moment - now) / 1000, abs=0.002, rel=1e-5)

    def teardown(self) -> None:
        """Nothing is lost: whatever is not finished comes out, once."""
        if not self._now():
            return
        for tenant in self.world.limits:
            self.probe.limit(tenant)
        self.probe.limit_keys()
        self._bury_late()
        expected = sorted(e.new.id for e in self.world.of("waiting", "leased", "delayed"))
        late = sorted(e.new.id for e in self.world.of("dead"))
        self.probe.pass_time(200)
        out: list[str] = []
        while given := self.probe.take(100):
            assert all(self.probe.done(given))
            out += [each.id for each in given]
        dead = {each.message.id for each in self.probe.run(self.probe.shard.dead(1000))}

        assert len(out) == len(set(out))
        assert not {*out, *dead} & set(self.ended)
        assert dead >= set(late)
        assert sorted({*out, *dead}) == sorted({*expected, *late})
        assert self.probe.is_whole()
        assert self.probe.stats()["lost"] == 0


def check(client: redis.Redis, *, examples: int) -> None:
    class Checked(Model):
        pass

    Checked.client = client
    run_state_machine_as_test(
        Checked,
        settings=settings(max_examples=examples, stateful_step_count=40, suppress_health_check=list(HealthCheck)),
    )


@pytest.mark.parametrize("delay_s", [0.0, 50.5])
def test_a_message_is_counted_though_its_body_has_the_number_of_the_generation(
    redis_client: redis.Redis, delay_s: float
) -> None:
    """Written after one rebuild, it is found by another at the same time of a clock that was set back between them."""
    Model.client = redis_client
    model, fields = Model(), ("elephant", "", None, delay_s, None, "normal")
    model.begin(fields=[fields])
    model.lose_all_records()
    model.write(fields=[fields])
    model.lose_a_key(name="meta")
    model.lose_all_records()
    model.counts_are_right()
    model.limit("elephant", {"bytes": 2})
    model.write(fields=[fields])  # there is no room
    model.teardown()


def test_a_dead_letter_that_waited_for_its_key_comes_back_though_keys_have_no_limits_any_more(
    redis_client: redis.Redis,
) -> None:
    Model.client = redis_client
    model = Model()
    model.begin(fields=[("elephant", "k", None, 0.0, 15.5, "normal")])
    model.limit_keys(limits={"k": KeyLimits(in_flight=1)})
    model.pass_time(seconds=25.0)
    model.limit_keys(limits={})
    assert model.probe.run(model.probe.shard.redrive(["m0001"])) == 1
    assert [given.id for given in model.probe.take()] == ["m0001"]


@pytest.mark.parametrize("examples", [10, pytest.param(30, marks=pytest.mark.slow)])
def test_a_queue_matches_a_plain_model(redis_client: redis.Redis, examples: int) -> None:
    check(redis_client, examples=examples)


@pytest.mark.storm
@pytest.mark.timeout(600)
def test_a_queue_matches_a_plain_model_over_longer_runs(redis_client: redis.Redis) -> None:
    check(redis_client, examples=200)


@pytest.mark.storm
@pytest.mark.timeout(1200)
def test_a_queue_matches_a_plain_model_over_long_runs(redis_client: redis.Redis) -> None:
    check(redis_client, examples=1_500)
