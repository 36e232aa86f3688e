"""Loads an application's pipeline by its import path: ``module:attribute``."""

import importlib
import sys
from pathlib import Path
from typing import Any

from penstock.errors import DeclarationError
from penstock.pipeline import Pipeline


def load_pipeline(app: str) -> Pipeline:
    """Imports the module, also from the working directory, and returns its pipeline.

    Raises:
        DeclarationError: The path is malformed, its module cannot be imported, or it names no pipeline.
    """
    name, separator, attribute = app.partition(":")
    if not (name and separator and attribute):
        raise DeclarationError(f"--app {app}: give module:attribute, such as shop.events:pipeline")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(name)
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise DeclarationError(
            f"--app {app}: importing {name} from {here} failed: {type(error).__name__}: {first}"
        ) from error
    found: Any = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, Pipeline):
        has = sorted(name for name, value in vars(module).items() if isinstance(value, Pipeline))
        raise DeclarationError(
            f"--app {app}: {attribute} of {name} is {'missing' if found is None else f'a {type(found).__name__}'}, "
            f"not a Pipeline; the module has {', '.join(has) or 'none'}"
        )
    return found
