"""When requests come: open arrivals (Poisson, gamma, on-off), recorded traces, or a closed loop of users.

A `Traffic` is a description; `start` makes the source that one run draws its requests from.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dspark.errors import DSparkError
from dspark.simulate.trace import Trace
from dspark.simulate.workload import Mix, RequestPool

__all__ = [
    "ArrivalProcess",
    "ClosedLoop",
    "Gamma",
    "OnOff",
    "OpenLoop",
    "Poisson",
    "Replay",
    "Source",
    "Traffic",
]

CLOSED_POOL = 16384  # requests drawn for a closed loop; it starts over behind them


class Source(Protocol):
    """Requests of one run. `uid` counts arrivals; request uid is `pool` row `uid % len(pool)`."""

    pool: RequestPool

    @property
    def next_time(self) -> float:
        """Seconds of the next arrival; infinity when none will come unless a request finishes."""
        ...

    def take(self, now: float) -> list[tuple[int, float]]:
        """(uid, arrival) of all requests that came until `now`, each once, in order."""
        ...

    def finished(self, now: float, count: int) -> None:
        """`count` requests finished at `now`."""
        ...


class Traffic(Protocol):
    """What every run of a scenario draws its own source from."""

    def start(self, rng: np.random.Generator, until: float) -> Source:
        """A source with arrivals until `until` seconds, at least."""
        ...


class ArrivalProcess(Protocol):
    """Arrivals of a mean `rate`; `cv`: standard deviation / mean of the time between two (1 is Poisson)."""

    @property
    def rate(self) -> float: ...

    @property
    def cv(self) -> float: ...

    def times(self, rng: np.random.Generator, until: float) -> np.ndarray:
        """Increasing seconds of all arrivals before `until`."""
        ...


@dataclass(frozen=True)
class Gamma:
    """Independent gamma-distributed times between arrivals: bursty above cv 1, regular below."""

    rate: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        _require_positive("rate", self.rate)
        _require_positive("cv", self.cv)

    def times(self, rng: np.random.Generator, until: float) -> np.ndarray:
        shape = self.cv**-2
        return _accumulate(lambda n: rng.gamma(shape, 1 / (shape * self.rate), n), self.rate, until)


@dataclass(frozen=True)
class Poisson:
    """Independent arrivals."""

    rate: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        _require_positive("rate", self.rate)
        if self.cv != 1.0:
            raise DSparkError(f"Poisson arrivals have cv 1, got {self.cv}: use gamma")

    def times(self, rng: np.random.Generator, until: float) -> np.ndarray:
        return _accumulate(lambda n: rng.exponential(1 / self.rate, n), self.rate, until)


@dataclass(frozen=True)
class OnOff:
    """Poisson bursts with silence between them; both last exponentially long, `on_s` and `off_s` on average.

    Unlike `Gamma`, bursts last: the next seconds resemble the last ones.
    """

    rate: float  # mean over bursts and silence
    on_s: float = 10.0
    off_s: float = 20.0

    def __post_init__(self) -> None:
        for name in ("rate", "on_s", "off_s"):
            _require_positive(name, getattr(self, name))

    @property
    def burst_rate(self) -> float:
        return self.rate * (self.on_s + self.off_s) / self.on_s

    @property
    def cv(self) -> float:
        """Of an interrupted Poisson process: cv^2 = 1 + 2 rate_on (1 / on) / (1 / on + 1 / off)^2."""
        leave, come = 1 / self.on_s, 1 / self.off_s
        return float(np.sqrt(1 + 2 * self.burst_rate * leave / (leave + come) ** 2))

    def times(self, rng: np.random.Generator, until: float) -> np.ndarray:
        # Each gap inside bursts is exponential; a geometric number of silences falls between two arrivals.
        stop = 1 / (1 + self.burst_rate * self.on_s)  # the burst ends before its next arrival

        def gaps(count: int) -> np.ndarray:
            silences = rng.geometric(1 - stop, count) - 1
            busy = rng.gamma(silences + 1.0, 1 / (self.burst_rate + 1 / self.on_s))
            return busy + np.where(silences > 0, rng.gamma(np.maximum(silences, 1), self.off_s), 0.0)

        return _accumulate(gaps, self.rate, until)


@dataclass(frozen=True)
class OpenLoop:
    """Users do not wait for each other: requests come when they come."""

    arrivals: ArrivalProcess
    requests: Mix

    def start(self, rng: np.random.Generator, until: float) -> Source:
        times = self.arrivals.times(rng, until)
        return _Timed(times, self.requests.sample(rng, max(1, len(times))))


@dataclass(frozen=True)
class Replay:
    """A recorded trace, `speed` times faster; every run sees the same arrivals. Domains come from `domains`.

    The trace is not repeated: a run longer than it ends idle.
    """

    trace: Trace
    domains: Mix
    speed: float = 1.0

    def __post_init__(self) -> None:
        _require_positive("speed", self.speed)

    def start(self, rng: np.random.Generator, until: float) -> Source:
        times = self.trace.seconds / self.speed
        pool = self.domains.sample(rng, len(times))
        return _Timed(times, RequestPool(self.trace.prompt, self.trace.output, pool.domain, pool.domains))


@dataclass(frozen=True)
class ClosedLoop:
    """`users` who each send the next request `think_s` (exponential mean) after the last answer; 0: at once."""

    users: int
    requests: Mix
    think_s: float = 0.0

    def __post_init__(self) -> None:
        if self.users < 1:
            raise DSparkError(f"a closed loop needs at least 1 user, got {self.users}")
        if not np.isfinite(self.think_s) or self.think_s < 0:
            raise DSparkError(f"think_s must be 0 or more, got {self.think_s}")

    def start(self, rng: np.random.Generator, until: float) -> Source:
        pool = self.requests.sample(rng, max(CLOSED_POOL, 16 * self.users))
        return _Users(self, pool, rng)


class _Timed:
    def __init__(self, times: np.ndarray, pool: RequestPool) -> None:
        self.pool = pool
        self._times, self._next = [*times.tolist(), float("inf")], 0

    @property
    def next_time(self) -> float:
        return self._times[self._next]

    def take(self, now: float) -> list[tuple[int, float]]:
        came = []
        while self._times[self._next] <= now:
            came.append((self._next, self._times[self._next]))
            self._next += 1
        return came

    def finished(self, now: float, count: int) -> None:
        """Nobody waits for it."""


class _Users:
    def __init__(self, loop: ClosedLoop, pool: RequestPool, rng: np.random.Generator) -> None:
        self.pool, self._loop, self._rng, self._uid = pool, loop, rng, 0
        self._due: list[float] = [0.0] * loop.users  # a heap

    @property
    def next_time(self) -> float:
        return self._due[0] if self._due else float("inf")

    def take(self, now: float) -> list[tuple[int, float]]:
        came = []
        while self._due and self._due[0] <= now:
            came.append((self._uid, heapq.heappop(self._due)))
            self._uid += 1
        return came

    def finished(self, now: float, count: int) -> None:
        for _ in range(count):
            pause = self._rng.exponential(self._loop.think_s) if self._loop.think_s else 0.0
            heapq.heappush(self._due, now + pause)


def _accumulate(gaps: Callable[[int], np.ndarray], rate: float, until: float) -> np.ndarray:
    """Arrival times before `until` from independent gaps, drawn in pieces."""
    pieces, last = [], 0.0
    while last < until:
        piece = last + np.cumsum(gaps(int(1.2 * rate * (until - last)) + 16))
        pieces.append(piece)
        last = float(piece[-1])
    times = np.concatenate(pieces) if pieces else np.zeros(0)
    return times[times < until]


def _require_positive(name: str, value: float) -> None:
    if not np.isfinite(value) or value <= 0:
        raise DSparkError(f"{name} must be above 0, got {value}")
