"""Where files that can be made again are kept."""

import os
from pathlib import Path

__all__ = ["cache_directory"]


def cache_directory() -> Path:
    """$DSPARK_CACHE, else ~/.cache/dspark: converted models and notes on compiled kernels."""
    chosen = os.environ.get("DSPARK_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "dspark"
