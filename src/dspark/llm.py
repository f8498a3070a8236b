"""Offline generation: load a model once, generate for prompts or conversations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dspark.core import DSparkError, RequestOutput, SamplingParams, StepEvent
from dspark.drafters.registry import build_drafter
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.kernels.compilation import compile_kernels
from dspark.target.load import load_target

__all__ = ["LLM", "Prompt"]

Messages = Sequence[Mapping[str, str]]
Prompt = str | Messages | Mapping[str, Sequence[int]]

_log = logging.getLogger("dspark")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class LLM:
    """A target model with an optional drafter.

    >>> llm = LLM("smollm2-135m", speculative_config={"method": "dspark"})
    >>> llm.generate([{"role": "user", "content": "Hello"}], SamplingParams(temperature=0, max_tokens=64))

    Args:
        model: a known name, a Hugging Face directory, or a .gguf file.
        speculative_config: vLLM's keys: method (none, ngram, dspark, dflash), model, num_speculative_tokens,
            prompt_lookup_max, prompt_lookup_min. None decodes plainly.
        dtype: float32, bfloat16 or float64; weights and KV.
        report: gets a line before work that takes seconds (the first time: conversion, compiling kernels).
        max_num_seqs, max_num_batched_tokens, max_model_len, block_size, kv_cache_tokens: see `EngineConfig`.

    Raises:
        DSparkError: anything that cannot be loaded or is not supported, with what to do.
    """

    def __init__(
        self,
        model: str | Path = "smollm2-135m",
        *,
        speculative_config: Mapping[str, Any] | None = None,
        dtype: str = "float32",
        device: str = "cpu",
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        max_model_len: int | None = None,
        block_size: int = 16,
        kv_cache_tokens: int | None = None,
        report: Callable[[str], None] = _log.info,
    ) -> None:
        if dtype not in _DTYPES:
            raise DSparkError(f"dtype {dtype!r} is not supported; choose from {', '.join(_DTYPES)}")
        _check_device(device)
        config = EngineConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
            kv_cache_tokens=kv_cache_tokens,
        )
        if device == "cpu" and dtype == "float32":
            compile_kernels(report)
        loaded = load_target(model, _DTYPES[dtype], device, report)
        self.model, self.tokenizer = str(model), loaded.tokenizer
        drafter, policy = build_drafter(speculative_config, loaded.decoder)
        self.engine = Engine(loaded.decoder, drafter, policy, loaded.tokenizer, config)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_event: Callable[[StepEvent], None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one or several prompts, batched; outputs in the prompts' order.

        A string is raw text, a list of messages goes through the chat template, `{"prompt_token_ids": [...]}`
        is taken as it is. `on_event` sees every step's events (for progress).
        """
        inputs = _as_list(prompts)
        each = (
            [params or SamplingParams()] * len(inputs) if not isinstance(params, Sequence) else list(params)
        )
        if len(each) != len(inputs):
            raise DSparkError(
                f"{len(inputs)} prompts came with {len(each)} sampling parameters; give one, or one each"
            )
        ids: list[str] = []
        try:
            for prompt, p in zip(inputs, each, strict=True):
                ids.append(self.engine.add(self.encode(prompt), p))
        except DSparkError:
            for request_id in ids:  # all or nothing: no orphans run later
                self.engine.abort(request_id)
            raise
        outputs: dict[str, RequestOutput] = {}
        while len(outputs) < len(ids):
            for event in self.engine.step():
                if on_event is not None:
                    on_event(event)
                if event.output is not None:
                    outputs[event.request_id] = event.output
        return [outputs[i] for i in ids]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StepEvent]:
        """Events of one prompt as they happen; closing the iterator aborts the request."""
        request_id = self.engine.add(self.encode(prompt), params or SamplingParams())
        try:
            while True:
                for event in self.engine.step():
                    if event.request_id == request_id:
                        yield event
                        if event.output is not None:
                            return
        finally:
            self.engine.abort(request_id)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, as `generate` takes it."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=True)
        if isinstance(prompt, Mapping):
            if set(prompt) != {"prompt_token_ids"}:
                raise DSparkError('a prompt given as a mapping must be {"prompt_token_ids": [...]}')
            return list(prompt["prompt_token_ids"])
        return self.tokenizer.apply_chat_template(list(prompt))


def _check_device(device: str) -> None:
    """Refuse a device that this torch cannot use."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise DSparkError(
            f"device {device!r} cannot be used by this PyTorch; use cpu, or install one that can"
        ) from None


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tell one prompt (text, messages, ids) from several."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(m, Mapping) and "role" in m for m in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]
