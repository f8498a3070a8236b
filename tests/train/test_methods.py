"""Every trained method from a configuration to a served checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from dspark.core import SamplingParams
from dspark.drafters.checkpoint import load_drafter_model, save_drafter_model
from dspark.drafters.methods import TRAINED
from dspark.drafters.models import serve
from dspark.engine.engine import Engine
from dspark.target.load import load_decoder
from dspark.testing import run_engine, slow_generate
from dspark.train.config import TrainConfig
from dspark.train.export import export_drafter
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


@pytest.fixture
def windowed_mistral(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model's weights as a Mistral that looks back 5 positions."""
    directory = tmp_path / "mistral"
    shutil.copytree(tiny_model, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps(config | {"model_type": "mistral", "sliding_window": 5})
    )
    return directory


@pytest.mark.parametrize("method", ["dspark", "eagle3"])
def test_a_windowed_mistral_is_trained_for_and_served(
    method: str, data: Path, windowed_mistral: Path
) -> None:
    trainer, _ = built(data, windowed_mistral, method=method, dtype="float32", features="compute")
    list(trainer.run())
    directory, _ = export_drafter(trainer)
    target = load_decoder(windowed_mistral)
    assert [spec.window for spec in target.kv_specs] == [5, 5, 5]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [list(range(20)), [40]]
    outputs = run_engine(Engine(target, serve(load_drafter_model(directory, target))), prompts, params)
    assert [o.token_ids for o in outputs] == [slow_generate(target, p, params).token_ids for p in prompts]


@pytest.mark.parametrize("method", TRAINED)
def test_train_resume_go_on_and_serve(method: str, data: Path, tiny_model: Path) -> None:
    trainer, said = built(data, tiny_model, method=method)
    assert "will take" in said
    (record,) = trainer.run()
    assert {"loss", "overlap1", "tau_greedy", "tau_sampled"} <= record.keys()
    assert len(record["overlap"]) == 3
    trainer, said = built(data, tiny_model, method=method, steps=4)
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
    going_on, said = built(other, tiny_model, method=method, **elsewhere)
    assert f"goes on from {state}" in said
    assert torch.equal(going_on.model.vocab, trainer.model.vocab)
    assert going_on.model.config.mask_token_id == trainer.model.config.mask_token_id
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(going_on.model.state_dict()[name], value), name

    save_drafter_model(trainer.model, data.parent / "drafter", {})
    target = load_decoder(tiny_model)
    drafter = serve(load_drafter_model(data.parent / "drafter", target), quantised=True)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[1, 2, 3], [40], list(range(20))]
    outputs = run_engine(Engine(target, drafter), prompts, params)
    assert [o.token_ids for o in outputs] == [slow_generate(target, p, params).token_ids for p in prompts]
    assert sum(o.metrics.drafted for o in outputs) > 0
