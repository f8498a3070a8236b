"""Acceptance rules: which drafts become output, and the one token the target adds.

Pure functions, randomness passed in; the ratio rule stays on one device, without host synchronisation. Request r owns
target rows row_start[r] .. row_start[r] + lengths[r]: slot k's row scores draft k, the last row the bonus.

| rule | a draft is accepted | probability at the first slot | output at a seed |
|---|---|---|---|
| ratio | with probability min(1, p_t / p_d) | sum min(p_t, p_d) | depends on drafter, schedule, batch |
| shared noise | where it is the target's own draw | `shared_noise_acceptance` | a function of seed and prompt alone |
"""

from __future__ import annotations

import numpy as np
import torch

from dspark.compilation import compiled
from dspark.core import Verdict
from dspark.randomness import Purpose, uniform
from dspark.sampling import sample
from dspark.schedule.names import ACCEPTANCE_RULES, AcceptanceRule

__all__ = [
    "ACCEPTANCE_RULES",
    "AcceptanceRule",
    "greedy_rule",
    "ratio_acceptance",
    "ratio_rule",
    "shared_noise_acceptance",
    "shared_noise_choice",
    "token_noise",
    "tolerates_live",
]

_NO_ROUND = -1  # rounds count from 0, so this address belongs to no draw of the ratio rule
_NOISE_ROWS = 8  # rows of noise made at once: the temporaries of a whole vocabulary are large


def tolerates_live(greedy: np.ndarray, one_hot_proposals: bool, rule: AcceptanceRule = "ratio") -> np.ndarray:
    """Which rows stay exact when the schedule looks at the block it schedules, [R] bool.

    Rows at temperature 0 do: they emit the target's argmax whatever was drafted. So do all rows where the
    proposals are deterministic and scored as one-hot p_d: looking at them reveals nothing random. And so do
    all rows under the shared-noise rule: they emit the target's own draw whatever was drafted.
    """
    if one_hot_proposals or rule == "shared_noise":
        return np.ones(len(greedy), dtype=bool)
    return np.asarray(greedy, dtype=bool)


