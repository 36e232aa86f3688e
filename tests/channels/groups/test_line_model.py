"""The readers that wait for a log, beside a plain list, at any millisecond of a clock that is set forward and back."""

from typing import Any

import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from penstock.channels.scripts import script

VALID = 10
LISTS = 3
KEYS = ["places", "heard", *(f"wake{number}" for number in range(LISTS))]
READERS = ["a", "b", "c", "d", "e"]


class Line(RuleBasedStateMachine):
    """Readers come, are heard of, and leave, or are never heard of again."""

    client: redis.Redis

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.now = 1_900_000_000_000
        self.line: list[tuple[str, int, int]] = []  # reader, number, and when it was heard of, in their order

    @rule(by=st.sampled_from([0, 1, 1, 4, VALID - 1, VALID, VALID + 1, -1, -4]))
    def move_clock(self, by: int) -> None:
        self.now += by

    @rule(reader=st.sampled_from(READERS), word=st.sampled_from(["wait", "wait", "leave", "look"]))
    def ask(self, reader: str, word: str) -> None:
        fixed = f"{{'{self.now // 1000}', '{self.now % 1000}999'}}"  # the end of the millisecond
        text = script("log/group/line").text.replace('redis.call("TIME")', fixed)
        before = self.line[0][0] if self.line else None
        woken = {key: self.client.llen(key) for key in KEYS[2:]}
        reply: Any = self.client.eval(text, len(KEYS), *KEYS, reader, word, VALID)

        self.line = [each for each in self.line if self.now - VALID < each[2] <= self.now]
        place = next((at for at, each in enumerate(self.line) if each[0] == reader), None)
        number = self.line[place][1] if place is not None else None
        if word == "wait" and place is None:
            number = (self.line[-1][1] if self.line else 0) + 1
            self.line.append((reader, number, self.now))
        elif word == "wait" and place is not None and number is not None:
            self.line[place] = (reader, number, self.now)
        elif word == "leave" and place is not None:
            del self.line[place]
        names = [each[0] for each in self.line]
        wake = -1 if number is None else number % LISTS
        at = names.index(reader) if reader in names else -1
        assert reply == [b"line", at, len(names) - (reader in names), wake]
        if at == 0:
            woken[f"wake{wake}"] = 0
        elif names and names[0] != before:
            woken[f"wake{self.line[0][1] % LISTS}"] += 1
        assert {key: self.client.llen(key) for key in KEYS[2:]} == woken
        places: Any = self.client.zrange("places", 0, -1)
        assert [name.decode() for name in places] == names
        assert self.client.zcard("heard") == len(names)


def test_the_line_is_in_the_order_of_arrival_and_who_becomes_the_first_is_woken(redis_client: redis.Redis) -> None:
    """A reader is out when it was not heard of for so many milliseconds, and when it was heard of later than now."""
    machine: Any = type("Checked", (Line,), {"client": redis_client})
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=40))
