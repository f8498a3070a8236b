"""What a simulated engine did: one row a step, one a request, one a delivery of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["STEP_FIELDS", "Growing", "RunLog"]

STEP_FIELDS = (
    "start",  # seconds
    "seconds",
    "requests",  # in the pass
    "query_tokens",  # rows without drafts
    "decoding",  # requests past their first token
    "drafted",
    "scheduled",
    "accepted",
    "tokens",  # delivered
    "wasted",  # accepted behind the end of an answer
    "context",  # cached positions of the requests in the pass
    "waiting",
    "drafted_requests",
)
REQUEST_FIELDS = ("uid", "arrival", "first_token", "finish", "prompt", "output", "domain")


class Growing:
    """A 2-D float64 array that grows by doubling."""

    def __init__(self, width: int) -> None:
        self._data = np.empty((1024, width))
        self._n = 0

    def append(self, row: tuple[float, ...]) -> None:
        if self._n == len(self._data):
            self._data = np.concatenate((self._data, np.empty_like(self._data)))
        self._data[self._n] = row
        self._n += 1

    @property
    def rows(self) -> np.ndarray:
        """[n, width]"""
        return self._data[: self._n]


@dataclass(frozen=True, eq=False)
class RunLog:
    """`end`: seconds of the last step's end."""

    steps: np.ndarray  # [S, fields] float64, columns STEP_FIELDS
    requests: np.ndarray  # [N, fields] float64, columns REQUEST_FIELDS, in order of arrival; NaN: not yet
    deliveries: np.ndarray  # [D, 3] float32: end of the step, time since the last delivery (seconds), tokens
    preemptions: int
    end: float

    def step(self, name: str) -> np.ndarray:
        """[S] a column of the steps."""
        return self.steps[:, STEP_FIELDS.index(name)]

    def request(self, name: str) -> np.ndarray:
        """[N] a column of the requests."""
        return self.requests[:, REQUEST_FIELDS.index(name)]
