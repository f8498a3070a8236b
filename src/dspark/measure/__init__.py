"""Where a CPU's time goes: matrix products against the machine's limits, and the parts of a round.

report = measure_kernels(weights, KernelSettings())           # products.py: every weight, in layer order
report = measure_rounds(target, drafter, prompts, settings)   # rounds.py: real rounds, and their passes again

Ways that are compared take turns within every repeat; figures are medians with their range.
"""

from dspark.measure.products import KernelSettings, measure_kernels, model_weights
from dspark.measure.rounds import RoundSettings, measure_rounds

__all__ = ["KernelSettings", "RoundSettings", "measure_kernels", "measure_rounds", "model_weights"]
