"""Checks the URL of a Postgres before anything connects to it.

    postgresql://user:password@host:5432/database?sslmode=verify-full
    postgresql://user:password@host,host2:5433/database?target_session_attrs=read-write
    postgresql:///database?host=/run/postgresql

libpq and SQLAlchemy read a password with a raw ``@``, ``/``, ``?`` or ``#`` each in its own way, and show parts of it as a
host or a database in their errors.  The errors here show neither the URL nor a part of it that could belong to a password.
"""

import re
from dataclasses import dataclass
from urllib.parse import quote

import psycopg
from psycopg.conninfo import conninfo_to_dict

from penstock.errors import InvalidSetting

EXAMPLE = "postgresql://host/database"
_SCHEMES = ("postgresql", "postgres")
_SCHEME = re.compile(r"[a-z][a-z0-9.-]{0,30}", re.IGNORECASE)
_BROKEN_ENCODING = re.compile(r"%(?![0-9A-Fa-f]{2})")
_HOST = re.compile(r"(?P<name>\[[^\]]*\]|[^:\[\]]*)(?::(?P<port>\d*))?")
_PORTS = range(1, 65536)
_ENCODED = "in a user or a password, write %2F for /, %3F for ?, %23 for #, %40 for @, %25 for %"


@dataclass(frozen=True, slots=True)
class PostgresUrl:
    """A URL in parts, as libpq takes them: user and password up to the ``@``, hosts, and the rest from ``/`` or ``?`` on."""

    user: str
    hosts: tuple[tuple[str, str], ...]
    rest: str

    @property
    def plain(self) -> str:
        """For libpq."""
        hosts = ",".join(f"{name}:{port}" if port else name for name, port in self.hosts)
        return f"postgresql://{self.user}{hosts}{self.rest}"

    @property
    def for_sqlalchemy(self) -> str:
        """The same; several hosts are options."""
        if len(self.hosts) == 1:
            return self.plain
        hosts = "&".join(f"host={quote(name.strip('[]'))}:{port}" for name, port in self.hosts)
        path, _, options = self.rest.partition("?")
        return f"postgresql://{self.user}{path or '/'}?{hosts}" + (f"&{options}" if options else "")


def parse_postgres_url(url: str) -> PostgresUrl:
    """Parses a URL; a driver's name after ``postgresql`` is left out."""
    scheme, separator, rest = url.strip().partition("://")
    if not separator or scheme.partition("+")[0].lower() not in _SCHEMES:
        shown = f", not with {scheme}://" if separator and _SCHEME.fullmatch(scheme) else ""
        raise InvalidSetting(f"database_url begins with postgresql://{shown}: {EXAMPLE}")
    if _BROKEN_ENCODING.search(rest):
        raise InvalidSetting(f"database_url has a % without two hexadecimal digits: {_ENCODED}")
    end = re.search(r"[/?#]", rest)
    authority = rest[: end.start()] if end else rest
    user, at, hosts = authority.rpartition("@")
    after = rest[len(authority) :]
    if "@" in after or "#" in after:
        raise InvalidSetting(f"database_url has a raw @ or # after its host: {_ENCODED}")
    parsed = PostgresUrl(
        quote(user, safe="%:!$&'()*+,;=~") + at, tuple(_parse_host(host) for host in hosts.split(",")), after
    )
    _check_options(parsed)
    return parsed


def _parse_host(host: str) -> tuple[str, str]:
    found = _HOST.fullmatch(host)
    port = found["port"] or "" if found else ""
    if found is None or (port and int(port) not in _PORTS):
        raise InvalidSetting(
            f"database_url has a host whose port is not a number from 1 to 65535, or a raw character: {_ENCODED}"
        )
    return found["name"], port


def _check_options(parsed: PostgresUrl) -> None:
    try:
        conninfo_to_dict(parsed.plain)
    except UnicodeDecodeError:
        raise InvalidSetting(f"database_url has percent-encoded bytes that are not UTF-8: {_ENCODED}") from None
    except psycopg.ProgrammingError as error:
        raise InvalidSetting(f"database_url: {str(error).strip()}; {EXAMPLE}?option=value") from error
