"""Holding conversations with an engine: one turn after another, several conversations at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dspark.core import DSparkError, RequestOutput, SamplingParams
from dspark.engine.engine import Engine
from dspark.evaluate.collisions import Suspect
from dspark.evaluate.conversations import Conversation, Messages
from dspark.evaluate.recorder import RoundRecorder
from dspark.evaluate.rounds import AnswerCounts

__all__ = ["Answer", "Contestant", "Played", "play"]


@dataclass(frozen=True)
class Contestant:
    """A drafter ready to be measured: its engine, the recorder that watches it (none for plain decoding), gamma."""

    name: str
    engine: Engine
    recorder: RoundRecorder | None
    gamma: int


@dataclass
class Answer:
    """One turn of a conversation, answered."""

    conversation: str
    turn: int
    output: RequestOutput
    params: SamplingParams
    counts: AnswerCounts = field(default_factory=AnswerCounts)
    suspects: list[Suspect] = field(default_factory=list)


@dataclass(frozen=True)
class Played:
    """`seconds` of wall time for all answers, prompt processing included, recording excluded."""

    answers: list[Answer]
    seconds: float
    draft_seconds: float
    draft_rounds: int


@dataclass
class _Talk:
    conversation: Conversation
    messages: Messages
    turn: int = 0

    def goes_on(self, answer: str) -> bool:
        """Behind `answer` comes the next question, if there is one."""
        if self.turn == len(self.conversation.followups):
            return False
        self.messages.append({"role": "assistant", "content": answer})
        self.messages.append({"role": "user", "content": self.conversation.followups[self.turn]})
        self.turn += 1
        return True


def play(
    contestant: Contestant,
    conversations: Sequence[Conversation],
    encode: Callable[[Messages], list[int]],
    params: Callable[[Conversation, int], SamplingParams],
) -> Played:
    """Hold `conversations` side by side to their last turn, or until one no longer fits the context.

    Args:
        encode: the chat template: messages to prompt ids.
        params: of a conversation's turn.

    Raises:
        DSparkError: a first turn that does not fit the context, or an engine that dropped a request.
    """
    engine, recorder = contestant.engine, contestant.recorder
    if recorder is not None:
        recorder.reset()
    running: dict[str, tuple[_Talk, SamplingParams]] = {}
    answers: list[Answer] = []

    def ask(talk: _Talk) -> None:
        prompt, asked = encode(talk.messages), params(talk.conversation, talk.turn)
        if len(prompt) >= engine.max_model_len:
            if talk.turn == 0:
                raise DSparkError(
                    f"prompt {talk.conversation.id} has {len(prompt)} tokens, the context holds "
                    f"{engine.max_model_len}: leave it out"
                )
            return
        running[engine.add(prompt, asked)] = (talk, asked)

    begin = time.perf_counter()
    for conversation in conversations:
        ask(_Talk(conversation, list(conversation.messages)))
    while running:
        if not engine.has_unfinished:
            raise DSparkError(f"the engine dropped {len(running)} requests without an output")
        events = engine.step()
        if recorder is not None:
            recorder.settle(events)
        for event in events:
            if event.output is None:
                continue
            talk, asked = running.pop(event.request_id)
            answer = Answer(talk.conversation.id, talk.turn, event.output, asked)
            if recorder is not None:
                answer.counts, answer.suspects = recorder.take(event.request_id)
            answers.append(answer)
            if talk.goes_on(event.output.text):
                ask(talk)
    seconds = time.perf_counter() - begin
    order = {conversation.id: i for i, conversation in enumerate(conversations)}
    answers.sort(key=lambda answer: (order[answer.conversation], answer.turn))
    if recorder is None:
        return Played(answers, seconds, 0.0, 0)
    return Played(answers, seconds - recorder.overhead_s, recorder.draft_s, recorder.draft_steps)
