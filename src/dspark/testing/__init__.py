"""Helpers for whoever writes a drafter, a policy or a target: exact tiny models and scripted proposals.

target = TableTarget(table)                             # p(next | last) = table[last], enumerable exactly
drafter = ScriptedDrafter.from_table(q, max_draft=3)    # proposals with a known p_d
target, drafter = tiny_decoder(), tiny_drafter(tiny_decoder())
expected = slow_generate(target, prompt, params)        # plain decoding without caches
"""

from dspark.testing.driver import check_step, run_engine
from dspark.testing.reference import (
    FreshPass,
    SlowOutput,
    filter_row,
    fresh_pass,
    shape_logits,
    slow_generate,
)
from dspark.testing.scripted import ScriptedDrafter
from dspark.testing.table import TableTarget
from dspark.testing.tiny import tiny_decoder, tiny_drafter, tiny_tokenizer

__all__ = [
    "FreshPass",
    "ScriptedDrafter",
    "SlowOutput",
    "TableTarget",
    "check_step",
    "filter_row",
    "fresh_pass",
    "run_engine",
    "shape_logits",
    "slow_generate",
    "tiny_decoder",
    "tiny_drafter",
    "tiny_tokenizer",
]
