"""Calls of torch.distributed as contestants."""

import numpy as np

from mpistrat.tools.bench.arguments import TORCH_CALLS
from mpistrat.tools.bench.torch_collectives import CALLS, Call, compare_call


def test_the_command_line_names_every_call() -> None:
    assert tuple(CALLS) == TORCH_CALLS


class Copy(Call):
    def __call__(self) -> None:
        self.received.copy_(self.sent)

    def expected(self) -> np.ndarray:
        return self.operand(self.rank, self.count)


class BrokenCopy(Copy):
    def __call__(self) -> None:
        super().__call__()
        self.received[:3] += 1


def test_wrong_elements_are_counted() -> None:
    calls = {"gloo": Copy(None, 1024), "mpistrat": BrokenCopy(None, 1024)}
    row = compare_call("copy", calls, num_rounds=2)
    assert (row["call"], row["bytes"], row["wrong"]) == ("copy", 1024, 3)
    assert row["gloo / mpistrat"] == row["gloo us"] / row["mpistrat us"]
    assert {name: len(times) for name, times in row["samples"].items()} == dict.fromkeys(calls, 2)
