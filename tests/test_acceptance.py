"""Acceptance rules against exact enumeration: outcomes of a round, and the distribution of the text."""

from itertools import product

import numpy as np
import pytest
import torch

from dspark.acceptance import greedy_rule, ratio_rule, tolerates_live
from dspark.core import Request, SamplingParams, Verdict
from dspark.randomness import Purpose, uniform
from dspark.sampling import SamplingRows, probabilities, sample

GAMMA, TRIALS = 3, 200_000


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Mid-sized elementwise operations lose more by waiting for busy cores than they gain by sharing."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_tables(seed: int, V: int, W: int, sharpness: float = 1.5, **params) -> torch.Tensor:
    """[GAMMA + 1, V, W]: a distribution over W tokens for each slot and previous token."""
    logits = torch.randn((GAMMA + 1) * V, W, generator=torch.Generator().manual_seed(seed)) * sharpness
    request = Request(0, "a", [0], SamplingParams(**params), 0, 100)
    return probabilities(logits, SamplingRows.of([request]).repeat([len(logits)])).view(-1, V, W)


def one_hot_tables(seed: int, V: int) -> torch.Tensor:
    choice = torch.randint(V, (GAMMA + 1, V), generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.one_hot(choice, V).float()


def with_zeros(tables: torch.Tensor, seed: int) -> torch.Tensor:
    """Remove one token from each distribution."""
    gone = torch.randint(tables.shape[-1], tables.shape[:2], generator=torch.Generator().manual_seed(seed))
    kept = tables.scatter(-1, gone[..., None], 0)
    return kept / kept.sum(-1, keepdim=True)


def spread(q: torch.Tensor, vocab: torch.Tensor | None, V: int) -> torch.Tensor:
    """q over the target vocabulary."""
    return q if vocab is None else torch.zeros(*q.shape[:-1], V).index_copy(-1, vocab, q)


def run_round(p, q, vocab, lengths, round=0, one_hot=False) -> tuple[torch.Tensor, Verdict]:
    """A round of every trial: the same seed, one uid each. Previous token of slot 0 is token 0."""
    n, V = len(lengths), p.shape[1]
    uid, rnd, zero = torch.arange(n), torch.tensor(round), torch.tensor(0)
    draft_u = uniform(zero, uid[:, None], rnd, torch.arange(GAMMA), Purpose.DRAFT)
    accept_u = uniform(zero, uid[:, None], rnd, torch.arange(GAMMA), Purpose.ACCEPT)
    previous, tokens, p_draft = [torch.zeros(n, dtype=torch.int64)], [], []
    for k in range(GAMMA):
        p_draft.append(q[k, previous[-1]])
        x = sample(p_draft[-1], draft_u[:, k])
        tokens.append(x if vocab is None else vocab[x])
        previous.append(tokens[-1])
    # Ragged target rows: only length + 1 of each trial's GAMMA + 1 rows exist.
    table = torch.stack([p[k, previous[k]] for k in range(GAMMA + 1)], 1)
    exists = torch.arange(GAMMA + 1) <= lengths[:, None]
    row_start = torch.cumsum(lengths + 1, 0) - (lengths + 1)
    drafts = torch.stack(tokens, 1)
    verdict = ratio_rule(
        drafts,
        lengths,
        None if one_hot else torch.stack(p_draft, 1),
        None if one_hot else vocab,
        table[exists].view(-1, V),
        row_start,
        accept_u,
        uniform(zero, uid, rnd, zero, Purpose.RESAMPLE),
    )
    return drafts, verdict


def outputs(drafts: torch.Tensor, verdict: Verdict) -> torch.Tensor:
    """[n, GAMMA + 1] accepted drafts and the next token, then -1."""
    out = torch.cat([drafts, torch.full((len(drafts), 1), -1)], 1)
    out[torch.arange(GAMMA + 1) >= verdict.num_accepted[:, None]] = -1
    return out.scatter(1, verdict.num_accepted[:, None], verdict.next_token[:, None])


def exact_outcomes(p, q, length, slot=0, previous=0) -> dict[tuple[int, ...], float]:
    """Probability of every output of a round, from the definition; `q` over the target vocabulary."""
    here, V = p[slot, previous].double().tolist(), p.shape[1]
    if slot == length:
        return {(y,): here[y] for y in range(V)}
    draft = q[slot, previous].double().tolist()
    residual = [max(a - b, 0.0) for a, b in zip(here, draft, strict=True)]
    result = {(y,): r for y, r in enumerate(residual)}  # rejection probability times norm(residual)
    for x in range(V):
        for rest, probability in exact_outcomes(p, q, length, slot + 1, x).items():
            result[(x, *rest)] = min(here[x], draft[x]) * probability
    return result


def assert_distribution(samples: torch.Tensor, exact: dict[tuple[int, ...], float]) -> None:
    """Cells within 5 sigma (and a few counts, where little is expected), chi-square within 5 sigma."""
    n = len(samples)
    base = int(samples.max()) + 2
    codes = ((samples + 1) * base ** torch.arange(samples.shape[1])).sum(1)
    values, counts = codes.unique(return_counts=True)
    digits = (values[:, None] // base ** torch.arange(samples.shape[1])) % base - 1
    seen = {
        tuple(t for t in row if t >= 0): c for row, c in zip(digits.tolist(), counts.tolist(), strict=True)
    }
    assert sum(exact.values()) == pytest.approx(1, abs=1e-5)
    assert all(exact.get(cell, 0) > 0 for cell in seen), "an impossible output"
    chi2, cells = 0.0, 0
    for cell, probability in exact.items():
        expected, count = n * probability, seen.get(cell, 0)
        assert abs(count - expected) < 5 * np.sqrt(expected) + 4, (cell, count, expected)
        if expected >= 10:
            chi2, cells = chi2 + (count - expected) ** 2 / expected, cells + 1
    assert chi2 < cells + 5 * np.sqrt(2 * cells)


def exact_text(p: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Plain decoding: probability of every text of GAMMA + 1 tokens."""
    V, table, result = p.shape[1], p.double().tolist(), {}
    for text in product(range(V), repeat=GAMMA + 1):
        probability, previous = 1.0, 0
        for k, token in enumerate(text):
            probability, previous = probability * table[k][previous][token], token
        result[text] = probability
    return result


def completed(samples: torch.Tensor, p: torch.Tensor, round: int) -> torch.Tensor:
    """Outputs continued to GAMMA + 1 tokens by plain decoding with noise of later rounds."""
    out, uid, zero = samples.clone(), torch.arange(len(samples)), torch.tensor(0)
    for k in range(1, GAMMA + 1):
        u = uniform(zero, uid, torch.tensor(round + k), zero, Purpose.RESAMPLE)
        out[:, k] = torch.where(out[:, k] < 0, sample(p[k, out[:, k - 1]], u), out[:, k])
    return out


FILTERED = {"temperature": 0.8, "top_k": 4, "top_p": 0.9}
CASES = {
    "random": (random_tables(1, 4, 4), random_tables(2, 4, 4), None),
    "five tokens": (random_tables(3, 5, 5), random_tables(4, 5, 5, sharpness=0.5), None),
    "filters on both sides": (random_tables(5, 5, 5, **FILTERED), random_tables(6, 5, 5, **FILTERED), None),
    "filter on the target only": (random_tables(5, 5, 5, top_k=2), random_tables(6, 5, 5), None),
    "pruned vocabulary": (random_tables(7, 5, 5), random_tables(8, 5, 3), torch.tensor([4, 0, 2])),
    "q has zeros": (random_tables(9, 4, 4), with_zeros(random_tables(10, 4, 4), 11), None),
    "p has zeros": (with_zeros(random_tables(12, 4, 4), 13), random_tables(14, 4, 4), None),
    "q one-hot": (random_tables(15, 4, 4), one_hot_tables(16, 4), None),
    "p one-hot": (one_hot_tables(17, 4), random_tables(18, 4, 4), None),
    "equal": (random_tables(19, 4, 4), random_tables(19, 4, 4), None),
}


@pytest.mark.parametrize("name", CASES)
def test_round_and_text_have_the_exact_distribution(name):
    p, q, vocab = CASES[name]
    round = 100 * list(CASES).index(name)
    drafts, verdict = run_round(p, q, vocab, torch.full((TRIALS,), GAMMA), round)
    samples = outputs(drafts, verdict)
    assert_distribution(samples, exact_outcomes(p, spread(q, vocab, p.shape[1]), GAMMA))
    assert_distribution(completed(samples, p, round), exact_text(p))
    if name == "equal":
        assert bool((verdict.num_accepted == GAMMA).all())


def test_one_hot_proposals_need_no_array():
    p, q, _ = CASES["q one-hot"]
    lengths = torch.full((TRIALS,), GAMMA)
    drafts, verdict = run_round(p, q, None, lengths, one_hot=True)
    _, explicit = run_round(p, q, None, lengths)
    assert torch.equal(verdict.num_accepted, explicit.num_accepted)
    assert torch.equal(verdict.next_token, explicit.next_token)
    assert_distribution(outputs(drafts, verdict), exact_outcomes(p, q, GAMMA))


@pytest.mark.parametrize("name", ["random", "pruned vocabulary"])
def test_ragged_lengths(name):
    """Every scheduled length in one batch: outcomes per length, and the text over all of them."""
    p, q, vocab = CASES[name]
    lengths = torch.arange(TRIALS) % (GAMMA + 1)
    drafts, verdict = run_round(p, q, vocab, lengths, round=5000)
    samples = outputs(drafts, verdict)
    for length in range(GAMMA + 1):
        assert_distribution(
            samples[lengths == length], exact_outcomes(p, spread(q, vocab, p.shape[1]), length)
        )
    assert_distribution(completed(samples, p, 5000), exact_text(p))


def test_requests_with_one_seed_are_independent():
    """uid 0 and 1 draft and verify with one seed, round after round: their outputs must not correlate."""
    p, q = torch.tensor([0.2, 0.5, 0.3]), torch.tensor([0.5, 0.2, 0.3])
    seed, uid, round, slot = torch.tensor(11), torch.arange(2), torch.arange(TRIALS)[:, None], torch.tensor(0)
    u = [uniform(seed, uid, round, slot, purpose).flatten() for purpose in Purpose]
    tokens = sample(q.expand(2 * TRIALS, -1), u[0])[:, None]
    verdict = ratio_rule(
        tokens,
        torch.ones(2 * TRIALS, dtype=torch.int64),
        q.expand(2 * TRIALS, 1, -1),
        None,
        p.expand(4 * TRIALS, -1),
        2 * torch.arange(2 * TRIALS),
        u[1][:, None],
        u[2],
    )
    first = torch.where(verdict.num_accepted == 1, tokens[:, 0], verdict.next_token).view(-1, 2)
    exact = {(a, b): (p[a] * p[b]).item() for a in range(3) for b in range(3)}
    assert_distribution(first, exact)


def random_round(seed: int, R: int, g: int, V: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(g + 1, (R,), generator=rng)
    return {
        "draft_tokens": torch.randint(V, (R, g), generator=rng),
        "lengths": lengths,
        "p_draft": torch.rand(R, g, V, generator=rng).softmax(-1),
        "p_target": torch.rand(int(lengths.sum()) + R, V, generator=rng).softmax(-1),
        "row_start": torch.cumsum(lengths + 1, 0) - (lengths + 1),
        "accept_u": torch.rand(R, g, generator=rng, dtype=torch.float64),
        "resample_u": torch.rand(R, generator=rng, dtype=torch.float64),
    }


def assert_equal(a: Verdict, b: Verdict) -> None:
    assert torch.equal(a.num_accepted, b.num_accepted)
    assert torch.equal(a.next_token, b.next_token)


@pytest.mark.parametrize("one_hot_proposals", [False, True])
@pytest.mark.parametrize("g", [0, 1, 4])
def test_greedy_rule_is_the_ratio_rule_at_temperature_0(g, one_hot_proposals):
    r = random_round(g, 500, g, 3)
    target_tokens = r["p_target"].argmax(-1)
    r["p_target"] = torch.nn.functional.one_hot(target_tokens, 3).float()
    if one_hot_proposals:
        r["p_draft"] = None
    accepted, following = greedy_rule(
        r["draft_tokens"], r["lengths"].numpy(), target_tokens, r["row_start"].numpy()
    )
    verdict = ratio_rule(vocab=None, **r)
    assert verdict.num_accepted.tolist() == accepted.tolist()
    assert verdict.next_token.tolist() == following.tolist()
    for i, length in enumerate(r["lengths"].tolist()):
        row, expected = int(r["row_start"][i]), 0
        while expected < length and r["draft_tokens"][i, expected] == target_tokens[row + expected]:
            expected += 1
        assert accepted[i] == expected
        assert following[i] == target_tokens[row + expected]


def test_each_request_equals_its_solo_run():
    r = random_round(3, 60, 4, 6)
    together = ratio_rule(vocab=None, **r)
    for i in range(60):
        own = slice(int(r["row_start"][i]), int(r["row_start"][i] + r["lengths"][i] + 1))
        solo = {k: v[i : i + 1] for k, v in r.items() if k != "p_target"}
        solo |= {"p_target": r["p_target"][own], "row_start": torch.tensor([0])}
        verdict = ratio_rule(vocab=None, **solo)
        assert verdict.num_accepted[0] == together.num_accepted[i]
        assert verdict.next_token[0] == together.next_token[i]


def test_what_lies_past_a_length_is_never_read():
    r = random_round(4, 50, 4, 6)
    clean = ratio_rule(vocab=None, **r)
    past = torch.arange(4) >= r["lengths"][:, None]
    r["draft_tokens"] = r["draft_tokens"].masked_fill(past, 10**9)
    r["p_draft"] = r["p_draft"].masked_fill(past[..., None], float("nan"))
    r["accept_u"] = r["accept_u"].masked_fill(past, 0)
    assert_equal(ratio_rule(vocab=None, **r), clean)


def test_no_requests_and_no_slots():
    r = random_round(5, 0, 3, 4)
    assert len(ratio_rule(vocab=None, **r).next_token) == 0
    none = r["lengths"].numpy()
    assert len(greedy_rule(r["draft_tokens"], none, r["lengths"], none)[0]) == 0
    r = random_round(6, 7, 0, 4)
    verdict = ratio_rule(vocab=None, **r)
    assert verdict.num_accepted.tolist() == [0] * 7
    assert torch.equal(verdict.next_token, sample(r["p_target"], r["resample_u"]))


def verify_one(token: int, q: list[float] | None, p: list[float], u: float, vocab=None) -> tuple[int, int]:
    verdict = ratio_rule(
        torch.tensor([[token]]),
        torch.tensor([1]),
        None if q is None else torch.tensor([[q]]),
        vocab,
        torch.tensor([p, p]),
        torch.tensor([0]),
        torch.tensor([[u]], dtype=torch.float64),
        torch.tensor([0.5], dtype=torch.float64),
    )
    return int(verdict.num_accepted[0]), int(verdict.next_token[0])


def test_proposals_that_their_distribution_excludes():
    """A scripted drafter may lie: p_d(x) = 0 is accepted iff the target can say x."""
    assert verify_one(0, [0.0, 1.0], [0.5, 0.5], u=0.99)[0] == 1
    assert verify_one(0, [0.0, 1.0], [0.0, 1.0], u=0.0)[0] == 0
    assert verify_one(2, [0.5, 0.5], [0.4, 0.4, 0.2], u=0.99, vocab=torch.tensor([0, 1]))[0] == 1


def test_empty_residual_falls_back_to_the_target():
    assert verify_one(0, [1.0, 1.0], [0.75, 0.25], u=0.9) == (0, 0)
    assert verify_one(0, None, [1.0, 0.0], u=1.0) == (0, 0)


def test_live_schedules_need_greedy_rows_or_deterministic_proposals():
    greedy = np.array([True, False])
    assert tolerates_live(greedy, one_hot_proposals=False).tolist() == [True, False]
    assert tolerates_live(greedy, one_hot_proposals=True).tolist() == [True, True]
