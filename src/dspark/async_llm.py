"""Online generation: requests come and go while one thread steps the engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeVar

from dspark.core import DSparkError, RequestOutput, SamplingParams, StepEvent
from dspark.llm import LLM, Prompt

__all__ = ["AsyncLLM", "OverloadedError"]

Result = TypeVar("Result")
Watcher = Callable[[Sequence[StepEvent]], None]

_log = logging.getLogger("dspark")


class OverloadedError(DSparkError):
    """As many requests wait as may: try again later."""


class AsyncLLM:
    """An LLM for asyncio programs: every request runs in the same batch, from the round after it came.

    >>> async with AsyncLLM(LLM("smollm2-135m", speculative_config={"method": "dspark"})) as llm:
    ...     async for event in llm.stream("Once upon a time", SamplingParams(max_tokens=64)):
    ...         print(event.text, end="")

    Args:
        llm: belongs to this object from here on, and is closed with it; its own `generate` and `stream` are not to be
            used beside it.
        max_waiting: requests that may wait for a place in the batch; None: any number.
        watcher: is told every step's events, in the engine's thread, before the requests are.
    """

    def __init__(self, llm: LLM, max_waiting: int | None = None, watcher: Watcher | None = None) -> None:
        if max_waiting is not None and max_waiting < 0:
            raise DSparkError(f"max_waiting must be 0 or more, got {max_waiting}")
        self.llm, self.max_waiting, self._watcher = llm, max_waiting, watcher
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._deliver: dict[
            str, Callable[[StepEvent], object]
        ] = {}  # by request, into its reader's event loop
        self._numbers = itertools.count()
        self._open, self._gate = (
            True,
            threading.Lock(),
        )  # nothing is asked of the thread once it is told to end
        self._thread = threading.Thread(target=self._run, name="dspark-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort what runs (its readers get an output with the reason "abort"), end the thread, close the LLM."""
        with self._gate:
            if not self._open:
                return
            self._open = False
            self._commands.put(lambda: None)  # wakes it
        self._thread.join()
        self.llm.close()

    @property
    def healthy(self) -> bool:
        """Open, and its thread at work."""
        return self._open and self._thread.is_alive()

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self.llm.engine.scheduler.running) if self._open else 0

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place in it."""
        return len(self.llm.engine.scheduler.waiting) if self._open else 0

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestOutput:
        """The whole answer to one prompt, as `LLM.generate` takes it. Cancelling aborts the request.

        Raises:
            OverloadedError: too many requests wait.
            DSparkError: what `LLM.generate` refuses, or closed.
        """
        async for event in self.stream(prompt, params):
            if event.output is not None:
                return event.output
        raise AssertionError("a stream ends with an output")

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncGenerator[StepEvent, None]:
        """Events of one prompt as they happen; the last one has the output. See `generate`.

        The request is queued when the first event is asked for. Closing the generator, or cancelling its task, aborts
        it.
        """
        ids, loop = self.llm.encode(prompt), asyncio.get_running_loop()
        events: asyncio.Queue[StepEvent] = asyncio.Queue()
        request_id = f"async-{next(self._numbers)}"

        def deliver(event: StepEvent) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        try:  # whoever is cancelled while the request is on its way takes it along, too
            await self._ask(lambda: self._add(request_id, ids, params or SamplingParams(), deliver))
            while True:
                event = await events.get()
                yield event
                if event.output is not None:
                    return
        finally:
            self._commands.put(lambda: self._drop(request_id))

    async def _ask(self, command: Callable[[], Result]) -> Result:
        """What `command` returns or raises in the engine's thread."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Result] = loop.create_future()

        def settle(set_it: Callable[[], None]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(lambda: None if answer.done() else set_it())

        def run() -> None:
            try:
                result = command()
            except Exception as error:
                failure = error  # `error` itself is gone behind this block
                settle(lambda: answer.set_exception(failure))
            else:
                settle(lambda: answer.set_result(result))

        with self._gate:
            if not self._open:
                raise DSparkError("this AsyncLLM is closed: make another one")
            self._commands.put(run)
        return await answer

    def _run(self) -> None:
        """The engine's thread: commands first, then a step, as long as there is work; else wait for a command."""
        engine = self.llm.engine
        while self._open:
            self._obey(wait=not engine.has_unfinished)
            try:
                events = engine.step() if engine.has_unfinished else []
            except Exception:  # the requests of that round end with "abort", and the others go on
                _log.exception("a round failed")
                continue
            self._tell(events)
        self._obey(wait=False)
        self._abort_all()

    def _obey(self, wait: bool) -> None:
        while True:
            try:
                self._commands.get(block=wait)()
            except queue.Empty:
                return
            wait = False

    def _tell(self, events: Sequence[StepEvent]) -> None:
        if self._watcher is not None and events:
            self._watcher(events)
        for event in events:
            deliver = self._deliver.get(event.request_id)
            try:
                if deliver is not None:
                    deliver(event)
            except RuntimeError:  # the reader's loop is closed
                self._drop(event.request_id)

    def _add(
        self, request_id: str, ids: list[int], params: SamplingParams, deliver: Callable[[StepEvent], object]
    ) -> None:
        free, waiting = self.llm.engine.config.max_num_seqs - self.num_running, self.num_waiting
        if self.max_waiting is not None and waiting >= self.max_waiting + max(0, free):
            raise OverloadedError(f"{waiting} requests wait already: try again later")
        self.llm.engine.add(ids, params, request_id)
        self._deliver[request_id] = deliver

    def _drop(self, request_id: str) -> None:
        """Its reader is gone."""
        if self._deliver.pop(request_id, None) is not None:
            self.llm.engine.abort(request_id)

    def _abort_all(self) -> None:
        for request_id in list(self._deliver):
            output = self.llm.engine.abort(request_id)
            if output is not None:
                self._tell([StepEvent(request_id, [], [], "", output)])
