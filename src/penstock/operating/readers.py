"""Whose checkpoints a channel has, and how each of them goes on."""

from typing import Literal

from penstock.declaring.kinds import REPLAY_RULE

ReaderKind = Literal["consumer", "reported", "replay"]
"""``consumer``: its checkpoints are here.  ``reported``: they are in another database, which reports them here.  ``replay``: a
``penstock replay`` that has not ended.  No pipeline here declares the last two."""


def find_kind(name: str, *, is_reported: bool) -> ReaderKind:
    """What has checkpoints under a name."""
    if is_reported:
        return "reported"
    return "replay" if REPLAY_RULE.fullmatch(name) else "consumer"


def how_to_go_on(name: str, kind: ReaderKind, *, verb: str = "consume", more: str = "") -> str:
    """What makes it pass records.

    Args:
        name: Its name.
        kind: What it is.
        verb: The command of a consumer: ``consume``, or ``work`` for a queue.
        more: What else helps a consumer that is slow.
    """
    if kind == "replay":
        return f"the same penstock replay … --apply goes on; penstock consumers retire {name} --apply cancels it"
    if kind == "reported":
        return f"run {name} with its own database, which reports its checkpoints here{more}"
    return f"penstock {verb} {name}{more}"


def how_to_end(name: str, kind: ReaderKind) -> str:
    """What to do if it never comes again, as an addition to ``how_to_go_on``, which says so of a replay."""
    if kind == "replay":
        return ""
    return f"; if it is gone for good: penstock consumers retire {name} --apply"
