"""The loop: learns, resumes exactly, refuses bad configurations."""

import dataclasses
import json
import sys
import types

import pytest
import torch

from dspark.core import DSparkError
from dspark.drafters.backbone import BlockDrafterModel
from dspark.target.decoder import causal_attention
from dspark.testing import tiny_decoder, tiny_drafter
from dspark.testing.chain import tiny_chain_model
from dspark.train.blocks import block_forward, make_batch
from dspark.train.config import TrainConfig
from dspark.train.data import Sequence, load_sequences
from dspark.train.features import FeatureSource
from dspark.train.growth import grow_layers, grow_vocabulary
from dspark.train.run_log import LengthWatch
from dspark.train.setup import draft_vocabulary, drafter_config, token_counts
from dspark.train.states import read_start
from dspark.train.trainable import trainable
from dspark.train.trainer import Trainer
from dspark.train.warm_start import (
    bigram_scores,
    copy_into_eagle3,
    copy_into_mtp,
    copy_last_layers,
    init_head_from_bigrams,
)

G = torch.Generator().manual_seed(3)
SEQUENCES = [Sequence(torch.randint(0, 60, (24,), generator=G).tolist(), 6) for _ in range(6)]


def trainer(tmp_path, sequences=SEQUENCES, method="dspark", head="vanilla", **changes):
    torch.manual_seed(0)
    target = tiny_decoder(dtype=torch.float32)
    fresh = fresh_model(target, method, head)
    values = {
        "steps": 6,
        "sequences_per_step": 2,
        "anchors_per_sequence": 8,
        "eval_every": 2,
        "save_every": 2,
    }
    config = TrainConfig(output=str(tmp_path), dtype="float32", **(values | changes))
    return Trainer(config, fresh, target, list(sequences), list(sequences[:2]))


def fresh_model(target, method, head):
    if method in ("eagle3", "mtp"):
        return tiny_chain_model(target, method, block_size=4)
    model = tiny_drafter(target, method, head, block_size=4).model
    # Serving packs linear layers; training needs them as they were.
    fresh = BlockDrafterModel(model.config)
    fresh.embed.weight.data.copy_(target.embed.weight)
    fresh.lm_head.weight.data.copy_(target.lm_head.weight)
    fresh.embed.requires_grad_(False)
    fresh.lm_head.requires_grad_(False)
    return fresh


@pytest.mark.parametrize("method", ["dspark", "eagle3", "mtp"])
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, method):
    whole = trainer(tmp_path / "whole", method=method)
    records = list(whole.run())
    first = trainer(tmp_path / "cut", method=method)
    for _ in range(4):
        first.train_step()
    first.save()
    second = trainer(tmp_path / "cut", method=method)
    assert second.resume()
    assert (second.step, second.blocks) == (4, first.blocks)
    resumed = list(second.run())
    assert resumed[-1]["loss"] == pytest.approx(records[-1]["loss"], abs=1e-6)
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    log = [json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in log] == [2, 4, 6]


