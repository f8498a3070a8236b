"""From logits to p_t and p_d: the one place where sampling parameters act.

In vLLM's order: logit bias, penalties (repetition, frequency, presence), masks (min_tokens, constraint) in
`LogitsShaper`; then temperature, min-p, top-k and top-p in `probabilities`. Both serve target and drafter
alike. Nothing synchronises with the host except where a docstring says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from dspark.core import DSparkError, Request, TokenLogprobs
from dspark.randomness import Purpose, uniform

__all__ = [
    "Constraint",
    "LogitsShaper",
    "SamplingRows",
    "TokenCounts",
    "log_probabilities",
    "probabilities",
    "sample",
    "top_logprobs",
]

_NEVER = float("-inf")
_FIRST_CANDIDATES = 512  # logits a top-p row looks at before it looks at all of them (CPU)


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters and random addresses of n rows, on one device.

    `host` mirrors the parameters as a numpy array, so that questions such as "does any row filter?" need no
    device synchronisation. Greedy rows (temperature 0) carry no filters: their argmax needs none.
    """

    temperature: torch.Tensor  # [n] float32, 0 = greedy
    top_k: torch.Tensor  # [n] int64, 0 = off
    top_p: torch.Tensor  # [n] float64, 1 = off
    min_p: torch.Tensor  # [n] float64, 0 = off
    seed: torch.Tensor  # [n] int64
    uid: torch.Tensor  # [n] int64
    round: torch.Tensor  # [n] int64
    host: np.ndarray  # [n, 4] float64: temperature, top_k, top_p, min_p

    @staticmethod
    def of(requests: Sequence[Request], device: torch.device | str = "cpu") -> SamplingRows:
        """One row a request, at the round it is in."""
        host = np.array([_parameters(r) for r in requests], dtype=np.float64).reshape(-1, 4)
        address = np.array([(r.seed, r.uid, r.round) for r in requests], dtype=np.int64).reshape(-1, 3)
        values = torch.from_numpy(host).to(device)
        seed, uid, round_ = torch.from_numpy(address).to(device).unbind(1)
        temperature, top_k, top_p, min_p = values.unbind(1)
        return SamplingRows(temperature.float(), top_k.long(), top_p, min_p, seed, uid, round_, host)

    def __len__(self) -> int:
        return len(self.host)

    def select(self, indices: Sequence[int] | np.ndarray) -> SamplingRows:
        """The rows at `indices` (host integers), in that order."""
        index = np.asarray(indices, dtype=np.int64)
        rows = torch.from_numpy(index).to(self.seed.device)
        tensors = (self.temperature, self.top_k, self.top_p, self.min_p, self.seed, self.uid, self.round)
        temperature, top_k, top_p, min_p, seed, uid, round_ = (t[rows] for t in tensors)
        return SamplingRows(temperature, top_k, top_p, min_p, seed, uid, round_, self.host[index])

    def repeat(self, counts: Sequence[int] | np.ndarray) -> SamplingRows:
        """Row r repeated counts[r] times: sampling parameters for a ragged batch of target rows."""
        return self.select(np.repeat(np.arange(len(self)), np.asarray(counts, dtype=np.int64)))

    def uniform(self, slots: torch.Tensor, purpose: Purpose) -> torch.Tensor:
        """Draws [n, g] float64 for `slots` [g] int64 of every row's round."""
        return uniform(self.seed[:, None], self.uid[:, None], self.round[:, None], slots, purpose)

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
    def any_filter(self) -> bool:
        return self.max_top_k > 0 or self.any_top_p or self.any_min_p

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


class Constraint(Protocol):
    """What a request may say next, for structured output.

    The state follows the committed tokens. `advance` is called for each token, drafts included, `rollback(n)`
    takes the last n back. Some token must always be allowed (EOS at the end): a row without any becomes
    one-hot at id 0.
    """

    def mask(self) -> torch.Tensor:
        """[V] bool, True where a token is allowed, on the logits' device."""
        ...

    def advance(self, token_id: int) -> None: ...

    def rollback(self, n: int) -> None: ...


class TokenCounts:
    """Which tokens one request's prompt holds, and how often its output holds each."""

    def __init__(self, request: Request, vocab_size: int, device: torch.device | str) -> None:
        self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)  # [V]
        self.in_prompt[torch.tensor(request.prompt_token_ids, dtype=torch.int64, device=device)] = True
        self.output = torch.zeros(vocab_size, dtype=torch.float32, device=device)  # [V]
        self.add(request.output_token_ids)

    def add(self, token_ids: Sequence[int]) -> None:
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self.output.device)
        self.output.index_add_(0, ids, torch.ones_like(ids, dtype=torch.float32))

    def after(self, drafts: Sequence[int]) -> torch.Tensor:
        """[V] output counts with `drafts` counted in."""
        counts = self.output.clone()
        for token in drafts:
            counts[token] += 1
        return counts

    def along(self, drafts: Sequence[int]) -> torch.Tensor:
        """[len(drafts) + 1, V] output counts; row j counts drafts[:j] in."""
        counts = self.output.repeat(len(drafts) + 1, 1)
        for j, token in enumerate(drafts):
            counts[j + 1 :, token] += 1
        return counts


