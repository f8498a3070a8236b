"""A target's pass as a program: one call from token ids to logits, for few rows on a CPU.

compiled = CompiledTarget(stack, head, embedding)
output, tapped, _ = compiled(token_ids, positions, plan, keys, values, taps, logit_rows)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dspark.kernels.attention import AttentionPlan, check_pool
from dspark.kernels.bounds import inside
from dspark.kernels.layers import LayerMemory, LayerStack, room
from dspark.kernels.lowbit import LowBitLinear
from dspark.kernels.program import Program, Rows
from dspark.kernels.program_numba import NORM
from dspark.kernels.steps import choose, embed, gather, product, width

__all__ = ["CompiledTarget"]

# Groups: all rows; those whose logits are wanted; the same again, if their largest is wanted as well.
ROWS, HEAD, CHOICE = range(3)


class CompiledTarget:
    """Embedding, decoder layers and LM head with low-bit weights.

    Args:
        head: the LM head, packed and without bias; None where the caller has another.
        embedding: a packed layer whose rows are the embeddings (a tied head); None where the caller looks them up.
    """

    def __init__(
        self, stack: LayerStack, head: LowBitLinear | None = None, embedding: LowBitLinear | None = None
    ) -> None:
        assert head is None or self.has_head(stack, head)
        self.stack, self.head, self.embedding = stack, head, embedding
        self.bound: _Bound | None = None

    @staticmethod
    def has_head(stack: LayerStack, head: LowBitLinear) -> bool:
        """Whether the program can go on to this LM head."""
        whole = head.packed is not None and head.bias is None and width(head) == head.out_features
        return whole and head.integer == stack.layers[0].qkv.integer

    def __call__(
        self,
        inputs: Tensor,
        positions: Tensor,
        plan: AttentionPlan,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        taps: tuple[int, ...] = (),
        logit_rows: Tensor | None = None,
        argmax: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Run rows at `positions` [N] through the layers.

        Args:
            inputs: token ids [N] int64 with an `embedding`, else embedded rows [N, H] (used up).
            keys, values: each layer's part of the KV pool; rows' own keys and values go to `plan.slots`.
            taps: distinct layers, -1 for the embedded rows.
            logit_rows: [n] int64, of what rows the output is wanted; None: of all, in order.
            argmax: whether the token of each row's largest logit is wanted.

        Returns:
            Logits of those rows [n, V], or without a `head` their RMSNorm(x) behind the last layer [n, H]; and x
            behind each of `taps` [N, len(taps) * H]; and with `argmax` and a `head` the tokens [n] int64, the first
            of equals. New memory.

        Raises:
            IndexError: a token id has no embedding.
        """
        rows, wanted, bound = len(inputs), len(inputs) if logit_rows is None else len(logit_rows), self.bound
        if bound is None or not bound.fits(rows, wanted, keys, taps):
            bound = self.bound = _Bound(self, room(rows), room(wanted), keys, values, taps)
        check_pool(keys[0], values[0], plan)
        inputs, positions = inputs.contiguous(), positions.contiguous()
        self.stack.check_positions(positions)
        if self.embedding is not None:
            size = self.embedding.out_features
            if not inside(inputs.numpy(), size):
                raise IndexError(f"a token id is outside 0..{size - 1}")
        return bound.run(inputs, positions, plan, taps, logit_rows, argmax and self.head is not None)


class _Bound:
    """The program over one pool and one set of taps, with memory for so many rows, and so many of them wanted."""

    def __init__(
        self,
        target: CompiledTarget,
        capacity: int,
        wanted: int,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        taps: tuple[int, ...],
    ) -> None:
        self.target, self.wanted, self.taps = target, wanted, taps
        stack, head = target.stack, target.head
        self.memory = LayerMemory(stack, capacity, keys, values)
        size = len(stack.norm)
        self.x, self.hidden = torch.empty(2, capacity, size)
        self._no_ids = torch.empty(0, dtype=torch.int64)  # set at each run
        first = [] if target.embedding is None else [embed(target.embedding, self._no_ids, self.x)]
        steps = [*first, *self.memory.steps(self.hidden)]
        self.layer_steps = len(steps)
        # The wanted rows: to the product's codes, or as they are.
        integer = head is not None and head.integer
        self._codes = torch.empty(wanted, head.code_bytes, dtype=torch.uint8) if head and integer else None
        self._floats = torch.empty(wanted, size) if head and not integer else None
        steps.append(gather(self.hidden, out=self._floats, codes=self._codes).of(HEAD))
        if head is not None:
            source = self._codes if self._codes is not None else self._floats
            assert source is not None
            logits = torch.empty(0, width(head))  # set at each run
            steps.append(product(head, source, logits).of(HEAD))
            self._order = torch.arange(wanted)
            steps.append(choose(logits, width(head), self._order, self._no_ids).of(CHOICE))
        self.program = Program(steps, stack.rotation)
        self.norms = self.program.of_kind(NORM)
        entries = self.norms[::2]  # where layers begin, and the last
        self.tapped = entries[[layer + 1 for layer in taps]]
        self.columns = 4 * size * np.arange(len(taps))
        self.program.steps["tap_step"] = size * len(taps)
        if target.embedding is not None:
            self.program.steps["x"][self.norms] = self.x.data_ptr()

    def fits(self, rows: int, wanted: int, keys: Sequence[Tensor], taps: tuple[int, ...]) -> bool:
        return taps in ((), self.taps) and wanted <= self.wanted and self.memory.fits(rows, keys)

    def run(
        self,
        inputs: Tensor,
        positions: Tensor,
        plan: AttentionPlan,
        taps: tuple[int, ...],
        logit_rows: Tensor | None,
        argmax: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        rows, size, head = len(inputs), self.x.shape[1], self.target.head
        wanted = rows if logit_rows is None else len(logit_rows)
        out = torch.empty(wanted, size if head is None else head.out_features)
        tapped = torch.empty(rows, len(taps) * size)
        steps = self.program.steps
        if self.target.embedding is None:
            steps["x"][self.norms] = inputs.data_ptr()
        else:
            steps["index"][0] = inputs.data_ptr()
        steps["tap"][self.tapped] = tapped.data_ptr() + self.columns if taps else 0
        steps["index"][self.layer_steps] = 0 if logit_rows is None else logit_rows.data_ptr()
        self.program.direct(self.layer_steps + (head is not None), out)
        best = torch.empty(wanted, dtype=torch.int64) if argmax else None
        if best is not None:
            choice = len(steps) - 1  # the last step
            steps["x"][choice], steps["out"][choice] = out.data_ptr(), best.data_ptr()
        groups = [Rows(rows, positions, plan.slots.contiguous()), Rows(wanted), Rows(wanted if argmax else 0)]
        self.program.run(groups, self.memory.plan(plan))
        return out, tapped, best
