"""What HTTP costs: `dspark serve` against the same requests through `LLM.generate`, taking turns.

    python benchmarks/serving.py [--concurrency 1,4,16] [--prompts 16] [--max-tokens 64] [--repeats 3] [--threads N]
        [--method dspark+lookup] [--policy auto] [--json PATH]

The server runs in a process of its own; its clients are threads here that read streams. Greedy, built-in prompts.
Tokens/s with prompts included, time to first token and longest gap between two pieces of a stream; medians over
repeats (ratios are taken within one). Exit code 1: a text over HTTP is not that of `LLM.generate`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dspark import LLM, SamplingParams
from dspark.cli.destination import check_file
from dspark.cli.options import speculative_config
from dspark.core import DSparkError
from dspark.data import load_prompts
from dspark.evaluate.closed_loop import measure


@dataclass(frozen=True)
class Streamed:
    text: str
    tokens: int
    first_s: float
    longest_gap_s: float


@contextmanager
def served(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Host and port of a server with these options."""
    argv = [sys.executable, "-m", "dspark", "serve", "--port", "0", "--method", args.method]
    argv += ["--policy", args.policy, "--max-num-seqs", str(max(args.concurrency))]
    argv += [] if args.threads is None else ["--threads", str(args.threads)]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = next((line for line in process.stderr if line.startswith("serving")), "")
        host, port = line.split("//")[1].split("/v1")[0].rsplit(":", 1)
        yield host, int(port)
    finally:
        process.terminate()
        process.wait()


def stream(address: tuple[str, int], messages: list[dict[str, str]], max_tokens: int) -> Streamed:
    """One answer, read piece by piece."""
    body = {"messages": messages, "temperature": 0, "max_tokens": max_tokens, "stream": True}
    body["stream_options"] = {"include_usage": True}
    connection = http.client.HTTPConnection(*address)
    started = last = time.perf_counter()
    first, gap, text, tokens = 0.0, 0.0, "", 0
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    for line in connection.getresponse():
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        tokens = chunk.get("usage", {}).get("completion_tokens", tokens)
        piece = "".join(choice["delta"].get("content", "") for choice in chunk["choices"])
        if piece:
            now = time.perf_counter()
            first, gap = (now - started, 0.0) if not text else (first, max(gap, now - last))
            last, text = now, text + piece
    connection.close()
    return Streamed(text, tokens, first, gap)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--concurrency", type=numbers, default=[1, 4, 16])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--method", default="dspark+lookup")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    try:
        if args.json is not None:
            check_file(args.json)
    except DSparkError as error:
        parser.error(str(error))
    return args


def run(
    llm: LLM, address: tuple[str, int], prompts: list[list[dict[str, str]]], concurrency: int, max_tokens: int
) -> dict[str, Any]:
    """The same prompts here, then there."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    here = measure(llm.engine, [llm.encode(p) for p in prompts], [params] * len(prompts), concurrency)
    started = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as clients:
        there = list(clients.map(lambda p: stream(address, p, max_tokens), prompts))
    seconds = time.perf_counter() - started
    offline = sum(len(output.token_ids) for output in here.outputs) / here.seconds
    online = sum(answer.tokens for answer in there) / seconds
    return {
        "offline_tokens_per_s": offline,
        "http_tokens_per_s": online,
        "ratio": online / offline,
        "first_token_ms": 1e3 * statistics.median(answer.first_s for answer in there),
        "longest_gap_ms": 1e3 * statistics.median(answer.longest_gap_s for answer in there),
        "same_text": all(a.text == b.text for a, b in zip(there, here.outputs, strict=True)),
    }


def main() -> int:
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    config: dict[str, Any] = {**speculative_config(args.method), "policy": args.policy}
    if args.method == "none":
        del config["policy"]
    llm = LLM(speculative_config=config, max_num_seqs=max(args.concurrency))
    prompts = [list(prompt.messages) for prompt in load_prompts(limit=args.prompts)]
    cells: dict[int, list[dict[str, Any]]] = {}
    with served(args) as address:
        for concurrency in args.concurrency:
            run(llm, address, prompts[:concurrency], concurrency, 8)  # warm
            cells[concurrency] = [
                run(llm, address, prompts, concurrency, args.max_tokens) for _ in range(args.repeats)
            ]
    print("| requests | offline tokens/s | over HTTP | ratio (range) | first token ms | longest gap ms |")
    print("|---|---|---|---|---|---|")
    for concurrency, runs in cells.items():
        middle = {key: statistics.median(r[key] for r in runs) for key in runs[0]}
        low, high = (pick(r["ratio"] for r in runs) for pick in (min, max))
        print(
            f"| {concurrency} | {middle['offline_tokens_per_s']:.1f} | {middle['http_tokens_per_s']:.1f} "
            f"| {middle['ratio']:.3f} ({low:.3f} to {high:.3f}) | {middle['first_token_ms']:.0f} "
            f"| {middle['longest_gap_ms']:.0f} |"
        )
    if args.json is not None:
        args.json.write_text(json.dumps(cells, indent=1) + "\n", encoding="utf-8")
    return 0 if all(r["same_text"] for runs in cells.values() for r in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
