"""Prompt lookup: what it finds, and that nothing is indexed twice."""

import numpy as np
import pytest

from dspark.core import DSparkError, Request, SamplingParams
from dspark.drafters.base import ProposeBatch
from dspark.drafters.ngram import NgramDrafter
from dspark.sampling import SamplingRows


def propose(drafter, tokens, wanted, uid=0):
    request = Request(uid, str(uid), list(tokens), SamplingParams(), 0, 1000)
    rows = SamplingRows.of([request])
    batch = ProposeBatch([request], np.array([wanted]), rows, np.zeros((1, 1), np.int64), [None])
    draft = drafter.propose(batch)
    return draft.tokens[0, : draft.lengths[0]].tolist()


def brute_force(tokens, wanted, largest, smallest):
    """What followed the latest earlier occurrence of the longest suffix, by rescanning everything."""
    for n in range(largest, smallest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if n <= len(tokens) and tokens[end - n : end] == tokens[-n:]:
                return [tokens[end + i % (len(tokens) - end)] for i in range(wanted)]
    return []


def test_sizes_longer_than_any_text_cost_nothing():
    """With a largest size of a billion billions, every size that fits, and no more, is looked at."""
    tokens = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2]
    assert propose(NgramDrafter(2, 10**18, 2), tokens, 2) == brute_force(tokens, 2, len(tokens), 2)


def test_copies_what_followed_the_latest_occurrence():
    drafter = NgramDrafter(4, 3, 1)
    assert propose(drafter, [1, 2, 3, 9, 1, 2, 3, 8, 7, 1, 2, 3], 4) == [8, 7, 1, 2]
    assert propose(NgramDrafter(4, 3, 2), [1, 2, 3, 4], 4) == []
    assert propose(NgramDrafter(4, 3, 1), [5, 5], 4) == [5, 5, 5, 5]


def test_equals_a_full_rescan_as_the_sequence_grows():
    tokens = np.random.default_rng(0).integers(0, 4, 200).tolist()
    drafter = NgramDrafter(5, 4, 2)
    for n in range(1, len(tokens)):
        assert propose(drafter, tokens[:n], 5) == brute_force(tokens[:n], 5, 4, 2)


def test_requests_do_not_share_an_index_and_are_forgotten():
    drafter = NgramDrafter(3, 2, 2)
    assert propose(drafter, [1, 2, 3, 1, 2], 3, uid=0) == [3, 1, 2]
    assert propose(drafter, [7, 1, 2], 3, uid=1) == []
    drafter.forget(Request(0, "0", [1], SamplingParams(), 0, 10))
    assert propose(drafter, [9, 1, 2], 3, uid=0) == []


@pytest.mark.parametrize(
    ("args", "message"), [((0,), "num_speculative_tokens"), ((3, 2, 3), "prompt_lookup_min")]
)
def test_bad_sizes_are_refused(args, message):
    with pytest.raises(DSparkError, match=message):
        NgramDrafter(*args)
