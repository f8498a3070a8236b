"""What a method's drafter looks like where the training configuration leaves it open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["METHOD_DEFAULTS", "MethodDefaults"]


@dataclass(frozen=True)
class MethodDefaults:
    """`taps`: target layers to read, from the number of the target's layers."""

    num_layers: int
    taps: Callable[[int], tuple[int, ...]]
    sequential_head: bool = False
    confidence_head: bool = False
    mask_token: bool = False


def _spread(num_layers: int) -> tuple[int, ...]:
    """Five states a fifth of the layers apart: 5, 11, 17, 23, 28 of 30.

    The last one is what the target's last layer reads: `copy_last_layers` makes it the context.
    """
    ends = (round(i * num_layers / 5) - 1 for i in range(1, 6))
    return tuple(sorted({max(-1, min(end, num_layers - 2)) for end in ends}))


def _low_middle_high(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's: the inputs of layers 2, n / 2 and n - 3, which are the states after the layers before them."""
    return tuple(sorted({max(-1, layer - 1) for layer in (2, num_layers // 2, num_layers - 3)}))


def _last(num_layers: int) -> tuple[int, ...]:
    return (num_layers - 1,)


METHOD_DEFAULTS = {
    "dspark": MethodDefaults(2, _spread, sequential_head=True, confidence_head=True, mask_token=True),
    "dflash": MethodDefaults(2, _spread, mask_token=True),
    "eagle3": MethodDefaults(1, _low_middle_high),
    "mtp": MethodDefaults(1, _last),
}
