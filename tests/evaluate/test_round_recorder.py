"""What the recorder sees: exact figures on scripted drafts, and naive recomputation on a random model."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from dspark.core import Draft, SamplingParams
from dspark.drafters.base import Drafter, ProposeBatch
from dspark.drafters.lookup import LookupFirst
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.evaluate.collisions import Suspect, count_collisions
from dspark.evaluate.conversations import Conversation, Messages
from dspark.evaluate.playing import Answer, Contestant, play
from dspark.evaluate.recorder import RoundRecorder
from dspark.evaluate.rounds import CollisionThresholds
from dspark.schedule.policies import FixedLength
from dspark.target.base import Target
from dspark.testing import ScriptedDrafter, TableTarget, fresh_pass, run_engine, tiny_decoder, tiny_drafter

OF, COURSE, NO, PROBLEM = 1, 2, 3, 4


def watched(
    target: Target, drafter: Drafter, gamma: int, thresholds: CollisionThresholds | None = None
) -> tuple[Engine, RoundRecorder]:
    recorder = RoundRecorder(target, thresholds or CollisionThresholds())
    return recorder.engine(drafter, FixedLength(gamma), None, EngineConfig(kv_cache_tokens=512)), recorder


def answers(
    engine: Engine, recorder: RoundRecorder, prompts: list[list[int]], params: SamplingParams
) -> list[Answer]:
    conversations = [
        Conversation(str(i), "d", [{"role": "user", "content": str(i)}]) for i in range(len(prompts))
    ]

    def encode(messages: Messages) -> list[int]:
        return prompts[int(messages[0]["content"])]

    played = play(Contestant("x", engine, recorder, 0), conversations, encode, lambda c, turn: params)
    return played.answers


def cycle(size: int, right: float = 0.9) -> torch.Tensor:
    """t is followed by t + 1, else by anything."""
    table = torch.full((size, size), (1 - right) / (size - 1), dtype=torch.float64)
    for t in range(size):
        table[t, (t + 1) % size] = right
    return table


def two_right(batch: ProposeBatch, drafts: torch.Tensor) -> torch.Tensor:
    """The first two drafts are the successors, the third skips one, the rest go on from there."""
    last = drafts[:, -1] if drafts.shape[1] else torch.tensor([r.token_ids[-1] for r in batch.requests])
    return (last + (2 if drafts.shape[1] == 2 else 1)) % 8


def test_scripted_rounds_give_exact_counts() -> None:
    target = TableTarget(cycle(8))
    drafter = ScriptedDrafter(None, two_right, 4)
    engine, recorder = watched(target, drafter, 4)
    for answer in answers(engine, recorder, [[0], [5]], SamplingParams(temperature=0, max_tokens=16)):
        # One token of the prompt's pass, then five rounds of 2 + 1 tokens; the last has room for two drafts.
        assert answer.output.metrics.rounds == 5
        assert answer.counts.reached == [5, 5, 4]
        assert answer.counts.accepted == [5, 5, 0]
        assert answer.counts.soft == pytest.approx([5 * 0.9, 5 * 0.9, 4 * 0.1 / 7])
        assert answer.counts.pairs == 4 * 3 + 1  # reached firsts of four drafts, of two
    assert recorder.draft_steps == 5
    assert recorder.draft_s > 0
    assert recorder.overhead_s > 0


def test_rounds_beside_the_prefill_of_a_neighbour() -> None:
    target = TableTarget(cycle(8))
    recorder = RoundRecorder(target, CollisionThresholds())
    config = EngineConfig(kv_cache_tokens=512, max_num_batched_tokens=3)
    engine = recorder.engine(ScriptedDrafter(None, two_right, 4), FixedLength(4), None, config)
    prompts = [list(range(8)) * 2, [0], list(range(5))]
    for answer in answers(engine, recorder, prompts, SamplingParams(temperature=0, max_tokens=16)):
        assert (answer.counts.reached, answer.counts.accepted) == ([5, 5, 4], [5, 5, 0])
        assert answer.counts.soft == pytest.approx([5 * 0.9, 5 * 0.9, 4 * 0.1 / 7])


def test_plainly_decoded_requests_leave_no_trace() -> None:
    engine, recorder = watched(TableTarget(cycle(8)), ScriptedDrafter(None, two_right, 4), 4)
    (answer,) = answers(
        engine, recorder, [[0]], SamplingParams(temperature=0, max_tokens=9, speculative=False)
    )
    assert answer.output.token_ids == [1, 2, 3, 4, 5, 6, 7, 0, 1]
    assert answer.counts.reached == []


@pytest.mark.parametrize("eos", [(3,), ()])
def test_drafts_behind_the_end_count_nowhere(eos: tuple[int, ...]) -> None:
    target = TableTarget(cycle(8), eos_token_ids=eos)
    engine, recorder = watched(target, ScriptedDrafter.copy_target(target, 5), 5)
    (answer,) = answers(
        engine, recorder, [[0]], SamplingParams(temperature=0, max_tokens=30, stop_token_ids=(3,))
    )
    # 4, 5, 6 were drafted behind it, and the target agrees with them
    assert answer.output.token_ids == [1, 2, 3]
    assert (answer.counts.reached, answer.counts.accepted) == ([1, 1], [1, 1])
    assert answer.counts.pairs == 1


def test_a_rejected_end_token_begins_no_pair() -> None:
    target = TableTarget(cycle(8), eos_token_ids=(7,))
    engine, recorder = watched(target, ScriptedDrafter.fixed([7, 1]), 2)
    (answer,) = answers(engine, recorder, [[0]], SamplingParams(temperature=0, max_tokens=5))
    assert answer.counts.reached == [3]
    assert answer.counts.pairs == 0


@pytest.mark.parametrize("vocab", [None, [0, 2, 3]])
def test_soft_acceptance_is_the_overlap(vocab: list[int] | None) -> None:
    p = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    q = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    overlap = 0.1 + 0.2 + 0.2 + 0.1
    if vocab is not None:
        q = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)  # on tokens 0, 2, 3
        overlap = 0.1 + 0.2 + 0.1
    target = TableTarget(p.repeat(4, 1))
    drafter = ScriptedDrafter.from_table(q.repeat(4, 1), 3, vocab=vocab)
    engine, recorder = watched(target, drafter, 3)
    params = SamplingParams(temperature=1, max_tokens=90, seed=3)
    (answer,) = answers(engine, recorder, [[0]], params)
    counts = answer.counts
    assert counts.soft == pytest.approx([overlap * n for n in counts.reached])
    deviation = (overlap * (1 - overlap) / counts.reached[0]) ** 0.5
    assert counts.accepted[0] / counts.reached[0] == pytest.approx(overlap, abs=4 * deviation)


def modes(problem_follows_no: bool = True) -> torch.Tensor:
    """0 -> "of" .5 | "no" .45; "of" -> "course"; "no" -> "problem" (or 5); then back to 0."""
    table = torch.full((6, 6), 1e-4, dtype=torch.float64)
    table[0, OF], table[0, NO] = 0.5, 0.45
    table[OF, COURSE] = table[COURSE, 0] = table[PROBLEM, 0] = table[5, 0] = 1
    table[NO, PROBLEM if problem_follows_no else 5] = 1
    return table


def of_problem(batch: ProposeBatch, drafts: torch.Tensor) -> torch.Tensor:
    """ "of" -> "course" 0 "of" "problem", "course" -> 0 "of" "problem"; further drafts are 0."""
    anchors = torch.tensor([r.token_ids[-1] for r in batch.requests])
    block = torch.tensor([COURSE, 0, OF, PROBLEM, 0, 0])
    return block[drafts.shape[1] + (anchors == COURSE).long()]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_of_problem_collides(temperature: float) -> None:
    target = TableTarget(modes())
    engine, recorder = watched(target, ScriptedDrafter(None, of_problem, 4), 4)
    params = SamplingParams(temperature=temperature, max_tokens=1 + 4 + 3 * 3, seed=0)
    (answer,) = answers(engine, recorder, [[0]], params)
    if temperature == 0:
        # "of" | course 0 of (not problem:) course | 0 of course, three times; the last round has room for two
        assert answer.output.metrics.rounds == 4
        assert answer.counts.suspects == 3
        assert answer.counts.pairs == 3 + 2 * 3 + 1
    assert 0 < answer.counts.suspects == collisions(target, answer)
    assert collisions(target, answer, probable=0.47) == answer.counts.suspects
    assert collisions(target, answer, probable=0.48) == 0  # p("no") p("problem" | "no") is all there is
    assert collisions(target, answer, alternatives=0) == 0


def test_no_other_mode_no_collision() -> None:
    target = TableTarget(modes(problem_follows_no=False))
    engine, recorder = watched(target, ScriptedDrafter(None, of_problem, 4), 4)
    (answer,) = answers(engine, recorder, [[0]], SamplingParams(temperature=0, max_tokens=14))
    assert answer.counts.suspects == 3
    assert collisions(target, answer) == 0


def collisions(target: Target, answer: Answer, probable: float = 0.1, alternatives: int = 4) -> int:
    sequence = [*answer.output.prompt_token_ids, *answer.output.token_ids]
    suspects = [
        Suspect(s.position, s.token, s.known, s.alternatives[:alternatives], s.weights[:alternatives])
        for s in answer.suspects
    ]
    return count_collisions(target, sequence, suspects, answer.params, CollisionThresholds(probable=probable))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_extra_pass_equals_fresh_passes(temperature: float) -> None:
    target = tiny_decoder(seed=4, layers=1, max_context=512)
    generator = torch.Generator().manual_seed(1)
    sequence = torch.randint(0, 64, (300,), generator=generator).tolist()
    params = SamplingParams(temperature=temperature)
    suspects, masses = [], []
    for position in (1, 5, 15, 16, 17, 32, 200, 255, 299):  # at and around borders of blocks and chunks
        others = torch.randint(0, 64, (3,), generator=generator).tolist()
        weights = (0.5, 0.25, 0.125)
        target_logits = fresh_pass(target, [[*sequence[:position], y] for y in others]).last_logits
        p = (target_logits / (temperature or 1)).softmax(-1)
        token = int(p[0].argmax())
        masses.append(0.01 + sum(w * float(row[token]) for w, row in zip(weights, p, strict=True)))
        suspects.append(Suspect(position, token, 0.01, tuple(others), weights))
    for mass in masses:
        for nudge in (-1e-6, 1e-6):
            thresholds = CollisionThresholds(probable=mass + nudge)
            expected = sum(other >= mass + nudge for other in masses)
            assert count_collisions(target, sequence, suspects, params, thresholds) == expected


@dataclass
class Spy:
    """A drafter that remembers its proposals."""

    inner: Drafter

    def __post_init__(self) -> None:
        for name in ("name", "deterministic", "max_draft", "taps", "kv_specs", "attach", "observe", "forget"):
            setattr(self, name, getattr(self.inner, name))
        self.seen: list[tuple[list[int], Draft]] = []

    def propose(self, batch: ProposeBatch) -> Draft:
        draft = self.inner.propose(batch)
        self.seen.append((list(batch.requests[0].token_ids), draft))
        return draft


@pytest.mark.parametrize("draft_vocab_size", [None, 40])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_counts_equal_naive_loops_over_the_rounds(temperature: float, draft_vocab_size: int | None) -> None:
    target = tiny_decoder(seed=2, layers=2)
    spy = Spy(tiny_drafter(target, draft_vocab_size=draft_vocab_size, block_size=4))
    thresholds = CollisionThresholds(probable=0.02, improbable=0.01, alternatives=3)
    engine, recorder = watched(target, spy, 4, thresholds)  # type: ignore[arg-type]
    params = SamplingParams(temperature=temperature, max_tokens=24, seed=5)
    (answer,) = answers(engine, recorder, [[3, 1, 4]], params)
    sequence = [*answer.output.prompt_token_ids, *answer.output.token_ids]

    reached, accepted, soft = [0] * 4, [0] * 4, [0.0] * 4
    pairs = suspects = found = 0
    for context, draft in spy.seen:
        length = int(draft.lengths[0])
        tokens = draft.tokens[0, :length].tolist()
        # The correction of a rejected draft is never that draft again.
        pairing = zip(tokens, sequence[len(context) :], strict=False)
        taken = next((k for k, (x, y) in enumerate(pairing) if x != y), length)
        rows = fresh_pass(target, [[*context, *tokens[:k]] for k in range(length + 1)]).last_logits
        p = (rows / (temperature or 1)).softmax(-1)
        for k in range(min(taken + 1, length)):
            reached[k] += 1
            accepted[k] += k < taken
            if temperature == 0:
                soft[k] += float(p[k][tokens[k]])
            else:
                assert draft.probs is not None
                ids = range(64) if draft.vocab is None else draft.vocab.tolist()
                soft[k] += sum(
                    min(float(p[k][v]), float(q)) for v, q in zip(ids, draft.probs[0, k], strict=True)
                )
            if k + 1 == length:
                continue
            pairs += 1
            if p[k][tokens[k]] < 0.02 or p[k + 1][tokens[k + 1]] > 0.01:
                continue
            suspects += 1
            others = sorted((v for v in range(64) if v != tokens[k]), key=lambda v: -float(p[k][v]))[:3]
            mass = float(p[k][tokens[k]] * p[k + 1][tokens[k + 1]])
            behind = fresh_pass(target, [[*context, *tokens[:k], y] for y in others]).last_logits
            for y, row in zip(others, (behind / (temperature or 1)).softmax(-1), strict=True):
                mass += float(p[k][y] * row[tokens[k + 1]])
            found += mass >= 0.02
    counts = answer.counts
    width = len(counts.reached)
    assert reached[width:] == [0] * (4 - width)
    assert (counts.reached, counts.accepted) == (reached[:width], accepted[:width])
    assert counts.soft == pytest.approx(soft[:width])
    assert (counts.pairs, counts.suspects) == (pairs, suspects)
    assert suspects > 0
    assert count_collisions(target, sequence, answer.suspects, params, thresholds) == found


def test_watching_changes_no_output() -> None:
    target = tiny_decoder(seed=1)
    prompts, params = [[1, 2], [9, 8, 7]], SamplingParams(temperature=1, max_tokens=12, seed=1)
    engine, _ = watched(target, tiny_drafter(target), 7)
    bare = Engine(target, tiny_drafter(target), FixedLength(7), None, EngineConfig(kv_cache_tokens=512))
    seen, unseen = (run_engine(e, prompts, params) for e in (engine, bare))
    assert [o.token_ids for o in seen] == [o.token_ids for o in unseen]


def test_copies_are_asked_for_and_seen_as_without_watching() -> None:
    """Prompt lookup copies more tokens than the policy pays for: watched as unwatched."""
    prompt = [1, 2, 3, 4, 5, 6] * 3
    params = SamplingParams(temperature=0, max_tokens=24)

    def drafter() -> LookupFirst:
        return LookupFirst(ScriptedDrafter(None, two_right, 2), 2, 6)

    target = TableTarget(cycle(8))
    [plain] = run_engine(Engine(target, drafter(), FixedLength(2)), [prompt], params)
    engine, recorder = watched(target, drafter(), 2)
    [answer] = answers(engine, recorder, [prompt], params)
    metrics = answer.output.metrics
    assert answer.output.token_ids == plain.token_ids
    assert (metrics.rounds, metrics.drafted) == (plain.metrics.rounds, plain.metrics.drafted)
    assert metrics.drafted > 2 * metrics.rounds
    assert sum(answer.counts.accepted) == metrics.accepted
