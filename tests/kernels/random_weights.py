"""Quantised weights for tests of the products."""

import torch

from dspark.kernels.lowbit import QuantizedWeight


def random_weight(out: int, size: int, bits: int, seed: int = 0) -> QuantizedWeight:
    """Every code occurs; scales and minima of both signs."""
    random = torch.Generator().manual_seed(seed)
    scale = torch.randn(out, size // 32, generator=random).half()
    if bits == 8:
        codes = torch.randint(-128, 128, (out, size), dtype=torch.int8, generator=random)
        return QuantizedWeight(codes, scale / 100, None, 8)
    codes = torch.randint(0, 256, (out, size // 2), dtype=torch.uint8, generator=random)
    minimum = torch.randn(out, size // 32, generator=random).half()
    return QuantizedWeight(codes, scale / 8, minimum, 4)
