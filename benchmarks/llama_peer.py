"""llama.cpp's server inside this process, through the binding xllamacpp: a peer of `cpu_peers`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from peers import fail

NGRAM_KINDS = ("simple", "map_k", "map_k4v", "mod", "cache")


class LlamaPeer:
    """A server with `slots` requests in flight at most, each from a thread of ours.

    Args:
        slot_context: positions of each slot.
        ngram: kind of drafts from n-grams of the text, with llama.cpp's default sizes; None drafts nothing.
    """

    def __init__(self, gguf: Path, threads: int, slots: int, slot_context: int, ngram: str | None) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(gguf)
        params.n_parallel, params.n_ctx = slots, slots * slot_context
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.n_gpu_layers = 0
        params.cache_prompt = False  # every prompt is processed, as by the other peers
        params.cache_ram_mib = 0
        params.verbosity = 0
        if ngram is not None:
            kinds = xllamacpp.common_speculative_type
            params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_NGRAM_{ngram.upper()}")]
        self.server = xllamacpp.Server(params)
        self.facts = {"system": xllamacpp.get_system_info().strip(), "ngram": ngram}
        self.accepted_length: float | None = None

    def decode(self, prompts: list[list[int]], tokens: int, concurrency: int) -> list[list[int]]:
        with ThreadPoolExecutor(concurrency) as pool:
            answers = list(pool.map(lambda prompt: self._complete(prompt, tokens), prompts))
        accepted = sum(answer["timings"].get("draft_n_accepted", 0) for answer in answers)
        ids: list[list[int]] = [answer["tokens"] for answer in answers]
        count = sum(map(len, ids))
        self.accepted_length = count / (count - accepted)  # a token that was no accepted draft ended a round
        return ids

    def _complete(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        request = {
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": False,
        }
        answer = self.server.handle_completions(
            {**request, "cache_prompt": False, "return_tokens": True, "verbose": True}
        )
        if "__verbose" not in answer:
            raise SystemExit(fail(f"llama.cpp refused a prompt: {answer}"))
        return answer["__verbose"]


def gguf_of(model: str) -> Path | None:
    """The GGUF file of a known name or a path."""
    from dspark.target.zoo import known_models

    known = known_models()
    path = known[model].path if model in known else Path(model).expanduser()
    return path if path is not None and path.suffix == ".gguf" and path.is_file() else None
