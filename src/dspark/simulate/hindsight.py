"""How near a policy comes to the best that could have been chosen in hindsight, without noise.

Users decode without a pause, and each goes through recorded rounds of a drafter, answer by answer. Round t of a user is
the same for every policy, and so is its price: what differs is the policies alone. Fixed lengths and thresholds are
static arms: the best of each at a load is known only behind the last round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from dspark.calibrate.calibration import Calibration
from dspark.errors import DSparkError
from dspark.schedule.base import Observer, ScheduleState
from dspark.schedule.cost import CostModel
from dspark.simulate.policies import PolicyFactory
from dspark.simulate.rounds import RecordedRounds, read_rounds, recorded_temperatures

__all__ = ["RAW", "THRESHOLDS", "Comparison", "Hindsight", "Streams", "compare", "replay_file", "streams"]

T = TypeVar("T")

MIN_STEPS = 400  # of a load, however many users it has
RAW = ", raw confidences"  # behind the name of what saw them where others saw calibrated ones
THRESHOLDS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True, eq=False)
class Streams:
    """T rounds of R users. `uids` tell answers apart."""

    uids: np.ndarray  # [T, R] int64
    domain: np.ndarray  # [T, R] str
    survival: np.ndarray  # [T, R, gamma]
    run: np.ndarray  # [T, R] int64: drafts accepted if all were verified

    @property
    def gamma(self) -> int:
        return int(self.survival.shape[2])

    @property
    def users(self) -> int:
        return int(self.run.shape[1])


@dataclass(frozen=True)
class Hindsight:
    """Tokens per second at one load: of `arms`, chosen once for all rounds, and of `policies`, which decide."""

    users: int
    arms: Mapping[str, float]
    policies: Mapping[str, float]
    verified: Mapping[str, Mapping[str, float]]  # by policy and domain: drafts a request and round

    @property
    def best(self) -> str:
        """The best arm."""
        return max(self.arms, key=lambda name: self.arms[name])

    def best_of(self, kind: str) -> str:
        """The best threshold, or the best fixed length (plain decoding is one of them)."""
        mine = [name for name in self.arms if name.startswith("threshold") == (kind == "threshold")]
        return max(mine, key=lambda name: self.arms[name])

    def distance(self, policy: str) -> float:
        """What is missing to the best arm, relative; below 0 where the policy is the faster one."""
        return 1 - self.policies[policy] / self.arms[self.best]


@dataclass(frozen=True)
class Comparison:
    """All loads."""

    loads: tuple[Hindsight, ...]

    def over_all(self, name: str) -> float:
        """Geometric mean over the loads of an arm's or a policy's tokens/s over plain decoding's."""
        logs = [np.log({**load.arms, **load.policies}[name] / load.arms["plain"]) for load in self.loads]
        return float(np.exp(np.mean(logs)))

    def beats_every_fixed(self, policy: str) -> bool:
        """Over all loads together."""
        return all(self.over_all(policy) > self.over_all(name) for name in self.arms("fixed"))

    def arms(self, kind: str) -> tuple[str, ...]:
        """Names of all thresholds, or of all fixed lengths, 0 (plain) included."""
        return tuple(n for n in self.loads[0].arms if n.startswith("threshold") == (kind == "threshold"))

    def over_best(self) -> dict[str, list[float]]:
        """By policy and arm: tokens/s at each load over the best arm's there. An arm named as a policy is left out."""
        names = (*self.loads[0].policies, *self.loads[0].arms)
        speeds = [{**load.arms, **load.policies} for load in self.loads]
        best = [load.arms[load.best] for load in self.loads]
        return {name: [s[name] / b for s, b in zip(speeds, best, strict=True)] for name in names}

    def worst(self, policy: str) -> float:
        """Largest distance to the best arm of a load."""
        return max(load.distance(policy) for load in self.loads)

    def as_dict(self) -> dict[str, object]:
        names = tuple(self.loads[0].policies)
        return {
            "loads": [
                {
                    "users": load.users,
                    "arms": dict(load.arms),
                    "best": load.best,
                    "policies": dict(load.policies),
                    "verified": {name: dict(load.verified[name]) for name in names},
                    "distance": {name: load.distance(name) for name in names},
                }
                for load in self.loads
            ],
            "over_all": {name: self.over_all(name) for name in (*self.loads[0].arms, *names)},
            "beats_every_fixed": {name: self.beats_every_fixed(name) for name in names},
        }


