"""Above temperature 0 the output is distributed as the target's, exactly: the engine against enumeration.

One batch of thousands of identical requests, told apart by their uid alone, is one large sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from dspark.core import RequestOutput, SamplingParams
from dspark.drafters.base import Drafter
from dspark.drafters.lookup import LookupFirst
from dspark.drafters.ngram import NgramDrafter
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.schedule.policies import Dependence, FixedLength, ScheduleState
from dspark.target.decoder import Decoder
from dspark.testing import (
    ScriptedDrafter,
    TableTarget,
    filter_row,
    fresh_pass,
    run_engine,
    tiny_decoder,
    tiny_drafter,
)
from dspark.testing.chain import tiny_chain_drafter

V, N = 3, 2000
FIRST = 1  # the prompt's only token
TABLE = np.array([[0.7, 0.2, 0.1], [0.3, 0.3, 0.4], [0.05, 0.9, 0.05]])
UNIFORM = torch.full((V, V), 1 / V, dtype=torch.float64)
CLOSE = torch.tensor([[0.6, 0.2, 0.2], [0.4, 0.3, 0.3], [0.1, 0.6, 0.3]], dtype=torch.float64)
ZEROS = torch.tensor([[0.5, 0.0, 0.5], [0.0, 0.0, 1.0], [0.5, 0.5, 0.0]], dtype=torch.float64)
BIAS = np.array([0.9, 0, 0])
ONE_HOT = torch.eye(V, dtype=torch.float64)[[2, 0, 1]]
SLOTS = torch.tensor([[0.1, 0.1, 0.8], [0.6, 0.3, 0.1], [0.2, 0.5, 0.3]], dtype=torch.float64)

DRAFTERS = {
    "uniform": lambda: ScriptedDrafter.from_table(UNIFORM, 3),
    "close": lambda: ScriptedDrafter.from_table(CLOSE, 3),
    "close+lookup": lambda: LookupFirst(ScriptedDrafter.from_table(CLOSE, 3), 2, 3, 1, 2),
    "equal": lambda: ScriptedDrafter.from_table(torch.from_numpy(TABLE), 3),
    "zeros": lambda: ScriptedDrafter.from_table(ZEROS, 3),
    "one-hot-probs": lambda: ScriptedDrafter.from_table(ONE_HOT, 3),
    "parallel-slots": lambda: ScriptedDrafter.from_slots(SLOTS),
    "pruned": lambda: ScriptedDrafter.from_table(CLOSE[:, [2, 0]], 3, vocab=[2, 0]),
    "fixed": lambda: ScriptedDrafter.fixed([1, 0, 0]),
    "argmax": lambda: ScriptedDrafter.copy_target(TableTarget(TABLE), 3),
    "ngram": lambda: NgramDrafter(3, lookup_max=2, lookup_min=1),
    "none": lambda: None,
}


def sample_engine(
    drafter: Drafter | None,
    params: SamplingParams | list[SamplingParams],
    gamma: int = 3,
    count: int = N,
    target: TableTarget | None = None,
) -> list[RequestOutput]:
    config = EngineConfig(max_num_seqs=500, max_num_batched_tokens=1000, kv_cache_tokens=16 * 500)
    engine = Engine(target or TableTarget(TABLE), drafter, FixedLength(gamma if drafter else 0), None, config)
    return run_engine(engine, [[FIRST]] * count, params)


def histogram(outputs: list[RequestOutput], tokens: slice, vocab_size: int = V) -> np.ndarray:
    width = len(range(*tokens.indices(100)))
    counts = np.zeros((vocab_size,) * width)
    for output in outputs:
        counts[tuple(output.token_ids[tokens])] += 1
    return counts


def assert_distributed(counts: np.ndarray, p: np.ndarray) -> None:
    """Each cell within 5 sigma, chi-square within 5 sigma of its mean, nothing where p is 0."""
    n = counts.sum()
    assert counts[p == 0].sum() == 0
    possible = p > 0
    expected, seen = n * p[possible], counts[possible]
    sigma = np.sqrt(expected * (1 - p[possible]))
    assert (np.abs(seen - expected) <= 5 * sigma + 1).all()
    large = expected >= 5
    rest = np.array([expected[~large].sum()]), np.array([seen[~large].sum()])
    e, s = (
        (expected[large], seen[large])
        if large.all()
        else map(np.append, (expected[large], seen[large]), rest)
    )
    e, s = np.asarray(e), np.asarray(s)
    free = len(e) - 1
    assert ((s - e)[e > 0] ** 2 / e[e > 0]).sum() <= free + 5 * np.sqrt(2 * free) + 5


def accepted(outputs: list[RequestOutput]) -> int:
    return sum(o.metrics.accepted for o in outputs)


@pytest.mark.parametrize("name", DRAFTERS)
def test_joint_distribution_of_four_tokens(name: str) -> None:
    """The prefill decides the first token, so tokens 2 to 4 come from the first block of three."""
    params = SamplingParams(temperature=1, max_tokens=5, seed=11)
    outputs = sample_engine(DRAFTERS[name](), params)
    exact = TableTarget(TABLE).joint_distribution(FIRST, 4)
    assert_distributed(histogram(outputs, slice(0, 4)), exact)
    if name != "none":
        assert accepted(outputs) > 0.1 * N
        assert accepted(outputs) < sum(o.metrics.scheduled for o in outputs) or name == "equal"


@pytest.mark.parametrize("gamma", [1, 2])
def test_rounds_join_without_a_seam(gamma: int) -> None:
    """Short blocks: the last tokens belong to the second and third round of most requests."""
    params = SamplingParams(temperature=1, max_tokens=7, seed=3)
    outputs = sample_engine(ScriptedDrafter.from_table(CLOSE, 3), params, gamma)
    first = TableTarget(TABLE).joint_distribution(FIRST, 4).sum((0, 1, 2))
    last = sum(first[t] * TableTarget(TABLE).joint_distribution(t, 3) for t in range(V))
    assert_distributed(histogram(outputs, slice(4, 7)), np.asarray(last))


FILTERS = {
    "hot": SamplingParams(temperature=1.7, max_tokens=4, seed=1),
    "cold": SamplingParams(temperature=0.4, max_tokens=4, seed=2),
    "top-k": SamplingParams(top_k=2, max_tokens=4, seed=3),
    "top-p": SamplingParams(top_p=0.65, max_tokens=4, seed=4),
    "min-p": SamplingParams(min_p=0.5, max_tokens=4, seed=5),
    "all": SamplingParams(temperature=1.5, top_k=2, top_p=0.85, min_p=0.05, max_tokens=4, seed=6),
}


@pytest.mark.parametrize("name", ["close", "zeros", "pruned", "close+lookup"])
@pytest.mark.parametrize("filters", FILTERS)
def test_filters_act_on_both_sides(name: str, filters: str) -> None:
    params = FILTERS[filters]
    outputs = sample_engine(DRAFTERS[name](), params, count=1500)
    exact = TableTarget(TABLE).joint_distribution(FIRST, 4, lambda row: filter_row(row, params))
    assert_distributed(histogram(outputs, slice(0, 4)), exact)


def test_rows_of_one_batch_keep_their_own_parameters() -> None:
    """Greedy, cold, filtered and plain rows side by side, all with one explicit seed."""
    kinds = [
        SamplingParams(temperature=0, max_tokens=4, seed=9),
        SamplingParams(temperature=0.5, max_tokens=4, seed=9),
        SamplingParams(temperature=1.0, top_k=2, max_tokens=4, seed=9),
        SamplingParams(temperature=1.0, max_tokens=4, seed=9, speculative=False),
    ]
    outputs = sample_engine(DRAFTERS["close"](), kinds * 1500, count=4 * 1500)
    greedy, *sampled = (outputs[i::4] for i in range(4))
    assert {tuple(o.token_ids) for o in greedy} == {(2, 1, 2, 1)}
    for params, group in zip(kinds[1:], sampled, strict=True):
        exact = TableTarget(TABLE).joint_distribution(FIRST, 4, lambda row, p=params: filter_row(row, p))  # type: ignore[misc]
        assert_distributed(histogram(group, slice(0, 4)), exact)
    assert accepted(sampled[-1]) == 0


def test_requests_with_one_seed_are_independent() -> None:
    """Neighbouring requests carry the same seed; pairs of them must follow the product distribution."""
    outputs = sample_engine(DRAFTERS["uniform"](), SamplingParams(max_tokens=3, seed=5), count=2 * N)
    pairs = np.zeros((V,) * 4)
    for a, b in zip(outputs[::2], outputs[1::2], strict=True):
        pairs[(*a.token_ids[1:3], *b.token_ids[1:3])] += 1
    two = TableTarget(TABLE).joint_distribution(FIRST, 3).sum(0)
    assert_distributed(pairs, np.multiply.outer(two, two))


def test_penalties_and_bias_follow_the_drafts_of_a_block() -> None:
    """The distribution of a position depends on the output before it, drafts included."""
    params = SamplingParams(
        max_tokens=4, seed=8, presence_penalty=1.0, frequency_penalty=0.7, logit_bias=dict(enumerate(BIAS))
    )
    outputs = sample_engine(DRAFTERS["close"](), params)
    exact = np.zeros((V,) * 4)
    for tokens in np.ndindex(exact.shape):
        p, last, seen = 1.0, FIRST, np.zeros(V)
        for token in tokens:
            logits = np.log(TABLE[last]) + BIAS - 0.7 * seen - (seen > 0)
            p *= np.exp(logits[token]) / np.exp(logits).sum()
            seen[token] += 1
            last = token
        exact[tokens] = p
    assert_distributed(histogram(outputs, slice(0, 4)), exact)


def test_end_of_sequence_keeps_its_probability() -> None:
    """Token 2 ends the text; what is behind it is never output."""
    target = TableTarget(TABLE, eos_token_ids=(2,))
    outputs = sample_engine(DRAFTERS["uniform"](), SamplingParams(max_tokens=4, seed=4), target=target)
    joint = target.joint_distribution(FIRST, 4)
    exact: dict[tuple[int, ...], float] = {}
    for tokens in np.ndindex(joint.shape):
        end = tokens.index(2) + 1 if 2 in tokens else 4
        exact[tokens[:end]] = exact.get(tokens[:end], 0.0) + float(joint[tokens])
    keys = list(exact)
    counts = np.zeros(len(keys))
    for output in outputs:
        counts[keys.index(tuple(output.token_ids))] += 1
    assert_distributed(counts, np.array([exact[k] for k in keys]))


def test_min_tokens_hold_the_end_back() -> None:
    target = TableTarget(TABLE, eos_token_ids=(2,))
    params = SamplingParams(max_tokens=4, min_tokens=4, seed=4)
    outputs = sample_engine(DRAFTERS["uniform"](), params, target=target)

    def without_end(row: np.ndarray) -> np.ndarray:
        kept = row * [1, 1, 0]
        return kept / kept.sum()

    exact = target.joint_distribution(FIRST, 4, without_end)
    assert_distributed(histogram(outputs, slice(0, 4)), exact)


@dataclass(frozen=True)
class Uneven:
    """Lengths that depend on the request and on how far it is, never on what was drawn."""

    dependence: Dependence = Dependence.STATIC
    uses_survival: bool = False

    def draft_lengths(self, state: ScheduleState) -> np.ndarray:
        return np.minimum(state.room, (state.uids + state.context_lens) % 4)

    def verify_lengths(
        self, state: ScheduleState, survival: np.ndarray | None, drafted: np.ndarray
    ) -> np.ndarray:
        return np.maximum(drafted - state.uids % 2, 0)


@pytest.mark.parametrize("name", ["close", "zeros", "pruned", "ngram"])
def test_drafts_that_are_not_verified_leave_no_trace(name: str) -> None:
    """Some blocks are cut before verification, some requests draft nothing, memory is short."""
    config = EngineConfig(max_num_seqs=50, max_num_batched_tokens=60, block_size=1, kv_cache_tokens=170)
    engine = Engine(TableTarget(TABLE), DRAFTERS[name](), Uneven(), None, config)
    outputs = run_engine(engine, [[FIRST]] * N, SamplingParams(max_tokens=5, seed=21))
    assert sum(o.metrics.scheduled for o in outputs) < sum(o.metrics.drafted for o in outputs)
    assert_distributed(histogram(outputs, slice(0, 4)), TableTarget(TABLE).joint_distribution(FIRST, 4))


def decoder_joint(target: Decoder, prompt: list[int], n: int, params: SamplingParams) -> np.ndarray:
    """Exact distribution of the next n tokens of a real decoder, [V] * n, from one pass over all prefixes."""
    size = target.vocab_size
    prefixes = [p for width in range(n) for p in np.ndindex((size,) * width)]
    logits = fresh_pass(target, [[*prompt, *p] for p in prefixes]).last_logits
    rows = {p: filter_row(row.softmax(-1).numpy(), params) for p, row in zip(prefixes, logits, strict=True)}
    joint = np.ones((size,) * n)
    for tokens in np.ndindex(joint.shape):
        joint[tokens] = np.prod([rows[tokens[:i]][tokens[i]] for i in range(n)])
    return joint


@pytest.mark.parametrize(
    ("method", "head", "draft_vocab"),
    [("dspark", "vanilla", None), ("dspark", "gated", 2), ("dspark", "rnn", None), ("dflash", "vanilla", 2)],
)
def test_block_drafters_over_a_decoder(method: str, head: str, draft_vocab: int | None) -> None:
    target = tiny_decoder(seed=9, vocab_size=V, layers=1, hidden=16, max_context=32)
    drafter = tiny_drafter(target, method, head, 3, draft_vocab)  # type: ignore[arg-type]
    params = SamplingParams(temperature=1.6, top_p=0.97, max_tokens=5, seed=13)
    config = EngineConfig(max_num_seqs=500, max_num_batched_tokens=2000)
    outputs = run_engine(Engine(target, drafter, config=config), [[0, 1]] * 1000, params)
    assert accepted(outputs) > 100
    assert_distributed(histogram(outputs, slice(0, 4)), decoder_joint(target, [0, 1], 4, params))


@pytest.mark.parametrize(("method", "draft_vocab"), [("eagle3", None), ("eagle3", 2), ("mtp", None)])
def test_autoregressive_drafters_over_a_decoder(method: str, draft_vocab: int | None) -> None:
    target = tiny_decoder(seed=9, vocab_size=V, layers=1, hidden=16, max_context=32)
    drafter = tiny_chain_drafter(target, method, 3, draft_vocab)  # type: ignore[arg-type]
    params = SamplingParams(temperature=1.6, top_p=0.97, max_tokens=5, seed=13)
    config = EngineConfig(max_num_seqs=500, max_num_batched_tokens=2000)
    outputs = run_engine(Engine(target, drafter, config=config), [[0, 1]] * 1000, params)
    assert accepted(outputs) > 100
    assert_distributed(histogram(outputs, slice(0, 4)), decoder_joint(target, [0, 1], 4, params))
