"""Where results go, checked before the work that makes them: it must not end in a path that cannot be written."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["check_directory", "check_file"]


def check_file(path: str | Path, make_parents: bool = False) -> None:
    """
    Args:
        make_parents: whoever writes the file makes the directories that it lacks.

    Raises:
        DSparkError: no file can be written there.
    """
    from dspark.core import DSparkError

    path = Path(path)
    if path.is_dir():
        raise DSparkError(f"{path} is a directory: name a file in it")
    if path.exists():
        _require_writable(path)
    elif make_parents:
        check_directory(path.parent)
    elif path.parent.is_dir():
        _require_writable(path.parent)
    else:
        raise DSparkError(f"no directory {str(path.parent)!r} for {path.name!r}: create it first")


def check_directory(path: str | Path) -> None:
    """Of a directory that is made where it is missing.

    Raises:
        DSparkError: it cannot be made, or no file in it.
    """
    from dspark.core import DSparkError

    path = Path(path)
    there = next(place for place in (path, *path.parents) if place.exists())
    if not there.is_dir():
        raise DSparkError(f"{there} is a file, not a directory: name another place")
    _require_writable(there)


def _require_writable(path: Path) -> None:
    from dspark.core import DSparkError

    if not os.access(path, os.W_OK):
        raise DSparkError(f"{path} cannot be written: change its permissions, or name another place")
