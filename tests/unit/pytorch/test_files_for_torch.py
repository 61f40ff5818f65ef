"""A program that has no mpistrat loads what a mirrored module was saved, exported or scripted to."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch.optim.swa_utils import AveragedModel

import mpistrat as ms
from support.training.models_with_buffers import Net, trained

TESTS = Path(__file__).parents[2]

# As a program without mpistrat loads what was saved. `models` are of `support.training.models_with_buffers`.
LOADING = """
import sys
sys.modules["mpistrat"] = None
import pickle, torch
from torch.nn import BatchNorm1d, Linear, Sequential, SyncBatchNorm
from torch.optim.swa_utils import AveragedModel
from support.training.models_with_buffers import Net

x, expected = torch.load("expected.pt")
for name in ("net", "synchronized", "averaged"):
    classes = [Net, Linear, BatchNorm1d, SyncBatchNorm, AveragedModel, set]
    with torch.serialization.safe_globals(classes):
        safe = torch.load(name + ".pt", weights_only=True)
    for model in safe, torch.load(name + ".pt", weights_only=False):
        torch.testing.assert_close(model.eval()(x), expected[name])
        model.train()(x).sum().backward()
optimizer = torch.load("optimizer.pt", weights_only=False)
optimizer.step()
for model in torch.export.load("exported.pt2").module(), torch.jit.load("scripted.pt"):
    torch.testing.assert_close(model(x), expected["net"])
print("loaded")
"""


def test_a_program_without_mpistrat_loads_it(tmp_path: Path) -> None:
    """Also what is exported and scripted."""
    x = torch.randn(3, 4)
    expected = {}
    for name, make in (
        ("net", Net),
        ("synchronized", lambda: ms.convert_sync_batchnorm(Net())),
    ):
        strategy = ms.MirroredStrategy(devices=["cpu:0", "cpu:1"], gradients="sum")
        model, optimizer = trained(strategy, make)
        torch.save(model, tmp_path / f"{name}.pt")
        expected[name] = model.eval()(x).detach()
        if name == "net":
            torch.save(optimizer, tmp_path / "optimizer.pt")
            torch.save(AveragedModel(model), tmp_path / "averaged.pt")
            expected["averaged"] = expected["net"]
            torch.jit.save(torch.jit.script(model), tmp_path / "scripted.pt")
            torch.export.save(torch.export.export(model, (x,)), tmp_path / "exported.pt2")
    torch.save([x, expected], tmp_path / "expected.pt")
    command = [sys.executable, "-c", LOADING]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, timeout=120, capture_output=True, text=True
    )
    assert ended.stdout == "loaded\n", ended.stderr
