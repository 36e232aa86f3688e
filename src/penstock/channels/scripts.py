"""Loads the scripts in ``lua/`` and calls them by their hash.

A script's header names its keys and arguments.  The loader replaces the first line with local
variables for them, so that line numbers stay those of the file.  ``includes:`` names fragments
(files whose names begin with ``_``) that several scripts share, and that name others in turn; they
go into that line too, each after those that it names, without the functions that the script has no
use for: Lua makes all functions anew at each call.
"""

import hashlib
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import redis
from hiredis import pack_command
from redis.client import NEVER_DECODE

from penstock.channels.commands import RedisClient, RedisCommands
from penstock.channels.driving import Steps, drive
from penstock.channels.server import redis_errors
from penstock.database.statements import directory

T = TypeVar("T")
Argument = bytes | str | int

_MULTI, _EXEC = pack_command(("MULTI",)), pack_command(("EXEC",))

_KEYS = re.compile(r"^-- keys: (?P<names>.+)$", re.MULTILINE)
_ARGS = re.compile(r"^-- args: (?P<names>.+)$", re.MULTILINE)
_INCLUDES = re.compile(r"^-- includes: (?P<names>.+)$", re.MULTILINE)
_COMMENT = re.compile(r"^ *--.*\n", re.MULTILINE)
_FUNCTION = re.compile(
    r"^local function (?P<name>\w+)\([^\n]*\)\n.*?^end\n", re.MULTILINE | re.DOTALL
)
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Call:
    """Keys and arguments of one script call."""

    keys: Sequence[str]
    arguments: Sequence[Argument]


@dataclass(frozen=True, slots=True)
class Operation(Generic[T]):
    """A call of a script, and the function that parses its reply."""

    script: str
    call: Call
    read: Callable[[Any], T]


@dataclass(frozen=True, slots=True)
class Script:
    """A script: its text as sent to Redis, and its hash."""

    name: str
    text: str
    sha: str

    def call_each(self, client: RedisClient, calls: Sequence[Call]) -> list[Any]:
        """Calls the script several times in one round trip and returns the replies in order.

        The script is loaded again if the server has lost it.  Each call is independent: an error
        reply is returned, not raised.  Text in replies is bytes, even if the client decodes.
        Raises ``redis.RedisError``.
        """
        return drive(client, self.steps(calls))

    def steps(self, calls: Sequence[Call]) -> Steps[list[Any]]:
        """Returns ``call_each`` as an operation.  Raises as it does."""
        replies: list[Any] = yield ScriptRequest(self, calls)
        if lost := _find_lost(replies):
            yield lambda client: client.script_load(self.text)
            again = yield ScriptRequest(self, [calls[i] for i in lost])
            for i, reply in zip(lost, again, strict=True):
                replies[i] = reply
        return replies

    def checked_steps(self, calls: Sequence[Call]) -> Steps[list[Any]]:
        """Does as ``steps``, but raises the first error reply.  Raises ``redis.RedisError``."""
        replies = yield from self.steps(calls)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    def call_together(self, client: RedisClient, calls: Sequence[Call]) -> list[Any]:
        """Calls the script as ``call_each`` does, but in one transaction.

        A client that waits for several of the keys is woken once, after all calls.  Before Redis
        7.2 a waiting client still gets the first key only.  On a Cluster, where the keys are on
        several servers, this is ``call_each``.  If the transaction fails, because the server lacks
        the script, is out of memory or does not support transactions, ``call_each`` follows and
        returns each call's own reply.  Calls must therefore be safe to repeat.  Raises
        ``redis.RedisError``.
        """
        if not isinstance(client, redis.Redis):
            return self.call_each(client, calls)
        message = b"".join((_MULTI, *map(self.packed, calls), _EXEC))
        # Each is queued, or the transaction fails.
        *_, replies = _exchange(client, message, len(calls) + 2)
        if isinstance(replies, redis.ResponseError) or _find_lost(replies):
            return self.call_each(client, calls)
        return list(replies)

    def packed(self, call: Call) -> bytes:
        """Returns the call as bytes, ready to send."""
        arguments = ("EVALSHA", self.sha, len(call.keys), *call.keys, *call.arguments)
        # A third of the time of the client's own packing, which checks every argument.
        packed: bytes = pack_command(arguments)  # type: ignore[arg-type]  # typed for a tuple of bytes only
        return packed


