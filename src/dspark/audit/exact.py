"""Exact losslessness audit: enumerate every outcome of drafter, policy and acceptance.

result = audit(appendix_a(), policy)        # three rounds
result.biased, result.laws[0], result.witness

Probabilities are float64 sums of products of positive numbers, so rounding stays near 1e-15.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dspark.audit.noise import Known, address, draw, still_needed
from dspark.audit.policies import PolicyStates
from dspark.audit.world import World
from dspark.errors import DSparkError
from dspark.schedule.policies import Policy, ScheduleState

__all__ = ["TOLERANCE", "Branch", "Exploration", "Outcome", "ratio_outcomes"]

TOLERANCE = 1e-12

Tokens = tuple[int, ...]
Block = tuple[Tokens, ...]  # drafts of each request


class View(NamedTuple):
    """What a round depends on."""

    anchors: Tokens
    committed: tuple[int, ...]  # output tokens of each request so far
    policy: int  # number of its state
    noise: Known  # shared draws that were revealed and are not used up


@dataclass(frozen=True, eq=False)
class Branch:
    """One outcome of drafting in a round, and the schedule the policy made of it."""

    round: int
    view: View
    block: Block
    survival: np.ndarray  # [R, gamma]
    lengths: tuple[int, ...]


class _Plan(NamedTuple):
    scheduled: Block
    policy: int
    noise: Known
    block: Block | None  # all that was drafted, where the policy learns from it


class Outcome(NamedTuple):
    """Tokens that acceptance commits, and how likely."""

    tokens: Tokens
    probability: float


class Exploration:
    """All branches of `rounds` rounds, equal states merged; `n` output tokens of each request are kept."""

    def __init__(self, world: World, policy: Policy, rounds: int, n: int | None = None) -> None:
        if rounds < 1:
            raise DSparkError(f"an audit needs at least one round, got {rounds}")
        self.world, self.rounds, self.n = world, rounds, n or rounds
        if self.n > rounds:
            raise DSparkError(
                f"{rounds} rounds decide {rounds} tokens for certain, not {self.n}: give more rounds"
            )
        self.branches: list[Branch] = []
        self._policies = PolicyStates(policy)
        self._rounds: dict[tuple[View, int], dict[tuple[Block, int, Known], float]] = {}
        self._ratio: dict[tuple[int, Tokens], list[Outcome]] = {}

    def run(self) -> np.ndarray:
        """Joint distribution of the first n tokens of all requests, [V] * (n * R), request 0's tokens first."""
        R = self.world.num_requests
        start = View(self.world.anchors, (0,) * R, 0, ())
        nodes: dict[tuple[Block, View], float] = {(((),) * R, start): 1.0}
        for round_ in range(self.rounds):
            after: dict[tuple[Block, View], float] = defaultdict(float)
            for (outputs, view), weight in nodes.items():
                for (new, policy, noise), p in self._round(view, round_).items():
                    kept = tuple((o + t)[: self.n] for o, t in zip(outputs, new, strict=True))
                    after[kept, self._next(view, new, policy, noise, round_)] += weight * p
            nodes = after
        law = np.zeros((self.world.vocab_size,) * (self.n * R))
        for (outputs, _), weight in nodes.items():
            law[sum(outputs, ())] += weight
        return law

    def _next(self, view: View, new: Block, policy: int, noise: Known, round_: int) -> View:
        if round_ == self.rounds - 1:
            return View((), (), 0, ())  # nothing follows: only the outputs matter
        anchors = tuple(t[-1] for t in new)
        committed = tuple(c + len(t) for c, t in zip(view.committed, new, strict=True))
        return View(anchors, committed, policy, still_needed(self.world, noise, committed))

    def _round(self, view: View, round_: int) -> dict[tuple[Block, int, Known], float]:
        """What a round commits, the policy's state behind it and the draws known: with probabilities."""
        key = (view, round_)
        if key not in self._rounds:
            plans: dict[_Plan, float] = defaultdict(float)
            for plan, p in self._plans(view, round_):
                plans[plan] += p
            result: dict[tuple[Block, int, Known], float] = defaultdict(float)
            for plan, p in plans.items():
                for new, noise, q in self._verify(view, plan.scheduled, plan.noise, round_):
                    result[new, self._observed(view, plan, new), noise] += p * q
            self._rounds[key] = result
        return self._rounds[key]

    def _state(self, view: View) -> ScheduleState:
        R = self.world.num_requests
        # The prompt is one token, so as many positions are cached as tokens were put out.
        return ScheduleState(
            np.arange(R),
            np.full(R, self.world.gamma),
            np.array(view.committed),
            tolerates_live=np.full(R, self.world.tolerates_live),
        )

    def _plans(self, view: View, round_: int) -> Iterator[tuple[_Plan, float]]:
        """Draft and schedule: every branch."""
        state = self._state(view)
        drafted, policy = self._policies.draft_lengths(view.policy, state)
        for block, noise, p in self._blocks(view, drafted):
            alive = self._survival(view.anchors, block)
            seen = alive if drafted.any() else None  # as in the engine: no draft, no confidences
            lengths, planned = self._policies.verify_lengths(policy, state, seen, drafted)
            self.branches.append(Branch(round_, view, block, alive, tuple(lengths.tolist())))
            scheduled = tuple(x[:length] for x, length in zip(block, lengths.tolist(), strict=True))
            learned = self._policies.observes and round_ < self.rounds - 1
            yield _Plan(scheduled, planned, noise, block if learned else None), p

    def _observed(self, view: View, plan: _Plan, new: Block) -> int:
        """The policy's state behind acceptance."""
        if plan.block is None:
            return plan.policy
        drafted = np.array([len(x) for x in plan.block])
        alive = self._survival(view.anchors, plan.block) if drafted.any() else None
        scheduled = np.array([len(x) for x in plan.scheduled])
        accepted = np.array([len(t) - 1 for t in new])
        return self._policies.observe(plan.policy, self._state(view), alive, drafted, scheduled, accepted)

    def _blocks(self, view: View, drafted: np.ndarray) -> list[tuple[Block, Known, float]]:
        """Every outcome of drafting for all requests."""
        frontier: list[tuple[Block, Known, float]] = [((), view.noise, 1.0)]
        for r, length in enumerate(drafted.tolist()):
            paths: list[tuple[Block, Known, float]] = [((*b, ()), noise, p) for b, noise, p in frontier]
            for k in range(length):
                grown = []
                for block, noise, p in paths:
                    drafts = block[-1]
                    previous = drafts[-1] if drafts else view.anchors[r]
                    row = self.world.p_draft[k, previous]
                    where = address(self.world, r, view.committed[r], k)
                    for token, noise_after, q in draw(where, row, noise, self.world.rule):
                        grown.append(((*block[:-1], (*drafts, token)), noise_after, p * q))
                paths = grown
            frontier = paths
        return frontier

    def _survival(self, anchors: Tokens, block: Block) -> np.ndarray:
        """a_{r,j} [R, gamma], eq. (7) multiplied up; 0 past a row's drafts, where there is nothing to read."""
        alive = np.zeros((len(block), max(len(x) for x in block)))
        for r, drafts in enumerate(block):
            tokens = (anchors[r], *drafts)
            c = [self.world.confidence(tokens, k) for k in range(1, len(tokens))]
            alive[r, : len(c)] = np.cumprod(c)
        return alive

    def _verify(
        self, view: View, scheduled: Block, noise: Known, round_: int
    ) -> list[tuple[Block, Known, float]]:
        """Every outcome of acceptance for all requests; the last round keeps what the output needs."""
        last = round_ == self.rounds - 1
        frontier: list[tuple[Block, Known, float]] = [((), noise, 1.0)]
        for r, drafts in enumerate(scheduled):
            need = max(0, self.n - view.committed[r]) if last else None
            grown: dict[tuple[Block, Known], float] = defaultdict(float)
            for done, known, p in frontier:
                for tokens, after, q in self._outcomes(r, view, drafts, known):
                    grown[(*done, tokens[:need]), after] += p * q
            frontier = [(b, known, p) for (b, known), p in grown.items()]
        return frontier

    def _outcomes(
        self, r: int, view: View, drafts: Tokens, noise: Known
    ) -> list[tuple[Tokens, Known, float]]:
        anchor, committed = view.anchors[r], view.committed[r]
        if self.world.rule == "shared-noise":
            return self._shared_noise_outcomes(r, anchor, committed, drafts, noise)
        key = (anchor, drafts)
        if key not in self._ratio:
            self._ratio[key] = ratio_outcomes(self.world.p_target, self.world.divisor, anchor, drafts)
        return [(tokens, noise, p) for tokens, p in self._ratio[key]]

    def _shared_noise_outcomes(
        self, r: int, anchor: int, committed: int, drafts: Tokens, noise: Known
    ) -> list[tuple[Tokens, Known, float]]:
        """Emit the target's own draw at each position, as long as the draft before it was the same."""
        done: list[tuple[Tokens, Known, float]] = []
        running: list[tuple[Tokens, Known, float]] = [((), noise, 1.0)]
        for k in range(len(drafts) + 1):
            matched: list[tuple[Tokens, Known, float]] = []
            for tokens, known, p in running:
                row = self.world.p_target[tokens[-1] if tokens else anchor]
                for token, after, q in draw(address(self.world, r, committed, k), row, known, "shared-noise"):
                    item = ((*tokens, token), after, p * q)
                    (matched if k < len(drafts) and token == drafts[k] else done).append(item)
            running = matched
        return done


