"""mpi4py's buffer calls, in the loops that people write with them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from mpi4py import MPI

from mpistrat.tools.bench.work import Step, Work


def training_steps(work: Work) -> dict[str, Step]:
    return {
        "raw MPI, flat buffer": _copied(work),
        "raw MPI, .grad in the buffer": _in_place(work),
    }


def _copied(work: Work) -> Step:
    """Gradients into one flat buffer, Allreduce, and back."""
    module, optimizer = work.build()
    parameters = list(module.parameters())
    flat = np.empty(sum(p.numel() for p in parameters), np.float32)
    pieces = torch.from_numpy(flat).split([p.numel() for p in parameters])
    size = MPI.COMM_WORLD.size

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = work.loss(module)
        loss.backward()
        for piece, parameter in zip(pieces, parameters, strict=True):
            piece.copy_(parameter.grad.view(-1))  # type: ignore[union-attr]
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, flat)
        np.divide(flat, size, out=flat)
        for piece, parameter in zip(pieces, parameters, strict=True):
            parameter.grad.view(-1).copy_(piece)  # type: ignore[union-attr]
        optimizer.step()
        return loss.detach()

    return step


def _in_place(work: Work) -> Step:
    """The best of such loops: every `.grad` is a view of the buffer that MPI reduces."""
    module, optimizer = work.build()
    parameters = list(module.parameters())
    flat = np.zeros(sum(p.numel() for p in parameters), np.float32)
    whole = torch.from_numpy(flat)
    pieces = whole.split([p.numel() for p in parameters])
    for piece, parameter in zip(pieces, parameters, strict=True):
        parameter.grad = piece.view(parameter.shape)
    size = MPI.COMM_WORLD.size

    def step() -> torch.Tensor:
        whole.zero_()
        loss = work.loss(module)
        (loss / size).backward()
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, flat)
        optimizer.step()
        return loss.detach()

    return step


def all_reduces(given: np.ndarray) -> dict[str, Callable[[], np.ndarray]]:
    result, in_place = given.copy(), given.copy()

    def into_another() -> np.ndarray:
        MPI.COMM_WORLD.Allreduce(given, result)
        return result

    def over_itself() -> np.ndarray:
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, in_place)
        return in_place

    return {"MPI": into_another, "MPI, in place": over_itself}
