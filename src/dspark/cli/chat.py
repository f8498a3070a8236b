"""`dspark chat`: talk with the model. Ctrl-C stops an answer, Ctrl-D leaves; /system TEXT, /reset, /exit."""

from __future__ import annotations

import argparse
import io
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dspark.cli.messages import say
from dspark.cli.options import (
    add_model_options,
    add_sampling_options,
    add_schedule_options,
    check_schedule_options,
    check_sound_config,
    load_llm,
    sampling_params,
    schedule_config,
    speculative_config,
)

if TYPE_CHECKING:
    from dspark.core import SamplingParams
    from dspark.llm import LLM

__all__ = ["Conversation", "add_parser"]

COMMANDS = "commands: /system TEXT, /reset, /exit; Ctrl-C stops an answer, Ctrl-D leaves"


def add_parser(verbs: Any) -> None:
    """Add the verb to the `add_subparsers` object of `dspark`."""
    parser = verbs.add_parser("chat", help="talk with the model", description=__doc__)
    add_model_options(parser, method="dspark+lookup")
    add_schedule_options(parser, policy="auto")
    add_sampling_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read, answer, repeat, until Ctrl-D or /exit."""
    params = sampling_params(args)
    config = speculative_config(args.method, args.drafter, args.num_speculative_tokens)
    check_schedule_options(args, policy="auto")
    config |= schedule_config(args, args.method)
    check_sound_config(config, [params.temperature])
    conversation = Conversation(load_llm(args, config, max_num_seqs=1), params, args.system)
    say(COMMANDS)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(
            errors="surrogateescape"
        )  # bytes that are no UTF-8 spoil their line, not the chat
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            say("")
            return 0
        if line == "/exit":
            return 0
        if line:
            _obey(conversation, line)


def _obey(conversation: Conversation, line: str) -> None:
    """One line: a command, or a message to answer. What goes wrong with it does not end the chat."""
    from dspark.core import DSparkError

    command, _, rest = line.partition(" ")
    if command == "/reset":
        conversation.reset()
        say("(forgotten)")
    elif command == "/system":
        conversation.system = rest.strip() or None
        say("(system message set)" if rest.strip() else "(system message removed)")
    elif command.startswith("/"):
        say(f"unknown command {command}; {COMMANDS}")
    else:
        try:
            conversation.answer(line, _show)
        except DSparkError as error:
            say(f"error: {error}")


class Conversation:
    """The turns so far, and the model that answers them.

    `turns` alternate user, assistant, ...; the system message stays apart, because it is never dropped.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self.llm, self.params, self.system = llm, params, system
        self.turns: list[dict[str, str]] = []

    def reset(self) -> None:
        """Forget the turns; the system message stays."""
        self.turns.clear()

    def answer(self, message: str, show: Callable[[str], None]) -> str:
        """Answer `message`; `show` gets the text as it is committed. Ctrl-C keeps what was said until then.

        Raises:
            DSparkError: the message alone exceeds the context; it is not kept.
        """
        self.turns.append({"role": "user", "content": message})
        try:
            prompt = self._fitting_prompt()
            begin = time.perf_counter()
            text, tokens, length = self._stream(prompt, show)
        except BaseException:
            self.turns.pop()
            raise
        self.turns.append({"role": "assistant", "content": text})
        show("\n")
        from dspark.cli.terminal import figure

        rate = tokens / (time.perf_counter() - begin)
        say(f"({tokens} tokens, {rate:.1f} tokens/s, accepted length {figure(length)})")
        return text

    def _fitting_prompt(self) -> list[int]:
        """Token ids of the conversation; oldest exchanges are dropped where no room is left to answer."""
        context = self.llm.engine.max_model_len
        # At most a quarter of the context: a large --max-tokens must not cost the whole history.
        reserve = min(self.params.max_tokens or context, context // 4)
        dropped = 0
        while True:
            system = [] if self.system is None else [{"role": "system", "content": self.system}]
            prompt = self.llm.tokenizer.apply_chat_template([*system, *self.turns])
            if len(prompt) + reserve <= context or len(self.turns) == 1:
                break
            del self.turns[:2]  # a question and its answer
            dropped += 1
        if dropped:
            say(f"(the context of {context} tokens is full: forgot the oldest {dropped} exchange(s))")
        return prompt

    def _stream(self, prompt: list[int], show: Callable[[str], None]) -> tuple[str, int, float]:
        """(text, tokens, accepted length) of the answer."""
        engine = self.llm.engine
        request = engine.add(prompt, self.params)
        with _stop_on_ctrl_c() as stopped:
            while True:
                for event in engine.step():
                    show(event.text)
                    if event.output is not None:
                        return _result(event.output)
                if stopped():
                    output = engine.abort(request)
                    assert output is not None, "a request without an output is still in the engine"
                    show(" [stopped]")
                    return _result(output)


def _result(output: Any) -> tuple[str, int, float]:
    return output.text, len(output.token_ids), output.metrics.accepted_length


@contextmanager
def _stop_on_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Within, Ctrl-C raises a flag, so that no step is torn apart; a second one interrupts as usual."""
    pressed = False

    def handle(number: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
