"""What the machine can do at best, with the threads that PyTorch has: read memory, multiply float32.

A large last-level cache makes reading an array of 100 MB again and again faster than reading one of 1 GB. So
reading is measured on as many bytes as the way it is compared with reads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["Arithmetic", "Reading"]


class Reading:
    """Reads `num_bytes` of memory once a call: by a sum, by a dot product, and (twice as many bytes) by a copy."""

    def __init__(self, num_bytes: int) -> None:
        self._data = torch.ones(max(1, num_bytes // 4))  # written: pages never written are all the same one
        self._copy = torch.empty_like(self._data)
        self.num_bytes = 4 * len(self._data)

    @property
    def ways(self) -> dict[str, Callable[[], object]]:
        """Name -> one pass. The fastest reader is the limit; no single one is the fastest everywhere."""
        data, copy = self._data, self._copy
        return {"sum": data.sum, "dot": lambda: torch.dot(data, data), "copy": lambda: copy.copy_(data)}

    def bytes_of(self, way: str) -> int:
        """Bytes that a call moves."""
        return self.num_bytes * (2 if way == "copy" else 1)


class Arithmetic:
    """One float32 product of two [size, size] matrices a call: what the library reaches where reading is no limit."""

    def __init__(self, size: int) -> None:
        self._a, self._b, self._out = torch.randn(3, size, size)
        self.flops = 2 * size**3

    def run(self) -> object:
        return torch.mm(self._a, self._b, out=self._out)
