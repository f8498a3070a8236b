"""A block drafter's part of a round as a program: one call, for few rows on a CPU.

    draft = CompiledDraft(ContextWeights(...), layers, HeadWeights(...), block_size)
    draft(keys, values, context)                       # follow commits: the keys and values of their rows (eqs. 2-3)
    block = draft(keys, values, context, rows)         # and draft: backbone, LM head, greedy Markov chain (eqs. 4-5)

Groups of rows (see `program`): the blocks', the context's, and one for each slot of the chain (see `slots`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspark.kernels.attention import AttentionPlan, check_pool
from dspark.kernels.layers import LayerMemory, LayerStack, room
from dspark.kernels.lowbit import LowBitLinear
from dspark.kernels.program import Program, Rows
from dspark.kernels.program_numba import NORM
from dspark.kernels.simd import LANES
from dspark.kernels.slots import ChainOutput, Draws, HeadWeights, SlotChain
from dspark.kernels.steps import Rotation, Step, embed, gather, norm, product, product_input, rotate, width

__all__ = ["BlockOutput", "BlockRows", "CompiledDraft", "ContextRows", "ContextWeights"]

BLOCKS, CONTEXT, SLOTS = 0, 1, 2  # groups; slot k has the group SLOTS + k


@dataclass(frozen=True, eq=False)
class ContextWeights:
    """W_c, the gain of the context's norm, keys and values of all draft layers side by side, norms of their keys."""

    fc: LowBitLinear
    norm: Tensor
    kv: LowBitLinear
    k_norms: tuple[Tensor | None, ...]


@dataclass(frozen=True, eq=False)
class ContextRows:
    """Committed rows: positions [N] and slots [N] int64, the target's taps [N, m * H]."""

    positions: Tensor
    slots: Tensor
    taps: Tensor


@dataclass(frozen=True, eq=False)
class BlockRows:
    """Blocks of A requests, ragged: inputs and positions [n], lengths and anchors [A].

    `inputs` are token ids [n] int64 where the program has the embedding, else embedded rows [n, H] (used up).
    """

    inputs: Tensor
    positions: Tensor
    plan: AttentionPlan
    lengths: np.ndarray
    anchors: np.ndarray


@dataclass(frozen=True, eq=False)
class BlockOutput:
    """Hidden states [n, H] and logits [n, Vd] of the blocks' rows, in memory that the next call uses again."""

    hidden: Tensor
    logits: Tensor


class CompiledDraft:
    """Context, draft layers and heads with low-bit weights.

    Args:
        block_size: most slots of a block.
    """

    def __init__(
        self, context: ContextWeights, layers: LayerStack, head: HeadWeights, block_size: int
    ) -> None:
        assert self.supports(context, layers, head)
        self.context, self.layers, self.head, self.block_size = context, layers, head, block_size
        self._bound: _Bound | None = None

    @staticmethod
    def supports(context: ContextWeights, layers: LayerStack, head: HeadWeights) -> bool:
        """Whether all products are packed, of the layers' kind, and all rows fill whole vectors."""
        products = [context.fc, context.kv, head.lm_head, *([] if head.w2 is None else [head.w2])]
        integer = layers.layers[0].qkv.integer
        fits = all(p.packed is not None and p.integer == integer for p in products)
        fits = fits and all(p.bias is None for p in products if p is not context.kv)
        sizes = [len(context.norm), head.lm_head.out_features, 0 if head.w1 is None else head.w1.shape[1]]
        floats = context.norm.dtype == torch.float32 and (head.w1 is None or head.w1.dtype == torch.float32)
        return fits and floats and all(size % LANES == 0 for size in sizes)

    def __call__(
        self,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        context: ContextRows | None,
        block: BlockRows | None = None,
        chain: bool = False,
        draws: Draws | None = None,
    ) -> BlockOutput | ChainOutput | None:
        """Write the context's keys and values to their slots, then run the blocks, if any.

        Args:
            keys, values: each draft layer's part of the KV pool.
            chain: choose tokens, which then are the output.
            draws: how they are drawn; without them greedily.
        """
        rows = 0 if block is None else len(block.inputs)
        requests = 0 if block is None else len(block.lengths)
        context_rows = 0 if context is None else len(context.taps)
        bound = self._bound
        if bound is None or not bound.fits(rows, context_rows, requests, keys):
            rooms = (0, 0, 0) if bound is None else bound.rooms
            rooms = tuple(room(max(pair)) for pair in zip((rows, context_rows, requests), rooms, strict=True))
            bound = self._bound = _Bound(self, rooms, keys, values)
        groups = [Rows(0)] * (SLOTS + self.block_size)
        if context is not None:
            plan = AttentionPlan.for_store(context.slots, keys[0].shape[-1])
            check_pool(keys[0], values[0], plan)
            groups[CONTEXT] = bound.follow(context)
        units = 0
        if block is not None:
            check_pool(keys[0], values[0], block.plan)
            units = bound.load(block, draws)
            groups[BLOCKS] = Rows(rows, block.positions, block.plan.slots)
            if chain:
                groups[SLOTS : SLOTS + int(block.lengths.max())] = [Rows(requests)] * int(block.lengths.max())
        for group in groups[:SLOTS]:
            if group.positions is not None:
                self.layers.check_positions(group.positions)
        bound.program.run(groups, units)
        return None if block is None else bound.output(block, chain)


