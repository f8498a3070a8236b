"""The ratio rule in one call, against tensors: the same drafts accepted, the same tokens behind them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dspark.acceptance import ratio_rule
from dspark.core import Draft, Request, SamplingParams
from dspark.kernels import ratio
from dspark.randomness import Purpose, uniform
from dspark.sampling import SamplingRows, probabilities

INF, NAN = float("inf"), float("nan")
SIZE, DRAFT_SIZE, GAMMA = 1040, 96, 3


class Case:
    """Rounds of 1 to 5 requests out of 6 that drafted, at temperatures from 0 to 1.5; `filtered`: with filters."""

    def __init__(self, seed: int, proposals: str, filtered: bool = False) -> None:
        self.numbers, self.noise = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        self.index = np.sort(self.numbers.permutation(6)[: self.numbers.integers(1, 6)])
        count = len(self.index)
        self.lengths = self.numbers.integers(0, GAMMA + 1, count)
        self.row_start = np.cumsum(self.lengths + 1) - self.lengths - 1
        temperatures = self.numbers.choice([0.0, 0.4, 1.0, 1.5], count)
        self.logits = 3 * self.random(int(self.lengths.sum()) + count, SIZE)
        self.rows = SamplingRows.of(
            [
                Request(uid, "", [1], self.params(t, filtered), seed, 99, round=seed % 5)
                for uid, t in enumerate(temperatures.tolist())
            ]
        )
        self.draft = self.proposed(proposals)

    def params(self, temperature: float, filtered: bool) -> SamplingParams:
        if not filtered:
            return SamplingParams(temperature=temperature)
        top_k, top_p, min_p = (self.numbers.choice(x) for x in ([0, 5, 60], [0.7, 0.95, 1], [0, 0.01]))
        return SamplingParams(
            temperature=temperature, top_k=int(top_k), top_p=float(top_p), min_p=float(min_p)
        )

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.noise)

    def proposed(self, kind: str) -> Draft:
        lengths = np.full(6, GAMMA)
        if kind == "none":
            self.lengths[:], self.row_start = 0, np.arange(len(self.index))
            self.logits = self.logits[: len(self.index)]
            return Draft.empty(6)
        if kind == "one-hot":
            tokens = torch.randint(SIZE, (6, GAMMA), generator=self.noise)
            self.favour(tokens)
            return Draft(tokens, lengths)
        pruned = kind in ("pruned", "mixed")
        vocab = torch.randperm(SIZE, generator=self.noise)[:DRAFT_SIZE] if pruned else None
        probs = (3 * self.random(6, GAMMA, DRAFT_SIZE if pruned else SIZE)).softmax(-1)
        tokens = probs.flatten(0, 1).multinomial(1, generator=self.noise).view(6, GAMMA)
        if vocab is not None:
            tokens = vocab[tokens]
        one_hot = None
        if kind == "mixed":
            one_hot = torch.rand(6, generator=self.noise) < 0.5
            tokens[one_hot] = torch.randint(SIZE, (int(one_hot.sum()), GAMMA), generator=self.noise)
        self.favour(tokens)
        return Draft(tokens, lengths, probs, vocab, one_hot=one_hot)

    def favour(self, tokens: torch.Tensor) -> None:
        """Make drafts likely, so that some are accepted and some are not."""
        for r, start, length in zip(self.index, self.row_start, self.lengths, strict=True):
            for k in range(length):
                self.logits[start + k, tokens[r, k]] += 20 * self.numbers.random()

    def decided(self) -> tuple[list[int], list[int]]:
        accepted, following = ratio.decide(
            self.logits,
            self.rows.host,
            self.rows.address,
            self.row_start,
            self.lengths,
            self.draft,
            self.index,
        )
        return accepted.tolist(), following.tolist()

    def expected(self) -> tuple[list[int], list[int]]:
        draft, rows, index = self.draft, self.rows, torch.from_numpy(self.index)
        slots = torch.arange(draft.gamma + 1)
        verdict = ratio_rule(
            draft.tokens[index],
            torch.from_numpy(self.lengths),
            None if draft.probs is None else draft.probs[index],
            draft.vocab,
            probabilities(self.logits, rows.repeat(self.lengths + 1)),
            torch.from_numpy(self.row_start),
            rows.uniform(slots[:-1], Purpose.ACCEPT),
            rows.uniform(slots[:1], Purpose.RESAMPLE)[:, 0],
            None if draft.one_hot is None else draft.one_hot[index],
        )
        return verdict.num_accepted.tolist(), verdict.next_token.tolist()


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("proposals", ["none", "one-hot", "whole", "pruned", "mixed"])
def test_decisions_are_those_of_the_reference(proposals, filtered):
    accepted, slots = 0, 0
    for seed in range(100):
        case = Case(seed, proposals, filtered)
        before = case.logits.clone()
        decided = case.decided()
        assert decided == case.expected(), seed
        assert torch.equal(case.logits, before)
        accepted, slots = accepted + sum(decided[0]), slots + int(case.lengths.sum())
    assert slots == 0 or 0.1 < accepted / slots < 0.9


@pytest.mark.parametrize("proposals", ["one-hot", "whole", "pruned", "mixed"])
@pytest.mark.parametrize("value", [-INF, INF, NAN])
def test_forbidden_tokens_and_broken_rows(proposals, value):
    """-inf in most of a row or all of it; NaN and +inf in one place, which spread."""
    for seed in range(20):
        case = Case(seed, proposals, filtered=seed % 2 == 1)
        for row in case.logits[case.numbers.random(len(case.logits)) < 0.5]:
            if value == -INF:
                row[torch.from_numpy(case.numbers.random(SIZE) < case.numbers.choice([0.9, 1.0]))] = value
            else:
                row[case.numbers.integers(SIZE)] = value
        assert case.decided() == case.expected(), seed


def test_broken_proposals():
    for seed in range(20):
        case = Case(seed, "pruned")
        assert case.draft.probs is not None
        case.draft.probs[:, :, seed] = NAN
        assert case.decided() == case.expected(), seed


def test_where_nothing_is_left_the_target_s_own_distribution_decides():
    """Proposals from p_t itself are accepted; scripted ones that cover all of it leave no residual."""
    rejected = 0
    for seed in range(20):
        case = Case(seed, "whole")
        assert case.draft.probs is not None
        p = probabilities(case.logits, case.rows.repeat(case.lengths + 1))
        for r, start, length in zip(case.index, case.row_start, case.lengths, strict=True):
            case.draft.probs[r, :length] = p[start : start + length]
        for cover in (0.0, 1.0):
            case.draft.probs.add_(cover)
            decided = case.decided()
            assert decided == case.expected(), seed
            assert cover or case.rows.any_greedy or decided[0] == case.lengths.tolist()
        rejected += int(case.lengths.sum()) - sum(decided[0])
    assert rejected > 20


def test_the_draws_are_those_at_the_request_s_address():
    """u = `uniform` of its round: what it accepts flips where p_t passes it."""
    logits, none = torch.full((2, 16), -INF), np.zeros(1, dtype=np.int64)
    draft = Draft(torch.zeros(1, 1, dtype=torch.int64), np.ones(1, dtype=np.int64))
    plain = np.array([[1.0, 0.0, 1.0, 0.0]])
    for round in range(20):
        address = np.array([[7, 3, round]])
        seed, uid, at = torch.from_numpy(address).unbind(1)
        u = float(uniform(seed, uid, at, torch.zeros(1, dtype=torch.int64), Purpose.ACCEPT))
        for likelier in (0.99, 1.01):
            odds = u * likelier / (1 - u * likelier)
            logits[0, 0], logits[0, 1], logits[1, 2] = np.log(odds), 0.0, 0.0
            accepted, following = ratio.decide(logits, plain, address, none, none + 1, draft, none)
            assert (accepted[0], following[0]) == ((1, 2) if likelier > 1 else (0, 1))


def test_who_goes_through_tensors():
    case = Case(0, "whole")
    draft, logits = case.draft, case.logits
    assert draft.probs is not None
    assert ratio.fits(logits, draft)
    assert ratio.fits(logits, Draft.empty(6))
    assert not ratio.fits(logits.double(), draft)
    assert not ratio.fits(logits[:, :-1].contiguous(), draft)
    assert not ratio.fits(logits, replace(draft, probs=draft.probs.double()))
    assert not ratio.fits(logits, replace(draft, probs=draft.probs.transpose(0, 1)))


def test_a_draft_that_is_no_token_is_refused():
    case = Case(1, "one-hot")
    assert case.lengths[-1] > 0
    for token in (-1, SIZE):
        case.draft.tokens[case.index[-1], 0] = token
        with pytest.raises(IndexError, match="no token of the target"):
            case.decided()
