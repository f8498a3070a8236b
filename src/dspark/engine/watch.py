"""What an engine watches of itself: where time goes, and whether a trained drafter works at all.

Wrong taps, slots or vocabulary raise no error by themselves, so hardly any acceptance gets a loud word.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from dspark.drafters.base import Drafter

__all__ = ["AcceptanceWatch", "StepTimings"]

ENOUGH_DRAFTS = 500  # drafts verified before a verdict
USELESS = 0.05  # share of them accepted below which something is wrong

_log = logging.getLogger("dspark")


@dataclass
class StepTimings:
    """Where wall time went, in seconds, summed over steps (host clock: meaningful on a CPU).

    `draft_s`: drafts, and what of them to verify; `verify_s`: the target's pass and judgement.
    """

    steps: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    total_s: float = 0.0

    def add(self, total_s: float, draft_s: float, verify_s: float) -> None:
        """Count a step."""
        self.steps += 1
        self.draft_s += draft_s
        self.verify_s += verify_s
        self.total_s += total_s

    def reset(self) -> None:
        self.steps, self.draft_s, self.verify_s, self.total_s = 0, 0.0, 0.0, 0.0


class AcceptanceWatch:
    """Warns once if hardly any draft of a drafter with KV layers (a trained one) is accepted."""

    def __init__(self, drafter: Drafter | None) -> None:
        self._name = drafter.name if drafter is not None and drafter.kv_specs else None
        self._scheduled = self._accepted = 0

    def count(self, scheduled: int, accepted: int) -> None:
        if self._name is None:
            return
        self._scheduled += scheduled
        self._accepted += accepted
        if self._scheduled >= ENOUGH_DRAFTS:
            if self._accepted < USELESS * self._scheduled:
                _log.warning(
                    "the %s drafter's tokens are hardly ever accepted (%d of %d): it was probably trained for another "
                    "model, with other taps or another slot convention",
                    self._name, self._accepted, self._scheduled,
                )  # fmt: skip
            self._name = None
