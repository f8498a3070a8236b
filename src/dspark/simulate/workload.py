"""What is asked for: lengths of prompts and answers, and request mixes by domain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from dspark.errors import DSparkError

__all__ = ["Lengths", "Mix", "RequestClass", "RequestPool"]

Shape = Literal["fixed", "uniform", "geometric", "lognormal"]


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts of 1 or more.

    | shape | mean | cv |
    |---|---|---|
    | fixed | the length | unused |
    | uniform | 1 to 2 mean - 1 | unused |
    | geometric | memoryless | unused |
    | lognormal | heavy tail | standard deviation / mean |

    Raises:
        DSparkError: a mean below 1, a cv that is not positive, or no such shape.
    """

    mean: float
    shape: Shape = "fixed"
    cv: float = 1.0

    def __post_init__(self) -> None:
        if self.shape not in ("fixed", "uniform", "geometric", "lognormal"):
            raise DSparkError(
                f"no length distribution {self.shape!r}: fixed, uniform, geometric or lognormal"
            )
        if not np.isfinite(self.mean) or self.mean < 1:
            raise DSparkError(f"a mean length must be 1 or more, got {self.mean}")
        if not np.isfinite(self.cv) or self.cv <= 0:
            raise DSparkError(f"the cv of a length must be above 0, got {self.cv}")

    @staticmethod
    def parse(text: str) -> Lengths:
        """`200`, `uniform:200`, `geometric:200` or `lognormal:200:1.2` (mean, then cv)."""
        parts = text.split(":")
        shape, numbers = (parts[0], parts[1:]) if not _is_number(parts[0]) else ("fixed", parts)
        if not 1 <= len(numbers) <= 2 or not all(_is_number(n) for n in numbers):
            raise DSparkError(f"{text!r} is no length: write 200, geometric:200 or lognormal:200:1.2")
        mean, *cv = (float(n) for n in numbers)
        return Lengths(mean, shape, *cv)  # type: ignore[arg-type]  # checked above in __post_init__

    def sample(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """[count] int64, all 1 or more."""
        if self.shape == "fixed":
            drawn = np.full(count, self.mean)
        elif self.shape == "uniform":
            drawn = rng.integers(1, max(2, int(2 * self.mean)), count).astype(np.float64)
        elif self.shape == "geometric":
            drawn = rng.geometric(1 / self.mean, count).astype(np.float64)
        else:
            variance = np.log1p(self.cv**2)
            drawn = rng.lognormal(np.log(self.mean) - variance / 2, np.sqrt(variance), count)
        return np.maximum(np.rint(drawn), 1).astype(np.int64)


@dataclass(frozen=True)
class RequestClass:
    """Requests of one kind: their domain decides how well they can be drafted."""

    domain: str
    prompt: Lengths
    output: Lengths
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not np.isfinite(self.weight) or self.weight <= 0:
            raise DSparkError(f"the weight of domain {self.domain!r} must be above 0, got {self.weight}")


@dataclass(frozen=True, eq=False)
class RequestPool:
    """N requests; a closed loop that outlives them starts over.

    `domain` indexes `domains`.
    """

    prompt: np.ndarray  # [N] int64 tokens
    output: np.ndarray  # [N] int64 tokens, 1 or more
    domain: np.ndarray  # [N] int64
    domains: tuple[str, ...]

    def __post_init__(self) -> None:
        assert len(self.prompt) == len(self.output) == len(self.domain)
        if not len(self.prompt):
            raise DSparkError("there are no requests: raise the rate or the duration")
        if min(self.prompt.min(), self.output.min()) < 1:
            raise DSparkError("every request needs a prompt and an output of 1 token or more")

    def __len__(self) -> int:
        return len(self.prompt)

    def within(self, max_model_len: int) -> RequestPool:
        """The same requests, cut where the context ends: prompts leave room for one token."""
        prompt = np.minimum(self.prompt, max_model_len - 1)
        return replace(self, prompt=prompt, output=np.minimum(self.output, max_model_len - prompt))


@dataclass(frozen=True)
class Mix:
    """Request classes, drawn independently in proportion to their weights."""

    classes: tuple[RequestClass, ...]

    def __post_init__(self) -> None:
        if not self.classes:
            raise DSparkError("a mix needs at least one class of requests")

    @staticmethod
    def parse(text: str, prompt: Lengths, output: Lengths) -> Mix:
        """`chat` or `chat=0.6,math=0.2,code=0.2`; all classes have the same lengths."""
        classes = []
        for part in text.split(","):
            name, equals, weight = part.partition("=")
            if not name or (equals and not _is_number(weight)):
                raise DSparkError(f"{text!r} is no mix: write chat or chat=0.6,math=0.4")
            classes.append(RequestClass(name, prompt, output, float(weight) if equals else 1.0))
        return Mix(tuple(classes))

    def sample(self, rng: np.random.Generator, count: int) -> RequestPool:
        weights = np.array([c.weight for c in self.classes])
        domains = tuple(dict.fromkeys(c.domain for c in self.classes))
        kind = rng.choice(len(self.classes), size=count, p=weights / weights.sum())
        prompt, output = self._lengths(
            rng, kind, [c.prompt for c in self.classes], [c.output for c in self.classes]
        )
        index = np.array([domains.index(c.domain) for c in self.classes], dtype=np.int64)
        return RequestPool(prompt, output, index[kind], domains)

    @staticmethod
    def _lengths(
        rng: np.random.Generator, kind: np.ndarray, prompts: Sequence[Lengths], outputs: Sequence[Lengths]
    ) -> tuple[np.ndarray, np.ndarray]:
        prompt, output = np.zeros(len(kind), dtype=np.int64), np.zeros(len(kind), dtype=np.int64)
        for k in range(len(prompts)):
            at = np.flatnonzero(kind == k)
            prompt[at], output[at] = prompts[k].sample(rng, len(at)), outputs[k].sample(rng, len(at))
        return prompt, output


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
