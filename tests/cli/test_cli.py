"""The command line over a scripted LLM whose tokens are UTF-8 bytes; two tests load the embedded model."""

from __future__ import annotations

import gc
import io
import json
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dspark.cli import main
from dspark.core import DSparkError, RequestMetrics, RequestOutput, SamplingParams, StepEvent
from dspark.target.zoo import known_models, resolve

ANSWER = "Grüße, fox!"


class ByteTokenizer:
    """Token ids are bytes."""

    is_byte_level = True
    special_token_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def encode(self, text: str) -> list[int]:
        try:
            return list(text.encode())
        except UnicodeEncodeError:
            raise DSparkError("the text is not valid Unicode") from None

    def apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>")


class FakeEngine:
    """Every request is answered with `answer`: plainly a byte a step, speculatively three (two accepted, a bonus)."""

    def __init__(self, plain: bool) -> None:
        self.plain, self.max_model_len, self.timings = plain, 100, None
        self.answer, self.speculative_answer = ANSWER, ANSWER
        self.interrupt_at: int | None = None  # output length at which Ctrl-C is pressed
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []
        self.aborted: list[str] = []
        self.running: dict[str, dict[str, Any]] = {}

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running)

    def add(self, prompt_token_ids: list[int], params: SamplingParams, request_id: str | None = None) -> str:
        self.prompts.append(bytes(prompt_token_ids).decode())
        self.params.append(params)
        plain = self.plain or not params.speculative
        answer = (self.answer if plain else self.speculative_answer).encode()[: params.max_tokens]
        name = f"r{len(self.params)}"
        self.running[name] = {
            "plain": plain,
            "answer": answer,
            "at": 0,
            "shown": 0,
            "metrics": RequestMetrics(),
        }
        return name

    def step(self) -> list[StepEvent]:
        return [self._advance(name, state) for name, state in list(self.running.items())]

    def _advance(self, name: str, state: dict[str, Any]) -> StepEvent:
        at, answer = state["at"], state["answer"]
        n = 1 if state["plain"] or at == 0 else 3
        new = list(answer[at : at + n])
        state["at"] += len(new)
        if at:
            state["metrics"].count(n - 1, n - 1, len(new) - 1, len(new))
        if self.interrupt_at is not None and state["at"] >= self.interrupt_at:
            signal.raise_signal(signal.SIGINT)
        text = answer[: state["at"]].decode(errors="ignore")
        piece, state["shown"] = text[state["shown"] :], len(text)
        output = self._output(name, "length") if state["at"] == len(answer) else None
        origins: list[Any] = ["plain"] if n == 1 else ["accepted", "accepted", "bonus"][: len(new)]
        return StepEvent(name, new, origins, piece, output)

    def _output(self, name: str, reason: Any) -> RequestOutput:
        state = self.running.pop(name)
        ids = list(state["answer"][: state["at"]])
        text = bytes(ids).decode(errors="ignore")
        return RequestOutput(name, [], text, ids, reason, None, None, 5, state["metrics"])

    def abort(self, request_id: str) -> RequestOutput | None:
        self.aborted.append(request_id)
        return self._output(request_id, "abort") if request_id in self.running else None


class FakeLLM:
    made: list[FakeLLM]

    def __init__(self, model: str, speculative_config: dict[str, Any], **options: Any) -> None:
        if model != "fake":
            resolve(model)
        self.config, self.options = speculative_config, options
        self.tokenizer = ByteTokenizer()
        self.engine = FakeEngine(speculative_config["method"] == "none")
        self.made.append(self)

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[StepEvent]:
        raw = isinstance(prompt, str)
        self.engine.add(
            self.tokenizer.encode(prompt) if raw else self.tokenizer.apply_chat_template(prompt), params
        )
        while self.engine.has_unfinished:
            yield from self.engine.step()


@pytest.fixture
def llms(monkeypatch: pytest.MonkeyPatch) -> list[FakeLLM]:
    """The LLMs that a command makes."""
    made: list[FakeLLM] = []
    monkeypatch.setattr(FakeLLM, "made", made, raising=False)
    module = types.ModuleType("dspark.llm")
    module.LLM = FakeLLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dspark.llm", module)
    return made


