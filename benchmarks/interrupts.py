"""Ctrl-C: raises KeyboardInterrupt, and is remembered, since Python drops what is raised during garbage collection."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType

_pressed = Event()


@contextmanager
def remember_interrupts() -> Iterator[None]:
    """Handles Ctrl-C in this block; from the main thread only."""
    before = signal.getsignal(signal.SIGINT)
    install_handler()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        _pressed.clear()


def install_handler() -> None:
    """Puts the handler back after a library has installed its own."""
    signal.signal(signal.SIGINT, _interrupt)


def check_interrupt() -> None:
    """Raises KeyboardInterrupt if Ctrl-C has been pressed, even if it was raised and lost before."""
    if _pressed.is_set():
        raise KeyboardInterrupt


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    _pressed.set()
    raise KeyboardInterrupt
