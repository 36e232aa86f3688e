"""Decides who may see and do what, where a page is made and where an act is done.

A hidden button alone is never the check.

link    a token that ``penstock console`` prints, which works once, for the user who starts it
users   a file: names, passwords hashed with scrypt, rights
proxy   a header with the name of a user whom a proxy has authenticated, from the proxy's address;
        rights from the file
mounted the application's own function from a request to a ``Visitor``
"""

import hashlib
import hmac
import os
import re
import secrets
import threading
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Literal, get_args

from starlette.requests import Request

from penstock.errors import InvalidSetting

Right = Literal["see", "keys", "payloads", "retry", "drop", "pause", "move"]
"""``see``: names, numbers, times.  ``keys``: also keys, and reasons, which may quote a record.
``payloads``: also payloads.  ``retry``, ``drop``: dead letters and jobs.  ``pause``: pause and
resume.  ``move``: let a halted shard go on."""

RIGHTS: frozenset[Right] = frozenset(get_args(Right))

COOKIE = "penstock_console"
"""Name of the cookie of a session, with the port behind it: browsers send cookies to all ports of a
name."""

SESSION_S = 12 * 3600.0
"""Seconds that a login holds."""

MAX_FAILURES = 5
"""Failed logins of a name in a minute; after these, it waits for the rest of the minute."""

MAX_TRIED = 1000
"""Names, each with its address, whose failures are remembered."""

_SCRYPT = {"n": 2**14, "r": 8, "p": 1, "dklen": 32}


@dataclass(frozen=True, slots=True)
class Visitor:
    """Somebody whose request is answered."""

    name: str  # the name in the log of actions
    rights: frozenset[Right] = frozenset({"see"})  # what he may see and do

    def __post_init__(self) -> None:
        if unknown := self.rights - RIGHTS:
            raise InvalidSetting(
                f"unknown rights: {', '.join(sorted(unknown))}; there are: "
                f"{', '.join(get_args(Right))}"
            )

    def may(self, right: Right) -> bool:
        """Returns whether the visitor has a right; none counts without ``see``."""
        return right in self.rights and "see" in self.rights


def cookie_name(request: Request) -> str:
    """Returns the name of the cookie of a session with the console at a request's port."""
    port = request.headers.get("host", "").rpartition(":")[2]
    return f"{COOKIE}_{port}" if port.isascii() and port.isdigit() else COOKIE


Access = Callable[[Request], Visitor | None]
"""Returns who asks; None if nobody who may see anything."""


def hash_password(password: str) -> str:
    """Returns a password's hash for the file of users."""
    salt = os.urandom(16)
    return f"scrypt:{salt.hex()}:{hashlib.scrypt(password.encode(), salt=salt, **_SCRYPT).hex()}"


def _fits(password: str, hashed: str) -> bool:
    _, salt, expected = hashed.split(":")
    digest = hashlib.scrypt(password.encode(), salt=bytes.fromhex(salt), **_SCRYPT)
    return hmac.compare_digest(digest.hex(), expected)


_NOBODY = hash_password(secrets.token_hex(16))
"""Compared with the password of an unknown name, so that it takes as long as that of a known
one."""


@dataclass(frozen=True, slots=True)
class User:
    """An entry of the file of users."""

    visitor: Visitor
    password: str | None


def read_users(path: Path) -> dict[str, User]:
    """Returns the users of a TOML file.

    Each name is a table with ``rights`` and a ``password``, which a proxy's users do not need.

    Raises ``InvalidSetting``, also if others may read the file.
    """
    try:
        if path.stat().st_mode & 0o027:  # a mounted secret is read by its group
            raise InvalidSetting(f"{path}: others may read it. Type: chmod 640 {path}")
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidSetting(f"{path}: the users cannot be read: {type(error).__name__}") from None
    return {name: _parse_user(path, name, entry) for name, entry in tables.items()}


def _parse_user(path: Path, name: str, entry: Any) -> User:
    table = entry if isinstance(entry, Mapping) else {}
    rights, password = table.get("rights"), table.get("password")
    if not isinstance(rights, list) or not isinstance(password, str | None):
        raise InvalidSetting(
            f'{path}: [{name}] needs rights = ["see", …], '
            "and a password from penstock console --hash-password"
        )
    if password is not None and not re.fullmatch("scrypt:[0-9a-f]{32}:[0-9a-f]{64}", password):
        raise InvalidSetting(
            f"{path}: the password of [{name}] is not a hash; make one: penstock console "
            "--hash-password"
        )
    return User(Visitor(name, frozenset(rights)), password)


@dataclass
class Sessions:
    """Sessions of visitors, by the cookie that they were given.  They end with the process."""

    clock: Callable[[], float] = monotonic
    _visitors: dict[str, tuple[Visitor, float]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, visitor: Visitor) -> str:
        """Begins a session; returns its cookie's value."""
        value, now = secrets.token_urlsafe(32), self.clock()
        with self._lock:
            self._visitors = {key: held for key, held in self._visitors.items() if held[1] > now}
            self._visitors[_digest(value)] = visitor, now + SESSION_S
        return value

    def find(self, request: Request) -> Visitor | None:
        """Returns the visitor of a request's cookie."""
        visitor, until = self._visitors.get(_digest(_get_cookie(request)), (None, 0.0))
        return visitor if until > self.clock() else None

    def end(self, request: Request) -> None:
        """Ends the session of a request."""
        with self._lock:
            self._visitors.pop(_digest(_get_cookie(request)), None)


def _get_cookie(request: Request) -> str:
    return request.cookies.get(cookie_name(request), "")


def _digest(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()


@dataclass
class Entrance:
    """Lets visitors in to a console that runs by itself."""

    users: Mapping[str, User] = field(default_factory=dict)  # those of the file
    token: str | None = None  # works once; None if there is a file, or a proxy
    proxy_header: str | None = None  # the header that names the user
    proxy: str = ""  # the address from which it is believed
    sessions: Sessions = field(default_factory=Sessions)
    _failures: dict[str, list[float]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, request: Request) -> Visitor | None:
        """Returns the visitor of a request."""
        if self.proxy_header is not None:
            if request.client is None or request.client.host != self.proxy:
                return None
            names = request.headers.getlist(self.proxy_header)
            user = self.users.get(names[0]) if len(names) == 1 else None
            return None if user is None else user.visitor
        return self.sessions.find(request)

    def redeem(self, token: str) -> str | None:
        """Returns the cookie for a token, once; None if it is another one."""
        with self._lock:
            if self.token is None or not hmac.compare_digest(token.encode(), self.token.encode()):
                return None
            self.token = None
        return self.sessions.begin(Visitor("local", RIGHTS))

    def log_in(self, name: str, password: str, host: str) -> str | None:
        """Returns the cookie for a name and a password.

        None if they do not fit, or after too many failures from that host.
        """
        now, attempt = self.sessions.clock(), f"{host} {name}"
        with self._lock:
            recent = [time_s for time_s in self._failures.get(attempt, ()) if time_s > now - 60]
            if len(recent) >= MAX_FAILURES:
                return None
            if len(self._failures) > MAX_TRIED:
                del self._failures[next(iter(self._failures))]
            self._failures[attempt] = [*recent, now]
        user = self.users.get(name)
        hashed = (user.password if user else None) or _NOBODY
        if not _fits(password, hashed) or user is None:  # that of nobody fits none
            return None
        with self._lock:
            self._failures.pop(attempt, None)
        return self.sessions.begin(user.visitor)
