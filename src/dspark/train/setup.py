"""From a training configuration to a trainer: data, draft vocabulary, model, warm start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dspark.core import DSparkError
from dspark.drafters.backbone import BlockDrafterModel
from dspark.drafters.checkpoint import load_drafter_model, stored_precision
from dspark.drafters.config import DrafterConfig
from dspark.drafters.model import DrafterModel
from dspark.drafters.models import build_model
from dspark.target.decoder import Decoder
from dspark.target.load import load_decoder
from dspark.target.tokenizer import Tokenizer
from dspark.target.zoo import resolve
from dspark.train.config import TrainConfig
from dspark.train.data import Sequence, load_sequences, read_lines, split
from dspark.train.distributed import Processes, join_processes
from dspark.train.growth import (
    grow_layers,
    grow_vocabulary,
    grow_vocabulary_moments,
    layer_places,
    move_layers,
)
from dspark.train.methods import METHOD_DEFAULTS
from dspark.train.states import own_weights, read_start
from dspark.train.trainer import Trainer
from dspark.train.warm_start import bigram_scores, init_head_from_bigrams, share_embeddings

__all__ = ["build_trainer", "draft_vocabulary", "drafter_config", "token_counts"]

VOCAB_SIZE = 8192  # of a new drafter, unless the configuration says otherwise


def token_counts(sequences: list[Sequence], vocab_size: int) -> torch.Tensor:
    """How often each token occurs in the answers: [V] float32."""
    counts = Counter(t for s in sequences for t in s.token_ids[s.answer_start :])
    out = torch.zeros(vocab_size)
    for token, count in counts.items():
        out[token] = count
    return out


def draft_vocabulary(counts: torch.Tensor, size: int, keep: tuple[int, ...]) -> torch.Tensor:
    """The `size` most frequent tokens (ties: lowest id) and `keep`, in order of id: [Vd] int64."""
    if size >= len(counts):
        return torch.arange(len(counts))
    ranked = counts.clone()
    ranked[list(keep)] = float("inf")
    return torch.sort(ranked, descending=True, stable=True).indices[:size].sort().values


def drafter_config(
    config: TrainConfig, target: Decoder, mask_token_id: int | None, draft_vocab_size: int
) -> DrafterConfig:
    """A drafter whose layers have the target's shape; what `config` leaves open is its method's default."""
    shape, method = target.config, METHOD_DEFAULTS[config.method]
    confidence = method.confidence_head if config.confidence_head is None else config.confidence_head
    return DrafterConfig(
        method=config.method,
        block_size=config.block_size,
        num_layers=config.num_layers or method.num_layers,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        rope_theta=shape.rope_theta,
        max_context=shape.max_context,
        qk_norm=shape.qk_norm,
        attention_bias=shape.attention_bias,
        vocab_size=shape.vocab_size,
        mask_token_id=mask_token_id if method.mask_token else None,
        taps=method.taps(shape.num_layers) if config.taps is None else config.taps,
        markov_rank=config.markov_rank if method.sequential_head else 0,
        markov_head_type=config.markov_head_type,
        confidence_head=confidence,
        draft_vocab_size=draft_vocab_size if draft_vocab_size < shape.vocab_size else None,
        target_identity=target.identity,
        num_speculative_tokens=config.num_speculative_tokens,
    )


def build_trainer(
    config: TrainConfig, report: Callable[[str], None] = print, processes: Processes | None = None
) -> Trainer:
    """Everything ready to `run()`; resumes when the output directory holds a state.

    `processes`: those that share the steps, where the caller has joined them already.
    """
    processes = processes or join_processes(config.device)
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    _check_files(config)
    directory = resolve(config.target)
    tokenizer = Tokenizer(directory)
    if not tokenizer.eos_token_ids:
        raise DSparkError(
            f"{config.target} states no end token: add eos_token_id to its generation_config.json"
        )
    sequences = load_sequences([Path(p) for p in config.data], tokenizer, config.max_length)
    if len(sequences) < 2:
        raise DSparkError("training needs at least two answers; name jsonl files in `data`")
    target = load_decoder(directory, getattr(torch, config.dtype))
    train, held_out = split(sequences, config.held_out, config.seed)
    counts = token_counts(train, target.vocab_size)
    start = _starting_point(Path(config.init_from), target) if config.init_from else None
    start = start and _with_vocabulary(start, config, counts, report)
    vocab, mask = _vocabulary(config, counts, target, tokenizer, start)
    model = build_model(drafter_config(config, target, mask, len(vocab)))
    model.vocab = vocab
    covered = float(counts[model.vocab].sum() / counts.sum())
    report(
        f"{len(train)} sequences, {int(counts.sum())} answer tokens, {100 * covered:.1f}% inside the draft vocabulary"
    )
    share_embeddings(model, target)
    if start is not None and isinstance(model, BlockDrafterModel):
        start = _grown(start, model, target, report)
    trainer = Trainer(config, model, target, train, held_out, processes)
    if config.features != "compute":
        tokens = sum(len(s.token_ids) for s in trainer.features.missing(train))
        size = tokens * trainer.features.bytes_per_token / 1e9
        report(f"features of {tokens} tokens will take {size:.1f} GB more ({config.features})")
    if trainer.resume():
        report(f"resumed at step {trainer.step}")
    elif start is not None:
        trainer.start_from(start, Path(str(config.init_from)))
        place = (
            "the same sequences, from where it stopped" if trainer.order.steps_before else "an epoch begins"
        )
        report(f"goes on from {config.init_from}, {trainer.blocks} blocks so far; {place}")
        if "rounded" in start:
            report(
                f"its weights are rounded to {start['rounded']}, and it has no moments of the optimiser: the state.pt "
                "of the run that made it would go on exactly"
            )
    elif config.warm_start:
        trainer.form.warm_start(target, train)
        _start_head(model, target, tokenizer, counts, config, report)
    return trainer


def _check_files(config: TrainConfig) -> None:
    """Refuse names of files that cannot be read, before anything large is."""
    for path in config.data:
        next(read_lines(Path(path)), None)
    if config.init_from and not Path(config.init_from).exists():
        raise DSparkError(
            f"init_from {config.init_from} does not exist; give a state.pt or a drafter directory"
        )


def _vocabulary(
    config: TrainConfig,
    counts: torch.Tensor,
    target: Decoder,
    tokenizer: Tokenizer,
    start: dict[str, Any] | None,
) -> tuple[torch.Tensor, int]:
    """The draft vocabulary [Vd] and the mask token: those of `start`, or new ones."""
    if start is None:
        mask = tokenizer.encode(config.mask_token)[0] if config.mask_token else _spare_token(counts, target)
        return draft_vocabulary(counts, config.draft_vocab_size or VOCAB_SIZE, target.eos_token_ids), mask
    return start["model"]["vocab"], start["mask_token_id"]


def _spare_token(counts: torch.Tensor, target: Decoder) -> int:
    """A token id that never occurs in the answers, to stand for a masked slot."""
    free = (counts == 0).nonzero().squeeze(1)
    free = free[~torch.isin(free, torch.tensor(target.eos_token_ids))]
    return int(free[0]) if len(free) else 0


def _starting_point(path: Path, target: Decoder) -> dict[str, Any]:
    """What a resume state, or a drafter checkpoint (a directory), gives to start from."""
    if path.is_dir():
        loaded = load_drafter_model(path, target)
        start = {"model": own_weights(loaded), "mask_token_id": loaded.config.mask_token_id}
        precision = stored_precision(path)
        return start if precision is None else {**start, "rounded": precision}
    return read_start(path)


def _with_vocabulary(
    start: dict[str, Any], config: TrainConfig, counts: torch.Tensor, report: Callable[[str], None]
) -> dict[str, Any]:
    """`start` with a draft vocabulary of the size that `config` names: its own, and the most frequent others."""
    own, size = start["model"]["vocab"], config.draft_vocab_size
    if size is None or size == len(own):
        return start
    if size < len(own):
        raise DSparkError(
            f"{config.init_from} drafts from {len(own)} tokens: set draft_vocab_size to that or more, or leave it out"
        )
    vocab = draft_vocabulary(counts, size, tuple(own.tolist()))
    report(f"draft vocabulary grown from {len(own)} to {len(vocab)} tokens")
    moments = grow_vocabulary_moments(start.get("moments", {}), own, vocab)
    return {**start, "model": grow_vocabulary(start["model"], vocab), "moments": moments}


def _grown(
    start: dict[str, Any], model: BlockDrafterModel, target: Decoder, report: Callable[[str], None]
) -> dict[str, Any]:
    """`start` with as many layers as `model` has."""
    grown = grow_layers(start["model"], model, target)
    if len(grown) == len(start["model"]):
        return start
    report(f"new layers between the old ones, up to {model.config.num_layers}")
    moments = move_layers(start.get("moments", {}), layer_places(start["model"], model.config.num_layers))
    return {**start, "model": grown, "moments": moments}


def _start_head(
    model: DrafterModel,
    target: Decoder,
    tokenizer: Tokenizer,
    counts: torch.Tensor,
    config: TrainConfig,
    report: Callable[[str], None],
) -> None:
    """The sequential head, if there is one, starts from the target's bigram table."""
    if model.head is None:
        return
    report("computing the target's bigram table")
    prefix = torch.tensor(tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}]))[-3:]
    seen = counts.nonzero().squeeze(1)  # a token that never occurs starts without a bias
    scores = torch.zeros(target.vocab_size, len(model.vocab), dtype=torch.bfloat16)
    scores[seen] = bigram_scores(target, seen, model.vocab, prefix).cpu()
    share = init_head_from_bigrams(
        model, scores, counts + 0.5, counts[model.vocab.cpu()] + 0.5, config.bigram_strength, config.seed
    )
    report(f"sequential head starts with {100 * share:.0f}% of the bigram table's weight")
