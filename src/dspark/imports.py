"""A user's own policy or drafter, by import path."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dspark.errors import DSparkError

__all__ = ["make_imported"]


def make_imported(path: str, make: Callable[[Any], Any], needed: Sequence[str], otherwise: str = "") -> Any:
    """What `make` makes of the object at `module:attribute`. The module is looked for in the current directory, too.

    Args:
        needed: attributes that it must have.
        otherwise: what else could be done about a `path` of another form.

    Raises:
        DSparkError: the path leads nowhere, or `make` fails, or an attribute is missing.
    """
    module_name, _, attribute = path.partition(":")
    if not (module_name and attribute):
        raise DSparkError(f"{path!r} is no import path: write module:factory{otherwise}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module_name)
        for name in attribute.split("."):
            found = getattr(found, name)
        made = make(found)
    except Exception as error:
        raise DSparkError(f"{path}: {type(error).__name__}: {error}") from error
    missing = [name for name in needed if not hasattr(made, name)]
    if missing:
        raise DSparkError(f"{path} made a {type(made).__name__}, which has no {', '.join(missing)}")
    return made
