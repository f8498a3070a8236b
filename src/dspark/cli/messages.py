"""Lines for whoever waits: on stderr, as stdout holds the results."""

from __future__ import annotations

import sys

__all__ = ["say"]


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
