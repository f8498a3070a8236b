"""Copies of rows: those asked for, to the bit, in every type that drafters are served in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark.kernels.copies import copy_rows, take_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_are_taken_and_copied(dtype: torch.dtype) -> None:
    source = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    taken = take_rows(source, np.array([3, 1, 1]))
    assert taken.dtype == dtype
    assert torch.equal(taken, source[[3, 1, 1]])
    out = torch.zeros(8, 6, dtype=dtype)
    copy_rows(taken, out[2:5])
    assert torch.equal(out[2:5], taken)
    assert not out[:2].any()
    assert not out[5:].any()
