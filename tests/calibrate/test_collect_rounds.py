"""Collection through the engine: what was drafted, judged and how probable the verdict was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from dspark.calibrate import Answer, Rounds
from dspark.calibrate.collect import Job, collect
from dspark.calibrate.jobs import CalibrationPrompt, plan_jobs
from dspark.calibrate.rounds import Source
from dspark.core import DSparkError, SamplingParams
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.engine.judge import judge
from dspark.schedule.policies import FixedLength, Threshold
from dspark.testing import ScriptedDrafter, TableTarget, run_engine, tiny_decoder, tiny_drafter

CONFIDENCE = (1.0, -0.5, 0.25)


def source(gamma: int, rule: str = "ratio") -> Source:
    return Source("t", "", "d", "", gamma, rule, "float64")


def jobs(count: int, temperature: float, max_tokens: int = 12, vocab: int = 4) -> list[Job]:
    return [
        Job(
            Answer(f"p{i}", "chat", temperature),
            [i % vocab, 1, 2],
            SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=i),
        )
        for i in range(count)
    ]


def table_engine(q: torch.Tensor, gamma: int = 3, vocab: list[int] | None = None, **config: object) -> Engine:
    drafter = ScriptedDrafter.from_table(q, gamma, vocab=vocab, confidence=CONFIDENCE[:gamma])
    sizes = EngineConfig(max_num_seqs=8, kv_cache_tokens=2048, **config)
    return Engine(TableTarget.random(4, seed=1), drafter, None, None, sizes)


def random_rows(width: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (1.5 * torch.randn(4, width, generator=generator, dtype=torch.float64)).softmax(-1)


@pytest.mark.parametrize(("temperature", "vocab"), [(1.0, None), (0.6, None), (1.0, [3, 0, 2])])
def test_acceptance_is_what_the_ratio_rule_uses(temperature, vocab):
    """Against p_t and p_d computed from the tables, token by token."""
    q = random_rows(4 if vocab is None else 3, seed=2)
    engine = table_engine(q, vocab=vocab)
    drafts = []
    propose = engine.drafter.propose

    def spying(batch):
        draft = propose(batch)
        for r, request in enumerate(batch.requests):
            if batch.lengths[r]:
                tokens = draft.tokens[r, : draft.lengths[r]].tolist()
                drafts.append((request.request_id, request.token_ids[-1], tokens))
        return draft

    engine.drafter.propose = spying
    (job,) = jobs(1, temperature, max_tokens=60)
    (rounds,) = collect(engine, [job], source(3))
    assert len(rounds) == len(drafts)
    heat = lambda row: (row.log() / temperature).softmax(-1)  # noqa: E731
    for i, (_, anchor, tokens) in enumerate(drafts):
        previous = anchor
        for k, x in enumerate(tokens):
            p = heat(engine.target.table[previous])[x]
            p_draft = heat(q[previous])
            at = x if vocab is None else vocab.index(x)
            assert rounds.acceptance[i, k] == pytest.approx(min(1.0, float(p / p_draft[at])), abs=1e-6)
            previous = x
        assert np.isnan(rounds.acceptance[i, len(tokens) :]).all()
        assert rounds.lengths[i] == len(tokens)
        assert rounds.logits[i, : len(tokens)] == pytest.approx(CONFIDENCE[: len(tokens)])


def test_expected_survival_has_the_mean_of_the_outcomes():
    rounds = Rounds.join(list(collect(table_engine(random_rows(4, 3)), jobs(20, 1.0, 60), source(3))))
    assert len(rounds) > 300
    full = rounds.lengths == 3
    realised, expected = rounds.survived[full], rounds.expected_survival[full]
    spread = realised.std(axis=0) / np.sqrt(full.sum())
    assert (np.abs(realised.mean(axis=0) - expected.mean(axis=0)) < 4 * spread).all()
    assert (expected.std(axis=0) < realised.std(axis=0)).all()


@pytest.mark.parametrize("head", ["vanilla", "rnn"])
def test_greedy_rounds_of_a_real_drafter(head):
    """At temperature 0 both labels are the same; counts are those of an ordinary run."""
    target = tiny_decoder(seed=1, vocab_size=24)
    config = EngineConfig(max_num_seqs=4, kv_cache_tokens=1024)
    work = jobs(3, 0.0, 16, vocab=24)
    engine = Engine(target, tiny_drafter(target, head=head, block_size=4), None, None, config)
    parts = list(collect(engine, work, source(4), concurrency=2))
    by_prompt = {part.answers[0].prompt_id: part for part in parts}
    outputs = run_engine(engine, [j.prompt_token_ids for j in work], [j.params for j in work])
    for job, output in zip(work, outputs, strict=True):
        part = by_prompt[job.answer.prompt_id]
        assert np.array_equal(part.survived, part.expected_survival * part.observed)
        metrics = output.metrics
        drafted_rounds = int((part.lengths > 0).sum())
        assert drafted_rounds == metrics.scheduled_per_position[0]
        assert part.observed.sum(axis=0).tolist() == metrics.scheduled_per_position
    assert sum(part.accepted.sum() for part in parts) > 0


def test_mixed_temperatures_in_one_batch():
    q = random_rows(4, 4)
    work = [job for pair in zip(jobs(4, 0.0), jobs(4, 1.0), strict=True) for job in pair]
    parts = list(collect(table_engine(q), work, source(3)))
    assert {p.answers[0] for p in parts} == {j.answer for j in work}
    for part in parts:
        hard = np.isin(part.acceptance[part.observed], (0.0, 1.0))
        assert hard.all() == (part.answers[0].temperature == 0)


def test_one_hot_drafts_are_taken_with_p_t():
    target = TableTarget.random(4, seed=1)
    engine = Engine(target, ScriptedDrafter.fixed([2, 2], confidence=0.0), None, None, EngineConfig())
    (rounds,) = collect(engine, jobs(1, 1.0, 40), source(2))
    p = target.table.numpy()
    assert rounds.acceptance[rounds.lengths == 2, 1] == pytest.approx(p[2, 2])
    assert np.isclose(rounds.acceptance[:, :1], p[:, 2], atol=1e-6).any(axis=1).all()


def test_under_shared_noise_outcomes_are_all_there_is():
    engine = table_engine(random_rows(4, 5), acceptance="shared_noise")
    rounds = Rounds.join(list(collect(engine, jobs(4, 1.0, 40), source(3, "shared_noise"))))
    assert np.array_equal(rounds.survived, rounds.expected_survival)
    assert 0 < rounds.accepted.mean() < 3


def test_fewer_slots_than_the_drafter_has_and_any_policy():
    engine = table_engine(random_rows(4, 6))
    engine.policy = Threshold(3, 0.99)
    (rounds,) = collect(engine, jobs(1, 1.0), source(2))
    assert rounds.lengths.max() == 2
    assert isinstance(engine.policy, Threshold)


def test_the_engine_serves_on_afterwards_and_a_closed_collection_leaves_nothing():
    target = tiny_decoder(seed=1, vocab_size=24)
    config = EngineConfig(max_num_seqs=4, kv_cache_tokens=1024)
    engine = Engine(target, tiny_drafter(target, block_size=4), FixedLength(4), None, config)
    work = jobs(2, 0.0, 12, vocab=24)
    before = run_engine(engine, [j.prompt_token_ids for j in work], work[0].params)
    collection = collect(engine, work, source(4))
    assert isinstance(collection, Iterator)
    next(collection)
    collection.close()
    after = run_engine(engine, [j.prompt_token_ids for j in work], work[0].params)
    assert [o.token_ids for o in after] == [o.token_ids for o in before]
    assert [o.metrics.accepted for o in after] == [o.metrics.accepted for o in before]


@pytest.mark.parametrize("accepts", [True, False])
def test_a_verdict_that_the_rule_cannot_give_is_noticed(monkeypatch, accepts):
    """Wrong drafts accepted, or right ones rejected: these are no outcomes of the recorded probabilities."""

    def misjudge(batch, draft, seen, rule):
        judgement = judge(batch, draft, seen, rule)
        return replace(judgement, accepted=seen.lengths if accepts else 0 * seen.lengths)

    monkeypatch.setattr("dspark.engine.engine.judge", misjudge)
    target = TableTarget.random(4, seed=1)
    script = ScriptedDrafter.always_wrong if accepts else ScriptedDrafter.copy_target
    engine = Engine(target, script(target, 2, confidence=0.0), None, None, EngineConfig())
    with pytest.raises(DSparkError, match="follows another rule"):
        list(collect(engine, jobs(1, 0.0), source(2)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma": 4}, "makes 3 drafts, 4 were asked for"),
        ({"concurrency": 0}, "1 or more, got 0"),
        ({"drafter": None}, "no drafter"),
        ({"confidence": None}, "no confidence head"),
        ({"busy": True}, "still has requests"),
    ],
)
def test_what_cannot_be_collected(change, message):
    q = random_rows(4, 8)
    engine = table_engine(q)
    if "confidence" in change:
        engine.drafter = ScriptedDrafter.from_table(q, 3)
    if "drafter" in change:
        engine = Engine(engine.target)
    if "busy" in change:
        engine.add([1], SamplingParams(max_tokens=4))
    with pytest.raises(DSparkError, match=message):
        list(collect(engine, jobs(1, 1.0), source(change.get("gamma", 3)), change.get("concurrency", 2)))


def test_jobs_are_one_answer_a_greedy_prompt_and_several_sampled_ones():
    prompts = [CalibrationPrompt(str(i), "chat", [{"role": "user", "content": "x" * i}]) for i in (1, 2)]
    encode = lambda messages: [len(messages[0]["content"])]  # noqa: E731
    planned = plan_jobs(prompts, encode, (0.0, 1.0), samples=3, max_tokens=9, seed=5)
    assert [(j.answer.prompt_id, j.answer.temperature, j.answer.sample) for j in planned] == [
        ("1", 0.0, 0), ("2", 0.0, 0),
        ("1", 1.0, 0), ("1", 1.0, 1), ("1", 1.0, 2), ("2", 1.0, 0), ("2", 1.0, 1), ("2", 1.0, 2),
    ]  # fmt: skip
    assert planned[1].prompt_token_ids == [2]
    assert planned[2].params.temperature == 1.0
    assert len({j.params.seed for j in planned}) == 8
    again = plan_jobs(prompts[1:], encode, (1.0,), samples=1, max_tokens=9, seed=5)
    assert again[0].params == planned[5].params  # whatever else is asked for
    for bad in ({"samples": 0}, {"max_tokens": 1}):
        with pytest.raises(DSparkError, match="got"):
            plan_jobs(prompts, encode, (1.0,), **{"samples": 1, "max_tokens": 9, "seed": 0, **bad})
