"""Compares a declared channel with the registered one; needs no driver, unlike workers."""

from dataclasses import dataclass

from penstock.declaring.kinds import Channel, get_traits
from penstock.display import format_count
from penstock.errors import ChannelMismatch, ChannelRetired, ConsumerRenamed


@dataclass(frozen=True, slots=True)
class Registration:
    """The answer of the SQL function ``check_channel`` to a channel's name."""

    kind: str | None  # kind of the channel that is registered with it; None if none is
    shards: int | None  # number of that channel's shards
    fits: (
        bool | None
        # true if the declared kind and shards may be used; None if no channel is registered
    )
    is_retired: bool  # true if the channel was retired


@dataclass(frozen=True, slots=True)
class Objection:
    """Reason why a channel may not be used as declared, with the error and the remedy."""

    error: type[ChannelMismatch | ChannelRetired]
    reason: str
    fix: str


def check_declared(channel: Channel, registration: Registration) -> None:
    """Checks that a channel may be used as it is declared."""
    objection = find_objection(channel, registration)
    if objection is not None:
        raise objection.error(f"{objection.reason}. {objection.fix}")


def find_objection(channel: Channel, registration: Registration) -> Objection | None:
    """Returns the objection to a channel as it is declared; None if there is none."""
    if registration.is_retired:
        return _retired(channel.name)
    if registration.kind is None or registration.fits:
        return None
    return Objection(
        ChannelMismatch,
        f"channel {channel.name} is declared as {_describe(channel.kind, channel.shards)}, and "
        f"registered as {_describe(registration.kind, registration.shards)}: records would go "
        "where nobody reads them, and keys would change shards",
        _what_to_do(channel, registration.kind, registration.shards),
    )


def why_unreadable(consumer: str, channel: str) -> ChannelRetired:
    """Returns the error for a consumer of a channel that was retired."""
    objection = _retired(channel)
    return ChannelRetired(f"consumer {consumer}: {objection.reason}. {objection.fix}")


def why_unregistered(consumer: str, successor: str) -> ConsumerRenamed:
    """Returns the error for a consumer that was renamed."""
    return ConsumerRenamed(
        f"consumer {consumer} was renamed to {successor}: declare it by its new name. As a new "
        "consumer it would "
        f"apply again what {successor} has applied. To use the name for another one: "
        f"penstock consumers retire {consumer} --apply"
    )


def _retired(channel: str) -> Objection:
    return Objection(
        ChannelRetired,
        f"channel {channel} was retired: nothing can be staged for it, or read from it",
        "Remove it from the pipeline; or reuse its name: penstock channels adopt "
        f"{channel} --apply",
    )


def _what_to_do(channel: Channel, kind: str, shards: int | None) -> str:
    """Returns the remedy for a channel that is registered with another kind or number of shards."""
    if kind != channel.kind:
        return "Declare it as it is registered, or a channel of another name"
    if not get_traits(kind).keeps_records:
        return f"Declare shards={shards}, or a channel of another name"
    return (
        f"Declare shards={shards}, or change what is registered first: penstock channels reshard "
        f"{channel.name} --shards {channel.shards}"
    )


def _describe(kind: str, shards: int | None) -> str:
    count = "?" if shards is None else format_count(shards, "shard")
    return f"{'an' if kind == 'ick' else 'a'} {kind} of {count}"
