"""Crash points: the few places where the order of two writes matters, by name.

In production ``crashpoint`` does nothing.  A test installs a function that kills the process at one of them, and goes
through all of ``CRASH_POINTS``, ``QUEUE_CRASH_POINTS``, ``JOB_CRASH_POINTS``, ``RECONCILING_CRASH_POINTS``,
``CHANNEL_CRASH_POINTS`` and ``SPARK_CRASH_POINTS``, so that none is skipped.
"""

from collections.abc import Callable

CRASH_POINTS = (
    "reset.before_redis",
    "reset.between_shards",
    "reset.before_commit",
    "reset.after_commit",
    "epoch.before_commit",
    "epoch.after_commit",
    "streamer.before_register",
    "streamer.after_channels",
    "streamer.after_register",
    "sequencer.before_tick",
    "sequencer.after_tick",
    "publisher.before_append",
    "publisher.after_append",
    "publisher.before_resend",
    "retention.before_commit",
    "retention.after_commit",
    "retention.after_evict",
    "consumer.after_register",
    "consumer.after_read",
    "consumer.after_apply",
    "consumer.before_commit",
    "consumer.after_commit",
    "together.after_apply",
    "together.before_commit",
    "together.after_commit",
    "members.after_reserve",
    "members.after_apply",
    "members.before_commit",
    "members.after_commit",
    "members.after_exchange",
)
"""Every crash point: those of a start, then in the order in which a record passes them."""

QUEUE_CRASH_POINTS = ("queues.after_waiting", "queues.after_write", "queues.after_feed")
"""Those that only records of queues pass."""

RECONCILING_CRASH_POINTS = (
    "repair.before_commit",
    "repair.after_commit",
    "replace.before_commit",
    "replace.after_commit",
)
"""Those that only a reconciliation passes."""

CHANNEL_CRASH_POINTS = ("retire.after_registry", "retire.after_journal")
"""Those that only a channel passes which is retired."""

JOB_CRASH_POINTS = ("jobs.after_apply", "jobs.before_commit", "jobs.after_commit")
"""Those that only a job of a queue passes."""

SPARK_CRASH_POINTS = ("dataframes.after_apply", "dataframes.before_commit", "dataframes.after_commit")
"""Those that only a driver of Spark passes."""

REPEAT_POINTS = ("streamer.after_publish", "consumer.after_round", "members.after_delivery")
"""Places after which a process may do again what it has just done, as after a lost answer."""

_installed: Callable[[str], None] | None = None
_repeats: Callable[[str], bool] | None = None


def crashpoint(name: str) -> None:
    """Marks a place between two writes; calls what a test has installed, else nothing."""
    if _installed is not None:
        _installed(name)


def is_repeated(name: str) -> bool:
    """True if what was just done is to be done again, because the demo or a test wants it: one of ``REPEAT_POINTS``."""
    return _repeats is not None and _repeats(name)


def install_crashpoint(function: Callable[[str], None] | None) -> None:
    """Have ``function`` called with the name of each crash point passed; None takes it away."""
    global _installed  # noqa: PLW0603  one hook for a process is the point
    _installed = function


def install_repeats(function: Callable[[str], bool] | None) -> None:
    """Have ``function`` decide at each of ``REPEAT_POINTS``; None takes it away."""
    global _repeats  # noqa: PLW0603  as above
    _repeats = function