@dataclass(frozen=True, slots=True)
class ScriptRequest:
    """A step: calls of a script, in one round trip."""

    script: Script
    calls: Sequence[Call]

    def __call__(self, client: RedisCommands) -> Any:
        """Sends them; returns the replies, or an awaitable of them."""
        if isinstance(client, redis.Redis):
            # A third of the time of the client's own pipeline.
            return _exchange(client, b"".join(map(self.script.packed, self.calls)), len(self.calls))
        pipeline = client.pipeline(transaction=False)
        for call in self.calls:
            # Not `evalsha`, which a Cluster's pipeline refuses although it can find the node by the
            # keys.
            command = ("EVALSHA", self.script.sha, len(call.keys), *call.keys, *call.arguments)
            pipeline.execute_command(*command, **{NEVER_DECODE: True})
        return pipeline.execute(raise_on_error=False)


def operate(operations: Sequence[Operation[T]], activity: str) -> Steps[list[T]]:
    """Runs operations of one script in one round trip; returns their results.

    ``activity`` is for error texts.  Raises ``ServerUnavailable``, ``AppendRefused`` or
    ``ForeignLog``.
    """
    if not operations:
        return []
    with redis_errors(activity):
        replies = yield from script(operations[0].script).checked_steps(
            [operation.call for operation in operations]
        )
    return [operation.read(reply) for operation, reply in zip(operations, replies, strict=True)]


class CallsAhead:
    """Pipelined script calls: a call is sent before the replies to earlier ones have been read.

    It takes one of the client's connections until it is closed; an error makes that connection
    unusable.  Replies come in the order of the calls.  On a Cluster, which has no single
    connection, a call is sent when its reply is requested.
    """

    def __init__(self, client: RedisClient, script: Script) -> None:
        self._client, self._script = client, script
        self._pool = getattr(client, "connection_pool", None)
        self._connection: Any = None
        self._calls: deque[Call] = deque()
        self._replies: deque[Any] = deque()

    def send(self, call: Call) -> None:
        """Sends a call.  Raises ``redis.RedisError``."""
        self._calls.append(call)
        if self._pool is None:
            return
        if self._connection is None:
            self._connection = self._pool.get_connection()
        self._connection.send_packed_command([self._script.packed(call)], check_health=False)

    def reply(self) -> Any:
        """Returns the reply to the oldest call.

        As in ``call_each``, error replies are returned and a lost script is loaded again. Raises
        ``redis.RedisError``.
        """
        if not self._replies:
            self._receive()
        self._calls.popleft()
        return self._replies.popleft()

    def _receive(self) -> None:
        if self._pool is None:
            self._replies.extend(self._script.call_each(self._client, [self._calls[0]]))
            return
        self._replies.append(_read_reply(self._connection))
        if isinstance(self._replies[0], redis.exceptions.NoScriptError):
            # Reads all replies before it loads the script, so that no call is executed out of
            # order.
            self._replies.extend(_read_reply(self._connection) for _ in range(1, len(self._calls)))
            lost = _find_lost(self._replies)
            answers = self._script.call_each(self._client, [self._calls[index] for index in lost])
            for index, answer in zip(lost, answers, strict=True):
                self._replies[index] = answer

    def close(self) -> None:
        """Releases the connection; disconnects it first if replies are outstanding."""
        connection, self._connection = self._connection, None
        if connection is not None and self._pool is not None:
            if len(self._replies) < len(self._calls):
                connection.disconnect()
            self._pool.release(connection)


def _find_lost(replies: Iterable[Any]) -> list[int]:
    """Returns the indexes of the calls whose script the server does not have."""
    return [
        i for i, reply in enumerate(replies) if isinstance(reply, redis.exceptions.NoScriptError)
    ]


