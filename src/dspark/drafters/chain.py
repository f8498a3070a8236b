"""Serving form of the autoregressive drafters (EAGLE-3 and MTP): draft a chain, one token a pass."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dspark.core import Draft, Request
from dspark.drafters.autoregressive import AutoregressiveModel
from dspark.drafters.base import ObserveBatch, ProposeBatch
from dspark.drafters.quantise import can_quantise, quantise
from dspark.drafters.slots import SlotSampler
from dspark.kernels.attention import AttentionPlan, paged_attention, store_kv
from dspark.kernels.linear import pack_linear, pack_linears
from dspark.kernels.lowbit import LowBitLinear, QuantizedWeight, supports_integers
from dspark.kv import KVPool

__all__ = ["ChainDrafter"]


class ChainDrafter:
    """Serves an `AutoregressiveModel`.

    `observe` writes the draft KV of committed rows from the target's features, over whatever a chain left there:
    a round's drafts see true features only. `propose` starts at the last committed position, whose feature is
    kept from `observe`, and writes the chain's rows beyond the valid length.

    `quantised` rounds the drafter's matrices where a kernel for that exists (float32 on a CPU): those of its layers to
    4 bits, the others to 8. Output stays exact: p_d is whatever the served drafter computes.
    """

    def __init__(self, model: AutoregressiveModel, quantised: bool = False) -> None:
        self.model = model.requires_grad_(False).eval()
        self.name = model.config.method
        self.deterministic = False
        self.max_draft = model.config.block_size
        self.taps = model.config.taps
        self.kv_specs = model.config.layer_config.kv_specs
        weight, bias = model.layer.kv_parts()
        self._project: Callable[[Tensor], Tensor]
        if quantised and can_quantise(weight):
            self._project = LowBitLinear(QuantizedWeight.from_float(weight), bias, supports_integers())
            quantise(model)
        else:
            self._project = pack_linear(weight, bias)
        pack_linears(model)
        identity = torch.equal(model.vocab, torch.arange(model.config.vocab_size, device=self._device))
        self.vocab = None if identity else model.vocab
        # Of each request, by uid: how many positions were observed, and the feature [H] of the last one.
        self._last: dict[int, tuple[int, Tensor]] = {}
        self._pool: KVPool | None = None
        self._layer = 0

    @property
    def _device(self) -> torch.device:
        return self.model.vocab.device

    @property
    def kv(self) -> tuple[Tensor, Tensor]:
        """The draft layer's keys and values in the pool."""
        return self.pool.k[self._layer], self.pool.v[self._layer]

    @property
    def pool(self) -> KVPool:
        assert self._pool is not None, "attach the drafter to a pool first"
        return self._pool

    def attach(self, pool: KVPool, first_layer: int) -> None:
        self._pool, self._layer = pool, first_layer

    def forget(self, request: Request) -> None:
        self._last.pop(request.uid, None)

    @torch.inference_mode()
    def observe(self, batch: ObserveBatch) -> None:
        assert batch.taps is not None
        features = self.model.fuse(batch.taps)
        tokens = torch.from_numpy(self._next_tokens(batch)).to(self._device)
        kv = self._project(self.model.kv_rows(tokens, features))
        k, v = self.model.split_kv(kv, self.model.rotary(batch.positions, kv.dtype))
        store_kv(k, v, *self.kv, AttentionPlan.for_store(batch.slots, self.pool.block_size))
        for r, request in enumerate(batch.requests):
            start, stop = int(batch.row_start[r]), int(batch.row_start[r + 1])
            if start < stop:
                # A copy: a row of a prefill would keep all of it alive.
                self._last[request.uid] = int(batch.positions[stop - 1]) + 1, features[stop - 1].clone()

    @torch.inference_mode()
    def propose(self, batch: ProposeBatch) -> Draft:
        """Draft `lengths[r]` tokens for each request; see `Drafter.propose`. None where nothing was observed yet."""
        observed = [r.uid in self._last for r in batch.requests]
        active = np.flatnonzero(batch.lengths * observed)
        if not len(active):
            return Draft.empty(len(batch.lengths), self._device)
        requests = [batch.requests[r] for r in active.tolist()]
        features = torch.stack([self._feature(request) for request in requests])
        sampler = SlotSampler(batch, active, self.vocab, self._device)
        cached = np.array([r.cached for r in requests])
        chain = _Chain(self, features, batch.block_tables[active], cached, sampler.lengths)
        tokens = torch.tensor([r.token_ids[-1] for r in requests], device=self._device)
        for _ in range(int(sampler.lengths.max())):
            tokens = sampler.choose(chain.advance(tokens))
        return sampler.draft(torch.stack(chain.confidence, 1) if chain.confidence else None)

    def _feature(self, request: Request) -> Tensor:
        """The feature [H] in front of a request's anchor."""
        observed, feature = self._last[request.uid]
        assert observed == request.cached, "every commit is to be observed"
        return feature

    def _next_tokens(self, batch: ObserveBatch) -> np.ndarray:
        """The token behind each observed row, [N]. It is known: of the last row, it is the new anchor."""
        tokens = np.zeros(int(batch.row_start[-1]), dtype=np.int64)
        for r, request in enumerate(batch.requests):
            start, stop = int(batch.row_start[r]), int(batch.row_start[r + 1])
            if start < stop:
                first = int(batch.positions[start]) + 1
                tokens[start:stop] = request.token_ids[first : first + stop - start]
        return tokens


