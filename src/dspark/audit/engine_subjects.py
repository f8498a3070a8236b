"""What a statistical audit puts to the test: drafters with the policies that may run them, and engines to run in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dspark.acceptance import AcceptanceRule
from dspark.core import DSparkError, RequestOutput, SamplingParams
from dspark.drafters.base import Drafter
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.imports import make_imported
from dspark.schedule.cost import TableCost
from dspark.schedule.custom import load_policy
from dspark.schedule.policies import Dependence, Policy, ScheduleState
from dspark.schedule.settings import ScheduleSettings, build_policy
from dspark.target.base import Target

__all__ = ["PolicyFactory", "Subject", "load_drafter", "make_engine", "play", "policy_factories", "subject"]

PolicyFactory = Callable[[int], Policy]  # most drafts a round -> a fresh policy
Work = Sequence[tuple[Sequence[int], SamplingParams]]

_NEEDED = (  # of a drafter
    "name", "deterministic", "max_draft", "taps", "kv_specs", "attach", "observe", "propose", "forget",
)  # fmt: skip
THRESHOLD = 0.3  # survival; low, as a drafter under audit may be poor
WORTH = 0.5  # price of a full batch's drafts, one each, over the price of a pass without rows


@dataclass(frozen=True, eq=False)
class Subject:
    """A drafter, the draft lengths and the policies to try with it."""

    name: str
    drafter: Drafter
    gammas: tuple[int, ...]
    policies: Mapping[str, PolicyFactory]


def subject(
    name: str,
    drafter: Drafter,
    target: Target,
    policies: Mapping[str, PolicyFactory],
    gammas: Iterable[int] | None = None,
) -> Subject:
    """A subject with the draft lengths it can have (by default 1, and all it can) and the policies it can follow:
    `threshold` needs confidences.

    Raises:
        DSparkError: every draft length is out of the drafter's range.
    """
    most = drafter.max_draft
    lengths = tuple(sorted({g for g in gammas or (1, most) if 1 <= g <= most}))
    if not lengths:
        raise DSparkError(f"{name} drafts 1 to {most} tokens a round: choose draft lengths from these")
    with_confidence = _has_confidence(target, drafter)
    kept = {key: make for key, make in policies.items() if with_confidence or key != "threshold"}
    return Subject(name, drafter, lengths, kept)


def policy_factories(names: Iterable[str], concurrency: int) -> dict[str, PolicyFactory]:
    """Policies that ship, by name, and a user's own by import path (`module:factory`).

    Prices are made up: a staircase on which a full batch verifies likely drafts and a small one most of them.
    Losslessness must hold at any price; these make schedules vary.
    """
    return {name: _factory(name, concurrency) for name in names}


def _factory(name: str, concurrency: int) -> PolicyFactory:
    if ":" in name:
        return lambda gamma: load_policy(name)
    settings = ScheduleSettings(policy=name, threshold=THRESHOLD if name == "threshold" else None)
    return lambda gamma: build_policy(settings, gamma, lambda: _prices(concurrency, gamma), lambda line: None)


def _prices(concurrency: int, gamma: int) -> TableCost:
    sizes = range(2, concurrency * (gamma + 1) + 4, 2)
    return TableCost(tuple(sizes), tuple(1 + WORTH * b / concurrency for b in sizes), executed=True)


def load_drafter(path: str, target: Target) -> Drafter:
    """The drafter that `module:factory` makes of the target.

    Raises:
        DSparkError: the path leads nowhere, or what it leads to makes no drafter.
    """
    drafter: Drafter = make_imported(path, lambda factory: factory(target), _NEEDED)
    return drafter


def make_engine(
    target: Target,
    drafter: Drafter | None,
    policy: Policy | None,
    rule: AcceptanceRule,
    gamma: int,
    concurrency: int,
    longest: int,
) -> Engine:
    """An engine for `concurrency` requests of up to `longest` tokens, drafting `gamma` tokens at most."""
    size = EngineConfig.block_size
    blocks = concurrency * (-(-(longest + gamma + 1) // size) + 1)
    config = EngineConfig(
        max_num_seqs=concurrency,
        max_num_batched_tokens=max(EngineConfig.max_num_batched_tokens, concurrency),
        kv_cache_tokens=blocks * size,
        acceptance=rule,
    )
    engine = Engine(target, drafter, policy, None, config)
    engine.scheduler.max_draft = min(engine.scheduler.max_draft, gamma)  # also for policies of their own mind
    return engine


def play(engine: Engine, work: Work, every: int = 0) -> list[RequestOutput]:
    """Outputs in order. Requests arrive together, or one each `every` steps."""
    ids: list[str] = []
    outputs: dict[str, RequestOutput] = {}
    step = 0
    while engine.has_unfinished or len(ids) < len(work):
        due = len(work) if not every else step // every + 1
        ids += [engine.add(prompt, params) for prompt, params in work[len(ids) : due]]
        outputs |= {e.request_id: e.output for e in engine.step() if e.output is not None}
        step += 1
    return [outputs[i] for i in ids]


@dataclass
class _Watch:
    """Drafts and verifies `length` tokens, and notes whether confidences came with them."""

    length: int
    confidences: bool = False
    dependence: Dependence = Dependence.CAUSAL
    uses_survival: bool = True

    def draft_lengths(self, state: ScheduleState) -> np.ndarray:
        return np.minimum(state.room, self.length)

    def verify_lengths(
        self, state: ScheduleState, survival: np.ndarray | None, drafted: np.ndarray
    ) -> np.ndarray:
        self.confidences |= survival is not None and bool(drafted.any())
        return drafted


def _has_confidence(target: Target, drafter: Drafter) -> bool:
    policy = _Watch(drafter.max_draft)
    engine = make_engine(target, drafter, policy, "ratio", drafter.max_draft, 1, 32)
    play(engine, [([1] * 4, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))])
    return policy.confidences