class LogitsShaper:
    """Bias, penalties, min_tokens and constraint of one request, per output position.

    Built with `for_request`; told of every commit with `commit`. The same rules shape the target's rows
    (`shape`) and the drafter's next slot (`shape_draft`).
    """

    def __init__(
        self,
        request: Request,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        device: torch.device | str,
        constraint: Constraint | None,
    ) -> None:
        p = request.params
        self._params = p
        self._num_output = request.num_output
        self._counts = TokenCounts(request, vocab_size, device) if p.has_penalties else None
        self._constraint = constraint
        self._bias: torch.Tensor | None = None
        if p.logit_bias:
            ids = torch.tensor(list(p.logit_bias), dtype=torch.int64, device=device)
            values = torch.tensor(list(p.logit_bias.values()), dtype=torch.float32, device=device)
            self._bias = torch.zeros(vocab_size, device=device).index_copy_(0, ids, values)
        ends = (*p.stop_token_ids, *(() if p.ignore_eos else eos_token_ids))
        ends_here = torch.tensor([t for t in ends if t < vocab_size], dtype=torch.int64, device=device)
        self._ends = torch.zeros(
            vocab_size, dtype=torch.bool, device=device
        )  # [V] tokens that end the output
        self._ends[ends_here] = True

    @staticmethod
    def for_request(
        request: Request,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        device: torch.device | str = "cpu",
        constraint: Constraint | None = None,
    ) -> LogitsShaper | None:
        """A shaper that starts behind the request's committed tokens, or None if it would change nothing.

        Raises:
            DSparkError: logit_bias names a token the vocabulary does not have.
        """
        p = request.params
        beyond = [t for t in p.logit_bias or () if t >= vocab_size]
        if beyond:
            raise DSparkError(
                f"logit_bias names token {beyond[0]}; use ids below the vocabulary size {vocab_size}"
            )
        if not (
            p.has_penalties or p.logit_bias or p.min_tokens > request.num_output or constraint is not None
        ):
            return None
        return LogitsShaper(request, vocab_size, eos_token_ids, device, constraint)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Follow tokens that became output."""
        self._num_output += len(token_ids)
        if self._counts is not None:
            self._counts.add(token_ids)
        if self._constraint is not None:
            for token in token_ids:
                self._constraint.advance(token)

    def shape(self, logits: torch.Tensor, drafts: Sequence[int] = ()) -> torch.Tensor:
        """Shape target rows [len(drafts) + 1, V] in place; row j follows the committed tokens and drafts[:j].

        Rows behind a draft that the constraint forbids are not constrained: that draft has probability 0,
        so they are never used.
        """
        assert logits.shape[0] == len(drafts) + 1
        counts = None if self._counts is None else self._counts.along(drafts)
        return self._apply(logits, None, counts, self._num_output, self._masks(drafts))

    def shape_draft(
        self, logits: torch.Tensor, vocab: torch.Tensor | None, drafts_so_far: Sequence[int] = ()
    ) -> torch.Tensor:
        """Shape a drafter's logits [Vd] behind `drafts_so_far` in place; `vocab` [Vd] gives target ids."""
        counts = None if self._counts is None else self._counts.after(drafts_so_far)[None]
        masks = self._masks(drafts_so_far)
        last = masks[-1:] if len(masks) == len(drafts_so_far) + 1 else []
        return self._apply(logits[None], vocab, counts, self._num_output + len(drafts_so_far), last)[0]

    def _apply(
        self,
        logits: torch.Tensor,  # [k, W]
        vocab: torch.Tensor | None,  # [W] target ids of the columns, None = all of them
        counts: torch.Tensor | None,  # [k, V]
        num_output: int,  # output tokens before row 0
        masks: Sequence[torch.Tensor],  # allowed tokens [V] of the first rows
    ) -> torch.Tensor:
        def columns(x: torch.Tensor) -> torch.Tensor:
            return x if vocab is None else x[..., vocab]

        if self._bias is not None:
            logits += columns(self._bias)
        if counts is not None:
            assert self._counts is not None
            self._penalise(logits, columns(counts), columns(self._counts.in_prompt))
        short = min(max(self._params.min_tokens - num_output, 0), len(logits))
        if short:
            logits[:short].masked_fill_(columns(self._ends), _NEVER)
        for row, mask in zip(logits, masks, strict=False):
            row.masked_fill_(~columns(mask), _NEVER)
        return logits

    def _penalise(self, logits: torch.Tensor, counts: torch.Tensor, in_prompt: torch.Tensor) -> None:
        p = self._params
        used = counts > 0
        if p.repetition_penalty != 1:
            weaker = torch.where(logits > 0, logits / p.repetition_penalty, logits * p.repetition_penalty)
            logits.copy_(torch.where(used | in_prompt, weaker, logits))
        logits -= p.frequency_penalty * counts + p.presence_penalty * used

    def _masks(self, drafts: Sequence[int]) -> list[torch.Tensor]:
        """Allowed tokens of rows 0, 1, ..., up to the row of the first forbidden draft."""
        if self._constraint is None:
            return []
        masks = [self._constraint.mask()]
        for token in drafts:
            if not bool(masks[-1][token]):
                break
            self._constraint.advance(token)
            masks.append(self._constraint.mask())
        self._constraint.rollback(len(masks) - 1)
        return masks
