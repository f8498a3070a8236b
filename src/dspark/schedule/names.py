"""Names of policies and acceptance rules; imports nothing heavy, so that the command line can list them at once."""

from typing import Literal, get_args

__all__ = ["ACCEPTANCE_RULES", "POLICIES", "PRICED", "AcceptanceRule"]

AcceptanceRule = Literal["ratio", "shared_noise"]
ACCEPTANCE_RULES: tuple[AcceptanceRule, ...] = get_args(AcceptanceRule)
PRICED = ("prefix", "global", "lagged", "auto")  # policies that decide by what things cost
POLICIES = ("fixed", "threshold", *PRICED)
