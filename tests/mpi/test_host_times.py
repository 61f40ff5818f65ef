"""How benchmarks/gpu_training.py takes a step apart: nothing is counted twice, and nothing is left out."""

from pathlib import Path

import pytest
import torch
from mpi4py import MPI

from mpistrat.tools.bench.models.model import Model
from mpistrat.tools.bench.work import Work

WORLD = MPI.COMM_WORLD
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODEL = Model(lambda: torch.nn.Linear(4, 3), (4,), 3)


def test_the_parts_of_a_step_are_the_whole(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import host_times

    monkeypatch.setattr(host_times, "STEPS_OF_TRIALS", 4)
    backward = torch.autograd.backward
    of_host = host_times.host_ms(Work(MODEL, 2, WORLD.rank), 3, 3, lambda: None)
    assert set(of_host) == {"mpistrat", "plain PyTorch"}
    for row in of_host.values():
        whole = row.pop("host ms")
        assert tuple(row) == host_times.PARTS
        assert sum(row.values()) == pytest.approx(whole, rel=0.1, abs=0.1)
        for part in ("input", "forward", "backward by torch", "optimizer"):
            assert 0 < row[part] < whole, (part, row)
    assert of_host["plain PyTorch"]["reduction"] == 0
    assert (of_host["mpistrat"]["reduction"] > 0) == (WORLD.size > 1), of_host
    assert torch.autograd.backward is backward
