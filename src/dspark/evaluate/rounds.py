"""What verification rounds say about a drafter, slot by slot.

Slot k (0 is the first behind the anchor) is *reached* when it was verified and the drafts before it were accepted:
only there does the target judge it in a context that is committed. Drafts behind the end of an answer decide
nothing and count nowhere here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["AnswerCounts", "CollisionThresholds", "live_slots"]


@dataclass(frozen=True, kw_only=True)
class CollisionThresholds:
    """When adjacent drafts (x_k, x_k+1) are a *cross-mode collision* ("of course", "no problem" -> "of problem").

    h is the committed context of a reached slot k, p_t the target's distribution after temperature (temperature 1
    where decoding is greedy: a one-hot has no modes). With the B = `alternatives` likeliest tokens y != x_k,

        m(v) = p_t(x_k | h) p_t(v | h, x_k) + sum_y p_t(y | h) p_t(v | h, y)

    is a lower bound of the target's probability of v two places behind h, whatever stands between. A collision has

        p_t(x_k | h) >= `probable`,  m(x_k+1) >= `probable`,  p_t(x_k+1 | h, x_k) <= `improbable`.

    The first and the last factor are rows of the verification pass. Pairs that pass these two are *suspects*; for
    them alone, one more target pass behind the finished answer gives p_t(. | h, y), a row for each y. Pairs whose
    x_k ends the text are no pairs. `alternatives` 0 leaves suspects unresolved and the pass out.
    """

    probable: float = 0.1
    improbable: float = 0.01
    alternatives: int = 4


@dataclass
class AnswerCounts:
    """Sums over the rounds of one answer; lists are per slot and grow with the longest draft.

    `soft[k]` sums sum_v min(p_t(v), p_d(v)) over the rounds that reached slot k (at temperature 0: p_t of the draft
    at temperature 1). `pairs`: adjacent verified drafts whose first was reached; see `CollisionThresholds`.
    """

    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    soft: list[float] = field(default_factory=list)
    pairs: int = 0
    suspects: int = 0
    collisions: int | None = 0  # None: suspects were left unresolved

    def add_round(self, reached: int, accepted: int, soft: Sequence[float]) -> None:
        """Count a round that reached slots 0 .. reached - 1 and accepted the first `accepted` of them."""
        missing = reached - len(self.reached)
        if missing > 0:
            self.reached += [0] * missing
            self.accepted += [0] * missing
            self.soft += [0.0] * missing
        for k in range(reached):
            self.reached[k] += 1
            self.accepted[k] += k < accepted
            self.soft[k] += soft[k]

    def as_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


def live_slots(scheduled: int, accepted: int, kept: int) -> tuple[int, int]:
    """(reached, accepted) slots of a round that verified `scheduled` drafts, of whose tokens `kept` were committed.

    `kept` is accepted + 1, less where the answer ended inside the accepted drafts: what lies behind the end was
    never judged as a continuation of the answer.
    """
    if kept <= accepted:
        return kept, kept
    return min(accepted + 1, scheduled), accepted
