"""Cost files as the simulation reads them, without torch, and as the engine does: the same prices."""

import json

import numpy as np
import pytest

from dspark.profile import Profile, Sample, load_cost_table
from dspark.simulate.machines import read_cost

ROWS = (1, 2, 4, 8, 16, 32)


def samples(per_request):
    """Passes of one request and of several, longer contexts, drafts and the passes behind them."""
    found = [Sample("step", 1 + (n > 8), n, 64, 0.02 + 0.001 * n + per_request * (n > 8)) for n in ROWS]
    found += [
        Sample("step", 1, n, long, 0.02 + 0.001 * n + 1e-6 * long) for n in (1, 8) for long in (512, 1536)
    ]
    found += [Sample("step", 8, 8, 64, 0.028 + 7 * per_request)]
    for r, k in ((1, 1), (1, 7), (8, 8), (8, 56)):
        found += [Sample("draft", r, k, 64, 0.004 + 1e-4 * r + 2e-4 * k)]
        found += [Sample("behind", r, r + k, 64, 0.021 + 0.001 * (r + k))]
    return tuple(found)


FILES = {
    "profile": lambda: Profile({}, samples(0.0)).as_dict(),
    "profile with requests": lambda: Profile({}, samples(0.004)).as_dict(),
    "sglang": lambda: {
        "sample_batch_tokens": [1, 8, 32], "sample_steps_per_sec": [50.0, 40.0, 20.0], "max_batch_tokens": 32
    },
    "sglang, additive": lambda: {
        "bias_seconds": 0.01, "bs_probes": [1, 8], "alpha_seconds": [0.0, 0.002], "m_probes": [1, 32],
        "theta_seconds": [0.001, 0.02],
    },
    "tensorrt-llm": lambda: {
        "token_counts": [1, 8, 32], "step_time_ms": [20.0, 25.0, 50.0], "fixed_overhead_ms": 1.0,
        "batch_sizes": [1, 8], "batch_overhead_ms": [0.0, 2.0],
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_the_simulation_and_the_engine_read_the_same_prices(kind, tmp_path):
    path = tmp_path / "prices.json"
    path.write_text(json.dumps(FILES[kind]()))
    simulated, served = read_cost(path), load_cost_table(path).cost
    assert type(simulated) is type(served)
    requests, context = np.arange(1, 40), 100 * np.arange(1, 40)
    for rows in (requests, 3 * requests):
        np.testing.assert_allclose(
            simulated.step_seconds(requests, rows, context), served.step_seconds(requests, rows, context)
        )
        np.testing.assert_allclose(
            simulated.draft_seconds(requests, rows), served.draft_seconds(requests, rows)
        )
    assert simulated.draft_terms == pytest.approx(served.draft_terms)
    assert simulated.displacement == pytest.approx(served.displacement)
