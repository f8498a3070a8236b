"""Watch calls into an engine's parts without changing them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dspark.measure.timing import Clock

__all__ = ["Stopwatch", "Watched"]


class Stopwatch:
    """Seconds spent in named calls since `reset`."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.spent: dict[str, float] = {}

    def reset(self) -> None:
        self.spent = {}

    def watch(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, with its time added to `name`."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            start = self.clock()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent[name] = self.spent.get(name, 0.0) + self.clock() - start

        return watched


class Watched:
    """Stands in for `inner`: calls of `methods` are timed and their last arguments kept, all else is passed on."""

    def __init__(self, inner: Any, methods: Iterable[str], stopwatch: Stopwatch) -> None:
        self._inner = inner
        self._calls = {name: stopwatch.watch(name, getattr(inner, name)) for name in methods}
        self.last: dict[str, tuple[Any, ...]] = {}

    def __getattr__(self, name: str) -> Any:
        if name not in self._calls:
            return getattr(self._inner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.last[name] = args
            return self._calls[name](*args, **kwargs)

        return call