def token_noise(seed: torch.Tensor, position: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Exponential noise [n, V] float64, above 0: a pure function of (seed, position, target token id).

    argmin_v E(v) / p(v) is a draw from p, since -log E is Gumbel noise: it is argmax_v log p(v) + g(v). Draft and
    target meet the same noise at a position, so the closer p_d is to p_t, the oftener they draw the same token.

    Args:
        seed: [n] int64 of the requests.
        position: [n] int64, absolute position of the token that is drawn.
        token_ids: [V] int64 *target* ids; a pruned draft vocabulary asks for its own.
    """
    none = torch.full_like(seed, _NO_ROUND)[:, None]
    u = uniform(seed[:, None], position[:, None], none, token_ids, Purpose.DRAFT)
    return u.clamp_(min=2.0**-54).log_().neg_()


def shared_noise_choice(p: torch.Tensor, seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """The token [n] that each row's noise draws from p [n, V]; greedy rows are one-hot and draw their argmax.

    What the shared-noise rule (Daliri, Musco, Suresh 2024) commits at a position. A draft is accepted where it is
    this token: hand the choice to `greedy_rule`.
    """
    ids = torch.arange(p.shape[1], device=p.device)
    chosen = []
    for part, s, at in zip(*(x.split(_NOISE_ROWS) for x in (p, seed, position)), strict=True):
        chosen.append((part.double() / token_noise(s, at, ids)).argmax(-1))
    return torch.cat(chosen) if chosen else seed.new_zeros(0)


def ratio_acceptance(p_target: torch.Tensor, p_draft: torch.Tensor) -> torch.Tensor:
    """Probability that the ratio rule accepts a draft: sum_v min(p_t(v), p_d(v)), eq. (8). [..., V] -> [...]."""
    return torch.minimum(p_target, p_draft).sum(-1)


def shared_noise_acceptance(p_target: torch.Tensor, p_draft: torch.Tensor) -> torch.Tensor:
    """Probability that the shared-noise rule accepts a draft. [..., V] -> [...].

    sum_v 1 / sum_w max(p_t(w) / p_t(v), p_d(w) / p_d(v)): at least (1 - TV) / (1 + TV), at most `ratio_acceptance`.
    In order of falling p_t / p_d the first kind of term is the larger one up to v, the second behind v, so that two
    running sums give all V^2 terms.
    """
    p, q = p_target.double(), p_draft.double()
    order = (p / q).nan_to_num(nan=0.0, posinf=float("inf")).argsort(-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    up_to, behind = p.cumsum(-1), q.sum(-1, keepdim=True) - q.cumsum(-1)
    wins = 1 / (up_to / p + behind.clamp(min=0) / q)
    return wins.masked_fill((p == 0) | (q == 0), 0).sum(-1)


def ratio_rule(
    draft_tokens: torch.Tensor,
    lengths: torch.Tensor,
    p_draft: torch.Tensor | None,
    vocab: torch.Tensor | None,
    p_target: torch.Tensor,
    row_start: torch.Tensor,
    accept_u: torch.Tensor,
    resample_u: torch.Tensor,
    one_hot: torch.Tensor | None = None,
) -> Verdict:
    """Rejection sampling with a residual (Leviathan et al. 2023, algorithm 1; Chen et al. 2023).

    Accept x_k while u_k p_d(x_k) < p_t(x_k). The next token comes from norm(max(p_t - p_d, 0)) at the first
    rejected slot, or from p_t behind a fully accepted block. Output is distributed as p_t exactly, provided
    x_k was sampled from `p_draft[:, k]` and the uniforms are fresh.

    A residual that is zero everywhere (p_t = p_d up to rounding) is replaced by p_t. A proposal with
    p_d(x) = 0, which sampling cannot produce, is treated as the formula reads: accepted iff p_t(x) > 0.

    Args:
        draft_tokens: [R, g] int64, target token ids; slots at and past a length are ignored.
        lengths: [R] int64, scheduled drafts of each request, 0..g.
        p_draft: [R, g, Vd], the array the drafts were sampled from, or None for one-hot proposals.
        vocab: [Vd] int64, distinct target ids of the draft vocabulary; None where Vd == V.
        p_target: [N, V].
        row_start: [R] int64, the target row of each request's slot 0.
        accept_u: [R, g] uniforms in [0, 1).
        resample_u: [R] uniforms in [0, 1).
        one_hot: [R] bool, requests whose proposals were made without drawing from `p_draft`.
    """
    R, g = draft_tokens.shape
    if R == 0:
        return _nothing(draft_tokens)
    scheduled = torch.arange(g, device=lengths.device) < lengths[:, None]  # [R, g]
    tokens = draft_tokens.masked_fill(~scheduled, 0)  # what lies past a length may be anything
    p_x = p_target[_slot_rows(row_start, g, p_target.shape[0]), tokens]  # [R, g]
    q_x = torch.ones_like(p_x) if p_draft is None else _draft_probability(tokens, p_draft, vocab, p_target)
    if one_hot is not None:
        q_x = q_x.masked_fill(one_hot[:, None], 1)
    accepted = accept_u.double() * q_x.double() < p_x.double()
    num_accepted = _leading(accepted & scheduled)
    p_next = p_target[row_start + num_accepted]  # [R, V]
    if g > 0:
        rejected = num_accepted < lengths
        p_next = _residual(p_next, tokens, num_accepted, rejected, p_draft, vocab, one_hot)
    return Verdict(num_accepted=num_accepted, next_token=sample(p_next, resample_u))


def _residual(
    p_next: torch.Tensor,
    tokens: torch.Tensor,
    num_accepted: torch.Tensor,
    rejected: torch.Tensor,
    p_draft: torch.Tensor | None,
    vocab: torch.Tensor | None,
    one_hot: torch.Tensor | None,
) -> torch.Tensor:
    """[R, V] weights of the next token: max(p_t - p_d, 0) where a slot was `rejected`, else p_t, which is `p_next`."""
    R, g = tokens.shape
    slot = num_accepted.clamp(max=g - 1)
    certain = torch.full_like(rejected, p_draft is None) if one_hot is None else one_hot
    residual = p_next
    if p_draft is not None:
        q = p_draft[torch.arange(R, device=slot.device), slot]  # [R, Vd]
        q = q.masked_fill((certain | ~rejected)[:, None], 0)
        residual = _subtract(p_next, q.to(p_next.dtype), vocab).clamp_(min=0)
    if p_draft is None or one_hot is not None:
        x = tokens.gather(1, slot[:, None])  # [R, 1]
        kept = residual.gather(1, x).masked_fill((certain & rejected)[:, None], 0)
        residual = residual.scatter(1, x, kept)
    empty = residual.sum(-1, keepdim=True) <= 0
    return torch.where(empty, p_next, residual)


def greedy_rule(
    draft_tokens: torch.Tensor, lengths: np.ndarray, target_tokens: torch.Tensor, row_start: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Accept while the draft is the token that the target chose by itself.

    At temperature 0 that is its argmax (the ratio rule's limit); under the shared-noise rule its draw.
    A few integers, compared on the host, where they are wanted next: two transfers from another device.

    Args:
        draft_tokens: [R, g] int64.
        lengths: [R] int64, 0..g.
        target_tokens: [N] int64, the choice at each target row.
        row_start: [R] int64, the target row of each request's slot 0.

    Returns:
        Accepted drafts and next tokens, each [R] int64: a `Verdict` on the host.
    """
    drafts, chosen = (np.ascontiguousarray(x.cpu().numpy()) for x in (draft_tokens, target_tokens))
    return _matching(drafts, lengths, chosen, row_start)


@compiled
def _matching(
    drafts: np.ndarray, lengths: np.ndarray, chosen: np.ndarray, row_start: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """How many drafts [R] are what was chosen, one after the other, and the choice behind them [R]."""
    accepted, following = np.zeros(len(lengths), np.int64), np.empty(len(lengths), np.int64)
    for r in range(len(lengths)):
        n, first = 0, row_start[r]
        while n < lengths[r] and drafts[r, n] == chosen[first + n]:
            n += 1
        accepted[r], following[r] = n, chosen[first + n]
    return accepted, following


def _nothing(draft_tokens: torch.Tensor) -> Verdict:
    none = draft_tokens.new_zeros(0)
    return Verdict(num_accepted=none, next_token=none)


def _slot_rows(row_start: torch.Tensor, g: int, num_rows: int) -> torch.Tensor:
    """[R, g] target row of each slot; slots past a length may point anywhere, so keep them in range."""
    slots = torch.arange(g, device=row_start.device)
    return (row_start[:, None] + slots).clamp_(max=num_rows - 1)


def _leading(accepted: torch.Tensor) -> torch.Tensor:
    """[R] number of accepted slots before the first that is not."""
    return accepted.long().cumprod(-1).sum(-1)


def _draft_probability(
    tokens: torch.Tensor, p_draft: torch.Tensor, vocab: torch.Tensor | None, p_target: torch.Tensor
) -> torch.Tensor:
    """[R, g] p_d(x_k); 0 for a token outside the draft vocabulary."""
    if vocab is None:
        assert p_draft.shape[-1] == p_target.shape[-1], "a pruned draft vocabulary needs `vocab`"
        return p_draft.gather(-1, tokens[..., None]).squeeze(-1)
    draft_ids = torch.full((p_target.shape[-1],), -1, dtype=torch.int64, device=tokens.device)
    draft_ids[vocab] = torch.arange(vocab.shape[0], device=tokens.device)
    ids = draft_ids[tokens]
    p = p_draft.gather(-1, ids.clamp(min=0)[..., None]).squeeze(-1)
    return p.masked_fill(ids < 0, 0)


def _subtract(p: torch.Tensor, q: torch.Tensor, vocab: torch.Tensor | None) -> torch.Tensor:
    """p - q, [R, V], where q [R, Vd] lives on the draft vocabulary."""
    return p - q if vocab is None else p.index_add(1, vocab, q, alpha=-1)
