"""A witness in words."""

from __future__ import annotations

import numpy as np

from dspark.audit.witness import Deviation, Fork, Witness

__all__ = ["explain"]

_CAUSES = {
    "schedule": "the schedule depends on drafts that it decides about",
    "reused noise": "the schedule learned of a draft elsewhere: the draw behind it was used twice",
    "acceptance": "acceptance divides by another p_d than the drafts were sampled from",
    "joint": "the requests' schedules depend on each other's drafts in a circle: their outputs are not independent",
}


def explain(witness: Witness) -> list[str]:
    """Lines that show where the bias comes from and what it does."""
    size = f"{_count(len(witness.requests), 'request')}, {_count(witness.rounds, 'round')}"
    lines = [
        f"cause: {_CAUSES[witness.cause]}",
        f"smallest case: {size}, {_count(witness.gamma, 'draft slot')}",
    ]
    if witness.fork is not None:
        lines += _fork(witness.fork)
    return lines + _deviation(witness.deviation)


def _fork(fork: Fork) -> list[str]:
    rounds = {fork.verified.round + 1, fork.dropped.round + 1}
    slot, r = fork.slot, fork.request
    lines = [f"in round {min(rounds)}, is draft x_{slot} of request {r} verified?"]
    for branch, answer in ((fork.verified, "yes"), (fork.dropped, "no")):
        blocks = "; ".join(
            f"request {i} drafts {_tokens(x)}, survival {_row(a[: len(x)])}, verifies {length}"
            for i, (x, a, length) in enumerate(
                zip(branch.block, branch.survival, branch.lengths, strict=True)
            )
        )
        lines.append(f"  {answer:>3}: {blocks}")
    return lines


def _deviation(d: Deviation) -> list[str]:
    if d.request is None:
        worst = int(abs(d.got - d.expected).argmax())
        return [f"probability of one joint output: {d.got[worst]:.6f}, independent: {d.expected[worst]:.6f}"]
    behind = f" behind {_tokens(d.prefix)}" if d.prefix else ""
    return [
        f"output token {len(d.prefix) + 1} of request {d.request}{behind}: "
        f"{_row(d.got, 4)}, the target says {_row(d.expected, 4)}"
    ]


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _tokens(tokens: tuple[int, ...]) -> str:
    return "(" + " ".join(str(t) for t in tokens) + ")"


def _row(values: np.ndarray, digits: int = 2) -> str:
    return "(" + " ".join(f"{v:.{digits}f}" for v in values) + ")"
