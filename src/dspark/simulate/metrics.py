"""Figures of one run, warm-up excluded."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from dspark.simulate.log import RunLog
from dspark.simulate.simulation import Scenario

__all__ = ["METRICS", "Summary", "decode_speeds", "summarise"]

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Summary:
    """One run. NaN where nothing was measured.

    Steps that end, and requests that arrive, in the measured window count. *Speed* is a reader's: tokens after
    the first over the time they took. A round delivers several tokens at once: `inter_token_ms_*` shares the time
    since the last delivery among its tokens, `gap_ms_*` is that time itself.
    """

    tokens_per_s: float  # delivered
    user_tokens_per_s: float  # tokens after the first over decoding time, all measured requests together
    user_tokens_per_s_p10: float  # nine of ten requests are at least as fast
    requests_per_s: float  # that arrived and were served
    ttft_s_p50: float  # arrival to first token
    ttft_s_p90: float
    ttft_s_p99: float
    inter_token_ms_p50: float
    inter_token_ms_p90: float
    inter_token_ms_p99: float
    gap_ms_p50: float
    gap_ms_p90: float
    gap_ms_p99: float
    accepted_length: float  # tau: tokens a decoding request's round commits
    drafted_per_round: float  # a decoding request
    budget_per_round: float  # drafts verified, a decoding request
    step_ms: float  # mean
    step_budget: float  # drafts verified a step
    plain_steps: float  # share of decoding steps in which nothing was drafted
    running: float  # requests in a step, over time
    waiting: float  # over busy time
    utilisation: float  # share of the time that steps took
    preemptions: float  # whole run
    unserved: float  # share of measured requests not finished when the simulation ended

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


METRICS = tuple(Summary.__dataclass_fields__)


def summarise(log: RunLog, scenario: Scenario) -> Summary:
    """The figures of `log`; a request without its first token counts with its wait so far."""
    start, stop = scenario.warmup_s, scenario.measured_until
    ends = log.step("start") + log.step("seconds")
    steps = (ends > start) & (ends <= stop)
    arrival = log.request("arrival")
    measured = (arrival >= start) & (arrival < stop)
    first, finish = log.request("first_token")[measured], log.request("finish")[measured]
    ttft = np.where(np.isnan(first), log.end, first) - arrival[measured]
    speeds = decode_speeds(log, scenario)
    output = log.request("output")[measured]
    done = ~np.isnan(finish) & (output > 1)
    decoding_s = float((finish - first)[done].sum())
    delivered = log.deliveries[(log.deliveries[:, 0] > start) & (log.deliveries[:, 0] <= stop)]
    delivered = delivered[~np.isnan(delivered[:, 1])]
    gap, tokens = 1e3 * delivered[:, 1].astype(np.float64), delivered[:, 2].astype(np.float64)
    return Summary(
        tokens_per_s=float(log.step("tokens")[steps].sum()) / scenario.duration_s,
        user_tokens_per_s=_over(float((output[done] - 1).sum()), decoding_s),
        user_tokens_per_s_p10=_percentile(speeds, 10),
        requests_per_s=float((~np.isnan(finish)).sum()) / scenario.duration_s,
        **{f"ttft_s_p{p}": _percentile(ttft, p) for p in PERCENTILES},
        **{f"inter_token_ms_p{p}": _weighted_percentile(gap / tokens, tokens, p) for p in PERCENTILES},
        **{f"gap_ms_p{p}": _percentile(gap, p) for p in PERCENTILES},
        **_rounds(log, steps, scenario),
        preemptions=float(log.preemptions),
        unserved=_over(float(np.isnan(finish).sum()), float(len(finish))),
    )


def decode_speeds(log: RunLog, scenario: Scenario) -> np.ndarray:
    """[N] tokens/s of each measured request past its first token, 0 for one that never got there.

    Answers of a single token have no speed and are left out.
    """
    arrival, output = log.request("arrival"), log.request("output")
    chosen = (arrival >= scenario.warmup_s) & (arrival < scenario.measured_until) & (output > 1)
    seconds = (log.request("finish") - log.request("first_token"))[chosen]
    return np.divide(output[chosen] - 1, seconds, out=np.zeros(len(seconds)), where=seconds > 0)


def _rounds(log: RunLog, steps: np.ndarray, scenario: Scenario) -> dict[str, float]:
    names = ("seconds", "requests", "decoding", "drafted", "scheduled", "accepted", "waiting")
    column = {name: log.step(name)[steps] for name in names}
    decoding, seconds = float(column["decoding"].sum()), column["seconds"]
    busy, count = float(seconds.sum()), float(len(seconds))
    with_decoding = column["decoding"] > 0
    return {
        "accepted_length": 1 + _over(float(column["accepted"].sum()), decoding),
        "drafted_per_round": _over(float(column["drafted"].sum()), decoding),
        "budget_per_round": _over(float(column["scheduled"].sum()), decoding),
        "step_ms": 1e3 * _over(busy, count),
        "step_budget": _over(float(column["scheduled"].sum()), count),
        "plain_steps": _over(
            float((column["drafted"][with_decoding] == 0).sum()), float(with_decoding.sum())
        ),
        "running": float((column["requests"] * seconds).sum()) / scenario.duration_s,
        "waiting": _over(float((column["waiting"] * seconds).sum()), busy),
        "utilisation": min(1.0, busy / scenario.duration_s),
    }


def _over(a: float, b: float) -> float:
    return a / b if b else float("nan")


def _percentile(values: np.ndarray, p: float) -> float:
    return float(np.percentile(values, p)) if len(values) else float("nan")


def _weighted_percentile(values: np.ndarray, weights: np.ndarray, p: float) -> float:
    """The smallest value that at least p percent of the weight does not exceed."""
    if not len(values):
        return float("nan")
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, p / 100 * total[-1])])
