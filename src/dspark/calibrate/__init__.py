"""Calibrate the confidence head: collect rounds under full verification, fit temperatures, judge them, use them.

calibration = fit(fitted_to, Bins())                     # sequential temperature scaling
evaluation = evaluate(held_out, calibration, Bins())     # ECE, AUC, Brier before and after; `refusal`
engine = Engine(target, drafter, policy, calibrate=calibration.conditional)

What is imported here works on plain arrays. `dspark.calibrate.collect` and `dspark.calibrate.jobs` need the engine
and are imported by name.
"""

from dspark.calibrate.calibration import Calibration, identity_calibration
from dspark.calibrate.fit import Labels, fit, offsets_hint, with_results
from dspark.calibrate.formats import load_calibration, save_calibration
from dspark.calibrate.metrics import Bins
from dspark.calibrate.report import Evaluation, evaluate
from dspark.calibrate.rounds import Answer, Rounds, Source, load_rounds, save_rounds

__all__ = [
    "Answer",
    "Bins",
    "Calibration",
    "Evaluation",
    "Labels",
    "Rounds",
    "Source",
    "evaluate",
    "fit",
    "identity_calibration",
    "load_calibration",
    "load_rounds",
    "offsets_hint",
    "save_calibration",
    "save_rounds",
    "with_results",
]