@pytest.fixture
def engine_is(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set attributes of every engine that is made."""

    def change(**attributes: Any) -> None:
        begin = FakeEngine.__init__

        def init(self: FakeEngine, plain: bool) -> None:
            begin(self, plain)
            for name, value in attributes.items():
                setattr(self, name, value)

        monkeypatch.setattr(FakeEngine, "__init__", init)

    return change


FAKE = ["--model", "fake"]


def test_generate_streams_the_text_and_ends_with_figures(
    llms: list[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "Hi", *FAKE, "--system", "Be kind.", "--stop", "a", "--stop", "b"]) == 0
    out, err = capsys.readouterr()
    assert out == ANSWER + "\n"
    assert "13 tokens" in err
    assert "accepted length 3.00" in err
    (llm,) = llms
    assert llm.config == {"method": "dspark", "prompt_lookup_num_tokens": 7}, "the default copies repeats"
    assert llm.engine.prompts == ["<system>Be kind.<user>Hi<assistant>"]
    params = llm.engine.params[0]
    assert (params.temperature, params.max_tokens, params.stop) == (0, 256, ("a", "b"))


def test_options_reach_the_model(llms: list[FakeLLM], tmp_path: Path) -> None:
    argv = ["generate", "--raw", "Hi", *FAKE, "--method", "dflash", "--drafter", str(tmp_path)]
    argv += ["--num-speculative-tokens", "4", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "7"]
    assert main([*argv, "--min-p", "0.1", "--seed", "3", "--max-tokens", "2"]) == 0
    (llm,) = llms
    assert llm.config == {"method": "dflash", "model": str(tmp_path), "num_speculative_tokens": 4}
    assert llm.engine.prompts == ["Hi"]
    assert llm.engine.params == [
        SamplingParams(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3, max_tokens=2)
    ]


def test_prompt_from_stdin(llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb"))
    assert main(["generate", "-", *FAKE]) == 0
    assert llms[0].engine.prompts == ["<user>a\nb<assistant>"]


def test_generate_json_is_one_object(llms: list[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Hi", *FAKE, "--json", "--max-tokens", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["text"], found["token_ids"], found["finish_reason"]) == ("G", [ord("G")], "length")
    assert found["metrics"]["accepted_length"] is None  # no round: NaN is not JSON
    assert found["tokens_per_s"] > 0


def test_show_drafts_colours_by_origin(
    llms: list[FakeLLM], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["generate", "Hi", *FAKE, "--show-drafts"]) == 0
    out = capsys.readouterr().out
    legend, _, text = out.partition("\n\n")
    assert "no draft was verified" in legend
    # G plain; then 'r' and half of 'ü' accepted, its other half the bonus that completes it
    plain, accepted, bonus, end = "\x1b[39m", "\x1b[32m", "\x1b[36m", "\x1b[0m"
    assert text.startswith(f"{plain}G{end}{accepted}r{end}{bonus}ü{end}{accepted}ß{end}{bonus}e{end}")


def test_compare_identical(llms: list[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Hi", *FAKE, "--compare", "--repeats", "2", "--max-tokens", "20"]) == 0
    out = capsys.readouterr().out
    assert "identical token ids" in out
    assert out.count(ANSWER) == 2
    (llm,) = llms
    timed = [(p.speculative, p.max_tokens) for p in llm.engine.params]
    assert timed == [(False, 8), (True, 8)] + [(False, 20), (True, 20)] * 2


def test_compare_names_the_first_divergence(
    llms: list[FakeLLM], engine_is: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    engine_is(speculative_answer="Green fox")
    assert main(["generate", "Hi", *FAKE, "--compare"]) == 1
    assert "NOT identical: token ids first differ at position 2" in capsys.readouterr().out
    assert main(["generate", "Hi", *FAKE, "--compare", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["identical"], found["first_divergence"]) == (False, 2)
    assert (found["plain"]["text"], found["speculative"]["text"]) == (ANSWER, "Green fox")
    assert main(["generate", "Hi", *FAKE, "--compare", "--json", "--temperature", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["identical"] is None


def chat(monkeypatch: pytest.MonkeyPatch, lines: list[str], *options: str) -> int:
    """Run `dspark chat` with these lines typed, then Ctrl-D."""
    typed = iter(lines)

    def read(prompt: str = "") -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    return main(["chat", *FAKE, *options])


def test_chat_keeps_history(llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["one", "two", "/system S", "three", "/reset", "four", "/nonsense", "", "/exit", "never"]
    assert chat(monkeypatch, lines, "--max-tokens", "1") == 0
    first, second = "<user>one<assistant>", "<user>one<assistant>G<user>two<assistant>"
    third = f"<system>S{second}G<user>three<assistant>"
    assert llms[0].engine.prompts == [first, second, third, "<system>S<user>four<assistant>"]


def test_chat_outlives_a_line_that_is_no_text(
    llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\none\n"), encoding="utf-8"))
        assert main(["chat", *FAKE, "--max-tokens", "1"]) == 0
    assert "not valid Unicode" in capsys.readouterr().err
    assert llms[0].engine.prompts == ["<user>one<assistant>"]


def test_chat_schedules_as_generate_does(llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--policy", "threshold", "--threshold", "0.4", "--acceptance", "shared_noise"]
    assert chat(monkeypatch, ["one"], "--max-tokens", "1", *options) == 0
    config = llms[0].config
    assert {key: config[key] for key in ("policy", "threshold", "acceptance")} == {
        "policy": "threshold", "threshold": 0.4, "acceptance": "shared_noise",
    }  # fmt: skip


def test_chat_drafts_where_it_pays_and_generate_always(
    llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, ["one"], "--max-tokens", "1") == 0
    assert main(["generate", "Hi", *FAKE]) == 0
    assert [llm.config.get("policy") for llm in llms] == ["auto", None]
    assert main(["generate", "Hi", *FAKE, "--policy", "my_module:mine"]) == 0
    assert llms[-1].config["policy"] == "my_module:mine"
    assert main(["generate", "Hi", *FAKE, "--policy", "best"]) == 2
    assert "or module:factory" in capsys.readouterr().err


@pytest.mark.parametrize("verb", [["generate", "Hi"], ["chat"], ["bench", "throughput"]])
def test_what_would_bias_the_output_is_refused_before_a_model_is_loaded(
    llms: list[FakeLLM], capsys: pytest.CaptureFixture[str], verb: list[str]
) -> None:
    methods = ["--methods", "none,dspark+lookup"] if verb[0] == "bench" else ["--method", "dspark"]
    argv = [*verb, "--model", "fake", *methods, "--policy", "global"]
    assert main([*argv, "--temperature", "1"]) == 2
    assert "biases the output" in capsys.readouterr().err
    assert not llms


@pytest.mark.parametrize(
    "options",
    [
        ["--temperature", "0"],
        ["--temperature", "1", "--acceptance", "shared_noise"],
        ["--temperature", "1", "--method", "ngram"],
    ],
)
def test_what_is_sound_goes_on(llms: list[FakeLLM], options: list[str]) -> None:
    assert main(["generate", "Hi", "--model", "fake", "--policy", "global", *options]) == 0
    assert llms[0].config["policy"] == "global"


def test_chat_drops_the_oldest_turns_and_says_so(
    llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, ["a" * 30, "b" * 20, "c"], "--max-tokens", "1", "--system", "S") == 0
    prompts = llms[0].engine.prompts
    assert prompts[1] == "<system>S<user>" + "a" * 30 + "<assistant>G<user>" + "b" * 20 + "<assistant>"
    assert prompts[2] == "<system>S<user>" + "b" * 20 + "<assistant>G<user>c<assistant>"
    assert "forgot the oldest 1 exchange" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(
    llms: list[FakeLLM],
    engine_is: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = signal.getsignal(signal.SIGINT)
    engine_is(interrupt_at=4)
    assert chat(monkeypatch, ["one", "two"]) == 0
    engine = llms[0].engine
    assert engine.aborted == ["r1", "r2"]
    assert engine.prompts[1] == "<user>one<assistant>Grü<user>two<assistant>"
    assert "[stopped]" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is before


def test_info_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"versions", "machine", "models", "drafters", "cache_directory"} == set(found)
    assert found["versions"]["torch"]
    assert found["machine"]["cores"] >= 1
    assert "smollm2-135m" in [model["name"] for model in found["models"]]


BENCH = ["bench", "throughput", *FAKE, "--prompts", "4", "--concurrency", "1,2", "--repeats", "1"]


def test_bench_json(llms: list[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BENCH, "--methods", "none,ngram", "--temperature", "0", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(run["method"], run["concurrency"]) for run in found["runs"]] == [
        ("none", 1),
        ("ngram", 1),
        ("none", 2),
        ("ngram", 2),
    ]
    assert [cell["identical"] for cell in found["summary"]] == [None, "4 of 4"] * 2
    assert found["settings"]["num_prompts"] == 4
    assert [llm.config for llm in llms] == [{"method": "none"}, {"method": "ngram"}]
    assert llms[0].options["max_num_seqs"] == 2


def test_bench_table_and_file(
    llms: list[FakeLLM], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, report = tmp_path / "p.jsonl", tmp_path / "r.json"
    prompts.write_text('{"turns": ["eins"]}\n\n{"messages": [{"role": "user", "content": "zwei"}]}\n')
    argv = ["bench", "throughput", *FAKE, "--prompts", str(prompts), "--concurrency", "2", "--repeats", "1"]
    assert main([*argv, "--methods", "ngram", "--temperature", "0", "--json", str(report)]) == 0
    assert "ngram" in capsys.readouterr().out
    assert json.loads(report.read_text())["runs"][0]["output_tokens"] == 26
    assert llms[0].engine.prompts[-2:] == ["<user>eins<assistant>", "<user>zwei<assistant>"]


GENERATE = ["generate", "Hi", *FAKE]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "required: VERB"),
        (["dance"], "invalid choice: 'dance'"),
        (["generate"], "required: prompt"),
        ([*GENERATE, "--nonsense"], "unrecognized arguments"),
        ([*GENERATE, "--method", "magic"], "invalid choice: 'magic'"),
        (["generate", "Hi", "--model", "magic"], "no model 'magic'"),
        ([*GENERATE, "--max-tokens", "-1"], "max_tokens"),
        ([*GENERATE, "--max-tokens", "many"], "invalid int value"),
        ([*GENERATE, "--temperature", "nan"], "temperature must be a finite number"),
        ([*GENERATE, "--top-p", "0"], "top_p"),
        ([*GENERATE, "--stop", ""], "stop must be"),
        ([*GENERATE, "--drafter", "/no/such\nplace"], "no drafter at"),
        ([*GENERATE, "--drafter", ".", "--method", "ngram"], "not for ngram"),
        ([*GENERATE, "--num-speculative-tokens", "0"], "1 or more"),
        ([*GENERATE, "--num-speculative-tokens", "2", "--method", "none"], "no meaning"),
        ([*GENERATE, "--threads", "0"], "--threads must be 1 or more"),
        ([*GENERATE, "--raw", "--system", "S"], "--system needs"),
        ([*GENERATE, "--compare", "--method", "none"], "--compare compares"),
        ([*GENERATE, "--compare", "--repeats", "0"], "--repeats must be 1 or more"),
        ([*GENERATE, "--repeats", "3"], "--repeats is for --compare"),
        ([*GENERATE, "--compare", "--max-tokens", "0"], "--compare needs tokens"),
        (["generate", "", *FAKE], "prompt is empty"),
        (["generate", "\udcff", *FAKE], "not valid UTF-8"),
        (["chat", *FAKE, "--temperature", "inf"], "finite"),
        ([*BENCH, "--methods", "none,magic"], "unknown method 'magic'"),
        ([*BENCH, "--concurrency", "0"], "concurrency"),
        ([*BENCH, "--concurrency", "1;2"], "not a list of whole numbers"),
        ([*BENCH, "--concurrency", "8"], "needs at least 8 prompts"),
        ([*BENCH, "--temperature", "nan"], "temperature"),
        ([*BENCH, "--max-tokens", "-5"], "max_tokens"),
        ([*BENCH, "--prompts", "0"], "prompts must be 1 or more"),
        ([*BENCH, "--prompts", "/no/such.jsonl"], "cannot read prompts"),
        ([*BENCH, "--json", "/no/such/place.json"], "no directory"),
        ([*BENCH, "--drafter", "."], None),
        ([*BENCH, "--drafter", ".", "--methods", "none"], "exactly one of"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    llms: list[FakeLLM], capsys: pytest.CaptureFixture[str], argv: list[str], says: str | None
) -> None:
    if says is None:
        assert main(argv) == 0  # the one good line, so that the others are known to fail for their own reason
        return
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert says in err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "line 1 is not JSON"),
        ("[1]", "line 1: expected"),
        ('{"turns": []}', "expected"),
        ('{"messages": [{"role": "assistant", "content": "b"}]}', "the user's last"),
        ("\n", "no prompts"),
    ],
)
def test_bad_prompt_files(
    llms: list[FakeLLM], tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, says: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    assert main([*BENCH, "--prompts", str(path)]) == 2
    assert says in capsys.readouterr().err


def test_ctrl_c_ends_quietly(llms: list[FakeLLM], engine_is: Any, capsys: pytest.CaptureFixture[str]) -> None:
    engine_is(interrupt_at=3)
    assert main(GENERATE) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("more", [[], ["--compare"], ["--json"]])
def test_a_closed_pipe_ends_quietly(
    llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Closed())
        assert main([*GENERATE, *more]) == 141
    assert capsys.readouterr().err == ""


def test_other_errors_keep_their_traceback(llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise ValueError("a fault of the program")

    monkeypatch.setattr(FakeLLM, "stream", fail)
    with pytest.raises(ValueError, match="a fault of the program"):
        main(GENERATE)


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), PermissionError(13, "Denied", "x")]
)
def test_a_file_that_fails_is_one_line(
    llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: OSError
) -> None:
    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(FakeLLM, "stream", fail)
    assert main(GENERATE) == 2
    assert capsys.readouterr().err == f"error: {error}\n"
    error.errno, error.filename = 9, None  # a fault of the program
    with pytest.raises(OSError, match="9"):
        main(GENERATE)


def test_help_does_not_import_torch() -> None:
    script = (
        "import sys\n"
        "from dspark.cli import main\n"
        "try: main(['generate', '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'numba', 'numpy', 'rich', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--show-drafts" in done.stdout


def test_generating_imports_no_more_than_it_needs() -> None:
    script = (
        "import sys\n"
        "import dspark.llm, dspark.cli.decoding, dspark.cli.generate\n"
        "heavy = {'gguf', 'rich', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_garbage_is_left_alone_only_while_the_model_loads(
    llms: list[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    make = FakeLLM.__init__

    def watched(self: FakeLLM, *args: Any, **options: Any) -> None:
        seen.append(gc.isenabled())
        make(self, *args, **options)

    monkeypatch.setattr(FakeLLM, "__init__", watched)
    assert main(GENERATE) == 0
    assert seen == [False]
    assert gc.isenabled()
    gc.unfreeze()


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("dspark ")


real = pytest.mark.skipif(
    not known_models()["smollm2-135m"].installed, reason="the embedded model is not installed"
)


@pytest.mark.real
@real
def test_real_comparison_is_identical(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "Repeat: a b c a b c a b c", "--method", "ngram", "--max-tokens", "12", "--compare"]
    assert main([*argv, "--repeats", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["identical"] is True
    assert found["plain"]["metrics"]["drafted"] == 0
    assert len(found["plain"]["token_ids"]) == len(found["speculative"]["origins"])


@pytest.mark.real
@real
def test_broken_drafter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{")
    assert main(["generate", "Hi", "--drafter", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
