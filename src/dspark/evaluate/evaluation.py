"""Drafters x prompt sets x temperatures in one run, beside plain decoding on the same conversations.

    contestants = make_contestants(target, {"dspark": (drafter, FixedLength(7))}, tokenizer, config, settings)
    run_evaluation(contestants, prompt_sets, settings, store, target, tokenizer.apply_chat_template)
    summary = summarise(list(store.cells.values()))

Every drafter holds the same conversations in turn with plain decoding, group by group, so that a machine that slows
down slows all of them. All drafts are verified: results describe drafters, not schedules.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dspark.core import DSparkError, SamplingParams
from dspark.drafters.base import Drafter
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.evaluate.cells import Cell, CellKey, CellStore
from dspark.evaluate.collisions import count_collisions
from dspark.evaluate.conversations import Conversation, Messages, PromptSet, fingerprint
from dspark.evaluate.playing import Answer, Contestant, Played, play
from dspark.evaluate.recorder import RoundRecorder
from dspark.evaluate.repetition import is_looping, repeated_ngrams
from dspark.evaluate.rounds import CollisionThresholds
from dspark.schedule.policies import FixedLength, Policy
from dspark.target.base import Target
from dspark.target.tokenizer import Tokenizer

__all__ = ["PLAIN", "EvaluationSettings", "Group", "make_contestants", "plan_groups", "run_evaluation"]

PLAIN = "none"  # plain decoding, which the others are compared with
Encode = Callable[[Messages], list[int]]


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """What is held fixed for all drafters.

    Raises:
        DSparkError: a value out of range.
    """

    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_tokens: int = 256
    concurrency: int = 1
    seed: int = 0
    warmup_tokens: int = 8
    collisions: CollisionThresholds = field(default_factory=CollisionThresholds)

    def __post_init__(self) -> None:
        if not self.temperatures:
            raise DSparkError("give at least one temperature")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature, seed=self.seed)  # refuses what cannot be sampled
        for name, least in (("max_tokens", 2), ("concurrency", 1), ("warmup_tokens", 0)):
            if getattr(self, name) < least:
                raise DSparkError(f"{name} must be {least} or more, got {getattr(self, name)}")
        t = self.collisions
        if not 0 <= t.improbable < t.probable <= 1:
            raise DSparkError(
                f"collisions need 0 <= improbable < probable <= 1, got {t.improbable} and {t.probable}"
            )
        if t.alternatives < 0:
            raise DSparkError(f"alternatives must be 0 or more, got {t.alternatives}")

    def params(
        self, prompts: str, temperature: float, conversation: Conversation, turn: int
    ) -> SamplingParams:
        """Drafters share a turn's seed."""
        seed = self.seed + zlib.crc32(f"{prompts}/{conversation.id}/{turn}".encode())
        return SamplingParams(temperature=temperature, max_tokens=self.max_tokens, seed=seed)


@dataclass(frozen=True)
class Group:
    """Conversations of one domain that are held side by side."""

    prompts: str
    domain: str
    temperature: float
    conversations: tuple[Conversation, ...]

    def key(self, drafter: str) -> CellKey:
        return CellKey(self.prompts, self.temperature, fingerprint(self.conversations), drafter)


def plan_groups(sets: Sequence[PromptSet], settings: EvaluationSettings) -> Iterator[Group]:
    """Every group in order; the domains of a set take turns, as its conversations do."""
    for prompts in sets:
        for temperature in settings.temperatures:
            chunks: list[tuple[Conversation, ...]] = []
            for domain in prompts.domains:
                these = [c for c in prompts.conversations if c.domain == domain]
                size = settings.concurrency
                chunks += [tuple(these[i : i + size]) for i in range(0, len(these), size)]
            order = {c.id: i for i, c in enumerate(prompts.conversations)}
            for chunk in sorted(chunks, key=lambda chunk: order[chunk[0].id]):
                yield Group(prompts.name, chunk[0].domain, temperature, chunk)


def make_contestants(
    target: Target,
    drafters: Mapping[str, tuple[Drafter, Policy]],
    tokenizer: Tokenizer | None,
    config: EngineConfig,
    settings: EvaluationSettings,
) -> list[Contestant]:
    """Plain decoding and every drafter, each with an engine of its own over the one target.

    Raises:
        DSparkError: a policy other than `FixedLength`, or a drafter that is called "none".
    """
    config = replace(config, max_num_seqs=settings.concurrency)
    contestants = [Contestant(PLAIN, Engine(target, None, None, tokenizer, config), None, 0)]
    for name, (drafter, policy) in drafters.items():
        if not isinstance(policy, FixedLength):
            raise DSparkError(f"{name}: an evaluation verifies all drafts; give it a FixedLength policy")
        if name == PLAIN:
            raise DSparkError(f"{PLAIN!r} is the name of plain decoding: call the drafter something else")
        recorder = RoundRecorder(target, settings.collisions)
        engine = recorder.engine(drafter, policy, tokenizer, config)
        contestants.append(Contestant(name, engine, recorder, min(policy.length, drafter.max_draft)))
    return contestants


