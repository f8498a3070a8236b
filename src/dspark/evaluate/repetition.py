"""How much of an output repeats itself: small models loop, and loops are easy to draft.

An accepted length measured on looping outputs flatters a drafter, so benchmarks report both figures, with
and without them.
"""

from __future__ import annotations

from collections.abc import Sequence

from dspark.core import DSparkError

__all__ = ["is_looping", "repeated_ngrams", "repetition_share"]


def repeated_ngrams(token_ids: Sequence[int], n: int = 4) -> tuple[int, int]:
    """(repeats, all): how many n-grams of `token_ids` already occurred further left, of how many.

    Raises:
        DSparkError: n below 1.
    """
    if n < 1:
        raise DSparkError(f"n-grams need n of 1 or more, got {n}")
    ngrams = [tuple(token_ids[i : i + n]) for i in range(len(token_ids) - n + 1)]
    return len(ngrams) - len(set(ngrams)), len(ngrams)


def repetition_share(token_ids: Sequence[int], n: int = 4) -> float:
    """Share of n-grams that are repeats, 0 to just under 1; 0 for outputs too short to hold one."""
    repeats, count = repeated_ngrams(token_ids, n)
    return repeats / count if count else 0.0


def is_looping(token_ids: Sequence[int], n: int = 4, threshold: float = 0.5) -> bool:
    """Whether more than `threshold` of the n-grams are repeats."""
    return repetition_share(token_ids, n) > threshold
