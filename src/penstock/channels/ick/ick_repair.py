"""Repairs a damaged Ick without losing a member.

Nothing is deleted: a key with foreign content is renamed to a new key beside the Ick, for later
inspection.
"""

import secrets
from dataclasses import dataclass
from typing import Any

from penstock.channels.commands import RedisClient
from penstock.channels.ick.dirty_list import checked_keys, run_each
from penstock.channels.ick.operations import all_keys
from penstock.channels.routing import IckKeys
from penstock.channels.scripts import Call, Operation, as_text
from penstock.errors import DamagedIck


@dataclass(frozen=True, slots=True)
class Damage:
    """One defect of an Ick."""

    key: str  # the damaged key
    # the type or the beginning of the text that was found, or ``no version beside … members``
    found: str
    # the key that the content was, or would be, moved to; None if nothing has to move
    moved_to: str | None
    may_have_lost: bool  # the key may have held members before something else was written there


def repair(
    client: RedisClient, key: str, *, namespace: str = "", dry_run: bool = False
) -> list[Damage]:
    """Repairs an Ick; returns its defects, an empty list if there were none.

    Args:
        client: From ``connect_redis``.
        key: Name of the Ick.
        namespace: The prefix that Ruby's Redis::Namespace would put before its keys.
        dry_run: Only report the defects.

    Raises:
        InvalidIckCall: The key is not text, or the Ick's keys would not share a Cluster slot.
        DamagedIck: The Ick has a later format than this release knows; nothing was written.
        ServerUnavailable: Redis does not answer; the repair may have been done, and can be
            repeated.
        AppendRefused: Redis does not take writes.
    """
    keys = checked_keys(client, key, namespace)
    suffix = f"/displaced-{secrets.token_hex(4)}"
    # In the same slot: these names contain the hash tag.  The version's key does not, so its new
    # name is built from the root.
    root = keys.dirty.removesuffix("pset")
    displaced = {
        "version": f"{root}version{suffix}",
        "dirty": f"{keys.dirty}{suffix}",
        "reserved": f"{keys.reserved}{suffix}",
        "fence": f"{keys.fence}{suffix}",
        "held": f"{keys.held}{suffix}",
    }
    call = Call((*all_keys(keys), *displaced.values()), (int(not dry_run),))
    operation = Operation("ick/repair", call, lambda reply: _read(reply, keys, displaced))
    return run_each(client, [operation], f"repairing {keys.version}")[0]


def _read(reply: Any, keys: IckKeys, displaced: dict[str, str]) -> list[Damage]:
    word, *defects = (as_text(part) for part in reply)
    if word == "newer":
        raise DamagedIck(
            f"{keys.version}: found the later format {defects[0]}, which this release does not "
            "know. "
            "Nothing was changed: update penstock"
        )
    damages = []
    for name, text in zip(defects[::2], defects[1::2], strict=True):
        if name == "unversioned":
            damages.append(
                Damage(keys.version, f"no version beside {text} members", None, may_have_lost=False)
            )
        else:
            lossy = name in {"dirty", "reserved", "held"}
            damages.append(Damage(getattr(keys, name), text, displaced[name], may_have_lost=lossy))
    return damages
