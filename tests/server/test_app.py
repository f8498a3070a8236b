"""The application over real HTTP, on a tiny model."""

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dspark import LLM, SamplingParams
from dspark.async_llm import AsyncLLM
from dspark.cli import main
from dspark.cli.serve import listen, server_of
from dspark.core import DSparkError
from dspark.server.app import make_app
from dspark.server.metrics import ServerMetrics

ASK = {
    "messages": [{"role": "user", "content": "abc"}],
    "temperature": 0,
    "max_tokens": 12,
    "ignore_eos": True,
}


class Served:
    """A server in a thread."""

    def __init__(self, model: Path, api_key: str | None = None, **options: Any) -> None:
        metrics = ServerMetrics()
        llm = LLM(model, speculative_config={"method": "ngram"}, max_num_seqs=2, kv_cache_tokens=1024)
        self.llm = AsyncLLM(llm, watcher=metrics.count, **options)
        self.listener = listen("127.0.0.1", 0)
        self.server = server_of(make_app(self.llm, metrics, "tiny", api_key))
        self.thread = threading.Thread(target=self.server.run, args=([self.listener],))
        self.thread.start()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self.listener.getsockname()[:2], timeout=60)

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and body, read as JSON where it is."""
        connection = self.connect()
        text = body if isinstance(body, str | None) else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, text, headers)
        response = connection.getresponse()
        data = response.read().decode()
        connection.close()
        is_json = response.headers.get_content_type() == "application/json"
        return response.status, json.loads(data) if is_json else data

    def value(self, metric: str) -> float:
        """Of a line of /metrics; 0 where there is none."""
        lines = [line.rsplit(" ", 1) for line in self.ask("/metrics")[1].splitlines()]
        return next((float(number) for name, number in lines if name == metric), 0.0)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join()
        self.listener.close()


@pytest.fixture(scope="module")
def served(tiny_model: Path) -> Iterator[Served]:
    served = Served(tiny_model)
    yield served
    served.close()
    assert not served.llm.healthy, "the application closes its LLM"


def pieces(stream: str) -> list[dict[str, Any]]:
    *events, done, rest = stream.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_a_chat_answer_whole_and_in_pieces(served: Served, tiny_model: Path) -> None:
    (alone,) = LLM(tiny_model).generate(
        [ASK["messages"]], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    )
    status, whole = served.ask("/v1/chat/completions", {**ASK, "model": "tiny"})
    assert status == 200
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": alone.text}
    assert whole["choices"][0]["finish_reason"] == "length"
    status, stream = served.ask(
        "/v1/chat/completions", {**ASK, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert status == 200
    first, *middle, last = pieces(stream)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in middle) == alone.text
    assert [chunk["choices"][0]["finish_reason"] for chunk in middle][-2:] == [None, "length"]
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert {chunk["object"] for chunk in (first, *middle, last)} == {"chat.completion.chunk"}


def test_a_completion(served: Served) -> None:
    body = {"prompt": "abc", "temperature": 0, "ignore_eos": True}
    status, whole = served.ask("/v1/completions", body)
    assert (status, whole["usage"]["completion_tokens"]) == (200, 16)
    _, stream = served.ask("/v1/completions", {**body, "stream": True})
    assert "".join(chunk["choices"][0]["text"] for chunk in pieces(stream)) == whole["choices"][0]["text"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "status", "param", "says"),
    [
        ("{", 400, None, "not JSON"),
        ([], 400, None, "JSON object"),
        ({**ASK, "tools": []}, 400, "tools", "not supported"),
        ({**ASK, "model": "other"}, 404, None, "not served here"),
        ({**ASK, "messages": [{"role": "user", "content": "a" * 200}]}, 400, None, "tokens"),
    ],
)
def test_what_cannot_be_served(served: Served, body, status, param, says, stream) -> None:
    if isinstance(body, dict) and stream:
        body = {**body, "stream": True}
    got, answer = served.ask("/v1/chat/completions", body)
    assert got == status
    assert answer["error"]["param"] == param
    assert says in answer["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request(
    served: Served, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, running, told = served.llm.llm.engine.step, threading.Event(), threading.Event()
    put = served.llm._commands.put

    def held_step() -> Any:
        """The second round waits until the server has noticed."""
        events = step()
        if running.is_set():
            assert told.wait(60)
        running.set()
        return events

    class Commands:
        get = served.llm._commands.get

        @staticmethod
        def put(command: Any) -> None:
            put(command)
            if running.is_set():
                told.set()

    monkeypatch.setattr(served.llm.llm.engine, "step", held_step)
    monkeypatch.setattr(served.llm, "_commands", Commands)
    before = served.value('dspark_request_success_total{finished_reason="length"}')
    connection = served.connect()
    connection.request(
        "POST", "/v1/chat/completions", json.dumps({**ASK, "max_tokens": 110, "stream": stream})
    )
    assert running.wait(60)
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    assert told.wait(60)
    assert served.ask("/v1/chat/completions", ASK)[0] == 200
    after = served.value('dspark_request_success_total{finished_reason="length"}')
    assert after == before + 1, "only the one behind it came to its end"
    assert served.llm.num_running == 0


def test_models_health_and_metrics(served: Served) -> None:
    _, models = served.ask("/v1/models")
    assert [(m["id"], m["max_model_len"]) for m in models["data"]] == [("tiny", 128)]
    assert served.ask("/health")[0] == 200
    before = served.value("dspark_generation_tokens_total")
    served.ask("/v1/chat/completions", ASK)
    assert served.value("dspark_generation_tokens_total") == before + 12


def test_a_key_is_asked_for(tiny_model: Path) -> None:
    served = Served(tiny_model, api_key="secret")
    try:
        assert served.ask("/v1/models")[0] == 401
        assert served.ask("/v1/models", Authorization="Bearer wrong")[0] == 401
        assert served.ask("/v1/models", Authorization="Bearer secret")[0] == 200
        assert served.ask("/health")[0] == 200
    finally:
        served.close()


def test_too_many_are_told_to_come_later(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(tiny_model, max_waiting=0)
    monkeypatch.setattr(AsyncLLM, "num_running", 2)  # a full batch
    try:
        status, answer = served.ask("/v1/chat/completions", ASK)
        assert (status, answer["error"]["type"]) == (503, "server_error")
    finally:
        served.close()


def test_a_taken_port_is_told_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port), "--model", "no such model"]) == 2
        assert "choose another --host or --port" in capsys.readouterr().err
        with pytest.raises(DSparkError, match="cannot listen"):
            listen("no such host.invalid", 0)
