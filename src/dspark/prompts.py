"""What may be asked of an `LLM`: text, messages or token ids; one prompt or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dspark.core import DSparkError
from dspark.target.tokenizer import Tokenizer

__all__ = ["Messages", "Prompt", "as_list", "encode_prompt"]

Messages = Sequence[Mapping[str, str]]
Prompt = str | Messages | Mapping[str, Sequence[int]]


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Token ids of one prompt: raw text, messages for the chat template, or ids as they are.

    Raises:
        DSparkError: neither text, messages, nor a mapping with token ids.
    """
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, add_special_tokens=True)
    if isinstance(prompt, Mapping):
        ids = prompt.get("prompt_token_ids")
        whole = isinstance(ids, Sequence | np.ndarray) and all(
            isinstance(i, int | np.integer) and not isinstance(i, bool) for i in ids
        )
        if set(prompt) != {"prompt_token_ids"} or ids is None or not whole:
            raise DSparkError('a prompt given as a mapping must be {"prompt_token_ids": [whole numbers]}')
        return [int(i) for i in ids]
    if isinstance(prompt, Sequence):
        messages = [message for message in prompt if isinstance(message, Mapping)]
        if len(messages) == len(prompt):
            return tokenizer.apply_chat_template(messages)
    raise DSparkError(
        f'a prompt is text, a list of messages or {{"prompt_token_ids": [...]}}, got {prompt!r:.60}'
    )


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tell one prompt (text, messages, ids) from several."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise DSparkError(
            'prompts must be text, messages, {"prompt_token_ids": [...]} or a list of these, '
            f"got {prompts!r:.60}"
        )
    items = list(prompts)
    if items and all(isinstance(m, Mapping) and "role" in m for m in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]
