"""Shared-noise acceptance: text at a seed is plain decoding's, token for token, whatever drafts, schedules or runs
beside it, and is distributed as the target's.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dspark.acceptance import (
    ratio_acceptance,
    shared_noise_acceptance,
    shared_noise_choice,
    token_noise,
    tolerates_live,
)
from dspark.core import DSparkError, SamplingParams
from dspark.drafters.lookup import LookupFirst
from dspark.drafters.ngram import NgramDrafter
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.schedule.cost import DraftCost, TableCost
from dspark.schedule.policies import FixedLength, GlobalScheduler, LaggedScheduler, PrefixScheduler, Threshold
from dspark.testing import ScriptedDrafter, TableTarget, fresh_pass, run_engine, tiny_decoder, tiny_drafter
from dspark.testing.chain import tiny_chain_drafter

V = 24
TARGET = tiny_decoder(seed=3, vocab_size=V, layers=2, hidden=16, max_context=64, eos_token_ids=(5,))
COST = TableCost((1, 8, 64), (1.0, 1.2, 4.0), draft=DraftCost(0.02, 0.001, 0.001))
PARAMS = [
    SamplingParams(temperature=1.0, seed=7, max_tokens=18),
    SamplingParams(temperature=0.7, top_p=0.9, seed=7, max_tokens=21),
    SamplingParams(temperature=0.0, max_tokens=15),
    SamplingParams(temperature=1.3, top_k=6, seed=1, presence_penalty=0.8, max_tokens=17),
    SamplingParams(temperature=1.0, min_p=0.02, seed=2, min_tokens=9, max_tokens=17),
]
PROMPTS = [[1, 2, 3], [1, 2, 3], [4], [6, 7, 8, 9], [3, 3]]
DRAFTERS = {
    "dspark": lambda: tiny_drafter(TARGET, "dspark", "vanilla", 4, None),
    "dspark, gated, pruned": lambda: tiny_drafter(TARGET, "dspark", "gated", 4, 9),
    "dspark, rnn": lambda: tiny_drafter(TARGET, "dspark", "rnn", 4, None),
    "dflash": lambda: tiny_drafter(TARGET, "dflash", "vanilla", 4, None),
    "ngram": lambda: NgramDrafter(4, 2, 1),
    "eagle3": lambda: tiny_chain_drafter(TARGET),
    "eagle3, pruned": lambda: tiny_chain_drafter(TARGET, draft_vocab_size=9),
    "mtp": lambda: tiny_chain_drafter(TARGET, "mtp"),
    "dspark and copies": lambda: LookupFirst(tiny_drafter(TARGET, "dspark", "vanilla", 4, None), 4, 4, 1, 2),
    "target itself": lambda: ScriptedDrafter.copy_target(TARGET, 4),
    "wrong": lambda: ScriptedDrafter.always_wrong(TARGET, 4),
    "table": lambda: ScriptedDrafter.from_table(
        torch.full((V, V), 1 / V, dtype=torch.float64), 4, confidence=1.0
    ),
}


def config(**options) -> EngineConfig:
    return EngineConfig(acceptance="shared_noise", kv_cache_tokens=64 * 8, **options)


def plain() -> list[list[int]]:
    """Each request alone, without a drafter."""
    return [
        run_engine(Engine(TARGET, config=config()), [prompt], params)[0].token_ids
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]


@pytest.mark.parametrize("name", DRAFTERS)
def test_text_is_that_of_plain_decoding(name: str) -> None:
    outputs = run_engine(Engine(TARGET, DRAFTERS[name](), config=config()), PROMPTS, PARAMS)
    assert [o.token_ids for o in outputs] == plain()
    assert sum(o.metrics.scheduled for o in outputs) > 0
    if name == "target itself":
        assert all(o.metrics.accepted >= 0.6 * o.metrics.scheduled for o in outputs)


@pytest.mark.parametrize(
    "policy",
    [
        lambda: Threshold(4, 0.5),
        lambda: PrefixScheduler(4, COST),
        lambda: LaggedScheduler(4, COST),
        lambda: GlobalScheduler(4, COST),
        lambda: FixedLength(2),
    ],
)
def test_no_schedule_nor_batch_changes_the_text(policy) -> None:
    """In two rows at a time, with chunked prompts and little memory, and a LIVE policy at a temperature above 0."""
    small = config(max_num_seqs=2, max_num_batched_tokens=3, block_size=4)
    drafter = tiny_drafter(TARGET, "dspark", "vanilla", 4, None)
    outputs = run_engine(Engine(TARGET, drafter, policy(), None, small), PROMPTS, PARAMS)
    assert [o.token_ids for o in outputs] == plain()


def test_speculation_can_be_switched_off_for_a_request() -> None:
    mixed = [replace(p, speculative=i % 2 == 0) for i, p in enumerate(PARAMS)]
    drafter = tiny_drafter(TARGET, "dspark", "vanilla", 4, None)
    assert [
        o.token_ids for o in run_engine(Engine(TARGET, drafter, config=config()), PROMPTS, mixed)
    ] == plain()


def test_plain_text_is_the_noise_s_own_draw() -> None:
    """Against a recomputation without engine and cache: position and token id alone address the noise."""
    params = SamplingParams(temperature=1.0, seed=99, max_tokens=6)
    (output,) = run_engine(Engine(TARGET, config=config()), [[1, 2, 3]], params)
    tokens = [1, 2, 3]
    for _ in output.token_ids:
        p = fresh_pass(TARGET, [tokens]).last_logits[0].softmax(-1)
        noise = token_noise(torch.tensor([99]), torch.tensor([len(tokens)]), torch.arange(V))[0]
        tokens.append(int((p.log() - noise.log()).argmax()))
    assert output.token_ids == tokens[3:]


def test_text_is_distributed_as_the_target_s() -> None:
    """One seed a request; drafts from another distribution, confidence and a LIVE policy on top."""
    table = np.array([[0.7, 0.2, 0.1], [0.3, 0.3, 0.4], [0.05, 0.9, 0.05]])
    drafter = ScriptedDrafter.from_table(
        torch.tensor([[0.5, 0.5, 0], [0.2, 0.2, 0.6], [0.4, 0.3, 0.3]], dtype=torch.float64),
        3,
        confidence=[2, 0, 1],
    )
    count = 2000
    sizes = EngineConfig(max_num_seqs=500, kv_cache_tokens=16 * 500, acceptance="shared_noise")
    engine = Engine(TableTarget(table), drafter, GlobalScheduler(3, COST), None, sizes)
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=4) for seed in range(count)]
    counts = np.zeros((3, 3, 3))
    for output in run_engine(engine, [[1]] * count, params):
        counts[tuple(output.token_ids[1:])] += 1
    exact = TableTarget(table).joint_distribution(1, 4).sum(0)
    assert (np.abs(counts - count * exact) < 5 * np.sqrt(count * exact * (1 - exact)) + 1).all()


@pytest.mark.parametrize("alpha", [0.2, 1.0, 8.0])
def test_first_slot_acceptance_of_both_rules(alpha: float) -> None:
    """Closed forms against simulation: p_t and p_d of 12 tokens, some with probability 0."""
    rng = np.random.default_rng(int(10 * alpha))
    p, q = (torch.from_numpy(rng.dirichlet(np.full(12, alpha))) for _ in range(2))
    p[3], q[3], q[5], p[7] = 0, 0, 0, 0
    p, q = p / p.sum(), q / q.sum()
    count = 20_000
    seeds, at = torch.arange(count), torch.full((count,), 17)
    t, d = (shared_noise_choice(x.expand(count, -1), seeds, at) for x in (p, q))
    expected = float(shared_noise_acceptance(p, q))
    assert abs(float((t == d).double().mean()) - expected) < 4 * (expected * (1 - expected) / count) ** 0.5
    pairs = [(v, w) for v in range(12) for w in range(12) if p[v] and q[v]]
    slow = sum(
        1 / sum(max(p[w] / p[v], q[w] / q[v]) for w in range(12)) for v in {v for v, _ in pairs}
    )  # the formula as it is written
    assert expected == pytest.approx(float(slow), rel=1e-12)
    overlap = float(ratio_acceptance(p, q))
    assert overlap / (2 - overlap) - 1e-12 <= expected <= overlap + 1e-12
    # The ratio rule: accept x from q where u q(x) < p(x).
    x = torch.from_numpy(rng.choice(12, count, p=q.numpy()))
    wins = torch.from_numpy(rng.random(count)) * q[x] < p[x]
    assert abs(float(wins.double().mean()) - overlap) < 4 * (overlap * (1 - overlap) / count) ** 0.5


def test_acceptance_of_equal_and_of_disjoint_distributions() -> None:
    p = torch.tensor([[0.1, 0.9, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.1, 0.9, 0.0], [0.0, 0.5, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(shared_noise_acceptance(p, q), torch.tensor([1.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(ratio_acceptance(p, q), torch.tensor([1.0, 0.0], dtype=torch.float64))


def test_drafts_meet_the_target_s_noise() -> None:
    """A drafter with the target's own distribution draws the target's very tokens, in its own vocabulary order, too."""
    table = torch.tensor([[0.6, 0.2, 0.2], [0.4, 0.3, 0.3], [0.1, 0.6, 0.3]], dtype=torch.float64)
    order = [2, 0, 1]
    for drafter in (
        ScriptedDrafter.from_table(table, 3),
        ScriptedDrafter.from_table(table[:, order], 3, vocab=order),
    ):
        params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=20) for seed in range(10)]
        engine = Engine(TableTarget(table.numpy()), drafter, config=config())
        outputs = run_engine(engine, [[1]] * 10, params)
        # Both see p ** (1 / T), but only if the drafter's logits go through the same temperature.
        assert sum(o.metrics.accepted for o in outputs) == sum(o.metrics.scheduled for o in outputs) > 100


def test_noise_belongs_to_seed_position_and_token() -> None:
    seeds, at, ids = torch.tensor([1, 1, 2]), torch.tensor([4, 5, 4]), torch.arange(1000)
    noise = token_noise(seeds, at, ids)
    assert (noise > 0).all()
    assert len(noise.unique()) == noise.numel()
    torch.testing.assert_close(token_noise(seeds, at, ids[[900, 3]]), noise[:, [900, 3]], rtol=0, atol=0)
    assert abs(float(noise.mean()) - 1) < 5 / 3000**0.5, "exponential, mean 1"


def test_greedy_rows_draw_their_argmax() -> None:
    p = torch.zeros(20, 7)
    p[torch.arange(20), torch.arange(20) % 7] = 1
    chosen = shared_noise_choice(p, torch.zeros(20, dtype=torch.int64), torch.arange(20))
    assert chosen.tolist() == [i % 7 for i in range(20)]


def test_every_row_tolerates_a_live_schedule() -> None:
    assert tolerates_live(np.array([False, True]), False, "shared_noise").tolist() == [True, True]
    assert tolerates_live(np.array([False, True]), False).tolist() == [False, True]


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(DSparkError, match="ratio, shared_noise"):
        EngineConfig(acceptance="typical")
