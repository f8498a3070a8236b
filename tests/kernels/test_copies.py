"""Copies of rows: those asked for, to the bit, in every type that drafters are served in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark.kernels.copies import take_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_are_taken(dtype: torch.dtype) -> None:
    source = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    taken = take_rows(source, np.array([3, 1, 1]))
    assert taken.dtype == dtype
    assert torch.equal(taken, source[[3, 1, 1]])
    taken.zero_()
    assert source[3].all(), "rows are copies"