class _Bound:
    """The program over one pool, with memory for so many rows of blocks, rows of context and requests."""

    def __init__(
        self,
        draft: CompiledDraft,
        rooms: tuple[int, ...],
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> None:
        self.draft, self.rooms = draft, rooms
        rows, self.context_rows, self.requests = rooms
        self.memory = LayerMemory(draft.layers, rows, keys, values)
        head, slots = draft.head, draft.block_size
        self.hidden = torch.empty(rows, len(draft.layers.norm))
        self.logits = torch.empty(rows, width(head.lm_head))
        self.chain = SlotChain(head, slots, self.requests, self.hidden, self.logits)
        chained = range(slots if head.chained else 0)
        chain = [step.of(SLOTS + k) for k in chained for step in self.chain.steps(k)]
        context = [step.of(CONTEXT) for step in self._context(keys, values)]
        steps = [*context, *self._blocks(), *chain]
        self.program = Program(steps, draft.layers.rotation)
        self.chain.bind(self.program)
        norms = self.program.of_kind(NORM)
        self.first, self.norms = len(context), norms[norms >= len(context)]
        if draft.head.embedding is not None:
            self.program.steps["x"][self.norms] = self.x.data_ptr()

    def _context(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> list[Step]:
        weights, rotation, eps = self.draft.context, self.draft.layers.rotation, self.draft.layers.eps
        rows = self.context_rows
        taps, taps_out = product_input(weights.fc, rows)
        context, context_out = product_input(weights.kv, rows)
        floats = context if context_out is None else torch.empty(rows, len(weights.norm))
        fused, kv = torch.empty(rows, width(weights.fc)), torch.empty(rows, width(weights.kv))
        source = torch.empty(0, weights.fc.in_features)  # set at each run
        steps = [
            gather(source, out=taps if taps_out is None else None, codes=taps_out),
            product(weights.fc, taps, fused),
            norm(weights.norm, eps, floats, fused, codes=context_out),
            product(weights.kv, context, kv),
        ]
        heads = Rotation(0, rotation.kv_heads, rotation.head_dim, rotation.cos, rotation.sin)
        for i, k_norm in enumerate(weights.k_norms):
            column = i * 2 * heads.kv_heads * heads.head_dim
            bias = None if weights.kv.bias is None else weights.kv.bias[column:]
            steps.append(
                rotate(kv, column, heads, keys[i], values[i], bias=bias, norms=(None, k_norm), eps=eps)
            )
        self._keep_context = (taps, context, floats, fused, kv)
        return steps

    def _blocks(self) -> list[Step]:
        head = self.draft.head
        hidden, codes = product_input(head.lm_head, self.memory.capacity, self.hidden)
        self.x, self._keep_blocks = torch.empty_like(self.hidden), hidden
        no_ids = torch.empty(0, dtype=torch.int64)  # set at each run
        first = [] if head.embedding is None else [embed(head.embedding, no_ids, self.x)]
        return [*first, *self.memory.steps(self.hidden, codes), product(head.lm_head, hidden, self.logits)]

    def fits(self, rows: int, context_rows: int, requests: int, keys: Sequence[Tensor]) -> bool:
        return (
            self.memory.fits(rows, keys) and context_rows <= self.context_rows and requests <= self.requests
        )

    def follow(self, context: ContextRows) -> Rows:
        taps = self._taps = context.taps.contiguous()  # alive until the program has read them
        assert taps.shape[1] == self.draft.context.fc.in_features
        self.program.steps["x"][0] = taps.data_ptr()
        return Rows(len(taps), context.positions.contiguous(), context.slots.contiguous())

    def load(self, block: BlockRows, draws: Draws | None) -> int:
        """Set what the blocks' steps read; returns the units of their attention."""
        if self.draft.head.embedding is None:
            self.program.steps["x"][self.norms] = block.inputs.data_ptr()
        else:
            self.program.steps["index"][self.first] = block.inputs.data_ptr()
        self.chain.load(block.lengths, block.anchors, draws)
        return self.memory.plan(block.plan)

    def output(self, block: BlockRows, chain: bool) -> BlockOutput | ChainOutput:
        if chain:
            return self.chain.output(int(block.lengths.max()), len(block.lengths))
        rows, size = len(block.inputs), self.draft.head.lm_head.out_features
        return BlockOutput(self.hidden[:rows], self.logits[:rows, :size])