def ratio_outcomes(p_target: np.ndarray, p_ratio: np.ndarray, anchor: int, drafts: Tokens) -> list[Outcome]:
    """What the ratio rule commits of scheduled `drafts`: the formulas of `dspark.acceptance.ratio_rule`.

    x_k is accepted with probability min(1, p_t(x_k) / p_d(x_k)); else the next token comes from
    norm(max(p_t - p_d, 0)), or from p_t where that is zero; behind the last draft from p_t.
    """
    outcomes: list[Outcome] = []
    alive, previous = 1.0, anchor
    for k, x in enumerate(drafts):
        p, q = p_target[previous], p_ratio[k, previous]
        accept = min(1.0, p[x] / q[x]) if q[x] > 0 else float(p[x] > 0)
        if accept < 1:
            residual = np.maximum(p - q, 0)
            residual = residual / residual.sum() if residual.sum() > 0 else p
            outcomes += _continued(drafts[:k], residual, alive * (1 - accept))
        alive, previous = alive * accept, x
        if alive == 0:
            return outcomes
    return outcomes + _continued(drafts, p_target[previous], alive)


def _continued(accepted: Tokens, row: np.ndarray, weight: float) -> list[Outcome]:
    return [Outcome((*accepted, v), weight * float(p)) for v, p in enumerate(row) if p > 0]
