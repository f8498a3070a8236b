"""What scheduling costs a step: microseconds of the policy's own work, by policy and batch, beside the budget for it.

    python benchmarks/policies.py [--requests 1,16,64,512,4096] [--gamma N] [--rounds N] [--json]

Whole rounds as the engine asks for them: `draft_lengths`, `verify_lengths`, `observe`, `timed`, on a fresh state each,
at prices that follow the machine (an additive table with draft and context prices). In batches of 64 and more one
request goes and another comes in every round. Medians of the thread's CPU time, so that neighbours on the machine
count for what they push out of the caches alone. Exit code 1: a policy is over its budget.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable

import numpy as np

from dspark.schedule.auto import AutoScheduler
from dspark.schedule.base import Observer, Policy, ScheduleState, Timed
from dspark.schedule.cost import AdditiveCost, ContextCost, CostModel, DraftCost
from dspark.schedule.feedback import LiveCost
from dspark.schedule.policies import (
    FixedLength,
    GlobalScheduler,
    LaggedScheduler,
    PrefixScheduler,
    Threshold,
)

PARTS = ("draft", "verify", "observe", "timed")
BUDGETS_US = {64: 100.0, 4096: 2000.0}  # up to so many requests of 7 drafts, a step


def prices() -> CostModel:
    sizes = tuple(2**i for i in range(16))
    return LiveCost(
        AdditiveCost(
            0.0,
            (1, 4, 16),
            (0.0, 3e-4, 1.5e-3),
            sizes,
            tuple(0.02 + 1e-5 * size for size in sizes),
            DraftCost(1e-3, 1e-6, 1e-6),
            ContextCost(1e-8, 2e-8, 64),
        )
    )


def policies(gamma: int) -> dict[str, Callable[[], Policy]]:
    return {
        "fixed": lambda: FixedLength(gamma),
        "threshold": lambda: Threshold(gamma, 0.3),
        "prefix": lambda: PrefixScheduler(gamma, prices()),
        "global": lambda: GlobalScheduler(gamma, prices()),
        "lagged": lambda: LaggedScheduler(gamma, prices()),
        "auto": lambda: AutoScheduler(gamma, prices()),
        "auto, greedy": lambda: AutoScheduler(gamma, prices()),
    }


def measure(name: str, policy: Policy, num_requests: int, gamma: int, rounds: int) -> dict[str, object]:
    rng, R = np.random.default_rng(0), num_requests
    survivals = [rng.uniform(0.5, 1, (R, gamma)).cumprod(axis=1) for _ in range(8)]
    luck = rng.random((8, R, 1))
    engine, times = Round(policy), []
    for i in range(rounds + 20):  # behind the first trial of drafting
        uids = np.arange(R) + (i if R >= 64 else 0)
        state = ScheduleState(
            uids,
            np.full(R, gamma),
            np.full(R, 100 + i),
            np.ones(R, dtype=np.int64),
            np.ones(R, dtype=bool),
            tolerates_live=np.full(R, name.endswith("greedy")),
        )
        outcome = (survivals[i % 8] > luck[i % 8]).sum(axis=1)
        times.append(engine.nanoseconds(state, survivals[i % 8], outcome))
    median = np.median(times[20:], axis=0) / 1e3
    parts = {f"{part}_us": float(us) for part, us in zip(PARTS, median, strict=True)}
    total = float(np.median(np.sum(times[20:], axis=1))) / 1e3
    return {"policy": name, "requests": R, "gamma": gamma, **parts, "step_us": total, "budget_us": budget(R)}


class Round:
    """A policy as the engine holds it."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.observer = policy if isinstance(policy, Observer) else None
        self.timed = policy if isinstance(policy, Timed) else None

    def nanoseconds(self, state: ScheduleState, survival: np.ndarray, outcome: np.ndarray) -> list[int]:
        """Of each of `PARTS`."""
        clock = time.thread_time_ns
        at = clock()
        drafted = self.policy.draft_lengths(state)
        spent = [clock() - at]
        known = survival if drafted.any() else None
        at = clock()
        scheduled = self.policy.verify_lengths(state, known, drafted)
        spent.append(clock() - at)
        accepted = np.minimum(outcome, scheduled)
        at = clock()
        if self.observer is not None:
            self.observer.observe(state, known, drafted, scheduled, accepted)
        spent.append(clock() - at)
        at = clock()
        if self.timed is not None:
            self.timed.timed(state, drafted, scheduled, 1e-3, 0.021)
        spent.append(clock() - at)
        return spent


def budget(num_requests: int) -> float | None:
    return next((us for most, us in sorted(BUDGETS_US.items()) if num_requests <= most), None)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", default="1,16,64,512,4096")
    parser.add_argument("--gamma", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = [
        measure(name, make(), int(number), args.gamma, args.rounds if int(number) < 1000 else 40)
        for number in args.requests.split(",")
        for name, make in policies(args.gamma).items()
    ]
    over = [r for r in results if r["budget_us"] is not None and r["step_us"] > r["budget_us"]]  # type: ignore[operator]
    if args.json:
        print(json.dumps({"machine": platform.processor(), "numpy": np.__version__, "results": results}))
        return 1 if over else 0
    print(
        f"{'policy':14} {'requests':>8} {'us a step':>10} {'budget':>8}   "
        + " ".join(f"{p:>8}" for p in PARTS)
    )
    for r in results:
        parts = " ".join(f"{r[f'{part}_us']:8.1f}" for part in PARTS)
        flag = "  OVER" if r in over else ""
        print(
            f"{r['policy']:14} {r['requests']:>8} {r['step_us']:>10.1f} {r['budget_us'] or '-':>8}   {parts}{flag}"
        )
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