class _Chain:
    """Rows of A requests through the draft layer, one position further at each step.

    `states` [A, H]: what takes the feature's place in the next rows, at first the features before the anchors.
    `confidence`: per step [A] logits, where the model has a confidence head.
    """

    def __init__(
        self,
        drafter: ChainDrafter,
        states: Tensor,
        block_tables: np.ndarray,
        cached: np.ndarray,
        lengths: np.ndarray,
    ) -> None:
        self.model, self.kv, self.block_size = drafter.model, drafter.kv, drafter.pool.block_size
        self.states, self.block_tables, self.cached, self.lengths = states, block_tables, cached, lengths
        self.slot = 0
        self.confidence: list[Tensor] = []

    def advance(self, tokens: Tensor) -> Tensor:
        """Scores [A, Vd] of the next slot, from the tokens [A] before it; rows past their length hold no meaning."""
        alive = np.flatnonzero(self.lengths > self.slot)  # the others have no room for another row
        if len(alive) == len(self.lengths):
            self.states = self._rows(alive, tokens, self.states)
        else:
            rows = torch.from_numpy(alive).to(tokens.device)
            states = self._rows(alive, tokens[rows], self.states[rows])
            self.states = self.states.index_copy(0, rows, states)
        hidden = self.model.norm(self.states)
        if self.model.confidence is not None:
            self.confidence.append(self.model.confidence(hidden, None))
        self.slot += 1
        return self.model.lm_head(hidden)

    def _rows(self, alive: np.ndarray, tokens: Tensor, features: Tensor) -> Tensor:
        """This slot's rows of the requests `alive`: tokens [n], features [n, H] -> states [n, H]."""
        positions = self.cached[alive] - 1 + self.slot  # a row lies at its feature's position
        tables, size, first = self.block_tables[alive], self.block_size, self.slot == 0
        slots = tables[np.arange(len(alive)), positions // size] * size + positions % size
        plan = AttentionPlan(
            query_start=np.arange(len(alive) + 1, dtype=np.int64),
            context_lens=positions,
            block_tables=tables,
            slots=torch.from_numpy(slots).to(tokens.device),
            causal=True,
            block_size=size,
        )
        k_pool, v_pool = self.kv

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # The anchor's row is a committed one, written by `observe`. Those behind it lie beyond the valid
            # length: nobody else reads them, and `observe` writes over them.
            if not first:
                store_kv(k, v, k_pool, v_pool, plan)
            return paged_attention(q, k_pool, v_pool, plan, q.shape[-1] ** -0.5)

        at = torch.from_numpy(positions).to(tokens.device)
        return self.model.advance(tokens, features, self.model.rotary(at, features.dtype), attend)
