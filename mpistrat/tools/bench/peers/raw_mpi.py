"""mpi4py's buffer calls, in the loops that people write with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from mpistrat.tools.bench.work import Step, Work


def training_steps(work: Work) -> dict[str, Step]:
    return {
        "raw MPI, flat buffer": _copied(work),
        "raw MPI, .grad in the buffer": _in_place(work),
    }


def _with_flat_buffer(work: Work) -> tuple[torch.nn.Module, torch.optim.Optimizer, np.ndarray, Any]:
    """Module, optimizer, a buffer for all gradients, and pairs of a parameter's part of it and the parameter."""
    module, optimizer = work.build()
    parameters = list(module.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    flat = np.zeros(sum(sizes), np.float32)
    parts = torch.from_numpy(flat).split(sizes)
    pairs = [(part.view(p.shape), p) for part, p in zip(parts, parameters, strict=True)]
    return module, optimizer, flat, pairs


def _copied(work: Work) -> Step:
    """Gradients into one flat buffer, Allreduce, and back."""
    module, optimizer, flat, pairs = _with_flat_buffer(work)
    size = MPI.COMM_WORLD.size

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = work.loss(module)
        loss.backward()
        for part, parameter in pairs:
            part.copy_(parameter.grad)
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, flat)
        np.divide(flat, size, out=flat)
        for part, parameter in pairs:
            parameter.grad.copy_(part)
        optimizer.step()
        return loss.detach()

    return step


def _in_place(work: Work) -> Step:
    """The best of such loops: every `.grad` is a view of the buffer that MPI reduces."""
    module, optimizer, flat, pairs = _with_flat_buffer(work)
    size = MPI.COMM_WORLD.size
    for part, parameter in pairs:
        parameter.grad = part

    def step() -> torch.Tensor:
        flat.fill(0)
        loss = work.loss(module)
        (loss / size).backward()
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, flat)
        optimizer.step()
        return loss.detach()

    return step


def all_reduces(values: np.ndarray) -> dict[str, Callable[[], np.ndarray]]:
    result, in_place = values.copy(), values.copy()

    def into_another() -> np.ndarray:
        MPI.COMM_WORLD.Allreduce(values, result)
        return result

    def over_itself() -> np.ndarray:
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, in_place)
        return in_place

    return {"MPI": into_another, "MPI, in place": over_itself}
