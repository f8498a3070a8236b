"""The strongest sound search for each batch, so that nobody has to choose one."""

from __future__ import annotations

import numpy as np

from dspark.schedule.base import Dependence, ScheduleState
from dspark.schedule.policies import LaggedScheduler
from dspark.schedule.search import Curve, Ranking, best_budget, early_stop, stops_at_best

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

    def _schedule(self, state: ScheduleState, ranking: Ranking, drafted: np.ndarray) -> np.ndarray:
        curve = self._curve(state, ranking, drafted)
        if state.may_look:
            return ranking.lengths(best_budget(curve))
        expected = self._like(curve, self.aim.history.survival(state.uids), drafted)
        if stops_at_best(expected):
            return ranking.lengths(early_stop(curve))
        older = self._like(curve, self._older(state), drafted)
        return ranking.lengths(best_budget(older))

    @staticmethod
    def _like(curve: Curve, survival: np.ndarray, drafted: np.ndarray) -> Curve:
        """The curve of other survivals at the same prices."""
        return Curve(Ranking(survival, drafted), curve.outputs, curve.seconds, curve.spent)
