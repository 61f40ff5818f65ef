"""`mpistrat verify`: the recording that one rank makes of a program."""

import json
import pickle
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from mpistrat.tools.verify.recording import Recording

TORCH = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.LSTM(4, 4, 2, dropout=0.5)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.BatchNorm2d(4).eval()
        self.last = nn.Linear(4, 1, bias=False)

    def forward(self, x):
        y = self.last(nn.functional.dropout(self.norm(self.rows(x)[0])))
        return y + torch.randn(()) if self.noisy else y

torch.manual_seed(0)
model = Model()
model.last.weight.register_hook(lambda gradient: 2 * gradient)
optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
x = torch.arange(24.0).reshape(6, 4)
for step in range(4):
    model.noisy = step == 1
    optimizer.zero_grad()
    loss = model(x=x[: 6 - step]).square().sum()
    loss.backward()
    optimizer.step(lambda: loss) if step == 2 else optimizer.step()
raise AssertionError("it goes on after its last step")
"""

FILES = """
import numpy as np
import mpistrat as ms

strategy = ms.MultiWorkerMirroredStrategy()
dataset = ms.input.FileDataset(["3", "4"], lambda name: [np.array(float(name))] * 2, 2)
with strategy.scope():
    total, last = ms.Variable(np.array(0.0)), ms.Variable(np.array(0.0))
for batch in strategy.experimental_distribute_dataset(dataset):
    total.assign_add(batch.sum())
    last.assign(batch[-1])
"""


def recorded(folder: Path, program: str, **kinds: bool) -> tuple[Recording, str]:
    """Return the recording of a program, and the last line of its errors."""
    (folder / "files").mkdir(parents=True)
    script = folder / "files" / "train.py"
    script.write_text(program)
    asked = {"program": [str(script)], "steps": 3, "folder": str(folder), **kinds}
    command = [sys.executable, "-m", "mpistrat.tools.verify.rank_process", json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    recording: Recording = pickle.loads((folder / "0.recording").read_bytes())
    return recording, done.stderr.rpartition("\n")[0]


def test_steps_of_torch(tmp_path: Path) -> None:
    found, errors = recorded(tmp_path / "one", TORCH)
    assert (len(found.steps), errors) == (3, "")
    assert [len(step.examples) for step in found.steps] == [6, 5, 4]
    assert [step.inputs for step in found.steps] == [sum(range(size)) for size in (24, 20, 16)]
    assert [step.draws for step in found.steps] == [False, True, False]
    assert {step.calls for step in found.steps} == {4}
    assert found.norms == {"BatchNorm1d"}
    assert found.hooks == {"Model.last.weight"}
    assert found.switched_off
    assert found.epsilon == np.finfo(np.float32).eps
    key = next(key for key, label in found.labels.items() if label == "Model.last.weight")
    for step in found.steps:
        ((_, weight),) = step.losses
        assert weight == 1.0
        assert step.rates == [0.25]
        moved = step.tensors["before"][key].values - step.tensors["values"][key].values
        np.testing.assert_allclose(moved, 0.25 * step.tensors["gradients"][key].values, rtol=1e-4)
        assert step.tensors["buffers"]["Model.norm.num_batches_tracked"].exact


def test_the_control_differs_by_rounding(tmp_path: Path) -> None:
    found, errors = recorded(tmp_path / "one", TORCH, shaken=True)
    assert errors == ""
    after, before = found.steps[0].tensors["values"], found.steps[1].tensors["before"]
    changed = [key for key in after if after[key].digest != before[key].digest]
    assert len(changed) > len(after) / 2  # zeros stay
    for key, sample in after.items():
        np.testing.assert_allclose(before[key].values, sample.values, rtol=1e-6)


def test_torch_overwrites_no_file_of_the_user(tmp_path: Path) -> None:
    kept = tmp_path / "model.pt"
    kept.write_text("mine")
    time.sleep(0.05)  # clocks of file systems are coarse
    program = """
import io, torch
torch.save(1, io.BytesIO())
torch.save(1, "new.pt")
torch.save(1, "new.pt")
torch.save(1, "../../model.pt")
"""
    found, _ = recorded(tmp_path / "one", program)
    assert (found.refused, found.outside) == (str(kept), set())
    assert kept.read_text() == "mine"


def test_rounds_of_a_program_that_reads_files(tmp_path: Path) -> None:
    found, errors = recorded(tmp_path / "one", FILES)
    assert errors == ""
    assert found.by_files
    values = [[*step.tensors["values"].values()] for step in found.steps]
    assert [[sample.norm for sample in samples] for samples in values] == [[6.0, 3.0], [14.0, 4.0]]


def test_servers_are_refused(tmp_path: Path) -> None:
    program = "import mpistrat as ms\nms.ParameterServerStrategy(num_ps=1)"
    _, errors = recorded(tmp_path / "one", program)
    assert errors == "mpistrat verify compares no jobs with parameter servers"
