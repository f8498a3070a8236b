"""How far 8-bit activations move the model: against float32 activations, on the built-in prompts and their answers.

    python benchmarks/activation_divergence.py [--tokens 64] [--limit N] [--threads N] [--json FILE]

The model answers every prompt greedily with float32 activations. Then both forms read the same conversations; over the
answers' positions this reports the KL divergence of their next-token distributions (nats), how often their most
probable tokens agree, and the perplexity of the answers' tokens under each. The project takes int8 activations by
default only while the mean divergence stays below 0.01 nats.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track

from dspark import LLM, SamplingParams
from dspark.data import load_prompts
from dspark.kv import KVPool
from dspark.target.base import ForwardBatch

BLOCK_SIZE = 16
LIMIT = 0.01  # nats


def log_probs(llm: LLM, token_ids: list[int], start: int) -> torch.Tensor:
    """log p of what follows each position from `start` - 1 on but the last, [n, V] float64."""
    target, n = llm.engine.target, len(token_ids) - 1
    blocks = -(-n // BLOCK_SIZE)
    pool = KVPool(target.kv_specs, blocks, BLOCK_SIZE, target.kv_dtype, target.device)
    batch = ForwardBatch(
        token_ids=torch.tensor(token_ids[:-1]),
        positions=torch.arange(n),
        query_start=np.array([0, n]),
        context_lens=np.array([0]),
        block_tables=np.arange(blocks)[None],
        slots=torch.arange(n),
        logit_rows=torch.arange(start - 1, n),
    )
    return target.forward(batch, pool).logits.double().log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer (%(default)s)")
    parser.add_argument("--limit", type=int, help="number of prompts; default: all")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    exact = LLM(args.model, activation_dtype="float32")
    rounded = LLM(args.model, activation_dtype="int8")
    prompts = load_prompts()[: args.limit]
    outputs = exact.generate(
        [p.messages for p in prompts], SamplingParams(temperature=0, max_tokens=args.tokens)
    )
    divergence, agree, scores = [], [], []
    for prompt, output in track(list(zip(prompts, outputs, strict=True)), disable=not sys.stderr.isatty()):
        ids = exact.encode(prompt.messages)
        p, q = (log_probs(llm, ids + list(output.token_ids), len(ids)) for llm in (exact, rounded))
        divergence.append((p.exp() * (p - q)).sum(-1))
        agree.append(p.argmax(-1) == q.argmax(-1))
        answer = torch.tensor(output.token_ids)[:, None]
        scores.append(torch.cat([p.gather(1, answer), q.gather(1, answer)], dim=1))
    kl, perplexity = torch.cat(divergence), (-torch.cat(scores).mean(0)).exp()
    report: dict[str, Any] = {
        "model": args.model,
        "prompts": len(prompts),
        "positions": len(kl),
        "kl_mean": float(kl.mean()),
        "kl_99th_percentile": float(kl.quantile(0.99)),
        "kl_max": float(kl.max()),
        "top1_agreement": float(torch.cat(agree).double().mean()),
        "perplexity": {"float32": float(perplexity[0]), "int8": float(perplexity[1])},
        "limit": LIMIT,
    }
    text = json.dumps(report, indent=2)
    print(text)
    if args.json:
        Path(args.json).write_text(text + "\n")
    if report["kl_mean"] > LIMIT:
        sys.exit(f"mean divergence above {LIMIT} nats: do not default to int8 activations")


if __name__ == "__main__":
    main()
