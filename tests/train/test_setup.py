"""From a configuration to a trainer, on a tiny model in a directory of its own."""

import json

import pytest
import torch
from safetensors.torch import save_file

from dspark.drafters.checkpoint import load_drafter_model
from dspark.target.load import load_decoder
from dspark.train.__main__ import main

MESSAGES = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "defghijklmnop" * 3}]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture
def target(tmp_path):
    """A random Llama with a one-character tokenizer, as a Hugging Face directory."""
    from dspark.testing import tiny_tokenizer

    directory = tmp_path / "target"
    directory.mkdir()
    tiny_tokenizer(directory)
    config = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu", "eos_token_id": 63,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    g = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens": (64, 32), "model.norm": (32,)}
    for i in range(3):
        p = f"model.layers.{i}."
        shapes |= {p + "input_layernorm": (32,), p + "post_attention_layernorm": (32,)}
        shapes |= {
            p + f"self_attn.{n}_proj": (s, 32) for n, s in (("q", 32), ("k", 16), ("v", 16), ("o", 32))
        }
        shapes |= {p + "mlp.gate_proj": (64, 32), p + "mlp.up_proj": (64, 32), p + "mlp.down_proj": (32, 64)}
    weights = {
        f"{k}.weight": torch.randn(s, generator=g) * (0.3 if len(s) > 1 else 1) for k, s in shapes.items()
    }
    save_file(weights, directory / "model.safetensors")
    return directory


@pytest.fixture
def config(tmp_path, target):
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"messages": MESSAGES}) for _ in range(6)))
    path = tmp_path / "c.toml"
    path.write_text(
        f'target = "{target}"\ndata = ["{data}"]\noutput = "{tmp_path / "run"}"\ntaps = [0, 1]\nmarkov_rank = 4\n'
        "draft_vocab_size = 32\nblock_size = 3\nsteps = 3\nsequences_per_step = 2\nanchors_per_sequence = 4\n"
        'eval_every = 3\nsave_every = 1\ndtype = "float32"\n'
    )
    return path


def test_train_resume_export_and_go_on(config, tmp_path, target, capsys):
    assert main([str(config)]) == 0
    out = capsys.readouterr().out
    assert "6 sequences" not in out  # one is held out
    assert "accepted length" in out
    drafter = tmp_path / "run" / "drafter"
    model = load_drafter_model(drafter, load_decoder(target))
    assert model.config.block_size == 3
    provenance = json.loads((drafter / "config.json").read_text())["provenance"]
    assert provenance["steps"] == 3
    assert provenance["config"]["data"] == ["data.jsonl"]
    assert main([str(config), "--set", "steps=4"]) == 0
    assert "resumed at step 3" in capsys.readouterr().out
    state = str(tmp_path / "run" / "state.pt")
    assert main([str(config), "--average", state, state]) == 0
    elsewhere = ["--set", f"output={tmp_path / 'other'}"]
    for start in (drafter, state):
        assert main([str(config), *elsewhere, "--set", f"init_from={start}", "--export"]) == 0
        assert f"goes on from {start}" in capsys.readouterr().out


def test_bad_input_is_one_line_and_exit_code_2(config, tmp_path, capsys):
    for arguments, message in (
        ([str(tmp_path / "none.toml")], "cannot read training config"),
        ([str(config), "--set", "stepz=1"], "unknown training option 'stepz'"),
        ([str(config), "--set", f"data=['{tmp_path / 'none.jsonl'}']"], "cannot read training data"),
        ([str(config), "--set", "init_from=/none"], "init_from /none does not exist"),
        ([str(config), "--set", "taps=[0, 9]"], "taps"),
        ([str(config), "--set", "target=none"], "no model 'none'"),
    ):
        assert main(arguments) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert message in err
