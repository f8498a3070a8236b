"""Prompt lookup: propose what followed the last time the same tokens occurred."""

from __future__ import annotations

import numpy as np
import torch

from dspark.core import Draft, DSparkError, Request
from dspark.drafters.base import ObserveBatch, ProposeBatch
from dspark.kv import KVPool, LayerKV

__all__ = ["NgramDrafter", "NgramIndex", "continued"]


class NgramIndex:
    """Where each n-gram of a sequence last ended, grown token by token (nothing is scanned twice).

    The latest n-gram is entered one token late: its own occurrence must not match itself.
    """

    def __init__(self, sizes: range) -> None:
        self.sizes = sizes
        self.ends: dict[tuple[int, ...], int] = {}
        self.known = 0  # tokens[:known] are indexed

    def extend(self, tokens: list[int]) -> None:
        for end in range(self.known + 1, len(tokens)):
            for n in range(self.sizes.start, min(self.sizes.stop, end + 1)):
                self.ends[tuple(tokens[end - n : end])] = end
        self.known = max(self.known, len(tokens) - 1)

    def find(self, tokens: list[int]) -> int | None:
        """End of the latest earlier occurrence of the longest suffix that has one."""
        for n in reversed(range(self.sizes.start, min(self.sizes.stop, len(tokens) + 1))):
            end = self.ends.get(tuple(tokens[-n:]))
            if end is not None:
                return end
        return None


def continued(tokens: list[int], end: int, count: int) -> list[int]:
    """What followed the occurrence that ended at `end`; one that overlaps the end of `tokens` goes on as a loop."""
    period = len(tokens) - end
    return [tokens[end + i % period] for i in range(count)]


class NgramDrafter:
    """Deterministic proposals copied from the request's own tokens; needs no weights and no KV.

    Args:
        max_draft: longest proposal.
        lookup_max, lookup_min: n-gram sizes to match, longest first (vLLM's prompt_lookup_max / _min).
    """

    name = "ngram"
    deterministic = True
    taps: tuple[int, ...] = ()
    kv_specs: tuple[LayerKV, ...] = ()

    def __init__(self, max_draft: int, lookup_max: int = 4, lookup_min: int = 2) -> None:
        if max_draft < 1:
            raise DSparkError(f"num_speculative_tokens must be at least 1, got {max_draft}")
        if not 1 <= lookup_min <= lookup_max:
            raise DSparkError(
                f"prompt_lookup_min {lookup_min} must lie between 1 and prompt_lookup_max {lookup_max}"
            )
        self.max_draft = max_draft
        self._sizes = range(lookup_min, lookup_max + 1)
        self._indices: dict[int, NgramIndex] = {}

    def attach(self, pool: KVPool, first_layer: int) -> None:
        """No KV layers."""

    def observe(self, batch: ObserveBatch) -> None:
        """Nothing: the index reads the committed tokens when it is asked."""

    def propose(self, batch: ProposeBatch) -> Draft:
        width = int(batch.lengths.max(initial=0))
        tokens = np.zeros((len(batch.requests), width), dtype=np.int64)
        lengths = np.zeros(len(batch.requests), dtype=np.int64)
        for r, (request, wanted) in enumerate(zip(batch.requests, batch.lengths, strict=True)):
            if wanted:
                found = self._lookup(request, int(wanted))
                tokens[r, : len(found)], lengths[r] = found, len(found)
        device = batch.rows.device
        return Draft(torch.from_numpy(tokens).to(device), lengths)

    def forget(self, request: Request) -> None:
        self._indices.pop(request.uid, None)

    def _lookup(self, request: Request, wanted: int) -> list[int]:
        index = self._indices.setdefault(request.uid, NgramIndex(self._sizes))
        index.extend(request.token_ids)
        tokens = request.token_ids
        end = index.find(tokens)
        return [] if end is None else continued(tokens, end, wanted)
