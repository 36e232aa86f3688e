"""Loads the scripts in ``lua/`` and calls them by their hash.

A script's header names its keys and arguments.  The loader replaces the first line with local variables for them, so that
line numbers stay those of the file.  ``includes:`` names fragments (files whose names begin with ``_``) that several
scripts share; they go into that line too.
"""

import hashlib
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import redis
from hiredis import pack_command
from redis.client import NEVER_DECODE

from penstock.channels.cancelling import cancellable
from penstock.database.statements import directory

T = TypeVar("T")
Argument = bytes | str | int

_MULTI, _EXEC = pack_command(("MULTI",)), pack_command(("EXEC",))

_KEYS = re.compile(r"^-- keys: (?P<names>.+)$", re.MULTILINE)
_ARGS = re.compile(r"^-- args: (?P<names>.+)$", re.MULTILINE)
_INCLUDES = re.compile(r"^-- includes: (?P<names>.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Call:
    """Keys and arguments of one script call."""

    keys: Sequence[str]
    arguments: Sequence[Argument]


@dataclass(frozen=True, slots=True)
class Operation(Generic[T]):
    """One call of a script.

    Attributes:
        script: Name of the script.
        call: Keys and arguments.
        read: Parses the reply.
    """

    script: str
    call: Call
    read: Callable[[Any], T]


@dataclass(frozen=True, slots=True)
class Script:
    """A script: its text as sent to Redis, and its hash."""

    name: str
    text: str
    sha: str

    def call_each(self, client: Any, calls: Sequence[Call]) -> list[Any]:
        """Calls the script several times in one round trip and returns the replies in order.

        The script is loaded again if the server has lost it.  Each call is independent: an error reply is returned, not
        raised.  Text in replies is bytes, even if the client decodes.

        Raises:
            redis.RedisError: The connection failed; any of the calls may have been executed.
        """
        replies: list[Any] = self._queued(client, calls).execute(raise_on_error=False)
        if lost := _lost(replies):
            client.script_load(self.text)
            again = self._queued(client, [calls[i] for i in lost]).execute(raise_on_error=False)
            for i, reply in zip(lost, again, strict=True):
                replies[i] = reply
        return replies

    async def call_each_async(self, client: Any, calls: Sequence[Call]) -> list[Any]:
        """As ``call_each``, on a client of ``redis.asyncio``.

        Raises:
            redis.RedisError: The connection failed; any of the calls may have been executed.
            asyncio.CancelledError: The caller was cancelled; the same.
        """
        sent = self._queued(client, calls).execute(raise_on_error=False)
        replies: list[Any] = await cancellable(sent)
        if lost := _lost(replies):
            await cancellable(client.script_load(self.text))
            sent = self._queued(client, [calls[i] for i in lost]).execute(raise_on_error=False)
            for i, reply in zip(lost, await cancellable(sent), strict=True):
                replies[i] = reply
        return replies

    def call_all(self, client: Any, calls: Sequence[Call]) -> list[Any]:
        """As ``call_each``, but the first error reply is raised.

        Raises:
            redis.RedisError: The connection failed, or a reply is an error; any of the calls may have been executed.
        """
        return _checked(self.call_each(client, calls))

    async def call_all_async(self, client: Any, calls: Sequence[Call]) -> list[Any]:
        """As ``call_all``, on a client of ``redis.asyncio``.

        Raises:
            redis.RedisError: As ``call_all``.
            asyncio.CancelledError: The caller was cancelled; any of the calls may have been executed.
        """
        return _checked(await self.call_each_async(client, calls))

    def call_together(self, client: Any, calls: Sequence[Call]) -> list[Any]:
        """As ``call_each``, but in one transaction: a client that waits for several of the keys is woken once, after all calls.

        Before Redis 7.2 a waiting client still gets the first key only.  On a Cluster, where the keys are on several
        servers, this is ``call_each``.  If the transaction fails, because the server lacks the script, is out of memory or
        does not support transactions, ``call_each`` follows and returns each call's own reply.  Calls must therefore be
        safe to repeat.

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
                _read_reply(connection)  # queued, or the transaction fails
            replies = _read_reply(connection)
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

    async def call_async(self, client: Any, call: Call) -> Any:
        """Calls the script on a client of ``redis.asyncio``; it is loaded again if the server has lost it.

        Raises:
            redis.RedisError: The connection failed, or the reply is an error.
            asyncio.CancelledError: The caller was cancelled; the call may have been executed.
        """
        command = ("EVALSHA", self.sha, len(call.keys), *call.keys, *call.arguments)
        try:
            return await cancellable(client.execute_command(*command, **{NEVER_DECODE: True}))
        except redis.exceptions.NoScriptError:
            await cancellable(client.script_load(self.text))
            return await cancellable(client.execute_command(*command, **{NEVER_DECODE: True}))

    def packed(self, call: Call) -> bytes:
        """The call as bytes, ready to send."""
        arguments = ("EVALSHA", self.sha, len(call.keys), *call.keys, *call.arguments)
        # A third of the time of the client's own packing, which checks every argument.
        packed: bytes = pack_command(arguments)  # type: ignore[arg-type]  # typed for a tuple of bytes only
        return packed

    def _queued(self, client: Any, calls: Sequence[Call]) -> Any:
        """A pipeline with the calls, which nothing has sent yet."""
        pipeline = client.pipeline(transaction=False)
        for call in calls:
            # Not `evalsha`, which a Cluster's pipeline refuses although it can find the node by the keys.
            pipeline.execute_command(
                "EVALSHA", self.sha, len(call.keys), *call.keys, *call.arguments, **{NEVER_DECODE: True}
            )
        return pipeline


def _lost(replies: Sequence[Any]) -> list[int]:
    """The places of the calls for which the server had no script."""
    return [i for i, reply in enumerate(replies) if isinstance(reply, redis.exceptions.NoScriptError)]


def _checked(replies: list[Any]) -> list[Any]:
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


class CallsAhead:
    """Pipelined script calls: a call is sent before the replies to earlier ones have been read.

    It takes one of the client's connections until it is closed; an error makes that connection unusable.  Replies come in
    the order of the calls.  On a Cluster, which has no single connection, a call is sent when its reply is requested.
    """

    def __init__(self, client: Any, script: Script) -> None:
        self._client, self._script = client, script
        self._pool = getattr(client, "connection_pool", None)
        self._connection: Any = None
        self._calls: deque[Call] = deque()
        self._replies: deque[Any] = deque()

    def send(self, call: Call) -> None:
        """Sends a call.

        Raises:
            redis.RedisError: The connection failed; any of the calls sent may have been executed.
        """
        self._calls.append(call)
        if self._pool is None:
            return
        if self._connection is None:
            self._connection = self._pool.get_connection()
        self._connection.send_packed_command([self._script.packed(call)], check_health=False)

    def reply(self) -> Any:
        """The reply to the oldest call; as in ``call_each``, error replies are returned and a lost script is loaded again.

        Raises:
            redis.RedisError: The connection failed; any of the calls sent may have been executed.
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
            # Reads all replies before it loads the script, so that no call is executed out of order.
            self._replies.extend(_read_reply(self._connection) for _ in range(1, len(self._calls)))
            calls = [
                (index, call)
                for index, (call, reply) in enumerate(zip(self._calls, self._replies, strict=True))
                if isinstance(reply, redis.exceptions.NoScriptError)
            ]
            answers = self._script.call_each(self._client, [call for _, call in calls])
            for (index, _), answer in zip(calls, answers, strict=True):
                self._replies[index] = answer

    def close(self) -> None:
        """Releases the connection; disconnects it first if replies are outstanding."""
        connection, self._connection = self._connection, None
        if connection is not None and self._pool is not None:
            if len(self._replies) < len(self._calls):
                connection.disconnect()
            self._pool.release(connection)


def _read_reply(connection: Any) -> Any:
    """The next reply; an error reply is returned, not raised."""
    try:
        return connection.read_response(disable_decoding=True)
    except redis.ResponseError as error:
        return error


def as_text(value: bytes | str) -> str:
    """A value of ours as text; bytes of another's that are no UTF-8 are shown by their numbers."""
    return value if isinstance(value, str) else value.decode(errors="backslashreplace")


@cache
def script(name: str) -> Script:
    """The script ``lua/<name>.lua``.

    Raises:
        FileNotFoundError: There is no such script, or the installation lacks ``lua/``.
        ValueError: Its header does not name its keys and arguments.
    """
    text = _read(name)
    includes = _INCLUDES.search(text)
    fragments = includes["names"].split(", ") if includes else []
    first_line = " ".join([_declarations(name, text), *map(_in_one_line, fragments)])
    _, _, rest = text.partition("\n")
    whole = f"{first_line}\n{rest}"
    return Script(name, whole, hashlib.sha1(whole.encode(), usedforsecurity=False).hexdigest())


def _read(name: str) -> str:
    return (directory("lua") / f"{name}.lua").read_text(encoding="utf-8")


def _in_one_line(name: str) -> str:
    """A fragment on one line, without its comments, which have lines of their own."""
    lines = (line.strip() for line in _read(name).splitlines())
    return " ".join(line for line in lines if line and not line.startswith("--"))


def _declarations(name: str, text: str) -> str:
    """The line of local variables: ``local stream = KEYS[1]; local epoch = tonumber(ARGV[1]); …``."""
    keys, args = _KEYS.search(text), _ARGS.search(text)
    if keys is None or args is None:
        raise ValueError(f"lua/{name}.lua: the header has no 'keys:' or no 'args:' line")
    locals_ = [
        # The remaining keys: the name is the index of the first.
        f"local {key[:-3]} = {i}" if key.endswith("...") else f"local {key} = KEYS[{i}]"
        for i, key in enumerate(keys["names"].split(", "), 1)
    ]
    for i, argument in enumerate(args["names"].split(", "), 1):
        if argument.endswith("..."):  # the remaining arguments: the name is the index of the first
            locals_.append(f"local {argument[:-3]} = {i}")
        elif argument.endswith(":int"):
            locals_.append(f"local {argument[:-4]} = tonumber(ARGV[{i}])")
        else:
            locals_.append(f"local {argument} = ARGV[{i}]")
    return "; ".join(locals_) + ";"
