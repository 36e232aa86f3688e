"""A damaged Ick is made whole, and no member is forgotten on the way.

Nothing is deleted: what does not belong is renamed to a key of its own beside the Ick, where somebody can look at it.
"""

import secrets
from dataclasses import dataclass
from typing import Any

from penstock.channels.ick.dirty_list import checked_keys, run_each
from penstock.channels.ick.operations import Operation, as_text, five
from penstock.channels.routing import IckKeys
from penstock.channels.scripts import Call
from penstock.channels.server import RedisClient
from penstock.errors import DamagedIck


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is wrong with an Ick.

    Attributes:
        key: The key in which it was found.
        found: A type, the beginning of a text, or ``no version beside … members``.
        moved_to: Where the key's content is now, or would be; None if nothing has to move.
        may_have_lost: Members may have been in the key before something else was written there.
    """

    key: str
    found: str
    moved_to: str | None
    may_have_lost: bool


def repair(
    client: RedisClient, key: str, *, namespace: str = "", dry_run: bool = False
) -> list[Damage]:
    """Makes an Ick whole; gives what was wrong with it, nothing if nothing was.

    Args:
        client: From ``connect_redis``.
        key: Name of the Ick.
        namespace: What Ruby's Redis::Namespace would put before its keys.
        dry_run: Only look.

    Raises:
        InvalidIckCall: The key is not text, or the Ick's keys would not share a slot of the Cluster.
        DamagedIck: The Ick has a later format than this release knows; nothing was written.
        ServerUnavailable: Redis does not answer; the repair may have happened, and can be repeated.
        AppendRefused: Redis does not take writes.
    """
    keys = checked_keys(client, key, namespace)
    suffix = f"/displaced-{secrets.token_hex(4)}"
    # In the slot of the others: their hash tag is in the name, but for the version's, whose name it is.
    root = keys.dirty.removesuffix("pset")
    places = {
        "version": f"{root}version{suffix}",
        "dirty": f"{keys.dirty}{suffix}",
        "reserved": f"{keys.reserved}{suffix}",
        "fence": f"{keys.fence}{suffix}",
        "held": f"{keys.held}{suffix}",
    }
    call = Call((*five(keys), *places.values()), (int(not dry_run),))
    operation = Operation("ick/repair", call, lambda reply: _read(reply, keys, places))
    return run_each(client, [operation], f"repairing {keys.version}")[0]


def _read(reply: Any, keys: IckKeys, places: dict[str, str]) -> list[Damage]:
    word, *found = (as_text(part) for part in reply)
    if word == "newer":
        raise DamagedIck(
            f"{keys.version}: found the later format {found[0]}, which this release does not know. "
            "Nothing was changed: update penstock"
        )
    damages = []
    for what, text in zip(found[::2], found[1::2], strict=True):
        if what == "unversioned":
            damages.append(
                Damage(keys.version, f"no version beside {text} members", None, may_have_lost=False)
            )
        else:
            lossy = what in {"dirty", "reserved", "held"}
            damages.append(Damage(getattr(keys, what), text, places[what], may_have_lost=lossy))
    return damages
