"""What a policy remembers of its requests, tagged by uid: nobody inherits another request's past."""

from __future__ import annotations

import numpy as np

from dspark.errors import DSparkError
from dspark.schedule import history_loops

__all__ = ["AcceptanceHistory", "RequestTable"]

_KEEP = 256  # rounds that an absent request is remembered for: preempted ones come back
_LEAST = 64  # columns that room is made for at once


class RequestTable:
    """Rows of numbers by request uid. A uid seen for the first time starts with `initial`, never with old rows.

    Rows lie in order of uid. New requests have larger uids than those before them, so they are appended, into room
    that doubles, and rows of requests long gone are dropped only when room runs out: a request costs O(1).

    Args:
        initial: [*shape] what a row starts with.
    """

    def __init__(self, initial: np.ndarray) -> None:
        self._initial = initial
        # [capacity], increasing up to `count`; last round.
        self._uids, self.seen = np.zeros((2, 0), dtype=np.int64)
        self.rows = np.zeros((0, *initial.shape))  # [capacity, *shape]; `find` may leave this array behind
        self.count = 0
        self.round = 0
        self._found, self._at = (
            b"",
            np.zeros(0, dtype=np.int64),
        )  # of the last `find`: uids, and where they lie

    @property
    def values(self) -> np.ndarray:
        """[count, *shape], a view."""
        return self.rows[: self.count]

    def find(self, uids: np.ndarray) -> np.ndarray:
        """[R] where they lie, until the next call; with rows made for new requests, one unused for long being new."""
        asked = uids.tobytes()
        if asked != self._found:
            if self._locate(uids):
                self._admit(uids[self._at < 0])
                self._locate(uids)
            self._found = asked
        return self._at

    def begin_round(self, uids: np.ndarray) -> np.ndarray:
        """`find`, in one more round; whoever files it sets `seen` of these rows to `round`."""
        at = self.find(uids)
        self.round += 1
        return at

    def _locate(self, uids: np.ndarray) -> int:
        """How many of them have no row and could not be given one the usual way, behind the last."""
        if len(self._at) != len(uids):
            self._at = np.empty(len(uids), dtype=np.int64)
        missing, self.count = history_loops.find(
            uids,
            self._uids,
            self.seen,
            self.rows,
            self._initial,
            self.count,
            self.round,
            self.round - _KEEP,
            self._at,
        )
        return missing

    def _admit(self, uids: np.ndarray) -> None:
        """Rows for `uids`, which have none, or one that is out of date."""
        new, n = np.sort(uids), self.count
        behind = n == 0 or new[0] > self._uids[n - 1]  # else they do not come in order of arrival: seldom
        if not behind or n + len(new) > len(self._uids):
            self._rebuild(new)
            n = self.count
        self.count = end = n + len(new)
        self._uids[n:end], self.seen[n:end], self.rows[n:end] = new, self.round, self._initial
        if not behind:
            order = np.argsort(self._uids[:end])
            for column in (self._uids, self.seen, self.rows):
                column[:end] = column[:end][order]

    def _rebuild(self, new: np.ndarray) -> None:
        """Drop rows of requests long gone and those of `new`, and make room for as many rows again."""
        n = self.count
        keep = (self.seen[:n] >= self.round - _KEEP) & ~np.isin(self._uids[:n], new)
        columns = self._uids[:n][keep], self.seen[:n][keep], self.rows[:n][keep]
        self.count = left = len(columns[0])
        room = max(_LEAST, 2 * (left + len(new)))
        self._uids, self.seen = np.zeros((2, room), dtype=np.int64)
        self.rows = np.zeros((room, *self.rows.shape[1:]))
        self._uids[:left], self.seen[:left], self.rows[:left] = columns


