"""Scripts of ``lua/``, called by their hash.

A script's header names its keys and arguments; the loader declares them as locals in place of the first line, so that
line numbers stay those of the file.  ``begins:`` names fragments (files whose names begin with ``_``) that go into that
line too: what several scripts look at first.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import redis
from redis.client import NEVER_DECODE

from penstock.resources import directory

Argument = bytes | str | int

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
