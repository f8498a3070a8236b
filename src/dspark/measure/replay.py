"""The parts of one target pass, by running it again on the rows and the KV of a real round.

The compiled pass is one call from which no part can be timed. So its program runs again with kinds of steps left
out (no units of work; the steps are still gone through). A part's time *in place* is what the whole program takes
longer than the one without it; *alone*, what the program of only this part takes longer than the empty one. Alone,
attention finds its keys in a cache from which weights would have driven them; in place, what a part does to the
others' caches is counted to it. Neither has to add up to the whole: `rest` is what is left of it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dspark.kernels.attention import AttentionPlan, is_fast
from dspark.kernels.program import Program, Rows
from dspark.kernels.program_numba import ATTEND, GATHER, NORM, PRODUCT, ROTARY, SWIGLU
from dspark.kv import KVPool
from dspark.measure.timing import Clock, seconds
from dspark.target.base import ForwardBatch
from dspark.target.decoder import Decoder

__all__ = ["PARTS", "PassReplay"]

PARTS: dict[str, tuple[int, ...]] = {
    "products": (PRODUCT,),
    "attention": (ATTEND,),
    # Norms with residual sums, rotary with the KV's writes, SwiGLU, rounding of activations.
    "small": (NORM, ROTARY, SWIGLU, GATHER),
}
ALL = sum(PARTS.values(), ())


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
            return seconds(lambda: self.decoder.forward(self.batch, self.pool, self.taps), clock)
        finally:
            self.decoder._compiled = before

    def _parts(self, clock: Clock) -> dict[str, float]:
        compiled, batch = self.compiled, self.batch
        assert compiled is not None
        plan = AttentionPlan.of(batch, self.pool.block_size)
        x = self.decoder.embed(batch.token_ids)
        start = x.clone()
        layers = len(self.decoder.layers)
        # What this returns, and `x` and `plan`, are memory that the program goes on to use.
        kept = compiled(x, batch.positions, plan, self.pool.k[:layers], self.pool.v[:layers], self.taps)
        bound = compiled._bound
        assert bound is not None
        units = int(plan.work.call["num_units"][0])

        def run(kinds: tuple[int, ...]) -> float:
            x.copy_(start)  # each run adds to it
            positions, slots = batch.positions.contiguous(), plan.slots.contiguous()
            return _run_kinds(bound.program, kinds, positions, slots, units, clock)

        times = {"program": run(ALL)}
        for name, kinds in PARTS.items():
            times[f"without {name}"] = run(tuple(kind for kind in ALL if kind not in kinds))
            times[f"only {name}"] = run(kinds)
        times["empty"] = run(())
        times["lm_head"] = self._head(kept[0], clock)
        return times

    def _head(self, normed: Tensor, clock: Clock) -> float:
        wanted = self.batch.logit_rows
        rows = normed if wanted is None else normed[wanted]
        return seconds(lambda: self.decoder.lm_head(rows), clock)


def _run_kinds(
    program: Program, kinds: tuple[int, ...], positions: Tensor, slots: Tensor, attention: int, clock: Clock
) -> float:
    """Seconds of one run in which steps of other kinds have no work."""
    whole = program._units
    program._units = np.where(np.isin(program.steps["kind"], kinds), whole, 0)
    units = attention if ATTEND in kinds else 0
    run: Callable[[], None] = lambda: program.run([Rows(len(positions), positions, slots)], units)  # noqa: E731
    try:
        return seconds(run, clock)
    finally:
        program._units = whole