def test_the_log_of_a_resumed_run_is_that_of_the_uninterrupted_one(tmp_path):
    changes = {"steps": 11, "eval_every": 5, "save_every": 2}

    def log(name):
        records = [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        return [{k: v for k, v in record.items() if k != "blocks_per_s"} for record in records]

    list(trainer(tmp_path / "whole", **changes).run())
    killed = trainer(tmp_path / "cut", **changes)
    running = killed.run()
    assert next(running)["step"] == 5  # the next save would have been at step 6
    running.close()
    with (tmp_path / "cut" / "log.jsonl").open("a") as file:
        file.write('{"step": 3, "bl')
    resumed = trainer(tmp_path / "cut", **changes)
    assert resumed.resume()
    assert resumed.step == 4
    assert len((tmp_path / "cut" / "log.jsonl").read_text().splitlines()) == 2, "a look changes nothing"
    list(resumed.run())
    assert [record["step"] for record in log("whole")] == [5, 10, 11]
    assert log("cut") == log("whole")
    list(trainer(tmp_path / "cut", **changes).run())  # no state was read: from the start
    assert log("cut") == log("whole")


def test_a_run_that_is_asked_to_stop_saves_behind_the_step(tmp_path):
    run = trainer(tmp_path, steps=5, save_every=100, eval_every=100)
    step = run.train_step

    def asked():
        run.stop_requested = run.step == 2
        return step()

    run.train_step = asked
    assert not list(run.run())
    again = trainer(tmp_path, steps=5, save_every=100, eval_every=100)
    assert again.resume()
    assert again.step == run.step == 3


def test_going_on_keeps_the_place_only_in_the_same_order_of_sequences(tmp_path):
    first = trainer(tmp_path / "first")  # 6 sequences, 2 a step
    for _ in range(4):
        first.train_step()
    first.save()
    path = tmp_path / "first" / "state.pt"
    state = read_start(path)

    def went_on(sequences=SEQUENCES, state=state, **changes):
        other = trainer(tmp_path / "second", sequences, **changes)
        other.start_from(state, path)
        return other

    same = went_on()
    assert [s for s, _ in same.draw(0)] == [s for s, _ in first.draw(4)]
    same.step = 3
    same.save()
    again = went_on(state=read_start(tmp_path / "second" / "state.pt"))
    assert again.order.steps_before == 7
    assert again.blocks == first.blocks, "the blocks seen are counted in any case"
    more = [*SEQUENCES, Sequence([1, 2, 3, 4, 5, 6, 7, 8], 2), Sequence([9, 8, 7, 6, 5, 4, 3, 2], 2)]
    other = went_on(more)
    drawn = [s for step in range(4) for s, _ in other.draw(step)]
    assert sorted(map(more.index, drawn)) == list(range(8)), "an epoch leaves nothing out"
    moved = [Sequence(SEQUENCES[0].token_ids, 7), *SEQUENCES[1:]]
    for changed in (went_on(moved), went_on(SEQUENCES[::-1]), went_on(seed=1), went_on(sequences_per_step=3)):
        assert changed.order.steps_before == 0
        assert changed.blocks == first.blocks
    old = {key: value for key, value in state.items() if key != "order"}
    assert went_on(state=old).order.steps_before == 0, (
        "states of older versions do not say what they were trained on"
    )


@pytest.mark.parametrize(
    ("method", "head"),
    [
        ("dspark", "vanilla"),
        ("dspark", "gated"),
        ("dspark", "rnn"),
        ("dflash", "vanilla"),
        ("eagle3", ""),
        ("mtp", ""),
    ],
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


@pytest.mark.parametrize(
    ("old", "new", "kept"), [(2, 4, [1, 3]), (2, 3, [1, 2]), (1, 3, [2]), (2, 2, [0, 1])]
)
def test_new_layers_change_nothing_at_first(old, new, kept):
    target = tiny_decoder(kind="qwen3", layers=5, dtype=torch.float32)
    config = dataclasses.replace(tiny_drafter(target).model.config, num_layers=old)
    torch.manual_seed(1)
    small, large = (BlockDrafterModel(dataclasses.replace(config, num_layers=n)) for n in (old, new))
    large.load_state_dict(grow_layers(small.state_dict(), large, target))
    for place, layer in zip(kept, small.layers, strict=True):
        assert torch.equal(large.layers[place].down_proj.weight, layer.down_proj.weight)
    features = FeatureSource(target, config.taps)(SEQUENCES[:2])
    batch = make_batch(SEQUENCES[:2], features, [torch.tensor([8, 12]), torch.tensor([9])], 4)
    torch.testing.assert_close(block_forward(large, batch)[0], block_forward(small, batch)[0])
    fresh = [layer for place, layer in enumerate(large.layers) if place not in kept]
    assert all(layer.qkv_proj.weight.any() for layer in fresh), "what is not zero yet can learn"


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_a_larger_vocabulary_keeps_the_scores_of_the_old_one(head):
    target = tiny_decoder(dtype=torch.float32)
    config = dataclasses.replace(tiny_drafter(target, "dspark", head).model.config, markov_rank=2)
    torch.manual_seed(1)
    small, large = (BlockDrafterModel(dataclasses.replace(config, draft_vocab_size=n)) for n in (3, 5))
    small.vocab = torch.tensor([2, 7, 40])
    vocab = torch.tensor([2, 5, 7, 40, 41])
    state = {k: v for k, v in small.state_dict().items() if not k.startswith(("embed.", "lm_head."))}
    large.load_state_dict(grow_vocabulary(state, vocab), strict=False)
    assert large.vocab.tolist() == vocab.tolist()
    for model in (small, large):
        model.embed.weight.data = target.embed.weight.detach().float()
        model.lm_head.weight.data = target.lm_head.weight.detach().float()[model.vocab]
    features = FeatureSource(target, config.taps)(SEQUENCES[:1])
    batch = make_batch(SEQUENCES[:1], features, [torch.tensor([8, 12])], 4)
    (hidden, before, _), (_, after, _) = (block_forward(model, batch) for model in (small, large))
    torch.testing.assert_close(after[..., [0, 2, 3]], before)
    torch.testing.assert_close(after[..., [1, 4]], hidden @ target.lm_head.weight.detach().float()[[5, 41]].T)


def test_fewer_layers_than_the_start_and_more_than_the_target_are_refused():
    target = tiny_decoder(kind="qwen3", dtype=torch.float32)
    model = BlockDrafterModel(tiny_drafter(target).model.config)
    state = {f"layers.{i}.o_proj.weight": torch.zeros(1) for i in range(3)}
    with pytest.raises(DSparkError, match="raise num_layers"):
        grow_layers(state, model, target)
    model = BlockDrafterModel(dataclasses.replace(model.config, num_layers=9))
    with pytest.raises(DSparkError, match="lower num_layers"):
        grow_layers(state, model, target)


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
    assert draft_vocabulary(counts, 6, keep=()).tolist() == list(range(6))
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


@pytest.mark.parametrize("method", ["dspark", "eagle3"])
def test_parts_of_a_step_add_up_to_the_step(tmp_path, method):
    """Sequences of different lengths: a part's mean is not the step's."""
    ragged = [Sequence(s.token_ids[: 10 + 2 * i], 6) for i, s in enumerate(SEQUENCES)]
    runs = []
    for parts in (1, 2, 5):
        run = trainer(
            tmp_path / str(parts), ragged, method, sequences_per_step=5, accumulate=parts, regression=0.5
        )
        runs.append((run, [run.train_step() for _ in range(3)]))
    whole, records = runs[0]
    for run, other in runs[1:]:
        for a, b in zip(records, other, strict=True):
            assert a == pytest.approx(b, rel=1e-5)
        assert run.blocks == whole.blocks
        for a, b in zip(whole.model.parameters(), run.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_mtp_trains_the_first_slot_and_evaluates_the_chain(tmp_path):
    run = trainer(tmp_path, method="mtp")
    assert run.batch(0).gamma == 1
    assert len(run.evaluate()["overlap"]) == 4


@pytest.mark.parametrize("method", ["dspark", "mtp"])
def test_losses_are_those_of_features_computed_on_the_fly(tmp_path, method):
    """Over two epochs: what is kept is used again in the second."""

    def losses(features):
        run = trainer(tmp_path / features, method=method, features=features)
        computed, compute = [], run.features.compute
        run.features.compute = lambda *args: (computed.append(1), compute(*args))[1]
        first = [run.train_step()["loss"] for _ in range(3)]
        run.save()  # writes those on disk
        return first + [run.train_step()["loss"] for _ in range(3)], len(computed)

    expected, often = losses("compute")
    assert len(set(expected)) == 6
    for features in ("memory", "disk"):
        found, seldom = losses(features)
        assert found == expected
        assert seldom < often


def watched(lengths, blocks=20_000):
    """A watch that saw evaluations of these lengths, greedy and sampled, with so many blocks between them."""
    watch = LengthWatch()
    for i, (greedy, sampled) in enumerate(lengths, 1):
        watch.see({"step": i, "blocks": i * blocks, "tau_greedy": greedy, "tau_sampled": sampled})


@pytest.mark.parametrize("useless", [(1.01, 1.02), (1.0, 1.25), (1.5, 1.05)])
def test_a_useless_drafter_is_told_once(caplog, useless):
    watched([useless] * 5)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "still {:.2f} greedy, {:.2f} sampled at step 2".format(*useless) in caplog.text
    assert "taps" in caplog.text


def test_a_drafter_that_learns_or_has_hardly_begun_is_left_alone(caplog):
    watched([(1.0, 1.0) if i % 2 else (1.5, 1.2) for i in range(6)])
    watched([(1.0, 1.0)] * 19, blocks=1_000)
    assert not caplog.records


def test_tensorboard_is_optional(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(DSparkError, match="pip install tensorboard"):
        trainer(tmp_path, tensorboard=True)
    seen = []
    writer = types.SimpleNamespace(add_scalar=lambda *scalar: seen.append(scalar), flush=lambda: None)
    board = types.SimpleNamespace(SummaryWriter=lambda directory: writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    run = trainer(tmp_path, tensorboard=True)
    records = list(run.run())
    tags = {tag for tag, _, _ in seen}
    assert {"loss", "tau_greedy", "overlap/1", "overlap/4"} <= tags
    assert [(tag, value) for tag, value, step in seen if tag == "loss" and step == 4] == [
        ("loss", records[1]["loss"])
    ]
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == len(records)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_tensorboard_reads_what_is_written(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = trainer(tmp_path, tensorboard=True, steps=4)
    records = list(run.run())
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    for tag, found in (
        ("loss", [r["loss"] for r in records]),
        ("overlap/4", [r["overlap"][3] for r in records]),
    ):
        scalars = events.Scalars(tag)
        assert [s.step for s in scalars] == [2, 4]
        assert [s.value for s in scalars] == pytest.approx(found)


def test_warm_started_chains_read_what_the_targets_last_layer_reads():
    """With the token's half silenced, the draft layer is the target's last layer."""
    target = tiny_decoder(kind="qwen3", layers=3, dtype=torch.float32)
    ids = torch.tensor([SEQUENCES[0].token_ids])
    (state, last), rotary = target.hidden_states(ids, (1,)), target.rotary(torch.arange(24), torch.float32)
    model = tiny_chain_model(target, "eagle3")
    copy_into_eagle3(model, target)
    features = model.fuse(torch.cat((torch.zeros(24, 64), state[0]), -1))
    torch.testing.assert_close(features, state[0], atol=0.1, rtol=0.02)
    model.layer.qkv_proj.weight.data[:, :32] = 0
    model.layer.qkv_proj.weight.data *= 2

    def attend(q, k, v):
        q, k, v = (t[None].transpose(1, 2) for t in (q, k, v))
        return causal_attention(q, k, v, 8**-0.5).transpose(1, 2).flatten(0, 1)

    hidden = model.norm(model.advance(ids[0], state[0], rotary, attend))
    torch.testing.assert_close(hidden, last[0], atol=1e-4, rtol=1e-4)


def test_warm_start_of_mtp_copies_the_last_layer_and_fits_what_it_reads():
    """The only layer of a target reads the embedding: a linear function of one half of what `proj` reads."""
    target = tiny_decoder(layers=1, dtype=torch.float32)
    model = tiny_chain_model(target, "mtp")
    g = torch.Generator().manual_seed(9)
    sequences = [Sequence(torch.randint(0, 60, (24,), generator=g).tolist(), 6) for _ in range(21)]
    copy_into_mtp(model, target, sequences[:20])
    for name, value in target.layers[0].state_dict().items():
        assert torch.equal(model.layer.state_dict()[name], value)
    assert torch.equal(model.norm.weight, target.norm.weight)
    ids = torch.tensor(sequences[20].token_ids)  # which the fit has not seen
    state, wanted = target.hidden_states(ids[None], (0, -1))[0][0].split(32, -1)
    guess = model.proj(model.join(ids[1:], state[:-1])).detach()
    assert (guess - wanted[1:]).square().sum() < 0.05 * wanted[1:].square().sum()


def test_warm_started_mtp_drafts_before_it_is_trained(tmp_path):
    warm, cold = (trainer(tmp_path, SEQUENCES, "mtp") for _ in range(2))
    warm.form.warm_start(warm.features.target, warm.order.sequences)
    assert warm.evaluate()["overlap"][0] > 1.5 * cold.evaluate()["overlap"][0]


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_warm_start_from_layers_of_another_shape_is_refused(method):
    model = tiny_chain_model(tiny_decoder(dtype=torch.float32), method)
    with pytest.raises(DSparkError, match="qk_norm differs; set warm_start=false"):
        trainable(model).warm_start(tiny_decoder(kind="qwen3", dtype=torch.float32), SEQUENCES)


@pytest.mark.parametrize(
    ("layers", "taps"),
    [
        (30, (5, 11, 17, 23, 28)),
        (36, (6, 13, 21, 28, 34)),
        (12, (1, 4, 6, 9, 10)),
        (3, (0, 1)),
        (2, (-1, 0)),
        (1, (-1,)),
    ],
)
def test_taps_spread_over_the_target(layers, taps):
    target = tiny_decoder(layers=layers)
    assert drafter_config(TrainConfig(), target, 63, 64).taps == taps
    assert drafter_config(TrainConfig(taps=(0,)), target, 63, 64).taps == (0,)


def test_what_a_method_leaves_open():
    target = tiny_decoder(layers=3)

    def made(**options):
        return drafter_config(TrainConfig(**options), target, 63, 40)

    eagle3 = made(method="eagle3")
    assert (eagle3.num_layers, eagle3.taps, eagle3.mask_token_id) == (1, (-1, 0, 1), None)
    assert (eagle3.confidence_head, eagle3.markov_rank, eagle3.draft_vocab_size) == (False, 0, 40)
    assert made(method="eagle3", confidence_head=True, taps=(0, 1)).confidence_head
    assert made(method="mtp").taps == (2,)
    dspark = made(num_layers=5, markov_rank=40)
    assert (dspark.num_layers, dspark.confidence_head, dspark.mask_token_id) == (5, True, 63)
    assert not made(method="dflash", markov_rank=64).confidence_head
    with pytest.raises(
        DSparkError, match=r"markov_rank must lie in 0..40, the size of the draft vocabulary, got 41"
    ):
        made(markov_rank=41)
    with pytest.raises(DSparkError, match="num_layers must be 1, got 2"):
        made(method="mtp", num_layers=2)
    with pytest.raises(DSparkError, match="taps must name one layer"):
        made(method="mtp", taps=(0, 1))
    with pytest.raises(DSparkError, match="method must be one of"):
        TrainConfig(method="medusa")
    with pytest.raises(DSparkError, match="accumulate must be at most sequences_per_step"):
        TrainConfig(sequences_per_step=2, accumulate=3)
