"""Every trained method from a configuration to a served checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.core import SamplingParams
from dspark.drafters.checkpoint import load_drafter_model, save_drafter_model
from dspark.drafters.methods import TRAINED
from dspark.drafters.models import serve
from dspark.engine.engine import Engine
from dspark.target.load import load_decoder
from dspark.testing import run_engine, slow_generate
from dspark.train.config import TrainConfig
from dspark.train.setup import build_trainer
from dspark.train.trainer import Trainer

ANSWER = "defghijklmnop" * 3
QUESTIONS = ("abc", "bca", "cab", "aab", "cba")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    records = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": ANSWER[i:]}]}
        for i, q in enumerate(QUESTIONS)
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def built(data: Path, target: Path, **changes: object) -> tuple[Trainer, str]:
    values = {
        "target": str(target), "data": (str(data),), "output": str(data.parent / "run"), "block_size": 3,
        "markov_rank": 4, "draft_vocab_size": 24, "steps": 3, "sequences_per_step": 2, "anchors_per_sequence": 4,
        "eval_every": 3, "save_every": 1, "dtype": "bfloat16", "features": "disk", "accumulate": 2,
    }  # fmt: skip
    if changes.get("method") in ("dspark", "dflash"):
        values["taps"] = (0, 1)
    said: list[str] = []
    trainer = build_trainer(TrainConfig.of(values | changes), said.append)  # type: ignore[arg-type]
    return trainer, "\n".join(said)


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen2", "qwen3"])
def model(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, and what other kinds add: a window of 5 positions, biases on q, k, v, norms of q and k."""
    directory = tmp_path_factory.mktemp("kinds") / request.param
    shutil.copytree(tiny_model, directory)
    config = json.loads((directory / "config.json").read_text()) | {"model_type": request.param}
    if request.param == "mistral":
        config["sliding_window"] = 5
    if request.param == "qwen3":
        config["head_dim"] = 8
    (directory / "config.json").write_text(json.dumps(config))
    weights, g = load_file(directory / "model.safetensors"), torch.Generator().manual_seed(1)
    for layer in (f"model.layers.{i}.self_attn." for i in range(3)):
        if request.param == "qwen2":
            sizes = {"q": 32, "k": 16, "v": 16}
            weights |= {f"{layer}{n}_proj.bias": torch.randn(s, generator=g) for n, s in sizes.items()}
        if request.param == "qwen3":
            weights |= {f"{layer}{n}_norm.weight": 1 + 0.1 * torch.randn(8, generator=g) for n in "qk"}
    save_file(weights, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("method", TRAINED)
def test_train_resume_go_on_and_serve(method: str, data: Path, model: Path) -> None:
    trainer, said = built(data, model, method=method)
    assert "will take" in said
    (record,) = trainer.run()
    assert {"loss", "overlap1", "tau_greedy", "tau_sampled"} <= record.keys()
    assert len(record["overlap"]) == 3
    trainer, said = built(data, model, method=method, steps=4)
    assert "resumed at step 3" in said
    assert "features of 0 tokens" in said
    trainer.train_step()
    trainer.save()

    # Going on adopts the draft vocabulary and the mask of the start, whatever this run's data would give.
    other = data.parent / "other.jsonl"
    record = {
        "messages": [{"role": "user", "content": "xyz"}, {"role": "assistant", "content": "QRSTUVW" * 4}]
    }
    other.write_text("\n".join([json.dumps(record)] * 3 + [data.read_text()]))
    state = data.parent / "run" / "state.pt"
    elsewhere = {"output": str(data.parent / "elsewhere"), "init_from": str(state)}
    going_on, said = built(other, model, method=method, **elsewhere)
    assert f"goes on from {state}" in said
    biases = [name for name in trainer.model.state_dict() if name.endswith("qkv_proj.bias")]
    assert len(biases) == (trainer.model.config.num_layers if model.name == "qwen2" else 0)
    assert torch.equal(going_on.model.vocab, trainer.model.vocab)
    assert going_on.model.config.mask_token_id == trainer.model.config.mask_token_id
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(going_on.model.state_dict()[name], value), name

    save_drafter_model(trainer.model, data.parent / "drafter", {})
    target = load_decoder(model)
    assert {spec.window for spec in target.kv_specs} == {5 if model.name == "mistral" else None}
    drafter = serve(load_drafter_model(data.parent / "drafter", target), quantised=True)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[1, 2, 3], [40], list(range(20))]
    outputs = run_engine(Engine(target, drafter), prompts, params)
    assert [o.token_ids for o in outputs] == [slow_generate(target, p, params).token_ids for p in prompts]
    assert sum(o.metrics.drafted for o in outputs) > 0
