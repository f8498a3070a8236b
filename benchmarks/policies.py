"""What a scheduling decision costs: microseconds a call, by policy and batch.

    python benchmarks/policies.py [--requests 1,64,4096] [--gamma N] [--repeats N] [--json]

Random confidences of ragged blocks, a table of 16 sizes, one round of history. Medians of process time, so that
neighbours on the machine do not count.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable

import numpy as np

from dspark.schedule.cost import DraftCost, TableCost
from dspark.schedule.policies import (
    FixedLength,
    GlobalScheduler,
    LaggedScheduler,
    Observer,
    Policy,
    PrefixScheduler,
    ScheduleState,
    Threshold,
)


def policies(gamma: int) -> dict[str, Policy]:
    sizes = tuple(2**i for i in range(16))
    draft = DraftCost(1e-3, 1e-6, 1e-6)
    cost = TableCost(sizes, tuple(0.02 + 1e-5 * size for size in sizes), draft=draft)
    stairs = TableCost(sizes, cost.seconds, executed=True, draft=draft)
    return {
        "fixed": FixedLength(gamma),
        "threshold": Threshold(gamma, 0.3),
        "prefix": PrefixScheduler(gamma, cost),
        "prefix-filled": PrefixScheduler(gamma, cost, min_gain=0.05, sizes=sizes),
        "global": GlobalScheduler(gamma, stairs),
        "lagged": LaggedScheduler(gamma, stairs),
        "lagged-previous": LaggedScheduler(gamma, stairs, ranks="previous"),
    }


def microseconds(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return float(np.median(times[1:])) * 1e6


def measure(name: str, policy: Policy, num_requests: int, gamma: int, repeats: int) -> dict[str, object]:
    rng = np.random.default_rng(0)
    survival = rng.uniform(0.3, 1, (num_requests, gamma)).cumprod(axis=1)
    drafted = rng.integers(1, gamma + 1, num_requests)
    uids, room = np.arange(num_requests), np.full(num_requests, gamma)
    state = ScheduleState(uids, room, rng.integers(10, 2000, num_requests))
    accepted = np.minimum(drafted, 1)
    result: dict[str, object] = {"policy": name, "requests": num_requests, "gamma": gamma}

    def observe() -> None:
        if isinstance(policy, Observer):
            policy.observe(state, survival, drafted, drafted, accepted)

    for _ in range(10):  # past the first trial of drafting
        policy.draft_lengths(state)
        observe()
    result["draft_us"] = microseconds(lambda: policy.draft_lengths(state), repeats)
    result["verify_us"] = microseconds(lambda: policy.verify_lengths(state, survival, drafted), repeats)
    result["observe_us"] = microseconds(observe, repeats)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", default="1,64,4096")
    parser.add_argument("--gamma", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = [
        measure(name, policy, int(count), args.gamma, args.repeats)
        for count in args.requests.split(",")
        for name, policy in policies(args.gamma).items()
    ]
    if args.json:
        print(json.dumps({"machine": platform.processor(), "numpy": np.__version__, "results": results}))
        return
    for r in results:
        times = "  ".join(f"{key[:-3]} {r[key]:8.1f}" for key in ("draft_us", "verify_us", "observe_us"))
        print(f"{r['policy']:16} R={r['requests']:<5} us: {times}")


if __name__ == "__main__":
    main()
