"""Values and locks beside plain dictionaries, at any millisecond of the server's clock.

The scripts are called as the clients call them, with a clock of the test's.  What is over is over at exactly its deadline; a lock's
number is higher than any before, whatever was lost beside the records.
"""

from typing import Any

import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from penstock.channels.scripts import script

PINS, TIMES, COUNTER = KEYS = ["pins", "times", "counter"]
NAMES = st.sampled_from(["v:a", "v:b", "v:c"])
LOCKS = st.sampled_from(["l:a", "c:a"])
TOKENS = st.sampled_from(["one", "two"])
TTL = st.sampled_from([1, 5, 20])


class Pins(RuleBasedStateMachine):
    """One set of pinned keys: values, and locks with a token and a number."""

    client: redis.Redis

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.now = 1_900_000_000_000_000  # microseconds
        self.values: dict[str, tuple[bytes, int, int]] = {}  # value, deadline, when it is old: milliseconds
        self.locks: dict[str, tuple[str, int, int]] = {}  # token, deadline, number
        self.highest = 0
        self.written = 0

    def call(self, name: str, *arguments: Any) -> Any:
        fixed = f"{{'{self.now // 1_000_000}', '{self.now % 1_000_000:06d}'}}"
        text = script(f"pinned/{name}").text.replace('redis.call("TIME")', fixed)
        return self.client.eval(text, len(KEYS), *KEYS, *arguments)

    @property
    def now_ms(self) -> int:
        return self.now // 1000

    def after(self, ttl_ms: int) -> int:
        """A deadline: the whole time, and less than a millisecond more."""
        return -(-self.now // 1000) + ttl_ms

    def value(self, name: str) -> tuple[bytes, int, int] | None:
        found = self.values.get(name)
        return found if found is not None and found[1] > self.now_ms else None

    def lock(self, name: str) -> tuple[str, int, int] | None:
        found = self.locks.get(name)
        return found if found is not None and found[1] > self.now_ms else None

    @rule(by_us=st.sampled_from([1, 999, 1000, 4999, 5000, 20_000]))
    def wait(self, by_us: int) -> None:
        self.now += by_us

    @rule(name=NAMES, ttl=TTL, fresh=TTL, only_new=st.booleans())
    def put(self, name: str, ttl: int, fresh: int, *, only_new: bool) -> None:
        self.written += 1
        exists = self.value(name) is not None
        reply = self.call("put", name, ttl, fresh, int(only_new), "", "", f"{self.written} x")
        assert reply == [b"exists" if only_new and exists else b"put"]
        if not (only_new and exists):
            self.values[name] = (b"%d x" % self.written, self.after(ttl), self.after(fresh))

    @rule(name=NAMES, ttl=TTL, lock=LOCKS, token=TOKENS)
    def put_as_holder(self, name: str, ttl: int, lock: str, token: str) -> None:
        """The result of a computation: it is pinned, and the lock released, or neither."""
        held = self.lock(lock)
        reply = self.call("put", name, ttl, ttl, 0, lock, token, "computed")
        if held is None or held[0] != token:
            assert reply == [b"lost"]
            return
        assert reply == [b"put"]
        self.values[name] = (b"computed", self.after(ttl), self.after(ttl))
        del self.locks[lock]

    @rule(name=NAMES, ttl=TTL)
    def renew(self, name: str, ttl: int) -> None:
        found = self.value(name)
        assert self.call("renew", name, "", ttl) == [b"lost" if found is None else b"renewed"]
        if found is not None:
            self.values[name] = (found[0], self.after(ttl), found[2])

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        assert self.call("delete", name, "") == [b"lost" if self.value(name) is None else b"deleted"]
        if self.value(name) is not None:
            del self.values[name]

    @rule(name=LOCKS, token=TOKENS, lease=TTL, above=st.sampled_from([0, 0, 2_000_000_000_000_000]))
    def acquire(self, name: str, token: str, lease: int, above: int) -> None:
        held = self.lock(name)
        reply = self.call("lock", name, token, lease, above)
        if held is not None and held[0] != token:
            assert reply == [b"busy", held[1] - self.now_ms]
            return
        word, number = reply[0], int(reply[1])
        assert word == b"granted"
        if held is not None:
            assert number == held[2], "a request that is repeated"
        else:
            assert number > max(self.highest, above)
            assert number >= self.now
            self.highest = number
        self.locks[name] = (token, self.after(lease), number)

    @rule(name=LOCKS, token=TOKENS, lease=TTL)
    def renew_lock(self, name: str, token: str, lease: int) -> None:
        held = self.lock(name)
        is_holder = held is not None and held[0] == token
        assert self.call("renew", name, token, lease) == [b"renewed" if is_holder else b"lost"]
        if held is not None and is_holder:
            self.locks[name] = (token, self.after(lease), held[2])

    @rule(name=LOCKS, token=TOKENS)
    def release(self, name: str, token: str) -> None:
        held = self.lock(name)
        is_holder = held is not None and held[0] == token
        assert self.call("delete", name, token) == [b"deleted" if is_holder else b"lost"]
        if is_holder:
            del self.locks[name]

    @rule(most=st.integers(1, 4))
    def reap(self, most: int) -> None:
        [word, over] = self.call("reap", most)
        assert (word, 0 <= over <= most) == (b"reaped", True)

    @rule(key=st.sampled_from([TIMES, COUNTER]))
    def lose(self, key: str) -> None:
        """The records say what holds: without the counter, the clock gives the next number."""
        self.client.delete(key)
        self.now += 1000
        if key == COUNTER:  # what was asked for from above is known by its asker alone
            self.highest = min(self.highest, self.now - 1)

    @invariant()
    def what_is_live_is_read_and_nothing_else(self) -> None:
        names = ["v:a", "v:b", "v:c"]
        found = [self.value(name) for name in names]
        expected = [None if each is None else [each[0], each[1] - self.now_ms, each[2] - self.now_ms] for each in found]
        assert self.call("get", *names) == [b"pins", *expected]

    def teardown(self) -> None:
        """In the end, what is live is kept, and all the rest is reaped, whatever was lost."""
        for _ in range(30):
            self.call("reap", 1000)
        live = {name for name in self.values if self.value(name)} | {name for name in self.locks if self.lock(name)}
        records: Any = self.client.hkeys(PINS)
        times: Any = self.client.zrange(TIMES, 0, -1)
        assert {name.decode() for name in records} == live == {name.decode() for name in times}


def test_pins_are_over_at_their_deadlines_and_locks_have_one_holder(redis_client: redis.Redis) -> None:
    machine: Any = type("Checked", (Pins,), {"client": redis_client})
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=40))
