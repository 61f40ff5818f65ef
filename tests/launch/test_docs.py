"""The programs of README and of docs/ run as they stand, after a few lines for the names that they leave open."""

import re
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
# What a page calls a model, data and the like.
OPEN_NAMES = """
import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import mpistrat as ms

GLOBAL, STEPS = 8, 4
dataset = TensorDataset(torch.randn(32, 5), torch.randint(3, (32,)))
loader = DataLoader(dataset, batch_size=GLOBAL, shuffle=True)


def Net():
    return torch.nn.Linear(5, 3)


def build():
    global model, optimizer
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer


def per_example_loss(output, y):
    return F.cross_entropy(output, y, reduction="none")


def step(batch):
    x, y = batch
    loss = ms.compute_average_loss(per_example_loss(model(x), y), global_batch_size=GLOBAL)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
STRATEGY = "strategy = ms.MultiWorkerMirroredStrategy()"
TRAINING = f"""{STRATEGY}
with strategy.scope():
    build()
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
distributed = strategy.experimental_distribute_dataset(loader)
step = 1
"""
# Batches of row numbers.
ROWS = "loader = [np.arange(i, i + 4) for i in range(6)]"
# How many ranks run the programs of a page, and what comes before and after them.
PROGRAMS = {
    "README.md": (2, "", ""),
    "docs/one_copy.md": (2, "", "assert (total.numpy() == 2).all()"),
    "docs/checkpoints.md": (2, TRAINING, "manager.wait()"),
    "docs/preemption.md": (2, STRATEGY, "assert handler.total_run_calls == STEPS"),
    "docs/elastic.md": (2, "", ""),
    "docs/parameter_servers.md": (5, "", ""),
    "docs/parameter_servers_v1.md": (3, ROWS, "main()"),
    "docs/parameter_servers_coordinator.md": (3, "", "main()"),
}


@pytest.mark.parametrize("page", PROGRAMS)
def test_programs_run(launcher, tmp_path: Path, page: str) -> None:
    ranks, before, after = PROGRAMS[page]
    text = (TOP / page).read_text(encoding="utf-8")
    programs = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    program = tmp_path / "program.py"
    program.write_text("\n".join([OPEN_NAMES, before, *programs, after]), encoding="utf-8")
    job = launcher.run_python(ranks, program, forked=True, cwd=tmp_path)
    assert job.returncode == 0, job.output


def test_no_program_is_left_out() -> None:
    pages = [TOP / "README.md", *(TOP / "docs").rglob("*.md")]
    having = {str(page.relative_to(TOP)) for page in pages if "```python" in page.read_text()}
    assert having == {*PROGRAMS, "docs/tpus.md"}  # which needs torch_xla
