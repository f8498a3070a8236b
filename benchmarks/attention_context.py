"""What context costs: milliseconds a pass spends on attention for each 1,000 tokens of history.

    python benchmarks/attention_context.py [--threads N] [--repeats N] [--json]

Shapes of SmolLM2-135M (30 layers, 9 query and 3 KV heads of 64, float32), a real KV pool with shuffled block
tables. The compiled path and the torch reference (which gathers the history) take turns within one run.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from collections.abc import Callable

import numpy as np
import torch

from dspark.kernels.attention import AttentionPlan, paged_attention, paged_attention_reference
from dspark.kv import BlockTable, KVPool, LayerKV
from dspark.target.base import ForwardBatch

LAYERS, HEADS, KV_HEADS, HEAD_DIM, BLOCK = 30, 9, 3, 64, 16
CONTEXTS = (1000, 2000, 4000, 8000)
Attention = Callable[..., torch.Tensor]
PATHS: dict[str, Attention] = {"compiled": paged_attention, "reference": paged_attention_reference}


def make_pool(num_tokens: int) -> KVPool:
    """A pool of random KV whose free blocks are in random order."""
    pool = KVPool([LayerKV(KV_HEADS, HEAD_DIM)] * LAYERS, -(-num_tokens // BLOCK))
    random.Random(0).shuffle(pool._free)
    for layer in (*pool.k, *pool.v):
        layer.normal_()
    return pool


def make_batch(pool: KVPool, table: BlockTable, context: int, rows: int) -> ForwardBatch:
    assert pool.reserve(table, context + rows)
    return ForwardBatch(
        token_ids=torch.zeros(rows, dtype=torch.int64),
        positions=torch.arange(context, context + rows),
        query_start=np.array([0, rows]),
        context_lens=np.array([context]),
        block_tables=np.array([table.blocks]),
        slots=torch.from_numpy(pool.slots(table, context, context + rows)),
    )


def milliseconds(attention: Attention, q: torch.Tensor, pool: KVPool, batch: ForwardBatch) -> float:
    """One pass: the plan and all layers."""
    start = time.perf_counter()
    plan = AttentionPlan.of(batch, BLOCK)
    for k, v in zip(pool.k, pool.v, strict=True):
        attention(q, k, v, plan, HEAD_DIM**-0.5)
    return (time.perf_counter() - start) * 1e3


def measure(pool: KVPool, context: int, rows: int, repeats: int) -> list[dict[str, object]]:
    table = BlockTable()
    batch = make_batch(pool, table, context, rows)
    q = torch.randn(rows, HEADS, HEAD_DIM)
    times: dict[str, list[float]] = {name: [] for name in PATHS}
    for turn in range(repeats + 1):
        for name, attention in PATHS.items():
            elapsed = milliseconds(attention, q, pool, batch)
            if turn:  # the first one warms up
                times[name].append(elapsed)
    pool.release(table)
    return [
        {
            "path": name,
            "rows": rows,
            "context": context,
            "ms": float(np.median(values)),
            "ms_p10": float(np.quantile(values, 0.1)),
            "ms_p90": float(np.quantile(values, 0.9)),
            "ms_per_1000_tokens": float(np.median(values)) * 1000 / context,
        }
        for name, values in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    pool = make_pool(max(CONTEXTS) + 16)
    with torch.inference_mode():
        results = [
            m for rows in (1, 8) for context in CONTEXTS for m in measure(pool, context, rows, args.repeats)
        ]
    if args.json:
        setting = {"threads": args.threads, "repeats": args.repeats, "torch": torch.__version__}
        print(
            json.dumps({"machine": platform.processor() or platform.machine(), **setting, "results": results})
        )
        return
    print(f"{'path':>10} {'rows':>4} {'context':>7} {'ms':>8} {'p10':>8} {'p90':>8} {'ms/1k tokens':>12}")
    for m in results:
        times = " ".join(f"{m[key]:8.2f}" for key in ("ms", "ms_p10", "ms_p90"))
        print(f"{m['path']:>10} {m['rows']:>4} {m['context']:>7} {times} {m['ms_per_1000_tokens']:12.2f}")


if __name__ == "__main__":
    main()
