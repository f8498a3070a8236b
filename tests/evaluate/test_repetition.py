import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.core import DSparkError
from dspark.evaluate.repetition import is_looping, repeated_ngrams, repetition_share


def test_counts_ngrams_seen_further_left() -> None:
    # 4-grams: 1212 2121 1212 2121 1213 -> the third and fourth are repeats
    assert repeated_ngrams([1, 2, 1, 2, 1, 2, 1, 3]) == (2, 5)
    assert repetition_share([1, 2, 1, 2, 1, 2, 1, 3]) == pytest.approx(2 / 5)
    assert repeated_ngrams([5, 5, 5], n=1) == (2, 3)


def test_short_and_fresh_outputs_do_not_repeat() -> None:
    assert repetition_share([]) == 0
    assert repetition_share([7, 7, 7]) == 0
    assert repetition_share(list(range(50))) == 0


def test_looping_is_more_than_half() -> None:
    half = [0, 0, 0, 0, 0, 1]  # 4-grams: 0000 0000 0001
    assert repetition_share(half) == pytest.approx(1 / 3)
    assert not is_looping(half)
    exactly_half = [0, 0, 0, 0, 0]
    assert repetition_share(exactly_half) == 0.5
    assert not is_looping(exactly_half)
    assert is_looping([0] * 6)
    assert is_looping(list(range(20)) * 3)
    assert is_looping(half, threshold=0.3)


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 5))
def test_agrees_with_the_definition(ids: list[int], n: int) -> None:
    seen: list[list[int]] = []
    repeats = 0
    for i in range(len(ids) - n + 1):
        repeats += ids[i : i + n] in seen
        seen.append(ids[i : i + n])
    assert repeated_ngrams(ids, n) == (repeats, len(seen))


def test_refuses_empty_ngrams() -> None:
    with pytest.raises(DSparkError, match="1 or more"):
        repeated_ngrams([1], n=0)
