"""Lists of numbers on the command line, for argparse's `type`: 1,2,4 -> (1, 2, 4), each once."""

from __future__ import annotations

import argparse

__all__ = ["floats", "integers"]


def floats(text: str) -> tuple[float, ...]:
    try:
        return tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 0,0.7") from None


def integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 1,4") from None
