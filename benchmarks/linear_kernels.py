"""What a pass spends in matrix products: all of SmolLM2-135M's, in the order of its layers.

    python benchmarks/linear_kernels.py [--threads N] [--repeats N] [--rows 1,2,...] [--json]

30 layers of 4-bit blocks and an 8-bit head (random codes: speed does not depend on them), 134 M weights, so no
weight is still in a core's cache when its turn comes again. Three ways take turns within one run: plain
`F.linear` in float32, float32 packed for oneDNN, and the low-bit kernel on the blocks themselves. One thread
is timed by its own clock (what it ran, not what it waited for a core), several by the wall's.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn import ModuleList
from torch.nn.functional import linear

from dspark.kernels.linear import PackedLinear
from dspark.kernels.lowbit import BLOCK, LowBitLinear, QuantizedWeight, gather_weights

LAYERS = 30
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # q|k|v, o, gate|up, down: [out, in]
HEAD = (49152, 576)
ROWS = (1, 2, 4, 6, 8, 16, 32, 64, 256)

Product = Callable[[torch.Tensor], torch.Tensor]


def random_weight(shape: tuple[int, int], bits: int) -> QuantizedWeight:
    out, size = shape
    scale = (torch.rand(out, size // BLOCK) * 0.02).half()
    if bits == 8:
        return QuantizedWeight(torch.randint(-127, 128, shape, dtype=torch.int8), scale / 16, None, 8)
    codes = torch.randint(0, 256, (out, size // 2), dtype=torch.uint8)
    return QuantizedWeight(codes, scale, -8 * scale, 4)


class Ways:
    """The model's products in layer order, each way, and the bytes of weights that each reads."""

    def __init__(self) -> None:
        weights = [random_weight(shape, 4) for _ in range(LAYERS) for shape in SHAPES]
        weights.append(random_weight(HEAD, 8))
        self.num_weights = sum(w.shape[0] * w.shape[1] for w in weights)
        plain = [w.dequantize() for w in weights]
        low = [LowBitLinear(w) for w in weights]
        gather_weights(ModuleList(low))
        self.products: dict[str, list[Product]] = {
            "F.linear": [lambda x, w=w: linear(x, w) for w in plain],  # type: ignore[misc]
            "packed": [PackedLinear(w) for w in plain],
            "low-bit": list(low),
        }
        packed = [layer.packed for layer in low if layer.packed is not None]
        low_bytes = sum(p.numel() for p in packed) or 4 * self.num_weights
        self.bytes = {"F.linear": 4 * self.num_weights, "packed": 4 * self.num_weights, "low-bit": low_bytes}
        self.inputs = [w.shape[1] for w in weights]


def milliseconds(products: list[Product], inputs: list[torch.Tensor]) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    for product, x in zip(products, inputs, strict=True):
        product(x)
    return (clock() - start) * 1e3


def measure(ways: Ways, names: list[str], rows: int, repeats: int) -> list[dict[str, object]]:
    by_size = {size: torch.randn(rows, size) for size in set(ways.inputs)}
    inputs = [by_size[size] for size in ways.inputs]
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats + 1):
        for name in names:
            elapsed = milliseconds(ways.products[name], inputs)
            if turn:  # the first one warms up
                times[name].append(elapsed)
    results: list[dict[str, object]] = []
    for name, values in times.items():
        median = float(np.median(values))
        spread = {f"ms_p{p}": float(np.percentile(values, p)) for p in (10, 90)}
        rates = {
            "gb_per_s": ways.bytes[name] / median / 1e6,
            "gflop_per_s": 2 * ways.num_weights * rows / median / 1e6,
        }
        results.append({"way": name, "rows": rows, "ms": median, **spread, **rates})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="numbers of rows, by commas")
    parser.add_argument("--ways", default="F.linear,packed,low-bit", help="what to compare, by commas")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    with torch.inference_mode():
        ways = Ways()
        results = [
            m
            for rows in map(int, args.rows.split(","))
            for m in measure(ways, args.ways.split(","), rows, args.repeats)
        ]
    if args.json:
        setting = {"threads": args.threads, "repeats": args.repeats, "torch": torch.__version__}
        print(
            json.dumps({"machine": platform.processor() or platform.machine(), **setting, "results": results})
        )
        return
    print(f"{'way':>10} {'rows':>4} {'ms':>8} {'p10':>8} {'p90':>8} {'GB/s':>7} {'GFLOP/s':>8}")
    for m in results:
        columns = " ".join(f"{m[key]:8.2f}" for key in ("ms", "ms_p10", "ms_p90"))
        print(f"{m['way']:>10} {m['rows']:>4} {columns} {m['gb_per_s']:7.1f} {m['gflop_per_s']:8.1f}")


if __name__ == "__main__":
    main()
