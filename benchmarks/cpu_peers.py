"""Greedy decoding on CPU threads: ours, plainly and drafted, transformers, and llama.cpp, plainly and with n-grams.

    pip install 'dspark[bench]'
    python benchmarks/cpu_peers.py --threads 2 --concurrency 1,4,16 --json report.json

All read the same GGUF file (transformers its values in float32), continue the same built-in prompts, and decode
exactly `--max-tokens` tokens a prompt. Each peer stays loaded in a process of its own, so that thread pools do not
share one; only one computes at a time, and they take turns within every repeat, each repeat in another order. Peers
that are not installed are skipped, and the report says so.

- tokens/s includes the prompts' processing. "decoding" leaves it out: every run is preceded by one that decodes one
  token a prompt, whose time is taken off. With several streams, where prompts and decoding mix, that is an estimate.
- Tokens per second of CPU time (all threads, spinning included) tell whether another program slowed a peer down.

- dspark ignores the end of a text, llama.cpp forbids its tokens. Texts are compared up to where ours would have ended.
- Ours and llama.cpp round activations to 8 bits, each in its own order, so their texts part from each other and from
  float32's. `none-float32` is our plain decoding without that: its text should be transformers'.
- `llama.cpp-ngram` is its server's own speculation without a draft model (`--llama-ngram`), with its default sizes.
- The binding's wheels on PyPI are built without AVX-512; the report holds what llama.cpp says of the processor.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any

from llama_peer import NGRAM_KINDS, LlamaPeer, gguf_of
from peer_report import compare, print_table, summarise
from peers import (
    DSparkPeer,
    TransformersPeer,
    fail,
    load_prompts,
    numbers,
    peak_rss_mb,
)

OURS = ("none", "none-float32", "ngram", "dspark", "dspark+lookup", "dflash")
REQUIRES = {"transformers": "transformers", "llama.cpp": "xllamacpp", "llama.cpp-ngram": "xllamacpp"}
PEERS = (*OURS, *REQUIRES)
INSTALL = "pip install 'dspark[bench]'"


def missing(peer: str, model: str) -> str | None:
    """Why a peer cannot run, None if it can."""
    package = REQUIRES.get(peer)
    if package is None:
        return None
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed; run: {INSTALL}"
    if package == "xllamacpp" and gguf_of(model) is None:
        return f"llama.cpp reads GGUF files, and {model!r} is none"
    return None


def build(name: str, args: argparse.Namespace) -> Any:
    most = max(args.concurrency)
    if name == "transformers":
        return TransformersPeer(args.model)
    if name in OURS:
        return DSparkPeer(
            args.model, name, args.drafter if name in ("dspark", "dspark+lookup", "dflash") else None, most
        )
    gguf = gguf_of(args.model)
    assert gguf is not None, "peers that cannot run are skipped before"
    ngram = args.llama_ngram if name == "llama.cpp-ngram" else None
    # Room for a draft behind the last token.
    return LlamaPeer(gguf, args.threads, most, args.max_prompt_tokens + args.max_tokens + 64, ngram)


def serve(name: str, args: argparse.Namespace) -> None:
    """A peer's process: a JSON line in, a JSON line out, until stdin closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    import torch

    torch.set_num_threads(args.threads)
    peer = build(name, args)
    print(json.dumps({"facts": getattr(peer, "facts", {})}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        begin, begin_cpu = time.perf_counter(), time.process_time()
        ids = peer.decode(job["prompts"], job["tokens"], job["concurrency"])
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
        length = getattr(peer, "accepted_length", None)
        times = {"seconds": seconds, "cpu_seconds": cpu_seconds}
        answer = {"ids": ids, **times, "accepted_length": length, "peak_rss_mb": peak_rss_mb()}
        print(json.dumps(answer), file=answers, flush=True)


class Process:
    """A peer seen from outside."""

    def __init__(self, name: str, argv: Sequence[str], threads: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "NUMBA_NUM_THREADS": str(threads)}
        command = [sys.executable, __file__, *argv, "--serve", name]
        self.name = name
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.facts: dict[str, Any] = self._read()["facts"]

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(fail(f"the peer {self.name} ended early; its own message is above"))
        return json.loads(line)

    def decode(self, prompts: list[list[int]], tokens: int, concurrency: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        job = {"prompts": prompts, "tokens": tokens, "concurrency": concurrency}
        print(json.dumps(job), file=self.process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(peer: Process, prompts: list[list[int]], tokens: int, concurrency: int) -> dict[str, Any]:
    """One run: ids, times and rates."""
    first = peer.decode(prompts, 1, concurrency)["seconds"]
    answer = peer.decode(prompts, tokens, concurrency)
    count = sum(map(len, answer["ids"]))
    assert count == len(prompts) * tokens, f"{peer.name} decoded {count} tokens"
    decoding = answer["seconds"] - first
    rates = {
        "tokens_per_s": count / answer["seconds"],
        "tokens_per_cpu_s": count / answer["cpu_seconds"],
        "decode_tokens_per_s": (count - len(prompts)) / decoding if decoding > 0 else None,
    }
    return {**answer, "first_token_seconds": first, **rates}


def measure_all(
    args: argparse.Namespace, peers: list[Process], prompts: list[list[int]], ends: Sequence[int]
) -> list[dict[str, Any]]:
    """Runs of all peers, taking turns; texts compared with our plain one of the same repeat."""
    for concurrency in args.concurrency:
        for peer in peers:
            peer.decode([prompt[:32] for prompt in prompts[:concurrency]], 4, concurrency)
    runs = []
    for concurrency in args.concurrency:
        for repeat in range(args.repeats):
            first = repeat % len(peers)
            turn = []
            for peer in (*peers[first:], *peers[:first]):
                run = {"peer": peer.name, "concurrency": concurrency, "repeat": repeat}
                turn.append({**run, **measure(peer, prompts, args.max_tokens, concurrency)})
                rate = f"{peer.name}: {turn[-1]['tokens_per_s']:.1f} tokens/s"
                print(f"concurrency {concurrency}, repeat {repeat}, {rate}", file=sys.stderr)
            reference = next((run["ids"] for run in turn if run["peer"] == "none"), None)
            for run in turn:
                run |= compare(reference, run.pop("ids"), ends)
            runs += turn
    return runs


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="known name or .gguf file (%(default)s)")
    default = "none,none-float32,dspark,dspark+lookup,transformers,llama.cpp,llama.cpp-ngram"
    add("--peers", default=default, help=f"of {', '.join(PEERS)} (%(default)s)")
    add("--drafter", help="checkpoint for dspark or dflash; default: the shipped one")
    add("--llama-ngram", choices=NGRAM_KINDS, default="simple", help="kind of n-gram drafts (%(default)s)")
    add("--concurrency", type=numbers, default=(1, 4, 16), metavar="LIST", help="(1,4,16)")
    add("--prompts", type=int, default=16, metavar="N", help="built-in ones (%(default)s)")
    add("--max-prompt-tokens", type=int, default=512, metavar="N", help="skip longer prompts (%(default)s)")
    add("--max-tokens", type=int, default=64, metavar="N", help="a prompt, exactly (%(default)s)")
    add("--repeats", type=int, default=3, metavar="N", help="%(default)s")
    add("--threads", type=int, default=os.cpu_count() or 1, metavar="N", help="%(default)s")
    add("--json", metavar="PATH", help="write every figure there; - is stdout")
    add("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name in ("prompts", "max_prompt_tokens", "max_tokens", "repeats", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")
    args.peers = list(dict.fromkeys(args.peers.split(",")))
    if unknown := [name for name in args.peers if name not in PEERS]:
        parser.error(f"unknown peer {unknown[0]!r}; choose from {', '.join(PEERS)}")
    return args


def about(args: argparse.Namespace, names: Sequence[str], prompts: Sequence[list[int]]) -> dict[str, Any]:
    """What a report says beside its figures."""
    from dspark.cli.machine import machine, versions

    packages = {REQUIRES[name] for name in names if name in REQUIRES}
    return {
        "format": "dspark-cpu-peers",
        "format_version": 1,
        "versions": {**versions(), **{package: metadata.version(package) for package in sorted(packages)}},
        "machine": {**machine(), "threads": args.threads},
        "settings": {key: value for key, value in vars(args).items() if key not in ("serve", "json")},
        "num_prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
    }


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    from dspark.cli.bench_report import check_json_path
    from dspark.core import DSparkError
    from dspark.target.hf import read_config
    from dspark.target.zoo import resolve

    try:
        if args.serve:
            serve(args.serve, args)
            return 0
        check_json_path(args.json)
        prompts = load_prompts(args)
        ends = read_config(resolve(args.model)).eos_token_ids
    except DSparkError as error:
        return fail(str(error))
    if len(prompts) < max(args.concurrency):
        return fail(f"concurrency {max(args.concurrency)} needs as many prompts, got {len(prompts)}")
    skipped = {name: reason for name in args.peers if (reason := missing(name, args.model))}
    for name, reason in skipped.items():
        print(f"skipped {name}: {reason}", file=sys.stderr)
    names = [name for name in args.peers if name not in skipped]
    if not names:
        return fail("no peer is left to measure")
    with ExitStack() as stack:
        peers = []
        for name in names:
            peers.append(Process(name, argv, args.threads))
            stack.callback(peers[-1].close)
        runs = measure_all(args, peers, prompts, ends)
        facts = {peer.name: peer.facts for peer in peers if peer.facts}
    summary = summarise(runs, names)
    measured = {"skipped": skipped, "facts": facts, "runs": runs, "summary": summary}
    text = json.dumps({**about(args, names, prompts), **measured}, indent=1, allow_nan=False)
    if args.json == "-":
        print(text)
        return 0
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    print_table(summary, "none" if "none" in names else names[0], len(prompts))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
