"""Offline generation: load a model once, generate for prompts or conversations."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dspark.calibrate.serving import serving_calibration
from dspark.core import DSparkError, RequestOutput, SamplingParams, StepEvent
from dspark.drafters.registry import build_drafter, check_keys
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.engine.rehearsal import rehearse
from dspark.kernels.compilation import compile_kernels
from dspark.profile import ensure_profile, fingerprint, read_cost_table
from dspark.prompts import Prompt, as_list, encode_prompt
from dspark.schedule.cost import CostModel
from dspark.schedule.settings import build_policy, split_config
from dspark.target.load import LoadedTarget, load_target
from dspark.target.zoo import resolve

__all__ = ["LLM", "Prompt"]

_log = logging.getLogger("dspark")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class LLM:
    """A target model with an optional drafter. Several threads may use it: their requests run in one batch.

    >>> with LLM("smollm2-135m", speculative_config={"method": "dspark"}) as llm:
    ...     llm.generate([{"role": "user", "content": "Hello"}], SamplingParams(temperature=0, max_tokens=64))

    The `with` block, or `close()`, ends with the weights and the KV pool released; without either they go with the LLM.

    Args:
        model: a known name, a Hugging Face directory, or a .gguf file.
        speculative_config: vLLM's keys: method (none, ngram, dspark, dflash, ...), model, num_speculative_tokens,
            prompt_lookup_max, prompt_lookup_min; and policy, threshold, acceptance, cost_table, calibration, see
            `ScheduleSettings`. None decodes plainly. A policy that needs prices measures them the first time.
        dtype: float32, bfloat16 or float64; weights and KV.
        activation_dtype: auto, float32 or int8; of the products with quantised weights, see `load_target`.
        kv_cache_dtype: auto, float32, float16 or bfloat16; see `load_target`.
        report: gets a line before work that takes seconds (the first time: conversion, compiling kernels).
        progress: gets the share that is done of a measurement of prices, above 0 and at most 1.
        weights_of: an LLM of the same model, device and dtypes, whose weights this one uses instead of loading them
            again: to compare methods, or to serve some requests another way. Threads that use both take turns.
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
        activation_dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        device: str = "cpu",
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        max_model_len: int | None = None,
        block_size: int = 16,
        kv_cache_tokens: int | None = None,
        report: Callable[[str], None] = _log.info,
        progress: Callable[[float], None] = lambda share: None,
        weights_of: LLM | None = None,
    ) -> None:
        if dtype not in _DTYPES:
            raise DSparkError(f"dtype {dtype!r} is not supported; choose from {', '.join(_DTYPES)}")
        _check_device(device)
        drafting, schedule = split_config(speculative_config)
        check_keys(drafting)
        config = EngineConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
            kv_cache_tokens=kv_cache_tokens,
            acceptance=schedule.acceptance,
        )
        directory = resolve(model, report)  # a model that is not there is refused before kernels are compiled
        if device == "cpu" and dtype == "float32":
            compile_kernels(report)
            rehearse()
        served_as = (directory, dtype, device, activation_dtype, kv_cache_dtype)
        if weights_of is None:
            loaded = load_target(directory, _DTYPES[dtype], device, report, activation_dtype, kv_cache_dtype)
        elif weights_of._loaded is None:
            raise DSparkError(
                "weights_of is an LLM that was closed: give an open one, or leave weights_of out"
            )
        elif weights_of._served_as == served_as:
            loaded = weights_of._loaded
        else:
            raise DSparkError(
                "weights_of is an LLM of another model, device or dtype: give the same, or leave weights_of out"
            )
        self._loaded: LoadedTarget | None = loaded
        self._served_as: tuple[object, ...] = served_as
        self.model, self.tokenizer = str(model), loaded.tokenizer
        drafter, block = build_drafter(drafting, loaded.decoder)

        def prices() -> CostModel:
            if schedule.cost_table is not None:
                belongs_to = fingerprint(loaded.decoder, drafter)
                return read_cost_table(Path(schedule.cost_table), belongs_to, report)
            profile = ensure_profile(
                loaded.decoder, drafter, block.length, max_num_seqs, report, progress=progress
            )
            return profile.cost()

        calibrate, acceptance = serving_calibration(schedule, drafting, loaded.decoder.identity, block.length)
        policy = build_policy(schedule, block.length, prices, report, acceptance)
        self._inbox: dict[str, list[StepEvent]] = {}
        # Whoever changes the engine or an inbox has it; a target's own buffers serve one pass at a time.
        self._turn: threading.RLock = threading.RLock() if weights_of is None else weights_of._turn
        self._engine: Engine | None = Engine(
            loaded.decoder, drafter, policy, loaded.tokenizer, config, calibrate=calibrate
        )

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End what runs, and release the weights (unless another LLM uses them) and the KV pool.

        Streams that are still read, and whatever is asked afterwards, raise DSparkError. Closing again does nothing.
        """
        with self._turn:
            self._inbox.clear()
            self._engine = self._loaded = None

    @property
    def engine(self) -> Engine:
        """What runs the requests.

        Raises:
            DSparkError: the LLM was closed.
        """
        if self._engine is None:
            raise DSparkError("this LLM is closed: make another one")
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_event: Callable[[StepEvent], None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one or several prompts, batched; outputs in the prompts' order.

        A string is raw text, a list of messages goes through the chat template, `{"prompt_token_ids": [...]}`
        is taken as it is. `on_event` sees every step's events (for progress). Where `SamplingParams.n` asks for several
        answers, an output is the first one, and its `outputs` are all of them.
        """
        inputs = [self.encode(prompt) for prompt in as_list(prompts)]
        each: list[SamplingParams]
        if isinstance(params, Sequence) and not isinstance(params, str):
            each = list(params)
        else:
            each = [params or SamplingParams()] * len(inputs)
        for p in each:
            _check_params(p)
        if len(each) != len(inputs):
            raise DSparkError(
                f"{len(inputs)} prompts came with {len(each)} sampling parameters; give one, or one each"
            )
        # All first answers come first: they are the same requests, in the same order, as with n = 1.
        most = max((p.n for p in each), default=0)
        answers = [(i, number) for number in range(most) for i, p in enumerate(each) if number < p.n]
        ids: list[str] = []
        outputs: dict[str, RequestOutput] = {}
        try:
            for i, number in answers:
                ids.append(self._add(inputs[i], each[i].of_answer(number)))
            while missing := [i for i in ids if i not in outputs]:
                self._step(missing[0])
                for event in [e for i in ids for e in self._take(i)]:
                    if event.output is not None:
                        outputs[event.request_id] = event.output
                    if on_event is not None:
                        on_event(event)
        finally:
            self._leave(ids)
        of_prompt: list[list[RequestOutput]] = [[] for _ in inputs]
        for (i, _), request_id in zip(answers, ids, strict=True):
            of_prompt[i].append(outputs[request_id])
        return [replace(first, others=tuple(rest)) for first, *rest in of_prompt]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StepEvent]:
        """Events of one prompt as they happen; closing or dropping the iterator aborts the request.

        Several streams may be read in turn: each gets its own events.
        """
        events = self._events(self._add(self.encode(prompt), params or SamplingParams()))
        next(events)  # into its `try`: from now on it cleans up, read or not
        return events

    def _events(self, request_id: str) -> Iterator[StepEvent]:
        try:
            yield StepEvent(request_id, [], [], "")  # nobody sees it
            while True:
                for event in self._take(request_id):
                    yield event
                    if event.output is not None:
                        return
                self._step(request_id)
        finally:
            self._leave([request_id])

    def _add(self, prompt: list[int], params: SamplingParams) -> str:
        _check_params(params)
        with self._turn:
            request_id = self.engine.add(prompt, params)
            self._inbox[request_id] = []
        return request_id

    def _step(self, awaited: str) -> None:
        """One engine step, if nothing has come for the awaited request; all find their events in their own inboxes.

        Threads take turns, and whoever has the turn works for all of them.
        """
        with self._turn:
            engine = self.engine
            if self._inbox[awaited]:
                return
            if awaited not in engine and not engine.has_unfinished:  # waiting would never end
                raise DSparkError(f"{awaited} was aborted while its output was awaited")
            for event in engine.step():
                if event.request_id in self._inbox:
                    self._inbox[event.request_id].append(event)

    def _take(self, request_id: str) -> list[StepEvent]:
        with self._turn:
            events = self._inbox.get(request_id, [])  # none once the LLM is closed, which the next step says
            self._inbox[request_id] = []
        return events

    def _leave(self, ids: Sequence[str]) -> None:
        """Abort what still runs and forget the inboxes: nothing runs on without a reader."""
        with self._turn:
            for request_id in ids:
                if self._engine is not None:
                    self._engine.abort(request_id)
                self._inbox.pop(request_id, None)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, as `generate` takes it.

        Raises:
            DSparkError: neither text, messages, nor a mapping with token ids.
        """
        return encode_prompt(self.tokenizer, prompt)


def _check_params(params: SamplingParams) -> None:
    if not isinstance(params, SamplingParams):
        raise DSparkError(f"sampling parameters must be SamplingParams(...), got {params!r:.60}")


def _check_device(device: str) -> None:
    """Refuse a device that this torch cannot use."""
    try:
        kind = torch.empty(0, device=device).device.type
    except (RuntimeError, AssertionError, TypeError):
        kind = ""
    if kind not in ("cpu", "cuda"):  # MPS has no float64, which sampling needs
        raise DSparkError(
            f"the device {device!r} is not available here: use cpu, or cuda where PyTorch has it"
        )
