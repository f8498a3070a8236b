"""The bookkeeping of benchmarks/cpu_peers.py; the peers themselves run only by hand."""

import importlib.util

import pytest


@pytest.fixture
def peers(script):
    return script("cpu_peers")


def test_texts_are_compared_up_to_the_reference_s_end(peers):
    reference = [[5, 6, 0, 7], [1, 2, 3, 4], [0, 1, 1, 1]]
    same = peers.compare(reference, [[5, 6, 9, 9], [1, 2, 3, 4], [7, 7, 7, 7]], ends=(0,))
    assert same == {"identical": 3, "common": 1.0}
    other = peers.compare(reference, [[5, 1, 0, 7], [1, 2, 3, 5], [0, 0, 0, 0]], ends=(0,))
    assert other == {"identical": 1, "common": pytest.approx((1 / 2 + 3 / 4 + 1) / 3)}
    assert peers.compare(None, reference, ends=()) == {"identical": None, "common": None}


def test_ratios_are_taken_within_a_repeat(peers):
    def run(peer, repeat, rate):
        shared = {
            "accepted_length": None,
            "identical": 2 - repeat,
            "common": 0.5,
            "peak_rss_mb": 10.0 + repeat,
        }
        return {
            "peer": peer, "concurrency": 4, "repeat": repeat, "tokens_per_s": rate, "tokens_per_cpu_s": 1.0,
            "decode_tokens_per_s": rate if repeat else None, **shared
        }  # fmt: skip

    runs = [run("none", 0, 10.0), run("b", 0, 20.0), run("none", 1, 30.0), run("b", 1, 30.0)]
    first, second = peers.summarise(runs, ["none", "b"])
    assert first["tokens_per_s"] == {"median": 20.0, "min": 10.0, "max": 30.0}
    assert second["ratio_to"] == {"none": {"median": 1.5, "min": 1.0, "max": 2.0}}
    assert second["decode_tokens_per_s"] == {"median": 30.0, "min": 30.0, "max": 30.0}
    assert (second["identical"], second["peak_rss_mb"]) == (1, 11.0)


def test_decoding_leaves_the_prompts_out(peers):
    class Scripted:
        name = "b"

        def decode(self, prompts, tokens, concurrency):
            seconds = 2.0 if tokens == 1 else 4.0
            return {"ids": [[1] * tokens for _ in prompts], "seconds": seconds, "cpu_seconds": 8.0}

    run = peers.measure(Scripted(), [[1], [2]], 5, 1)
    assert (run["tokens_per_s"], run["tokens_per_cpu_s"], run["decode_tokens_per_s"]) == (2.5, 1.25, 4.0)
    assert run["first_token_seconds"] == 2.0


def test_missing_peers_are_skipped_aloud(peers, monkeypatch, tmp_path, capsys):
    find = importlib.util.find_spec
    absent = ("transformers", "xllamacpp")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else find(name))
    assert "dspark[bench]" in peers.missing("transformers", "smollm2-135m")
    assert peers.missing("dspark", "smollm2-135m") is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert "reads GGUF files" in peers.missing("llama.cpp", str(tmp_path))
    file = tmp_path / "model.gguf"
    file.touch()
    assert peers.missing("llama.cpp-ngram", str(file)) is None


@pytest.mark.parametrize(
    "argv",
    [["--peers", "none,vllm"], ["--repeats", "0"], ["--llama-ngram", "bigram"], ["--concurrency", "0"]],
)
def test_bad_options(peers, argv, capsys):
    with pytest.raises(SystemExit) as ended:
        peers.parse(argv)
    assert ended.value.code == 2
    assert "error" in capsys.readouterr().err