def streams(rounds: RecordedRounds, users: int, steps: int, seed: int) -> Streams:
    """Lay recorded answers, in random order, behind each other; again from the start where they are too few.

    Raises:
        DSparkError: rounds without confidences.
    """
    if rounds.confidence is None:
        raise DSparkError("rounds without confidences say nothing about thresholds: record them with a head")
    order = np.lexsort((rounds.request, rounds.domain))
    changes = (rounds.request[order][1:] != rounds.request[order][:-1]) | (
        rounds.domain[order][1:] != rounds.domain[order][:-1]
    )
    answers = np.split(order, np.flatnonzero(changes) + 1)
    rng = np.random.default_rng(seed)
    picked, owner, count, answer = [], [], 0, 0
    while count < users * steps:
        for i in rng.permutation(len(answers)):
            picked.append(answers[i])
            owner.append(np.full(len(answers[i]), answer))
            count, answer = count + len(answers[i]), answer + 1
    rows, owners = (np.concatenate(part)[: users * steps].reshape(users, steps).T for part in (picked, owner))
    owners = owners + answer * np.arange(
        users
    )  # the end of a user's rounds cuts an answer: the rest is another
    _, first, inverse = np.unique(owners, return_index=True, return_inverse=True)
    uids = first.argsort().argsort()[inverse].reshape(steps, users)  # in order of arrival
    survival = rounds.confidence.cumprod(axis=1)
    return Streams(uids, rounds.domain[rows], survival[rows], rounds.accepted[rows])


def compare(
    replayed: Sequence[Streams],
    policies: Mapping[str, PolicyFactory],
    cost: CostModel,
    *,
    context: int = 256,
    warmup: int = 100,
    overhead_s: float = 0.0,
    greedy: bool = False,
) -> Comparison:
    """Every arm and policy over the streams of every load; the first `warmup` rounds are not counted.

    `policies` make fresh ones; they bring the prices that they believe in, `cost` is what rounds really take.
    `context`: cached positions of each request. `overhead_s`: of a round, beside draft and pass.
    """
    found = []
    for stream in replayed:
        if len(stream.run) <= warmup:
            raise DSparkError(f"{len(stream.run)} rounds are not more than {warmup} of warm-up: replay more")
        price = _Prices(cost, stream.users, context, overhead_s)
        arms = _arms(stream, price, warmup)
        runs = {name: _replay(stream, make, price, warmup, greedy) for name, make in policies.items()}
        speed = {name: run[0] for name, run in runs.items()}
        found.append(Hindsight(stream.users, arms, speed, {name: run[1] for name, run in runs.items()}))
    return Comparison(tuple(found))


