"""What a policy remembers of its requests, tagged by uid: nobody inherits another request's past."""

from __future__ import annotations

import numpy as np

from dspark.errors import DSparkError
from dspark.schedule.search import prefix_survival

__all__ = ["AcceptanceHistory", "RequestTable"]

_KEEP = 1024  # rounds that an absent request is remembered for: preempted ones come back


class RequestTable:
    """Rows of numbers by request uid. A uid seen for the first time starts with `initial`, never with old rows."""

    def __init__(self, shape: tuple[int, ...], initial: float) -> None:
        self._initial = initial
        self._uids = np.zeros(0, dtype=np.int64)  # sorted
        self._seen = np.zeros(0, dtype=np.int64)
        self._round = 0
        self.values = np.zeros((0, *shape))

    def peek(self, uids: np.ndarray) -> np.ndarray:
        """[R, *shape] the rows, to be read only; `initial` for unknown requests."""
        if np.array_equal(uids, self._uids):
            return self.values
        if not len(self._uids):
            return np.full((len(uids), *self.values.shape[1:]), self._initial)
        at = np.minimum(np.searchsorted(self._uids, uids), len(self._uids) - 1)
        rows: np.ndarray = self.values[at]
        unknown = self._uids[at] != uids
        if unknown.any():
            rows[unknown] = self._initial
        return rows

    def open(self, uids: np.ndarray) -> np.ndarray:
        """[R] indices into `values`, with rows made for new requests; rows unused for long are dropped."""
        self._round += 1
        if np.array_equal(uids, self._uids):
            self._seen[:] = self._round
            return np.arange(len(uids))
        at = np.searchsorted(self._uids, uids)
        if not len(self._uids) or (self._uids[np.minimum(at, len(self._uids) - 1)] != uids).any():
            self._admit(uids)
            at = np.searchsorted(self._uids, uids)
        self._seen[at] = self._round
        return at

    def _admit(self, uids: np.ndarray) -> None:
        keep = (self._seen >= self._round - _KEEP) | np.isin(self._uids, uids)
        new = np.setdiff1d(uids, self._uids)
        merged = np.concatenate((self._uids[keep], new))
        fresh = np.full((len(new), *self.values.shape[1:]), self._initial)
        order = np.argsort(merged)
        self._uids = merged[order]
        self.values = np.concatenate((self.values[keep], fresh))[order]
        self._seen = np.concatenate((self._seen[keep], np.zeros(len(new), dtype=np.int64)))[order]


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
        at, counts = self._counts.open(uids), self._counts.values
        counts *= self.decay
        if len(at) == len(counts) and (at == np.arange(len(at))).all():
            counts += new
        else:
            counts[at] += new
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