def _exchange(client: redis.Redis, message: bytes, count: int) -> list[Any]:
    """Returns the replies to a message of ``count`` commands.

    The message is sent again as often as the client's own retries allow.
    """
    pool = client.connection_pool
    connection: Any = pool.get_connection()

    def exchange() -> list[Any]:
        connection.send_packed_command([message])
        return [_read_reply(connection) for _ in range(count)]

    try:
        replies: list[Any] = connection.retry.call_with_retry(
            exchange, lambda _: connection.disconnect()
        )
    except BaseException:
        connection.disconnect()
        raise
    finally:
        pool.release(connection)
    return replies


def _read_reply(connection: Any) -> Any:
    """Returns the next reply; an error reply is returned, not raised."""
    try:
        return connection.read_response(disable_decoding=True)
    except redis.ResponseError as error:
        return error


def as_text(value: bytes | str) -> str:
    """Returns a value as text; foreign bytes that are not UTF-8 are escaped."""
    return value if isinstance(value, str) else value.decode(errors="backslashreplace")


@cache
def script(name: str) -> Script:
    """Returns the script ``lua/<name>.lua``.  Raises ``FileNotFoundError`` or ``ValueError``."""
    *fragments, text = with_fragments(name).values()
    _, _, body = text.partition("\n")
    used = _without_unused(_COMMENT.sub("", "".join(fragments)), _COMMENT.sub("", body))
    first_line = " ".join(
        [_declarations(name, text), *filter(None, map(str.strip, used.splitlines()))]
    )
    full_text = f"{first_line}\n{body}"
    return Script(
        name, full_text, hashlib.sha1(full_text.encode(), usedforsecurity=False).hexdigest()
    )


@cache
def with_fragments(name: str) -> dict[str, str]:
    """Returns the texts of a file of ``lua/`` and of the fragments that it needs, by name.

    Each comes after those that it needs itself.
    """
    text, files = _read(name), dict[str, str]()
    includes = _INCLUDES.search(text)
    for fragment in includes["names"].split(", ") if includes else ():
        files |= with_fragments(fragment)
    return files | {name: text}


def _read(name: str) -> str:
    return (directory("lua") / f"{name}.lua").read_text(encoding="utf-8")


def _without_unused(fragments: str, body: str) -> str:
    """Returns the fragments without the functions that nothing else in the script names."""

    def if_used(function: re.Match[str]) -> str:
        name = function["name"]
        return function[0] if words[name] > _WORD.findall(function[0]).count(name) else ""

    while True:
        words = Counter(_WORD.findall(fragments + body))
        used = _FUNCTION.sub(if_used, fragments)
        if used == fragments:
            return used
        fragments = used


def _declarations(name: str, text: str) -> str:
    """Returns the line of local variables, such as ``local stream = KEYS[1]; local epoch = …``."""
    keys, args = _KEYS.search(text), _ARGS.search(text)
    if keys is None or args is None:
        raise ValueError(f"lua/{name}.lua: the header has no 'keys:' or no 'args:' line")
    locals_ = (
        *_declare(_expand(keys["names"]), "KEYS"),
        *_declare(args["names"].split(", "), "ARGV"),
    )
    return "; ".join(locals_) + ";"


def _expand(names: str) -> Iterator[str]:
    """Yields names of keys; the name of a fragment stands for its keys."""
    for name in names.split(", "):
        listed = _KEYS.search(_read(name)) if "/" in name else None
        yield from _expand(listed["names"]) if listed else (name,)


def _declare(names: Iterable[str], table: str) -> Iterator[str]:
    for i, name in enumerate(names, 1):
        if name.endswith("..."):  # the remaining ones: the name is the index of the first
            yield f"local {name[:-3]} = {i}"
        elif name.endswith(":int"):
            yield f"local {name[:-4]} = tonumber({table}[{i}])"
        else:
            yield f"local {name} = {table}[{i}]"
