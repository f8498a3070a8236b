"""From a configuration to a trainer and back to a checkpoint, on a tiny model in a directory."""

import json

import pytest
import torch

from dspark.core import DSparkError
from dspark.drafters.checkpoint import load_drafter_model
from dspark.target.load import load_decoder
from dspark.train.config import TrainConfig
from dspark.train.export import average_states, export_drafter
from dspark.train.setup import build_trainer

MESSAGES = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "defghijklmnop" * 3}]


@pytest.fixture
def config(tmp_path, tiny_model):
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"messages": MESSAGES}) for _ in range(6)))
    path = tmp_path / "c.toml"
    path.write_text(
        f'target = "{tiny_model}"\ndata = ["{data}"]\noutput = "{tmp_path / "run"}"\ntaps = [0, 1]\nmarkov_rank = 4\n'
        "draft_vocab_size = 32\nblock_size = 3\nsteps = 3\nsequences_per_step = 2\nanchors_per_sequence = 4\n"
        'eval_every = 3\nsave_every = 1\ndtype = "float32"\n'
    )
    return path


def build(config, *overrides):
    """A trainer and what it reported."""
    said = []
    return build_trainer(TrainConfig.load(config, overrides), said.append), said


def test_train_resume_export_and_go_on(config, tmp_path, tiny_model):
    trainer, said = build(config)
    assert not any("6 sequences" in line for line in said)  # one is held out
    (record,) = trainer.run()
    assert record["tau_greedy"] >= 1
    directory, provenance = export_drafter(trainer)
    assert directory == tmp_path / "run" / "drafter"
    model = load_drafter_model(directory, load_decoder(tiny_model))
    assert model.config.block_size == 3
    written = json.loads((directory / "config.json").read_text())["provenance"]
    assert written == json.loads(json.dumps(provenance))
    assert provenance["steps"] == 3
    assert (provenance["config"]["target"], provenance["config"]["data"]) == ("tiny", ["data.jsonl"])
    assert not {"output", "init_from", "feature_dir"} & provenance["config"].keys()  # somebody's directories
    trainer, said = build(config, "steps=4")
    assert "resumed at step 3" in said
    list(trainer.run())
    state = tmp_path / "run" / "state.pt"
    average_states(trainer, [state, state])
    assert export_drafter(trainer, tmp_path / "mean")[1]["averaged_steps"] == [4, 4]
    for start in (directory, state):
        other, said = build(config, f"output={tmp_path / 'other'}", f"init_from={start}")
        assert any(line.startswith(f"goes on from {start}") for line in said)
        rounded = [
            line for line in said if "rounded to 4 or 8 bits, as served" in line and "state.pt" in line
        ]
        assert len(rounded) == (start == directory), "said once, of weights that are not exact"
        # A state says how far it came in the order of sequences; a drafter does not.
        begins = trainer.draw(4 if start == state else 0)
        for (mine, anchors), (theirs, their_anchors) in zip(other.draw(0), begins, strict=True):
            assert mine == theirs
            assert torch.equal(anchors, their_anchors)
    more, said = build(config, f"output={tmp_path / 'more'}", f"init_from={state}", "draft_vocab_size=40")
    assert "draft vocabulary grown from 32 to 40 tokens" in said
    assert set(trainer.model.vocab.tolist()) < set(more.model.vocab.tolist())
    assert more.train_step()["loss"] > 0
    with pytest.raises(DSparkError, match="drafts from 32 tokens: set draft_vocab_size to that or more"):
        build(config, f"output={tmp_path / 'fewer'}", f"init_from={state}", "draft_vocab_size=16")
    other.save()
    assert build(config, f"output={tmp_path / 'other'}")[0].order.steps_before == 4, (
        "and a run that resumes knows it still"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data=['{}/none.jsonl']", "cannot read training data"),
        ("data=['{0}/data.jsonl', '{0}']", "cannot read training data"),
        ("init_from={}/none", "none does not exist"),
    ],
)
def test_files_are_looked_for_before_the_target_is_read(config, tmp_path, monkeypatch, override, message):
    for reader in ("resolve", "Tokenizer", "load_decoder"):
        monkeypatch.setattr(f"dspark.train.setup.{reader}", lambda *_: pytest.fail("read for nothing"))
    with pytest.raises(DSparkError, match=message):
        build(config, override.format(tmp_path))


