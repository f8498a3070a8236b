"""The HTTP application: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dspark.async_llm import AsyncLLM, OverloadedError
from dspark.core import DSparkError, RequestOutput, StepEvent
from dspark.server.metrics import ServerMetrics, Stopwatch
from dspark.server.protocol import Asked, Chat, Completion, Reply, RequestError, usage

__all__ = ["make_app"]

Result = TypeVar("Result")

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}


def make_app(llm: AsyncLLM, metrics: ServerMetrics, name: str, api_key: str | None = None) -> Starlette:
    """The application that serves `llm` under the model name `name`, and closes it at the end.

    Args:
        api_key: asked of requests to /v1, as "Authorization: Bearer KEY".
    """
    metrics.follow(llm)
    server = _Server(llm, metrics, name)
    tokenizer = llm.llm.tokenizer

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(llm.close)

    return Starlette(
        routes=[
            Route("/v1/chat/completions", server.endpoint(Chat(tokenizer)), methods=["POST"]),
            Route("/v1/completions", server.endpoint(Completion(tokenizer)), methods=["POST"]),
            Route("/v1/models", server.models),
            Route("/health", server.health),
            Route("/metrics", server.metrics_page),
        ],
        middleware=[Middleware(_Key, key=api_key)] if api_key is not None else [],
        exception_handlers={HTTPException: _refused},
        lifespan=lifespan,
    )


class _Server:
    def __init__(self, llm: AsyncLLM, metrics: ServerMetrics, name: str) -> None:
        self.llm, self.metrics, self.name = llm, metrics, name

    def endpoint(self, kind: Chat | Completion) -> Callable[[Request], Awaitable[Response]]:
        """Answers one kind of request."""

        async def answer(request: Request) -> Response:
            try:
                body = await _body(request)
                self._check_model(body.pop("model", None))
                asked, reply = kind.parse(body), Reply(self.name)
                if not asked.stream:
                    output = await self._until_gone(request, self._whole(asked))
                    return JSONResponse(kind.whole(reply, output))
                # The first event comes before the response begins: what is refused still gets its status.
                events = self._events(asked)
                first = await self._until_gone(request, anext(events))
                pieces = _pieces(kind, asked, reply, first, events)
                return StreamingResponse(pieces, media_type="text/event-stream")
            except OverloadedError as error:
                return _error(503, str(error), headers={"Retry-After": "1"})
            except DSparkError as error:
                return _error(400, str(error), getattr(error, "param", None))

        return answer

    async def _events(self, asked: Asked) -> AsyncGenerator[StepEvent, None]:
        watch = Stopwatch(self.metrics)
        async with contextlib.aclosing(self.llm.stream(asked.prompt, asked.params)) as events:
            async for event in events:
                watch.see(event)
                yield event

    async def _whole(self, asked: Asked) -> RequestOutput:
        async with contextlib.aclosing(self._events(asked)) as events:
            async for event in events:
                if event.output is not None:
                    return event.output
        raise AssertionError("a stream ends with an output")

    async def _until_gone(self, request: Request, work: Awaitable[Result]) -> Result:
        """`work`, unless the client goes away: then it is cancelled, and the request aborted."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise HTTPException(499, "the client closed the connection")
            return task.result()
        finally:
            for one in (task, gone):
                one.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)

    def _check_model(self, name: Any) -> None:
        if name is not None and name != self.name:
            raise HTTPException(404, f"the model {name!r} is not served here: ask for {self.name!r}")

    async def models(self, request: Request) -> Response:
        entry = {"id": self.name, "object": "model", "created": 0, "owned_by": "dspark"}
        entry |= {"max_model_len": self.llm.llm.engine.max_model_len}
        return JSONResponse({"object": "list", "data": [entry]})

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self.llm.healthy else 503)

    async def metrics_page(self, request: Request) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def _pieces(
    kind: Chat | Completion,
    asked: Asked,
    reply: Reply,
    first: StepEvent,
    events: AsyncGenerator[StepEvent, None],
) -> AsyncIterator[str]:
    """Server-sent events of a stream."""

    def sent(choice: dict[str, Any] | None, counted: Any = None) -> str:
        return f"data: {json.dumps(kind.chunk_response(reply, choice, counted))}\n\n"

    try:
        if opening := kind.opening():
            yield sent(opening)
        event: StepEvent | None = first
        while event is not None:
            output = event.output
            if event.text or output is not None:
                yield sent(kind.chunk(event.text, None if output is None else output.finish_reason))
            if output is not None and asked.include_usage:
                yield sent(None, usage(output))
            event = None if output is not None else await anext(events, None)
        yield "data: [DONE]\n\n"
    finally:
        await events.aclose()


async def _body(request: Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not JSON ({error})") from error
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, error.detail, headers=error.headers)


def _error(status: int, message: str, param: str | None = None, headers: Any = None) -> Response:
    """An error as OpenAI's clients read it."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    entry = {"message": message, "type": kind, "param": param, "code": status}
    return JSONResponse({"error": entry}, status, headers)


class _Key:
    """Refuses requests to /v1 that do not bring the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app, self.expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1"):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.expected):
                refusal = _error(401, "the API key is missing or wrong: send Authorization: Bearer KEY")
                await refusal(scope, receive, send)
                return
        await self.app(scope, receive, send)
