"""Crash points: the places where the order of two writes matters, by name.

A process may end anywhere, and Postgres and Redis share no transaction: what it has written to one
may be there without what it was about to write to the other.  Wherever that is so, a crash point
stands between the two writes, and the tests end a process at every one: the next process completes
what this one began, and does nothing twice.

In production they do nothing.  The demo installs them too, to end its own processes now and then.

The first part of a name says who writes, the second where between the writes it is:

    streamer      before_register, after_channels, after_register
    sequencer     before_tick, after_tick
    publisher     before_append, after_append, before_resend
    queues        after_waiting, after_write, after_feed
    retention     after_evict, before_commit, after_commit
    consumer      after_register, after_read, after_apply, before_commit, after_commit
    together      after_apply, before_commit, after_commit: of a transaction for several shards
    members       after_reserve, after_apply, before_commit, after_commit, after_exchange
    jobs          after_apply, before_commit, after_commit
    dataframes    after_apply, before_commit, after_commit
    repair        before_commit, after_commit: of rows that differ
    replace       before_commit, after_commit: of a whole state
    epoch         before_commit, after_commit
    reset         before_redis, between_shards, before_commit, after_commit
    retire        after_registry, after_journal

An answer may be lost, too, and what was done is then done again.  It is, if the demo or a test
wants it, behind:

    streamer      after_publish
    consumer      after_round
    members       after_delivery
"""

from collections.abc import Callable

_installed: Callable[[str], None] | None = None
_repeats: Callable[[str], bool] | None = None


def crashpoint(name: str) -> None:
    """Marks a place between two writes; calls what a test has installed, else nothing."""
    if _installed is not None:
        _installed(name)


def is_repeated(name: str) -> bool:
    """True if a test wants the last step repeated, as after a lost reply."""
    return _repeats is not None and _repeats(name)


def install_crashpoint(function: Callable[[str], None] | None) -> None:
    """Installs a function that is called with the name of each crash point passed.

    None removes it.
    """
    global _installed  # noqa: PLW0603  one hook of a process is the point
    _installed = function


def install_repeats(function: Callable[[str], bool] | None) -> None:
    """Installs the function behind ``is_repeated``; None removes it."""
    global _repeats  # noqa: PLW0603  as above
    _repeats = function
