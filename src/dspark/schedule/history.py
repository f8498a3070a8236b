"""What a policy remembers of its requests, tagged by uid: nobody inherits another request's past."""

from __future__ import annotations

import numpy as np

from dspark.errors import DSparkError
from dspark.schedule.search import prefix_survival

__all__ = ["AcceptanceHistory", "RequestTable"]

_KEEP = 256  # rounds that an absent request is remembered for: preempted ones come back
_LEAST = 64  # rows that room is made for at once


class RequestTable:
    """Rows of numbers by request uid. A uid seen for the first time starts with `initial`, never with old rows.

    Rows lie in order of uid. New requests have larger uids than those before them, so they are appended, into room
    that doubles, and rows of requests long gone are dropped only when room runs out: a request costs O(1).
    """

    def __init__(self, shape: tuple[int, ...], initial: float) -> None:
        self._initial = initial
        self._uids, self._seen = np.zeros((2, 0), dtype=np.int64)  # [capacity], sorted up to _n; last round
        self._rows = np.zeros((0, *shape))  # [capacity, *shape]
        self._n = 0
        self._round = 0
        self._last = self._uids, self._uids  # of the last `open`: uids and where they lie
        self._side_by_side = False  # as indices from `_last[1][0]` on

    @property
    def values(self) -> np.ndarray:
        """[n, *shape], a view that later calls of `open` may leave behind."""
        return self._rows[: self._n]

    def peek(self, uids: np.ndarray) -> np.ndarray:
        """[R, *shape] the rows, to be read only; `initial` for unknown requests."""
        at, known = self._find(uids)
        if at is self._last[1] and self._side_by_side:
            return self._rows[at[0] : at[0] + len(at)]
        if known.all():
            return self._rows[at]
        rows = np.full((len(uids), *self._rows.shape[1:]), self._initial)
        rows[known] = self._rows[at[known]]
        return rows

    def open(self, uids: np.ndarray) -> np.ndarray:
        """[R] indices into `values`, with rows made for new requests; rows unused for long count as new."""
        self._round += 1
        at, known = self._find(uids)
        if at is not self._last[1]:
            if not known.all():
                self._admit(uids[~known])
                at = np.searchsorted(self._uids[: self._n], uids)
            self._last = uids.copy(), at
            self._side_by_side = len(at) > 0 and bool((at == np.arange(at[0], at[0] + len(at))).all())
        self._seen[at] = self._round
        return at

    def add(self, at: np.ndarray, amounts: np.ndarray) -> None:
        """Add [R, *shape] to the rows that `open` gave."""
        if at is self._last[1] and self._side_by_side:
            self._rows[at[0] : at[0] + len(at)] += amounts
        else:
            self._rows[at] += amounts

    def _find(self, uids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[R] where each lies, and [R] bool whether it does."""
        if len(uids) and np.array_equal(uids, self._last[0]):
            return self._last[1], np.ones(len(uids), dtype=bool)
        if not self._n:
            return np.zeros(len(uids), dtype=np.int64), np.zeros(len(uids), dtype=bool)
        at = np.searchsorted(self._uids[: self._n], uids)
        np.minimum(at, self._n - 1, out=at)
        return at, (self._uids[at] == uids) & (self._seen[at] >= self._round - _KEEP)

    def _admit(self, uids: np.ndarray) -> None:
        """Rows for `uids`, which have none, or one that is out of date."""
        new, n = np.sort(uids), self._n
        behind = n == 0 or new[0] > self._uids[n - 1]  # else they do not come in order of arrival: seldom
        if not behind or n + len(new) > len(self._uids):
            self._rebuild(new)
            n = self._n
        self._n = end = n + len(new)
        self._uids[n:end], self._seen[n:end], self._rows[n:end] = new, self._round, self._initial
        if not behind:
            order = np.argsort(self._uids[:end])
            for column in (self._uids, self._seen, self._rows):
                column[:end] = column[:end][order]

    def _rebuild(self, new: np.ndarray) -> None:
        """Drop rows of requests long gone and those of `new`, and make room for as many rows again."""
        n = self._n
        keep = (self._seen[:n] >= self._round - _KEEP) & ~np.isin(self._uids[:n], new)
        columns = self._uids[:n][keep], self._seen[:n][keep], self._rows[:n][keep]
        self._n = left = len(columns[0])
        room = max(_LEAST, 2 * (left + len(new)))
        self._uids, self._seen = np.zeros((2, room), dtype=np.int64)
        self._rows = np.zeros((room, *self._rows.shape[1:]))
        self._uids[:left], self._seen[:left], self._rows[:left] = columns


class AcceptanceHistory:
    """Online estimate of acceptance by slot, per request, from past rounds only.

    Slot k's conditional acceptance is passed / reached, both decayed sums. With confidences a round adds
    a_{r,k} and a_{r,k-1} of every drafted slot, so slots that were not scheduled count too (outcomes alone would
    be censored: confident slots are the scheduled ones), and `trust`, accepted over promised, corrects all of
    them by what really happened. Without confidences it adds the outcomes of scheduled slots. A request leans on
    the mean of all requests by `weight` rounds, that mean leans on the slot before it, and the first slot on
    `prior`.

    Args:
        prior: conditional acceptance assumed before anything was seen.
        weight: rounds that the assumption counts for.
        decay: what a round's weight shrinks by each further round in which something was drafted.
    """

    def __init__(self, gamma: int, prior: float = 0.6, weight: float = 2.0, decay: float = 0.95) -> None:
        if not 0 < prior < 1:
            raise DSparkError(
                f"prior must lie between 0 and 1 (new requests are neither hopeless nor perfect), got {prior}"
            )
        if weight <= 0 or not 0 < decay < 1:
            raise DSparkError("weight must be above 0, decay between 0 and 1")
        self.gamma, self.prior, self.weight, self.decay = gamma, prior, weight, decay
        self._counts = RequestTable((2, gamma), 0.0)  # reached, passed
        self._all = np.zeros((2, gamma))
        self._promised, self._accepted = 0.0, 0.0

    @property
    def trust(self) -> float:
        """Accepted drafts over the survival promised for them, 1 until something was scheduled."""
        return (self._accepted + self.weight) / (self._promised + self.weight)

    def conditional(self) -> np.ndarray:
        """[gamma] mean conditional acceptance by slot over all requests."""
        estimate, previous = [], self.prior
        for reached, passed in self._all.T.tolist():
            previous = (passed + self.weight * previous) / (reached + self.weight)
            estimate.append(previous)
        return np.array(estimate)

    def survival(self, uids: np.ndarray) -> np.ndarray:
        """[R, gamma] expected prefix survival of each request's next block."""
        counts = self._counts.peek(uids)
        each = (counts[:, 1] + self.weight * self.conditional()) / (counts[:, 0] + self.weight)
        alive = np.ascontiguousarray(each.T)  # slot-major, as in `prefix_survival`
        alive[0] *= self.trust
        for k in range(1, self.gamma):
            alive[k] *= alive[k - 1]
        return np.minimum(alive, 1.0, out=alive).T

    def observe(
        self,
        uids: np.ndarray,
        survival: np.ndarray | None,
        drafted: np.ndarray,
        scheduled: np.ndarray,
        accepted: np.ndarray,
    ) -> None:
        """File a round; one without drafts tells nothing and lets nothing fade."""
        if not drafted.any():
            return
        if survival is None:
            new = self._outcomes(scheduled, accepted)
        else:
            new = self._promises(prefix_survival(survival)[:, : self.gamma], drafted, scheduled, accepted)
        at = self._counts.open(uids)
        self._counts.values[:] *= self.decay
        self._counts.add(at, new)
        self._all = self.decay * self._all + new.sum(axis=0)

    def _outcomes(self, scheduled: np.ndarray, accepted: np.ndarray) -> np.ndarray:
        """[R, 2, gamma] reached and passed, as it turned out."""
        new, slots = np.empty((len(scheduled), 2, self.gamma)), np.arange(self.gamma)
        new[:, 0] = (scheduled[:, None] > slots) & (accepted[:, None] >= slots)
        new[:, 1] = accepted[:, None] > slots
        return new

    def _promises(
        self, a: np.ndarray, drafted: np.ndarray, scheduled: np.ndarray, accepted: np.ndarray
    ) -> np.ndarray:
        """[R, 2, gamma] reached and passed as confidences expect; what was scheduled settles the trust in them."""
        new, slots = np.zeros((len(a), 2, self.gamma)), np.arange(a.shape[1])
        known = drafted[:, None] > slots
        width = len(slots)
        new[:, 1, :width] = a * known
        new[:, 0, 0] = drafted > 0
        new[:, 0, 1:width] = a[:, :-1] * known[:, 1:]
        promised = float((a * (scheduled[:, None] > slots)).sum())
        self._promised = self.decay * self._promised + promised
        self._accepted = self.decay * self._accepted + float(accepted.sum())
        return new
