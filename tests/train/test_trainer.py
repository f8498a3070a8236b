"""The loop: learns, resumes exactly, refuses bad configurations."""

import json

import pytest
import torch

from dspark.core import DSparkError
from dspark.drafters.backbone import BlockDrafterModel
from dspark.testing import tiny_decoder, tiny_drafter
from dspark.train.config import TrainConfig
from dspark.train.data import Sequence, load_sequences
from dspark.train.setup import draft_vocabulary, token_counts
from dspark.train.trainer import Trainer
from dspark.train.warm_start import bigram_scores, copy_last_layers, init_head_from_bigrams

G = torch.Generator().manual_seed(3)
SEQUENCES = [Sequence(torch.randint(0, 60, (24,), generator=G).tolist(), 6) for _ in range(6)]


def trainer(tmp_path, sequences=SEQUENCES, method="dspark", head="vanilla", **changes):
    torch.manual_seed(0)
    target = tiny_decoder(dtype=torch.float32)
    model = tiny_drafter(target, method, head, block_size=4).model
    # Serving packs linear layers; training needs them as they were.
    fresh = BlockDrafterModel(model.config)
    fresh.embed.weight.data.copy_(target.embed.weight)
    fresh.lm_head.weight.data.copy_(target.lm_head.weight)
    fresh.embed.requires_grad_(False)
    fresh.lm_head.requires_grad_(False)
    values = {
        "steps": 6,
        "sequences_per_step": 2,
        "anchors_per_sequence": 8,
        "eval_every": 2,
        "save_every": 2,
    }
    config = TrainConfig(output=str(tmp_path), dtype="float32", **(values | changes))
    return Trainer(config, fresh, target, list(sequences), list(sequences[:2]))


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path):
    whole = trainer(tmp_path / "whole")
    records = list(whole.run())
    first = trainer(tmp_path / "cut")
    for _ in range(4):
        first.train_step()
    first.save()
    second = trainer(tmp_path / "cut")
    assert second.resume()
    assert (second.step, second.blocks) == (4, first.blocks)
    resumed = list(second.run())
    assert resumed[-1]["loss"] == pytest.approx(records[-1]["loss"], abs=1e-6)
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    log = [json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in log] == [2, 4, 6]


@pytest.mark.parametrize(
    ("method", "head"), [("dspark", "vanilla"), ("dspark", "gated"), ("dspark", "rnn"), ("dflash", "vanilla")]
)
def test_overfits_a_single_sequence(tmp_path, method, head):
    changes = {
        "steps": 150,
        "sequences_per_step": 1,
        "anchors_per_sequence": 17,
        "lr": 1e-2,
        "eval_every": 150,
    }
    changes |= {"save_every": 1000, "ce": 1.0, "l1": 0.1, "weight_decay": 0.0}
    run = trainer(tmp_path, SEQUENCES[:1], method, head, **changes)
    list(run.run())
    batch = run.batch(0)
    _, logits, *_ = run.loss(batch)
    right = logits.argmax(-1) == batch.tokens[:, 1:]
    assert right[batch.mask].float().mean() > 0.97


def test_target_probabilities_are_those_of_the_full_vocabulary(tmp_path):
    run = trainer(tmp_path)
    batch = run.batch(0)
    p, rows = run.target_probabilities(batch)
    expected = run.features.target.lm_head(batch.last_hidden).softmax(-1)
    torch.testing.assert_close(p[rows][batch.mask], expected[batch.mask])


