"""The public test helpers say what they mean: exact models, honest proposals, a naive reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.core import Draft, DSparkError, Request, SamplingParams
from dspark.drafters.base import ObserveBatch, ProposeBatch
from dspark.engine.engine import Engine
from dspark.sampling import SamplingRows, probabilities
from dspark.shaping import LogitsShaper
from dspark.testing import (
    ScriptedDrafter,
    TableTarget,
    filter_row,
    fresh_pass,
    run_engine,
    shape_logits,
    slow_generate,
    tiny_decoder,
    tiny_drafter,
    tiny_tokenizer,
)

TABLE = np.array([[0.5, 0.25, 0.25], [0.0, 1.0, 0.0], [1, 1, 2]])


def requests(count: int, params: SamplingParams, prompt: tuple[int, ...] = (0,)) -> list[Request]:
    made = [Request(i, f"{i}", list(prompt), params, seed=7, max_total=64) for i in range(count)]
    for request in made:
        request.cached = len(prompt) - 1
    return made


def propose(drafter: ScriptedDrafter, rs: list[Request], lengths: list[int], vocab_size: int = 3) -> Draft:
    observe(drafter, rs, 0)
    shapers = [LogitsShaper.for_request(r, vocab_size, ()) for r in rs]
    tables = np.zeros((len(rs), 1), dtype=np.int64)
    return drafter.propose(ProposeBatch(rs, np.array(lengths), SamplingRows.of(rs), tables, shapers))


def observe(drafter: ScriptedDrafter, rs: list[Request], first: int) -> None:
    counts = [r.cached - first for r in rs]
    positions = torch.tensor([p for n in counts for p in range(first, first + n)], dtype=torch.int64)
    row_start = np.concatenate(([0], np.cumsum(counts)))
    drafter.observe(ObserveBatch(rs, row_start, positions, positions, None))


def test_table_target_is_its_table() -> None:
    target = TableTarget(TABLE)
    assert target.table[2].tolist() == [0.25, 0.25, 0.5]
    out = fresh_pass(target, [[0, 2], [1]], taps=(0, 4))
    assert torch.equal(out.logits.softmax(-1), target.table[torch.tensor([0, 2, 1])])
    assert torch.equal(out.last_logits, target.table[torch.tensor([2, 1])].log())
    assert out.taps is not None
    assert out.taps.tolist() == [[1, 0, 0] * 2, [0, 0, 1] * 2, [0, 1, 0] * 2]
    assert (target.forwards, target.rows) == (1, 3)


def test_joint_distribution_is_a_product_of_rows() -> None:
    target = TableTarget(TABLE)
    joint = target.joint_distribution(0, 3)
    assert joint.shape == (3, 3, 3)
    assert joint.sum() == pytest.approx(1)
    assert joint[2, 0, 1] == pytest.approx(0.25 * 0.25 * 0.25)
    assert joint[1, 0, 0] == 0
    for tokens in np.ndindex(joint.shape):
        assert target.sequence_probability(0, tokens) == pytest.approx(joint[tokens])
    assert target.sequence_probability(0, ()) == 1
    top = target.joint_distribution(0, 2, lambda row: filter_row(row, SamplingParams(top_k=1)))
    assert top[0, 0] == 1


@pytest.mark.parametrize("table", [np.ones((2, 3)), np.zeros((2, 2)), -np.eye(2)])
def test_table_target_refuses_what_is_no_table(table: np.ndarray) -> None:
    with pytest.raises(DSparkError, match="table"):
        TableTarget(table)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-4, 4), min_size=5, max_size=5),
    st.floats(0.2, 3),
    st.integers(0, 5),
    st.floats(0.05, 1),
    st.floats(0, 0.9),
)
def test_filter_row_agrees_with_the_serving_filters(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    row = torch.tensor([logits], dtype=torch.float64)
    rows = SamplingRows.of(requests(1, params))
    want = probabilities(row, rows)[0].numpy()
    got = filter_row(row.softmax(-1)[0].numpy(), params)
    if ((got > 0) == (want > 0)).all():  # they may part where a cut falls within rounding
        assert got == pytest.approx(want, abs=1e-5)
    else:
        kept = (got > 0) ^ (want > 0)
        assert kept.sum() < 5


def test_shape_logits_agrees_with_the_serving_shaper() -> None:
    rng = np.random.default_rng(0)
    params = SamplingParams(
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={4: 2.0},
        min_tokens=5,
        stop_token_ids=(2,),
    )
    request = Request(0, "0", [1, 3, 3], params, seed=0, max_total=64, token_ids=[1, 3, 3, 4, 4, 0])
    shaper = LogitsShaper.for_request(request, 8, (7,))
    assert shaper is not None
    logits = rng.normal(size=8)
    want = shaper.shape(torch.tensor(logits)[None].clone())[0].numpy()
    assert shape_logits(logits, [1, 3, 3], [4, 4, 0], params, (7,)) == pytest.approx(want)
    assert np.isneginf(want[[2, 7]]).all()


def test_slow_generate_ends_where_it_should(tmp_path: Path) -> None:
    cycle = TableTarget(np.roll(np.eye(6), 1, axis=1), eos_token_ids=(4,))
    greedy = SamplingParams(temperature=0, max_tokens=9)
    tokenizer = tiny_tokenizer(tmp_path, 6)
    out = slow_generate(cycle, [0], greedy)
    assert (out.token_ids, out.finish_reason, out.stop_reason) == ([1, 2, 3, 4], "stop", None)
    out = slow_generate(cycle, [0], SamplingParams(temperature=0, max_tokens=9, stop="cd"), tokenizer)
    assert (out.token_ids, out.text, out.stop_reason) == ([1, 2, 3], "b", "cd")
    out = slow_generate(cycle, [0], SamplingParams(temperature=0, ignore_eos=True), max_model_len=8)
    assert (out.token_ids, out.finish_reason) == ([1, 2, 3, 4, 5, 0, 1], "length")


def test_slow_generate_samples_what_it_reports() -> None:
    target = TableTarget(TABLE)
    out = slow_generate(target, [0], SamplingParams(temperature=0.5, max_tokens=20, seed=3))
    assert (
        out.token_ids
        == slow_generate(target, [0], SamplingParams(temperature=0.5, max_tokens=20, seed=3)).token_ids
    )
    assert out.distributions[0] == pytest.approx([2 / 3, 1 / 6, 1 / 6])
    assert all(p[t] > 0 for p, t in zip(out.distributions, out.token_ids, strict=True))


def test_scripted_proposals_follow_q() -> None:
    """Sampled tokens have the probabilities handed over, slot by slot behind the drafted token."""
    q = torch.tensor([[0.2, 0.8, 0.0], [0.5, 0.0, 0.5], [0.1, 0.1, 0.8]], dtype=torch.float64)
    draft = propose(ScriptedDrafter.from_table(q, 2), requests(4000, SamplingParams()), [2] * 4000)
    assert draft.probs is not None
    assert torch.equal(draft.probs[:, 1], q[draft.tokens[:, 0]])
    counts = torch.zeros(3, 3, dtype=torch.float64)
    counts.index_put_(tuple(draft.tokens.T), torch.ones(4000, dtype=torch.float64), accumulate=True)
    exact = q[0][:, None] * q
    assert (counts[exact == 0] == 0).all()
    assert ((counts - 4000 * exact).abs() <= 5 * (4000 * exact * (1 - exact)).sqrt()).all()


def test_scripted_proposals_take_the_requests_parameters() -> None:
    q = torch.tensor([[0.2, 0.5, 0.3]] * 3, dtype=torch.float64)
    for params, expected in (
        (SamplingParams(temperature=0), [0, 1, 0]),
        (SamplingParams(top_k=2), [0, 0.625, 0.375]),
        (SamplingParams(logit_bias={1: -1e4}), [0.4, 0, 0.6]),
    ):
        draft = propose(ScriptedDrafter.from_table(q, 1), requests(1, params), [1])
        assert draft.probs is not None
        assert draft.probs[0, 0].tolist() == pytest.approx(expected)


def test_pruned_vocabulary_and_confidence() -> None:
    q = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    drafter = ScriptedDrafter.from_table(q, 3, vocab=[2, 1], confidence=[1.0, 0.0, -1.0])
    draft = propose(drafter, requests(5, SamplingParams()), [3, 2, 1, 0, 3])
    assert draft.vocab is not None
    assert draft.confidence is not None
    assert draft.vocab.tolist() == [2, 1]
    assert draft.confidence[4].tolist() == [1, 0, -1]
    assert set(draft.tokens[0].tolist()) <= {1, 2}
    assert draft.tokens[1, 2] == draft.tokens[3, 0] == -1  # no meaning past a length
    assert drafter.proposed == 9
    with pytest.raises(DSparkError, match="vocab"):
        ScriptedDrafter.from_table(q, 3)


def test_deterministic_scripts() -> None:
    target = TableTarget(np.roll(np.eye(5), 1, axis=1))
    greedy = requests(2, SamplingParams(temperature=0), prompt=(3, 1))
    right = propose(ScriptedDrafter.copy_target(target, 3), greedy, [3, 2], 5)
    wrong = propose(ScriptedDrafter.always_wrong(target, 2), greedy, [2, 2], 5)
    fixed = propose(ScriptedDrafter.fixed([4, 0]), greedy, [2, 1], 5)
    assert right.tokens.tolist() == [[2, 3, 4], [2, 3, -1]]
    assert wrong.tokens.tolist() == [[3, 0], [3, 0]]
    assert fixed.tokens.tolist() == [[4, 0], [4, -1]]
    assert right.probs is None


def test_a_scripted_drafter_notices_a_gap_in_what_it_observes() -> None:
    drafter = ScriptedDrafter.fixed([1])
    rs = requests(1, SamplingParams(), prompt=(0, 1, 2))
    observe(drafter, rs, 0)
    rs[0].cached = 5
    with pytest.raises(AssertionError, match="observed positions"):
        observe(drafter, rs, 3)
    drafter.forget(rs[0])
    observe(drafter, rs, 0)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_tiny_decoders_say_something(kind: str) -> None:
    target = tiny_decoder(seed=1, kind=kind)  # type: ignore[arg-type]
    greedy = SamplingParams(temperature=0, max_tokens=30)
    texts = [slow_generate(target, prompt, greedy) for prompt in ([1, 2, 3], [9])]
    assert all(len(set(t.token_ids)) >= 5 for t in texts)
    margins = [np.diff(np.sort(p)[-2:])[0] for t in texts for p in t.distributions]
    assert min(margins) > 1e-6
    again = tiny_decoder(seed=1, kind=kind)  # type: ignore[arg-type]
    assert all(map(torch.equal, target.state_dict().values(), again.state_dict().values()))


HEADS = [("dspark", "vanilla"), ("dspark", "gated"), ("dspark", "rnn"), ("dflash", "vanilla")]


@pytest.mark.parametrize(("method", "head"), HEADS)
def test_tiny_drafters_are_reproducible_and_draft_in_their_vocabulary(method: str, head: str) -> None:
    target = tiny_decoder(seed=1, vocab_size=20)
    made = [tiny_drafter(target, method, head, 4, draft_vocab_size=6) for _ in range(2)]  # type: ignore[arg-type]
    first, second = (drafter.model.state_dict() for drafter in made)
    assert all(map(torch.equal, first.values(), second.values()))
    assert made[0].vocab is not None
    assert len(set(made[0].vocab.tolist())) == 6
    (output,) = run_engine(Engine(target, made[0]), [[1, 2]], SamplingParams(temperature=0, max_tokens=9))
    assert output.metrics.drafted > 0


def test_tiny_tokenizer_is_one_character_a_token(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    assert tokenizer.encode("abz_") == [0, 1, 25, 63]
    assert tokenizer.decode([63, 25, 1, 0]) == "_zba"
    assert tokenizer.is_byte_level
