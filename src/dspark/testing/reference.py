"""Plain decoding from scratch: no cache kept, no batching, sampling parameters spelled out naively.

Slow on purpose. It shares the target's forward pass with the engine and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dspark.core import FinishReason, SamplingParams
from dspark.kv import BlockTable, KVPool
from dspark.target.base import ForwardBatch, Target
from dspark.target.tokenizer import Tokenizer

__all__ = ["FreshPass", "SlowOutput", "filter_row", "fresh_pass", "shape_logits", "slow_generate"]


@dataclass(frozen=True)
class FreshPass:
    """One pass over whole sequences in a pool of its own; request r owns rows start[r] .. start[r + 1]."""

    logits: torch.Tensor  # [N, V]
    taps: torch.Tensor | None  # [N, m * hidden]
    pool: KVPool
    tables: list[BlockTable]
    start: np.ndarray  # [R + 1]

    @property
    def last_logits(self) -> torch.Tensor:
        """[R, V] logits of what follows each sequence."""
        return self.logits[torch.from_numpy(self.start[1:] - 1)]


def fresh_pass(target: Target, sequences: Sequence[Sequence[int]], taps: tuple[int, ...] = ()) -> FreshPass:
    """Run `target` over `sequences` (none empty) as if they had just arrived."""
    lengths = np.array([len(s) for s in sequences], dtype=np.int64)
    block_size = 16
    pool = KVPool(
        target.kv_specs, int((-(-lengths // block_size)).sum()), block_size, target.kv_dtype, target.device
    )
    tables = [BlockTable() for _ in sequences]
    for table, length in zip(tables, lengths, strict=True):
        assert pool.reserve(table, int(length))
    block_tables = np.zeros((len(tables), max(len(t.blocks) for t in tables)), dtype=np.int64)
    for row, table in zip(block_tables, tables, strict=True):
        row[: len(table.blocks)] = table.blocks
    start = np.concatenate(([0], lengths.cumsum()))
    slots = np.concatenate([pool.slots(t, 0, int(n)) for t, n in zip(tables, lengths, strict=True)])
    batch = ForwardBatch(
        token_ids=torch.tensor([t for s in sequences for t in s], device=target.device),
        positions=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])).to(target.device),
        query_start=start,
        context_lens=np.zeros(len(tables), dtype=np.int64),
        block_tables=block_tables,
        slots=torch.from_numpy(slots).to(target.device),
    )
    out = target.forward(batch, pool, taps)
    # A copy: what was computed in inference mode cannot be changed outside of it.
    return FreshPass(out.logits.clone(), out.taps, pool, tables, start)


@dataclass
class SlowOutput:
    """What plain decoding gives. `distributions[i]` [V] is what `token_ids[i]` was chosen from."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason = "length"
    stop_reason: str | int | None = None
    distributions: list[np.ndarray] = field(default_factory=list)


def slow_generate(
    target: Target,
    prompt: Sequence[int],
    params: SamplingParams,
    tokenizer: Tokenizer | None = None,
    max_model_len: int | None = None,
) -> SlowOutput:
    """Decode one request token by token, each from a pass over everything before it.

    At temperature 0 the engine must give these very tokens. Above, only the distribution is the same: draws
    come from a generator seeded with `params.seed`.
    """
    rng = np.random.default_rng(params.seed)
    limit = (max_model_len or target.max_context) - len(prompt)
    limit = limit if params.max_tokens is None else min(limit, params.max_tokens)
    out = SlowOutput()
    while len(out.token_ids) < limit:
        logits = fresh_pass(target, [[*prompt, *out.token_ids]]).last_logits[0].double().cpu().numpy()
        shaped = shape_logits(logits, prompt, out.token_ids, params, target.eos_token_ids)
        p = filter_row(_softmax(shaped), params)
        token = int(shaped.argmax()) if params.greedy else int(rng.choice(len(p), p=p))
        out.token_ids.append(token)
        out.distributions.append(p)
        if _stops(out, token, params, target.eos_token_ids, tokenizer):
            out.finish_reason = "stop"
            return out
    return out


def shape_logits(
    logits: np.ndarray,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    eos_token_ids: Sequence[int],
) -> np.ndarray:
    """Bias, penalties and min_tokens, one token at a time: [V] -> [V]."""
    shaped: np.ndarray = logits.copy()
    for token, bias in (params.logit_bias or {}).items():
        shaped[token] += bias
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        shaped[token] = shaped[token] / factor if shaped[token] > 0 else shaped[token] * factor
    for token in set(output):
        shaped[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    if len(output) < params.min_tokens:
        for token in (*params.stop_ids, *(() if params.ignore_eos else eos_token_ids)):
            shaped[token] = -np.inf
    return shaped


def filter_row(p: np.ndarray, params: SamplingParams) -> np.ndarray:
    """A probability row [V] after temperature (1 for greedy), min-p, top-k and top-p; ties are kept."""
    if params.greedy:
        return p
    kept = np.where(p > 0, p, 0.0) ** (1 / params.temperature)
    kept /= kept.sum()
    kept[kept < params.min_p * kept.max()] = 0
    if params.top_k > 0:
        kept[kept < np.sort(kept)[::-1][min(params.top_k, len(kept)) - 1]] = 0
    if params.top_p < 1:
        kept /= kept.sum()
        order = np.argsort(-kept, kind="stable")
        size = int((np.cumsum(kept[order]) < params.top_p).sum()) + 1
        kept[kept < kept[order[min(size, len(kept)) - 1]]] = 0
    return kept / kept.sum()


def _softmax(logits: np.ndarray) -> np.ndarray:
    e: np.ndarray = np.exp(logits - logits.max())
    return e / e.sum()


def _stops(
    out: SlowOutput,
    token: int,
    params: SamplingParams,
    eos_token_ids: Sequence[int],
    tokenizer: Tokenizer | None,
) -> bool:
    """Whether the last token ends the request; fills in text and stop reason."""
    is_eos = token in eos_token_ids and not params.ignore_eos
    if is_eos or token in params.stop_ids:
        out.stop_reason = None if is_eos else token
        return True
    if tokenizer is None:
        return False
    out.text = tokenizer.decode(out.token_ids)
    # A stop string counts once min_tokens tokens are out; text shown before that is no part of it.
    start = len(tokenizer.decode(out.token_ids[: max(params.min_tokens - 1, 0)]))
    found = [(at + len(s), -len(s), s) for s in params.stop_strings if (at := out.text.find(s, start)) >= 0]
    if not found:
        return False
    end, _, out.stop_reason = min(found)
    out.text = out.text[: end if params.include_stop_str_in_output else end - len(out.stop_reason)]
    return True
