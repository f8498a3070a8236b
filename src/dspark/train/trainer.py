"""The training loop: frozen target, random anchors, checkpoints that resume exactly."""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.core import DSparkError
from dspark.drafters.model import DrafterModel
from dspark.target.decoder import Decoder
from dspark.train.blocks import BlockBatch, draw_anchors, make_batch, slot_mask
from dspark.train.config import TrainConfig
from dspark.train.data import Sequence
from dspark.train.distributed import Processes
from dspark.train.features import FeatureSource
from dspark.train.forecast import Forecast
from dspark.train.losses import BlockLoss, LossWeights, block_loss, slot_weights
from dspark.train.order import SequenceOrder
from dspark.train.run_log import LengthWatch, RunLog, RunningMean
from dspark.train.states import (
    HEAD,
    load_moments,
    load_weights,
    mean_weights,
    own_weights,
    read_state,
    write_state,
)
from dspark.train.trainable import trainable

__all__ = ["Trainer"]


class Trainer:
    """Trains `model` against `target` on `sequences`; evaluates on `held_out`. Both move to the processes' device.

    What a step sees depends on (seed, step) alone, so a resumed run repeats the uninterrupted one. A run that goes on
    from another's state on the same sequences begins where that one ended in their order, not with those that it has
    seen; on others it begins with an epoch, so that it draws all of them.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: DrafterModel,
        target: Decoder,
        sequences: list[Sequence],
        held_out: list[Sequence],
        processes: Processes | None = None,
    ) -> None:
        self.processes = processes or Processes(torch.device("cpu"))
        self.device = self.processes.device
        if self.processes.count > config.sequences_per_step:
            raise DSparkError(
                f"{self.processes.count} processes need a sequence each: set sequences_per_step to at least that, "
                f"it is {config.sequences_per_step}"
            )
        target.to(self.device)
        self.config, self.model, self.form = config, model.to(self.device), trainable(model)
        self.order = SequenceOrder(sequences, config.seed, config.sequences_per_step)
        self.held_out = held_out
        directory = Path(config.feature_dir) if config.feature_dir else Path(config.output) / "features"
        self.features = FeatureSource(
            target, model.config.taps, config.features, directory, self.processes.rank
        )
        self.held_out_features = FeatureSource(target, model.config.taps, "memory")
        self.dtype = getattr(torch, config.dtype)
        model.lm_head.to(self.dtype)  # frozen: cast once, not at every step
        self.output_rows = target.lm_head.weight[model.vocab].to(self.dtype)  # [Vd, H]
        self.draft_ids = torch.full((model.config.vocab_size,), -1, device=self.device)
        self.draft_ids[model.vocab] = torch.arange(len(model.vocab), device=self.device)
        self.weights = LossWeights(
            config.ce, config.l1, config.confidence, config.kl, config.regression, config.decay
        )
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        head = [p for n, p in trained if n.startswith(HEAD)]
        body = [p for n, p in trained if not n.startswith(HEAD)]
        groups = [{"params": body, "scale": 1.0}, {"params": head, "scale": config.head_lr_scale}]
        self.optimizer = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=config.lr,
            betas=(0.9, 0.98),
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.step, self.blocks = 0, 0
        self.averaged_steps: list[int] = []
        self.running = RunningMean()
        self.stop_requested = False  # `run` then saves behind the step that it is in, and ends
        self.output = Path(config.output)
        self.log = RunLog(self.output, config.tensorboard and self.processes.is_first)

    def draw(self, step: int) -> list[tuple[Sequence, Tensor]]:
        """The sequences of a step, and in each anchors drawn at random."""
        generator, count = self.order.generator(step), self.config.anchors_per_sequence
        return [(s, draw_anchors(s, count, generator)) for s in self.order.drawn(step)]

    def batch(self, step: int) -> BlockBatch:
        """All blocks of a step, whichever process works through them."""
        return self._gather(self.draw(step))

    def _gather(self, drawn: Seq[tuple[Sequence, Tensor]]) -> BlockBatch:
        sequences, anchors = zip(*drawn, strict=True)
        return make_batch(sequences, self.features(sequences), anchors, self.form.slots).to(self.device)

    def loss(
        self, batch: BlockBatch, total_weight: float | None = None
    ) -> tuple[BlockLoss, Tensor, Tensor, Tensor]:
        """The loss of a batch, with its draft logits [n, gamma, Vd] and `target_probabilities`."""
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            hidden, logits, confidence = self.form.forward(batch)
        with torch.no_grad():
            p_target, rows = self.target_probabilities(batch)
        labels = self.draft_ids[batch.tokens[:, 1:]]
        loss = block_loss(
            logits, p_target, labels, batch.mask, self.weights, confidence, hidden, batch.last_hidden, rows,
            total_weight,
        )  # fmt: skip
        return loss, logits, p_target, rows

    def target_probabilities(self, batch: BlockBatch) -> tuple[Tensor, Tensor]:
        """p_t of the draft vocabulary [R, Vd], exact over the full vocabulary, and each slot's row [n, gamma].

        Neighbouring anchors share label positions: each is computed once.
        """
        n, gamma = batch.mask.shape
        counts, slots = torch.tensor(batch.counts), torch.arange(gamma, device=self.device)
        # Global index of the row that predicts each slot; slots past the end stay inside their sequence.
        ends = torch.repeat_interleave(torch.tensor(batch.seq_lens), counts).to(self.device)
        within = (batch.anchors[:, None] + slots).minimum(ends[:, None] - 1)
        at = batch.starts[:, None] + within
        rows, inverse = at.flatten().unique(return_inverse=True)
        first = torch.zeros(len(rows), dtype=torch.int64, device=self.device)
        first[inverse] = torch.arange(n * gamma, device=self.device)
        hidden = batch.last_hidden.flatten(0, 1)[first].to(self.dtype)
        logits = (hidden @ self.output_rows.T).float() - batch.log_normalizer.flatten()[first][:, None]
        return logits.exp_().to(self.dtype), inverse.unflatten(0, (n, gamma))

    def train_step(self) -> dict[str, float]:
        """One optimiser step.

        The processes share its sequences, each works through its own in `accumulate` parts, and all gradients
        add up to those of the whole step: every part's loss is divided by the weight of all.
        """
        lr = self.config.lr_at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["scale"]
        drawn = self.draw(self.step)
        gamma = self.form.slots
        masks = torch.cat([slot_mask(anchors, len(s.token_ids), gamma) for s, anchors in drawn])
        total_weight = max(1e-9, float((masks * slot_weights(gamma, self.config.decay)).sum()))
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        sums = self._backward(self.processes.share(drawn), total_weight)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.processes.add_up([*gradients, *sums.values()])
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        self.step += 1
        self.blocks += len(masks)
        covered = float(sums.pop("covered")) / max(1, int(masks[:, 0].sum()))
        return {**{k: float(v) for k, v in sums.items()}, "lr": lr, "overlap1": covered}

    def _backward(self, drawn: Seq[tuple[Sequence, Tensor]], total_weight: float) -> dict[str, Tensor]:
        """Gradients of these sequences' blocks; the sums of their loss, its terms and the first slot's overlap."""
        sums: dict[str, Tensor] = {}
        for part in _parts(drawn, min(self.config.accumulate, len(drawn))):
            loss, *_ = self.loss(self._gather(part), total_weight)
            loss.total.backward()
            found = {"loss": loss.total.detach(), **loss.terms, "covered": loss.overlap[:, 0].sum()}
            sums = {k: v + sums[k] if sums else v.float() for k, v in found.items()}
        return sums

    @torch.no_grad()
    def evaluate(self, max_sequences: int = 64) -> dict[str, Any]:
        """See `Forecast.measures`; of anchors drawn the same way each time."""
        self.model.eval()
        forecast = Forecast()
        for at in range(0, min(max_sequences, len(self.held_out)), 8):
            part = self.held_out[at : at + 8]
            generator = torch.Generator().manual_seed(at)
            anchors = [draw_anchors(s, 64, generator) for s in part]
            features = self.held_out_features(part)
            batch = make_batch(part, features, anchors, self.model.config.block_size).to(self.device)
            loss, *outcome = self.loss(batch)
            forecast.add(loss.overlap, batch.mask, *outcome)
        return forecast.measures()

    def run(self) -> Iterator[dict[str, Any]]:
        """Train to `config.steps` or until `stop_requested`, saving as it goes; the first process yields log records.

        Raises:
            DSparkError: another process resumed at another step.
        """
        self._synchronize()
        if self.processes.is_first:
            self.log.cut(self.step)
        started, blocks = time.perf_counter(), self.blocks
        watch = LengthWatch()
        while self.step < self.config.steps:
            self.running.add(self.train_step())
            last = self.step == self.config.steps
            if self.step % self.config.eval_every == 0 or last:
                mean = self.running.take()
                if self.processes.is_first:
                    rate = (self.blocks - blocks) / (time.perf_counter() - started)
                    progress = {"step": self.step, "blocks": self.blocks, "blocks_per_s": rate}
                    record = {**progress, **mean, **self.evaluate()}
                    self.log.write(record)
                    watch.see(record)
                    yield record
                started, blocks = time.perf_counter(), self.blocks
            stopping = self.stop_requested  # which may be set at any time: read once
            if self.step % self.config.save_every == 0 or last or stopping:
                self.save()
            if stopping:
                break
        self.processes.wait()

    def _synchronize(self) -> None:
        """All processes start from the first one's weights, at one step."""
        if not self.processes.agree(self.step):
            raise DSparkError(
                f"not all processes found the state of step {self.step} in {self.output}: they need a file system "
                "that all of them see"
            )
        self.processes.copy_first(own_weights(self.model).values())

    def start_from(self, state: dict[str, Any], path: Path) -> None:
        """Take the weights, and the optimiser's moments where they are known, of another run; see `read_start`.

        Its place in the order of sequences counts only where the order is the same. States of older versions do not
        say what theirs was: it counts as another one.
        """
        load_weights(self.model, state, path)
        load_moments(self.optimizer, self.model, state.get("moments", {}))
        self.blocks = state.get("blocks", 0)
        if state.get("order") == self.order.digest:
            self.order.steps_before = state["step"] + state["steps_before"]

    def save(self) -> None:
        """Write the resume state, and features that are not on disk yet; replaced atomically."""
        self.features.flush()
        if not self.processes.is_first:
            return
        state = {
            "model": own_weights(self.model),
            "mask_token_id": self.model.config.mask_token_id,
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "steps_before": self.order.steps_before,
            "order": self.order.digest,
            "blocks": self.blocks,
            "running": self.running.state,
        }
        write_state(self.output / "state.pt", state)

    def average(self, paths: Seq[Path]) -> None:
        """Take the mean of the weights in several resume states: what a longer decay of the learning rate does."""
        states = [read_state(path) for path in paths]
        for state, path in zip(states, paths, strict=True):
            load_weights(self.model, state, path)
        self.model.load_state_dict(mean_weights(states), strict=False)
        self.step, self.blocks = states[-1]["step"], states[-1]["blocks"]
        self.averaged_steps = [state["step"] for state in states]

    def resume(self) -> bool:
        """Continue from the output directory's state, if it has one."""
        path = self.output / "state.pt"
        if not path.exists():
            return False
        state = read_state(path)
        load_weights(self.model, state, path)
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.blocks = state["step"], state["blocks"]
        self.order.steps_before = state.get("steps_before", 0)
        self.running = RunningMean(state.get("running"))
        return True


def _parts(items: Seq[Any], count: int) -> Iterator[Seq[Any]]:
    """`items` cut into `count` runs as equal as possible."""
    edges = [i * len(items) // count for i in range(count + 1)]
    return (items[a:b] for a, b in pairwise(edges))
