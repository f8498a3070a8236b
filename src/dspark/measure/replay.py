"""The parts of one target pass, by running it again on the rows and the KV of a real round.

The compiled pass is one call from which no part can be timed. So its program runs again with kinds of steps left
out (no units of work; the steps are still gone through). A part's time *in place* is what the whole program takes
longer than the one without it; *alone*, what the program of only this part takes longer than the empty one. Alone,
attention finds its keys in a cache from which weights would have driven them; in place, what a part does to the
others' caches is counted to it. Neither has to add up to the whole: `rest` is what is left of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from dspark.kernels.attention import AttentionPlan, is_fast
from dspark.kernels.program import Program, Rows
from dspark.kernels.program_numba import ATTEND, EMBED, GATHER, NORM, PRODUCT, ROTARY, SWIGLU
from dspark.kv import KVPool
from dspark.measure.timing import Clock, seconds
from dspark.target.base import ForwardBatch
from dspark.target.decoder import Decoder

__all__ = ["PARTS", "WARM_UP", "PassReplay"]

# A cache of which a pass's weights fill most takes some passes until it holds what it holds while a model decodes.
WARM_UP = 3
PARTS: dict[str, tuple[int, ...]] = {
    "products": (PRODUCT,),
    "attention": (ATTEND,),
    # Embeddings, norms with residual sums, rotary with the KV's writes, SwiGLU, rounding of activations.
    "small": (NORM, ROTARY, SWIGLU, GATHER, EMBED),
}


class PassReplay:
    """Times `batch` again over `pool`, where its requests still own their blocks. Spoils the KV of its own rows."""

    def __init__(self, decoder: Decoder, batch: ForwardBatch, pool: KVPool, taps: tuple[int, ...]) -> None:
        self.decoder, self.batch, self.pool, self.taps = decoder, batch, pool, taps
        head_dim = decoder.config.head_dim
        self.compiled = decoder._compiled if is_fast(pool.k[0], head_dim, pool.block_size) else None

    @torch.inference_mode()
    def times(self, clock: Clock) -> dict[str, float]:
        """Seconds of the pass, of the pass by modules, of its parts. Takes a dozen passes."""
        times = {"pass": self._pass(clock, compiled=True), "modules": self._pass(clock, compiled=False)}
        if self.compiled is not None:
            times |= self._parts(clock)
        return times

    def _pass(self, clock: Clock, compiled: bool) -> float:
        before = self.decoder._compiled
        if not compiled:
            self.decoder._compiled = None
        try:
            for _ in range(WARM_UP):
                self.decoder.forward(self.batch, self.pool, self.taps)
            return seconds(lambda: self.decoder.forward(self.batch, self.pool, self.taps), clock)
        finally:
            self.decoder._compiled = before

    def _parts(self, clock: Clock) -> dict[str, float]:
        compiled, batch = self.compiled, self.batch
        assert compiled is not None
        plan = AttentionPlan.of(batch, self.pool.block_size)
        layers = len(self.decoder.layers)
        inputs = batch.token_ids if compiled.embedding is not None else self.decoder.embed(batch.token_ids)
        start, wanted = inputs.clone(), batch.logit_rows
        # What this returns, and `inputs` and `plan`, are memory that the program goes on to use.
        keys, values = self.pool.k[:layers], self.pool.v[:layers]
        kept = compiled(inputs, batch.positions, plan, keys, values, self.taps, wanted)
        bound = compiled.bound
        assert bound is not None
        program, of_layers = bound.program, np.arange(len(bound.program.steps)) < bound.layer_steps
        count = len(batch.positions) if wanted is None else len(wanted)
        groups = [Rows(len(batch.positions), batch.positions.contiguous(), plan.slots), Rows(count), Rows(0)]
        units = int(plan.work.call["num_units"][0])

        def run(steps: np.ndarray) -> float:
            program.run(groups, units)  # untimed: each finds in the cache what a whole pass leaves there
            inputs.copy_(start)  # embedded rows: each run adds to them
            return _run_steps(program, steps, groups, units, clock)

        for _ in range(WARM_UP):
            inputs.copy_(start)
            program.run(groups, units)

        times = {"program": run(of_layers)}
        for name, kinds in PARTS.items():
            part = np.isin(program.steps["kind"], kinds)
            times[f"without {name}"] = run(of_layers & ~part)
            times[f"only {name}"] = run(of_layers & part)
        times["empty"] = run(np.zeros_like(of_layers))
        head = run(~of_layers) - times["empty"]
        times["lm_head"] = head if compiled.head is not None else self._head(kept[0], clock)
        return times

    def _head(self, normed: Tensor, clock: Clock) -> float:
        return seconds(lambda: self.decoder.lm_head(normed), clock)


def _run_steps(
    program: Program, steps: np.ndarray, groups: Sequence[Rows], attention: int, clock: Clock
) -> float:
    """Seconds of one run in which only `steps` (a mask) have work."""
    whole = program.cut.copy()
    program.cut[~steps, 1] = 0
    units = attention if steps[program.of_kind(ATTEND)].any() else 0
    run: Callable[[], None] = lambda: program.run(groups, units)  # noqa: E731
    try:
        return seconds(run, clock)
    finally:
        program.cut[:] = whole
