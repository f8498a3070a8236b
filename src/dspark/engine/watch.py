"""A loud word when a trained drafter does not work: wrong taps, slots or vocabulary raise no error by themselves."""

from __future__ import annotations

import logging

from dspark.drafters.base import Drafter

__all__ = ["AcceptanceWatch"]

ENOUGH_DRAFTS = 500  # drafts verified before a verdict
USELESS = 0.05  # share of them accepted below which something is wrong

_log = logging.getLogger("dspark")


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
