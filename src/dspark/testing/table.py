"""A target whose every distribution is known: an order-1 model given by a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from dspark.core import DSparkError
from dspark.kv import KVPool, LayerKV
from dspark.target.base import ForwardBatch, TargetOutput

__all__ = ["TableTarget"]

Transform = Callable[[np.ndarray], np.ndarray]  # a probability row [V] as the request's filters leave it


class TableTarget:
    """p(next | last) = table[last]. Implements the `Target` protocol without any KV layer.

    `table` [V, V] holds non-negative rows, normalised here. Logits are float64 log-probabilities, -inf for
    zeros. A tap, whichever layer it names, is the row's token as a one-hot of width V. `forwards` and
    `rows` count passes and rows.

    Raises:
        DSparkError: the table is not square, or a row has no mass.
    """

    def __init__(
        self, table: np.ndarray | torch.Tensor, eos_token_ids: tuple[int, ...] = (), max_context: int = 4096
    ) -> None:
        values = torch.as_tensor(table, dtype=torch.float64)
        if values.ndim != 2 or values.shape[0] != values.shape[1]:
            raise DSparkError(f"the table must be [V, V], got {list(values.shape)}")
        if not bool(((values >= 0).all(-1) & (values.sum(-1) > 0)).all()):
            raise DSparkError("every row of the table must be non-negative and have some mass")
        self.table = values / values.sum(-1, keepdim=True)
        self.vocab_size = self.hidden_size = values.shape[0]
        self.max_context = max_context
        self.eos_token_ids = eos_token_ids
        self.kv_specs: tuple[LayerKV, ...] = ()
        self.dtype = self.kv_dtype = torch.float64
        self.device = torch.device("cpu")
        self.identity = "table"
        self.forwards = 0
        self.rows = 0
        self._logits = self.table.log()
        self._one_hot = torch.eye(self.vocab_size, dtype=torch.float64)

    @staticmethod
    def random(
        vocab_size: int, seed: int = 0, spread: float = 1.0, eos_token_ids: tuple[int, ...] = ()
    ) -> TableTarget:
        """A table of softmaxed normal logits with standard deviation `spread`."""
        generator = torch.Generator().manual_seed(seed)
        logits = spread * torch.randn(vocab_size, vocab_size, generator=generator, dtype=torch.float64)
        return TableTarget(logits.softmax(-1), eos_token_ids)

    def forward(self, batch: ForwardBatch, pool: KVPool, taps: tuple[int, ...] = ()) -> TargetOutput:
        """One pass over ragged rows; see `Target.forward`."""
        self.forwards += 1
        self.rows += batch.num_rows
        last = batch.token_ids if batch.logit_rows is None else batch.token_ids[batch.logit_rows]
        tapped = self._one_hot[batch.token_ids].repeat(1, len(taps)) if taps else None
        return TargetOutput(logits=self._logits[last], taps=tapped)

    def sequence_probability(
        self, last_token: int, tokens: Sequence[int], transform: Transform | None = None
    ) -> float:
        """Probability that `tokens` follow `last_token`, were no sequence ever to stop."""
        rows = self._transformed(transform)
        steps = zip((last_token, *tokens[:-1]), tokens, strict=True) if tokens else ()
        return float(np.prod([rows[a, b] for a, b in steps]))

    def joint_distribution(self, last_token: int, n: int, transform: Transform | None = None) -> np.ndarray:
        """Exact distribution of the next n tokens, [V] * n, were no sequence ever to stop."""
        rows = self._transformed(transform)
        joint = rows[last_token]
        for _ in range(n - 1):
            joint = joint[..., None] * rows
        return joint

    def _transformed(self, transform: Transform | None) -> np.ndarray:
        rows: np.ndarray = self.table.numpy()
        return rows if transform is None else np.stack([transform(row) for row in rows])
