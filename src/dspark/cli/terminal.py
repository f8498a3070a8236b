"""What the verbs print with: consoles, colours of token origins, tables, JSON, one-line figures."""

from __future__ import annotations

import json
import math
import sys
from collections import deque
from typing import Any, NoReturn

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark.core import StepEvent, TokenOrigin
from dspark.target.detokenize import Detokenizer
from dspark.target.tokenizer import Tokenizer

__all__ = [
    "ORIGIN_STYLES",
    "OriginPainter",
    "Output",
    "figure",
    "legend",
    "plain_json",
    "plain_table",
    "write_json",
]

ORIGIN_STYLES: dict[TokenOrigin, str] = {
    "accepted": "green",
    "corrected": "red",
    "bonus": "cyan",
    "plain": "default",
}
ORIGIN_MEANINGS: dict[TokenOrigin, str] = {
    "accepted": "draft that the target accepted",
    "corrected": "the target's own token in place of a rejected draft",
    "bonus": "the target's token behind a fully accepted block",
    "plain": "no draft was verified",
}

Segment = tuple[str, TokenOrigin]


class Output(Console):
    """A console on stdout (or stderr) that prints text as it is and passes a closed pipe on to `main`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, soft_wrap=True, **options)

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError  # rich would end the process itself


class OriginPainter:
    """Splits the text of a request's events by the origin of the tokens it came from.

    Text lags behind tokens (unfinished characters, possible stop strings), so characters of decoded tokens
    queue here until the events' text releases them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._queue: deque[tuple[int, TokenOrigin]] = deque()  # (characters, origin)
        self._last: TokenOrigin = "plain"

    def segments(self, event: StepEvent) -> list[Segment]:
        """The event's text in pieces; they add up to `event.text`."""
        for token_id, origin in zip(event.token_ids, event.origins, strict=True):
            if count := len(self._detokenizer.push([token_id])):
                self._queue.append((count, origin))
        pieces: list[Segment] = []
        rest = event.text
        while rest:
            # The end of a text may hold more than tokens completed: bytes that never became a character.
            count, origin = self._queue.popleft() if self._queue else (len(rest), self._last)
            piece, rest = rest[:count], rest[count:]
            if len(piece) < count:
                self._queue.appendleft((count - len(piece), origin))
            pieces.append((piece, origin))
            self._last = origin
        return pieces


def paint(segments: list[Segment]) -> Text:
    """Segments in the colours of their origins."""
    return Text.assemble(*((text, ORIGIN_STYLES[origin]) for text, origin in segments))


def legend() -> Text:
    """What the colours mean, on one line each."""
    text = Text()
    for origin, meaning in ORIGIN_MEANINGS.items():
        text.append(f"{origin:>10}", ORIGIN_STYLES[origin]).append(f"  {meaning}\n")
    return text


def figure(value: float | None, digits: int = 2) -> str:
    """A number for people, "-" where there is none."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def plain_table(caption: str | None = None) -> Table:
    """A table without lines but the one below its head."""
    return Table(
        box=SIMPLE_HEAD, caption=caption, caption_justify="left", padding=(0, 1, 0, 0), pad_edge=False
    )


def plain_json(value: Any) -> Any:
    """`value` with NaN and infinities as None: JSON has no such numbers."""
    if isinstance(value, dict):
        return {key: plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(value: Any, indent: int | None = None) -> None:
    """One JSON value on stdout."""
    sys.stdout.write(json.dumps(plain_json(value), indent=indent, allow_nan=False) + "\n")
