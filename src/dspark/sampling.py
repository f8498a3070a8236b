"""From logits to p_t and p_d: the one place where sampling parameters act.

In vLLM's order: logit bias, penalties (repetition, frequency, presence), masks (min_tokens, constraint) in
`LogitsShaper`; then temperature, min-p, top-k and top-p in `probabilities`. Both serve target and drafter
alike. Nothing synchronises with the host except where a docstring says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from dspark.core import Request, TokenLogprobs
from dspark.kernels import distributions
from dspark.randomness import Purpose, uniform

__all__ = ["SamplingRows", "argmax", "log_probabilities", "probabilities", "sample", "top_logprobs"]

_NEVER = float("-inf")
_NO_FILTER = np.array([0.0, 1.0, 0.0])  # top_k, top_p, min_p
_FIRST_CANDIDATES = 512  # logits a top-p row looks at before it looks at all of them (CPU)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Largest of each row [n, V], the first of equals: [n] int64. On a CPU by NumPy, whose loop is vectorised."""
    if logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters and random addresses of n rows, on one device.

    They are kept on the host, so that questions such as "does any row filter?" need no device synchronisation, and
    go to the device when asked for. Greedy rows (temperature 0) carry no filters: their argmax needs none.
    """

    host: (
        np.ndarray
    )  # [n, 4] float64: temperature (0 = greedy), top_k (0 = off), top_p (1 = off), min_p (0 = off)
    address: np.ndarray  # [n, 3] int64: seed, uid, round
    device: torch.device | str = "cpu"

    @staticmethod
    def of(requests: Sequence[Request], device: torch.device | str = "cpu") -> SamplingRows:
        """One row a request, at the round it is in."""
        host = np.array([_parameters(r) for r in requests], dtype=np.float64).reshape(-1, 4)
        address = np.array([(r.seed, r.uid, r.round) for r in requests], dtype=np.int64).reshape(-1, 3)
        return SamplingRows(host, address, device)

    def __len__(self) -> int:
        return len(self.host)

    def select(self, indices: Sequence[int] | np.ndarray) -> SamplingRows:
        """The rows at `indices` (host integers), in that order."""
        index = np.asarray(indices, dtype=np.int64)
        return SamplingRows(self.host[index], self.address[index], self.device)

    def repeat(self, counts: Sequence[int] | np.ndarray) -> SamplingRows:
        """Row r repeated counts[r] times: sampling parameters for a ragged batch of target rows."""
        return self.select(np.repeat(np.arange(len(self)), np.asarray(counts, dtype=np.int64)))

    def uniform(self, slots: torch.Tensor, purpose: Purpose) -> torch.Tensor:
        """Draws [n, g] float64 for `slots` [g] int64 of every row's round."""
        return uniform(self.seed[:, None], self.uid[:, None], self.round[:, None], slots, purpose)

    def _values(self, column: int) -> torch.Tensor:
        return torch.from_numpy(self.host[:, column].copy()).to(self.device)

    @cached_property
    def temperature(self) -> torch.Tensor:
        """[n] float32, 0 = greedy."""
        return self._values(0).float()

    @cached_property
    def top_k(self) -> torch.Tensor:
        """[n] int64, 0 = off."""
        return self._values(1).long()

    @cached_property
    def top_p(self) -> torch.Tensor:
        """[n] float64, 1 = off."""
        return self._values(2)

    @cached_property
    def min_p(self) -> torch.Tensor:
        """[n] float64, 0 = off."""
        return self._values(3)

    @cached_property
    def _addresses(self) -> tuple[torch.Tensor, ...]:
        return torch.from_numpy(self.address).to(self.device).unbind(1)

    @property
    def seed(self) -> torch.Tensor:
        """[n] int64."""
        return self._addresses[0]

    @property
    def uid(self) -> torch.Tensor:
        """[n] int64."""
        return self._addresses[1]

    @property
    def round(self) -> torch.Tensor:
        """[n] int64."""
        return self._addresses[2]

    @cached_property
    def greedy(self) -> np.ndarray:
        """[n] bool, on the host."""
        return self.host[:, 0] == 0

    @cached_property
    def all_greedy(self) -> bool:
        return bool(self.greedy.all())

    @cached_property
    def any_greedy(self) -> bool:
        return bool(self.greedy.any())

    @cached_property
    def max_top_k(self) -> int:
        """0 where no row has a top-k."""
        return int(self.host[:, 1].max(initial=0))

    @cached_property
    def any_top_p(self) -> bool:
        return bool((self.host[:, 2] < 1).any())

    @cached_property
    def any_min_p(self) -> bool:
        return bool((self.host[:, 3] > 0).any())

    @cached_property
    def filtered(self) -> np.ndarray:
        """[n] bool, on the host: rows with a top-k, top-p or min-p."""
        return (self.host[:, 1:] != _NO_FILTER).any(-1)

    @cached_property
    def any_filter(self) -> bool:
        return bool(self.filtered.any())

    @cached_property
    def top_p_within_top_k(self) -> bool:
        """Every row with a top-p has a top-k, so the nucleus lies among the `max_top_k` largest."""
        return bool(((self.host[:, 2] == 1) | (self.host[:, 1] > 0)).all())


