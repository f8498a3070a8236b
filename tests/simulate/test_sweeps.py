"""Intervals, sweeps, capacity and reports, on scenarios whose answers are known."""

import csv
import io

import numpy as np
import pytest

from dspark.core import DSparkError
from dspark.schedule.cost import DraftCost, TableCost
from dspark.schedule.policies import LaggedScheduler, PrefixScheduler, Threshold
from dspark.simulate.acceptance import Domain, SyntheticAcceptance
from dspark.simulate.capacity import ServiceTarget, find_capacity
from dspark.simulate.figures import require_matplotlib, write_figures
from dspark.simulate.intervals import interval, lower_bound, t_quantile, upper_bound
from dspark.simulate.machines import MACHINES, machine
from dspark.simulate.metrics import METRICS, Summary
from dspark.simulate.policies import POLICY_NAMES, policy_factory
from dspark.simulate.report import frontier_markdown, sweep_csv, sweep_markdown
from dspark.simulate.simulation import Scenario
from dspark.simulate.sweep import Cell, paired_ratio, speed_at_throughput, sweep, throughput_at_speed
from dspark.simulate.traffic import ClosedLoop, OpenLoop, Poisson
from dspark.simulate.workload import Lengths, Mix

COST = TableCost((1, 11), (0.10, 0.20), draft=DraftCost(0.002))  # 0.09 + 0.01 a row
MIX = Mix.parse("any", Lengths(1), Lengths(21))


def users(load, alpha=0.9):
    acceptance = SyntheticAcceptance({"any": Domain((alpha,) * 4)})
    traffic = ClosedLoop(int(load), MIX)
    return Scenario(traffic=traffic, acceptance=acceptance, cost=COST, warmup_s=3, duration_s=12)


@pytest.mark.parametrize(
    ("probability", "df", "expected"),
    [(0.975, 1, 12.7062), (0.975, 2, 4.3027), (0.95, 4, 2.1318), (0.975, 30, 2.0423), (0.995, 9, 3.2498)],
)
def test_quantiles_of_student(probability, df, expected):
    assert t_quantile(probability, df) == pytest.approx(expected, rel=1e-3)


def test_intervals_cover_the_mean_as_often_as_they_say():
    rng = np.random.default_rng(0)
    found = [interval(rng.normal(3.0, 2.0, 4), 0.9) for _ in range(1500)]
    assert np.mean([i.low <= 3.0 <= i.high for i in found]) == pytest.approx(0.9, abs=0.035)
    assert np.mean([lower_bound(rng.normal(0, 1, 4), 0.9) <= 0 for _ in range(1500)]) == pytest.approx(
        0.9, abs=0.035
    )


def test_intervals_of_little():
    assert interval([1.0]).high == float("inf")
    assert interval([float("nan"), 2.0, 4.0]).mean == 3.0
    assert np.isnan(interval([float("nan")]).mean)
    assert upper_bound([2.0, 2.0]) == lower_bound([2.0, 2.0]) == 2.0


def test_capacity_is_the_last_load_that_is_fast_enough():
    """Plain decoding of n users takes 0.09 + 0.01 n a step, whatever the seed."""
    target = ServiceTarget(tokens_per_s=1 / 0.185)
    found = find_capacity(users, "plain", policy_factory("plain", 4, COST), target, (0, 1))
    assert (found.load, found.fails_at) == (9, 10)
    assert {probe.load: probe.answer for probe in found.probes} == {
        1: "yes", 2: "yes", 4: "yes", 8: "yes", 9: "yes", 10: "no", 12: "no", 16: "no",
    }  # fmt: skip
    assert (
        find_capacity(users, "plain", policy_factory("plain", 4, COST), target, (0, 1), most=4).fails_at
        is None
    )
    nobody = find_capacity(users, "plain", policy_factory("plain", 4, COST), ServiceTarget(11.0), (0, 1))
    assert (nobody.load, nobody.fails_at) == (0, 1)


def test_capacity_in_requests_per_second_with_a_first_token_in_time():
    def rate(load):
        return Scenario(
            traffic=OpenLoop(Poisson(load), MIX),
            acceptance=SyntheticAcceptance({"any": Domain((0.5,))}),
            cost=COST,
            warmup_s=5,
            duration_s=30,
        )

    make = policy_factory("plain", 1, COST)
    free = find_capacity(rate, "plain", make, ServiceTarget(3.0), (0, 1, 2), whole=False, tolerance=0.2)
    tight = find_capacity(
        rate, "plain", make, ServiceTarget(3.0, 0.22), (0, 1, 2), whole=False, tolerance=0.2
    )
    assert 0 < tight.load < free.load < 12
    assert free.fails_at <= 1.25 * free.load


def test_one_seed_gives_no_confidence():
    with pytest.raises(DSparkError, match="2 seeds"):
        find_capacity(users, "plain", policy_factory("plain", 4, COST), ServiceTarget(5.0), (0,))
    with pytest.raises(DSparkError, match="share"):
        ServiceTarget(5.0, share=1.0)


