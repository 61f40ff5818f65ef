"""The programs of README and of docs/, made whole by the names that they leave open."""

import re
from pathlib import Path

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
loader = DataLoader(dataset, batch_size=GLOBAL, shuffle=True, drop_last=True)


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
    return loss
"""


def program_of(page: str, before: str = "", after: str = "") -> str:
    """All programs of a page as one, between lines that it does not show."""
    return "\n".join([OPEN_NAMES, before, *programs_of(page), after])


def programs_of(page: str | Path) -> list[str]:
    """The Python programs that a page shows. Args: page: its path, below the project's folder or whole."""
    text = (TOP / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
