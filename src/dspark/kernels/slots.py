"""The sequential part of a block as steps of a program: slot by slot the Markov head and the choice of tokens.

A token is the argmax of its slot's scores, or drawn from their distribution, at the caller's uniforms (eqs. 4-5).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspark.compilation import compiled
from dspark.kernels.distributions_numba import PARAMETERS
from dspark.kernels.lowbit import LowBitLinear
from dspark.kernels.program import Program
from dspark.kernels.program_numba import CHOOSE
from dspark.kernels.steps import Confidence, Step, choose, gather, product, product_input, width

__all__ = ["ChainOutput", "Draws", "HeadWeights", "SlotChain", "compile_loop"]


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """What makes tokens of hidden states, and rows of tokens.

    `embedding`: a packed layer whose rows are the embeddings, None where the caller looks them up.
    `vocab` [Vd] maps draft ids to the target's, None: they are the same. `w1` [V, r] and `w2`: the Markov head's,
    None without one. `confidence`: weight [H + r] (or [H]) and bias. `chained` is False for a head with more to it:
    then there are logits and no tokens.
    """

    lm_head: LowBitLinear
    embedding: LowBitLinear | None = None
    vocab: Tensor | None = None
    w1: Tensor | None = None
    w2: LowBitLinear | None = None
    confidence: tuple[Tensor, float] | None = None
    chained: bool = True


@dataclass(frozen=True, eq=False)
class Draws:
    """How A requests draw: parameters [A, 4] float64 (see `distributions`); uniforms [A, width] float64 in [0, 1)."""

    parameters: np.ndarray
    uniforms: Tensor

    def __post_init__(self) -> None:
        assert self.parameters.dtype == np.float64
        assert self.uniforms.dtype == torch.float64
        assert self.parameters.flags.c_contiguous
        assert self.uniforms.is_contiguous()


@dataclass(frozen=True, eq=False)
class ChainOutput:
    """What a chain chose, the caller's to keep: tokens [A, width] with their confidence logits [A, width], which slots
    past a length go on with, and where tokens were drawn the very array they were drawn from, [A, width, Vd]."""

    tokens: Tensor
    confidence: Tensor | None
    probs: Tensor | None


class SlotChain:
    """Steps of all slots, and their memory for so many requests.

    Args:
        hidden, logits: what the program leaves of the blocks' rows, [n, H] and [n, Vd or more].
    """

    def __init__(self, head: HeadWeights, slots: int, requests: int, hidden: Tensor, logits: Tensor) -> None:
        self.head, self.hidden, self.logits = head, hidden, logits
        # Row 0 of `tokens` holds the anchors; `index` names each slot's row of the logits.
        self.tokens = torch.zeros(slots + 1, requests, dtype=torch.int64)
        self.index = torch.zeros(slots, requests, dtype=torch.int64)
        self.confidence = torch.empty(slots, requests)
        # The same memory: each round sets and copies it, and NumPy takes half as long for so few numbers.
        self._tokens, self._index, self._confidence = (
            tensor.numpy() for tensor in (self.tokens, self.index, self.confidence)
        )
        self._draws: Draws | None = None  # alive until the program has read them
        self._probs: Tensor | None = None
        if head.w2 is not None:  # slots follow each other and share this memory
            self._embedded = product_input(head.w2, requests)
            self._bias = torch.empty(requests, width(head.w2))

    def steps(self, k: int) -> list[Step]:
        """Those of slot k."""
        head, steps, bias = self.head, [], None
        if head.w1 is not None and head.w2 is not None:
            (embedded, codes), bias = self._embedded, self._bias
            out = embedded if codes is None else None
            steps = [gather(head.w1, self.tokens[k], out, codes), product(head.w2, embedded, bias)]
        confidence = None
        if head.confidence is not None:
            weight, offset = head.confidence
            embedding = head.w1 if len(weight) > self.hidden.shape[1] else None
            confidence = Confidence(
                weight, offset, self.hidden, embedding, self.tokens[k], self.confidence[k]
            )
        choice = choose(
            self.logits,
            head.lm_head.out_features,
            self.index[k],
            self.tokens[k + 1],
            bias,
            head.vocab,
            confidence,
        )
        return [*steps, choice]

    def bind(self, program: Program) -> None:
        """The program that has these steps, whose choices `load` sets."""
        self._records, self._choices = program.steps, program.of_kind(CHOOSE)

    def load(self, lengths: np.ndarray, anchors: np.ndarray, draws: Draws | None) -> None:
        """Set what the steps read: blocks of `lengths` [A], their anchors [A]; greedy without draws."""
        requests, slots = len(lengths), int(lengths.max())
        _set_blocks(self._tokens, self._index, lengths, anchors)
        self._draws, self._probs = draws, None
        steps, choices = self._records, self._choices[:slots]
        steps["probs"][choices] = 0
        if draws is None:
            return
        assert draws.uniforms.shape == (requests, slots)
        assert draws.parameters.shape == (requests, PARAMETERS)
        size = self.head.lm_head.out_features
        self._probs = probs = torch.empty(requests, slots, size)  # new each time: the caller keeps it
        steps["probs"][choices] = probs.data_ptr() + 4 * size * np.arange(slots)
        steps["probs_step"][choices] = slots * size
        steps["parameters"][choices] = draws.parameters.ctypes.data
        steps["uniform"][choices] = draws.uniforms.data_ptr() + 8 * np.arange(slots)
        steps["uniform_step"][choices] = slots

    def output(self, slots: int, requests: int) -> ChainOutput:
        """What became of the blocks that were loaded."""
        tokens = torch.from_numpy(self._tokens[1 : slots + 1, :requests].T.copy())
        confidence = None
        if self.head.confidence is not None:
            confidence = torch.from_numpy(self._confidence[:slots, :requests].T.copy())
        probs, self._probs = self._probs, None
        return ChainOutput(tokens, confidence, probs)


def compile_loop() -> None:
    """Compile now rather than at the first call."""
    one, none = np.ones(1, dtype=np.int64), np.zeros((1, 1), dtype=np.int64)
    _set_blocks(none, none, one, one)


@compiled
def _set_blocks(tokens: np.ndarray, index: np.ndarray, lengths: np.ndarray, anchors: np.ndarray) -> None:
    """Blocks of A requests into a chain's `tokens` and `index`; slots past a length repeat its last row."""
    first = 0
    for a in range(len(lengths)):
        tokens[0, a] = anchors[a]
        for k in range(len(index)):
            index[k, a] = first + min(k, lengths[a] - 1)
        first += lengths[a]
