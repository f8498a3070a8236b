"""Start a drafter from what the target already knows.

Draft layers copy the target's last layers and read context aligned with them; the sequential head starts as a
low-rank factorisation of the target's own bigram table.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.core import DSparkError
from dspark.drafters.backbone import BlockDrafterModel
from dspark.drafters.eagle3 import Eagle3Model
from dspark.drafters.model import DrafterModel
from dspark.drafters.mtp import MTPModel
from dspark.target.decoder import Decoder
from dspark.target.layer import DecoderLayer
from dspark.train.data import Sequence

__all__ = [
    "bigram_scores",
    "copy_into_eagle3",
    "copy_into_mtp",
    "copy_last_layers",
    "init_head_from_bigrams",
    "layer_state",
    "share_embeddings",
]

FIT_ROWS = 4  # for each of the inputs of a linear fit
FIT_RIDGE = 0.01  # of the inputs' mean square


def share_embeddings(model: DrafterModel, target: Decoder) -> None:
    """Embedding and LM head are the target's rows, frozen (section 2 of the algorithm)."""
    model.embed.weight.data = target.embed.weight.detach().float()
    model.lm_head.weight.data = target.lm_head.weight.detach().float()[model.vocab]
    model.embed.requires_grad_(False)
    model.lm_head.requires_grad_(False)


def copy_last_layers(model: BlockDrafterModel, target: Decoder) -> None:
    """Copy the target's last layers and final norm; make the last tap the context.

    A target layer computes keys from its normed input. Folding that norm's gain into the q/k/v weights lets one
    context norm with gain 1 serve all draft layers: with the last tap right before a copied layer, that layer's
    context keys and values start as exactly the target's.
    """
    config = model.config
    if config.num_layers > len(target.layers):
        raise DSparkError(
            f"warm start copies {config.num_layers} layers, the target has {len(target.layers)}: lower num_layers"
        )
    for i, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        state = layer_state(model, target, i - config.num_layers)
        state["qkv_proj.weight"] *= state["input_norm.weight"]
        state["input_norm.weight"] = torch.ones_like(state["input_norm.weight"])
        layer.load_state_dict(state)
    model.norm.weight.data = target.norm.weight.detach().float().clone()
    model.hidden_norm.weight.data.fill_(1.0)
    hidden = config.hidden_size
    model.fc.weight.data.normal_(std=1e-3)
    model.fc.weight.data[:, -hidden:] += torch.eye(hidden, device=model.fc.weight.device)


@torch.no_grad()
def copy_into_eagle3(model: Eagle3Model, target: Decoder) -> None:
    """Copy the target's last layer and final norm: it reads the token and the last tap alike, each in its half."""
    state = layer_state(model, target, -1)
    state["qkv_proj.weight"] = state["qkv_proj.weight"].repeat(1, 2) / 2
    state["hidden_norm.weight"] = state["input_norm.weight"].clone()
    model.layer.load_state_dict(state)
    model.norm.weight.data = target.norm.weight.detach().float().clone()
    hidden = model.config.hidden_size
    model.fc.weight.data.normal_(std=1e-3)
    model.fc.weight.data[:, -hidden:] += torch.eye(hidden, device=model.fc.weight.device)


@torch.no_grad()
def copy_into_mtp(model: MTPModel, target: Decoder, sequences: Seq[Sequence]) -> None:
    """Copy the target's last layer and final norm, and fit what enters it on some of `sequences`.

    The row of position t predicts what the target predicts at t + 1, so the copied layer should read what the
    target's last layer reads there: `proj` starts as the best linear estimate of that from the state at t and the
    token at t + 1.

    NOTE: their plain sum will not do. It has a norm of about 1 an entry where the layer was trained on tens, so what
    the layer adds would drown it; and the state at t says what the token at t + 1 is, which is known already.
    """
    model.layer.load_state_dict(layer_state(model, target, -1))
    model.norm.weight.data = target.norm.weight.detach().float().clone()
    for norm in (model.hidden_norm, model.embed_norm):
        norm.weight.data.fill_(1.0)
    model.proj.weight.copy_(_fit_last_input(model, target, sequences))


