"""Figures of an evaluation (the content of the paper's figures 2 to 4), drawn with matplotlib, an optional extra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dspark.core import DSparkError
from dspark.evaluate.summary import OVERALL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_figures", "require_matplotlib"]

Entry = Mapping[str, Any]
PLAIN = "none"
# Okabe and Ito's colours, which colour-blind readers can tell apart; with markers for print.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#dddddd",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.dpi": 160,
}


def require_matplotlib() -> ModuleType:
    """matplotlib.

    Raises:
        DSparkError: it is not installed; names the extra.
    """
    try:
        import matplotlib
    except ImportError:
        raise DSparkError(
            "figures need matplotlib, an optional extra: pip install 'dspark[figures]', or leave --figures out"
        ) from None
    return matplotlib


def draw_figures(directory: Path, summary: Sequence[Entry]) -> list[str]:
    """Three PNG files for each temperature; returns their names. `summary` is that of `summarise`."""
    matplotlib = require_matplotlib()
    drafted = [entry for entry in summary if entry["drafter"] != PLAIN and entry["rounds"]]
    names = list(dict.fromkeys(entry["drafter"] for entry in drafted))
    looks = {n: (COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]) for i, n in enumerate(names)}
    files = []
    with matplotlib.rc_context(STYLE):
        for temperature in dict.fromkeys(entry["temperature"] for entry in drafted):
            these = [entry for entry in drafted if entry["temperature"] == temperature]
            for name, draw in (
                ("accepted-length", _accepted_length),
                ("conditional-acceptance", _conditional_acceptance),
                ("draft-time", _draft_time),
            ):
                figure = draw(these, looks)
                figure.suptitle(
                    f"temperature {temperature:g}", x=0.01, ha="left", fontsize=9, color="#666666"
                )
                files.append(f"{name}-T{temperature:g}.png")
                figure.savefig(directory / files[-1])
    return files


def _new(panels: int, width: float) -> tuple[Figure, list[Axes]]:
    """A figure off screen with `panels` axes, up to four side by side."""
    from matplotlib.figure import Figure

    columns = max(1, min(4, panels))
    rows = -(-panels // columns)
    figure = Figure(figsize=(width * columns, 3.2 * rows), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in grid[panels:]:
        unused.set_visible(False)
    return figure, grid[:panels]


def _places(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Entries by what the reader knows them as: a domain, or the set where it has only one."""
    split = {entry["prompts"] for entry in entries if entry["domain"] != OVERALL}
    several = len({entry["prompts"] for entry in entries}) > 1
    places: dict[str, list[Entry]] = {}
    for entry in entries:
        name = entry["prompts"]
        if entry["domain"] != OVERALL:
            name = f"{name}: {entry['domain']}" if several else entry["domain"]
        elif name in split and not several:
            name = OVERALL
        places.setdefault(name, []).append(entry)
    return places


def _accepted_length(entries: Sequence[Entry], looks: Mapping[str, tuple[str, str]]) -> Figure:
    """Accepted length by domain and drafter, with bootstrap intervals."""
    places = _places(entries)
    figure, (axes,) = _new(1, max(4.0, 0.9 * len(places) * max(2, len(looks)) * 0.5 + 1.5))
    width = 0.8 / max(1, len(looks))
    for i, (drafter, (colour, _)) in enumerate(looks.items()):
        bars = [
            (x, entry)
            for x, some in enumerate(places.values())
            for entry in some
            if entry["drafter"] == drafter and entry["accepted_length"] is not None
        ]
        if not bars:
            continue
        at = [x + (i - (len(looks) - 1) / 2) * width for x, _ in bars]
        heights = [entry["accepted_length"] for _, entry in bars]
        gamma = bars[0][1]["gamma"]
        axes.bar(at, heights, 0.92 * width, color=colour, label=f"{drafter} (gamma {gamma})")
        for x, height, (_, entry) in zip(at, heights, bars, strict=True):
            low, high = entry["accepted_length_interval"] or (height, height)
            errors = [[max(0.0, height - low)], [max(0.0, high - height)]]
            axes.errorbar(x, height, errors, color="#333333", linewidth=1, capsize=2)
            axes.annotate(
                f"{height:.2f}", (x, high), (0, 2), textcoords="offset points", ha="center", fontsize=7
            )
    axes.axhline(1, color="#999999", linewidth=1, linestyle="--")
    axes.set_xticks(range(len(places)), list(places))
    axes.set_ylabel("accepted length (bonus included)")
    axes.margins(y=0.15)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _conditional_acceptance(entries: Sequence[Entry], looks: Mapping[str, tuple[str, str]]) -> Figure:
    """Position-wise conditional acceptance, one panel a domain, with Wilson's intervals."""
    from matplotlib.ticker import MaxNLocator

    places = _places(entries)
    figure, panels = _new(len(places), 2.9)
    for axes, (place, some) in zip(panels, places.items(), strict=True):
        for entry in some:
            positions = entry["positions"]
            if not positions:
                continue
            colour, marker = looks[entry["drafter"]]
            x = [p["position"] for p in positions]
            low, high = zip(*(p["conditional_interval"] for p in positions), strict=True)
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
            y = [p["conditional"] for p in positions]
            axes.plot(x, y, color=colour, marker=marker, markersize=4, label=entry["drafter"])
        axes.set_title(place, fontsize=9)
        axes.set_ylim(-0.03, 1.03)
        axes.set_xlabel("position in the block")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in panels[::4]:
        axes.set_ylabel("conditional acceptance")
    figure.legend(*_keys(panels), loc="outside lower center", ncols=4)
    return figure


def _draft_time(entries: Sequence[Entry], looks: Mapping[str, tuple[str, str]]) -> Figure:
    """What a draft costs against what it brings: up and to the left is better. One panel a prompt set."""
    sets: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry["domain"] == OVERALL and entry["draft_ms"] is not None:
            sets.setdefault(entry["prompts"], []).append(entry)
    figure, panels = _new(max(1, len(sets)), 3.4)
    for axes, (prompts, some) in zip(panels, sets.items(), strict=False):
        for entry in some:
            colour, marker = looks[entry["drafter"]]
            label = f"{entry['drafter']} (gamma {entry['gamma']})"
            low, high = entry["accepted_length_interval"] or [entry["accepted_length"]] * 2
            y = entry["accepted_length"]
            errors = [[max(0.0, y - low)], [max(0.0, high - y)]]
            axes.errorbar(entry["draft_ms"], y, errors, color=colour, marker=marker, capsize=2, label=label)
        axes.set_title(prompts, fontsize=9)
        slowest = max(entry["draft_ms"] for entry in some)
        axes.set_xlim(-0.1 * slowest, 1.15 * slowest)
        axes.margins(y=0.15)
        axes.set_xlabel("draft time of a round, ms")
    for axes in panels[::4]:
        axes.set_ylabel("accepted length (bonus included)")
    figure.legend(*_keys(panels), loc="outside lower center", ncols=2)
    return figure


def _keys(panels: Sequence[Axes]) -> tuple[list[Any], list[str]]:
    """Handles and labels of all panels, each label once."""
    found: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)
