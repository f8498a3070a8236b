"""Attention of many blocks of several sequences at once, each over its sequence's context and its own rows."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

__all__ = ["attend_blocks"]


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    anchors: Tensor,
    seq_lens: Seq[int],
    counts: Seq[int],
) -> Tensor:
    """Rows of n blocks see the context strictly before their anchor, and all given rows of their block.

    Args:
        q: [n * rows, h, d], block by block.
        k, v: [n * width, kvh, d]: the blocks' own rows; width 0 is fine, and need not equal q's.
        keys, values: [T, kvh, d] context of all sequences, end to end.
        anchors: [n] position of each anchor in its sequence.
        seq_lens, counts: context length of each sequence, and how many of the blocks are its own.

    Returns:
        [n * rows, h, d].
    """
    total = max(1, len(anchors))
    rows, width = len(q) // total, len(k) // total
    outs, block, at = [], 0, 0
    for length, count in zip(seq_lens, counts, strict=True):
        if count:
            mine, own = (
                slice(block * rows, (block + count) * rows),
                slice(block * width, (block + count) * width),
            )
            where = anchors[block : block + count]
            context = slice(at, at + int(where.max()))  # nothing behind the last anchor is visible
            outs.append(_attend_sequence(q[mine], k[own], v[own], keys[context], values[context], where))
        block, at = block + count, at + length
    return torch.cat(outs) if outs else q


def _attend_sequence(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, anchors: Tensor
) -> Tensor:
    """Blocks of one sequence. Two score parts share one softmax, so no block x block mask is materialised."""
    kv_heads, groups, d = k.shape[1], q.shape[1] // k.shape[1], q.shape[2]
    a, visible = len(anchors), len(keys)
    rows, width = len(q) // a, len(k) // a
    q = (q * d**-0.5).unflatten(1, (kv_heads, groups)).permute(1, 2, 0, 3)  # [kvh, g, a * rows, d]
    to_context = q.flatten(1, 2) @ keys.permute(1, 2, 0)  # [kvh, g * a * rows, S]
    blocks = q.reshape(kv_heads, groups, a, rows, d).transpose(1, 2).flatten(2, 3)  # [kvh, a, g * rows, d]
    k_blocks = k.unflatten(0, (a, width)).permute(2, 0, 3, 1)  # [kvh, a, d, width]
    to_block = (blocks @ k_blocks).unflatten(2, (groups, rows)).transpose(1, 2)  # [kvh, g, a, rows, width]
    hidden_from = torch.arange(visible, device=q.device) >= anchors[:, None]  # [a, S]
    to_context = to_context.view(kv_heads, groups, a, rows, visible)
    to_context = to_context.masked_fill(hidden_from[:, None], float("-inf"))
    wide = torch.promote_types(v.dtype, torch.float32)
    p = torch.cat((to_context, to_block), -1).softmax(-1, dtype=wide).to(v.dtype)
    p_context, p_block = p.split((visible, width), -1)
    out = p_context.reshape(kv_heads, groups * a * rows, visible) @ values.transpose(
        0, 1
    )  # [kvh, g * a * rows, d]
    out = out.view(kv_heads, groups, a * rows, d)
    if width:
        p_block = p_block.transpose(1, 2).flatten(2, 3)  # [kvh, a, g * rows, width]
        v_blocks = v.unflatten(0, (a, width)).permute(2, 0, 1, 3)  # [kvh, a, width, d]
        within = (p_block @ v_blocks).unflatten(2, (groups, rows)).transpose(1, 2)  # [kvh, g, a, rows, d]
        out = out + within.reshape(kv_heads, groups, a * rows, d)
    return out.permute(2, 0, 1, 3).flatten(1, 2)  # [a * rows, h, d]