def _parameters(request: Request) -> tuple[float, float, float, float]:
    p = request.params
    if p.greedy:
        return 0.0, 0.0, 1.0, 0.0
    # In float32 a tiny temperature is 0, hence greedy, and a huge one inf, hence NaN for masked tokens.
    return min(max(p.temperature, 1e-30), 1e30), float(max(p.top_k, 0)), p.top_p, p.min_p


def probabilities(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Softmax after temperature and filters: p_t or p_d, [n, V], float32 (float64 logits stay float64).

    min-p keeps v with p(v) >= min_p max(p); top-k the k largest of what is left; top-p the smallest set of
    what is left, most likely first, whose renormalised mass reaches top_p. A filter is a threshold on the
    value, so tokens tied with the last one kept are kept too. Greedy rows are exact one-hots at the argmax;
    the first index wins ties. A row of -inf alone offers no choice; it becomes one-hot at id 0.

    Args:
        logits: [n, V], shaped already, unchanged by this call. NaN and +inf are a broken model and spread.
    """
    if distributions.fits(logits):
        return distributions.probabilities(logits, rows.host)
    if not rows.all_greedy:
        p = torch.softmax(_filtered(logits, rows), dim=-1)
        if not rows.any_greedy:
            return p
    else:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        p = torch.zeros_like(logits, dtype=dtype)
    greedy = (rows.temperature == 0)[:, None]
    best = logits.argmax(-1, keepdim=True)
    p = p.masked_fill_(greedy, 0)
    return p.scatter_(1, best, torch.where(greedy, 1, p.gather(1, best)))


def log_probabilities(logits: torch.Tensor, rows: SamplingRows, raw: bool = False) -> torch.Tensor:
    """Log-probabilities [n, V] to report: after temperature and filters, or of the `logits` as given (`raw`).

    Greedy rows use temperature 1 (their one-hot would say nothing). Filtered tokens have -inf. For `raw`,
    hand in the model's logits before any `LogitsShaper`.
    """
    return torch.log_softmax(_finite_row(_wide(logits)) if raw else _filtered(logits, rows), dim=-1)


def top_logprobs(log_p: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """The chosen token's log-probability and the `num_top` largest, most likely first, for each row.

    Tokens with probability 0 are left out of the top. Synchronises: the results are Python numbers.

    Args:
        log_p: [n, V] from `log_probabilities`.
        token_ids: n chosen tokens.
    """
    chosen = log_p.gather(1, torch.tensor(token_ids, dtype=torch.int64, device=log_p.device)[:, None])[:, 0]
    top = log_p.topk(min(num_top, log_p.shape[1]), dim=-1)
    rows = zip(token_ids, chosen.tolist(), top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        TokenLogprobs(token, logprob, {i: v for i, v in zip(ids, values, strict=True) if v > _NEVER})
        for token, logprob, ids, values in rows
    ]


def sample(p: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Tokens [n] int64 by inverse CDF: the first v whose cumulative mass exceeds u times the total.

    `p` [n, V] need not be normalised; its sum is taken in float64. A token of probability 0 is never picked,
    at u = 0 and u = 1 included.
    """
    if distributions.fits(p):
        return distributions.draw(p, u.double())
    cdf = p.cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1]
    point = torch.minimum(u.to(torch.float64) * total, torch.nextafter(total, torch.zeros_like(total)))
    picked = torch.searchsorted(cdf, point[:, None], right=True).clamp_(max=p.shape[-1] - 1)
    if p.device.type == "cpu":
        return picked[:, 0]
    # NOTE: a parallel cumsum need not be monotone in its last bit, so a step may appear where p is 0.
    return torch.where(p.gather(1, picked) > 0, picked, p.argmax(-1, keepdim=True))[:, 0]


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _finite_row(logits: torch.Tensor) -> torch.Tensor:
    """logits minus their row maximum (a new tensor); a row of -inf alone gets a 0 at id 0."""
    top = logits.amax(-1, keepdim=True)
    dead = top == _NEVER
    shifted = logits - top.masked_fill(dead, 0)
    shifted[:, :1].masked_fill_(dead, 0)
    return shifted


