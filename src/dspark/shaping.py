"""What shapes a request's logits before they become probabilities: bias, penalties, min_tokens, constraints.

The same rules act on the target's rows and on the drafter's slots, once per output position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from dspark.core import DSparkError, Request

__all__ = ["Constraint", "LogitsShaper", "TokenCounts"]

_NEVER = float("-inf")


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
        ends = (*p.stop_ids, *(() if p.ignore_eos else eos_token_ids))
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
