"""The strongest sound search for each batch, so that nobody has to choose one."""

from __future__ import annotations

import numpy as np

from dspark.schedule.base import Dependence, ScheduleState
from dspark.schedule.policies import LaggedScheduler
from dspark.schedule.search import best_budget, early_stop, rank

__all__ = ["AutoScheduler"]


class AutoScheduler(LaggedScheduler):
    """Global search where every row tolerates it, else Algorithm 1 or a lagged budget.

    Rows that tolerate a look at the block: temperature 0, deterministic proposals, the shared-noise rule. One row
    that does not, and the batch is scheduled without looking: by Algorithm 1 where its early stop is expected to
    reach what a global search would (few requests, prices that rise evenly: the newest confidences count), by a
    budget from old survivals where it would stop at a step in the prices (LaggedScheduler). That choice rests on
    past rounds alone, so either way nothing depends on a draft that it decides about.
    """

    dependence = Dependence.LAGGED  # of rows that do not tolerate LIVE
    looks_where_tolerated = True  # LIVE for a batch of others: an audit has to try those, too

    def _schedule(self, state: ScheduleState, survival: np.ndarray, drafted: np.ndarray) -> np.ndarray:
        ranking = rank(survival, drafted)
        curve = self._curve(state, ranking, drafted)
        if state.may_look:
            return ranking.lengths(best_budget(curve))
        if self._early_stop_suffices(state, drafted):
            return ranking.lengths(early_stop(curve))
        return super()._schedule(state, survival, drafted)

    def _early_stop_suffices(self, state: ScheduleState, drafted: np.ndarray) -> bool:
        expected = self._curve(state, rank(self.aim.history.survival(state.uids), drafted), drafted)
        return early_stop(expected) == best_budget(expected)
