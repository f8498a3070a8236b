"""Evaluations for people: the tables that `dspark calibrate` prints."""

from __future__ import annotations

import math

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dspark.calibrate.report import Evaluation

__all__ = ["group_table", "slot_table"]


def slot_table(evaluation: Evaluation) -> Table:
    """Held-out figures of each slot. Fits a terminal of 80 columns."""
    g, bins = evaluation.all, evaluation.bins
    caption = f"prefix survival on {g.rounds} held-out rounds of {g.prompts} prompts, before > after; ECE in percent"
    caption += (
        f" over {bins.count} bins of equal {bins.kind}; floor: ECE of a perfect predictor with as many rounds"
    )
    table = _table(caption)
    calibration = evaluation.calibration
    scale = ("T", "b") if calibration.offsets else ("T",)
    columns = ("slot", *scale, "rounds", "real", "pred", ">", "ECE %", ">", "floor", "AUC", ">", "Brier", ">")
    for column in columns:
        table.add_column(column, justify="right")
    for k, slot in enumerate(g.slots):
        sides = (slot.before, slot.after)
        table.add_row(
            str(slot.slot),
            f"{calibration.temperatures[k]:.3g}",
            *(f"{b:.2f}" for b in calibration.offsets[k : k + 1]),
            str(slot.rounds),
            _number(slot.realised, 3),
            *(_number(side.predicted, 3) for side in sides),
            *(_number(100 * side.ece) for side in sides),
            _number(100 * slot.floor),
            *(_number(side.auc, 3) for side in sides),
            *(_number(side.brier, 3) for side in sides),
        )
    return table


def group_table(evaluation: Evaluation) -> Table:
    table = _table("mean over slots; 95%: a perfect predictor stays below this in 19 of 20 cases")
    for column in ("held out", "prompts", "rounds", "ECE % before", "after", "floor", "95%"):
        table.add_column(column, justify="left" if column == "held out" else "right")
    for g in evaluation.groups:
        errors = [_number(100 * e) for e in (g.ece_before, g.ece_after, g.floor, g.floor_95)]
        table.add_row(g.name, str(g.prompts), str(g.rounds), *errors)
    return table


def _table(caption: str) -> Table:
    return Table(box=SIMPLE_HEAD, caption=caption, caption_justify="left", padding=0, pad_edge=False)


def _number(value: float, digits: int = 2) -> str:
    """ "-" where there is none; no digit before the point that every figure shares."""
    text = f"{value:.{digits}f}" if math.isfinite(value) else "-"
    return text.removeprefix("0") if digits == 3 and text.startswith("0.") else text