def run_evaluation(
    contestants: Sequence[Contestant],
    sets: Sequence[PromptSet],
    settings: EvaluationSettings,
    store: CellStore,
    target: Target,
    encode: Encode,
    progress: Callable[[Group], None] = lambda group: None,
) -> None:
    """Measure every group that `store` lacks a cell of, and append its cells.

    Args:
        contestants: of `make_contestants`; the first decodes plainly.
        encode: messages to prompt ids.
        progress: called behind each group, also one that was there already.
    """
    warm = False
    for number, group in enumerate(plan_groups(sets, settings)):
        if store.missing(group.key(contestant.name) for contestant in contestants):
            if not warm:
                _warm_up(contestants, group, settings, encode)
                warm = True
            store.append(_measure(contestants, group, settings, target, encode, number))
        progress(group)


def _warm_up(
    contestants: Sequence[Contestant], group: Group, settings: EvaluationSettings, encode: Encode
) -> None:
    """Compile kernels and touch memory, with the beginnings of answers."""
    if settings.warmup_tokens == 0:
        return
    some = [replace(conversation, followups=()) for conversation in group.conversations]
    for temperature in settings.temperatures:
        params = SamplingParams(
            temperature=temperature, max_tokens=settings.warmup_tokens, seed=settings.seed
        )
        for contestant in contestants:
            play(contestant, some, encode, _always(params))


def _always(params: SamplingParams) -> Callable[[Conversation, int], SamplingParams]:
    return lambda conversation, turn: params


def _measure(
    contestants: Sequence[Contestant],
    group: Group,
    settings: EvaluationSettings,
    target: Target,
    encode: Encode,
    number: int,
) -> list[Cell]:
    """Cells of one group; who begins rotates from group to group."""
    shift = number % len(contestants)
    played: dict[str, Played] = {}
    for contestant in (*contestants[shift:], *contestants[:shift]):
        played[contestant.name] = play(
            contestant,
            group.conversations,
            encode,
            lambda c, turn: settings.params(group.prompts, group.temperature, c, turn),
        )
    plain = {(a.conversation, a.turn): a.output.token_ids for a in played[PLAIN].answers}
    cells = []
    for contestant in contestants:
        one = played[contestant.name]
        for answer in one.answers:
            answer.counts.collisions = _collisions(target, answer, settings)
        compared = _Comparison(plain if group.temperature == 0 and contestant.name != PLAIN else None)
        cells.append(
            {
                "prompts": group.prompts,
                "domain": group.domain,
                "temperature": group.temperature,
                "drafter": contestant.name,
                "gamma": contestant.gamma,
                "conversations": [c.id for c in group.conversations],
                "fingerprint": fingerprint(group.conversations),
                "seconds": one.seconds,
                "draft_seconds": one.draft_seconds,
                "draft_rounds": one.draft_rounds,
                "answers": [{**_figures(answer), **compared.of(answer)} for answer in one.answers],
            }
        )
    return cells


def _collisions(target: Target, answer: Answer, settings: EvaluationSettings) -> int | None:
    if settings.collisions.alternatives == 0:
        return None
    output = answer.output
    sequence = [*output.prompt_token_ids, *output.token_ids]
    return count_collisions(target, sequence, answer.suspects, answer.params, settings.collisions)


def _figures(answer: Answer) -> dict[str, Any]:
    output, metrics = answer.output, answer.output.metrics
    repeats, ngrams = repeated_ngrams(output.token_ids)
    return {
        "conversation": answer.conversation,
        "turn": answer.turn,
        "finish_reason": output.finish_reason,
        "output_tokens": len(output.token_ids),
        "rounds": metrics.rounds,
        "committed": metrics.committed,
        "drafted": metrics.drafted,
        "verified": metrics.scheduled,
        "accepted": metrics.accepted,
        "repeated_ngrams": repeats,
        "ngrams": ngrams,
        "looping": is_looping(output.token_ids),
        "slots": asdict(answer.counts),
    }


class _Comparison:
    """Whether answers are plain decoding's. Turns behind a different answer were asked something else: None."""

    def __init__(self, plain: Mapping[tuple[str, int], list[int]] | None) -> None:
        self._plain = plain
        self._parted: set[str] = set()

    def of(self, answer: Answer) -> dict[str, Any]:
        if self._plain is None or answer.conversation in self._parted:
            return {"identical": None, "divergence": None}
        a, b = self._plain[answer.conversation, answer.turn], answer.output.token_ids
        if a == b:
            return {"identical": True, "divergence": None}
        self._parted.add(answer.conversation)
        i = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        token, other = (ids[i] if i < len(ids) else None for ids in (a, b))
        return {"identical": False, "divergence": {"position": i, "plain": token, "drafted": other}}
