"""Arrivals have the rate and the burstiness they state; traces are read as they are; users wait for their answers."""

import numpy as np
import pytest

from dspark.core import DSparkError
from dspark.simulate.setup import parse_arrivals
from dspark.simulate.trace import read_trace
from dspark.simulate.traffic import ClosedLoop, Gamma, OnOff, OpenLoop, Poisson, Replay
from dspark.simulate.workload import Lengths, Mix

ANY = Mix.parse("any", Lengths(10), Lengths(5))


@pytest.mark.parametrize(
    "process",
    [Poisson(5.0), Gamma(5.0, 3.0), Gamma(5.0, 0.5), OnOff(5.0, 2.0, 3.0)],
    ids=lambda p: f"{p.cv:.2f}",
)
def test_rate_and_variation_of_the_gaps(process):
    times = process.times(np.random.default_rng(0), 20_000.0)
    gaps = np.diff(times)
    assert (gaps >= 0).all()
    assert times[-1] < 20_000
    assert len(times) == pytest.approx(100_000, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(process.cv, rel=0.04)


def test_bursts_last():
    """Gamma arrivals are independent; on-off ones crowd whole seconds."""
    rng = np.random.default_rng(1)
    counts = {
        kind: np.bincount(p.times(rng, 5000.0).astype(int), minlength=5000)
        for kind, p in (("gamma", Gamma(5.0, 3.0)), ("on-off", OnOff(5.0, 20.0, 30.0)))
    }
    follows = {kind: np.corrcoef(c[:-1], c[1:])[0, 1] for kind, c in counts.items()}
    assert follows["on-off"] > 0.6 > 0.3 > follows["gamma"]


@pytest.mark.parametrize("text", ["geometric:200", "lognormal:200:1.5", "uniform:200", "200", "fixed:200"])
def test_lengths_have_their_mean(text):
    drawn = Lengths.parse(text).sample(np.random.default_rng(0), 200_000)
    assert drawn.min() >= 1
    assert drawn.mean() == pytest.approx(200, rel=0.02)


def test_a_mix_is_drawn_by_weight():
    pool = Mix.parse("chat=3,code=1", Lengths(10), Lengths(5)).sample(np.random.default_rng(0), 10_000)
    assert (pool.domain == pool.domains.index("code")).mean() == pytest.approx(0.25, abs=0.02)


def test_users_send_the_next_request_behind_their_answer():
    source = ClosedLoop(3, ANY).start(np.random.default_rng(0), 100.0)
    assert [uid for uid, _ in source.take(0.0)] == [0, 1, 2]
    assert source.next_time == float("inf")
    source.finished(4.0, 2)
    assert source.next_time == 4.0
    assert source.take(5.0) == [(3, 4.0), (4, 4.0)]


def test_requests_are_cut_where_the_context_ends():
    pool = Mix.parse("any", Lengths(100), Lengths(50)).sample(np.random.default_rng(0), 3).within(80)
    assert pool.prompt.tolist() == [79] * 3
    assert pool.output.tolist() == [1] * 3


TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:47.1805900,396,0
2023-11-16 18:16:46.6805900,879,55
"""


def test_a_trace_is_read_and_sped_up(tmp_path):
    (tmp_path / "t.csv").write_text(TRACE)
    trace = read_trace(tmp_path / "t.csv")
    assert trace.seconds == pytest.approx([0, 0.5, 60])
    assert trace.prompt.tolist() == [374, 396, 879]
    assert trace.output.tolist() == [44, 1, 55]
    source = Replay(trace, ANY, speed=2.0).start(np.random.default_rng(0), 100.0)
    assert source.take(29.0) == [(0, 0.0), (1, 0.25)]
    assert source.next_time == pytest.approx(30)


def test_times_of_a_trace_may_name_their_zone(tmp_path):
    times = ("2024-05-10 00:00:00.5+00:00", "2024-05-10 00:00:02+00:00", "2024-05-09 17:00:03.25-07:00")
    rows = "".join(f"{time},1,1\n" for time in times)
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    assert read_trace(tmp_path / "t.csv").seconds == pytest.approx([0, 1.5, 2.75])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "column 'TIMESTAMP' is missing"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1.5,1\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1.5,-1,2\n", "negative"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
    ],
)
def test_bad_traces_are_refused(tmp_path, text, message):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DSparkError, match=message):
        read_trace(tmp_path / "t.csv")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Poisson(0.0), "rate"),
        (lambda: Gamma(1.0, -1.0), "cv"),
        (lambda: ClosedLoop(0, ANY), "1 user"),
        (lambda: Lengths.parse("normal:3"), "no length distribution"),
        (lambda: Lengths.parse("geometric"), "no length"),
        (lambda: Lengths(0.5), "1 or more"),
        (lambda: Mix.parse("chat=x", Lengths(1), Lengths(1)), "no mix"),
        (lambda: Mix.parse("chat=0", Lengths(1), Lengths(1)), "weight"),
        (lambda: parse_arrivals("gamma", 1.0), "gamma:CV"),
        (lambda: OpenLoop(Poisson(1e-9), ANY).start(np.random.default_rng(0), 1.0), None),
    ],
)
def test_nonsense_is_refused(make, message):
    if message is None:
        assert make().next_time == float("inf")  # nobody comes: nothing to refuse
        return
    with pytest.raises(DSparkError, match=message):
        make()
