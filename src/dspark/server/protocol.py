"""OpenAI's requests and responses, as far as they are supported: what is not, is refused by name.

Sampling parameters beyond OpenAI's carry vLLM's names (`top_k`, `min_p`, `repetition_penalty`, `stop_token_ids`, ...).
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dspark.core import DSparkError, RequestOutput, SamplingParams, TokenLogprobs
from dspark.target.tokenizer import Tokenizer

__all__ = ["Asked", "Chat", "Completion", "Reply", "RequestError", "usage"]

_SAMPLING = {
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "min_tokens", "seed", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output",
}  # fmt: skip
_COMMON = _SAMPLING | {
    "stream",
    "stream_options",
    "max_tokens",
    "logit_bias",
    "n",
    "user",
}  # user: changes nothing
_MAX_TOKENS = 16  # of a completion that does not say, as OpenAI has it


class RequestError(DSparkError):
    """A request that cannot be served; `param` names what is wrong with it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Asked:
    """A request, understood. `prompt` is what `LLM.generate` takes."""

    prompt: Any
    params: SamplingParams
    stream: bool
    include_usage: bool


@dataclass(frozen=True)
class Reply:
    """What all responses to one request have in common."""

    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))


class _Endpoint(ABC):
    """Reads requests of one kind, and writes their responses."""

    own: ClassVar[set[str]]  # parameters besides the common ones
    object: str
    prefix: str

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def parse(self, body: Mapping[str, Any]) -> Asked:
        """
        Raises:
            RequestError: a parameter is missing, unknown or not supported, or its value is.
        """
        for name in body:
            if name not in _COMMON | self.own:
                known = ", ".join(sorted(_COMMON | self.own))
                raise RequestError(f"{name} is not supported: leave it out (supported: {known})", name)
        if body.get("n", 1) != 1:
            raise RequestError("n above 1 is not supported: send the request several times", "n")
        stream, options = body.get("stream") or False, body.get("stream_options") or {}
        if not isinstance(stream, bool):
            raise RequestError(f"stream must be true or false, got {stream!r}", "stream")
        if not isinstance(options, Mapping) or set(options) - {"include_usage"}:
            raise RequestError("stream_options may have include_usage and nothing else", "stream_options")
        if options and not stream:
            raise RequestError("stream_options is for streams: set stream, or leave it out", "stream_options")
        wanted = {k: v for k, v in body.items() if k in _SAMPLING and v is not None}
        wanted |= {"max_tokens": self.max_tokens(body), "logit_bias": _bias(body.get("logit_bias"))}
        wanted |= self.logprobs(body)
        try:
            params = SamplingParams(**wanted)
        except DSparkError as error:
            name = str(error).split(" ", 1)[0]
            raise RequestError(str(error), name if name in body else None) from error
        return Asked(self.prompt(body), params, stream, bool(options.get("include_usage")))

    @abstractmethod
    def prompt(self, body: Mapping[str, Any]) -> Any: ...

    def max_tokens(self, body: Mapping[str, Any]) -> int | None:
        return body.get("max_tokens")

    def logprobs(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def whole(self, reply: Reply, output: RequestOutput) -> dict[str, Any]:
        """The response of a request that does not stream."""
        return self.response(reply, self.object, self.choice(output), usage(output))

    def response(self, reply: Reply, kind: str, choice: Any, counted: Any = None) -> dict[str, Any]:
        """`choice` None: a last chunk that has usage alone."""
        entry = {"id": f"{self.prefix}-{reply.id}", "object": kind, "created": reply.created}
        entry |= {"model": reply.model, "choices": [] if choice is None else [{"index": 0, **choice}]}
        return entry if counted is None else {**entry, "usage": counted}

    @abstractmethod
    def choice(self, output: RequestOutput) -> dict[str, Any]: ...

    def opening(self) -> dict[str, Any] | None:
        """The choice that a stream begins with, if any."""
        return None

    @abstractmethod
    def chunk(self, text: str, reason: str | None) -> dict[str, Any]:
        """The choice of a piece of a stream."""
        ...

    @abstractmethod
    def chunk_response(self, reply: Reply, choice: Any, counted: Any = None) -> dict[str, Any]: ...


class Completion(_Endpoint):
    """/v1/completions: raw text or token ids."""

    own: ClassVar = {"prompt"}
    object, prefix = "text_completion", "cmpl"

    def prompt(self, body: Mapping[str, Any]) -> Any:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str) and prompt:
            return prompt
        if isinstance(prompt, list) and prompt and all(type(i) is int for i in prompt):
            return {"prompt_token_ids": prompt}
        raise RequestError("prompt must be one text, or one list of token ids", "prompt")

    def max_tokens(self, body: Mapping[str, Any]) -> int | None:
        return _MAX_TOKENS if body.get("max_tokens") is None else body["max_tokens"]

    def choice(self, output: RequestOutput) -> dict[str, Any]:
        return self.chunk(output.text, output.finish_reason) | {"stop_reason": output.stop_reason}

    def chunk(self, text: str, reason: str | None) -> dict[str, Any]:
        return {"text": text, "logprobs": None, "finish_reason": reason}

    def chunk_response(self, reply: Reply, choice: Any, counted: Any = None) -> dict[str, Any]:
        return self.response(reply, self.object, choice, counted)


