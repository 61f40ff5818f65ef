"""How benchmarks/gpu_training.py takes a step of the host apart: nothing is counted twice, and nothing is left out."""

import itertools
import types
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

from mpistrat.pytorch import hooks
from mpistrat.tools.bench.models import Model
from mpistrat.tools.bench.work import Work

WORLD = MPI.COMM_WORLD
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODEL = Model(lambda: torch.nn.Linear(4, 3), (4,), 3)
STEPS = 2


def test_the_parts_of_a_step_are_the_whole(monkeypatch):
    """By a clock that goes on by one whenever it is read: once before a step's first part, and once after its last."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import host_times

    ticks = map(float, itertools.count())
    clock = types.SimpleNamespace(perf_counter=lambda: next(ticks))
    monkeypatch.setattr(host_times, "time", clock)
    monkeypatch.setattr(host_times, "STEPS_OF_TRIALS", 4)
    backward = hooks.original_backward
    of_host = host_times.host_ms(Work(MODEL, 2, WORLD.rank), STEPS, 1, lambda: None)
    assert set(of_host) == {"mpistrat", "plain PyTorch"}
    for row in of_host.values():
        whole = row.pop("host ms")
        assert tuple(row) == host_times.PARTS
        assert sum(row.values()) == pytest.approx(whole - 2 * 1000)
        for part in ("input", "forward", "backward by torch", "optimizer"):
            assert 0 < row[part] < whole, (part, row)
    assert of_host["plain PyTorch"]["reduction"] == 0
    assert (of_host["mpistrat"]["reduction"] > 0) == (WORLD.size > 1), of_host
    assert hooks.original_backward is backward
