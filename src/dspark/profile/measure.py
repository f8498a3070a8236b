"""Time an engine's rounds: those without a draft by their rows, requests and context, drafts, and the upkeep of
their context.

Probes take turns, so that a slow moment of the machine meets all of them; each is run some times in a row, of which
the first do not count, so that it finds the caches as it would leave them itself. Rounds without drafts are timed
behind their like, and as they are where drafting rests; those with drafts behind theirs, as they are where it is on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch

from dspark.core import DSparkError
from dspark.drafters.base import Deferring, Drafter
from dspark.drafters.lookup import LookupFirst
from dspark.profile.bench import BLOCK, Bench
from dspark.profile.fit import Probe, Sample
from dspark.schedule.feedback import SETTLED
from dspark.target.base import Target

__all__ = ["ProfileSettings", "largest_pass", "measure_profile"]

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
PLAIN = (16, 32, 64)  # requests at once, beside one and several
IN_A_ROW = 3  # runs of a probe that count, at a turn
FEW_ROWS = 8  # up to which a pass takes as long as it takes to read the weights, or nearly
GROWTH = SETTLED + IN_A_ROW  # rounds of a request at most, of which those that count go beyond its context


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """`seconds`: about how long to measure (each probe at least `repeats` times, at most `most`).
    `max_rows`: largest pass that is timed; `context_lengths`: cached positions a request, shortest first.
    `temperature`: of drafts and judgement: sampling and the ratio rule take longer than the argmax at 0."""

    seconds: float = 4.0
    repeats: int = 2
    most: int = 25
    max_rows: int = 64
    context_lengths: tuple[int, ...] = (64, 512, 1536)
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if self.repeats < 1 or self.most < self.repeats or self.max_rows < 2:
            raise DSparkError(
                "a profile needs repeats of 1 or more, at most `most`, and max_rows of 2 or more"
            )
        if not 0 <= self.temperature < math.inf:
            raise DSparkError(f"a profile needs a temperature of 0 or more, got {self.temperature}")
        if len(set(self.context_lengths)) < 3 or list(self.context_lengths) != sorted(self.context_lengths):
            raise DSparkError(
                f"a profile needs three context lengths at least, in rising order, got {self.context_lengths}"
            )


def measure_profile(
    target: Target,
    drafter: Drafter | None,
    gamma: int,
    max_num_seqs: int = 16,
    settings: ProfileSettings | None = None,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[float], None] = lambda share: None,
) -> list[Sample]:
    """Raw times, in no particular order. The drafter must not be in use by an engine: it is attached elsewhere.

    Args:
        drafter: behind a prompt lookup, the model is timed: copies have no price.
        gamma: most drafts a request may have; 0 without a drafter.
        max_num_seqs: the engine's; larger passes than it can have are not timed.
        progress: gets the share of the work that is done, above 0 and at most 1, behind each probe.
    """
    settings = settings or ProfileSettings()
    contexts, block = _lengths(settings, target, gamma), gamma
    if isinstance(drafter, LookupFirst):
        block, drafter = drafter.model_tokens, drafter.drafter
    largest = largest_pass(settings, gamma, max_num_seqs)
    probes = probes_of(contexts, gamma, largest, max_num_seqs, drafter, block)
    room = GROWTH * (1 + gamma) + BLOCK
    positions = max(requests * (context + 1 + room) for _, requests, _, context in probes)
    most = max(requests for _, requests, _, _ in probes)
    bench = Bench(target, drafter, gamma, most, positions, settings.temperature, clock)
    random = Random(0)
    with torch.inference_mode():
        for probe in probes:
            bench.run(probe)  # warm up: compiled kernels, caches, memory
        samples: list[Sample] = []
        began = clock()
        for repeat in range(settings.most):
            random.shuffle(probes)
            for i, probe in enumerate(probes):
                samples += bench.run(probe, _lead(probe), IN_A_ROW)
                spent, turns = clock() - began, repeat + (i + 1) / len(probes)
                progress(_share(turns, spent, settings))
            if repeat + 1 >= settings.repeats and spent * (repeat + 2) / (repeat + 1) > settings.seconds:
                break
    return samples


def _share(turns: float, spent: float, settings: ProfileSettings) -> float:
    """Of `turns` that took `spent` seconds, among all that will be made at this pace."""
    fitting = turns * settings.seconds // spent if spent > 0 else settings.most
    return min(1.0, turns / min(max(fitting, settings.repeats), settings.most))


def largest_pass(settings: ProfileSettings, gamma: int, max_num_seqs: int) -> int:
    """Rows of the largest pass that is timed: what the engine can have, as far as the settings go."""
    return max(n for n in SIZES if n <= max(2, min(settings.max_rows, max_num_seqs * (1 + gamma))))


def _lengths(settings: ProfileSettings, target: Target, gamma: int) -> tuple[int, ...]:
    """The context lengths as far as the model's context goes: shorter ones in proportion where it is short."""
    room = target.max_context - gamma - 2 - IN_A_ROW
    longest = settings.context_lengths[-1]
    lengths = [n if longest <= room else max(1, n * room // longest) for n in settings.context_lengths]
    if len(set(lengths)) < 3:
        raise DSparkError(f"the model's context of {target.max_context} is too short for a cost profile")
    return tuple(lengths)


def probes_of(
    contexts: tuple[int, ...],
    gamma: int,
    max_rows: int,
    max_num_seqs: int,
    drafter: Drafter | None,
    block: int,
) -> list[Probe]:
    """What is timed. Rounds by rows at the shortest context, two sizes at the longer ones, plain decoding of more and
    more requests; drafts of one and of several requests, `block` each at most; upkeep of one row and of a block's."""
    short, width = contexts[0], 1 + gamma
    sizes = [n for n in SIZES if n <= max_rows]
    requests = {n: -(-n // width) for n in sizes}
    seats = max_num_seqs if gamma else max(2, max_num_seqs)  # prices by rows need two sizes of pass
    probes: list[Probe] = [("step", requests[n], n, short) for n in sizes if requests[n] <= seats]
    some = max(n for n in sizes if n <= max(width, 2))
    at_longer = (1, min(some, width)) if gamma else (1,)
    probes += [("step", 1, n, long) for long in contexts[1:] for n in at_longer]
    several = min(8, max_num_seqs, max_rows)
    probes += [("step", n, n, short) for n in (several, *PLAIN) if n <= min(max_num_seqs, max_rows)]
    if drafter is not None:
        counts = sorted({1, several})
        probes += [("draft", r, r * k, short) for r in counts for k in sorted({1, block})]
        if not isinstance(drafter, Deferring):
            probes += [("upkeep", 1, n, width) for n in (1, width)]
    return list(dict.fromkeys(probes))


def _lead(probe: Probe) -> int:
    """Runs at a turn that do not count: few rows find the caches as those before left them, for many passes. Rounds
    with drafts settle sooner: each draft displaces again what the pass behind it brought in."""
    kind, _, rows, _ = probe
    if rows > FEW_ROWS:
        return 1
    return SETTLED if kind == "step" else SETTLED // 4
