"""The compiled loops of a round, taken through one request before anybody waits for them."""

from __future__ import annotations

import numpy as np
import torch

from dspark.acceptance import greedy_rule
from dspark.drafters.block import pack_blocks
from dspark.engine.intake import check_lengths
from dspark.engine.packing import draft_rows, kept_rows, pack_rows
from dspark.kernels import distributions, ratio
from dspark.randomness import Purpose, uniform

__all__ = ["rehearse"]


def rehearse() -> None:
    """Compile them, or load them from Numba's cache."""
    one, none = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    rows = pack_rows(none, one, check_lengths("a rehearsal", one, one), one > 0, none[None], 16)
    draft_rows(rows.query_start, one, one)
    kept_rows(rows.query_start, rows.positions, rows.slots, one)
    pack_blocks(none, one, one, none[None], 16, 0)
    greedy_rule(torch.zeros(1, 1, dtype=torch.int64), one, torch.zeros(2, dtype=torch.int64), none)
    address = torch.zeros(1, 1, dtype=torch.int64)
    u = uniform(address, address, address, address[0], Purpose.DRAFT)
    parameters = np.array([[1.0, 0.0, 1.0, 0.0]])
    distributions.draw(distributions.probabilities(torch.zeros(1, 16), parameters), u[:, 0])
    ratio.compile_rule()
