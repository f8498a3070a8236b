"""How far a long job is: a bar of things done, or a line of one's own that is printed now and then off a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

__all__ = ["ShareLine", "StatusLine", "duration", "progress_bar"]


def duration(seconds: float) -> str:
    """Rounded for people: 45 s, 3 min 20 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[..., None]]:
    """A bar on stderr; the function it gives is called behind each of `total` things, with a new title or none."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)

        def advance(title: str | None = None) -> None:
            bar.update(task, advance=1, description=title)

        yield advance


class StatusLine:
    """Shows what `render` returns on stderr while the context lasts.

    Elsewhere than on a terminal, `tick` prints it if the last line is `interval_s` old.
    """

    def __init__(self, render: Callable[[], str], interval_s: float = 30.0) -> None:
        self._render, self._interval = render, interval_s
        self._last = time.monotonic()
        console = Console(stderr=True)
        self._live = (
            Live(
                get_renderable=lambda: Text(render(), no_wrap=True, overflow="ellipsis"),
                console=console,
                refresh_per_second=1,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),  # a redirected stdout must stay one
            )
            if console.is_terminal
            else None
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def tick(self) -> None:
        """Something happened; print the line if it is time to."""
        if self._live is None and time.monotonic() - self._last >= self._interval:
            self._last = time.monotonic()
            print(self._render(), file=sys.stderr, flush=True)


class ShareLine(StatusLine):
    """Shows the share of a piece of work that is done."""

    def __init__(self, title: str) -> None:
        self.share = 0.0
        super().__init__(lambda: f"{title} {'#' * round(20 * self.share):.<20} {self.share:4.0%}")

    def show(self, share: float) -> None:
        """`share` in 0..1 is done."""
        self.share = share
        self.tick()
