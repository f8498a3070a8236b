"""Several processes take the step that one would take."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import shared_steps
import torch

from dspark.core import DSparkError
from dspark.testing import tiny_decoder
from dspark.train.data import Sequence
from dspark.train.distributed import Processes, join_processes
from dspark.train.features import FeatureSource

METHODS = ("dspark", "dflash", "eagle3", "mtp")
COUNT = 2
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes left their weights and the run's output, a directory per method."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    directory = tmp_path_factory.mktemp("together")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(COUNT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, shared_steps.__file__, str(directory), *METHODS]
    running = [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(COUNT)
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    assert all(process.returncode == 0 for process in running), "\n".join(errors)
    return directory


@pytest.mark.parametrize("method", METHODS)
def test_two_processes_equal_one(method: str, together: Path, tmp_path: Path) -> None:
    alone = shared_steps.shared_trainer(tmp_path, method, Processes(CPU))
    (record,) = alone.run()
    again = shared_steps.shared_trainer(
        tmp_path, method, Processes(CPU), seed=7, steps=shared_steps.STEPS + 1
    )
    again.resume()
    again.train_step()
    ranks = [torch.load(together / f"{method}-{rank}.pt", weights_only=True) for rank in range(COUNT)]
    for name, expected in alone.model.state_dict().items():
        torch.testing.assert_close(ranks[0]["trained"][name], expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            ranks[0]["resumed"][name], again.model.state_dict()[name], atol=1e-5, rtol=1e-5
        )
        for kind in ("trained", "resumed"):
            assert torch.equal(ranks[1][kind][name], ranks[0][kind][name]), f"{name} drifts apart"
    (shared,) = ranks[0]["records"]
    assert shared["blocks"] == record["blocks"]
    for name in ("loss", "ce", "l1", "overlap1", "tau_sampled"):
        assert shared[name] == pytest.approx(record[name], rel=1e-4)


def test_one_process_writes_and_all_keep_their_features(together: Path) -> None:
    for method in METHODS:
        assert len((together / method / "log.jsonl").read_text().splitlines()) == 1
        state = torch.load(together / method / "state.pt", weights_only=True)
        assert state["step"] == shared_steps.STEPS
        found = {path.name for path in (together / method / "features").iterdir()}
        assert {"index.json", "index-1.json"} <= found


class Rank(Processes):
    """One of three processes that do not exist: gradients stay its own."""

    def __init__(self, rank: int) -> None:
        super().__init__(CPU)
        self.rank, self.count = rank, 3

    def add_up(self, tensors: object) -> None:
        pass


@pytest.mark.parametrize("method", ["dspark", "dflash", "mtp"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_of_the_shares_add_up(method: str, accumulate: int, tmp_path: Path) -> None:
    def gradients(processes: Processes) -> dict[str, torch.Tensor]:
        run = shared_steps.shared_trainer(tmp_path, method, processes, features="compute", max_grad_norm=1e9)
        run.config.__dict__["accumulate"] = accumulate
        run.train_step()
        return {n: p.grad for n, p in run.model.named_parameters() if p.grad is not None}

    whole, shares = gradients(Processes(CPU)), [gradients(Rank(rank)) for rank in range(3)]
    assert whole
    for name, expected in whole.items():
        torch.testing.assert_close(sum(g[name] for g in shares), expected, atol=1e-5, rtol=1e-5)


def test_shares_are_runs_as_equal_as_possible() -> None:
    shares = [list(Rank(rank).share(range(8))) for rank in range(3)]
    assert [item for share in shares for item in share] == list(range(8))
    assert sorted(map(len, shares)) == [2, 3, 3]


def test_each_process_needs_a_sequence(tmp_path: Path) -> None:
    with pytest.raises(DSparkError, match="3 processes need a sequence each: set sequences_per_step"):
        shared_steps.shared_trainer(tmp_path, "dspark", Rank(0), sequences_per_step=2)


def test_several_processes_without_accelerate_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(DSparkError, match=r"2 processes were launched.*pip install accelerate"):
        join_processes()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert join_processes("cpu").count == 1


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DSparkError, match="finds no GPU here; set device=cpu"):
        join_processes("cuda")
    assert join_processes("auto").device == CPU


def test_writers_read_what_the_others_wrote(tmp_path: Path) -> None:
    target = tiny_decoder(dtype=torch.float32)
    sequences = [Sequence(list(range(start, start + 9)), 3) for start in range(4)]
    first, second = (FeatureSource(target, (0,), "disk", tmp_path, writer) for writer in (0, 1))
    first(sequences[:2])
    second(sequences[2:])
    first.flush()
    second.flush()
    assert not second.missing(sequences)
    assert first.missing(sequences) == sequences[2:]
    first.flush()
    assert not first.missing(sequences)
    later = FeatureSource(target, (0,), "disk", tmp_path)
    assert not later.missing(sequences)
    more = Sequence([5] * 9, 3)
    later([more])
    later.flush()
    assert not FeatureSource(target, (0,), "disk", tmp_path, 1).missing([*sequences, more])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU")
@pytest.mark.parametrize("method", ["dspark", "dflash", "eagle3", "mtp"])
def test_a_gpu_trains_as_the_cpu_does(method: str, tmp_path: Path) -> None:
    states = []
    for device in ("cpu", "cuda"):
        run = shared_steps.shared_trainer(tmp_path / device, method, join_processes(device))
        run.form.warm_start(run.features.target, run.order.sequences)
        list(run.run())
        assert run.device.type == device
        states.append({n: v.cpu() for n, v in run.model.state_dict().items()})
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, atol=1e-3, rtol=1e-3)