class AcceptanceHistory:
    """Online estimate of acceptance by slot, per request, from past rounds only.

    Slot k's conditional acceptance is passed / reached, both decayed sums. With confidences a round adds
    a_{r,k} and a_{r,k-1} of every drafted slot, so slots that were not scheduled count too (outcomes alone would
    be censored: confident slots are the scheduled ones), and `trust`, accepted over promised, corrects all of
    them by what really happened. Without confidences it adds the outcomes of scheduled slots. A request leans on
    the mean of all requests by `weight` rounds, and that mean on what was `known` of the slot; where nothing was, on
    the slot before it, and the first slot on `prior`.

    Args:
        prior: conditional acceptance assumed before anything was seen.
        weight: rounds that the assumption counts for.
        decay: what a round's weight shrinks by each further round in which something was drafted.
        past: rounds whose survivals are kept as they were, for `past_survival`.
        known: [gamma] conditional acceptance by slot that was measured elsewhere, or none.
    """

    def __init__(
        self,
        gamma: int,
        prior: float = 0.6,
        weight: float = 2.0,
        decay: float = 0.95,
        past: int = 0,
        known: tuple[float, ...] = (),
    ) -> None:
        if not 0 < prior < 1:
            raise DSparkError(
                f"prior must lie between 0 and 1 (new requests are neither hopeless nor perfect), got {prior}"
            )
        if weight <= 0 or not 0 < decay < 1:
            raise DSparkError("weight must be above 0, decay between 0 and 1")
        if known and len(known) < gamma:
            raise DSparkError(f"acceptance is known of {len(known)} slots, drafts have {gamma}")
        self._known = np.array(known[:gamma] or (np.nan,) * gamma)
        self.gamma, self.prior, self.weight, self.decay, self.past = gamma, prior, weight, decay, past
        initial = np.zeros(
            (2 + past, gamma)
        )  # reached, passed, survivals of the last round, of the one before
        initial[2:] = np.nan
        self._table = RequestTable(initial)
        self._all = np.zeros((2, gamma))  # reached and passed of all requests
        self._promised, self._accepted = 0.0, 0.0
        self._expected: tuple[bytes, np.ndarray] | None = None  # of the last call of `survival`

    @property
    def trust(self) -> float:
        """Accepted drafts over the survival promised for them, 1 until something was scheduled."""
        return (self._accepted + self.weight) / (self._promised + self.weight)

    def conditional(self) -> np.ndarray:
        """[gamma] mean conditional acceptance by slot over all requests."""
        return history_loops.conditional(self._all, self.prior, self._known, self.weight)

    def survival(self, uids: np.ndarray) -> np.ndarray:
        """[R, gamma] expected prefix survival of each request's next block; to be read only."""
        asked = uids.tobytes()
        if self._expected is None or self._expected[0] != asked:
            table, at = self._table, self._table.find(uids)
            expected = np.empty((len(at), self.gamma))
            history_loops.expected(
                table.rows,
                table.seen,
                at,
                table.round,
                self.decay,
                self._all,
                self.prior,
                self._known,
                self.weight,
                self.trust,
                expected,
            )
            self._expected = asked, expected
        return self._expected[1]

    def past_survival(self, uids: np.ndarray, age: int) -> np.ndarray:
        """[R, gamma] survivals as they were (age 0: in the last round); what is unknown is taken as expected."""
        expected = self.survival(uids)
        past = np.empty_like(expected)
        history_loops.remembered(self._table.rows, self._table.find(uids), age, expected, past)
        return past

    def observe(
        self,
        uids: np.ndarray,
        alive: np.ndarray | None,
        drafted: np.ndarray,
        scheduled: np.ndarray,
        accepted: np.ndarray,
    ) -> None:
        """File a round; one without drafts tells nothing and lets nothing fade.

        `alive` [R, gamma]: survivals as `loops.usable` leaves them, or None without confidences.
        """
        if not np.count_nonzero(drafted):
            return
        table = self._table
        at, now = table.begin_round(uids), table.round
        self._expected = None
        if alive is None:
            history_loops.file_outcomes(
                table.rows, table.seen, at, now, scheduled, accepted, self.decay, self._all
            )
            return
        promised, won = history_loops.file_promises(
            table.rows, table.seen, at, now, alive, scheduled, accepted, self.decay, self._all
        )
        self._promised = self.decay * self._promised + promised
        self._accepted = self.decay * self._accepted + won