def replay_file(
    path: str | Path,
    policies: Mapping[str, PolicyFactory],
    cost: CostModel,
    *,
    users: Sequence[int],
    rounds: int,
    seed: int = 0,
    overhead_s: float = 0.0,
    greedy: bool = False,
    calibration: Calibration | None = None,
) -> dict[str, Comparison]:
    """`compare`, for each temperature of a file of recorded rounds.

    `rounds` of each load, in `MIN_STEPS` steps at least. `greedy`: of rounds that do not tell their temperature.
    With a `calibration` every policy and threshold is there twice, with calibrated confidences and, named so, with raw
    ones: the same rounds in the same order, and the same policies otherwise.
    """

    def replayed(temperature: float | None, calibration: Calibration | None) -> Comparison:
        recorded = read_rounds(path, temperature, calibration)
        laid = [streams(recorded, n, max(rounds // n, MIN_STEPS), seed) for n in users]
        at_zero = greedy if temperature is None else temperature == 0
        return compare(laid, policies, cost, overhead_s=overhead_s, greedy=at_zero)

    found = {}
    for temperature in recorded_temperatures(path) or (None,):
        title = "all rounds" if temperature is None else f"temperature {temperature:g}"
        found[title] = replayed(temperature, calibration)
        if calibration is not None:
            found[title] = _beside(found[title], replayed(temperature, None))
    return found


def _beside(calibrated: Comparison, raw: Comparison) -> Comparison:
    """Both as one: a policy's raw run follows its calibrated one, and so it is with thresholds."""

    def both(ours: Mapping[str, T], theirs: Mapping[str, T]) -> dict[str, T]:
        merged = {}
        for name, value in ours.items():
            merged[name] = value
            if name != "plain" and not name.startswith("fixed"):  # these look at no confidences
                merged[name + RAW] = theirs[name]
        return merged

    pairs = zip(calibrated.loads, raw.loads, strict=True)
    return Comparison(
        tuple(
            Hindsight(
                one.users,
                both(one.arms, other.arms),
                both(one.policies, other.policies),
                both(one.verified, other.verified),
            )
            for one, other in pairs
        )
    )


@dataclass(frozen=True)
class _Prices:
    cost: CostModel
    users: int
    context: int
    overhead_s: float

    def seconds(self, budget: np.ndarray, drafted_for: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        """[T] of rounds that verify `budget` drafts of `drafts` made for `drafted_for` requests."""
        step = self.cost.step_seconds(self.users, self.users + budget, self.users * self.context)
        return step + self.cost.draft_seconds(drafted_for, drafts) + self.overhead_s


def _arms(stream: Streams, price: _Prices, warmup: int) -> dict[str, float]:
    """Tokens/s of each fixed length and each threshold."""
    run, survival, R = stream.run[warmup:], stream.survival[warmup:], stream.users
    steps = np.full(len(run), R)

    def speed(lengths: np.ndarray, drafted: int) -> float:
        tokens = lengths.size + np.minimum(run, lengths).sum()
        return float(
            tokens / price.seconds(lengths.sum(axis=1), steps * (drafted > 0), steps * drafted).sum()
        )

    arms = {"plain": speed(np.zeros_like(run), 0)}
    arms |= {f"fixed:{k}": speed(np.full_like(run, k), k) for k in range(1, stream.gamma + 1)}
    for threshold in THRESHOLDS:
        arms[f"threshold:{threshold:g}"] = speed((survival >= threshold).sum(axis=2), stream.gamma)
    return arms


def _replay(
    stream: Streams, make: PolicyFactory, price: _Prices, warmup: int, greedy: bool
) -> tuple[float, dict[str, float]]:
    """Tokens/s of a fresh policy, and by domain the drafts that it has verified a request and round."""
    policy, R = make(), stream.users
    learns = policy if isinstance(policy, Observer) else None
    room, context = np.full(R, stream.gamma), np.full(R, price.context)
    ones, flags, tolerant = np.ones(R, dtype=np.int64), np.ones(R, dtype=bool), np.full(R, greedy)
    log, lengths = [], np.zeros_like(stream.run)
    for t, (uids, survival, run) in enumerate(zip(stream.uids, stream.survival, stream.run, strict=True)):
        state = ScheduleState(uids, room, context, ones, flags, tolerates_live=tolerant)
        drafted = policy.draft_lengths(state)
        known = survival if drafted.any() else None
        scheduled = policy.verify_lengths(state, known, drafted)
        accepted = np.minimum(run, scheduled)
        if learns is not None:
            learns.observe(state, known, drafted, scheduled, accepted)
        log.append((accepted.sum(), scheduled.sum(), np.count_nonzero(drafted), drafted.sum()))
        lengths[t] = scheduled
    accepts, budget, drafted_for, drafts = np.array(log[warmup:]).T
    tokens = len(accepts) * R + accepts.sum()
    speed = tokens / price.seconds(budget, drafted_for, drafts).sum()
    domain = stream.domain[warmup:]
    verified = {name: float(lengths[warmup:][domain == name].mean()) for name in np.unique(domain).tolist()}
    return float(speed), verified
