"""Text for a terminal, without what a terminal obeys and without passwords.

Keys, actions, reasons and payloads are a producer's free text.  Written raw, an ESC in them commands the operator's
terminal, a newline forges a line, and a bidirectional override reorders one.  Everything that a command prints and every
line of its log goes through here.
"""

import codecs
import json
import re

MASK = "**********"

_PASSWORD_IN_URL = re.compile(
    r"""
    (?<=://)
    (?P<user> [^\s:/?\#@"]* ) :
    (?: \\" | [^\s"] )+          # to the last @: a password may hold a raw one
    @
    """,
    re.VERBOSE,
)
_PASSWORD_IN_PARAMETER = re.compile(
    r"""
    \b (?P<name> \w* (?: password | passwd | secret | token ) ) =
    (?: '(?: [^'\\] | \\. )*' | [^\s&\#"']+ )
    """,
    re.VERBOSE | re.IGNORECASE,
)


def escape(text: str) -> str:
    """A text as one line, for a terminal: every invisible character, and every newline, as JSON escapes it.

    JSON text stays the same JSON: such a character can only stand within a string.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else _as_json(each) for each in text)


def _as_json(text: str) -> str:
    return json.dumps(text)[1:-1]


def _escape_unencodable(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return _as_json(error.object[error.start : error.end]), error.end


UNENCODABLE = "penstock.json"
"""Handler of encoding errors that escapes what a terminal's encoding lacks, instead of raising."""

codecs.register_error(UNENCODABLE, _escape_unencodable)


def escape_lines(text: str) -> str:
    """The same for a text of several lines; all but the first are indented, so that none of them passes for another line."""
    return "\n    ".join(escape(line) for line in text.split("\n"))


def mask(text: str) -> str:
    """Masks passwords by their position: between user and host of a URL, and in parameters such as ``sslpassword=…``."""
    text = _PASSWORD_IN_URL.sub(rf"\g<user>:{MASK}@", text)
    return _PASSWORD_IN_PARAMETER.sub(rf"\g<name>={MASK}", text)