@pytest.fixture(scope="module")
def cells():
    policies = {name: policy_factory(name, 4, COST) for name in ("plain", "fixed")}
    return sweep(users, (1, 8), policies, (0, 1))


def test_a_sweep_compares_policies_on_the_same_requests(cells):
    assert [(cell.load, cell.policy) for cell in cells] == [
        (1, "plain"),
        (1, "fixed"),
        (8, "plain"),
        (8, "fixed"),
    ]
    for plain, fixed in (cells[:2], cells[2:]):
        ratio = paired_ratio(fixed, plain, "tokens_per_s")
        step = 0.09 + 0.01 * plain.load
        drafted = 0.09 + 0.01 * 5 * plain.load + 0.002
        tau = fixed.mean("accepted_length")
        every_token_wanted = tau * step / drafted  # answers of 21 tokens end in mid-block
        assert 0.8 * every_token_wanted < ratio.mean < every_token_wanted


def test_reports_hold_every_cell(cells):
    text = sweep_markdown(cells, "users", 0.95)
    assert text.count("\n| 8 |") == 2
    assert "1.00 ± 0.00" in text
    rows = list(csv.DictReader(io.StringIO(sweep_csv(cells, 0.95))))
    assert len(rows) == 4
    assert {f"{m}_low" for m in METRICS} < rows[0].keys()
    assert float(rows[3]["tokens_per_s"]) == pytest.approx(cells[3].mean("tokens_per_s"), rel=1e-4)
    assert "plain: tokens/s/user" in frontier_markdown(cells)
    assert frontier_markdown(cells[:1]) == ""


def test_the_frontier_is_read_between_loads_and_never_beyond():
    def cell(load, speed, total):
        values = {**dict.fromkeys(METRICS, 0.0), "user_tokens_per_s": speed, "tokens_per_s": total}
        return Cell("p", load, (Summary(**values),))

    line = [cell(1, 100, 100), cell(2, 80, 160), cell(4, 40, 160)]
    assert throughput_at_speed(line, "p", 90) == pytest.approx(130)
    assert throughput_at_speed(line, "p", 80) == 160
    assert speed_at_throughput(line, "p", 160) == 80
    assert throughput_at_speed(line, "p", 30) is None
    assert throughput_at_speed(line, "other", 90) is None


def test_policies_by_name():
    stairs = MACHINES["gpu-27b"].cost
    for name in POLICY_NAMES:
        policy_factory(name, 7, stairs)()
    assert policy_factory("fixed:3", 7, stairs)().length == 3
    assert policy_factory("threshold:0.3", 7, stairs)() == Threshold(7, 0.3)
    prefix, raw = policy_factory("prefix", 7, stairs)(), policy_factory("prefix-raw", 7, stairs)()
    assert isinstance(prefix, PrefixScheduler)
    assert (prefix.sizes, raw.sizes) == (stairs.tokens, ())
    assert (prefix.cost.executed, raw.cost.executed) == (False, True)
    make = policy_factory("lagged", 7, stairs)
    assert isinstance(make(), LaggedScheduler)
    assert make() is not make()


@pytest.mark.parametrize("name", ["best", "fixed:9", "fixed:x", "lagged:3", "threshold:2"])
def test_policies_that_are_none(name):
    with pytest.raises(DSparkError):
        policy_factory(name, 7, COST)


def test_machines_say_where_they_come_from(tmp_path):
    for named in MACHINES.values():
        assert named.assumption
        assert len(named.source) > 60
        assert named.cost.warning is None
    path = tmp_path / "cost.json"
    path.write_text('{"tokens": [1, 8], "seconds": [0.1, 0.2], "draft": {"base": 0.01}}')
    own = machine(str(path))
    assert (own.cost.draft.base, own.assumption) == (0.01, False)
    path.write_text('{"sample_batch_tokens": [1, 8], "sample_steps_per_sec": [10, 5], "max_batch_tokens": 8}')
    assert machine(str(path)).cost.seconds == (0.1, 0.2)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        '{"tokens": [1, 2]}',
        '{"tokens": [1], "seconds": [1]}',
        '{"tokens": [1,2], "seconds": [1,2], "x": 1}',
    ],
)
def test_cost_files_that_are_none(tmp_path, text):
    (tmp_path / "cost.json").write_text(text)
    with pytest.raises(DSparkError):
        machine(str(tmp_path / "cost.json"))
    with pytest.raises(DSparkError, match="no machine"):
        machine("abacus")


def test_figures_need_matplotlib(cells, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(DSparkError, match=r"dspark\[figures\]"):
        require_matplotlib()


def test_figures_are_drawn(cells, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra figures is not installed")
    paths = write_figures(cells, tmp_path, "users", 0.95)
    assert [p.name for p in paths] == ["frontier.svg", "budget.svg"]
    assert all("svg" in p.read_text()[:300] for p in paths)
