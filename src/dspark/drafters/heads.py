"""Sequential heads: a transition bias that makes a parallel block autoregressive (eqs. 4-6).

Each head has one recurrence, `step`. Serving calls it slot by slot; training calls `block`, which runs the
same `step` on teacher-forced tokens (DESIGN seam 7).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark.drafters.config import DrafterConfig

__all__ = ["ConfidenceHead", "GatedMarkovHead", "MarkovHead", "RNNHead", "build_head"]


class MarkovHead(nn.Module):
    """Vanilla Markov head: bias B = W1[x_{k-1}] W2 (eq. 5). Stateless."""

    stateful = False

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.rank = config.markov_rank
        self.w1 = nn.Embedding(config.vocab_size, self.rank)
        self.w2 = nn.Linear(self.rank, config.output_vocab_size, bias=False)

    def initial_state(self, like: Tensor) -> Tensor:
        """s_0 = 0, [..., r] for hidden states [..., H]."""
        return like.new_zeros(*like.shape[:-1], self.rank)

    def step(self, embedded: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """W1[x_{k-1}] [..., r], hidden h_k [..., H], state [..., r] -> (features [..., r], next state).

        The bias is `w2(features)`, [..., Vd].
        """
        del hidden
        return embedded, state

    def block(self, previous: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Teacher-forced block: previous tokens [n, gamma], hidden [n, gamma, H].

        Returns bias [n, gamma, Vd] and the embedded previous tokens [n, gamma, r] (for the confidence head).
        """
        embedded = self.w1(previous)
        if not self.stateful:
            features, _ = self.step(embedded, hidden, self.initial_state(hidden))
            return self.w2(features), embedded
        state, rows = self.initial_state(hidden[:, 0]), []
        for k in range(previous.shape[1]):
            features, state = self.step(embedded[:, k], hidden[:, k], state)
            rows.append(features)
        return self.w2(torch.stack(rows, 1)), embedded


class GatedMarkovHead(MarkovHead):
    """Gated Markov head: g = sigmoid(Wg [h_k; W1[x_{k-1}]]), B = (g * W1[x_{k-1}]) W2."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + self.rank, self.rank)

    def step(self, embedded: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        gate = torch.sigmoid(self.gate_proj(torch.cat((hidden, embedded), -1)))
        return gate * embedded, state


class RNNHead(MarkovHead):
    """RNN head (eq. 6): z = [s; W1[x]; h], s' = g s + (1 - g) tanh(Wc z), B = W2 tanh(Wo z), g = sigmoid(Wg z)."""

    stateful = True

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.joint_proj = nn.Linear(
            2 * self.rank + config.hidden_size, 3 * self.rank
        )  # gate | candidate | out

    def step(self, embedded: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        gate, candidate, out = self.joint_proj(torch.cat((state, embedded, hidden), -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(out), gate * state + (1 - gate) * torch.tanh(candidate)


class ConfidenceHead(nn.Module):
    """Conditional survival of a slot, c_k = sigmoid(w [h_k; W1[x_{k-1}]]) (eq. 7).

    Pre-token: it may read x_{k-1}, never x_k, so a causal schedule may use it.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_with_markov and config.markov_rank > 0
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """hidden [..., H], embedded previous token [..., r] -> logits [...]."""
        x = torch.cat((hidden, embedded), -1) if self.with_markov and embedded is not None else hidden
        return self.proj(x).squeeze(-1)


def build_head(config: DrafterConfig) -> MarkovHead | None:
    """The sequential head that `config` asks for; None for a purely parallel drafter."""
    if not config.markov_rank:
        return None
    return {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RNNHead}[config.markov_head_type](config)
