"""A command that the server refuses in the middle of a script, as to a user of an ACL or before Redis 6.2, costs no member."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from penstock.clients import DirtyList, Reservation, Reservations
from penstock.errors import AppendRefused

KEY = "ride-index"
DIRTY = {f"d{number}": float(number) for number in range(4)}
RESERVED = {f"r{number}": float(10 + number) for number in range(4)}
HELD = {f"h{number}": float(20 + number) for number in range(4)}
MEMBERS = {name.encode() for name in (*DIRTY, *RESERVED, *HELD)}
COMMANDS = ["zadd", "zrem", "zremrangebyrank", "hset", "del", "set", "setnx"]


@dataclass(frozen=True)
class Filled:
    """An Ick with members in all three sets, and a user to whom commands can be denied.

    Attributes:
        limited: That user's client.
        held: The reservation of the held members.
        consumer: Its holder, as the limited user.
    """

    limited: redis.Redis
    held: Reservation
    consumer: Reservations


@pytest.fixture
def filled(redis_client: redis.Redis, ick: DirtyList) -> Iterator[Filled]:
    ick.add(HELD)
    holder = Reservations(redis_client, KEY, holder="indexer", adopt=False)
    held = holder.reserve()
    assert isinstance(held, Reservation)
    ick.add(RESERVED)
    ick.reserve(4)
    ick.add(DIRTY)
    redis_client.acl_setuser("limited", enabled=True, nopass=True, keys=["*"], categories=["+@all"], reset=True)
    pool = redis_client.connection_pool
    with redis.Redis(
        connection_pool=redis.ConnectionPool(
            connection_class=pool.connection_class,
            **{**pool.connection_kwargs, "username": "limited", "password": "any"},
        )
    ) as limited:
        consumer = Reservations(limited, KEY, holder="indexer", size=6)
        consumer.holder = holder.holder
        yield Filled(limited, held, consumer)
    redis_client.acl_deluser("limited")


def deny(client: redis.Redis, command: str) -> None:
    client.acl_setuser("limited", enabled=True, commands=[f"-{command}"])


def left(client: Any) -> set[bytes]:
    """The members of all three sets."""
    root = f"{KEY}/ick/{{{KEY}}}/"
    return {member for name in ("pset", "cset", "held") for member in client.zrange(root + name, 0, -1)}


MOVES: dict[str, Callable[[Filled], object]] = {
    "reserve": lambda f: DirtyList(f.limited, KEY).reserve(8),
    "reserve with backwash": lambda f: DirtyList(f.limited, KEY).reserve(8, backwash=True),
    "exchange": lambda f: DirtyList(f.limited, KEY).exchange(8, ["nobody"]),
    "take over": lambda f: f.consumer.reserve(in_place_of=f.held),
    "exchange, fenced": lambda f: f.consumer.exchange(f.held, []),
    "exchange for fewer, fenced": lambda f: smaller(f).exchange(f.held, []),
    "release": lambda f: f.consumer.release(f.held),
}


def smaller(filled: Filled) -> Reservations:
    return Reservations(filled.limited, KEY, size=2)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("move", MOVES)
def test_no_member_is_lost_by_a_move_that_the_server_interrupts(
    move: str, command: str, filled: Filled, redis_client: redis.Redis
) -> None:
    """Guarantee 1."""
    deny(redis_client, command)

    for _ in range(3):
        with suppress(AppendRefused):
            MOVES[move](filled)
    assert left(redis_client) == MEMBERS


@pytest.mark.parametrize("command", COMMANDS)
def test_a_holder_commits_no_member_that_an_interrupted_exchange_has_added(
    command: str, filled: Filled, redis_client: redis.Redis
) -> None:
    """Its next commit removes what its reservation has returned, and nothing else."""
    deny(redis_client, command)

    with suppress(AppendRefused):
        filled.consumer.exchange(filled.held, [])
    redis_client.acl_setuser("limited", enabled=True, categories=["+@all"])
    filled.consumer.release(filled.held, filled.held.members)
    assert left(redis_client) >= MEMBERS - set(filled.held.members)


@pytest.mark.parametrize("move", MOVES)
def test_an_interrupted_move_can_be_repeated_when_the_user_may(
    move: str, filled: Filled, redis_client: redis.Redis
) -> None:
    deny(redis_client, "zadd")

    with pytest.raises(AppendRefused, match="Redis refuses"):
        MOVES[move](filled)
    redis_client.acl_setuser("limited", enabled=True, categories=["+@all"])
    MOVES[move](filled)
    taken = Reservations(redis_client, KEY, holder="next", size=20)
    current = taken.reserve()
    if not isinstance(current, Reservation):
        current = taken.reserve(in_place_of=current)
    assert isinstance(current, Reservation)
    assert set(current.members) == MEMBERS
