"""Training configuration: a TOML file, overridden by `key=value`."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.core import DSparkError
from dspark.drafters.methods import TRAINED
from dspark.typed import check_fields

__all__ = ["TrainConfig"]

_CHOICES = {
    "method": TRAINED,
    "dtype": ("float32", "bfloat16"),
    "features": ("compute", "memory", "disk"),
    "device": ("auto", "cpu", "cuda"),
}
_COUNTS = (
    "block_size", "num_layers", "steps", "sequences_per_step", "anchors_per_sequence", "accumulate", "max_length",
    "draft_vocab_size", "num_speculative_tokens", "eval_every", "save_every", "threads",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything a run depends on. Unknown keys are refused.

    `method`: dspark, dflash, eagle3 or mtp; `num_layers`, `taps` and `confidence_head` default to what suits it
    and the target's depth (`METHOD_DEFAULTS`), `block_size` is the longest block or chain. `steps` steps of
    `sequences_per_step` sequences with up to `anchors_per_sequence` anchors each, which all processes share; each
    works through its own in `accumulate` parts: the same step in less memory. `dtype` is the precision of the
    target's features and of the products ("bfloat16" or "float32"); weights and the optimiser stay float32.
    `features`: "compute" the target's features whenever they are needed, keep them in "memory", or on "disk" in
    `feature_dir` (by default `output`/features), where later runs find them. `device`: "auto" (a GPU where there is
    one), "cpu" or "cuda". `init_from`: start from the weights, vocabulary and mask token of a resume state
    or a drafter. `draft_vocab_size`: None means that drafter's, or 8192 where there is none. `tensorboard`: write its
    event files beside log.jsonl.
    """

    target: str = "smollm2-135m"
    data: tuple[str, ...] = ()
    output: str = "runs/dspark"
    method: str = "dspark"
    block_size: int = 7
    num_layers: int | None = None
    taps: tuple[int, ...] | None = None
    markov_rank: int = 64
    markov_head_type: str = "vanilla"
    confidence_head: bool | None = None
    num_speculative_tokens: int | None = None
    draft_vocab_size: int | None = None
    mask_token: str | None = None
    warm_start: bool = True
    bigram_strength: float = 0.7
    max_length: int = 1024
    held_out: float = 0.04
    steps: int = 4000
    sequences_per_step: int = 8
    anchors_per_sequence: int = 48
    accumulate: int = 1
    lr: float = 6e-4
    head_lr_scale: float = 1.0
    min_lr_share: float = 0.05
    warmup: float = 0.04
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    kl: float = 0.0
    regression: float = 0.0
    decay: float = 4.0
    dtype: str = "bfloat16"
    features: str = "compute"
    feature_dir: str | None = None
    eval_every: int = 250
    save_every: int = 250
    seed: int = 0
    threads: int | None = None
    device: str = "auto"
    init_from: str | None = None
    tensorboard: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "training option")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise DSparkError(
                    f"training option {name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}"
                )
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DSparkError(f"training option {name} must be 1 or more, got {value}")
        for name in ("lr", "max_grad_norm", "decay"):
            if getattr(self, name) <= 0:
                raise DSparkError(f"training option {name} must be above 0, got {getattr(self, name)}")
        for name in ("ce", "l1", "confidence", "kl", "regression", "weight_decay", "head_lr_scale"):
            if getattr(self, name) < 0:
                raise DSparkError(f"training option {name} must be 0 or more, got {getattr(self, name)}")
        for name in ("held_out", "warmup", "min_lr_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise DSparkError(f"training option {name} must lie in [0, 1], got {getattr(self, name)}")
        if self.markov_rank < 0:
            raise DSparkError(f"training option markov_rank must be 0 or more, got {self.markov_rank}")
        if self.accumulate > self.sequences_per_step:
            raise DSparkError(
                f"training option accumulate must be at most sequences_per_step ({self.sequences_per_step}), "
                f"got {self.accumulate}"
            )

    @staticmethod
    def load(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
        """Read a TOML file; `overrides` are `key=value` with TOML values (bare words are strings).

        Raises:
            DSparkError: unreadable file, unknown key, wrong type.
        """
        try:
            values = tomllib.loads(path.read_text("utf-8"))
        except OSError as error:
            raise DSparkError(f"cannot read training config {path}: {error.strerror}") from error
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise DSparkError(f"{path} is not valid TOML: {error}") from error
        for item in overrides:
            key, separator, text = item.partition("=")
            if not separator:
                raise DSparkError(f"--set takes key=value, got {item!r}")
            values[key.strip()] = _parse(text.strip())
        return TrainConfig.of(values)

    @staticmethod
    def of(values: dict[str, Any]) -> TrainConfig:
        known = {f.name for f in dataclasses.fields(TrainConfig)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise DSparkError(f"unknown training option {unknown[0]!r}; known: {', '.join(sorted(known))}")
        clean: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return TrainConfig(**clean)

    def lr_at(self, step: int) -> float:
        """The learning rate: linear warm-up over a share of the steps, cosine decay to a share of `lr`."""
        warm = max(1, round(self.warmup * self.steps))
        if step < warm:
            return self.lr * (step + 1) / warm
        progress = min(1.0, (step - warm) / max(1, self.steps - warm))
        return self.lr * (
            self.min_lr_share + (1 - self.min_lr_share) * 0.5 * (1 + math.cos(math.pi * progress))
        )

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _parse(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text
