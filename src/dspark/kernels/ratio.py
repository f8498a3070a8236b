"""The ratio rule of a round in one call, from logits to tokens, on a CPU.

`dspark.acceptance.ratio_rule` is the reference: it takes dozens of tensor operations over [n, V] probabilities, most of
them with cold caches. Here a row's distribution is made when its draft comes up for judgement, in one scratch row, so
that rows behind the first rejection are not touched. Same operations in the same precision: the same bits.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from dspark.compilation import compiled
from dspark.core import Draft
from dspark.kernels import distributions
from dspark.kernels.distributions_numba import PARAMETERS, distribution_row, draw_row
from dspark.kernels.memory import floats, integers
from dspark.randomness import Purpose, uniform_at

__all__ = ["compile_rule", "decide", "fits"]

_ACCEPT, _RESAMPLE = int(Purpose.ACCEPT), int(Purpose.RESAMPLE)


def fits(logits: torch.Tensor, draft: Draft) -> bool:
    """Whether logits [n, V] and what `draft` was drawn from are where and as the loop wants them."""
    probs = draft.probs
    return distributions.fits(logits) and (
        probs is None
        or (probs.device.type == "cpu" and probs.dtype == torch.float32 and probs.is_contiguous())
    )


def decide(
    logits: torch.Tensor,
    parameters: np.ndarray,
    address: np.ndarray,
    row_start: np.ndarray,
    lengths: np.ndarray,
    draft: Draft,
    index: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Accepted drafts and next tokens, each [S] int64, of S requests.

    Args:
        logits: [n, V], unchanged. A row with NaN or +inf rejects its draft, and if sampled says token 0.
        parameters: [S, 4] float64: temperature, top_k, top_p, min_p; see `PARAMETERS`.
        address: [S, 3] int64 seed, uid and round of each request: where its uniforms are drawn.
        row_start: [S] int64, the logit row of each request's slot 0.
        lengths: [S] int64, scheduled drafts, 0..gamma.
        draft: of R requests; it `fits`.
        index: [S] int64, which of the R requests these are.

    Raises:
        IndexError: a scheduled draft is no token of the target.
    """
    assert parameters.shape == (len(index), PARAMETERS)
    size, probs, vocab = logits.shape[1], draft.probs, draft.vocab
    draft_size = 0
    if probs is None:
        certain = np.ones(len(draft.tokens), dtype=np.bool_)
    else:
        draft_size = probs.shape[2]
        assert vocab is None or (vocab.is_contiguous() and len(vocab) == draft_size)
        assert vocab is not None or draft_size == size, "a pruned draft vocabulary needs `vocab`"
        certain = np.zeros(len(draft.tokens), np.bool_) if draft.one_hot is None else draft.one_hot.numpy()
    return _decide(
        logits.data_ptr(),
        size,
        parameters,
        address,
        row_start,
        lengths,
        np.ascontiguousarray(draft.tokens.numpy()),
        index,
        certain,
        0 if probs is None else probs.data_ptr(),
        0 if probs is None or vocab is None else vocab.data_ptr(),
        draft_size,
    )


@compiled
def _decide(
    logits: int,
    size: int,
    parameters: np.ndarray,
    address: np.ndarray,
    row_start: np.ndarray,
    lengths: np.ndarray,
    tokens: np.ndarray,
    index: np.ndarray,
    certain: np.ndarray,
    p_draft: int,
    vocab: int,
    draft_size: int,
) -> tuple[np.ndarray, np.ndarray]:
    accepted, following = np.empty(len(index), np.int64), np.empty(len(index), np.int64)
    p = np.empty(size, np.float32)
    at, gamma = p.ctypes.data, tokens.shape[1]
    for s in range(len(index)):
        seed, uid, round = address[s, 0], address[s, 1], address[s, 2]
        r, n, row = index[s], 0, logits + 4 * size * row_start[s]
        distribution_row(row, at, size, parameters[s].ctypes.data)
        while n < lengths[s]:
            x = tokens[r, n]
            if not 0 <= x < size:
                raise IndexError("a draft is no token of the target")
            q = 0 if certain[r] else p_draft + 4 * draft_size * (gamma * r + n)
            u = uniform_at(seed, uid, round, n, _ACCEPT)
            if not u * _draft_probability(x, q, vocab, draft_size) < p[x]:  # type: ignore[call-arg]
                _subtract(p, x, q, vocab, draft_size)
                if _empty(p):
                    distribution_row(row, at, size, parameters[s].ctypes.data)
                break
            n, row = n + 1, row + 4 * size
            distribution_row(row, at, size, parameters[s].ctypes.data)
        u = uniform_at(seed, uid, round, 0, _RESAMPLE)
        accepted[s], following[s] = n, draw_row(at, size, u)
    return accepted, following


@njit
def _draft_probability(x: int, q: int, vocab: int, draft_size: int) -> float:
    """p_d(x) for p_d at q, which is one-hot at x where q is 0."""
    if q == 0:
        return 1.0
    p = floats(q, draft_size)
    if vocab == 0:
        return p[x]
    ids = integers(vocab, draft_size)
    for v in range(draft_size):
        if ids[v] == x:
            return p[v]
    return 0.0


@njit
def _subtract(p: np.ndarray, x: int, q: int, vocab: int, draft_size: int) -> None:
    """p = max(p - p_d, 0); NaN stays."""
    zero = np.float32(0)
    if q == 0:
        p[x] = zero
        return
    subtracted = floats(q, draft_size)
    if vocab == 0:
        for v in range(draft_size):
            rest = p[v] - subtracted[v]
            p[v] = zero if rest < zero else rest
    else:
        ids = integers(vocab, draft_size)
        for v in range(draft_size):
            rest = p[ids[v]] - subtracted[v]
            p[ids[v]] = zero if rest < zero else rest


@njit
def _empty(p: np.ndarray) -> bool:
    for value in p:  # noqa: SIM110 - a loop compiles to one
        if value != 0:
            return False
    return True


def compile_rule() -> None:
    """Compile now rather than at the first call."""
    one, none = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    draft = Draft(torch.zeros(1, 1, dtype=torch.int64), one)
    parameters = np.array([[1.0, 0.0, 1.0, 0.0]])
    decide(torch.zeros(2, 16), parameters, np.zeros((1, 3), dtype=np.int64), none, one, draft, none)
