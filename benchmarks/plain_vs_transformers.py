"""Greedy decoding by dspark, plainly and with a drafter, against transformers' `generate`.

    python benchmarks/plain_vs_transformers.py --threads 1 --concurrency 1,4 --json report.json

Every peer lives in a process of its own (so that peak memory is its own), loads the same fp32 weights once, and
they take turns: within a repeat each decodes all prompts once. All decode exactly `--max-tokens` tokens a
prompt, end-of-text included as an ordinary token. transformers batches left-padded prompts, `concurrency` at a
time; dspark keeps as many requests in flight. Texts are compared with transformers' token by token.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

PEERS = ("transformers", "none", "dspark", "dspark+lookup", "ngram", "dflash")
INSTALL = "pip install 'dspark[bench]'"


class Peer(Protocol):
    def decode(self, prompts: list[list[int]], tokens: int, concurrency: int) -> list[list[int]]:
        """Exactly `tokens` greedy ids behind each prompt."""
        ...


class TransformersPeer:
    """`AutoModelForCausalLM.generate` over static, left-padded batches."""

    def __init__(self, model: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from dspark.target.zoo import resolve

        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(resolve(model), dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None  # no end: every peer decodes the same number
        self.model.generation_config.pad_token_id = 0

    def decode(self, prompts: list[list[int]], tokens: int, concurrency: int) -> list[list[int]]:
        answers: list[list[int]] = []
        for start in range(0, len(prompts), concurrency):
            answers += self._batch(prompts[start : start + concurrency], tokens)
        return answers

    def _batch(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = self.torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = self.torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        with self.torch.inference_mode():
            out = self.model.generate(
                input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens
            )
        return [row[width:] for row in out.tolist()]


class DSparkPeer:
    """`dspark.LLM` with one method."""

    def __init__(self, model: str, method: str, drafter: str | None, max_num_seqs: int) -> None:
        from dspark.cli.options import speculative_config
        from dspark.llm import LLM

        config = speculative_config(method, drafter)
        self.engine = LLM(model, speculative_config=config, max_num_seqs=max_num_seqs).engine
        self.accepted_length: float | None = None

    def decode(self, prompts: list[list[int]], tokens: int, concurrency: int) -> list[list[int]]:
        from dspark.core import SamplingParams
        from dspark.evaluate.throughput import measure

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        outputs = measure(self.engine, prompts, [params] * len(prompts), concurrency).outputs
        rounds = sum(output.metrics.rounds for output in outputs)
        accepted = sum(output.metrics.accepted for output in outputs)
        self.accepted_length = 1 + accepted / rounds if rounds else None
        return [list(output.token_ids) for output in outputs]


def serve(name: str, args: argparse.Namespace) -> None:
    """A peer's process: a JSON line in, a JSON line out, until stdin closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    import torch

    torch.set_num_threads(args.threads)
    peer: Peer
    if name == "transformers":
        peer = TransformersPeer(args.model)
    else:
        drafter = args.drafter if name in ("dspark", "dspark+lookup", "dflash") else None
        peer = DSparkPeer(args.model, name, drafter, max(args.concurrency))
    print(json.dumps({"threads": torch.get_num_threads()}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        begin = time.perf_counter()
        ids = peer.decode(job["prompts"], job["tokens"], job["concurrency"])
        seconds = time.perf_counter() - begin
        length = getattr(peer, "accepted_length", None)
        answer = {"ids": ids, "seconds": seconds, "accepted_length": length, "peak_rss_mb": peak_rss_mb()}
        print(json.dumps(answer), file=answers, flush=True)


def peak_rss_mb() -> float:
    """Most memory this process has held, in 10^6 bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # NOTE: getrusage would include what the parent held when it forked
        lines = status.read_text(encoding="utf-8").splitlines()
        kib = next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)
        if kib is not None:
            return kib * 1024 / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if platform.system() == "Darwin" else peak * 1024 / 1e6


class Process:
    """A peer seen from outside."""

    def __init__(self, name: str, argv: Sequence[str], threads: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "NUMBA_NUM_THREADS": str(threads)}
        command = [sys.executable, __file__, *argv, "--serve", name]
        self.name = name
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.threads: int = self._read()["threads"]

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(fail(f"the peer {self.name} ended early; its own message is above"))
        return json.loads(line)

    def decode(self, prompts: list[list[int]], tokens: int, concurrency: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(
            json.dumps({"prompts": prompts, "tokens": tokens, "concurrency": concurrency}),
            file=self.process.stdin,
            flush=True,
        )
        return self._read()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def measure_all(
    args: argparse.Namespace, peers: list[Process], prompts: list[list[int]]
) -> list[dict[str, Any]]:
    """Runs of all peers, taking turns; outputs compared with transformers' of the same batch size."""
    for concurrency in args.concurrency:
        for peer in peers:
            peer.decode([prompt[:32] for prompt in prompts[:concurrency]], 4, concurrency)
    runs = []
    for concurrency in args.concurrency:
        for repeat in range(args.repeats):
            reference: list[list[int]] | None = None
            for peer in peers:
                answer = peer.decode(prompts, args.max_tokens, concurrency)
                ids = answer.pop("ids")
                reference = ids if peer.name == "transformers" else reference
                tokens = sum(map(len, ids))
                assert tokens == len(prompts) * args.max_tokens, f"{peer.name} decoded {tokens} tokens"
                run = {"peer": peer.name, "concurrency": concurrency, "repeat": repeat, **answer}
                run["tokens_per_s"] = tokens / answer["seconds"]
                run["identical"] = None if reference is None else sum(map(list.__eq__, ids, reference))
                runs.append(run)
                print(
                    f"concurrency {concurrency}, repeat {repeat}, {peer.name}: {run['tokens_per_s']:.1f} tokens/s",
                    file=sys.stderr,
                )
    return runs


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Median and range per peer and concurrency; ratios to transformers are taken within a repeat."""
    summary = []
    for peer, concurrency in dict.fromkeys((run["peer"], run["concurrency"]) for run in runs):
        mine = [run for run in runs if (run["peer"], run["concurrency"]) == (peer, concurrency)]
        base = {
            run["repeat"]: run["tokens_per_s"]
            for run in runs
            if (run["peer"], run["concurrency"]) == ("transformers", concurrency)
        }
        summary.append(
            {
                "peer": peer,
                "concurrency": concurrency,
                "tokens_per_s": spread([run["tokens_per_s"] for run in mine]),
                "ratio_to_transformers": spread([run["tokens_per_s"] / base[run["repeat"]] for run in mine]),
                "accepted_length": mine[0]["accepted_length"],
                "identical_to_transformers": min(run["identical"] for run in mine),
                "peak_rss_mb": max(run["peak_rss_mb"] for run in mine),
            }
        )
    return summary


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def print_table(summary: list[dict[str, Any]], num_prompts: int) -> None:
    print(
        f"{'conc.':>5}  {'peer':<13}{'tokens/s (min..max)':<24}{'x transformers':<22}{'acc. len.':>9}", end=""
    )
    print(f"{'same ids':>11}{'peak MB':>9}")
    for cell in summary:
        rate, ratio = cell["tokens_per_s"], cell["ratio_to_transformers"]
        length = "-" if cell["accepted_length"] is None else f"{cell['accepted_length']:.2f}"
        rates = f"{rate['median']:.1f} ({rate['min']:.1f}..{rate['max']:.1f})"
        ratios = f"{ratio['median']:.2f} ({ratio['min']:.2f}..{ratio['max']:.2f})"
        same = f"{cell['identical_to_transformers']} of {num_prompts}"
        print(f"{cell['concurrency']:>5}  {cell['peer']:<13}{rates:<24}{ratios:<22}{length:>9}", end="")
        print(f"{same:>11}{cell['peak_rss_mb']:>9.0f}")


def numbers(text: str) -> tuple[int, ...]:
    values = tuple(int(part) for part in text.split(","))
    if min(values) < 1:
        raise ValueError
    return values


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--peers", default="transformers,none,dspark", help=f"of {', '.join(PEERS)} (%(default)s)"
    )
    parser.add_argument("--drafter", help="checkpoint for dspark or dflash; default: the shipped one")
    parser.add_argument(
        "--concurrency", type=numbers, default=(1,), metavar="LIST", help="such as 1,4,16 (1)"
    )
    parser.add_argument("--prompts", type=int, default=16, metavar="N", help="built-in ones (%(default)s)")
    parser.add_argument("--max-prompt-tokens", type=int, default=512, metavar="N", help="skip longer prompts")
    parser.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="a prompt, exactly (%(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="%(default)s")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, metavar="N", help="%(default)s")
    parser.add_argument("--json", metavar="PATH", help="write every figure there; - is stdout")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name in ("prompts", "max_tokens", "repeats", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")
    args.peers = list(dict.fromkeys(["transformers", *args.peers.split(",")]))
    if unknown := [name for name in args.peers if name not in PEERS]:
        parser.error(f"unknown peer {unknown[0]!r}; choose from {', '.join(PEERS)}")
    return args


def load_prompts(args: argparse.Namespace) -> list[list[int]]:
    from dspark.data import load_prompts as built_in
    from dspark.target.tokenizer import Tokenizer
    from dspark.target.zoo import resolve

    tokenizer = Tokenizer(resolve(args.model))
    all_ids = [tokenizer.apply_chat_template(prompt.messages) for prompt in built_in()]
    return [ids for ids in all_ids if len(ids) <= args.max_prompt_tokens][: args.prompts]


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    if importlib.util.find_spec("transformers") is None:
        return fail(f"transformers is not installed; run: {INSTALL}")
    from dspark.cli.machine import machine, versions
    from dspark.core import DSparkError

    try:
        if args.serve:
            serve(args.serve, args)
            return 0
        prompts = load_prompts(args)
    except DSparkError as error:
        return fail(str(error))
    if len(prompts) < max(args.concurrency):
        return fail(f"concurrency {max(args.concurrency)} needs as many prompts, got {len(prompts)}")
    with ExitStack() as stack:
        peers = []
        for name in args.peers:
            peers.append(Process(name, argv, args.threads))
            stack.callback(peers[-1].close)
        if {peer.threads for peer in peers} != {args.threads}:
            return fail(f"thread counts differ: { {peer.name: peer.threads for peer in peers} }")
        runs = measure_all(args, peers, prompts)
    summary = summarise(runs)
    report = {
        "format": "dspark-plain-vs-transformers",
        "format_version": 1,
        "versions": {**versions(), "transformers": metadata.version("transformers")},
        "machine": {**machine(), "threads": args.threads},
        "settings": {key: value for key, value in vars(args).items() if key not in ("serve", "json")},
        "num_prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "runs": runs,
        "summary": summary,
    }
    text = json.dumps(report, indent=1, allow_nan=False)
    if args.json == "-":
        print(text)
        return 0
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    print_table(summary, len(prompts))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