def _filtered(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """logits / temperature with -inf where a filter removes a token, row maximum 0."""
    # The maximum goes first: dividing by a tiny temperature would overflow.
    scaled = _finite_row(_wide(logits))
    temperature = torch.where(rows.temperature == 0, 1, rows.temperature)
    scaled.div_(temperature[:, None])
    if rows.any_filter and distributions.fits(logits):  # the very tokens that `probabilities` keeps
        removed = distributions.probabilities(logits, rows.host) == 0
        return scaled.masked_fill_(removed & torch.from_numpy(rows.filtered)[:, None], _NEVER)
    if rows.any_min_p:
        scaled.masked_fill_(scaled < rows.min_p.log().to(scaled.dtype)[:, None], _NEVER)
    if rows.max_top_k:
        scaled.masked_fill_(scaled < _top_k_floor(scaled, rows), _NEVER)
    if rows.any_top_p:
        scaled.masked_fill_(scaled < _top_p_floor(scaled, rows), _NEVER)
    return scaled


def _top_k_floor(scaled: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """[n, 1] the k-th largest value of each row, -inf where top-k is off."""
    width = min(rows.max_top_k, scaled.shape[-1])
    largest = scaled.topk(width, dim=-1).values
    floor = largest.gather(1, (rows.top_k - 1).clamp(0, width - 1)[:, None])
    return floor.masked_fill((rows.top_k == 0)[:, None], _NEVER)


def _top_p_floor(scaled: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """[n, 1] the smallest value in each row's nucleus, -inf where top-p is off."""
    full = scaled.shape[-1]
    if rows.top_p_within_top_k:
        full = min(rows.max_top_k, full)
    top_p = rows.top_p[:, None]
    norm = torch.logsumexp(scaled, -1, keepdim=True).to(torch.float64)
    width = min(_FIRST_CANDIDATES, full) if scaled.device.type == "cpu" else full
    while True:
        # Half the row sorted partially costs more than the whole row sorted.
        values = (
            scaled.topk(width, dim=-1).values
            if 2 * width < scaled.shape[-1]
            else scaled.sort(dim=-1, descending=True).values[:, :width]
        )
        p = (values.to(torch.float64) - norm).exp()
        mass = p.cumsum(-1)
        if width == full or bool(((mass[:, -1:] >= top_p) | (top_p == 1)).all()):
            break
        width = min(8 * width, full)
    kept = (mass - p < top_p).sum(-1, keepdim=True)
    floor = values.gather(1, (kept - 1).clamp(min=0))
    return floor.masked_fill(top_p == 1, _NEVER)
