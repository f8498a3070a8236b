"""Text while it is being generated: nothing leaves before it is final, stop strings are caught at once.

detokenizer, checker = Detokenizer(tokenizer), StopChecker(("\\n\\n",))
for token_id in committed:
    text, stop = checker.push(detokenizer.push([token_id]))
    if stop is not None: ...        # this very token completed the stop string
rest, stop = checker.push(detokenizer.flush())
rest += checker.flush()
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import NamedTuple

from dspark.core import DSparkError
from dspark.target.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopChecker", "StopResult"]


class Detokenizer:
    """Decodes one stream of tokens; the pieces add up to `tokenizer.decode` of all ids.

    Byte-level vocabularies are decoded byte by byte. Others (SentencePiece) decode each new token together
    with the few before it and keep the difference. Both cost O(1) a token, whatever came before.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.is_byte_level else None
        self._context: list[int] = []  # last ids whose text is out: what the next ones are decoded behind
        self._waiting: list[int] = []  # ids whose text may still change

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens complete. An unfinished UTF-8 sequence waits for its next bytes."""
        ids = [i for i in token_ids if i not in self._skipped]
        if self._utf8 is not None:
            return self._utf8.decode(b"".join(self._tokenizer.token_bytes(i) for i in ids))
        return "".join(self._push_windowed(i) for i in ids)

    def flush(self) -> str:
        """What is still held back, with U+FFFD for incomplete bytes; the stream ends here."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        return self._release() if self._waiting else ""

    def _push_windowed(self, token_id: int) -> str:
        token = self._tokenizer.token(token_id)
        if token is None:
            return ""  # `decode` leaves out what the vocabulary lacks: a run of bytes goes on behind it
        self._waiting.append(token_id)
        # NOTE: a run of byte tokens is decoded as one: valid UTF-8, or U+FFFD for every byte of it.
        if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            return ""
        return self._release()

    def _release(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        after = self._tokenizer.decode(self._context + self._waiting, skip_special_tokens=False)
        # The first token of a text may lose its leading space: context keeps the next ones from being first.
        self._context, self._waiting = self._waiting, []
        return after[len(before) :]


class StopResult(NamedTuple):
    """`text` may be shown now; `stop` is the stop string that ended the text, if one did."""

    text: str
    stop: str | None


class StopChecker:
    """Finds the first stop string to be *completed* in a text that arrives in pieces.

    The result does not depend on where the pieces are cut: of several stop strings the one that ends first
    wins, of those that end together the longest. Text that could be the beginning of a stop string is held
    back, unless stop strings are part of the output.

    Args:
        stops: non-empty strings; none means that everything passes.
        include_in_output: let the text end with the stop string rather than before it.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        if isinstance(stops, str) or not all(isinstance(s, str) and s for s in stops):
            raise DSparkError("stop must be a list of non-empty strings")
        self._stops = tuple(stops)
        self._include = include_in_output
        self._reach = max((len(s) for s in self._stops), default=1) - 1  # chars a match can begin back
        self._recent = ""  # the last `_reach` chars or fewer, of which ...
        self._held = 0  # ... so many are not released yet
        self.matched: str | None = None

    def push(self, piece: str) -> StopResult:
        """Take the next piece of text. After a match the text is over: nothing more is released."""
        if self.matched is not None:
            return StopResult("", self.matched)
        if not self._stops:
            return StopResult(piece, None)
        text = self._recent + piece
        released = len(self._recent) - self._held  # chars of `text` that are out already
        match = self._first_completed(text)
        if match is not None:
            end, self.matched = match
            end = end if self._include else end - len(self.matched)
            self._recent, self._held = "", 0
            return StopResult(text[released:end], self.matched)
        held = 0 if self._include else self._possible_prefix(text)
        self._recent = text[max(len(text) - self._reach, 0) :]
        self._held = held
        return StopResult(text[released : len(text) - held], None)

    def flush(self) -> str:
        """Held-back text that turned out to be no stop string, once generation has ended otherwise."""
        text = self._recent[len(self._recent) - self._held :]
        self._held = 0
        return text

    def _first_completed(self, text: str) -> tuple[int, str] | None:
        """(end, stop) of the match with the smallest end, then the longest."""
        found = [(start + len(s), -len(s), s) for s in self._stops if (start := text.find(s)) >= 0]
        return (min(found)[0], min(found)[2]) if found else None

    def _possible_prefix(self, text: str) -> int:
        """Length of the longest end of `text` that begins some stop string."""
        for n in range(min(self._reach, len(text)), 0, -1):
            if any(s.startswith(text[-n:]) for s in self._stops):
                return n
        return 0