def _fit_last_input(model: MTPModel, target: Decoder, sequences: Seq[Sequence]) -> Tensor:
    """Ridge regression of the last layer's input on `model.join` of the position before: [H, 2 * H].

    Rows weigh by the inverse square of their norm: the first positions of a sequence are many times larger.
    """
    hidden, device = model.config.hidden_size, target.device
    taps = (model.config.taps[0], len(target.layers) - 2)
    gram = torch.zeros(2 * hidden, 2 * hidden, dtype=torch.float64, device=device)
    cross = torch.zeros(2 * hidden, hidden, dtype=torch.float64, device=device)
    rows = 0
    for sequence in sequences:
        ids = torch.tensor(sequence.token_ids, device=device)
        state, wanted = target.hidden_states(ids[None], taps)[0][0].float().split(hidden, -1)
        x, wanted = model.join(ids[1:], state[:-1]), wanted[1:]
        weighted = x / wanted.square().mean(-1, keepdim=True).clamp(min=1e-9)
        gram += weighted.T @ x
        cross += weighted.T @ wanted
        rows += len(x)
        if rows >= FIT_ROWS * 2 * hidden:
            break
    gram.diagonal().add_(FIT_RIDGE * gram.diagonal().mean())
    return torch.linalg.solve(gram, cross).T.float()


def layer_state(model: DrafterModel, target: Decoder, index: int) -> dict[str, Tensor]:
    """Weights of the target's layer `index`, float32.

    Raises:
        DSparkError: the drafter's layers have another shape.
    """
    own, theirs = model.config.layer_config, target.config
    names = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "qk_norm")
    differs = [n for n in (*names, "attention_bias") if getattr(own, n) != getattr(theirs, n)]
    if differs:
        raise DSparkError(
            f"warm start needs a drafter with the target's layer shape, {differs[0]} differs; set warm_start=false"
        )
    return {k: v.detach().float().clone() for k, v in target.layers[index].state_dict().items()}


@torch.no_grad()
def bigram_scores(target: Decoder, tokens: Tensor, vocab: Tensor, prefix: Tensor, chunk: int = 512) -> Tensor:
    """The target's centred log-probabilities of `vocab` right behind each token: [len(tokens), Vd].

    Tokens stand behind `prefix`: the first position of a sequence behaves oddly (attention sink).
    """
    rows = []
    tokens, prefix = tokens.to(target.device), prefix.to(target.device)
    for part in tokens.split(chunk):
        ids = torch.cat((prefix.expand(len(part), -1), part[:, None]), 1)
        _, hidden = target.hidden_states(ids, ())
        logits = F.linear(hidden[:, -1], target.lm_head.weight[vocab]).float()
        rows.append(logits.log_softmax(-1).clamp(min=-16.0).to(torch.bfloat16))
    scores = torch.cat(rows)
    mean = scores.float().mean(0, keepdim=True)
    return scores.sub_(mean.to(scores.dtype))


@torch.no_grad()
def init_head_from_bigrams(
    model: DrafterModel,
    scores: Tensor,
    row_weight: Tensor,
    column_weight: Tensor,
    strength: float,
    seed: int,
) -> float:
    """W1 W2 = weighted rank-r approximation of `strength * scores` [V, Vd] (randomised SVD).

    `row_weight` [V] and `column_weight` [Vd] say how much a previous and a next token matter (their
    frequencies, smoothed): the rank is spent where tokens occur. `scores` is overwritten.

    Returns the share of the weighted table's variance that the rank captures.
    """
    head = model.head
    if head is None:
        return 0.0
    rows, columns = row_weight.sqrt(), column_weight.sqrt()
    table = scores.mul_(rows[:, None].to(scores.dtype)).mul_(columns.to(scores.dtype))
    generator = torch.Generator().manual_seed(seed)
    sketch = torch.randn(table.shape[1], head.rank + 16, generator=generator)
    for _ in range(3):  # power iterations
        basis = torch.linalg.qr((table @ sketch.to(table.dtype)).float()).Q
        sketch = torch.linalg.qr((table.T @ basis.to(table.dtype)).float()).Q
    basis = torch.linalg.qr((table @ sketch.to(table.dtype)).float()).Q  # [V, r + 16]
    small = (basis.T.to(table.dtype) @ table).float()  # [r + 16, Vd]
    u, s, vh = torch.linalg.svd(small, full_matrices=False)
    root = (s[: head.rank] * strength).sqrt()
    w1 = basis @ u[:, : head.rank] * root / rows[:, None]
    w2 = vh[: head.rank].T * root / columns[:, None]
    scale = (w2.square().mean().sqrt() / w1.square().mean().sqrt()).sqrt()  # equal magnitude on both sides
    head.w1.weight.copy_(w1 * scale)
    head.w2.weight.copy_(w2 / scale)
    total = sum(float(part.float().square().sum()) for part in table.split(4096))
    return float(s[: head.rank].square().sum()) / total
