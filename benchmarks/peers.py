"""Peers of `cpu_peers` that are Python libraries, and what all of them need."""

from __future__ import annotations

import argparse
import platform
import resource
import statistics
import sys
from pathlib import Path

__all__ = ["DSparkPeer", "TransformersPeer", "fail", "load_prompts", "numbers", "peak_rss_mb", "spread"]


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
    """`dspark.LLM` with one method; "none-float32" is plain decoding without rounded activations."""

    def __init__(self, model: str, method: str, drafter: str | None, max_num_seqs: int) -> None:
        from dspark.cli.options import speculative_config
        from dspark.llm import LLM

        dtype = "float32" if method.endswith("-float32") else "auto"
        config = speculative_config(method.removesuffix("-float32"), drafter)
        llm = LLM(model, speculative_config=config, max_num_seqs=max_num_seqs, activation_dtype=dtype)
        self.engine = llm.engine
        self.accepted_length: float | None = None

    def decode(self, prompts: list[list[int]], tokens: int, concurrency: int) -> list[list[int]]:
        from dspark.core import SamplingParams
        from dspark.evaluate.closed_loop import measure

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        outputs = measure(self.engine, prompts, [params] * len(prompts), concurrency).outputs
        rounds = sum(output.metrics.rounds for output in outputs)
        accepted = sum(output.metrics.accepted for output in outputs)
        self.accepted_length = 1 + accepted / rounds if rounds else None
        return [list(output.token_ids) for output in outputs]


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


def fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def numbers(text: str) -> tuple[int, ...]:
    values = tuple(int(part) for part in text.split(","))
    if min(values) < 1:
        raise ValueError
    return values


def load_prompts(args: argparse.Namespace) -> list[list[int]]:
    from dspark.data import load_prompts as built_in
    from dspark.target.tokenizer import Tokenizer
    from dspark.target.zoo import resolve

    tokenizer = Tokenizer(resolve(args.model))
    all_ids = [tokenizer.apply_chat_template(prompt.messages) for prompt in built_in()]
    return [ids for ids in all_ids if len(ids) <= args.max_prompt_tokens][: args.prompts]
