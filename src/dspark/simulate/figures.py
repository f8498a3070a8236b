"""Figures: of a sweep the frontier and the budget against load, of a replay the distance to the best in hindsight.

Needs matplotlib, an optional extra.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark.errors import DSparkError
from dspark.simulate.hindsight import Comparison
from dspark.simulate.sweep import Cell

__all__ = ["require_matplotlib", "write_figures", "write_hindsight_figures"]


def require_matplotlib() -> Any:
    """matplotlib's `Figure`, which draws to files without a display.

    Raises:
        DSparkError: it is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise DSparkError(
            "figures need matplotlib, an optional extra: pip install 'dspark[figures]', or leave --figures out"
        ) from None
    return Figure


def write_figures(cells: Sequence[Cell], directory: str | Path, load: str, confidence: float) -> list[Path]:
    """frontier.svg and budget.svg, with intervals over seeds as bars.

    Raises:
        DSparkError: no matplotlib, or the directory cannot be written to.
    """
    make = require_matplotlib()
    plots = (
        ("frontier", "user_tokens_per_s", "tokens/s per user", "tokens_per_s", "tokens/s"),
        ("budget", None, load, "budget_per_round", "drafts verified a round and request"),
    )
    paths = []
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        for name, x, x_label, y, y_label in plots:
            figure = make(figsize=(6.4, 4.4), layout="constrained")
            axes = figure.subplots()
            for policy in dict.fromkeys(cell.policy for cell in cells):
                _line(axes, [cell for cell in cells if cell.policy == policy], x, y, confidence)
            axes.set(xlabel=x_label, ylabel=y_label, ylim=(0, None))
            if x is None and min(cell.load for cell in cells) > 0:
                axes.set_xscale("log", base=2)
            axes.grid(alpha=0.3)
            axes.legend()
            paths.append(Path(directory) / f"{name}.svg")
            figure.savefig(paths[-1])
    except OSError as error:
        raise DSparkError(f"cannot write figures to {directory}: {error}") from None
    return paths


def write_hindsight_figures(found: Mapping[str, Comparison], directory: str | Path) -> list[Path]:
    """hindsight.svg, or one a temperature: throughput of each policy and arm over the best arm of that load.

    Raises:
        DSparkError: no matplotlib, or the directory cannot be written to.
    """
    make = require_matplotlib()
    paths = []
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        for title, comparison in found.items():
            figure = make(figsize=(8.4, 5.2), layout="constrained")
            axes = figure.subplots()
            for name, values in comparison.over_best().items():
                style = _hindsight_style(name, name in comparison.loads[0].arms)
                axes.plot([load.users for load in comparison.loads], values, label=name, **style)
            axes.axhline(1.0, color="black", linewidth=0.8)
            axes.set(title=title, xlabel="users", ylabel="tokens/s over the best arm's", ylim=(0, None))
            axes.set_xscale("log", base=2)
            axes.grid(alpha=0.3)
            figure.legend(loc="outside right upper", fontsize="x-small")
            name = "hindsight" if title == "all rounds" else f"hindsight {title}".replace(" ", "-")
            paths.append(Path(directory) / f"{name}.svg")
            figure.savefig(paths[-1])
    except OSError as error:
        raise DSparkError(f"cannot write figures to {directory}: {error}") from None
    return paths


def _hindsight_style(name: str, arm: bool) -> dict[str, Any]:
    """Policies in full, arms thin behind them: fixed lengths dashed, thresholds dotted."""
    if not arm:
        return {"marker": "o", "zorder": 3}
    if name == "plain":
        return {"color": "black", "linestyle": "--"}
    return {"linestyle": ":" if name.startswith("threshold") else "--", "linewidth": 0.9, "alpha": 0.7}


def _line(axes: Any, cells: Sequence[Cell], x: str | None, y: str, confidence: float) -> None:
    found = [cell.interval(y, confidence) for cell in cells]
    at = [cell.load if x is None else cell.mean(x) for cell in cells]
    # One seed has no interval: matplotlib draws no bar of width 0.
    bars = [i.half_width if i.n > 1 else 0.0 for i in found]
    axes.errorbar(at, [i.mean for i in found], bars, marker="o", capsize=3, label=cells[0].policy)
