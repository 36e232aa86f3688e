"""Finds ``lua/`` and ``migrations/``: inside the package in a wheel, beside ``src/`` in a checkout."""

from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path


@cache
def directory(name: str) -> Traversable:
    """The shipped directory ``name``.

    Raises:
        FileNotFoundError: The installation lacks it.
    """
    shipped = files("penstock") / f"_{name}"
    if shipped.is_dir():
        return shipped
    checkout = Path(__file__).parents[3] / name
    if checkout.is_dir():
        return checkout
    raise FileNotFoundError(
        f"penstock was installed without its {name} directory; install it from a wheel or a whole checkout"
    )
