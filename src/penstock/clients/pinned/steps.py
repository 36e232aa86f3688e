"""What takes several calls, without any input or output: waiting for a lock, and computing a value once."""

import random
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

import structlog

from penstock.clients.arguments import Text, checked_ms, checked_value, checked_wait_s
from penstock.clients.pinned.operations import Granted, LockName, Pin, PinOperations, Refusal, computing_name
from penstock.clients.running import Compute, Pause, Steps
from penstock.errors import LockBusy, PenstockError, ServerUnavailable

log = structlog.get_logger("penstock.clients")

FIRST_PAUSE_S, MAX_PAUSE_S = 0.02, 0.5
"""First and longest pause of one that waits, in seconds."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A lock that was taken.

    Attributes:
        lock: The lock, with the token that it was taken with.
        number: Its fencing number.
        asked_at: Monotonic time before the request, in seconds: the lease lasts at least from here.
    """

    lock: LockName
    number: int
    asked_at: float


class Waiting:
    """Pauses that grow, until the time to wait is over."""

    def __init__(self, wait_s: float) -> None:
        self._until = monotonic() + checked_wait_s("wait_s", wait_s)
        self._pause_s = FIRST_PAUSE_S

    def next_pause(self, left_s: float) -> Pause | None:
        """The next pause; None if the time is over.

        Args:
            left_s: Seconds until what is waited for is over by itself.
        """
        left = self._until - monotonic()
        if left <= 0:
            return None
        longest, self._pause_s = self._pause_s, min(2 * self._pause_s, MAX_PAUSE_S)
        # Random, so that those who wait together do not come together.
        pause = random.uniform(longest / 2, longest)  # noqa: S311  not for secrets
        return Pause(min(pause, left, max(left_s, 0.001)))


def take_lock(
    operations: PinOperations, lock: LockName, lease_s: float, wait_s: float, above: int
) -> Steps[Taken | None]:
    """Takes a lock; None if somebody else holds it for the whole time to wait."""
    waiting = Waiting(wait_s)
    while True:
        asked_at = monotonic()
        found = yield from _try_lock(operations, lock, lease_s, above)
        if isinstance(found, Granted):
            return Taken(lock, found.number, asked_at)
        pause = waiting.next_pause(found.left_s)
        if pause is None:
            return None
        yield pause


def _try_lock(operations: PinOperations, lock: LockName, lease_s: float, above: int) -> Steps[Granted | Refusal]:
    try:
        found: Granted | Refusal = yield operations.lock(lock, lease_s, above)
    except Exception:
        raise
    except BaseException:
        # Cancelled, or interrupted: the server may have granted it, and nobody would release it.
        yield from _unlock(operations, lock)
        raise
    return found


def _unlock(operations: PinOperations, lock: LockName) -> Steps[None]:
    """Releases a lock after an error, which it does not replace."""
    with suppress(PenstockError):
        yield operations.unlock(lock)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a value is computed once.

    Attributes:
        key: Its key.
        ttl_s: Seconds until it is gone.
        fresh_s: Seconds until somebody computes it again, while the others take the old one.
        wait_s: Seconds to wait for another process that computes it, if there is no old one.
        lease_s: Seconds that a computation may take before another process begins one too.
    """

    key: Text
    ttl_s: float
    fresh_s: float
    wait_s: float
    lease_s: float

    def __post_init__(self) -> None:
        checked_ms("ttl_s", self.ttl_s)
        checked_ms("fresh_s", self.fresh_s)
        checked_wait_s("wait_s", self.wait_s)
        checked_ms("lease_s", self.lease_s)


def compute_once(operations: PinOperations, recipe: Recipe) -> Steps[bytes]:
    """The value: a fresh one, an old one while somebody else computes, or one computed here.

    Raises:
        LockBusy: There is no old one, and another process has not finished in time.
    """
    lock, waiting = computing_name(recipe.key), Waiting(recipe.wait_s)
    while True:
        [found] = yield operations.get(recipe.key)
        if found and found.fresh_s > 0:
            return bytes(found.value)
        held = yield from _try_lock(operations, lock, recipe.lease_s, 0)
        if isinstance(held, Granted):
            return (yield from _compute(operations, recipe, lock))
        if found:
            return bytes(found.value)
        pause = waiting.next_pause(held.left_s)
        if pause is None:
            raise LockBusy(
                f"{operations.name}: another process computes {shown(recipe.key)}, there is no old value, and "
                f"{recipe.wait_s:g} s were not enough. Raise wait_s, or try again later"
            )
        yield pause


def _compute(operations: PinOperations, recipe: Recipe, lock: LockName) -> Steps[bytes]:
    """Computes the value as the holder of its lock."""
    try:
        found: list[Pin | None] = yield operations.get(recipe.key)
        if found[0] and found[0].fresh_s > 0:  # from one that finished just before
            yield from _unlock(operations, lock)
            return found[0].value
        result = yield Compute()
        value = checked_value("the function's result", result)
        yield from _put(operations, recipe, lock, value)
    except BaseException:
        yield from _unlock(operations, lock)
        raise
    return value


def _put(operations: PinOperations, recipe: Recipe, lock: LockName, value: bytes) -> Steps[None]:
    """Pins what was computed; its caller gets it even if it cannot be pinned."""
    try:
        is_ours = yield operations.put_computed(recipe.key, value, recipe.ttl_s, recipe.fresh_s, lock)
    except ServerUnavailable as error:
        log.warning("a computed value was not pinned", error=type(error).__name__)
    else:
        if not is_ours:
            log.warning("a computed value was not pinned: it took longer than lease_s", lease_s=recipe.lease_s)


def shown(name: Text) -> str:
    """A name for error texts."""
    return repr(name.decode(errors="backslashreplace") if isinstance(name, bytes) else name)