def adam(trainer):
    """Moments by the name of the parameter."""
    return {
        name: trainer.optimizer.state[p] for name, p in trainer.model.named_parameters() if p.requires_grad
    }


def test_a_grown_drafter_keeps_the_moments_of_what_it_had(config, tmp_path):
    first, _ = build(config, "num_layers=2", "draft_vocab_size=10")
    list(first.run())
    start = f"init_from={tmp_path / 'run' / 'state.pt'}"
    before = adam(first)
    assert all(of["exp_avg_sq"].any() for of in before.values())

    wide, _ = build(config, "num_layers=2", "draft_vocab_size=20", start, f"output={tmp_path / 'wide'}")
    place = torch.searchsorted(wide.model.vocab, first.model.vocab)
    new = torch.ones(len(wide.model.vocab), dtype=torch.bool).index_fill(0, place, False)
    assert new.any()
    for name, of in adam(wide).items():
        assert int(of["step"]) == 3
        for moment in ("exp_avg", "exp_avg_sq"):
            rows = of[moment][place] if name == "head.w2.weight" else of[moment]
            assert torch.equal(rows, before[name][moment]), name
    bias = adam(wide)["head.w2.weight"]
    assert not bias["exp_avg"][new].any()

    deep, _ = build(config, "num_layers=3", "draft_vocab_size=10", start, f"output={tmp_path / 'deep'}")
    after = adam(deep)
    moved = {"layers.0.": "layers.1.", "layers.1.": "layers.2."}
    for name, of in before.items():
        now = after.pop(moved.get(name[:9], name[:9]) + name[9:])
        assert torch.equal(now["exp_avg"], of["exp_avg"]), name
    assert {name[:9] for name in after} == {"layers.0."}
    assert not any(after.values()), "a new layer has none yet"

    for grown in (wide, deep):
        (record,) = grown.run()
        assert record["loss"] > 0
        assert all(int(of["step"]) in (3, 6) for of in adam(grown).values())
    assert build(config, "num_layers=2", "draft_vocab_size=20", f"output={tmp_path / 'wide'}")[0].step == 3


def test_going_on_takes_the_optimisers_options_from_its_own_configuration(config, tmp_path):
    first, _ = build(config)
    list(first.run())
    options = ("weight_decay=0.5", "head_lr_scale=3", f"output={tmp_path / 'second'}")
    second, _ = build(config, f"init_from={tmp_path / 'run' / 'state.pt'}", *options)
    assert [(group["weight_decay"], group["scale"]) for group in second.optimizer.param_groups] == [
        (0.5, 1.0),
        (0.5, 3.0),
    ]
    for name, of in adam(first).items():
        assert torch.equal(adam(second)[name]["exp_avg_sq"], of["exp_avg_sq"])


def test_a_damaged_state_is_named(config, tmp_path):
    trainer, _ = build(config)
    trainer.save()
    path = tmp_path / "run" / "state.pt"
    content = path.read_bytes()
    for size in (0, 7, 1000, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(DSparkError, match=r"state\.pt is damaged, truncated or no resume state"):
            build(config)
    torch.save({"weights": 1}, path)
    with pytest.raises(DSparkError, match="no resume state"):
        build(config)


def test_bad_input_is_one_line(config, tmp_path):
    for overrides, message in (
        (["stepz=1"], "unknown training option 'stepz'"),
        ([f"data=['{tmp_path / 'none.jsonl'}']"], "cannot read training data"),
        (["init_from=/none"], "init_from /none does not exist"),
        (["taps=[0, 9]"], "taps"),
        (["target=none"], "no model 'none'"),
        (["eval_every=0"], "eval_every must be 1 or more"),
        (["held_out=2.0"], r"held_out must lie in \[0, 1\]"),
        (["lr=-1.0"], "lr must be above 0"),
        (["ce=-1.0"], "ce must be 0 or more"),
        (["markov_rank=-1"], "markov_rank must be 0 or more"),
    ):
        with pytest.raises(DSparkError, match=message) as error:
            build(config, *overrides)[0].train_step()
        assert "\n" not in str(error.value)
    trainer, _ = build(config)
    with pytest.raises(DSparkError, match="no resume state at"):
        average_states(trainer, [tmp_path / "none.pt"])