def test_warm_start_copies_what_the_target_computes(tmp_path):
    target = tiny_decoder(kind="qwen3", layers=3, dtype=torch.float32)
    model = BlockDrafterModel(tiny_drafter(target).model.config)
    model.config.__dict__["taps"] = (0, 1)  # the last tap is the state before the last layer
    copy_last_layers(model, target)
    taps, _ = target.hidden_states(torch.tensor([SEQUENCES[0].token_ids]), (0, 1))
    layer, copied = target.layers[2], model.layers[1]
    state = taps[0, :, 32:]
    rotary = target.rotary(torch.arange(24), torch.float32)
    _, k, v = layer.project(layer.input_norm(state), rotary)
    model.fc.weight.data[:] = 0
    model.fc.weight.data[:, 32:] = torch.eye(32)
    context_k, context_v = model.context_kv(1, model.context(taps[0]), rotary)
    torch.testing.assert_close(context_k, k, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(context_v, v, atol=1e-4, rtol=1e-4)
    assert copied.input_norm.weight.eq(1).all()


def test_head_starts_from_the_bigram_table():
    target = tiny_decoder(dtype=torch.float32)
    model = BlockDrafterModel(tiny_drafter(target).model.config)
    tokens = torch.arange(target.vocab_size)
    scores = bigram_scores(target, tokens, model.vocab, torch.tensor([1, 2]))
    ids = torch.stack((torch.full_like(tokens, 1), torch.full_like(tokens, 2), tokens), 1)
    rows = target.lm_head(target.hidden_states(ids, ())[1][:, -1]).log_softmax(-1).clamp(min=-16)
    torch.testing.assert_close(scores.float(), rows - rows.mean(0), atol=0.1, rtol=0.02)  # kept in bfloat16
    table = scores.float().clone()
    ones = torch.ones(target.vocab_size)
    share = init_head_from_bigrams(model, scores, ones, ones, strength=1.0, seed=0)
    built = (model.head.w1.weight @ model.head.w2.weight.T).detach()
    _, s, _ = torch.linalg.svd(table)
    best = float(s[:8].square().sum() / s.square().sum())
    left = float((table - built).square().sum() / table.square().sum())
    assert share == pytest.approx(best, abs=0.02)
    assert left == pytest.approx(1 - best, abs=0.02)


def test_draft_vocabulary_keeps_the_frequent_and_the_end_tokens():
    counts = torch.tensor([0.0, 5, 1, 9, 0, 5])
    assert draft_vocabulary(counts, 3, keep=(4,)).tolist() == [1, 3, 4]
    assert draft_vocabulary(counts, None, keep=()).tolist() == list(range(6))
    assert token_counts([Sequence([7, 7, 1, 1, 2], 2)], 8).tolist() == [0, 2, 1, 0, 0, 0, 0, 0]


def test_bad_configurations_are_refused(tmp_path):
    with pytest.raises(DSparkError, match="unknown training option 'stepz'"):
        TrainConfig.of({"stepz": 1})
    with pytest.raises(DSparkError, match="training option steps must be int, got 'many'"):
        TrainConfig.of({"steps": "many"})
    path = tmp_path / "c.toml"
    path.write_text("steps = 3\ntaps = [0, 1]\n")
    config = TrainConfig.load(path, ["lr=1e-3", "method=dflash"])
    assert (config.steps, config.taps, config.lr, config.method) == (3, (0, 1), 1e-3, "dflash")
    with pytest.raises(DSparkError, match="key=value"):
        TrainConfig.load(path, ["lr"])
    with pytest.raises(DSparkError, match="cannot read"):
        TrainConfig.load(tmp_path / "none.toml")


class Words:
    """A tokenizer of numbers."""

    eos_token_ids = (0,)

    def encode(self, text):
        return [int(w) for w in text.split()]

    def apply_chat_template(self, messages):
        return [1, *self.encode(messages[0]["content"]), 2]


def test_sequences_are_rendered_as_in_serving(tmp_path):
    path = tmp_path / "d.jsonl"
    messages = [{"role": "user", "content": "5 6"}, {"role": "assistant", "content": "7 8 9"}]
    path.write_text(
        "\n".join(json.dumps({"messages": messages, "finish_reason": r}) for r in ("stop", "length"))
    )
    stopped, cut = load_sequences([path], Words())
    assert (stopped.token_ids, stopped.answer_start) == ([1, 5, 6, 2, 7, 8, 9, 0], 4)
    assert cut.token_ids == [1, 5, 6, 2, 7, 8, 9]
    path.write_text("{not json")
    with pytest.raises(DSparkError, match=r"d.jsonl:1 is not JSON"):
        load_sequences([path], Words())
    path.write_text('{"messages": []}')
    with pytest.raises(DSparkError, match="messages"):
        load_sequences([path], Words())


def test_a_state_of_another_draft_vocabulary_is_refused(tmp_path):
    first = trainer(tmp_path)
    first.save()
    second = trainer(tmp_path)
    second.model.vocab = second.model.vocab.flip(0)
    with pytest.raises(DSparkError, match="other training data"):
        second.resume()


def test_target_probabilities_never_mix_sequences(tmp_path):
    """The first prompt tokens of a sequence lie behind the last slots of the one before it."""
    short = [Sequence(s.token_ids, 1) for s in SEQUENCES]
    run = trainer(tmp_path, short)
    batch = run.batch(0)
    expected = run.features.target.lm_head(batch.last_hidden).softmax(-1)
    p, rows = run.target_probabilities(batch)
    torch.testing.assert_close(p[rows][batch.mask], expected[batch.mask])


def test_the_mean_of_states(tmp_path):
    run = trainer(tmp_path / "a")
    paths = []
    for name in "xy":
        run.train_step()
        run.save()
        paths.append((run.output / "state.pt").rename(run.output / f"{name}.pt"))
    states = [torch.load(p, weights_only=True)["model"] for p in paths]
    run.average(paths)
    for name, value in run.model.named_parameters():
        if name in states[0]:
            torch.testing.assert_close(value.detach(), (states[0][name] + states[1][name]) / 2)
    assert run.averaged_steps == [1, 2]
