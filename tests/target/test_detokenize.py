"""Streaming text: pieces add up to the whole, nothing changes once out, stop strings across any border."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from dspark.core import DSparkError
from dspark.target.detokenize import Detokenizer, StopChecker
from dspark.target.tokenizer import Tokenizer

SIZE = 270  # ids both vocabularies below stay under


def byte_level() -> Backend:
    tokens = ["<|end|>", "ÿ Ġ", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "llo", "Ġw", "ðŁ", "ĺĢ"]
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    backend.add_tokens([AddedToken("ÿ Ġ", normalized=False)])
    return backend


def sentencepiece() -> Backend:
    """As Llama 2's tokenizer.json: byte fallback, one leading space stripped."""
    pieces = ["<s>", "▁", "▁he", "llo", "▁▁", "é", "x", *(f"<0x{b:02X}>" for b in range(256))]
    backend = Backend(models.BPE(vocab={t: i for i, t in enumerate(pieces)}, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", normalized=False)])
    return backend


@pytest.fixture(scope="module", params=[byte_level, sentencepiece])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    request.param().save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("bytes")
    byte_level().save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


def test_the_two_kinds_of_vocabulary_take_their_own_path(
    tokenizer: Tokenizer, bytes_tokenizer: Tokenizer
) -> None:
    assert bytes_tokenizer.is_byte_level
    assert tokenizer.is_byte_level == (tokenizer.token(0) == "<|end|>")


# Ids 0..12 often: words, specials and spaces of both vocabularies; bytes otherwise, valid UTF-8 or not.
IDS = st.lists(
    st.integers(0, 12) | st.integers(0, SIZE) | st.sampled_from([258, 259, 260, 261, 262]), max_size=12
)


@settings(deadline=None, derandomize=True, max_examples=400)
@given(ids=IDS, cuts=st.lists(st.integers(0, 12)), skip=st.booleans())
@example(ids=[7, 263, 135], cuts=[1, 2], skip=False)  # an unknown id within a run of bytes
def test_pieces_add_up_to_decode_and_never_change(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    detokenizer, shown = Detokenizer(tokenizer, skip_special_tokens=skip), ""
    borders = sorted({0, *(cut for cut in cuts if cut < len(ids)), len(ids)})
    for start, end in pairwise(borders):
        shown += detokenizer.push(ids[start:end])
        assert whole.startswith(shown)
    assert shown + detokenizer.flush() == whole
    assert detokenizer.flush() == ""


@settings(deadline=None, derandomize=True)
@given(text=st.text(max_size=20))
def test_text_comes_back_token_by_token(bytes_tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(bytes_tokenizer)
    pieces = [detokenizer.push([i]) for i in bytes_tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert detokenizer.flush() == ""


def test_an_unfinished_character_waits(bytes_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(bytes_tokenizer)
    first, second = bytes_tokenizer.token_id("ðŁ"), bytes_tokenizer.token_id("ĺĢ")
    assert first is not None
    assert second is not None
    assert detokenizer.push([first]) == ""
    assert detokenizer.push([second]) == "😀"
    assert detokenizer.push([first]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_the_cost_of_a_token_does_not_grow(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0
    decode = Tokenizer.decode

    def watched(self: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(self, ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", watched)
    detokenizer = Detokenizer(tokenizer)
    for _ in range(300):
        detokenizer.push([3, 4, 5])
    assert longest <= 2


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: the stop string that is completed first; of several completed at once, the longest."""
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end if include else end - len(stop)], stop


@settings(deadline=None, derandomize=True, max_examples=1000)
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    include=st.booleans(),
)
def test_any_split_gives_what_the_whole_text_gives(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    text = "".join(pieces)
    checker, shown = StopChecker(stops, include), ""
    final, stop = expected(text, stops, include)
    seen = ""
    for piece in pieces:
        released, matched = checker.push(piece)
        shown, seen = shown + released, seen + piece
        assert matched == expected(seen, stops, include)[1]  # known with the piece that completes it
        assert final.startswith(shown)  # nothing is shown that has to be taken back
    assert checker.matched == stop
    assert shown + checker.flush() == final
    assert checker.flush() == ""


def test_holds_back_no_more_than_a_possible_beginning() -> None:
    checker = StopChecker(["\n\nUser:", "END"])
    assert checker.push("one EN") == ("one ", None)
    assert checker.push("D") == ("", "END")
    checker = StopChecker(["\n\nUser:", "END"])
    assert checker.push("one E") == ("one ", None)
    assert checker.push("x\n\n") == ("Ex", None)
    assert checker.push("User") == ("", None)
    assert checker.push("s ") == ("\n\nUsers ", None)
    assert checker.flush() == ""


def test_included_stop_strings_need_no_holding_back() -> None:
    checker = StopChecker(["END"], include_in_output=True)
    assert checker.push("a E") == ("a E", None)
    assert checker.push("NDing") == ("ND", "END")


def test_after_a_match_the_text_is_over() -> None:
    checker = StopChecker(["b"])
    assert checker.push("abc") == ("a", "b")
    assert checker.push("more") == ("", "b")
    assert checker.flush() == ""


def test_no_stop_strings_pass_everything() -> None:
    assert StopChecker(()).push("text") == ("text", None)


@pytest.mark.parametrize("stops", ["END", [""], [1]])
def test_refuses_what_is_no_list_of_strings(stops: list[str]) -> None:
    with pytest.raises(DSparkError, match="stop must be"):
        StopChecker(stops)


def test_flush_feeds_the_checker_too(bytes_tokenizer: Tokenizer) -> None:
    detokenizer, checker = Detokenizer(bytes_tokenizer), StopChecker(["x\ufffd"])
    first = bytes_tokenizer.token_id("ðŁ")
    assert first is not None
    assert checker.push(detokenizer.push([*bytes_tokenizer.encode("ax"), first])) == ("a", None)
    assert checker.push(detokenizer.flush()) == ("", "x\ufffd")
