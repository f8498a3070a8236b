"""The one routine that decides where a chunk of committed tokens ends a request.

Ids, text, finish reason and stop reason come from here alone, so a chunk of several tokens ends exactly where
plain decoding would have.
"""

from __future__ import annotations

from collections.abc import Sequence

from dspark.core import DSparkError, Request
from dspark.target.detokenize import Detokenizer, StopChecker
from dspark.target.tokenizer import Tokenizer

__all__ = ["OutputStream"]


class OutputStream:
    """Text and end of one request.

    Raises:
        DSparkError: stop strings without a tokenizer.
    """

    def __init__(self, request: Request, eos_token_ids: tuple[int, ...], tokenizer: Tokenizer | None) -> None:
        if request.params.stop and tokenizer is None:
            raise DSparkError(
                "stop strings need a tokenizer; use stop_token_ids, or give the engine a tokenizer"
            )
        self.request = request
        self.eos = frozenset(() if request.params.ignore_eos else eos_token_ids)
        self.stop_ids = frozenset(request.params.stop_ids)
        self.text = ""
        self._detokenizer = Detokenizer(tokenizer) if tokenizer is not None else None
        self._stops = StopChecker(request.params.stop_strings, request.params.include_stop_str_in_output)

    def commit(self, tokens: Sequence[int]) -> tuple[int, str]:
        """Append tokens to the request up to its end.

        Returns how many were kept and the text that became final; sets finish and stop reason on the request.
        """
        released, request = [], self.request
        kept = 0
        for token in tokens:
            kept += 1
            request.token_ids.append(token)
            released.append(self._advance(token))
            if request.finished:
                released.append(self._flushed())
                break
        text = "".join(released)
        self.text += text
        return kept, text

    def _advance(self, token: int) -> str:
        request = self.request
        if token in self.stop_ids or token in self.eos:
            # min_tokens masks these until enough tokens are out, so one that occurs ends the request.
            request.finish_reason = "stop"
            request.stop_reason = token if token in self.stop_ids and token not in self.eos else None
            if self._detokenizer is None or not request.params.include_stop_str_in_output:
                return ""
            return self._detokenizer.push([token])
        piece = self._detokenizer.push([token]) if self._detokenizer is not None else ""
        if request.num_output >= request.params.min_tokens:
            piece, stop = self._stops.push(piece)
            if stop is not None:
                request.finish_reason, request.stop_reason = "stop", stop
                return piece
        if request.remaining <= 0:
            request.finish_reason = "length"
        return piece

    def flush(self) -> str:
        """End from outside (an abort): release the text held back for a possible continuation."""
        text = self._flushed()
        self.text += text
        return text

    def _flushed(self) -> str:
        if self._stops.matched is not None or self._detokenizer is None:
            return ""
        piece, stop = self._stops.push(self._detokenizer.flush())
        if stop is not None:
            self.request.finish_reason, self.request.stop_reason = "stop", stop
            return piece
        return piece + self._stops.flush()
