"""What to collect, and from whom: prompts times temperatures, and the identity of drafter and target."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark.calibrate.collect import Job
from dspark.calibrate.rounds import Answer, Source
from dspark.core import DSparkError, SamplingParams
from dspark.drafters.checkpoint import read_drafter_config
from dspark.drafters.registry import shipped_drafters
from dspark.engine.engine import Engine

__all__ = ["CalibrationPrompt", "drafter_directory", "plan_jobs", "source_of", "weights_identity"]


@dataclass(frozen=True)
class CalibrationPrompt:
    """`messages` in the form chat templates take. Prompts are told apart by `id`."""

    id: str
    domain: str
    messages: Sequence[Mapping[str, str]]


def plan_jobs(
    prompts: Sequence[CalibrationPrompt],
    encode: Callable[[Sequence[Mapping[str, str]]], list[int]],
    temperatures: Sequence[float],
    *,
    samples: int,
    max_tokens: int,
    seed: int,
) -> list[Job]:
    """One answer a prompt and temperature, `samples` of them above 0: a greedy one would only be repeated.

    Each answer has a seed of its own, drawn from `seed` and what it is, so it does not depend on what else is
    asked for.
    """
    if samples < 1:
        raise DSparkError(f"the number of samples must be 1 or more, got {samples}")
    if max_tokens < 2:
        raise DSparkError(f"answers need 2 tokens or more to hold a round with drafts, got {max_tokens}")
    jobs = []
    for temperature in temperatures:
        for prompt in prompts:
            for sample in range(samples if temperature > 0 else 1):
                answer = Answer(prompt.id, prompt.domain, float(temperature), sample)
                params = SamplingParams(
                    temperature=temperature, max_tokens=max_tokens, seed=_seed(seed, answer)
                )
                jobs.append(Job(answer, encode(prompt.messages), params))
    return jobs


def _seed(seed: int, answer: Answer) -> int:
    digest = hashlib.sha256(repr((seed, answer)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # below 2^63


def source_of(engine: Engine, directory: Path, model: str, gamma: int | None = None) -> Source:
    """What an engine's rounds come from; `directory` is its drafter's checkpoint, `gamma` the drafts a round.

    Raises:
        DSparkError: no drafter, or a checkpoint that cannot be read.
    """
    if engine.drafter is None:
        raise DSparkError("there is no drafter, hence nothing to calibrate: choose the method dspark")
    return Source(
        target=model,
        target_identity=engine.target.identity,
        drafter=directory.name,
        drafter_identity=weights_identity(directory),
        gamma=engine.drafter.max_draft if gamma is None else gamma,
        acceptance_rule=engine.config.rule,
        dtype=str(engine.target.dtype).removeprefix("torch."),
    )


def weights_identity(directory: Path) -> str:
    """What tells a drafter's weights from others: a digest of the checkpoint's file.

    Raises:
        DSparkError: it cannot be read.
    """
    try:
        with open(directory / "model.safetensors", "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise DSparkError(f"cannot read the drafter's weights in {str(directory)!r}: {error}") from None


def drafter_directory(path: str | None, target_identity: str) -> Path:
    """The checkpoint at `path`, or the DSpark drafter that is shipped for this target.

    Raises:
        DSparkError: none is shipped.
    """
    if path is not None:
        return Path(path).expanduser()
    for directory in shipped_drafters().values():
        config = read_drafter_config(directory)
        if config.method == "dspark" and config.target_identity == target_identity:
            return directory
    raise DSparkError("no dspark drafter is shipped for this model; give a checkpoint with --drafter PATH")
