"""The programs of README and of docs/, made whole by the names that they leave open."""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from support import console

TOP = Path(__file__).parents[2]
# What a page calls a model, data and the like.
OPEN_NAMES = """
import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import mpistrat as ms

GLOBAL, STEPS = 8, 4
dataset = TensorDataset(torch.linspace(-1, 1, 160).reshape(32, 5), torch.arange(32) % 3)
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


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        language: the word after the fence: "python", "bash", "console", ….
        is_saved: whether the reader saves it as a file (`support.console`).
    """

    language: str
    text: str
    is_saved: bool

    def commands(self) -> list[str]:
        """Its lines without prompts, comments and blank ones, for a block of the shell."""
        lines = (re.sub(r"^\$ |(^|\s+)#.*", "", line) for line in self.text.splitlines())
        return [line for line in lines if line]


def blocks_of(page: str | Path) -> list[Block]:
    """The fenced blocks of a page, without directives of Sphinx.

    Args: page: its path, below the project's folder or whole.
    """
    text = (TOP / page).read_text(encoding="utf-8")
    files = [step for step in console.steps(text) if isinstance(step, console.SavedFile)]
    saved = {file.text for file in files}
    fences = re.findall(r"^( *)```(.*)\n((?s:.*?))^\1```$", text, re.MULTILINE)
    return [
        Block(language, textwrap.dedent(block), block in saved)
        for _, language, block in fences
        if not language.startswith("{")
    ]


def program_of(page: str, before: str = "", after: str = "") -> str:
    """All programs of a page as one, between lines that it does not show."""
    return "\n".join([OPEN_NAMES, before, *programs_of(page), after])


def programs_of(page: str | Path) -> list[str]:
    """The Python programs that a page shows. Args: page: its path, below the project's folder or whole."""
    return [block.text for block in blocks_of(page) if block.language == "python"]


def pattern_of(shown: str) -> str:
    """A regular expression for an output like one that a page shows: with other numbers, and other ends of lines.

    Args: shown: the page's output; … stands for other characters of a word.
    """
    number = r"\d+(?:\\\.\d+)?"
    literal = [re.escape(word) for word in shown.split()]
    words = [re.sub(number, r"\\d+(?:\\.\\d+)?", word) for word in literal]
    return r"\s+".join(words).replace("…", r"\S*")


def prose_of(page: str | Path) -> str:
    """A page without its fenced blocks. Args: page: its path, below the project's folder or whole."""
    text = (TOP / page).read_text(encoding="utf-8")
    return re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)