class Chat(_Endpoint):
    """/v1/chat/completions: messages through the model's own template."""

    own: ClassVar = {"messages", "max_completion_tokens", "logprobs", "top_logprobs"}
    object, prefix = "chat.completion", "chatcmpl"

    def prompt(self, body: Mapping[str, Any]) -> Any:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise RequestError("messages must be a list of at least one message", "messages")
        return [_message(message) for message in messages]

    def max_tokens(self, body: Mapping[str, Any]) -> int | None:
        newer, older = body.get("max_completion_tokens"), body.get("max_tokens")
        if newer is not None and older is not None:
            raise RequestError("give max_completion_tokens or max_tokens, not both", "max_tokens")
        return older if newer is None else newer

    def logprobs(self, body: Mapping[str, Any]) -> dict[str, Any]:
        wanted, top = body.get("logprobs") or False, body.get("top_logprobs")
        if not isinstance(wanted, bool):
            raise RequestError(f"logprobs must be true or false, got {wanted!r}", "logprobs")
        if wanted and body.get("stream"):
            raise RequestError("logprobs are not supported in streams: leave one of them out", "logprobs")
        if top is not None and not wanted:
            raise RequestError("top_logprobs needs logprobs set to true", "top_logprobs")
        return {"logprobs": top or 0} if wanted else {}

    def choice(self, output: RequestOutput) -> dict[str, Any]:
        content = None if output.logprobs is None else {"content": self._logprobs(output.logprobs)}
        return {
            "message": {"role": "assistant", "content": output.text},
            "logprobs": content,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def opening(self) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def chunk(self, text: str, reason: str | None) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}, "logprobs": None, "finish_reason": reason}

    def chunk_response(self, reply: Reply, choice: Any, counted: Any = None) -> dict[str, Any]:
        return self.response(reply, f"{self.object}.chunk", choice, counted)

    def _logprobs(self, positions: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        return [
            self._token(p.token_id, p.logprob)
            | {"top_logprobs": [self._token(token, value) for token, value in p.top.items()]}
            for p in positions
        ]

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def usage(output: RequestOutput) -> dict[str, Any]:
    """OpenAI's counts; its names for predicted outputs say what became of the drafts."""
    prompt, answer, metrics = len(output.prompt_token_ids), len(output.token_ids), output.metrics
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "completion_tokens_details": {
            "accepted_prediction_tokens": metrics.accepted,
            "rejected_prediction_tokens": metrics.scheduled - metrics.accepted,
        },
    }


def _message(message: Any) -> dict[str, str]:
    """One message with its text in one piece."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError('each of messages must be {"role": ..., "content": ...}', "messages")
    if unknown := set(message) - {"role", "content"}:
        raise RequestError(f"messages with {', '.join(sorted(unknown))} are not supported", "messages")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(map(_text, content))
    if not isinstance(content, str):
        raise RequestError("the content of messages must be text", "messages")
    return {"role": message["role"], "content": content}


def _text(part: Any) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
    raise RequestError("messages may hold text alone", "messages")


def _bias(bias: Any) -> dict[int, float] | None:
    """JSON has no whole numbers for keys."""
    if bias is None:
        return None
    if not isinstance(bias, Mapping) or not all(key.isdecimal() for key in bias):
        raise RequestError("logit_bias must map token ids to numbers", "logit_bias")
    return {int(key): value for key, value in bias.items()}
