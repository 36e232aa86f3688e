"""Scripts of ``lua/``, called by their hash.

A script's header names its keys and arguments; the loader declares them as locals in place of the first line, so that
line numbers stay those of the file.  ``begins:`` names fragments (files whose names begin with ``_``) that go into that
line too: what several scripts look at first.
"""

import hashlib
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import redis
from hiredis import pack_command
from redis.client import NEVER_DECODE

from penstock.database.resources import directory

Argument = bytes | str | int

_MULTI, _EXEC = pack_command(("MULTI",)), pack_command(("EXEC",))

_KEYS = re.compile(r"^-- keys: (?P<names>.+)$", re.MULTILINE)
_ARGS = re.compile(r"^-- args: (?P<names>.+)$", re.MULTILINE)
_BEGINS = re.compile(r"^-- begins: (?P<names>.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a script: its keys and its arguments."""

    keys: Sequence[str]
    arguments: Sequence[Argument]


@dataclass(frozen=True, slots=True)
class Script:
    """A script: its text as Redis gets it, and its hash."""

    name: str
    text: str
    sha: str

    def call_each(self, client: Any, calls: Sequence[Call]) -> list[Any]:
        """Calls the script several times in one round trip, and gives back the replies in order.

        A server that has lost its scripts is given this one again.  Replies that are errors are returned, not raised:
        each call stands alone.  Texts in replies are bytes, whatever the client decodes.

        Raises:
            redis.RedisError: The connection failed; any of the calls may have been carried out.
        """
        replies = self._send(client, calls)
        lost = [
            i
            for i, reply in enumerate(replies)
            if isinstance(reply, redis.exceptions.NoScriptError)
        ]
        if lost:
            client.script_load(self.text)
            for i, reply in zip(lost, self._send(client, [calls[i] for i in lost]), strict=True):
                replies[i] = reply
        return replies

    def call_together(self, client: Any, calls: Sequence[Call]) -> list[Any]:
        """As ``call_each``, but whoever waits for several of the keys is woken once, when all calls have been carried out.

        A Redis before 7.2 answers those who wait with the first key all the same.  On a Cluster, where the keys lie on
        several servers, it is ``call_each``; and where the server does not do it, as it lacks the script, has no memory, or
        knows no transactions, ``call_each`` follows, and has each call's own answer.  So calls must be safe to repeat.

        Raises:
            redis.RedisError: As ``call_each``.
        """
        pool = getattr(client, "connection_pool", None)
        if pool is None:
            return self.call_each(client, calls)
        connection = pool.get_connection()
        try:
            message = b"".join((_MULTI, *map(self.packed, calls), _EXEC))
            connection.send_packed_command([message], check_health=False)
            for _ in (_MULTI, *calls):
                _answer(connection)  # queued, or the transaction fails
            replies = _answer(connection)
        except BaseException:
            connection.disconnect()
            raise
        finally:
            pool.release(connection)
        if isinstance(replies, redis.ResponseError) or any(
            isinstance(reply, redis.exceptions.NoScriptError) for reply in replies
        ):
            return self.call_each(client, calls)
        return list(replies)

    def packed(self, call: Call) -> bytes:
        """The call as it goes to the server."""
        arguments = ("EVALSHA", self.sha, len(call.keys), *call.keys, *call.arguments)
        # The client's own packing looks at every argument: this takes a third of its time.
        packed: bytes = pack_command(arguments)  # type: ignore[arg-type]  # it takes any number
        return packed

    def _send(self, client: Any, calls: Sequence[Call]) -> list[Any]:
        pipeline = client.pipeline(transaction=False)
        for call in calls:
            # Not `evalsha`: a Cluster's pipeline refuses that method, though it finds the node by the keys.
            pipeline.execute_command(
                "EVALSHA",
                self.sha,
                len(call.keys),
                *call.keys,
                *call.arguments,
                **{NEVER_DECODE: True},
            )
        replies: list[Any] = pipeline.execute(raise_on_error=False)
        return replies


class CallsAhead:
    """Calls of a script that are under way: one is sent before the replies to earlier ones have been read.

    It has a connection of the client to itself, until it is closed; an error breaks it.  The replies come in the order of
    the calls.  A Cluster has no one connection: there a call is sent when its reply is wanted.
    """

    def __init__(self, client: Any, called: Script) -> None:
        self._client, self._script = client, called
        self._pool = getattr(client, "connection_pool", None)
        self._connection: Any = None
        self._calls: deque[Call] = deque()
        self._replies: deque[Any] = deque()

    def send(self, call: Call) -> None:
        """Sends a call.

        Raises:
            redis.RedisError: The connection failed; any of the calls under way may have been carried out.
        """
        self._calls.append(call)
        if self._pool is None:
            return
        if self._connection is None:
            self._connection = self._pool.get_connection()
        self._connection.send_packed_command([self._script.packed(call)], check_health=False)

    def reply(self) -> Any:
        """The reply to the oldest call; errors of the server are returned, and lost scripts mended, as ``call_each`` does.

        Raises:
            redis.RedisError: The connection failed; any of the calls under way may have been carried out.
        """
        if not self._replies:
            self._receive()
        self._calls.popleft()
        return self._replies.popleft()

    def _receive(self) -> None:
        if self._pool is None:
            self._replies.extend(self._script.call_each(self._client, [self._calls[0]]))
            return
        self._replies.append(_answer(self._connection))
        if isinstance(self._replies[0], redis.exceptions.NoScriptError):
            # All replies before the script is loaded, so that no call is carried out before its turn.
            self._replies.extend(_answer(self._connection) for _ in range(1, len(self._calls)))
            calls = [
                (place, call)
                for place, (call, reply) in enumerate(zip(self._calls, self._replies, strict=True))
                if isinstance(reply, redis.exceptions.NoScriptError)
            ]
            answers = self._script.call_each(self._client, [call for _, call in calls])
            for (place, _), answer in zip(calls, answers, strict=True):
                self._replies[place] = answer

    def close(self) -> None:
        """Gives the connection back; breaks it first if replies are still to come."""
        connection, self._connection = self._connection, None
        if connection is not None and self._pool is not None:
            if len(self._replies) < len(self._calls):
                connection.disconnect()
            self._pool.release(connection)


def _answer(connection: Any) -> Any:
    """The next answer; errors of the server are returned."""
    try:
        return connection.read_response(disable_decoding=True)
    except redis.ResponseError as error:
        return error


@cache
def script(name: str) -> Script:
    """The script ``lua/<name>.lua``.

    Raises:
        FileNotFoundError: There is none, or the installation lacks ``lua/``.
        ValueError: Its header does not name its keys and arguments.
    """
    text = _read(name)
    begins = _BEGINS.search(text)
    fragments = begins["names"].split(", ") if begins else []
    first_line = " ".join([_declarations(name, text), *map(_in_one_line, fragments)])
    _, _, rest = text.partition("\n")
    whole = f"{first_line}\n{rest}"
    return Script(name, whole, hashlib.sha1(whole.encode(), usedforsecurity=False).hexdigest())


def _read(name: str) -> str:
    return (directory("lua") / f"{name}.lua").read_text(encoding="utf-8")


def _in_one_line(name: str) -> str:
    """A fragment without its comments, which are lines of their own."""
    lines = (line.strip() for line in _read(name).splitlines())
    return " ".join(line for line in lines if line and not line.startswith("--"))


def _declarations(name: str, text: str) -> str:
    """The line of locals: ``local stream = KEYS[1]; local epoch = tonumber(ARGV[1]); …``."""
    keys, args = _KEYS.search(text), _ARGS.search(text)
    if keys is None or args is None:
        raise ValueError(f"lua/{name}.lua: the header has no 'keys:' or no 'args:' line")
    locals_ = [f"local {key} = KEYS[{i}]" for i, key in enumerate(keys["names"].split(", "), 1)]
    for i, argument in enumerate(args["names"].split(", "), 1):
        if argument.endswith("..."):  # the rest: its name is the index of its first
            locals_.append(f"local {argument[:-3]} = {i}")
        elif argument.endswith(":int"):
            locals_.append(f"local {argument[:-4]} = tonumber(ARGV[{i}])")
        else:
            locals_.append(f"local {argument} = ARGV[{i}]")
    return "; ".join(locals_) + ";"
